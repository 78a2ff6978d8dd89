"""Notices a script that never splits the sequences that its ranks are to share: each then trains on whole ones."""

from shardkit.log import get_logger
from shardkit.sharding.context_parallel.region import Region

log = get_logger(__name__)

_CHECKED_STEP = 3


class WholeSequences:
    """The check of one run."""

    def __init__(self, region: Region, is_main: bool) -> None:
        self._region = region
        self._steps = 0 if is_main and region.group.size > 1 else _CHECKED_STEP

    def check(self) -> None:
        """Warns, once, where none of the first steps had a region. Called before each step."""
        if self._steps == _CHECKED_STEP:
            return
        self._steps += 1
        if self._steps == _CHECKED_STEP and not self._region.slices:
            log.warning(
                "context_parallel: %d ranks are to share each sequence (shardkit.mesh.context_size), but the first %d "
                "steps have split none, so each of these ranks has trained on the same whole ones; compute forward and "
                "loss inside `with accelerator.context_parallel(tokens, targets) as (tokens, targets):`, or set 1.",
                self._region.group.size,
                _CHECKED_STEP,
            )
