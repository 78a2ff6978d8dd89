"""Detects learning rates that differ between ranks: each rank's optimizer would make other steps than one process."""

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from shardkit.log import get_logger
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.wording import ranks_text

CONSEQUENCE = (
    "so each rank's optimizer makes other steps; set learning rates alike on all ranks, and give a schedule a metric "
    "that is the same on all (accelerator.reduce(metric, 'mean'))"
)

log = get_logger(__name__)


def as_number(optimizers: Sequence[AcceleratedOptimizer]) -> float:
    """One number for the learning rates of all param groups: their sum, weighted by position. A rate in a device's
    memory is left out, because reading it would wait for the device; so is None, as Adafactor has where it computes
    the rate itself."""
    rates: list[Any] = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    total = sum(number * float(rate) for number, rate in enumerate(rates, 1) if _is_at_hand(rate))
    return total if math.isfinite(total) else 0.0


def _is_at_hand(rate: Any) -> bool:
    return isinstance(rate, Real) or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu")


def warn(different: list[int]) -> None:
    """Warns of the ranks whose learning rates differ from rank 0's."""
    log.warning("optimizer: learning rates of %s differ from rank 0's, %s.", ranks_text(different), CONSEQUENCE)
