"""Averages of the weights (EMA) that a script keeps beside its model, sharded as the model is."""

from enum import Enum

_FP32_BYTES = 4


class Ema(str, Enum):
    """What is averaged: nothing, the trained parameters (in fp32 or wider), or a copy of the whole model in its own
    dtypes (`copy.deepcopy` or `AveragedModel` before `prepare`, then both prepared)."""

    NO = "no"
    TRAINED = "trained"
    MODEL = "model"


def itemsize(ema: Ema, itemsize: int, is_trained: bool) -> int:
    """Bytes of the average of one element of a parameter that takes `itemsize` bytes."""
    match ema:
        case Ema.NO:
            return 0
        case Ema.TRAINED:
            return max(_FP32_BYTES, itemsize) if is_trained else 0
        case Ema.MODEL:
            return itemsize
