"""The step of optimizers that need whole tensors: what it makes, and what the ranks exchange for it.

Adafactor's gathers them on every rank (`optim/whole_step.py`); of Muon's matrices, each goes to one rank and back
(`optim/muon_step.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from shardkit.optim import division
from shardkit.plan.optimizers import Shape, check

# Newton-Schulz iterations of torch.optim.Muon by default (torch/optim/_muon.py), and operations in a multiplication.
_ITERATIONS, _OPERATIONS = 5, 2
# `optim.stepping.WHOLE_TENSORS`, by the names of the plan.
WHOLE_TENSORS = ("adafactor", "muon")


@dataclass(frozen=True)
class WholeTensor:
    """A parameter of such an optimizer. `part`: the shape of a shard, padded; None where every rank holds it whole."""

    shape: Shape
    itemsize: int
    part: Shape | None

    @property
    def nbytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class InStep:
    """On the first rank, in bytes. `made`: at most, beside the state; `gathered`: of each all-gather over the shards.

    `flops`: of products of matrices; `rounds`: how often matrices are sent to the ranks that orthogonalize them, and
    back; `to_owners`, `to_shards`: what the rank sends in all of these, its own part included.
    """

    made: int = 0
    flops: int = 0
    gathered: tuple[int, ...] = ()
    rounds: int = 0
    to_owners: int = 0
    to_shards: int = 0


def needs_whole(name: str) -> bool:
    """Whether a step needs whole parameters, also where these are sharded."""
    return check(name) in WHOLE_TENSORS


def is_state_whole(name: str, shape: Shape) -> bool:
    """Whether every rank keeps the state of a whole parameter of this shape: Adafactor's rows and columns. What has the
    parameter's own shape is sharded as the parameter is."""
    return check(name) == "adafactor" and len(shape) > 1


def in_step(name: str, tensors: Sequence[WholeTensor], shards: int, replicas: int) -> InStep:
    """What the step of such an optimizer makes and exchanges for these tensors."""
    if check(name) == "muon":
        return _divided(tensors, shards, replicas)
    return _gathered(tensors, shards)


def _gathered(tensors: Iterable[WholeTensor], shards: int) -> InStep:
    """A chunk of tensors is gathered with gradients, and with state that is sharded."""
    made, chunk, held, largest = 0, 0, 0, 0
    gathered: list[int] = []
    for tensor in tensors:
        if chunk >= division.WHOLE_BYTES:
            chunk, held, largest = 0, 0, 0
        if tensor.part is not None:
            times = 2 if is_state_whole("adafactor", tensor.shape) else 3
            gathered += [prod(tensor.part) * shards * tensor.itemsize] * times
            if shards > 1:
                chunk, held = chunk + 2 * tensor.nbytes, held + times * tensor.nbytes
        # torch/optim/_adafactor.py, _single_tensor_adafactor, its default: the update.
        largest = max(largest, tensor.nbytes if len(tensor.shape) > 1 else 0)
        made = max(made, held + largest)
    return InStep(made, gathered=tuple(gathered))


def _divided(tensors: Sequence[WholeTensor], shards: int, replicas: int) -> InStep:
    """The messages of a round are on their way while the matrices of the one before are orthogonalized."""
    plain = [tensor for tensor in tensors if tensor.part is None]
    sharded = [(tensor, tensor.part) for tensor in tensors if tensor.part is not None]
    planned = division.rounds([tensor.shape for tensor, _ in sharded], shards * replicas)
    whole = [prod(tensor.shape) * division.MUON_ITEMSIZE for tensor, _ in sharded]
    parts = [prod(part) * division.MUON_ITEMSIZE for _, part in sharded]
    temporary = [_of_muon(tensor.shape, division.MUON_ITEMSIZE) for tensor, _ in sharded]
    # By round: what the first rank sends, its own part included, and the matrices that it gets.
    sent = [sum(parts[index] for index in chain(*owned[:shards])) for owned in planned]
    received = [sum(whole[index] for index in owned[0]) for owned in planned]
    made = [max((_of_muon(tensor.shape, tensor.itemsize) for tensor in plain), default=0)]
    for number, owned in enumerate(planned):
        copies = received[number] * replicas if replicas > 1 else 0
        back = copies + sum(parts[index] for index in chain(*owned))
        ahead = sum(sent[number + 1 : number + 2]) + sum(received[number + 1 : number + 2])
        made.append(ahead + received[number] + max([back, *(temporary[index] for index in owned[0])]))
    own = plain + [sharded[index][0] for owned in planned for index in owned[0]]
    return InStep(
        made=max(made),
        flops=sum(division.cost(tensor.shape) * _ITERATIONS * _OPERATIONS for tensor in own),
        rounds=len(planned),
        to_owners=sum(sent),
        to_shards=sum(received) * replicas,
    )


def _of_muon(shape: Shape, itemsize: int) -> int:
    """The direction, and in 16 bits two of it and two squares of its smaller side (torch/optim/_muon.py,
    `_zeropower_via_newtonschulz`)."""
    return prod(shape) * (itemsize + 4) + 4 * min(shape) ** 2
