"""Detects runs whose optimizer is prepared, and no model: nothing reduces gradients over ranks, and each rank would
train a model of its own."""

import math
from collections.abc import Sequence

from torch import nn

from shardkit.distributed.control import ControlGroup
from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import UsageError
from shardkit.runtime.optimizer import AcceleratedOptimizer

# Gradients that the script reduces itself (its own DistributedDataParallel) are equal up to rounding.
RELATIVE_DIFFERENCE = 1e-3


class MissingModels:
    """The check of one run, over the growing lists of its models and optimizers."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[AcceleratedOptimizer], control: ControlGroup
    ) -> None:
        self._models, self._optimizers, self._control = models, optimizers, control
        self._is_checked = control.world_size == 1

    def check(self) -> None:
        """UsageError on all ranks where their gradients differ. Collective in the first step with gradients, where no
        model is prepared."""
        if self._models or self._is_checked:
            return
        different, self._is_checked = self._control.decide(self._size_of_gradients(), _compared)
        if different:
            raise UsageError(
                f"optimizer step: {type(self._optimizers[0].optimizer).__name__} trains a model that was not prepared "
                "(got no model in prepare, and gradients that differ between ranks), so each rank would train its own; "
                "prepare both: model, optimizer = accelerator.prepare(model, optimizer)."
            )

    def _size_of_gradients(self) -> float:
        """The sum of the norms of gradients that are not sharded: the script has sharded the others itself."""
        parameters = [parameter for optimizer in self._optimizers for parameter in optimizer.parameters]
        plain = [p.grad for p in parameters if p.grad is not None and not is_dtensor(p.grad)]
        total = math.fsum(float(gradient.norm()) for gradient in plain)
        return total if math.isfinite(total) else 0.0


def _compared(sizes: list[float]) -> tuple[bool, bool]:
    """Whether the ranks' gradients differ, and whether there are any."""
    is_different = not all(math.isclose(size, sizes[0], rel_tol=RELATIVE_DIFFERENCE) for size in sizes)
    return is_different, any(sizes)
