"""The optimizer's step over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part

FUSED = (torch.optim.Adam, torch.optim.AdamW)  # the only ones whose fused operator knows sharded tensors
FOREACH = (
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


def use_fast_step(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer update many parameters at once where torch can, with equal results. In place, repeatable.

    torch takes that path by itself for plain parameters on a GPU only: sharded ones are updated one by one, several
    times slower. A choice that the user made (`foreach=`, `fused=`) is kept. Loading a state chooses anew, since
    a saved state brings the choice of the run that saved it.
    """
    _choose_path(optimizer)
    if not getattr(optimizer, "_shardkit_fast_step", False):
        optimizer.register_load_state_dict_post_hook(_choose_path_again)
        optimizer._shardkit_fast_step = True  # type: ignore[attr-defined]


def _choose_path_again(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for option in ("fused", "foreach"):
            if option in group and optimizer.defaults.get(option) is None:
                group[option] = None
    _choose_path(optimizer)


def _choose_path(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("fused") is not None
        if chosen or group.get("differentiable") or group.get("capturable"):
            continue
        # Lists that mix sharded and plain tensors exist for the update one by one only.
        if len({isinstance(p, DTensor) for p in group["params"]}) > 1:
            continue
        if type(optimizer) in FUSED and all(_can_fuse(p) for p in group["params"]):
            group["fused"] = True
            _move_step_counts(optimizer, group["params"])
        elif type(optimizer) in FOREACH:
            group["foreach"] = True


def _can_fuse(parameter: torch.Tensor) -> bool:
    device = local_part(parameter).device
    return parameter.is_floating_point() and device.type in ("cpu", "cuda")


def _move_step_counts(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """The fused update wants the step count as an fp32 tensor beside its parameter."""
    for parameter in parameters:
        step = optimizer.state.get(parameter, {}).get("step")
        if step is not None:
            device = local_part(parameter).device
            optimizer.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32).to(device)
