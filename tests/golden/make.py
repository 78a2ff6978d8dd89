"""Writes what later versions must still read, checkpoints and positions: `python -m tests.golden.make` at a release."""

from pathlib import Path

import shardkit
from tests import checkpoints
from tests.checkpoints import fill, prepared
from tests.golden import positions
from tests.ranks import Pool


def save(root):
    import random

    import torch

    live = prepared("fsdp")
    fill(live, 3)
    random.seed(5)
    torch.manual_seed(5)
    for kind in ("sharded", "full"):
        checkpoints.save(live, root / kind, 3, kind, config_text="mixed_precision: 'no'\n", samples_seen=36, epoch=1)


if __name__ == "__main__":
    folder = Path(__file__).parent / shardkit.__version__
    folder.mkdir()
    positions.save(folder)
    pool = Pool()
    pool.run(2, save, folder)
    pool.close()
