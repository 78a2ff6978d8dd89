"""Streams that give every rank its own part."""

import importlib.util
import json

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from shardkit import Accelerator, ProjectConfiguration
from shardkit.data.preparing import prepare_loader
from shardkit.errors import CheckpointError, UsageError
from tests.loaders import CPU, Flow, Numbers, prepared, read_inside, run
from tests.ranks import log_lines


class Part(IterableDataset):
    """Yields one rank's part of range(length): each world_size-th number."""

    def __init__(self, rank, world_size, length=40):
        self.split_by_rank = (rank, world_size)
        self.numbers = range(rank, length, world_size)

    def __iter__(self):
        return iter(self.numbers)


class PartWithState(Part):
    position = 0

    def __iter__(self):
        while self.position < len(self.numbers):
            self.position += 1
            yield self.numbers[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def hugging_face(rank, world_size, length=40, shards=4, shuffle=False):
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    stream = Dataset.from_dict({"x": list(range(length))}).to_iterable_dataset(num_shards=shards)
    return split_dataset_by_node(stream.shuffle(seed=3, buffer_size=7) if shuffle else stream, rank, world_size)


def hugging_face_by_example(rank, world_size):
    return hugging_face(rank, world_size, shards=5)


def hugging_face_shuffled(rank, world_size):
    return hugging_face(rank, world_size, shuffle=True)


needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
HUGGING_FACE = [
    pytest.param(kind, marks=[needs_datasets, pytest.mark.slow])
    for kind in (hugging_face, hugging_face_by_example, hugging_face_shuffled)
]
KINDS = [Part, PartWithState, *HUGGING_FACE]


def values(samples):
    return [sample["x"] if isinstance(sample, dict) else sample for sample in samples]


def loader_of(make, rank, world_size, **options):
    loader = DataLoader(make(rank, world_size), batch_size=4, collate_fn=values, **options)
    return prepare_loader(loader, rank, world_size, CPU, 7)


def part_read(make, rank, world_size, start=None, stop=None, **options):
    """What a rank reads of two epochs, and its own position after it."""
    loader, given = loader_of(make, rank, world_size, **options), []
    if start is not None:
        loader.load_state_dict(start)
    while loader.epoch < 2:
        for batch in loader:
            given += batch
            if stop is not None and len(given) >= stop:
                return given, json.loads(json.dumps(loader.state_dict()))
    return given, loader.state_dict()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_part_resumes_exactly_on_as_many_ranks(make, workers):
    wholes = [part_read(make, rank, 2, num_workers=workers)[0] for rank in range(2)]
    assert sorted(number for whole in wholes for number in whole[:20]) == list(range(40))
    for rank, whole in enumerate(wholes):
        for stop in (4, 12, 20, 28):
            before, state = part_read(make, rank, 2, stop=stop, num_workers=workers)
            rest, _ = part_read(make, rank, 2, state, num_workers=workers)
            assert before + rest == whole, stop


def train(folder, make, steps, resume):
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"}, project_config=project)
    place = accelerator.process_index, accelerator.num_processes
    loader = accelerator.prepare(DataLoader(make(*place), batch_size=4, collate_fn=values))
    before = loader.state_dict()
    problem = None
    if resume:
        try:
            accelerator.load_state()
        except CheckpointError as error:
            problem = str(error)
            assert loader.state_dict() == before
    given = []
    for number, batch in enumerate(loader, 1):
        given += batch
        if number == steps:
            accelerator.save_state()
            break
    accelerator.end_training()
    return problem, given


@pytest.mark.slow
@pytest.mark.parametrize("make", [Part, PartWithState, *HUGGING_FACE])
def test_another_number_of_ranks_is_refused_on_all_of_them_before_anything_changes(ranks, tmp_path, make):
    folder = str(tmp_path)
    first = [given for _, given in ranks.run(2, train, folder, make, 2, False)]
    for world in (1, 3):
        for problem, _ in ranks.run(world, train, folder, make, None, True):
            assert (
                "cannot be loaded; nothing was changed:\n  loader.0: the stream is split over ranks differently"
                in problem
            )
            assert f"(got {world} parts, saved 2 parts)" in problem
            assert "load_state(..., data_position=False)" in problem
    rest = ranks.run(2, train, folder, make, None, True)
    assert [problem for problem, _ in rest] == [None, None]
    together = [number for part in (*first, *(given for _, given in rest)) for number in part]
    assert sorted(together) == list(range(40))


def at_the_end_of_an_epoch(folder, resume):
    return train(folder, Part, 5, False) if not resume else train(folder, Part, None, True)


def test_an_epoch_that_is_over_goes_on_on_any_number_of_ranks(ranks, tmp_path):
    ranks.run(2, at_the_end_of_an_epoch, str(tmp_path), False)
    assert ranks.run(3, at_the_end_of_an_epoch, str(tmp_path), True) == [(None, [])] * 3


def uneven(length):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Part(rank, world_size, length), batch_size=4, collate_fn=values)
    loader = prepare_loader(loader, rank, world_size, CPU, 7)
    given = []
    with log_lines("shardkit.data") as lines:
        for _ in range(2):
            for batch in loader:
                dist.all_reduce(torch.zeros(1))  # a step: hangs where another rank has no batch
                given.append((batch, loader.end_of_dataloader, loader.newest_loop.piece.samples))
    return given, (loader.epoch, loader.samples_seen), lines


