"""One iteration over a prepared loader: its position, its current batch, and what optimizer steps have used."""

from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from weakref import ReferenceType, WeakMethod, ref

import torch

from shardkit.data.position import Position
from shardkit.data.sources import Piece
from shardkit.distributed import progress
from shardkit.distributed.nested import leaves
from shardkit.errors import UsageError

_yields = count(1)
MOST_READ = 1024
"""Batches read ahead that are counted; micro-batches of a step are fewer."""
MOST_HELD = 16
"""Batches read ahead whose tensors are known again."""
_NONE = Piece(None, samples=0, of_rank=0, is_padded=False, is_last=False)


class Call(WeakMethod):
    """What a loader calls. A weak reference avoids a cycle, so that the workers end as soon as the loader is
    unreferenced. A copy of the loader calls it, too."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Call":
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "pickle: a prepared loader cannot be pickled (it belongs to its Accelerator); pickle the DataLoader before "
            "prepare, or save the loader's state_dict()."
        )


class Batches:
    """The iterator of a loop. After an error it raises UsageError, where a generator would take its epoch for ended: a
    script that catches errors of single batches would lose the rest, and wait with fewer batches than other ranks."""

    def __init__(self, batches: Generator[Any, None, None]) -> None:
        self._batches = batches
        self._error: str | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise UsageError(
                f"data: this loop has ended with an error and has no more batches (got {self._error}); catch errors in "
                "the dataset or in collate_fn, and return another sample there, so that all ranks have equally many "
                "batches."
            )
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            self._error = _in_a_line(error)
            raise

    def close(self) -> None:
        """Leaves the loop, as `break` does."""
        self._batches.close()


def _in_a_line(error: BaseException) -> str:
    """Type and text; of an error in a worker, whose text is the traceback there, its last line."""
    lines = str(error).strip().splitlines() or [""]
    if lines[0].startswith("Caught ") and len(lines) > 1:
        return lines[-1]
    return ": ".join(filter(None, [type(error).__name__, lines[0]]))


@dataclass
class Loop:
    """One iteration over a prepared loader. The current batch is the one that was yielded last."""

    position: Position
    outer: "Loop | None" = None
    """The enclosing loop over the same loader."""
    piece: Piece = _NONE
    """What is known of the current global batch; without the batch, which the script may drop."""
    ends_window: bool = False
    """As `piece.is_last`, unless the script says otherwise of the current batch."""
    last_yield: int = 0
    began: int = field(default_factory=lambda: next(_yields))
    """The value of the yield counter, shared by all loaders, when the loop began."""
    local_samples: int | None = None
    """Rows in this rank's current batch, where a collate_fn may make several of a sample; None where its tensors have
    different lengths."""
    local_total: int = 0
    """Samples of this rank in all its batches so far, as far as their numbers are known."""
    tensors: list[ReferenceType[torch.Tensor]] = field(default_factory=list)
    """The tensors of this rank's current batch."""
    earlier: deque[list[ReferenceType[torch.Tensor]]] = field(default_factory=lambda: deque(maxlen=MOST_HELD))
    """Those of the batches before it, which a script that reads ahead is yet to use."""
    first: list[str] | None = None
    """As `Piece.first`, of the first batch."""
    is_open: bool = True
    is_finished: bool = False
    """Whether it reached the end of its epoch; its position is then the start of the next one."""
    is_unused: bool = False
    """Whether no optimizer step has used the current batch."""
    steps: int = 0
    """Optimizer steps that used its batches."""
    newest_at_step: int = 0
    """`last_yield` of the newest batch of any loader at the last step that used a batch of this loop."""
    ends_with: "list[Loop]" = field(default_factory=list)
    """Loops over other loaders that were at their last batch in the newest step that used a batch of this one."""
    inner: int = 0
    """Number of loops over the same loader begun inside this one."""
    has_inner_ended: bool = False
    """Whether one of them finished after the current batch was yielded."""
    restored_batches: int = 0
    """Batches of its epoch that a restored position has left out; 0 once a micro-batch has used one of its batches."""
    yielded: int = 0
    """Number of its batches so far."""
    micro_batches: int = 0
    """Number of those in `accumulate()` that began with a batch of it as the newest."""
    reads_ahead: bool = False
    """Whether these train on batches before the newest. Else batches without a micro-batch of their own were skipped,
    also where the script keeps them."""
    is_trained_on: bool = False
    """Whether there was a backward."""
    start: Position = field(default_factory=Position)
    start_is: tuple[bool, int] = (False, 0)
    """Whether the start was restored by `load_state_dict`; the number of batches skipped by hand."""
    _first_tensors: list[ReferenceType[torch.Tensor]] = field(default_factory=list)
    """The tensors of its first batch, where it began at a restored position."""
    _is_first_dropped: bool = False
    """Whether the script no longer held these when it had read `restored_batches` more."""
    _read: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_READ))
    """Samples of the batches that were yielded since the last micro-batch."""
    _to_train: list[int] = field(default_factory=list)
    """Of those yielded before the last micro-batch, the ones that the next micro-batches train on."""
    _yielded_before: int = 0
    """`yielded` when the last micro-batch in `accumulate()` began."""
    _began_ahead: bool = False
    """Whether the first of these began with several batches read: the script reads ahead, or has skipped some."""

    def take(self, piece: Piece) -> None:
        """Makes this the current batch."""
        before = self.position
        self.position = Position(before.epoch, before.samples + piece.samples, piece.state, before.order)
        self.piece, self.ends_window = replace(piece, batch=None, state=None), piece.is_last
        self.first = piece.first or self.first
        self.is_unused, self.has_inner_ended = True, False
        self.last_yield = next(_yields)
        self._read.append(piece.samples)
        self.yielded += 1

    def begin_micro_batch(self) -> None:
        """A micro-batch in `accumulate()` begins, with the current batch as the newest."""
        if self.micro_batches:
            self.reads_ahead |= self.yielded == self._yielded_before
        else:
            self._began_ahead = self.yielded > 1
        self.micro_batches, self._yielded_before = self.micro_batches + 1, self.yielded
        ahead = self._ahead
        if self._began_ahead and self.piece.is_last and not self.is_finished and 0 < ahead < MOST_HELD:
            *_, before = [[], *self.earlier][:-ahead]
            self.reads_ahead |= _are_held([*self.earlier][-ahead:]) and not _are_held([before])  # it may keep all

    def refuse_early_end(self) -> None:
        """UsageError where the batches have ended before the last one: only this rank would leave its loop there."""
        if self.yielded and not self.piece.is_last:
            raise UsageError(
                f"data: the dataset or collate_fn raised StopIteration, which ends the epoch on this rank alone (got "
                f"{self.yielded} batches); return another sample where there is none, or make its length the number "
                "of samples."
            )

    def finish(self) -> None:
        """The epoch is over."""
        progress.post("after a loop")
        self.position, self.is_finished = Position(self.position.epoch + 1), True

    def close(self) -> None:
        """It finished or was left. Left where a loop beside it has ended, it is over, too: `zip` of several loaders
        ends with the first, and begins the next epoch of all."""
        self.is_open = False
        if not self.is_finished and any(other.is_finished for other in self.ends_with):
            self.finish()

    def take_trained(self, micro_batches: int) -> int | None:
        """Samples of the batch that a micro-batch trains on; None if that batch was counted before.

        A loop may read several batches before it trains on them, one in each of the next `micro_batches`. Earlier ones
        were skipped or evaluated.
        """
        self._check_skipped(micro_batches)
        if self._read:
            self._to_train = [*self._read][-micro_batches:]
            self._read.clear()
        return self._to_train.pop() if self._to_train else None

    @property
    def remainder(self) -> int:
        """Real samples in the current global batch if it is padded, else -1."""
        return self.piece.samples if self.piece.is_padded else -1

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error before its first batch."""
        return not self.last_yield and not self.is_finished

    def was_a_look(self, trains: bool) -> bool:
        """Whether neither a backward nor a step has used its batches; where it is not known that the loader `trains`,
        whether it was also left at its first batch. (One that has dropped the rest of an epoch, after a load or after
        batches skipped by hand, counts as an epoch.)"""
        is_rest = self.is_finished and self.start.samples > 0
        is_short = self.yielded == 1 and not self.is_finished
        return self.yielded > 0 and (trains or is_short) and not (is_rest or self.is_trained_on or self.steps)

    @property
    def is_at_its_end(self) -> bool:
        """Whether it is at its last batch, and no step has used that."""
        return self.is_open and self.piece.is_last and self.is_unused

    @property
    def ends_micro_batches(self) -> bool:
        """Whether its end, or the script, ends the window with the present micro-batch: not where the script has read
        batches ahead, and further micro-batches train on them."""
        ahead = self._ahead
        may_be = self.reads_ahead and self.piece.is_last and 0 < ahead < MOST_HELD
        return self.ends_window and not (may_be and _are_held([*self.earlier][-ahead:]))

    def was_read_ahead(self, most: int) -> bool:
        """Whether it has ended, and the script has trained on it and holds its last batches, at `most` so many, for
        further micro-batches."""
        ahead = self._ahead
        may_be = self.is_finished and self.reads_ahead and 0 < ahead <= min(most, MOST_HELD)
        return may_be and _are_held([*self.earlier, self.tensors][-ahead:])

    @property
    def _ahead(self) -> int:
        """Batches that were yielded and not, or not yet, trained on; not one where each has several micro-batches."""
        return self.yielded - self.micro_batches

    @property
    def is_one_held(self) -> bool:
        """Whether it was left at its first batch, and the script has not dropped that."""
        return self.yielded == 1 and (not self.tensors or bool(alive(self.tensors)))

    @property
    def has_wasted_rest(self) -> bool:
        """Whether it began at a restored position and ended without a backward or a step."""
        is_unused = self.restored_batches > 0 and not (self.is_trained_on or self.steps)
        return self.is_finished and self.yielded > 0 and is_unused

    @property
    def wasted_rest(self) -> str:
        """The warning of that."""
        return (
            f"data: no batch of the loop after load_state was trained on (got {self.yielded} to the end of epoch "
            f"{self.position.epoch - 1}); if the loop drops batches by itself, use skip_first_batches instead, since "
            "load_state has already moved the loader."
        )

    def _check_skipped(self, micro_batches: int) -> None:
        """Raises UsageError at the first micro-batch after `load_state` if the script has dropped as many batches as
        the restored position had left out before. A script that reads ahead still holds them."""
        left_out, self.restored_batches = self.restored_batches, 0
        is_dropped = self._is_first_dropped and bool(self._first_tensors) and micro_batches < self.yielded
        if left_out and self.yielded == left_out + 1 and is_dropped:
            raise UsageError(
                f"data: the loop dropped its first batches after load_state (got {left_out}), which had moved the "
                "loader past as many: the samples after the saved position would be lost; use skip_first_batches "
                "instead, or load_state(..., data_position=False) (with --as-accelerate: launch with "
                "--accelerates-meaning position)."
            )

    def given(self, batch: Any) -> Any:
        """The batch, with its tensors and length noted; the script goes on with it."""
        tensors = list(_tensors_in(batch))
        self.earlier.append(self.tensors)
        self.tensors = [ref(tensor) for tensor in tensors]
        if self.yielded == 1 and self.restored_batches:
            self._first_tensors = self.tensors
        if self.yielded == self.restored_batches + 1:  # before the script goes on: it still holds the batch before this
            self._is_first_dropped = all(tensor() is None for tensor in self._first_tensors)
        lengths = {tensor.size(0) for tensor in tensors if tensor.dim()}  # len() fails for nested tensors
        self.local_samples = lengths.pop() if len(lengths) == 1 else None
        self.local_total += self.local_samples or 0
        progress.post("forward")
        return batch


def _are_held(batches: list[list[ReferenceType[torch.Tensor]]]) -> bool:
    return all(tensors and len(alive(tensors)) == len(tensors) for tensors in batches)


def alive(references: list[ReferenceType[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors that have not been freed."""
    return [tensor for reference in references if (tensor := reference()) is not None]


def _tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors in dicts, lists and tuples, and those that are attributes of objects in them, such as data
    classes."""
    for leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__"):
            yield from (value for value in vars(leaf).values() if isinstance(value, torch.Tensor))
