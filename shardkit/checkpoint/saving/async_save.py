"""Saving in the background: the state is copied, and a thread writes the copy while training continues. One save at a
time.

start     copies what the loop may change at any time: weights, buffers, settings, and everything on a device
thread    copies the optimizer states in host memory, which forward and backward do not change
step      of an optimizer: waits until these copies are done
thread    writes the copies, agrees with the other ranks, commits
wait      before the next save and at the end of the run: raises if the save failed
"""

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardkit.checkpoint import faults
from shardkit.checkpoint.files.layout import Chunk
from shardkit.checkpoint.saving import write
from shardkit.checkpoint.saving.save_request import PreparedSave
from shardkit.checkpoint.states import state, tensors
from shardkit.distributed.control import ControlGroup, LostRank
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.log import get_logger
from shardkit.storage.url import Url

log = get_logger(__name__)


@dataclass(frozen=True)
class _Uncopied:
    """A piece that is still the live tensor, and the tensor's version counter when the save began."""

    section: str
    number: int
    version: int


@dataclass
class AsyncSave:
    """The background saves of one run. `control` is a control group that only the thread uses."""

    control: ControlGroup
    _thread: threading.Thread | None = None
    _is_copied: threading.Event = field(default_factory=threading.Event)
    _step_hooks: list[RemovableHandle] = field(default_factory=list)
    _problem: str | None = None
    _where: str = ""
    _buffers: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def start(
        self, prepared: PreparedSave, optimizers: Sequence[Optimizer] = (), on_commit: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to save this rank's pieces. The loop may continue when this returns.

        The state of `optimizers` in host memory is copied in the background, and their next step waits for the copy.
        Without optimizers, everything is copied before this returns. The thread calls `on_commit`, on every rank, when
        the save is committed.
        """
        assert self._thread is None, "one save at a time: wait first"
        self._where = prepared.request.where
        self._is_copied.clear()
        uncopied: list[_Uncopied] = []
        try:
            faults.reach("stage", self.control.rank)
            may_defer = all(map(_has_step_hooks, optimizers)) and bool(optimizers)
            uncopied = self._copy_first(prepared, may_defer)
        except (OSError, RuntimeError, MemoryError) as error:  # all ranks learn of it when they agree on the write
            prepared.trouble = error
        if uncopied:
            self._step_hooks = [item.register_step_pre_hook(lambda *_: self.wait_until_copied()) for item in optimizers]
        # Not a daemon: the interpreter waits for it, so a save that was begun is committed before the process ends.
        self._thread = threading.Thread(target=self._run, args=(prepared, uncopied, on_commit), name="shardkit-save")
        if isinstance(prepared.request.final, Url):
            _await_before_executors_end(self._thread)
        self._thread.start()

    def _copy_first(self, prepared: PreparedSave, may_defer: bool) -> list[_Uncopied]:
        """Copy the pieces, except those that the thread may copy later. Returns the latter."""
        deferred = []
        for section, pieces in prepared.pieces.items():
            for number, (chunk, tensor) in enumerate(pieces):
                if may_defer and tensor.is_cpu and state.is_changed_by_steps_only(section, chunk.name):
                    deferred.append(_Uncopied(section, number, tensor._version))
                else:
                    pieces[number] = (chunk, self._copied(section, chunk, tensor))
        return deferred

    def _copied(self, section: str, chunk: Chunk, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory. The next save reuses the buffer: touching new memory takes longer than copying."""
        buffer = self._buffers.get((section, chunk.name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[section, chunk.name] = tensors.empty(
                chunk.dtype, tensor.shape, is_touched=not tensor.is_cpu
            )
        return buffer.copy_(tensor.detach())

    def _run(self, prepared: PreparedSave, uncopied: list[_Uncopied], on_commit: Callable[[], None]) -> None:
        try:
            self._copy_rest(prepared, uncopied)
            write.finish(prepared, self.control)
            on_commit()
        except Exception as error:  # the next `wait` raises it on all ranks
            self._problem = str(error) or repr(error)
            atexit.register(self.last_words)  # not earlier: it keeps the copies

    def _copy_rest(self, prepared: PreparedSave, uncopied: list[_Uncopied]) -> None:
        try:
            for item in uncopied:
                pieces = prepared.pieces[item.section]
                chunk, tensor = pieces[item.number]
                pieces[item.number] = (chunk, self._copied(item.section, chunk, tensor))
                if tensor._version != item.version:
                    raise CheckpointError(
                        f"{chunk.name}: the script changed optimizer state while a background save copied it; "
                        "change it before save_state, or save with blocking=True"
                    )
        except (OSError, RuntimeError, MemoryError, CheckpointError) as error:
            prepared.trouble = error
        finally:
            self._is_copied.set()

    def wait_until_copied(self) -> None:
        """Wait until the running save no longer reads the live objects. Returns at once if no save is running."""
        if self._thread is not None:
            self._is_copied.wait()

    def forget(self) -> None:
        """Release the live objects and the copy buffers. A running save continues with the copies that it holds."""
        self.wait_until_copied()
        self._release_optimizers()
        self._buffers.clear()

    def _release_optimizers(self) -> None:
        while self._step_hooks:
            self._step_hooks.pop().remove()

    def wait(self, control: ControlGroup) -> None:
        """Wait until the running save is committed. Collective. If it failed, every rank raises CheckpointSaveError."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            log.info("checkpoint: waiting for the save of %s", self._where)
        self._thread.join()
        self._release_optimizers()
        atexit.unregister(self.last_words)
        self._thread, problem, self._problem = None, self._problem, None
        try:
            problem_of_some = control.decide(problem, _first)
        except LostRank as error:
            own = f"; {problem}" if problem else ""
            raise CheckpointSaveError(f"checkpoint: save of {self._where}: {error}{own}") from error
        if problem_of_some is not None:
            raise CheckpointSaveError(problem_of_some)

    def last_words(self) -> None:
        """At the end of the process: wait without communicating, and log an error that `wait` has not yet raised."""
        if self._thread is None:
            return
        self._thread.join()
        if self._problem is not None:
            log.error("%s", self._problem)


def _has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether torch wrapped its step, as Optimizer.__init__ does. Some classes that wrap an optimizer skip that."""
    return bool(getattr(type(optimizer).step, "hooked", False))


_to_stores: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def _await_before_executors_end(thread: threading.Thread) -> None:
    """Await the thread at interpreter exit, before concurrent.futures stops accepting work.

    The packages behind s3:// and other stores need its executors during a save."""
    _register_wait()
    _to_stores.add(thread)


@cache
def _register_wait() -> None:
    """Actions run in reverse order of registration. There is no public API for this (since Python 3.9)."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(_wait_for_all)


def _wait_for_all() -> None:
    for thread in list(_to_stores):
        thread.join()


def _first(problems: list[str | None]) -> str | None:
    return next((text for text in problems if text is not None), None)
