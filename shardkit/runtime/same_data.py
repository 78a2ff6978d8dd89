"""Detects ranks that train on the same samples: a loader that was not prepared gives every rank all of them."""

from collections.abc import Sequence

import torch

from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.distributed.control import ControlGroup
from shardkit.log import get_logger

log = get_logger(__name__)

# Equal losses in so many steps. One is no sign: a head that begins with zeros gives every sample the same loss, and a
# warmup that begins with zero keeps it for another step.
CHECKED_STEPS = 3


class SameData:
    """The check of one run, over the growing list of its loaders."""

    def __init__(self, loaders: Sequence[PreparedLoader], control: ControlGroup) -> None:
        self._loaders, self._control = loaders, control
        self._left = CHECKED_STEPS if control.world_size > 1 else 0
        self._loss: torch.Tensor | None = None
        self._losses: list[float | None] = []

    def note_loss(self, loss: torch.Tensor) -> None:
        """Notes the loss of a micro-batch that came from no prepared loader."""
        if self._left:
            own = active_loader(self._loaders) is None and type(loss) is torch.Tensor and loss.numel() == 1
            self._loss = loss.detach() if own else None

    def check(self) -> None:
        """Warns, once, if the ranks had equal losses in each of the first steps. Collective in these steps."""
        if not self._left:
            return
        self._left -= 1
        self._losses.append(None if self._loss is None else float(self._loss))
        self._loss = None
        if self._left == 0 and self._control.decide(self._losses, _are_equal) and self._control.rank == 0:
            log.warning(
                "data: all ranks had the same losses in the first %d steps, with batches of no prepared loader, so "
                "they seem to train on the same samples; give the DataLoader to accelerator.prepare and read what it "
                "returns, or give each rank samples of its own. (A loss over the samples of all ranks is equal too, "
                "and right.)",
                CHECKED_STEPS,
            )


def _are_equal(losses: list[list[float | None]]) -> bool:
    return len(losses) > 1 and None not in losses[0] and all(of_rank == losses[0] for of_rank in losses)
