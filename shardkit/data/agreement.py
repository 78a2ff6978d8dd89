"""What ranks agree on when a loader is prepared: one seed, and that all of them read the same data."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from shardkit.data import hugging_face
from shardkit.data.first_items import COMPARED, are_different, fields_of
from shardkit.data.shares import number_of_batches, uneven_text
from shardkit.data.sources import Source, batch_sampler_of
from shardkit.distributed import control
from shardkit.distributed.seed import stream_seed
from shardkit.errors import UsageError
from shardkit.log import get_logger

log = get_logger(__name__)

NESTED = 3
"""Datasets in datasets that are looked at: a subset in a dataset that transforms it, in a concatenation."""


def generator_of(loader: Any) -> torch.Generator | None:
    """The generator that the user gave to the loader, prepared or not, or to its sampler. Samplers of the script may
    name another thing so: numpy's generator, or a method."""
    batches = batch_sampler_of(loader)
    holders = (loader, loader.sampler, batches, getattr(batches, "sampler", None))
    named = (getattr(one, "generator", None) for one in holders)
    return next((found for found in named if isinstance(found, torch.Generator)), None)


def own_seed(loader: DataLoader, seed: int | None, number: int) -> int:
    """This rank's seed for the loader's order: that of the loader's generator, else `seed`, else torch's.

    `number` distinguishes loaders that share a generator or have none: two datasets of equal length are shuffled
    differently.
    """
    generator = generator_of(loader)
    if generator is not None:
        seed = generator.initial_seed()
    elif seed is None:
        seed = torch.initial_seed()
    return stream_seed(seed, f"loader {number}") if number else seed


def agreed_seed(source: Source, seed: int, rank: int, world_size: int) -> int:
    """Rank 0's seed. Collective. Raises UsageError on all ranks where their data differ: a rank would wait for batches
    that never come, or read another rank's samples."""
    own = {"seed": seed, "rank": rank, **_facts(source)}
    everyone = control.start()
    if everyone.world_size > 1:  # also where all share each sequence, and so read as one
        problem, seed, doubt = everyone.decide(
            own, lambda answers: (_problem(answers, world_size), answers[0]["seed"], _doubt(answers))
        )
        if doubt and rank == 0:
            log.warning("%s", doubt)
    else:
        problem = _problem([own], world_size)
    problem = problem or _uneven_end(source)
    if problem:
        raise UsageError(f"prepare: {problem}")
    if source.units and not number_of_batches(source.units, source.layout) and rank == 0:
        log.warning(
            "data: this loader has no batches: drop_last drops the only one, which is not full (got %d of %d); use a "
            "smaller batch size, or drop_last=False.",
            source.units,
            source.layout.global_batch,
        )
    return seed


def _facts(source: Source) -> dict[str, Any]:
    """What must be equal on all ranks. The parts of a stream that is split by rank may have any length."""
    is_whole = source.split is None
    return {
        "the dataset's length": source.dataset_length if is_whole else None,
        "the sampler's length": source.units if is_whole else None,
        "the global batch size": source.total_batch_size,
        "shuffle": hugging_face.shuffle_digest(source.dataset),
        "parts": [fields_of(items) for items in _parts(source.dataset)],
        "tensors": fields_of(_first_rows(source.dataset)),
        "split": source.split,
    }


def _parts(dataset: Any, depth: int = NESTED) -> Iterator[list[Any]]:
    """What tells one part of the data from another, where it is known without reading a sample: of each subset and
    Hugging Face dataset that the dataset is, or contains. (What streams yield first is compared later.)"""
    if isinstance(dataset, Subset):
        yield list(islice(dataset.indices, COMPARED))
    elif row := hugging_face.first_row(dataset):
        yield row
    elif depth and isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset):
        for value in vars(dataset).values():
            for one in value if isinstance(value, (list, tuple)) and len(value) <= COMPARED else [value]:
                yield from _parts(one, depth - 1)


def _first_rows(dataset: Any) -> list[Any]:
    is_in_memory = isinstance(dataset, TensorDataset)
    return [dataset[number] for number in range(min(COMPARED, len(dataset)))] if is_in_memory else []


def _doubt(answers: list[dict[str, Any]]) -> str | None:
    """A warning where the ranks' tensors differ; they may be random in a first trial."""
    if not are_different([own["tensors"] for own in answers]):
        return None
    return (
        "data: the tensors of a TensorDataset are not the same on all ranks, and each rank is given only a part of its "
        "own (drawn, shuffled or split at random without a seed?); make the same on all ranks: seed the generator."
    )


def _problem(answers: list[dict[str, Any]], world_size: int) -> str | None:
    """What is wrong with the ranks' answers; None where nothing is."""
    for what in ("the dataset's length", "the sampler's length", "the global batch size"):
        sizes = [own[what] for own in answers]
        if len(set(sizes)) > 1:
            return (
                f"{what} is not the same on all ranks (got {', '.join(map(str, sizes[:8]))} by rank); give every rank "
                "the whole dataset and the same batch_size: shardkit shards it."
            )
    if any(map(are_different, zip(*(own["parts"] for own in answers), strict=False))):
        return (
            "the dataset is another part or order of the data on each rank, and each rank would be given a part of "
            "that; give every rank the whole dataset, not split by rank, and seed a random split alike on all ranks."
        )
    if len({own["shuffle"] for own in answers}) > 1:
        return (
            "the stream is shuffled in a different order on each rank (no seed?); give its shuffle(seed=...) the same "
            "number on all ranks."
        )
    if any(own["split"] is not None and list(own["split"]) != [own["rank"], world_size] for own in answers):
        return _wrong_split(answers, world_size)
    if len({own["split"] is None for own in answers}) > 1:
        return "the stream is split by rank on some ranks only; split it on all of them, or on none."
    return None


def _wrong_split(answers: list[dict[str, Any]], world_size: int) -> str:
    parts = [f"part {own['split'][0]} of {own['split'][1]} on rank {own['rank']}" for own in answers if own["split"]]
    return (
        f"the stream is split, but not over the {world_size} ranks (got {', '.join(parts[:4])}); split it with "
        f"{hugging_face.how_to_split(world_size, len(answers))}, or leave it whole."
    )


def _uneven_end(source: Source) -> str | None:
    """What is wrong where the last global batch is known to leave some ranks without samples; else None."""
    layout = source.layout
    if source.units is None or layout.even or layout.drop_last:
        return None
    left = source.units % layout.global_batch
    return uneven_text(left, layout.world_size) if 0 < left < layout.world_size else None
