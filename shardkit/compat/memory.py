"""The API of `accelerate.utils.memory`."""

import gc
from typing import Any

from shardkit.distributed import accelerators


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached device memory."""
    if garbage_collection:
        gc.collect()
    accelerators.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """One None for each object: `a, b = release_memory(a, b)`."""
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count
