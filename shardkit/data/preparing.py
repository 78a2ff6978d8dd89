"""Makes a prepared loader of the user's DataLoader."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from shardkit.data.agreement import agreed_seed, own_seed
from shardkit.data.loader import PreparedLoader
from shardkit.data.sources import layout_of, source_of
from shardkit.errors import UsageError


def prepare_loader(
    loader: Any,
    rank: int,
    world_size: int,
    device: torch.device | None,
    seed: int | None = None,
    *,
    number: int = 0,
    split_batches: bool = False,
    even_batches: bool = True,
) -> PreparedLoader:
    """A loader that yields this rank's part of every global batch, on `device`. Collective: every rank must call it.

    A global batch is batch_size x world_size samples; with split_batches, batch_size samples. The order comes from the
    seed of the loader's own generator, else from `seed`, else from rank 0's torch seed. `number`: how many loaders
    before this one share its generator, or also have none. A prepared loader is returned unchanged.
    """
    if isinstance(loader, PreparedLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"prepare: not a torch DataLoader (got {type(loader).__name__}); wrap the dataset in "
            "torch.utils.data.DataLoader."
        )
    source = source_of(loader, layout_of(loader, rank, world_size, split_batches, even_batches), split_batches)
    if device is not None and device.type == "cpu":
        source.loader.pin_memory = False  # pinning would initialize an accelerator that the run does not use
    agreed = agreed_seed(source, own_seed(loader, seed, number), rank, world_size)
    return PreparedLoader(source, loader, rank, device, agreed)
