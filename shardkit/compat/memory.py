"""The API of `accelerate.utils.memory`."""

from typing import Any

from shardkit.distributed import accelerators


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Release cached device memory."""
    accelerators.collect_garbage() if garbage_collection else accelerators.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """One None for each object: `a, b = release_memory(a, b)`."""
    count = len(objects)
    del objects
    accelerators.collect_garbage()
    return [None] * count
