"""Communication of a script: with the other ranks, and with the launcher."""

from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from shardkit.config import meaning
from shardkit.data import padding
from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.distributed import buffers, collectives, gradients, named_barrier, progress
from shardkit.errors import UsageError
from shardkit.runtime.eager import eager
from shardkit.runtime.run import Run
from shardkit.runtime.steps import foreign_steps
from shardkit.runtime.topology import Topology


class Communication(Topology):
    """Collectives over tensors and objects, a flag that all ranks see, and the launcher's hang detection."""

    @eager
    def gather(self, tensor: Any) -> Any:
        """All ranks' tensors concatenated along dim 0, in the order of ranks, on every rank; dicts, lists and tuples
        too. 0-dim tensors give one element for each rank. All ranks need equal shapes: see `pad_across_processes`.
        Collective.

        Has no gradients; `gather_with_gradients` has."""
        self._meet("gather")
        return collectives.gather(tensor, self._run.same_data)

    @eager
    def gather_with_gradients(self, tensor: Any) -> Any:
        """As `gather`, for a loss in which each sample is compared with those of all ranks.

        A backward gives each rank's tensors the sum of the gradients of all ranks. With `accelerator.backward`, weights
        get the gradients of one process, whether each rank computes the whole loss or the mean over its own samples.
        Collective, and so is the backward.
        """
        self._meet("gather_with_gradients")
        return gradients.gather_with_gradients(tensor, self._run.same_data)

    @eager
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the padding of the loader's last batch; objects that are not tensors as one list. Ranks
        that share each sequence count once.

        A loss repeated for each sample of a whole batch counts as often as a shorter batch has samples. Collective.
        """
        self._meet("gather_for_metrics")
        same_data, loaders, copies = self._run.same_data, _loaders_of_loops(self._run), self._run.region.group.size
        if not use_gather_object and (short := padding.short_batch(loaders, input_data)) is not None:
            found = collectives.gather_repeated(input_data, *short, same_data, copies)
            if found is not None:
                return found
        real = padding.real_samples(loaders, input_data, use_gather_object)
        return collectives.gather_real(input_data, real, use_gather_object, same_data, copies)

    @eager
    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """The sum (or "mean", "max", "min") over all ranks of a tensor, or of each in a dict, list or tuple, on every
        rank; times `scale`. The tensor given is not changed. Collective."""
        self._meet("reduce")
        return collectives.reduce(tensor, reduction, scale, self._run.same_data)

    @eager
    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """The tensors of rank `from_process`, on every rank. Collective."""
        self._begin("broadcast")
        return collectives.broadcast(tensor, from_process)

    @eager
    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along `dim` to the longest of all ranks. Collective."""
        self._begin("pad_across_processes")
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def _meet(self, call: str) -> None:
        """As `_begin`, for what a loop calls in each batch: all ranks process this one together."""
        self._begin(call)
        self._run.accumulation.boundaries.note_meeting()

    def _begin(self, call: str) -> None:
        """Refuses a call that not all ranks make, by its name: it would be taken for a part of what the others do."""
        self._run.refuse_if_left(call)
        named_barrier.meet_at_first(call, UsageError, meaning.longest_wait_s(self._run.config))

    def set_trigger(self) -> None:
        """Sets a flag that `check_trigger` sees on all ranks, for instance to stop early."""
        self._run.is_triggered = True

    @eager
    def check_trigger(self) -> bool:
        """Whether any rank has set the flag; resets it on all ranks. Collective."""
        found = self._run.process.control.any(self._run.is_triggered)
        if found:
            self._run.is_triggered = False
        return found

    @eager
    def reduce_buffers(self, model: nn.Module, reduction: buffers.Reduction = "mean") -> list[str]:
        """Makes buffers equal that each rank's forward has updated locally (running statistics, codebooks), and returns
        their names. "mean": the mean over ranks; "rank0", and always for integers: rank 0's value. Collective."""
        return buffers.reduce_buffers(model, reduction)

    def pause(self, phase: str = "pause") -> AbstractContextManager[None]:
        """Context without the launcher's hang detection, for slow work: generation, an evaluation, a download. `phase`
        names it in the launcher's table. Not collective: other ranks that wait for this one in a collective still time
        out after `process_group_timeout_s`."""
        return progress.paused(phase, self._run.counters.step)

    def progress(self, phase: str = "at work") -> None:
        """Reports progress: the launcher restarts its `hang_timeout_s` clock. Call it now and then in long work of the
        script; it costs microseconds. Not collective."""
        progress.post(phase, self._run.counters.step)


def _loaders_of_loops(run: Run) -> list[PreparedLoader]:
    """The run's loaders, and those of other Accelerators of this process in whose loops a batch was read since."""
    newest = active_loader(run.loaders)
    since = 0 if newest is None else newest.last_yield
    others = [one for other in foreign_steps.others(run.accumulation) for one in other.loaders]
    return [*run.loaders, *(one for one in others if one.is_iterating and one.last_yield > since)]
