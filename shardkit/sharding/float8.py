"""Linear layers in 8 bits (`mixed_precision: fp8`, `mxfp8`), with torchao's kernels.

Linear layers in the model's blocks compute in fp8 if both dims are divisible by the kernels' alignment. Everything
else, including the head, computes in bf16; parameters are fp32. `fp8` has one scale per tensor, and FSDP gathers
weights in fp8, too. `mxfp8` has one scale per 32 values, and FSDP gathers weights in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardkit.config.hardware import EIGHT_BITS
from shardkit.distributed import accelerators
from shardkit.errors import ModelError
from shardkit.log import get_logger

log = get_logger(__name__)

Kind = Literal["fp8", "mxfp8"]
MULTIPLE = {"fp8": 16, "mxfp8": 32}
"""Required divisor of the dims of a matrix: torch._scaled_mm's alignment; the number of values that share a scale."""
AMD_ARCHITECTURES = {"fp8": ("gfx942", "gfx950", "gfx1200", "gfx1201"), "mxfp8": ("gfx950",)}
"""AMD GPUs with products of matrices in them (instruction sets of CDNA 3, CDNA 4 and RDNA 4)."""
MODULES = {"fp8": "torchao.float8", "mxfp8": "torchao.prototype.moe_training.mxfp8_linear"}


EMULATES = False
"""Whether to emulate the rounding of the kernels, on any device. Only tests set it."""


def problem(kind: Kind, device: torch.device) -> str | None:
    """Why this rank cannot compute in this dtype; None if it can."""
    if EMULATES:
        return missing(kind)
    if torch.version.hip is not None and device.type == "cuda":
        return _problem_on_amd(kind, device) or missing(kind)
    found, needed = accelerators.capability(device), EIGHT_BITS[kind]
    if found is None or found[0] + found[1] / 10 < needed:
        has = device.type if found is None else f"{accelerators.name_of(device)}, {found[0]}.{found[1]}"
        return f"mixed_precision: {kind} needs a GPU of compute capability {needed} (got {has}); write bf16."
    return missing(kind)


def _problem_on_amd(kind: Kind, device: torch.device) -> str | None:
    """Its compute capability, as torch tells it, is the number of the architecture, and no measure of abilities."""
    if accelerators.architecture(device) in AMD_ARCHITECTURES[kind]:
        return None
    has, needed = accelerators.architecture(device), ", ".join(AMD_ARCHITECTURES[kind])
    name = accelerators.name_of(device)
    return f"mixed_precision: {kind} needs an AMD GPU of architecture {needed} (got {name}, {has}); write bf16."


def missing(kind: Kind) -> str | None:
    """The missing or incompatible package; None if everything is installed."""
    if find_spec("torchao") is None:
        return f"mixed_precision: {kind} needs the package torchao, which is not installed; pip install torchao."
    try:
        import_module(MODULES[kind])
    except ImportError as error:
        return f"mixed_precision: {kind} needs another torchao (got {error}); install the newest, or write bf16."
    return None


def convert(blocks: Iterable[nn.Module], kind: Kind) -> None:
    """Make the Linear layers of the blocks compute in 8 bits, in place. Modules, names and parameters stay the same.

    Raises ModelError if no layer can be converted.
    """
    linears = {id(module): module for block in blocks for module in block.modules() if type(module) is nn.Linear}
    chosen = [module for module in linears.values() if _fits(module, MULTIPLE[kind])]
    if not chosen:
        raise ModelError(
            f"mixed_precision: {kind}: no block has a Linear layer with dims divisible by {MULTIPLE[kind]} (got "
            f"{len(linears)} layers); write bf16."
        )
    change = _changed_to_fp8 if kind == "fp8" else _changed_to_mxfp8
    for module in chosen:
        change(module)
    log.info("mixed precision: %d of %d Linear layers of blocks compute in %s.", len(chosen), len(linears), kind)


def _fits(module: nn.Linear, multiple: int) -> bool:
    return module.in_features % multiple == 0 and module.out_features % multiple == 0


def _changed_to_fp8(module: nn.Linear) -> None:
    """As torchao's convert_to_float8_training, but in place instead of replacing modules."""
    float8 = import_module(MODULES["fp8"])
    kind = _fp8_linear()
    made = kind.from_float(module, config=float8.Float8LinearConfig(emulate=EMULATES))
    module.__class__ = kind
    for name, value in vars(made).items():
        if name not in vars(module):
            setattr(module, name, value)


# Both kinds of layer are classes, and not a forward of each layer's own: torch.compile would compile every block anew,
# and after eight of them none.
@cache
def _fp8_linear() -> Any:
    kind: Any = import_module("torchao.float8.float8_linear").Float8Linear

    class Fp8Linear(kind):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _with_whole_rows(super().forward, MULTIPLE["fp8"], x)

    return Fp8Linear


