"""Mixed precision: dtypes for FSDP2, of which `fsdp/shard_model.py` makes a policy for each unit; autocast for DDP, one
process, and plain copies of sharded models."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from shardkit.config.meaning import WIDE, dtypes, eight_bits, without_bf16
from shardkit.config.schema import Config
from shardkit.distributed import accelerators, control
from shardkit.distributed.modules import every_parameter
from shardkit.errors import MachineError
from shardkit.log import get_logger
from shardkit.model.cut import trained_dtype
from shardkit.sharding import float8
from shardkit.sharding.cast_outputs import cast_output
from shardkit.sharding.units import Units

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

log = get_logger(__name__)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run. `param` is the compute dtype, None to compute in the parameters' dtype."""

    param: torch.dtype | None
    reduce: torch.dtype
    output: torch.dtype | None

    @property
    def is_mixed(self) -> bool:
        """Whether there is a compute dtype."""
        return self.param is not None


def of(config: Config) -> Precision:
    """The configured dtypes. By default gradients are reduced in fp32, and outputs are fp32."""
    chosen = dtypes(config)
    return Precision(
        param=DTYPES[chosen.param] if chosen.param else None,
        reduce=DTYPES[chosen.reduce],
        output=DTYPES[chosen.output] if chosen.output else None,
    )


def supported(config: Config, device: torch.device) -> Config:
    """The config with supported dtypes: if any rank's device does not support bf16, fp32 with a warning.

    Collective: every rank must call it, so that all compute in the same dtype. MachineError, on all ranks, if any
    of them cannot compute in fp8 or mxfp8 as configured: there is no fallback for those.
    """
    if (kind := eight_bits(config)) is not None:
        control.start().agree(float8.problem(kind, device), error=MachineError)
    if of(config).param is not torch.bfloat16:
        return config
    reasons = control.start().union(
        [] if has_bf16(device) else [f"{accelerators.name_of(device)} does not support bf16"]
    )
    if not reasons:
        return config
    log.warning(
        "mixed_precision: %s (got bf16); training in fp32 instead. Set mixed_precision: fp16 for half precision.",
        "; ".join(reasons),
    )
    return without_bf16(config)


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 without emulation, and its communication backend supports bf16."""
    if device.type != "cuda":
        return True
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return False
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else (99,)
    return tuple(nccl) >= (2, 10)  # NCCL supports bf16 since 2.10


def reduce_dtype(wanted: torch.dtype, gradients: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are reduced: the configured one, but fp64 and complex gradients keep theirs.

    A 16-bit dtype is used only if it is configured; it then applies to fp32 gradients, too.
    """
    return gradients if str(gradients).removeprefix("torch.") in WIDE else wanted


def autocast(config: Config, device: torch.device) -> AbstractContextManager:
    """The autocast context for forward under DDP or in one process; a null context under FSDP, whose units cast."""
    precision = of(config)
    if config.mode == "fsdp" or precision.param in (None, torch.float32):
        return nullcontext()
    return torch.autocast(device.type, dtype=precision.param)


def autocast_forward(model: nn.Module, config: Config, device: torch.device) -> None:
    """Make the model's forward run under `autocast`, with outputs in the output dtype, in place of what an earlier call
    has made of it. For DDP or one process: under FSDP the root unit does this. It stays a method, so that a copy of the
    model computes with the copy's own parameters."""
    restore_forward(model)
    precision = of(config)
    forward: Any = model.forward
    if config.mode == "fsdp" or not (precision.is_mixed or precision.output) or hasattr(forward, _PLAIN):
        return
    is_method = getattr(forward, "__self__", None) is model
    function = forward.__func__ if is_method else forward

    @wraps(function)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with autocast(config, device):
            output = function(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: cast_output(t, precision.output), output)

    setattr(under_autocast, _PLAIN, vars(model).get("forward"))
    _under_autocast.add(under_autocast)
    model.forward = MethodType(under_autocast, model) if is_method else under_autocast


_PLAIN = "_shardkit_forward_before"
"""Attribute of a forward that `autocast_forward` set: the model's previous `forward`, None if it was the class's. A
script's wrapper of such a forward has a copy of it."""

_under_autocast: WeakSet[Any] = WeakSet()
"""The forwards that `autocast_forward` set."""


def restore_forward(model: nn.Module) -> None:
    """Undo `autocast_forward`, in place. Does nothing if it was not applied, or the script has wrapped what it set."""
    function = getattr(model.forward, "__func__", model.forward)
    if function not in _under_autocast:
        return
    before = getattr(function, _PLAIN)
    del model.forward
    if before is not None:
        model.forward = before


def upcast_(model: nn.Module) -> list[str]:
    """Convert trainable 16-bit parameters to fp32, in place. Returns their fqns.

    Mixed precision needs fp32 parameters for the optimizer, also if a model was loaded in 16 bits.
    """
    changed = []
    for fqn, parameter in model.named_parameters():
        dtype = getattr(torch, trained_dtype(str(parameter.dtype).removeprefix("torch."), parameter.requires_grad))
        if parameter.dtype is not dtype:
            parameter.data = parameter.data.to(dtype)
            changed.append(fqn)
    return changed


def cast_between(model: nn.Module, units: Units, dtype: torch.dtype) -> None:
    """Cast the inputs of each module with direct parameters to the dtype of these parameters in forward.

    FSDP2 only casts at the boundaries of units. Inside, one fp32 buffer that is added to a bf16 activation would make
    it fp32 in all following modules. Ignored modules keep their dtype; their outputs are cast to the compute dtype.
    """
    inside_ignored = {id(inner) for module in units.ignored.values() for inner in module.modules()}
    heads = {id(unit.module) for unit in units.units}
    for module in units.ignored.values():
        own = next((p.dtype for p in every_parameter(module) if p.is_floating_point()), torch.float32)
        _cast_inputs(module, own)
        module.register_forward_hook(lambda _module, _args, output: _cast(output, dtype))
    for module in model.modules():
        if module._parameters and id(module) not in inside_ignored | heads:
            _cast_inputs(module, dtype)


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    def cast(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    module.register_forward_pre_hook(cast, with_kwargs=True)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of (nested) tuples, lists and dicts in `dtype`."""
    if isinstance(data, torch.Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, dict):
        return {key: _cast(value, dtype) for key, value in data.items()}
    if type(data) in (tuple, list):
        return type(data)(_cast(value, dtype) for value in data)
    return data
