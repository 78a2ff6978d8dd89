"""Bytes of state that an optimizer keeps for a parameter, and of what its step makes, by the optimizer's name."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import prod

from shardkit.errors import UsageError

Shape = tuple[int, ...]


def state_bytes(name: str, shape: Shape, itemsize: int) -> int:
    """Bytes of state for a parameter (or the shard of one) of this shape, whose elements take `itemsize` bytes.

    The step counters, 4 bytes a parameter, are left out. UsageError where the name is unknown.
    """
    name = check(name)
    if (kind := QUANTIZED.get(name)) is not None:
        return 2 * moment_bytes(kind, prod(shape), itemsize)
    return STATE[name](shape) * itemsize


def step_bytes(name: str, shape: Shape, itemsize: int) -> int:
    """Bytes that a step makes in addition for such a parameter, and for all of them at once: the kernels that training
    selects (`optim.kernels`) work on lists of tensors."""
    return _MADE_IN_STEP.get(check(name), 0) * prod(shape) * itemsize


@cache
def check(name: str) -> str:
    """The name in lower case, without dashes; UsageError where it is neither in `STATE` nor in `QUANTIZED`."""
    key, known = name.strip().lower().replace("-", "").replace("_", ""), [*STATE, *QUANTIZED]
    if key in known:
        return key
    if any(bits in key for bits in ("8bit", "4bit")):
        raise UsageError(
            f"--optimizer: of optimizers with states of 8 or 4 bits only {', '.join(QUANTIZED)} are known by name "
            f"(got {name!r}); for others add --simulate --optimizer module:function, a function that makes yours."
        )
    near = get_close_matches(key, known, 1)
    own = "add --simulate --optimizer module:function, a function that makes yours"
    hint = f"did you mean {near[0]}? If not, {own}." if near else f"use one of {', '.join(known)}, or {own}."
    raise UsageError(f"--optimizer: unknown (got {name!r}); {hint}")


def refuse_offload(name: str) -> None:
    """UsageError where shardkit does not keep this optimizer's state in host memory."""
    if check(name) not in OFFLOADABLE:
        raise UsageError(
            f"shardkit.offload_optimizer: the state of this optimizer is not offloaded alone (got {name}); use one of "
            f"{', '.join(sorted(OFFLOADABLE))}, or fsdp_offload_params."
        )


@dataclass(frozen=True)
class Quantized:
    """A moment in `bits` bits, with an fp32 scale for each `block` elements and a lookup table of `table` numbers."""

    bits: int
    block: int
    table: int


def moment_bytes(kind: Quantized, numel: int, itemsize: int) -> int:
    """Bytes of one moment of a shard with `numel` elements. Small shards, and those that no number of blocks fills,
    keep it in the parameter's dtype (torchao.optim.adam.AdamBase._new_buffer)."""
    if not is_quantized(kind, numel):
        return numel * itemsize
    return numel * kind.bits // 8 + (numel // kind.block + kind.table) * 4


def is_quantized(kind: Quantized, numel: int) -> bool:
    """Whether torchao keeps the moments of a shard of this size in few bits."""
    return numel >= 4096 and numel % kind.block == 0


def _none(shape: Shape) -> int:
    return 0


def _one(shape: Shape) -> int:
    return prod(shape)


def _two(shape: Shape) -> int:
    return 2 * prod(shape)


def _factored(shape: Shape) -> int:
    """A row and a column of second moments for a matrix, the full second moment for a vector, no first moment."""
    if len(shape) < 2:
        return prod(shape)
    *rest, rows, columns = shape
    return prod(rest) * (rows + columns)


# torch.optim's documentation of each: sgd keeps a buffer only with momentum; Adam and AdamW the first and second
# moment (https://arxiv.org/abs/1412.6980); Adagrad and RMSprop the second only; Rprop the last gradient and step sizes;
# ASGD the average; Lion the first moment only (https://arxiv.org/abs/2302.06675); Adafactor factors the second
# (https://arxiv.org/abs/1804.04235); Muon the first (https://kellerjordan.github.io/posts/muon); schedule-free ones the
# point z, AdamW's the second moment too (https://github.com/facebookresearch/schedule_free).
STATE: dict[str, Callable[[Shape], int]] = {
    "sgd": _none,
    "momentum": _one,
    "adam": _two,
    "adamw": _two,
    "adafactor": _factored,
    "adagrad": _one,
    "rmsprop": _one,
    "lion": _one,
    "muon": _one,
    "nadam": _two,
    "radam": _two,
    "adamax": _two,
    "adadelta": _two,
    "rprop": _two,
    "asgd": _one,
    "adamwschedulefree": _two,
    "sgdschedulefree": _one,
}

# Those whose state `shardkit.offload_optimizer` keeps in host memory (`optim.stepping.refuse_unfit`).
OFFLOADABLE = STATE.keys() - {"lion", "adamwschedulefree", "sgdschedulefree"}

# torch/optim/adagrad.py, rmsprop.py, ..., _multi_tensor_*: the root of the second moment; Adagrad's scaled gradients
# and Adadelta's update too. The same in schedule_free's AdamW. Adam's kernels are fused and SGD's work in place. Lion,
# which torch lacks, makes the update before its sign is taken (timm.optim.lion, _multi_tensor_lion).
_MADE_IN_STEP = {
    "adagrad": 2,
    "lion": 1,
    "rmsprop": 1,
    "nadam": 1,
    "radam": 1,
    "adamax": 1,
    "adadelta": 2,
    "rprop": 1,
    "asgd": 1,
    "adamwschedulefree": 1,
}


# torchao.optim, whose optimizers take sharded parameters (https://github.com/pytorch/ao, torchao 0.18).
_8_BIT, _4_BIT, _FP8 = Quantized(8, 256, 256), Quantized(4, 128, 16), Quantized(8, 256, 0)
QUANTIZED: dict[str, Quantized] = {
    "adam8bit": _8_BIT,
    "adamw8bit": _8_BIT,
    "adam4bit": _4_BIT,
    "adamw4bit": _4_BIT,
    "adamfp8": _FP8,
    "adamwfp8": _FP8,
}
