"""Weights that are NaN, as after a loss that has diverged. They are saved like any others, and the manifest names them:
retention keeps a checkpoint from before them, and a resume warns."""

from collections.abc import Container
from contextlib import suppress

import torch

from shardkit.checkpoint.files.layout import is_model
from shardkit.checkpoint.files.manifest import Manifest
from shardkit.checkpoint.saving import retention
from shardkit.checkpoint.saving.save_request import Pieces
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.storage.url import Place
from shardkit.wording import first_few

log = get_logger(__name__)

# So many names go into a manifest, of each rank: all weights are NaN soon after the first.
MOST = 3

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@torch.no_grad()
def names(pieces: Pieces, packed: Container[tuple[str, str]]) -> list[str]:
    """Names of the model's tensors with NaN among what this rank writes, `MOST` at most. In `packed` ones, by section
    and name, bits that would be NaN are none.

    A sum is NaN if one of its values is, or if it has infinite ones of both signs; only then each value is looked at.
    So it costs one pass over the weights, and waits for a device once.
    """
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for section, of_section in pieces.items():
        for chunk, tensor in of_section if is_model(section) else ():
            if tensor.dtype in _DTYPES and (section, chunk.name) not in packed:
                by_device.setdefault(tensor.device, []).append((chunk.name, tensor))
    found: dict[str, None] = {}
    for named in by_device.values():
        sums = torch.stack([tensor.sum(dtype=torch.float32) for _, tensor in named]).isnan().tolist()
        suspects = [one for one, is_nan in zip(named, sums, strict=True) if is_nan]
        found |= {name: None for name, tensor in suspects if tensor.isnan().any()}
    return list(found)[:MOST]


def warn(path: Place, record: Manifest, done: str) -> None:
    """Warns of a checkpoint whose weights are NaN, where they are, with the newest one beside it whose are not.
    `done`: saved or loaded."""
    if not record.nan:
        return
    usable = None
    with suppress(CheckpointError, OSError):
        usable = retention.newest_before_nan(path.parent)
    advice = "no checkpoint beside it is without" if usable is None else f"resume from the last one without: {usable}"
    log.warning(
        "checkpoint: step %d: the weights that were %s have NaN values (such as in %s); %s.",
        *(record.step, done, first_few(record.nan, MOST), advice),
    )
