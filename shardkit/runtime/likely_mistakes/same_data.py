"""Detects ranks that train on the same samples: a loader that was not prepared gives every rank all of them. And ranks
whose loaders read different data, although shardkit gives each rank a part of the same data."""

from collections.abc import Sequence

import torch

from shardkit.data.first_items import are_different
from shardkit.data.loader import PreparedLoader, active_loader
from shardkit.distributed.control import ControlGroup
from shardkit.errors import UsageError
from shardkit.log import get_logger

log = get_logger(__name__)

# Steps in which data are compared. Equal losses in one step are no sign: a head that begins with zeros
# gives every sample the same loss, and a warmup that begins with zero keeps it for another step.
CHECKED_STEPS = 3


class SameData:
    """The check of one run, over the growing list of its loaders."""

    def __init__(self, loaders: Sequence[PreparedLoader], control: ControlGroup, copies: int = 1) -> None:
        """`copies`: number of consecutive ranks that share each sample."""
        self._loaders, self._control, self._copies = loaders, control, copies
        self._left = CHECKED_STEPS if control.world_size > 1 else 0
        self._loss: torch.Tensor | None = None
        self._losses: list[float | None] = []
        self._compared: dict[int, list[str] | None] = {}
        """What was compared last where ranks met, by the number of the loader."""

    def note_loss(self, loss: torch.Tensor) -> None:
        """Notes the loss of a micro-batch that came from no prepared loader."""
        if self._left:
            own = active_loader(self._loaders) is None and type(loss) is torch.Tensor and loss.numel() == 1
            self._loss = loss.detach() if own else None

    def check(self) -> None:
        """Raises UsageError on all ranks where their loaders read different data. Warns, once, if the ranks had equal
        losses in each of the first steps. Collective in these steps."""
        if not self._left:
            return
        self._left -= 1
        self._refuse_different()
        self._losses.append(None if self._loss is None else float(self._loss))
        self._loss = None
        if self._left == 0 and self._control.decide(self._losses, self._are_equal) and self._control.rank == 0:
            log.warning(
                "data: all ranks had the same losses in the first %d steps, with batches of no prepared loader, so "
                "they seem to train on the same samples; give the DataLoader to accelerator.prepare and read what it "
                "returns, or give each rank samples of its own. (A loss over the samples of all ranks is equal too, "
                "and right.)",
                CHECKED_STEPS,
            )

    def text(self) -> str:
        """What the newest loop over each loader has read first, where it is yet to be compared. Ranks compare it where
        they gather or reduce values, such as those of an evaluation."""
        found = self._first()
        return "".join(f"{number}{first}" for number, first in found.items() if first != self._compared.get(number))

    def note_equal(self) -> None:
        """The texts of all ranks are the same."""
        self._compared = self._first()

    def compare(self) -> None:
        """Raises UsageError on all ranks where their loaders read different data. Collective."""
        self.note_equal()
        self._refuse_different()

    def _first(self) -> dict[int, list[str] | None]:
        loops = enumerate(loader.newest_loop for loader in self._loaders)
        return {number: None if loop is None else loop.first for number, loop in loops}

    def _are_equal(self, losses: list[list[float | None]]) -> bool:
        of_samples = losses[:: self._copies]
        return len(of_samples) > 1 and None not in losses[0] and all(own == losses[0] for own in of_samples)

    def _refuse_different(self) -> None:
        if problem := self._control.decide(list(self._first().values()), _difference):
            raise UsageError(problem)


def _difference(first: list[list[list[str] | None]]) -> str | None:
    """What is wrong where a loader's first items differ between ranks; None where nothing is."""
    for number, of_loader in enumerate(zip(*first, strict=False), 1):
        known = [fields for fields in of_loader if fields is not None]
        if len(known) > 1 and are_different(known):
            return (
                f"data: the dataset or sampler of prepared loader {number} yields different items on each rank, and "
                "each keeps only its part of them, so samples would be lost; begin as many loops over it on every "
                "rank; seed a random generator of its own alike on all ranks; give an IterableDataset that yields only "
                "its rank's part (by RANK, as LitData, MosaicML Streaming or WebDataset's split_by_node do) the "
                "attribute split_by_rank = (rank, number of ranks), or False if its samples only look different."
            )
    return None
