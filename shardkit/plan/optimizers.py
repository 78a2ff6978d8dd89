"""How much state an optimizer keeps for a parameter, by the optimizer's name."""

from collections.abc import Callable
from difflib import get_close_matches
from math import prod

from shardkit.errors import UsageError

Shape = tuple[int, ...]


def state_numel(name: str, shape: Shape) -> int:
    """Elements of state for a parameter (or the shard of one) of this shape, in the parameter's dtype.

    The step counters, 4 bytes a parameter, are left out. UsageError where the name is unknown.
    """
    return _rule(name)(shape)


def check(name: str) -> str:
    """The name in lower case; UsageError where it is not in `STATE`."""
    _rule(name)
    return name.strip().lower()


def _rule(name: str) -> Callable[[Shape], int]:
    rule = STATE.get(name.strip().lower())
    if rule is None and any(bits in name for bits in ("8bit", "8-bit", "4bit", "4-bit")):
        raise UsageError(
            f"--optimizer: states of 8 or 4 bits are not known by name (got {name!r}); add --simulate and give a "
            "function that makes yours: --optimizer module:function."
        )
    if rule is None:
        near = get_close_matches(name.lower(), STATE, 1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(STATE)}."
        raise UsageError(f"--optimizer: unknown (got {name!r}); {hint}")
    return rule


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
# moment (https://arxiv.org/abs/1412.6980); Adagrad and RMSprop the second only; Lion the first only
# (https://arxiv.org/abs/2302.06675); Adafactor factors the second (https://arxiv.org/abs/1804.04235).
STATE: dict[str, Callable[[Shape], int]] = {
    "sgd": _none,
    "momentum": _one,
    "adam": _two,
    "adamw": _two,
    "adafactor": _factored,
    "adagrad": _one,
    "rmsprop": _one,
    "lion": _one,
}
