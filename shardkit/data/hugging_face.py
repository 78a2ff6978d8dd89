"""Facts about streams of Hugging Face `datasets`, read from their attributes: nothing is imported."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any


def is_stream(dataset: Any) -> bool:
    """Whether it is a `datasets.IterableDataset`."""
    return hasattr(dataset, "_ex_iterable") and hasattr(dataset, "_distributed")


def split_of(dataset: Any) -> tuple[int, int] | None:
    """(rank, world size) that `split_dataset_by_node` was given; None where the stream is whole."""
    split = getattr(dataset, "_distributed", None)
    return None if split is None else (split.rank, split.world_size)


def how_to_split(parts: int, ranks: int) -> str:
    """The call that gives each rank its part, or each group of ranks that share sequences."""
    each = "" if parts == ranks else f" // {ranks // parts}"
    return f"split_dataset_by_node(dataset, accelerator.process_index{each}, accelerator.num_processes{each})"


def first_row(dataset: Any) -> list[dict[str, Any]]:
    """The first row of a `datasets.Dataset`, as stored: nothing is decoded or transformed. Empty for other datasets."""
    if not (hasattr(type(dataset), "with_format") and hasattr(dataset, "_fingerprint")) or is_stream(dataset):
        return []
    return dataset.with_format("arrow")[:1].to_pylist()


def loses_samples(dataset: Any) -> bool:
    """Whether its own state leaves out the samples in a shuffle buffer (documented at `IterableDataset.state_dict`)."""
    return any(type(step).__name__ == "BufferShuffledExamplesIterable" for step in _steps(dataset))


def shuffle_digest(dataset: Any) -> str | None:
    """Equal for streams that are shuffled in the same order; None for one that is not shuffled. Without a seed,
    `shuffle` draws a different order in every process."""
    generators = [step.generator for step in _steps(dataset) if hasattr(step, "generator")]
    if not generators:
        return None
    states = [generator.bit_generator.state for generator in generators]
    text = json.dumps(states, sort_keys=True, default=lambda array: array.tolist())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _steps(dataset: Any) -> Iterator[Any]:
    """The steps of the stream's pipeline, the last first."""
    waiting = [dataset._ex_iterable] if is_stream(dataset) else []
    while waiting:
        step = waiting.pop()
        yield step
        waiting += [step.ex_iterable] if hasattr(step, "ex_iterable") else getattr(step, "ex_iterables", [])
