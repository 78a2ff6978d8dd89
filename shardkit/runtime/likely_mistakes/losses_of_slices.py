"""Notices losses of slices of sequences, which are no means of the same number of positions in each."""

from math import isclose, isnan

import torch

from shardkit.distributed.control import ControlGroup
from shardkit.log import get_logger
from shardkit.sharding.context_parallel.region import Region

log = get_logger(__name__)

_CHECKED_LOSSES = 3
_ALLOWED = 1e-3
"""Relative to the larger one: losses in 16 bits are rounded by less."""


class LossesOfSlices:
    """The check of one run."""

    def __init__(self, region: Region, control: ControlGroup) -> None:
        self._region, self._control = region, control
        self._left = _CHECKED_LOSSES if region.group.size > 1 else 0

    def note_loss(self, loss: torch.Tensor) -> None:
        """Warns, once, where the ranks that share each sequence have different losses. Called before each backward.
        Collective in the first ones after a region."""
        if not self._left or not self._region.slices:
            return
        self._left -= 1
        own = float(loss.detach()) if isinstance(loss, torch.Tensor) and loss.numel() == 1 else 0.0
        if (found := self._control.decide(own, self._different)) is None:
            return
        self._left = 0
        if self._control.rank == 0:
            log.warning(
                "context_parallel: ranks that share a sequence have different losses (got %.6g and %.6g), those of "
                "their slices, whose mean over ranks is minimized. That is the loss of whole sequences where it is a "
                "mean over positions, as many in each slice. What is summed or counted along a sequence before "
                "(log-probabilities, a mask, a pooled mean), give to accelerator.sum_slices.",
                *found,
            )

    def _different(self, losses: list[float]) -> tuple[float, float] | None:
        """Two losses of a group that are not the same."""
        size = self._region.group.size
        for first in range(0, len(losses), size):
            for other in losses[first + 1 : first + size]:
                if not _are_close(losses[first], other):
                    return losses[first], other
        return None


def _are_close(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=_ALLOWED) or (isnan(one) and isnan(other))
