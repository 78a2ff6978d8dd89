"""Values that a script writes where FSDP2 would lose them: into gathered parameters, or into shards while gathered
values are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch._guards import active_fake_mode
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import flat_bytes, is_composed, local_part, own_part
from shardkit.errors import UsageError


class Writes:
    """What was written into the gathered parameters of one unit since they were gathered.

    Writes through `p.data` in place leave no trace: the first two forwards with gradients compare all values.
    """

    def __init__(self, parameters: Sequence[FSDPParam]) -> None:
        self._parameters = parameters
        self._as_gathered: list[tuple[int, int]] = []
        self._compared = 0

    def note_gathered(self) -> None:
        self._as_gathered = [_version(parameter._unsharded_param) for parameter in self._parameters]

    def refuse(self) -> None:
        """UsageError if a forward has written other values: they would be lost when the gathered parameters are freed,
        or be in no save."""
        is_compared = self._compared < 2 and torch.is_grad_enabled() and active_fake_mode() is None
        self._compared += is_compared
        for number, parameter in enumerate(self._parameters):
            info, gathered = parameter._module_info, parameter._unsharded_param
            is_there = info.module._parameters.get(info.param_name) is gathered
            before, self._as_gathered[number] = self._as_gathered[number], _version(gathered)
            may_differ = self._as_gathered[number] != before or (is_compared and not is_composed(gathered.detach()))
            if not is_there or (may_differ and _differs_from_shard(parameter)):
                raise UsageError(
                    f"forward: {_name(parameter)} was written during forward, and the new values would be lost; keep "
                    "what forward sets in a buffer, write to parameters after the optimizer's step, or use strategy "
                    "NO_SHARD."
                )


class ChangedShards:
    """What was written into the shards of a unit whose gathered values are kept, from its creation on."""

    def __init__(self, parameters: Sequence[FSDPParam]) -> None:
        self._parameters = parameters
        self._shards = [(one.sharded_param, local_part(one.sharded_param)) for one in parameters]
        self._before = self._versions()

    def refuse(self, compares: bool = False) -> None:
        """UsageError if a shard has changed, which the kept values do not show. `compares`: compares the values, too,
        and finds what was written through `p.data`."""
        versions = self._versions()
        if versions == self._before and not compares:
            return
        for parameter, before, version in zip(self._parameters, self._before, versions, strict=True):
            is_compared = compares and not is_composed(parameter._unsharded_param.detach())
            if (is_compared or version != before) and _differs_from_shard(parameter):
                raise UsageError(
                    f"accelerator.unsharded: {_name(parameter)} was changed inside, where forwards use the values "
                    "from before (got a step of the optimizer, load_state_dict, or another write); leave the block "
                    "before weights change, and enter it again."
                )

    def _versions(self) -> list[tuple[int, int, int]]:
        return [(sharded._version, *_version(local)) for sharded, local in self._shards]


def refuse_replaced(parameters: Sequence[FSDPParam]) -> None:
    """UsageError if a module has another parameter in the place of a sharded one: the gathered one would replace it."""
    for parameter in parameters:
        info = parameter._module_info
        if info.module._parameters.get(info.param_name) is not parameter.sharded_param:
            raise UsageError(
                f"forward: {_name(parameter)} is not the parameter that prepare put there (got another one, or "
                "torch.func.functional_call); change and tie modules before prepare, set values by p.data = ..., or "
                "use strategy NO_SHARD."
            )


def _name(parameter: FSDPParam) -> str:
    return parameter._param_fqn or parameter._module_info.param_name


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Changes when a tensor is written in place, or is given other values by `p.data = ...`."""
    return tensor._version, tensor.untyped_storage()._cdata


def _differs_from_shard(parameter: FSDPParam) -> bool:
    """Whether this rank's part of a gathered parameter has other values than its shard; the other ranks compare theirs.
    torch's parametrizations write a tensor to itself when they are registered, as for PEFT's target_parameters."""
    gathered, sharded = parameter._unsharded_param.detach(), cast(DTensor, parameter.sharded_param)
    if is_composed(gathered):  # not comparable
        return True
    if active_fake_mode() is not None:  # a plan has no values
        return False
    mine = local_part(sharded).to(gathered.device, gathered.dtype)
    return not torch.equal(flat_bytes(own_part(gathered, sharded)), flat_bytes(mine))  # NaN is equal to itself there
