"""Steps of torch.optim.Muon on sharded matrices, divided between the ranks.

Momentum, weight decay and the update are elementwise, on this rank's local tensors. To be orthogonalized, each
direction goes to one rank, its owner (`division.owners`), and back: 2 bytes per element either way, since torch
orthogonalizes in bf16. The values are those of torch's own step on whole matrices, with one exception: without
nesterov, torch 2.11 and 2.13 (not 2.15) also divide a momentum in bf16 by its norm, in place; here it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardkit.dims import part_of_dim
from shardkit.distributed.tensors import gathers_in_host_memory, is_dtensor, local_part, sharded_like
from shardkit.optim import division
from shardkit.optim.division import Shape
from shardkit.optim.kernels import kind_of, parameters_of
from shardkit.optim.parts import like_parameter, make_gradient_plain, part_of_whole
from shardkit.optim.step_hooks import step_between_hooks, with_parameters

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

# What a param group of torch's Muon sets, and what torch orthogonalizes and scales with. Of another version, whose step
# may differ, the optimizer's own step is taken.
_SETTINGS = {"lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"}
_FUNCTIONS = ("_zeropower_via_newtonschulz", "_adjust_lr")


def can_divide(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is torch's Muon as it is known here, on matrices that one dim of a mesh shards; another dim may
    replicate them."""
    is_known = kind_of(optimizer) is torch.optim.Muon and set(optimizer.defaults) == _SETTINGS
    if not is_known or not all(hasattr(torch.optim._muon, name) for name in _FUNCTIONS):
        return False
    return all(_is_split_once(p) for p in parameters_of(optimizer) if is_dtensor(p))


def _is_split_once(parameter: DTensor) -> bool:
    from torch.distributed.tensor import Replicate, Shard

    *others, last = parameter.placements
    if type(last) is not Shard:
        return False
    # `sharding.mesh` numbers the ranks of the world row by row.
    return not others or (others == [Replicate()] and parameter.device_mesh.size() == dist.get_world_size())


class MuonStep:
    """Muon's step, in which one rank orthogonalizes a matrix for all. Collective.

    Matrices that every rank holds whole are left to the optimizer's own step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return step_between_hooks(self._optimizer, self._on_plain, closure)

    @contextmanager
    def _on_plain(self) -> Iterator[None]:
        """Updates the sharded matrices; inside, the optimizer has the others."""
        groups = self._optimizer.param_groups
        matrices = [_Matrix(p, group) for group in groups for p in group["params"] if is_dtensor(p)]
        matrices = [matrix for matrix in matrices if matrix.parameter.grad is not None]
        with torch.no_grad():
            for mesh in dict.fromkeys(matrix.parameter.device_mesh for matrix in matrices):
                self._update([matrix for matrix in matrices if matrix.parameter.device_mesh == mesh], _Ranks(mesh))
        plain = [[p for p in group["params"] if not is_dtensor(p)] for group in groups]
        for parameter in chain.from_iterable(plain):
            make_gradient_plain(parameter)
        with with_parameters(self._optimizer, plain):
            yield

    def _update(self, matrices: Sequence[_Matrix], ranks: _Ranks) -> None:
        """A round's directions are on their way while the matrices of the one before are orthogonalized."""
        before: _Round | None = None
        for owned in division.rounds([matrix.parameter.shape for matrix in matrices], ranks.count):
            of_round = [[matrices[index] for index in of_rank] for of_rank in owned]
            following = _Round(of_round, ranks, self._optimizer.state)
            if before is not None:
                before.finish()
            before = following
        if before is not None:
            before.finish()


@dataclass(frozen=True)
class _Matrix:
    """A sharded parameter, and the settings of its param group."""

    parameter: DTensor
    group: dict[str, Any]

    @property
    def dim(self) -> int:
        """The dim that is sharded."""
        return self.parameter.placements[-1].dim  # type: ignore[attr-defined]

    def part_shapes(self, shards: int) -> list[Shape]:
        """The shape of each shard's part."""
        shape, dim = self.parameter.shape, self.dim
        lengths = (part_of_dim(shape[dim], shards, shard)[1] for shard in range(shards))
        return [(*shape[:dim], length, *shape[dim + 1 :]) for length in lengths]

    @property
    def part(self) -> torch.Tensor:
        """This rank's part."""
        return local_part(self.parameter)

    def direction(self, state: dict[torch.Tensor, Any]) -> torch.Tensor:
        """What is to be orthogonalized, this rank's part of it; the momentum is updated."""
        parameter, momentum = self.parameter, self.group["momentum"]
        assert parameter.grad is not None
        gradient = local_part(like_parameter(parameter.grad, parameter))
        row = state[parameter]
        if "momentum_buffer" not in row:
            row["momentum_buffer"] = sharded_like(torch.zeros_like(gradient), parameter)
        buffer = row["momentum_buffer"]
        if not is_dtensor(buffer):  # loaded from one process
            buffer = part_of_whole(buffer, "momentum_buffer", parameter, self.part)
            buffer = sharded_like(buffer, parameter)
        buffer = row["momentum_buffer"] = like_parameter(buffer, parameter)
        local = local_part(buffer).lerp_(gradient, 1 - momentum)
        return gradient.lerp(local, momentum) if self.group["nesterov"] else local

    def orthogonalized(self, direction: torch.Tensor) -> torch.Tensor:
        """The whole direction, whose memory may be used, orthogonalized."""
        settings = (self.group[name] for name in ("ns_coefficients", "ns_steps", "eps"))
        return torch.optim._muon._zeropower_via_newtonschulz(direction, *settings)

    def apply(self, update: torch.Tensor) -> None:
        """Weight decay and update, on this rank's part."""
        group, local = self.group, self.part
        lr: Any = group["lr"]
        lr = lr.squeeze() if isinstance(lr, torch.Tensor) else lr
        local.mul_(1 - lr * group["weight_decay"])
        scaled = torch.optim._muon._adjust_lr(lr, group["adjust_lr_fn"], self.parameter.shape)
        local.add_(update.to(local.device), alpha=-scaled)


