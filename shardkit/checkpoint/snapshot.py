"""Saving beside training: the state is copied aside, and a thread does the rest. One save at a time."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardkit.checkpoint import faults, tensors, write
from shardkit.checkpoint.control import Control, LostRank
from shardkit.checkpoint.layout import Chunk
from shardkit.checkpoint.write import Prepared
from shardkit.errors import CheckpointSaveError
from shardkit.log import get_logger

logger = get_logger(__name__)


@dataclass
class Background:
    """The saves of one run that happen beside training. `beside` is a control group that only the thread uses."""

    beside: Control
    _thread: threading.Thread | None = None
    _problem: str | None = None
    _where: Path | None = None
    _on_commit: Callable[[], None] = lambda: None
    _buffers: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)

    def start(self, prepared: Prepared, on_commit: Callable[[], None] = lambda: None) -> None:
        """Copy this rank's pieces aside and begin to save. Training may go on when this returns.

        `on_commit` is called on every rank by the `wait` that finds the save committed.
        """
        assert self._thread is None, "one save at a time: wait first"
        try:
            faults.reach("stage", self.beside.rank)
            prepared.pieces = {
                section: [(chunk, self._copied(section, chunk, tensor)) for chunk, tensor in pieces]
                for section, pieces in prepared.pieces.items()
            }
        except (OSError, RuntimeError, MemoryError) as error:  # told to all ranks where they agree on the writing
            prepared.trouble = error
        self._where, self._on_commit = prepared.request.final, on_commit
        # Not a daemon: the interpreter waits for it, so a save that was begun is committed before the process ends.
        self._thread = threading.Thread(target=self._run, args=(prepared,), name="shardkit-save")
        self._thread.start()

    def _copied(self, section: str, chunk: Chunk, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, which the next save uses again: fresh memory costs more than the copying."""
        buffer = self._buffers.get((section, chunk.name))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[section, chunk.name] = tensors.empty(chunk.dtype, tensor.shape)
        return buffer.copy_(tensor.detach())

    def _run(self, prepared: Prepared) -> None:
        try:
            write.finish(prepared, self.beside)
        except Exception as error:  # told to all ranks by the next `wait`
            self._problem = str(error) or repr(error)

    def is_running(self) -> bool:
        """Whether a save is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self, control: Control) -> None:
        """Until the save under way is committed. Collective; where it failed, every rank raises CheckpointSaveError."""
        if self._thread is None:
            return
        if self._thread.is_alive():
            logger.info("checkpoint: waiting for the save of %s", self._where)
        self._thread.join()
        self._thread, problem, self._problem = None, self._problem, None
        try:
            problems = [text for text in control.gather(problem) if text is not None]
        except LostRank as error:
            raise CheckpointSaveError(f"checkpoint: save of {self._where}: {error}; {problem or ''}") from error
        if problems:
            raise CheckpointSaveError(problems[0])
        self._on_commit()

    def last_words(self) -> None:
        """At the end of the process: wait, without asking other ranks, and log what nobody was there to be told."""
        if self._thread is None:
            return
        self._thread.join()
        if self._problem is not None:
            logger.error("%s", self._problem)
