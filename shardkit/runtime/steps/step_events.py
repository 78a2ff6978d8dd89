"""What the parts of a run do at the moments of a training step. `accumulate.Accumulation` calls them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def _nothing(*_: Any) -> None:
    return None


@dataclass
class StepEvents:
    """One function for each moment; by default it does nothing."""

    on_loss: Callable[[torch.Tensor], None] = _nothing
    """Called with the loss of each micro-batch, before its backward."""
    on_batch: Callable[[], None] = _nothing
    """Called once for each batch that is trained on."""
    before_step: Callable[[torch.optim.Optimizer], None] = _nothing
    """Called before each step of a prepared optimizer, with the one inside; raises UsageError or ModelError where it
    must not step on the present gradients. Collective in the first steps."""
    before_skipped_step: Callable[[], None] = _nothing
    """Called where a prepared optimizer does not step, since the window is not full; raises UsageError."""
    on_foreign_optimizer: Callable[[torch.optim.Optimizer], None] = _nothing
    """Called before the first step of an optimizer that was not prepared; raises where it must not step."""
    before_foreign_step: Callable[[], None] = _nothing
    """Called before each of its steps; raises UsageError on all ranks. Collective in the first steps."""
    on_step: Callable[[], None] = _nothing
    """Called after each optimizer step."""
    at_boundary: Callable[[], None] = _nothing
    """Called between two steps, where the run may stop."""
    on_missed_boundary: Callable[[], None] = _nothing
    """Called where an optimizer steps again, and nothing has shown where the two steps meet."""
    on_new_group: Callable[[], None] = _nothing
    """Called after a param group was added to a prepared optimizer."""
