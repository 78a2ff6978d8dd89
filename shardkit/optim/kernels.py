"""Which of torch's kernels an optimizer steps with."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from shardkit.distributed import xla
from shardkit.distributed.tensors import is_dtensor, local_part

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


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters of all its groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The optimizer's original class."""
    return vars(type(optimizer)).get("_shardkit_original", type(optimizer))


def choose_kernels(optimizer: torch.optim.Optimizer) -> None:
    """Selects torch's fused or foreach kernels where the results are equal. In place, idempotent.

    torch does so by default only for plain parameters on a GPU. The user's choice (`foreach=`, `fused=`) is kept,
    except `fused=True` on XLA devices. The choice is repeated after a state is loaded, since a saved state contains
    that of the run that saved it.
    """
    if kind_of(optimizer) not in ELEMENTWISE:
        return  # also because optimizers around another one are often made without torch's __init__, and take no hooks
    _choose(optimizer)
    if not getattr(optimizer, "_shardkit_chooses", False):
        optimizer.register_load_state_dict_post_hook(_choose_again)
        if kind_of(optimizer) in FUSED:
            optimizer.register_step_pre_hook(_lay_out)
        optimizer._shardkit_chooses = True  # type: ignore[attr-defined]


def forget_choice(optimizer: torch.optim.Optimizer, groups: Iterable[dict[str, Any]]) -> None:
    """Sets the kernels of param groups of it, or of its state dict, to what the script made it with. In place."""
    for group in groups:
        for option in ("fused", "foreach"):
            if option in group and optimizer.defaults.get(option) is None:
                group[option] = None


def _choose_again(optimizer: torch.optim.Optimizer) -> None:
    forget_choice(optimizer, optimizer.param_groups)
    _choose(optimizer)


def _choose(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if group.get("fused") and any(map(xla.is_xla, group["params"])):
            group["fused"] = None  # torch has no such kernels there, and XLA fuses the whole step by itself
        chosen = group.get("foreach") is not None or group.get("fused") is not None
        if chosen or group.get("differentiable") or group.get("capturable"):
            continue
        if kind_of(optimizer) in FUSED and all(map(_can_fuse, group["params"])):
            group["fused"] = True
            _fit_state(optimizer, group["params"])
        elif not _needs_number(optimizer, group):
            group["foreach"] = True


def _needs_number(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the learning rate is a tensor, which the foreach kernels of Adam and AdamW do not take."""
    return kind_of(optimizer) in FUSED and isinstance(group["lr"], torch.Tensor)


def _can_fuse(parameter: torch.Tensor) -> bool:
    local = local_part(parameter)
    is_of_kind = parameter.is_floating_point() and local.device.type in ("cpu", "cuda")
    return is_of_kind and _has_layout_of(torch.empty_like(local, device="meta"), local)  # no gaps between its elements


def _fit_state(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Fused kernels need the step count as an fp32 tensor on the parameter's device, and the rest laid out as it is."""
    for parameter in parameters:
        row, local = optimizer.state.get(parameter, {}), local_part(parameter)
        for key, value in row.items():
            if key == "step":
                row[key] = torch.as_tensor(value, dtype=torch.float32, device=local.device)
            elif isinstance(value, torch.Tensor) and value.shape == local.shape and not is_dtensor(value):
                row[key] = laid_out_as(local, value)


def _lay_out(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before a step on plain parameters: gradients and state as the parameters. `local_step` does this for gradients of
    others."""
    if "_shardkit_step" in vars(optimizer) or torch.compiler.is_compiling():
        return  # torch.compile fails where strides are compared
    state, unused = optimizer.state, dict[str, torch.Tensor]()
    for group in optimizer.param_groups:
        if group.get("fused"):
            for parameter in group["params"]:  # for each in each step: nothing is asked twice here
                gradient, stride = parameter.grad, parameter.stride()
                if gradient is not None and (gradient.layout is not torch.strided or gradient.stride() != stride):
                    lay_out_gradient(parameter)
                first = state.get(parameter, unused).get("exp_avg")
                if first is not None and first.stride() != stride:  # the script has changed its layout
                    _fit_state(optimizer, [parameter])


def lay_out_gradient(parameter: torch.Tensor) -> None:
    """Lays the gradient out as its parameter is. One that a backward accumulates is; one that the script assigns may
    not be."""
    gradient = parameter.grad
    if torch.compiler.is_compiling():  # torch.compile of a step runs hooks as functions of their own
        return
    if gradient is None or gradient.layout is not torch.strided or gradient.stride() == parameter.stride():
        return
    parameter.grad = laid_out_as(parameter, gradient)


def laid_out_as(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The value with its elements in memory in the order of the parameter's, which torch's fused kernels on the CPU
    take for granted: they would mix up the elements."""
    if _has_layout_of(value, parameter):
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _has_layout_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = zip(one.stride(), other.stride(), other.shape, strict=True)
    return all(a == b for a, b, size in pairs if size > 1)
