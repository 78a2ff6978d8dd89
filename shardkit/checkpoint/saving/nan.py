"""Weights that are NaN, as after a loss that has diverged. They are saved like any others, and the manifest names them:
retention keeps a checkpoint from before them, and a resume warns."""

from contextlib import suppress

import torch

from shardkit.checkpoint.files.layout import is_model
from shardkit.checkpoint.files.manifest import Manifest
from shardkit.checkpoint.saving import retention
from shardkit.checkpoint.saving.save_request import PreparedSave
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.storage.url import Place
from shardkit.wording import first_few

log = get_logger(__name__)

# So many names go into a manifest, of each rank: all weights are NaN soon after the first.
MOST = 3

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def note(prepared: PreparedSave, section: str, name: str, values: torch.Tensor) -> None:
    """Note a tensor that is written, in host memory, if it is one of a model's and has NaN values.

    A sum is NaN if one of its values is, or if it has infinite ones of both signs; only then each value is looked at.
    Bits of packed weights that would be NaN are none.
    """
    is_known = name in prepared.nan or len(prepared.nan) == MOST
    if is_known or not is_model(section) or (section, name) in prepared.packed or values.dtype not in _DTYPES:
        return
    if values.sum(dtype=torch.float32).isnan() and values.isnan().any():
        prepared.nan.append(name)


def warn(path: Place, record: Manifest, done: str) -> None:
    """Warns of a checkpoint whose weights are NaN, where they are, with the newest one beside it whose are not.
    `done`: saved or loaded."""
    if not record.nan:
        return
    usable = None
    with suppress(CheckpointError, OSError):
        usable = retention.newest_without_nan(path.parent)
    advice = "no checkpoint beside it is without"
    if usable is not None:
        advice = f"resume from the last one without, {usable}; with debug: true the error names where they begin"
    log.warning(
        "checkpoint: step %d: the weights that were %s have NaN values (such as in %s); %s.",
        *(record.step, done, first_few(record.nan, MOST), advice),
    )
