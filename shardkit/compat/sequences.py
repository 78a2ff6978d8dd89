"""Context parallelism under Accelerate's names: the mesh that the Accelerator shows, and values of slices."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardkit.compat.mesh_sizes import ParallelismConfig
from shardkit.data import padding
from shardkit.data.loader import active_loader
from shardkit.distributed import collectives
from shardkit.distributed.nested import leaves, map_tensors
from shardkit.errors import UsageError
from shardkit.runtime.communication import Communication
from shardkit.runtime.eager import eager
from shardkit.runtime.run import Run
from shardkit.runtime.steps.training_step import TrainingStep
from shardkit.sharding.context_parallel.region import Region


class SharedSequences(TrainingStep, Communication):
    """What Accelerate's `Accelerator` has for ranks that share each sequence."""

    _parallelism_config: ParallelismConfig | None = None
    _split_at: int | None = None
    """The batch, by the loaders' counter, whose sequences were split last."""

    @property
    def parallelism_config(self) -> ParallelismConfig | None:  # type: ignore[override]
        """The argument of the constructor; without one, that of ranks which share sequences by shardkit.yaml."""
        return self._parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of the parallelism config, with its axis names; None without one. The first use is collective."""
        if self._parallelism_config is None:
            return None
        return self._parallelism_config.get_device_mesh(self.device.type)

    @contextmanager
    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[torch.Tensor] | None = None,
    ) -> Iterator[None]:
        """As shardkit's. From here to the next batch, `gather_for_metrics` has the values of all slices. Collective."""
        self._split_at = _batch_of(self._run)
        with super().maybe_context_parallel(buffers, buffer_seq_dims, no_restore_buffers):
            yield

    @eager
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As shardkit's. Where the batch's sequences were split, values along slices are joined to those of sequences.
        Of others each rank has its own, and all are returned, as by Accelerate. Collective."""
        if self._run.region.group.size == 1 or self._split_at != _batch_of(self._run):
            return super().gather_for_metrics(input_data, use_gather_object)
        self._meet("gather_for_metrics")
        return _of_slices(self._run, input_data, use_gather_object)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """The loader, where no ranks share sequences. Raises UsageError where they do: loaders yield whole ones."""
        if self._run.region.group.size == 1:
            return dl
        raise UsageError(
            "deepspeed_ulysses_dl_adapter: a loader yields whole sequences here, with their labels (got a group of "
            f"{self._run.region.group.size} ranks that share each); leave the call out, and split each batch by "
            "accelerator.maybe_context_parallel around forward, loss and backward, as the Trainer does."
        )


def _batch_of(run: Run) -> int:
    """The number of the newest batch of the loop that is running; 0 outside of loops."""
    loader = active_loader(run.loaders)
    return 0 if loader is None else loader.last_yield


def _of_slices(run: Run, data: Any, as_objects: bool) -> Any:
    """All ranks' values in rank order, without those of the padding, which all ranks of a group have; of a sequence
    that slices make up, or that each rank of a group has whole, one. Collective."""
    if as_objects or not all(isinstance(leaf, torch.Tensor) for leaf in leaves(data)):
        return _objects_of_slices(run, data, as_objects)
    return _tensors_of_slices(run, data)


def _objects_of_slices(run: Run, data: Any, as_objects: bool) -> list[Any]:
    """All ranks' objects, or the items of their lists."""
    real = padding.real_samples(run.loaders, data, as_objects)
    collectives.refuse_different([], "gather_for_metrics", run.same_data)
    everyone = collectives.gather_object([data])
    if not all(isinstance(one, list) for one in everyone):
        counts = _real(run, [1] * len(everyone), real and real.ranks)
        return [one for one, is_real in zip(everyone, counts, strict=True) if is_real]
    counts = _real(run, [len(one) for one in everyone], real and real.samples)
    return [item for one, count in zip(everyone, counts, strict=True) for item in one[:count]]


def _tensors_of_slices(run: Run, data: Any) -> Any:
    """Each tensor with the values of all ranks along its first dim."""
    short, real = padding.short_batch(run.loaders, data), padding.real_samples(run.loaders, data, False)
    collectives.refuse_different(data, "gather_for_metrics", run.same_data)
    size, dim, positions = run.region.group.size, *_positions(run.region)

    def real_part(tensor: torch.Tensor) -> torch.Tensor:
        rows = _by_rank(tensor if tensor.dim() else tensor.unsqueeze(0))
        if (sequences := _sequences(rows, size, dim, positions)) is not None:
            counts = _real(run, [tensor.size(0)] * len(rows), real and real.samples)[::size]
            return torch.cat([one[:count] for one, count in zip(sequences, counts, strict=True)])
        each, all_real = [rows.size(1)] * rows.size(0), real and (real.samples if tensor.dim() else real.ranks)
        if short is not None and bool((rows == rows[:, :1]).all()):  # a loss, repeated for each sample of a whole batch
            each, all_real = _by_rank(torch.tensor([short[0]], device=tensor.device)).flatten().tolist(), short[1]
        return torch.cat([row[:count] for row, count in zip(rows, _real(run, each, all_real), strict=True)])

    return map_tensors(real_part, data)


def _positions(region: Region) -> tuple[int, list[int]]:
    """Along which dim the region's first tensor is split, and into how many positions on each rank. Collective."""
    first = region.slices[0]
    own = torch.tensor([first.whole.size(first.dim) // region.group.size], device=first.whole.device)
    return first.dim, _by_rank(own).flatten().tolist()


def _sequences(rows: torch.Tensor, size: int, dim: int, positions: list[int]) -> list[torch.Tensor] | None:
    """Each group's values along whole sequences, from those of slices or of sequences that all its ranks have; None of
    other values. `pad_across_processes` has made slices of different groups equally long: what it added goes last."""
    longest, groups = max(positions), rows.split(size)
    if dim == 0 or rows.dim() < dim + 2 or rows.size(dim + 1) not in (longest, longest * size):
        return None
    if rows.size(dim + 1) > longest:
        return [one[0] for one in groups] if all(bool((one == one[:1]).all()) for one in groups) else None
    joined = []
    for one, each in zip(groups, positions[::size], strict=True):
        parts = [row.tensor_split([each], dim) for row in one]
        joined.append(torch.cat([real for real, _ in parts] + [added for _, added in parts], dim))
    return joined


def _by_rank(tensor: torch.Tensor) -> torch.Tensor:
    """(values, ...) -> (ranks, values, ...). Collective."""
    return collectives.gather_one(tensor).unflatten(0, (collectives.world_size(), -1))


def _real(run: Run, each: Sequence[int], real: int | None) -> list[int]:
    """How many of each rank's values are real, of `each` that it has, where the first `real` of those of the groups
    are; None: all."""
    size, found = run.region.group.size, []
    left = sum(each) if real is None else real
    for of_group in each[::size]:
        found += [min(of_group, left)] * size
        left -= found[-1]
    return found
