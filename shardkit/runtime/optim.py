"""Optimizers around sharded parameters: rebinding one that was built before, its fast path, clipping, fp16 scaling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardkit.config.schema import Config
from shardkit.errors import ModelError
from shardkit.runtime.init import local_rows


@dataclass(frozen=True)
class ParameterNames:
    """The parameters of a model before it was parallelized, by identity; tied ones have one entry."""

    names: dict[int, str]
    kept: tuple[nn.Parameter, ...]
    """Keeps the old objects alive, so that no new one gets their identity. Sharding takes their memory away."""

    @classmethod
    def of(cls, model: nn.Module) -> ParameterNames:
        parameters = dict(model.named_parameters())
        return cls({id(p): fqn for fqn, p in parameters.items()}, tuple(parameters.values()))


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module below DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def rebind(optimizer: torch.optim.Optimizer, names_before: ParameterNames, model_after: nn.Module) -> None:
    """Let the optimizer work on the parameters that the model has now. Groups and state are changed in place.

    State that it already has moves along, each rank keeping its part. Parameters of other models stay as they are.
    Raises ModelError, with the optimizer unchanged, where state has neither its parameter's shape nor is a number.
    """
    now = dict(unwrapped(model_after).named_parameters(remove_duplicate=False))
    old = [p for group in optimizer.param_groups for p in group["params"]]
    new = {id(p): now[names_before.names[id(p)]] for p in old if id(p) in names_before.names}
    changed = [p for p in old if id(p) in new and new[id(p)] is not p]
    states = {
        id(p): _moved_state(optimizer, names_before.names[id(p)], optimizer.state[p], new[id(p)])
        for p in changed
        if p in optimizer.state
    }
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(p), p) for p in group["params"]]
    for parameter in changed:
        optimizer.state.pop(parameter, None)
    for identity, state in states.items():
        optimizer.state[new[identity]] = state


def _moved_state(
    optimizer: torch.optim.Optimizer, fqn: str, state: dict[str, Any], new: nn.Parameter
) -> dict[str, Any]:
    moved = {}
    for key, value in state.items():
        is_number = not isinstance(value, torch.Tensor) or key == "step" or (value.dim() == 0 and new.dim() != 0)
        if is_number:
            moved[key] = value
        elif tuple(value.shape) == tuple(new.shape):
            moved[key] = _like(value, new)
        else:
            raise ModelError(
                f"optimizer: {type(optimizer).__name__} keeps {key!r} of {fqn} in another shape than the parameter "
                f"(got {tuple(value.shape)}, the parameter has {tuple(new.shape)}), so it cannot be split; "
                "build the optimizer after prepare, or prepare it before its first step."
            )
    return moved


def _like(value: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """The value where and as the parameter is: this rank's rows of it, without communication."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    local = parameter.to_local()
    mine = value[local_rows(parameter)].detach().clone().to(local.device)
    return DTensor.from_local(
        mine.reshape(local.shape),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


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
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    return parameter.is_floating_point() and device.type in ("cpu", "cuda")


def _move_step_counts(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """The fused update wants the step count as an fp32 tensor beside its parameter."""
    for parameter in parameters:
        step = optimizer.state.get(parameter, {}).get("step")
        if step is not None:
            device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
            optimizer.state[parameter]["step"] = torch.as_tensor(step, dtype=torch.float32).to(device)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """The norm of all gradients together over all ranks, a plain fp32 tensor, before they were scaled to `max_norm`.

    Collective: one all-reduce, of one number, where any gradient is sharded; none where all are replicated.
    Gradients are scaled in place.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = _global_norm(gradients, float(norm_type))
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_device: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        local = _local(gradient)
        by_device[local.device, local.dtype].append(local)
    for (device, dtype), locals_ in by_device.items():
        torch._foreach_mul_(locals_, factor.to(device=device, dtype=dtype))
    return total


def _global_norm(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Sums of powers: of sharded gradients reduced over the ranks that share a copy, of replicated ones as they are."""
    sharded: dict[dist.ProcessGroup, list[torch.Tensor]] = defaultdict(list)
    devices: dict[dist.ProcessGroup, torch.device] = {}
    device = torch.device("cpu")
    replicated = []
    for gradient in gradients:
        group = _shard_group(gradient)
        if group is None:
            replicated.append(_local(gradient))
            device = replicated[-1].device
        else:
            sharded[group].append(_local(gradient))
            devices[group] = _mesh_device(gradient)
    parts = [_power_sum(replicated, norm_type, device)] if replicated else []
    for group, locals_ in sharded.items():
        mine = _power_sum(locals_, norm_type, devices[group])
        dist.all_reduce(mine, dist.ReduceOp.MAX if norm_type == float("inf") else dist.ReduceOp.SUM, group=group)
        parts.append(mine)
    if not parts:
        return torch.zeros(())
    together = torch.stack([part.to(parts[0].device) for part in parts])
    return together.max() if norm_type == float("inf") else together.sum() ** (1.0 / norm_type)


def _power_sum(tensors: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of |x|^norm_type over all tensors, fp32, on `device`; for inf the largest |x|."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), device=device)
    norms: list[torch.Tensor] = []
    by_device: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_device[tensor.device, tensor.dtype].append(tensor)
    for same in by_device.values():
        norms += torch._foreach_norm(same, norm_type, dtype=torch.float32)
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.max() if norm_type == float("inf") else (stacked**norm_type).sum()


def _shard_group(gradient: torch.Tensor) -> dist.ProcessGroup | None:
    """The ranks that hold the other parts of this gradient."""
    if isinstance(gradient, DTensor):
        for axis, placement in enumerate(gradient.placements):
            if isinstance(placement, Shard):
                return gradient.device_mesh.get_group(axis)
    return None


def _mesh_device(gradient: torch.Tensor) -> torch.device:
    """Where the ranks that share the gradient talk: an offloaded one lies on the CPU, where NCCL does not reach."""
    kind = gradient.device_mesh.device_type if isinstance(gradient, DTensor) else gradient.device.type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class GradScaler(torch.amp.GradScaler):
    """torch's loss scaler, for optimizers that hold sharded and plain parameters together as well.

    A gradient that overflows on one rank makes all ranks skip the step and halve the scale.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = {}
        part: Any
        for part in _by_kind(optimizer):
            for device, value in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).items():
                found[device] = torch.maximum(found[device], value) if device in found else value
        return found


@dataclass(frozen=True)
class _Part:
    """As much of an optimizer as unscaling looks at."""

    param_groups: list[dict[str, Any]]


def _by_kind(optimizer: torch.optim.Optimizer) -> list[_Part]:
    """The optimizer's parameters as parts that one multi-tensor operation takes: sharded ones, plain ones."""
    kinds: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                kinds[isinstance(parameter.grad, DTensor)].append(parameter)
    return [_Part([{"params": parameters}]) for parameters in kinds.values() if parameters]


def make_scaler(config: Config, device: torch.device) -> GradScaler | None:
    """The loss scaler that fp16 needs, starting at the configured scale; None where compute is not fp16."""
    section = config.shardkit.precision
    if (section.param_dtype or config.mixed_precision) != "fp16":
        return None
    return GradScaler(device.type, init_scale=section.init_scale)