def _changed_to_mxfp8(module: nn.Linear) -> None:
    module.__class__ = _mxfp8_linear(EMULATES)


@cache
def _mxfp8_linear(emulates: bool) -> type[nn.Linear]:
    choices = import_module("torchao.quantization.quantize_.common.kernel_preference").KernelPreference
    scales = import_module("torchao.prototype.mx_formats.config").ScaleCalculationMode
    product = partial(
        import_module(MODULES["mxfp8"])._to_mxfp8_then_scaled_mm,
        kernel_preference=choices.EMULATED if emulates else choices.AUTO,
        scale_calculation_mode=scales.RCEIL,
    )

    class Mxfp8Linear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _with_whole_rows(partial(_forward, self, product), MULTIPLE["mxfp8"], x)

    return Mxfp8Linear


def _with_whole_rows(multiply: Callable[[torch.Tensor], torch.Tensor], multiple: int, x: torch.Tensor) -> torch.Tensor:
    """(..., in_features) -> (..., out_features), for any number of tokens: the product that the weight's gradient is
    sums over them, and the kernels need a multiple there. Zeros are added, which change nothing."""
    rows = x.shape[:-1].numel()
    missing = -rows % multiple
    if not missing:
        return multiply(x)
    output = multiply(nn.functional.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, missing)))
    return output[:rows].reshape(*x.shape[:-1], output.shape[-1])


def _forward(module: nn.Linear, product: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """(..., in_features) -> (..., out_features)."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        output = product(x.to(dtype), module.weight.to(dtype))
    else:
        output = product(x, module.weight)
    return output if module.bias is None else output + module.bias.to(output.dtype)


def gather_in_fp8(model: nn.Module) -> None:
    """Make FSDP gather the sharded weights of fp8 layers in fp8 instead of the compute dtype.

    Call it when all parameters have their values. Weights that are not divisible by the number of shards are skipped.
    """
    from shardkit.sharding.fsdp import internals, unit_state

    kind = _fp8_weight()
    layers = {id(module.weight): module for module in model.modules() if hasattr(module, "linear_mm_config")}
    gathered, dtype = [], None
    for parameter in internals.parameters_of(model):
        layer: Any = layers.get(id(parameter.sharded_param))
        if layer is None or not _is_even(parameter.sharded_param):
            continue
        dtype = layer.config.cast_config_weight.target_dtype
        internals.gather_by(parameter, partial(kind, linear_mm_config=layer.linear_mm_config, dtype=dtype))
        gathered.append(parameter)
    if dtype is not None:
        to_scale = import_module("torchao.float8.float8_utils").amax_to_scale
        scales = _Scales(gathered, partial(to_scale, float8_dtype=dtype))
        unit_state.before_forward(model).append(scales.compute)
        unit_state.at_end_of_backward(model, (), scales.drop)


@cache
def _fp8_weight() -> Any:
    kind: Any = import_module("torchao.float8.fsdp_utils").WeightWithDynamicFloat8CastTensor
    to_fp8 = import_module("torchao.float8.float8_utils").to_fp8_saturated

    class Fp8Weight(kind):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            """As torchao's, without its autograd function and tensor class, which cost the host more than the cast."""
            scale = self._precomputed_scale
            if scale is None:
                return super().fsdp_pre_all_gather(mesh)
            return (to_fp8(self._tensor.to(torch.float32) * scale, self._dtype),), (scale,)

    return Fp8Weight


class _Scales:
    """The scales of weights that are gathered in fp8, for a forward and its backward: computed with one reduction over
    the ranks, in place of one for each weight in each gather."""

    def __init__(self, parameters: Sequence[Any], to_scale: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._parameters, self._to_scale = parameters, to_scale

    def compute(self) -> None:
        """Takes the weights as they are now. Collective."""
        weights = self._weights()
        with torch.inference_mode(False), torch.no_grad():  # a later backward may save them
            norms = torch._foreach_norm([weight._tensor for weight in weights], math.inf)
            largest = torch.stack([norm.to(torch.float32) for norm in norms])
            group = self._parameters[0].mesh_info.shard_process_group
            if group.size() > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            for weight, scale in zip(weights, self._to_scale(largest).unbind(), strict=True):
                weight._precomputed_scale = scale

    def drop(self) -> None:
        """What is gathered from now on, outside of a forward, computes its own: a script may write to weights."""
        for weight in self._weights():
            weight._precomputed_scale = None

    def _weights(self) -> list[Any]:
        return [parameter.sharded_param._local_tensor for parameter in self._parameters]


def _is_even(weight: Any) -> bool:
    return weight.shape[0] % weight.device_mesh.size(weight.device_mesh.ndim - 1) == 0