class _Ranks:
    """The ranks of a mesh, in its order: replicas of as many shards."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.count, self.shards = mesh.size(), mesh.size(-1)
        self.device = mesh.device_type
        self._group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.replicas = self.count // self.shards
        self.replica = self.rank // self.shards
        self._meeting_device = "cpu" if gathers_in_host_memory(mesh) else mesh.device_type

    def in_replica(self, parts: Sequence[list[Shape]]) -> list[list[Shape]]:
        """Those of the ranks in this replica, none of others."""
        return [of_rank if rank // self.shards == self.replica else [] for rank, of_rank in enumerate(parts)]

    def message(self, parts: Iterable[Iterable[Shape]]) -> torch.Tensor:
        """Memory for parts of these shapes, for or from each rank."""
        numel = sum(map(_numel, parts))
        return torch.empty(numel, dtype=torch.bfloat16, device=self._meeting_device)

    def exchange(
        self, sent: torch.Tensor, to_each: Sequence[Sequence[Shape]], from_each: Sequence[Sequence[Shape]]
    ) -> tuple[torch.Tensor, dist.Work | None]:
        """(what arrives, what to wait for before it is read)."""
        if self.count == 1:
            return sent, None
        received = self.message(from_each)
        work = dist.all_to_all_single(
            received, sent, list(map(_numel, from_each)), list(map(_numel, to_each)), self._group, async_op=True
        )
        return received, work


class _Round:
    """Some matrices, `owned[r]` by rank r. Their directions are sent to the owners when it is made.

    A message has the parts for each rank one after another: to the owners, this rank's part of each of their matrices;
    to the shards, their part of each of this rank's matrices. An owner gets the parts from its own replica, and sends
    them to all.
    """

    def __init__(self, owned: Sequence[Sequence[_Matrix]], ranks: _Ranks, state: dict[torch.Tensor, Any]) -> None:
        self._owned, self._ranks = owned, ranks
        self._mine = owned[ranks.rank]
        self._to_owners: list[list[Shape]] = [[matrix.part.shape for matrix in of_rank] for of_rank in owned]
        shapes = [matrix.part_shapes(ranks.shards) for matrix in self._mine]
        self._to_shards = [[of_matrix[shard] for of_matrix in shapes] for shard in range(ranks.shards)]
        to_each, from_each = ranks.in_replica(self._to_owners), ranks.in_replica(self._to_shards * ranks.replicas)
        self._sent = ranks.message(to_each)
        places = iter(_split(self._sent, to_each))
        for owner, of_rank in enumerate(owned):
            for matrix in of_rank:
                direction = matrix.direction(state)
                if to_each[owner]:
                    next(places).copy_(direction)
        self._received, self._work = ranks.exchange(self._sent, to_each, from_each)

    def finish(self) -> None:
        """Orthogonalizes this rank's matrices, and updates this rank's part of all."""
        if self._work is not None:
            self._work.wait()
        del self._sent
        parts = _split(self._received, self._to_shards)
        for index, matrix in enumerate(self._mine):
            self._orthogonalize(matrix, parts[index :: len(self._mine)])
        replicas = self._ranks.replicas
        sent = self._received if replicas == 1 else self._received.repeat(replicas)
        updates, work = self._ranks.exchange(sent, self._to_shards * replicas, self._to_owners)
        if work is not None:
            work.wait()
        for matrix, update in zip(chain.from_iterable(self._owned), _split(updates, self._to_owners), strict=True):
            matrix.apply(update)

    def _orthogonalize(self, matrix: _Matrix, parts: list[torch.Tensor]) -> None:
        """Replaces the parts of a direction by those of the orthogonalized one."""
        direction = torch.cat(parts, matrix.dim).to(self._ranks.device)
        lengths = [part.shape[matrix.dim] for part in parts]
        for part, value in zip(parts, matrix.orthogonalized(direction).split(lengths, matrix.dim), strict=True):
            part.copy_(value)


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(map(prod, shapes))


def _split(message: torch.Tensor, parts: Iterable[Iterable[Shape]]) -> list[torch.Tensor]:
    """The message as tensors of these shapes, which share its memory."""
    shapes = list(chain.from_iterable(parts))
    views = message.split([prod(shape) for shape in shapes])
    return [view.view(shape) for view, shape in zip(views, shapes, strict=True)]
