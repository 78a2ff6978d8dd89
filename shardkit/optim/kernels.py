"""Which of torch's kernels an optimizer steps with."""

from collections.abc import Sequence
from typing import Any

import torch

from shardkit.distributed.tensors import local_part

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)
"""Optimizers that treat each element of a parameter by itself."""
FUSED = (torch.optim.Adam, torch.optim.AdamW)


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The optimizer's original class."""
    return vars(type(optimizer)).get("_shardkit_original", type(optimizer))


def choose_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Selects torch's fused or foreach kernels where the results are equal. In place, idempotent.

    torch does so by default only for plain parameters on a GPU. The user's choice (`foreach=`, `fused=`) is kept. The
    choice is repeated after a state is loaded, since a saved state contains that of the run that saved it.
    """
    if kind_of(optimizer) not in ELEMENTWISE:
        return  # also because optimizers around another one are often made without torch's __init__, and take no hooks
    _choose(optimizer)
    if not getattr(optimizer, "_shardkit_chooses", False):
        optimizer.register_load_state_dict_post_hook(_choose_again)
        optimizer._shardkit_chooses = True  # type: ignore[attr-defined]


def _choose_again(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for option in ("fused", "foreach"):
            if option in group and optimizer.defaults.get(option) is None:
                group[option] = None
    _choose(optimizer)


def _choose(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        chosen = group.get("foreach") is not None or group.get("fused") is not None
        if chosen or group.get("differentiable") or group.get("capturable"):
            continue
        if kind_of(optimizer) in FUSED and all(map(_can_fuse, group["params"])):
            group["fused"] = True
            _move_step_counts(optimizer, group["params"])
        elif not _needs_number(optimizer, group):
            group["foreach"] = True


def _needs_number(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the learning rate is a tensor, which the foreach kernels of Adam and AdamW do not take."""
    return kind_of(optimizer) in FUSED and isinstance(group["lr"], torch.Tensor)


def _can_fuse(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() and local_part(parameter).device.type in ("cpu", "cuda")


def _move_step_counts(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Fused kernels need the step count as an fp32 tensor on the parameter's device."""
    for parameter in parameters:
        step = optimizer.state.get(parameter, {}).get("step")
        if step is not None:
            device = local_part(parameter).device
            optimizer.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32, device=device)
