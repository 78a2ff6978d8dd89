"""Detects ranks at different batches of the training loop: one has left a loop before the others, or left out steps."""

from shardkit.log import get_logger
from shardkit.wording import ranks_text

log = get_logger(__name__)


def warn(different: list[int]) -> None:
    """Warns of the ranks that are at another batch than rank 0."""
    log.warning(
        "data: %s at another batch than rank 0: one has left a loop before the others, or left out a step, so steps "
        "mix batches that do not belong together, and the ranks end at different times; decide by a value that is the "
        "same on all (accelerator.reduce(value, 'mean')).",
        ranks_text(different) + (" is" if len(different) == 1 else " are"),
    )
