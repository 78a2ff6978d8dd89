"""Weights that bitsandbytes has packed: 4 bits each in a parameter of any dtype, whose `quant_state` has their scales;
or 8 bits each, with the scales in `SCB`.

Their parameters are recognized by these attributes, without importing bitsandbytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardkit.model import adapters

_CPU_LAYOUT = "support_avx512bf16_for_cpu"
"""Attribute of a module in 4 bits: whether its forward in evaluation stores the weights anew for this CPU."""


def holds_bits(parameter: torch.Tensor) -> bool:
    """Whether the parameter's numbers are only containers of packed weights: another dtype would change the weights."""
    return getattr(parameter, "quant_state", None) is not None


def will_hold_bits(parameter: torch.Tensor) -> bool:
    """Whether the parameter has plain numbers until bitsandbytes packs them, when it is moved to a device."""
    return getattr(parameter, "bnb_quantized", None) is False and hasattr(parameter, "quant_storage")


def shape_and_dtype(parameter: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Those that the parameter has when it is packed."""
    if will_hold_bits(parameter):
        storage: torch.dtype = parameter.quant_storage  # type: ignore[attr-defined]
        return ((parameter.numel() + 1) // 2 // storage.itemsize, 1), storage
    is_for_8_bits = _is_for_8_bits(parameter) and not getattr(parameter, "has_fp16_weights", False)
    return tuple(parameter.shape), torch.int8 if is_for_8_bits else parameter.dtype


def _is_for_8_bits(parameter: torch.Tensor | None) -> bool:
    return hasattr(parameter, "CB") and hasattr(parameter, "SCB")


def is_in_8_bits(module: nn.Module) -> bool:
    """Whether the module has a weight in 8 bits, of which it keeps and uses a second reference (`CB`)."""
    return any(map(_is_for_8_bits, module._parameters.values()))


def numel(parameter: torch.Tensor) -> int:
    """The number of weights in a parameter."""
    return math.prod(parameter.quant_state.shape) if holds_bits(parameter) else parameter.numel()  # type: ignore


def scale_bytes(parameter: torch.Tensor) -> int:
    """Bytes of the tensors beside the parameter that make weights of its values, also before these are packed."""
    if will_hold_bits(parameter):
        block, is_double = getattr(parameter, "blocksize", None) or 64, getattr(parameter, "compress_statistics", True)
        return adapters.scale_bytes(parameter.numel(), block, is_double)
    return sum(scale.nbytes for scale in scales_of(parameter))


def scales_of(parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors beside the parameter's values that make weights of them, always in the same order."""
    if holds_bits(parameter):
        yield from _tensors(parameter.quant_state)  # type: ignore[attr-defined]
    elif isinstance(scales := getattr(parameter, "SCB", None), torch.Tensor):
        yield scales


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    for _, value in sorted(vars(state).items()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, type(state)):  # the scales are packed, too
            yield from _tensors(value)


def problems(model: nn.Module) -> list[str]:
    """What is wrong with weights through which nothing can be trained."""
    return [
        f"model: {fqn} is stored in the layout for inference on this CPU, through which bitsandbytes computes no "
        "gradients (got an evaluation on the CPU before prepare); build the model anew, and evaluate after prepare."
        for fqn, parameter in model.named_parameters()
        if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False)
    ][:1]


def not_yet(model: nn.Module) -> list[str]:
    """What is wrong with weights that are to be sharded, but are not packed yet."""
    return [
        f"model: {fqn} is not in 4 bits yet, since bitsandbytes packs a weight when it is moved to a device; call "
        "model.to(accelerator.device) before prepare, or load the model by from_pretrained."
        for fqn, parameter in model.named_parameters()
        if will_hold_bits(parameter)
    ][:1]


def keep_layout(model: nn.Module) -> None:
    """Make modules in 4 bits keep their layout in evaluation. On a CPU with AVX-512 BF16 they otherwise store their
    weights anew, and the training after it gets no gradients through them; a sharded weight cannot be replaced."""
    for module in model.modules():
        if hasattr(module, _CPU_LAYOUT):
            setattr(module, _CPU_LAYOUT, False)