def test_parts_of_different_lengths_end_together(ranks):
    for length, batches, last in ((37, 3, 12), (40, 4, 4), (36, 3, 12), (3, 1, 3), (2, 0, None)):
        found = ranks.run(3, uneven, length)
        for given, place, _ in found:
            assert place == (2, 0)
            assert [ends for _, ends, _ in given] == 2 * ([False] * (batches - 1) + [True])[:batches]
            assert [samples for _, _, samples in given] == 2 * ([12] * (batches - 1) + [last])[:batches]
        ended = {37: 2, 2: 1}.get(length)
        text = (
            f"data: the ranks' parts of the stream have different lengths: {ended} of 3 are at their end, and the "
            "epoch ends there on all ranks; the rest of the other parts is not read."
        )
        assert [said for _, _, said in found] == [[text] * 2 if ended else [], [], []]


def train_a_model(strategy):
    config = {"use_cpu": True, "distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": strategy}}
    accelerator = Accelerator(config=config, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    part = Part(accelerator.process_index, accelerator.num_processes, 37)
    loader = DataLoader(part, batch_size=4, collate_fn=lambda numbers: torch.tensor(numbers)[:, None].float())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.gather(batch[:1])
    return accelerator.counters.step, accelerator.counters.samples_seen


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 3])
def test_a_model_trains_on_parts_of_different_lengths(ranks, strategy):
    assert ranks.run(3, train_a_model, strategy) == [(6, 108)] * 3


def refused(make, text):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(UsageError) as caught:
        loader_of(make, rank, world_size)
    assert text in str(caught.value), str(caught.value)


def of_nodes(rank, world_size):
    return Part(rank // 2, 1)


def mixed(rank, world_size):
    return Part(rank, world_size) if rank else Flow()


def test_a_stream_that_is_split_over_others_than_the_ranks_is_refused_on_all(ranks):
    ranks.run(
        2, refused, of_nodes, "split, but not over the 2 ranks (got part 0 of 1 on rank 0, part 0 of 1 on rank 1)"
    )
    ranks.run(2, refused, mixed, "the stream is split by rank on some ranks only; split it on all of them, or on none.")
    with pytest.raises(UsageError, match=r"not over the 1 ranks \(got part 0 of 4 on rank 0\)"):
        prepare_loader(DataLoader(Part(0, 4)), 0, 1, CPU, 7)


def accepted(make):
    loader_of(make, dist.get_rank(), dist.get_world_size())


def subset(rank, world_size):
    return Subset(Numbers(), range(rank, 40, world_size))


class Transformed(Dataset):
    """As scripts wrap the parts of random_split, to transform them differently."""

    def __init__(self, part):
        self.part, self.labels = part, ["a", "b"]

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        return -self.part[index]


def subset_inside(rank, world_size):
    return ConcatDataset([Transformed(subset(rank, world_size)), Numbers(4)])


def same_subset_inside(rank, world_size):
    return ConcatDataset([Transformed(same_subset(rank, world_size)), Numbers(4)])


def warnings_of_tensors(kind):
    own = torch.randperm(40, generator=torch.Generator().manual_seed(dist.get_rank()))[:20]
    data = {"own": (own,), "own, same labels": (own, torch.zeros(20)), "same": (torch.arange(20),)}[kind]
    with log_lines("shardkit.data") as lines:
        prepare_loader(DataLoader(TensorDataset(*data), batch_size=4), dist.get_rank(), dist.get_world_size(), CPU, 7)
    return lines


def test_tensors_that_each_rank_has_split_by_itself_are_told(ranks):
    (text,), others = ranks.run(2, warnings_of_tensors, "own")
    assert text.startswith("data: the tensors of a TensorDataset are not the same on all ranks") and not others
    assert ranks.run(2, warnings_of_tensors, "same") == [[], []]
    assert ranks.run(2, warnings_of_tensors, "own, same labels") == [[], []], "one field may be a path, or a noise"


def same_subset(rank, world_size):
    return Subset(Numbers(), range(0, 40, world_size))


def rows(rank, world_size):
    from datasets import Dataset

    return Dataset.from_dict({"x": list(range(40)), "constant": [0] * 40})


def rows_of_rank(rank, world_size):
    return rows(rank, world_size).remove_columns("constant").shard(world_size, rank)


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        (same_subset, subset),
        (same_subset_inside, subset_inside),
        pytest.param(rows, rows_of_rank, marks=[needs_datasets, pytest.mark.slow]),
    ],
)
def test_a_data_set_that_each_rank_has_split_is_refused_on_all(ranks, whole, part):
    ranks.run(2, refused, part, "prepare: the dataset is another part or order of the data on each rank")
    ranks.run(2, accepted, whole)


