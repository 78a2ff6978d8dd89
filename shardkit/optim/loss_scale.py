"""Loss scaling for fp16, over sharded and plain parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from shardkit.config.meaning import dtypes
from shardkit.config.schema import Config
from shardkit.distributed.tensors import is_dtensor, local_part
from shardkit.errors import UsageError
from shardkit.optim.kernels import kind_of, parameters_of
from shardkit.optim.parts import like_parameter, make_gradient_plain


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler on the local parts of sharded gradients.

    An overflow on one rank makes all ranks skip the step and reduce the scale.
    """

    _unscaled_before: frozenset[int] = frozenset()
    """The parameters whose gradients `unscale_others_` leaves as they are, by their ids."""

    def unscale_others_(self, optimizer: torch.optim.Optimizer, others: Sequence[torch.optim.Optimizer]) -> None:
        """As `unscale_`, but for parameters that other optimizers have, too, by which their gradients were unscaled. An
        overflow of one of those is one of this optimizer."""
        self._unscaled_before = frozenset(id(p) for other in others for p in parameters_of(other))
        try:
            self.unscale_(optimizer)
        finally:
            self._unscaled_before = frozenset()
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for other in others:
            for device, value in self._found_inf_per_device(other).items():
                found[device] = torch.maximum(found[device], value) if device in found else value

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        parameters = [p for p in parameters_of(optimizer) if id(p) not in self._unscaled_before]
        found: dict[torch.device, torch.Tensor] = {}
        for device, parts in _by_device(parameters).items():
            # Copied to the device before: torch's own copy of a scale on a GPU for gradients in host memory does not
            # wait for its end, so that the kernels could read what was there before.
            scale, has_inf = inv_scale.to(device), found_inf.to(device)
            groups: Any = SimpleNamespace(param_groups=[{"params": parts}])  # all that is asked of an optimizer
            found |= super()._unscale_grads_(groups, scale, has_inf, allow_fp16)
        if any(is_dtensor(p) for p in parameters):  # whole gradients are the same on every rank
            for value in found.values():
                everywhere = value.to(inv_scale.device)  # offloaded gradients: NCCL reduces nothing in host memory
                dist.all_reduce(everywhere, dist.ReduceOp.MAX)
                value.copy_(everywhere)
        return found

    def has_scaled(self) -> bool:
        """Whether any loss was scaled so far."""
        return self._scale is not None

    def is_unscaled(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's gradients were unscaled since the last update."""
        return self._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED

    def has_checks(self) -> bool:
        """Whether any gradients were checked for an overflow since the last update, which is an error without."""
        return any(state["found_inf_per_device"] for state in self._per_optimizer_states.values())


def _by_device(parameters: Iterable[torch.Tensor]) -> dict[torch.device, list[torch.Tensor]]:
    """The local parts of the parameters that have a gradient, by the device of their gradients."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for part in map(_part, parameters):
        if part.grad is not None:
            found.setdefault(part.grad.device, []).append(part)
    return found


def _part(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is the local part of the parameter's gradient, in the same memory. A gradient of the
    script's is first made one like its parameter, which may be collective."""
    if not is_dtensor(parameter):
        make_gradient_plain(parameter)
        return parameter
    part = local_part(parameter).detach()
    if parameter.grad is not None:
        gradient = like_parameter(parameter.grad, parameter)
        if gradient is not parameter.grad:
            parameter.grad = gradient
        part.grad = local_part(gradient)
    return part


class LossScale:
    """The loss scale of a run: nothing but under fp16."""

    def __init__(self, scaler: GradScaler | None) -> None:
        self._scaler = scaler
        self._is_behind = False
        self._has_dropped = False

    @property
    def is_on(self) -> bool:
        """Whether losses are scaled."""
        return self._scaler is not None

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler, up to date with the last step; None without loss scaling."""
        self.update()
        return self._scaler

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer, has_new: bool, others: Sequence[torch.optim.Optimizer]) -> None:
        """Removes the scale from the optimizer's gradients. Collective under FSDP. `has_new`: there was a backward
        since the last step. `others`: those that have unscaled the gradients of parameters that both have. UsageError
        where the scale was removed before, and gradients with it have come since."""
        if self._scaler is None or not self._scaler.has_scaled():
            return
        if self._scaler.is_unscaled(optimizer):
            if not has_new:
                return
            raise UsageError(
                f"optimizer step: gradients of {kind_of(optimizer).__name__} have fp16's loss scale in part only (got "
                "a backward after clip_grad_norm_ or unscale_gradients, before its step); call step() of the prepared "
                "optimizer, or its zero_grad() to leave the step out, before the next backward."
            )
        self._scaler.unscale_others_(optimizer, others)

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer's unscaled gradients are not finite on any rank."""
        if self._scaler is None:
            return False
        return any(bool(value.item()) for value in self._scaler._found_inf_per_device(optimizer).values())

    def note_step(self) -> None:
        """Notes a step of an optimizer. The scale that it gives waits for `update`: optimizers that have not stepped
        yet need the present one."""
        self._is_behind = True

    def note_dropped(self) -> None:
        """Notes that unscaled gradients were dropped: the script has left out a step, maybe for an overflow."""
        self._has_dropped = True

    def before_backward(self) -> None:
        """Brings the scale up to date with the last step, or what was dropped in place of one. Called before the first
        backward after it."""
        self._is_behind |= self._has_dropped
        self._has_dropped = False
        self.update()

    def update(self) -> None:
        """Brings the scale up to date with the last step."""
        if self._is_behind and self._scaler is not None and self._scaler.has_checks():
            self._scaler.update()
        self._is_behind = False


def make_scaler(config: Config, device: torch.device) -> GradScaler | None:
    """The loss scaler that fp16 needs, starting at the configured scale; None where compute is not fp16."""
    if not dtypes(config).scales_loss:
        return None
    section = config.shardkit.precision
    return GradScaler(
        device.type,
        init_scale=section.init_scale,
        growth_factor=section.growth_factor,
        backoff_factor=section.backoff_factor,
        growth_interval=section.growth_interval,
    )