def test_a_position_of_version_0_1_is_refused_on_another_number_of_ranks():
    _, state = part_read(Part, 0, 2, stop=8)
    old = {key: value for key, value in state.items() if key not in ("split", "shuffle", "order")}
    now = loader_of(Part, 0, 2)
    assert now.misfit(old, saved_ranks=2) is None
    assert "(got 2 parts, saved 3 parts)" in now.misfit(old, saved_ranks=3)
    assert "(got a whole stream, saved 2 parts)" in prepared(dataset=Flow()).misfit(state, saved_ranks=2)
    assert prepared(dataset=Flow()).misfit(old, saved_ranks=2) is None


class SizedPart(Part):
    def __len__(self):
        return len(self.numbers)


def test_parts_with_a_length_begin_an_epoch_on_any_number_of_ranks():
    loader = loader_of(SizedPart, 0, 3)
    assert len(loader) == 4 == len(list(loader))
    _, state = part_read(SizedPart, 0, 3, stop=4)
    assert "(got 2 parts, saved 3 parts)" in loader_of(SizedPart, 0, 2).misfit(state, saved_ranks=3)
    assert loader_of(SizedPart, 0, 2).misfit(loader.state_dict(), saved_ranks=3) is None


def whole_stream(rank, world_size, seed=5):
    from datasets import Dataset

    stream = Dataset.from_dict({"x": list(range(41))}).to_iterable_dataset(num_shards=4)
    return stream.map(lambda sample: {"x": sample["x"] + 100}).shuffle(seed=seed, buffer_size=10)


def shuffled_otherwise(rank, world_size):
    return whole_stream(rank, world_size, seed=None)


@needs_datasets
@pytest.mark.slow
def test_hugging_face_streams_that_are_shuffled_without_a_seed_are_refused(ranks):
    ranks.run(2, refused, shuffled_otherwise, "the stream is shuffled in a different order on each rank (no seed?)")
    _, state = part_read(shuffled_otherwise, 0, 1, stop=8)
    with pytest.raises(CheckpointError, match=r"shuffled in a different order than when .* was saved \(no seed\?\)"):
        part_read(shuffled_otherwise, 0, 1, state)


@pytest.mark.slow
@needs_datasets
def test_a_hugging_face_stream_that_an_earlier_run_left_begins_anew_in_every_epoch():
    from datasets import IterableDataset

    def numbers():
        yield from ({"x": number} for number in range(20))

    stream = IterableDataset.from_generator(numbers)
    for _ in range(2):
        loader = prepare_loader(DataLoader(stream, batch_size=4, collate_fn=values), 0, 1, CPU, 7)
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            assert [int(one) for batch in loader for one in batch] == list(range(20))
        loader.set_epoch(1)
        next(iter(loader))


@pytest.mark.slow
@needs_datasets
@pytest.mark.parametrize("inner", [1, 10])
def test_a_loop_over_a_hugging_face_stream_goes_on_after_loops_inside_it(inner):
    from datasets import Dataset

    def make():
        stream = Dataset.from_dict({"x": list(range(41))}).to_iterable_dataset(num_shards=4)
        loader = DataLoader(stream, batch_size=4, collate_fn=lambda samples: torch.tensor(values(samples)))
        return prepare_loader(loader, 0, 1, CPU, 7)

    read_inside(make, inner)


@needs_datasets
@pytest.mark.slow
def test_a_whole_hugging_face_stream_resumes_on_any_number_of_ranks_and_says_what_is_faster(capsys):
    def make(rank, world):
        loader = DataLoader(whole_stream(rank, world), batch_size=12 // world, collate_fn=values)
        return prepare_loader(loader, rank, world, CPU, 7)

    whole, _ = run(1, make=make, epochs=2)
    assert sorted(whole[:41]) == list(range(100, 141)) != whole[:41]
    assert "split_dataset_by_node" not in capsys.readouterr().err
    for stop in (1, 2, 3):
        before, state = run(2, make=make, stop=stop)
        for world in (1, 2, 3):
            rest, _ = run(world, state, make=make)
            assert (before + rest)[:41] == whole[:41]
    said = capsys.readouterr().err
    assert "data: every rank reads and decodes the whole stream and keeps its part." in said
