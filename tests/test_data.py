"""Prepared loaders. A rank's part depends on its number alone, so most worlds here are made in one process."""

import copy
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from itertools import islice

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from shardkit.data import stream
from shardkit.data.device import to_device
from shardkit.data.loader import active_loader
from shardkit.data.preparing import prepare_loader
from shardkit.data.skipping import skip_first_batches
from shardkit.errors import CheckpointError, ShardkitError, UsageError
from tests.loaders import (
    CPU,
    Backwards,
    Chance,
    Fixed,
    Flow,
    FlowWithState,
    Numbers,
    Reversed,
    ShuffledFlow,
    WorkerAwareFlow,
    batch_sampled,
    distributed,
    flat,
    moved,
    prepared,
    run,
)


def test_ranks_together_read_what_one_process_reads():
    common = {"dataset": Numbers(36), "shuffle": True, "epochs": 2}
    alone, _ = run(1, batch_size=12, **common)
    assert alone[:36] != alone[36:]
    assert sorted(alone[:36]) == sorted(alone[36:]) == list(range(36))
    for world in (2, 3, 4):
        together, _ = run(world, batch_size=12 // world, **common)
        assert together == alone
    assert run(2, batch_size=12, split_batches=True, **common)[0] == alone


def test_the_order_is_a_function_of_seed_and_epoch_and_leaves_the_global_generators_alone():
    torch.manual_seed(1)
    first, before = flat(prepared(shuffle=True)), torch.get_rng_state()
    torch.manual_seed(2)
    loader = prepared(shuffle=True)
    assert flat(loader) == first
    torch.manual_seed(1)
    flat(prepared(shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
    loader.set_epoch(0)
    assert flat(loader) == first
    assert flat(prepared(shuffle=True, seed=8)) != first


def test_the_last_batch_is_padded_by_less_than_one_sample_a_rank():
    loaders = [prepared(rank, 4, Numbers(26), batch_size=5) for rank in range(4)]
    seen = []
    for parts in zip(*loaders, strict=True):
        seen.append((flat(parts), loaders[0].end_of_dataloader, loaders[0].remainder))
    assert seen[0] == (list(range(20)), False, -1)
    assert seen[1] == ([20, 21, 22, 23, 24, 25, 0, 1], True, 6)
    assert [loader.epoch for loader in loaders] == [1] * 4
    assert len(loaders[0]) == 2


def test_a_dataset_smaller_than_the_world_is_padded_round():
    parts = [flat(prepared(rank, 4, Numbers(1))) for rank in range(4)]
    assert parts == [[0]] * 4


def test_drop_last_and_uneven_batches():
    assert run(2, dataset=Numbers(21), drop_last=True)[0] == list(range(16))
    assert len(prepared(0, 2, Numbers(21), drop_last=True)) == 2
    parts = [flat(prepared(rank, 2, Numbers(21), even_batches=False)) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(21))


def test_a_loader_without_batches_is_told(capsys):
    """A full batch of one rank, but not of two: `while step < steps: for batch in loader` would never end."""
    for world, batches in ((1, 1), (2, 0)):
        loaders = [prepared(rank, world, Numbers(6), drop_last=True) for rank in range(world)]
        assert [len(list(loader)) for loader in loaders] == [batches] * world
    assert capsys.readouterr().err == (
        "shardkit: data: this loader has no batches: drop_last drops the only one, which is not full (got 6 of 8); use "
        "a smaller batch size, or drop_last=False.\n"
    )
    assert not list(prepared(0, 2, Numbers(0), drop_last=True)) and not capsys.readouterr().err


def test_samplers_of_the_users_own_are_sharded():
    for world in (1, 2):
        assert run(world, sampler=Backwards())[0] == list(range(39, -1, -1))
        assert sorted(run(world, sampler=Chance())[0]) == list(range(40))
    assert run(1, batch_size=8, sampler=Chance())[0] == run(2, sampler=Chance())[0]
    weighted = WeightedRandomSampler([1.0] * 40, 40)
    assert run(1, batch_size=8, sampler=weighted)[0] == run(2, sampler=weighted)[0]


def test_batch_samplers_of_the_users_own_are_sharded_by_batches():
    first, second = batch_sampled(0, 2), batch_sampled(1, 2)
    assert [flat([batch]) for batch in first][:2] == [[0], [3, 4, 5]]
    assert [flat([batch]) for batch in second][:2] == [[1, 2], [6, 7]]
    assert run(2, make=batch_sampled)[0] == list(range(40))
    _, state = run(2, make=batch_sampled, stop=3)
    assert run(4, state, make=batch_sampled)[0][:29] == list(range(11, 40))
    assert skip_first_batches(batch_sampled(0, 2), 3).samples_seen == state["samples_seen"] == 11


class WithItsOwnBatches(DataLoader):
    """Groups the sampler's indices by a class of its own, as torchdata's StatefulDataLoader does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        own = type("Own", (BatchSampler,), {})(self.sampler, self.batch_size, self.drop_last)
        object.__setattr__(self, "batch_sampler", own)


@pytest.mark.parametrize("kind", [DataLoader, WithItsOwnBatches])
def test_a_loader_with_batches_of_its_own_spreads_the_last_one_like_any_other(kind):
    loaders = [prepare_loader(kind(Numbers(), batch_size=8), rank, 2, CPU, 7) for rank in range(2)]
    assert [[batch.tolist() for batch in loader][-1] for loader in loaders] == [[32, 33, 34, 35], [36, 37, 38, 39]]


def test_batches_that_cannot_be_split_are_refused():
    fours = BatchSampler(SequentialSampler(Numbers()), 4, False)
    halves = type("Own", (BatchSampler,), {})(SequentialSampler(Numbers()), 4, False)
    assert run(2, make=batch_sampled, sampler=halves, split_batches=True)[0] == list(range(40))
    assert run(2, make=batch_sampled, sampler=fours)[0] == list(range(40))
    with pytest.raises(ShardkitError, match=r"cannot split evenly \(got 1 samples\)"):
        list(batch_sampled(0, 2, split_batches=True))
    with pytest.raises(UsageError, match=r"multiple of the number of ranks \(got 4 for 3 ranks\)"):
        prepared(0, 3, split_batches=True)


def test_a_dataset_of_ready_batches():
    parts = [[int(value) for value in prepared(rank, 2, batch_size=None)] for rank in range(2)]
    assert parts == [list(range(0, 40, 2)), list(range(1, 40, 2))]


class Rows(Numbers):
    """Asked for the rows of a batch at once."""

    def __getitem__(self, indices):
        assert type(indices) is list
        return torch.tensor(indices)


def rows_at_once(rank, world, size=12, workers=0):
    batches = BatchSampler(RandomSampler(range(40)), size // world, drop_last=False)
    return prepared(rank, world, dataset=Rows(), sampler=batches, batch_size=None, num_workers=workers)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_dataset_that_is_asked_for_many_rows_at_once(workers):
    expected, _ = run(1, shuffle=True)
    for world in (1, 2):
        before, state = run(world, make=rows_at_once, stop=1, workers=workers)
        assert before == expected[:12] and state["samples_seen"] == 12
        rest, _ = run(2, state, make=rows_at_once, size=8, workers=workers)
        assert before + rest == expected
    assert rows_at_once(0, 2).batch_size == 6 and len(rows_at_once(0, 2)) == 4


def test_a_distributed_sampler_is_not_sharded_twice(capsys):
    assert run(2, make=distributed, shuffle=False)[0] == list(range(40))
    assert "DistributedSampler already shards over ranks" in capsys.readouterr().err
    assert sorted(run(2, make=distributed)[0]) == list(range(40))
    assert run(2, make=distributed, kind=Reversed)[0] == list(range(39, -1, -1))
    with pytest.raises(ShardkitError, match="yields the same share for every rank"):
        run(2, make=distributed, kind=Fixed)


@pytest.mark.parametrize("kind", [Flow, ShuffledFlow, WorkerAwareFlow])
def test_every_rank_takes_its_slices_of_a_stream(kind):
    alone, _ = run(1, dataset=kind(26), batch_size=8, epochs=2)
    assert Counter(alone) == dict.fromkeys(range(26), 2)
    assert run(2, dataset=kind(26), epochs=2)[0] == alone
    padded, _ = run(4, dataset=kind(26), batch_size=2)
    assert padded[:26] == alone[:26]
    assert len(padded) == 28
    assert run(2, dataset=kind(26), drop_last=True)[0] == alone[:24]


class ItsOwnIterator(Flow):
    """Begins anew at every iter(), as classes with __next__ do."""

    def __iter__(self):
        self.left = list(range(self.length))
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


def test_a_stream_or_sampler_that_is_its_own_iterator_is_begun_once():
    for options in ({"dataset": ItsOwnIterator(40)}, {"sampler": ItsOwnIterator(40)}):
        before, state = run(1, stop=6, **options)
        rest, _ = run(2, state, stop=3, **options)
        assert before + rest == list(range(40))


def test_a_stream_without_workers_needs_no_shared_memory(monkeypatch):
    monkeypatch.delattr(torch.Tensor, "share_memory_")
    assert flat(prepared(dataset=Flow(6))) == [0, 1, 2, 3, 4, 5]


def test_the_end_of_a_stream_is_known_in_time():
    loader = prepared(1, 4, Flow(26), batch_size=2)
    seen = [(loader.end_of_dataloader, loader.remainder) for _ in loader]
    assert seen == [(False, -1), (False, -1), (False, -1), (True, 2)]
    assert (loader.end_of_dataloader, loader.epoch) == (False, 1)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Numbers, ShuffledFlow, WorkerAwareFlow])
def test_workers_change_nothing(kind, persistent):
    shuffle = {"shuffle": True} if kind is Numbers else {}
    alone, _ = run(1, dataset=kind(26), batch_size=6, epochs=2, **shuffle)
    workers = {"num_workers": 2, "persistent_workers": persistent, **shuffle}
    assert run(1, dataset=kind(26), batch_size=6, epochs=2, **workers)[0] == alone
    _, state = run(1, dataset=kind(26), batch_size=6, epochs=2, stop=7, **workers)
    assert state["samples_seen"] == 12
    assert run(1, state, dataset=kind(26), batch_size=4, **workers)[0] == alone[38:]


class Splittable(Flow):
    part, parts = 0, 1

    def __iter__(self):
        return iter(range(self.part, self.length, self.parts))

    def split(self, part, parts):
        self.part, self.parts = part, parts


def split_over_workers(number):
    """As the torch documentation shows: sets attributes of what the worker reads."""
    info = get_worker_info()
    info.dataset.part, info.dataset.parts = number, info.num_workers


def split_inside_workers(number):
    info = get_worker_info()
    info.dataset.split(number, info.num_workers)


@pytest.mark.slow
@pytest.mark.parametrize(("start", "is_told"), [(split_over_workers, False), (split_inside_workers, True)])
def test_workers_that_split_a_stream_by_themselves(capsys, start, is_told):
    stream._warn_of_workers.cache_clear()
    given = flat(prepared(dataset=Splittable(), num_workers=2, worker_init_fn=start))
    assert (sorted(given) == list(range(40))) is not is_told
    assert ("data: the workers of a loader read different streams" in capsys.readouterr().err) is is_told
    assert sorted(flat(prepared(dataset=Flow(), num_workers=2))) == list(range(40)) and not capsys.readouterr().err


class Noise(Numbers):
    """Draws from every global generator, as augmentation does."""

    def __getitem__(self, index):
        return index, int(torch.randint(10**6, ())), random.random(), float(numpy.random.random())


@pytest.mark.slow
@pytest.mark.fault_row(20)
@pytest.mark.parametrize("persistent", [False, True])
def test_what_workers_draw_at_random_goes_on_after_a_resume_and_differs_between_ranks(persistent):
    def noise(rank, start=None):
        workers = {"num_workers": 2, "persistent_workers": persistent, "collate_fn": list}
        loader = prepared(rank, 2, Noise(24), shuffle=True, **workers)
        if start is not None:
            loader.load_state_dict(start)
        return loader

    whole = [*(loader := noise(0)), *loader]
    assert len({draw for batch in whole for sample in batch for draw in sample[1:]}) == 2 * 12 * 3
    for number, batch in enumerate(loader := noise(0)):
        assert batch == whole[number]
        if number == 1:
            break
    state = loader.state_dict()
    assert [*(resumed := noise(0, state)), *resumed] == whole[2:]
    drawn, others = ({draw for batch in noise(rank) for sample in batch for draw in sample[1:]} for rank in range(2))
    assert not drawn & others


@pytest.mark.fault_row(20)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Numbers, {"shuffle": True}), (Numbers, {"sampler": Chance()}), (ShuffledFlow, {}), (FlowWithState, {})],
)
def test_resume_at_every_step_repeats_and_loses_nothing(kind, options):
    whole, _ = run(2, dataset=kind(40), epochs=3, **options)
    assert len(whole) == 120
    for stop in range(1, 10):
        before, state = run(2, dataset=kind(40), epochs=2, stop=stop, **options)
        assert before == whole[: 8 * stop]
        assert state["samples_seen"] == (8 * stop - 1) % 40 + 1
        rest, _ = run(2, state, dataset=kind(40), epochs=3 - state["epoch"], **options)
        assert rest == whole[8 * stop :]


@pytest.mark.fault_row(20)
def test_resume_on_other_worlds_and_batch_sizes_and_of_a_resume():
    for kind, options in ((Numbers, {"shuffle": True}), (ShuffledFlow, {})):
        whole, _ = run(1, dataset=kind(41), batch_size=8, **options)
        first, state = run(2, dataset=kind(41), batch_size=4, stop=2, **options)
        second, state = run(1, state, dataset=kind(41), batch_size=5, stop=1, **options)
        assert state["samples_seen"] == 21
        third, state = run(3, state, dataset=kind(41), batch_size=4, **options)
        assert (first + second + third)[:41] == whole
        assert state["epoch"] == 1
        assert state["samples_seen"] == 0


def test_a_state_with_its_own_position_is_not_skipped_through():
    _, state = run(2, dataset=FlowWithState(40), stop=3)
    assert state["dataset"] == {"position": 24}
    loader = moved(prepared(0, 1, FlowWithState(40)), state)
    assert flat(loader) == list(range(24, 40))
    assert loader.dataset.reads == 16


def test_the_seed_of_the_saved_run_goes_on():
    whole = flat(prepared(shuffle=True, seed=1))
    loader = prepared(shuffle=True, seed=1)
    next(iter(loader))
    other = prepared(shuffle=True, seed=2)
    other.load_state_dict(loader.state_dict())
    assert flat(other) == whole[4:]


def test_another_dataset_is_refused_unless_the_epoch_starts_anew():
    loader = prepared(shuffle=True)
    next(iter(loader))
    state = loader.state_dict()
    other = prepared(dataset=Numbers(50), shuffle=True)
    with pytest.raises(CheckpointError, match=r"length has changed .*\(got 50 samples, saved 40 samples\)"):
        other.load_state_dict(state)
    other.load_state_dict(state, restart_epoch=True)
    assert sorted(flat(other)) == list(range(50))
    of_a_stream = {"dataset_length": None, "sampler": None}
    with pytest.raises(CheckpointError, match="ended after 10 samples, before the position to begin at"):
        list(moved(prepared(dataset=Flow(10)), {**state, **of_a_stream, "samples_seen": 20}))


def test_a_dataset_that_grows_between_epochs_resumes_at_its_new_length():
    """As in active learning: the saved length was that of the first epoch."""
    loader = prepared(dataset=(data := Numbers(12)), shuffle=True)
    loader.dataset.length = data.length = 20
    assert sorted(flat(loader)) == list(range(20))
    read = flat(islice(loader, 2))
    assert sorted(read + flat(moved(prepared(dataset=data, shuffle=True), loader.state_dict()))) == list(range(20))


def test_another_order_is_refused_inside_an_epoch_only():
    loader = prepared(shuffle=True)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    other = prepared(shuffle=False)
    with pytest.raises(CheckpointError, match=r"another sampler .*\(got SequentialSampler, saved RandomSampler\)"):
        other.load_state_dict(state)
    assert flat(other) == [*range(40)]
    assert sorted(flat(moved(prepared(shuffle=True), {**state, "sampler": None}))) == sorted(flat(iterator))
    other.load_state_dict(loader.state_dict())  # after the epoch
    assert flat(other) == [*range(40)]


def test_skipping_by_hand_replaces_the_restored_position():
    _, state = run(2, shuffle=True, stop=2)
    whole, _ = run(2, shuffle=True)
    loaders = [moved(prepared(rank, 2, shuffle=True), state) for rank in range(2)]
    parts = [list(skip_first_batches(loader, 2)) for loader in loaders]
    assert flat(batch for pair in zip(*parts, strict=True) for batch in pair) == whole[16:]
    assert len(list(loaders[0])) == 5
    assert flat(skip_first_batches(prepared(dataset=Flow()), 3)) == list(range(12, 40))
    plain = skip_first_batches(DataLoader(Numbers(), batch_size=4), 9)
    assert plain.batch_size == 4 and len(plain.dataset) == 40 and len(copy.deepcopy(plain)) == 1
    assert (flat(plain), len(plain)) == ([36, 37, 38, 39], 1)
    for wrong, got in ((-1, "-1"), (9 / 3, r"3\.0"), ("3", "'3'"), (None, "None")):
        with pytest.raises(UsageError, match=rf"must be an integer of at least 0 \(got {got}\); divide by //"):
            skip_first_batches(loaders[0], wrong)
    assert len(list(skip_first_batches(loaders[0], numpy.int64(3)))) == 2


def test_leaving_an_epoch_early_ends_it():
    loader = prepared(shuffle=True)
    first = [flat([batch]) for batch in islice(iter(loader), 2)]
    assert loader.state_dict()["samples_seen"] == 8
    second = flat(loader)
    assert sorted(second) == list(range(40))
    assert flat(first) != second[:8]
    assert loader.epoch == 2


def test_naming_the_epoch_keeps_the_restored_position():
    _, state = run(1, shuffle=True, stop=12, epochs=2)
    loader = moved(prepared(shuffle=True), state)
    loader.set_epoch(1)
    assert len(flat(loader)) == 32
    loader = moved(prepared(shuffle=True), state)
    loader.set_epoch(2)
    assert len(flat(loader)) == 40


def test_naming_another_epoch_than_the_restored_one_warns_once(capsys):
    _, state = run(1, shuffle=True, stop=12, epochs=2)
    loader = moved(prepared(shuffle=True), state)
    loader.set_epoch(1)
    assert not capsys.readouterr().err
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert len(flat(loader)) == 40
    assert capsys.readouterr().err == (
        "shardkit: data: set_epoch(0) drops the restored position (epoch 1, after 8 samples); start the epoch loop at "
        "loader.epoch, or do not call set_epoch.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, FlowWithState])
def test_batches_that_no_step_has_used_come_again(kind):
    whole, _ = run(1, dataset=kind(40), epochs=2)
    loader = prepared(dataset=kind(40))
    for number, _ in enumerate(loader, 1):
        if number > 2:  # before, nobody knows that the loader is trained on
            assert run(1, loader.state_dict(), dataset=kind(40), epochs=2)[0] == whole[(number - 1) // 2 * 8 :]
        if number % 2 == 0:  # two micro-batches a step
            loader.note_step()
            assert run(1, loader.state_dict(), dataset=kind(40), epochs=2)[0] == whole[number * 4 :]
        if number == 7:
            break
    assert (loader.samples_seen, loader.state_dict()["samples_seen"]) == (28, 24)


def used_by_steps(loader):
    state = loader.state_dict()
    return state["epoch"], state["samples_seen"]


def test_every_new_position_takes_the_place_of_the_last_step():
    loader = prepared()
    for _ in loader:
        loader.note_step()
    assert used_by_steps(loader) == (1, 0)
    for _ in loader:
        assert used_by_steps(loader) == (1, 0), "this batch is yet to be used"
        loader.note_step()
        break
    assert used_by_steps(loader) == (1, 4)
    state = loader.state_dict()
    assert used_by_steps(skip_first_batches(loader, 3)) == (1, 12)
    loader.set_epoch(5)
    assert used_by_steps(loader) == (5, 12), "the batches to skip are those of any epoch"
    loader = moved(prepared(), state)
    assert used_by_steps(loader) == (1, 4)
    next(batches := iter(loader))
    assert used_by_steps(loader) == (1, 4), "a resumed loader knows that it is trained on"
    batches.close()


def test_an_evaluation_is_saved_from_its_start_where_another_loader_is_trained_on():
    train, evaluation, other = prepared(), prepared(), prepared()
    for _ in evaluation:
        assert used_by_steps(evaluation) == (0, 4), "nothing is trained: the position is where the loop is"
        break
    for _ in zip(train, other, strict=True):
        for loader in (train, evaluation, other):
            loader.note_step()
        assert used_by_steps(train) == used_by_steps(other) == (0, 4)
        assert used_by_steps(evaluation) == (1, 0), "left early, so the next epoch is next"
        for _ in evaluation:
            assert used_by_steps(evaluation) == (1, 0)
            break
        resumed = moved(prepared(), evaluation.state_dict())
        assert flat(resumed) == list(range(40)) and used_by_steps(resumed) == (3, 0)
        break


@pytest.mark.parametrize("turns", [(0, 1), (0, 1, 2), (0, 0, 1, 1), (1, 0, 0, 1, 2)], ids=str)
def test_loaders_that_take_turns_are_saved_where_each_is(turns):
    """Also after their first step in an epoch: another loader's step does not make them evaluations."""
    loaders = [prepared(dataset=Numbers(length), shuffle=True) for length in (12, 20, 16)]
    batches, used = [iter(loader) for loader in loaders], [(0, 0)] * 3
    for number in turns * 10:
        loader = loaders[number]
        if next(batches[number], None) is None:
            batches[number] = iter(loader)
            next(batches[number])
        for one in loaders:
            one.note_step(loader.last_yield)
        used[number] = (loader.epoch, loader.samples_seen)
        assert [*map(used_by_steps, loaders)] == used


def test_a_position_is_not_loaded_inside_the_loop_over_its_loader():
    loader = prepared()
    start = loader.state_dict()
    for number, _ in enumerate(loader):
        loader.load_state_dict(loader.state_dict())  # where it is already
        with pytest.raises(CheckpointError) as caught:
            loader.load_state_dict(start)
        assert str(caught.value) == (
            "data: a position cannot be loaded inside the loop over its loader, which cannot be moved (got epoch "
            "0, 0 samples); leave the loop, and any except clause, before loading, delete iterators of the loader, or "
            "use load_state(..., data_position=False)."
        )
        assert loader.samples_seen == 4 * number + 4
        if number == 2:
            break
    assert len(flat(moved(loader, start))) == 40


def test_the_innermost_loader_is_the_active_one():
    train, evaluation = prepared(), prepared(dataset=Numbers(3))
    for _ in train:
        assert active_loader([train, evaluation]) is train
        for _ in evaluation:
            assert active_loader([train, evaluation]) is evaluation
        assert active_loader([train, evaluation]) is train
    assert active_loader([train, evaluation]) is None


def test_the_rest_of_a_loader_is_as_the_user_made_it():
    loader = prepared(0, 2, collate_fn=lambda numbers: {"x": (torch.stack(numbers), "text")}, batch_size=4)
    batch = next(iter(loader))
    assert batch["x"][0].tolist() == [0, 1, 2, 3]
    assert batch["x"][1] == "text"
    assert loader.dataset.length == 40
    assert (loader.total_batch_size, loader.batch_size, len(loader)) == (8, 4, 5)
    assert loader.total_dataset_length == len(loader.dataset), "by Accelerate's name"
    assert isinstance(loader.sampler, SequentialSampler)
    assert isinstance(loader, DataLoader) and flat(copy.deepcopy(prepared())) == list(range(40))
    assert prepared(0, 2, split_batches=True).batch_size == 2
    assert prepare_loader(loader, 0, 2, CPU, 7) is loader
    with pytest.raises(UsageError, match=r"not a torch DataLoader \(got list\)"):
        prepare_loader([1, 2], 0, 1, CPU, 7)


@pytest.mark.parametrize("name", ["collate_fn", "num_workers", "dataset", "batch_size"])
def test_a_prepared_loader_is_not_changed_without_effect(name):
    loader = prepared()
    with pytest.raises(UsageError, match=rf"^data: {name} of a prepared loader cannot be changed; set it on the DataL"):
        setattr(loader, name, None)
    loader.title = "a name of the script's own"
    assert flat(loader) == list(range(40))


@pytest.mark.parametrize(("name", "value"), [("batch_size", 4), ("drop_last", True), ("sampler", range(8))])
@pytest.mark.parametrize("has_own", [False, True])
def test_the_batch_sampler_of_a_prepared_loader_is_not_changed_without_effect(name, value, has_own):
    """As torch's DataLoader takes it, from one epoch to the next."""
    data = range(8)
    batches = BatchSampler(SequentialSampler(data), 2, False)
    loader = DataLoader(data, batch_sampler=batches) if has_own else DataLoader(data, batch_size=2)
    prepared_loader = prepare_loader(loader, 0, 1, CPU, 7)
    assert flat(prepared_loader) == flat(copy.deepcopy(prepared_loader)) == list(data)
    setattr(prepared_loader.batch_sampler, name, value)
    with pytest.raises(UsageError, match=rf"^data: batch_sampler.{name} of a prepared loader cannot be changed; prep"):
        next(iter(prepared_loader))


def test_everything_nested_moves_to_the_device():
    pair = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    moved = to_device({"a": [torch.ones(1), (torch.ones(2), 3)], "b": "text", "c": pair}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == 3
    assert moved["c"].data.is_meta


def seeds_of_a_loader():
    import torch.distributed as dist

    torch.manual_seed(100 + dist.get_rank())
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    return flat(prepare_loader(loader, dist.get_rank(), dist.get_world_size(), CPU, None))


def test_without_a_seed_all_ranks_take_rank_0s(ranks):
    parts = ranks.run(2, seeds_of_a_loader)
    assert sorted(parts[0] + parts[1]) == list(range(40))


def different_lengths():
    import torch.distributed as dist

    loader = DataLoader(Numbers(40 + dist.get_rank()), batch_size=4)
    with pytest.raises(UsageError, match=r"the dataset's length is not the same on all ranks \(got 40, 41 by rank\)"):
        prepare_loader(loader, dist.get_rank(), dist.get_world_size(), CPU, 1)


def test_data_of_different_sizes_are_refused_on_all_ranks(ranks):
    ranks.run(2, different_lengths)


def test_a_loaders_own_generator_seeds_the_order():
    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator)
        return flat(prepare_loader(loader, 0, 1, CPU))

    assert order(3) == order(3) != order(4)
    replaced = DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), replacement=True, num_samples=12))
    assert len(flat(prepare_loader(replaced, 0, 1, CPU, 1))) == 12


SIGNALLED = """
import os, signal, sys, torch
from torch.utils.data import DataLoader
from tests.loaders import Numbers
from shardkit.data.preparing import prepare_loader

if __name__ == "__main__":
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True)
    loader = prepare_loader(loader, 0, 1, torch.device("cpu"), 7)
    signal.signal(signal.SIGTERM, lambda *_: None)
    batches = iter(loader)
    next(batches), next(batches)
    os.killpg(0, signal.SIGTERM)
    print(sum(len(batch) for batch in batches) + 8, flush=True)
    left = iter(loader)
    next(left)
    others = [prepare_loader(DataLoader(Numbers(), batch_size=4, num_workers=2), 0, 1, torch.device("cpu"), 7)
              for _ in range(3)]
    ended_early = [iter(each) for each in others]  # a loop that ends before its epoch, with a name for the batches
    for each in ended_early:
        next(each)
    """


@pytest.mark.slow
def test_workers_survive_the_signal_that_stops_a_run_and_end_quietly_with_the_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SIGNALLED)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, problems = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (output.strip(), process.returncode, problems) == ("40", 0, "")


LARGE_SEEDS = [2**63, 2**64 - 1, -1]


@pytest.mark.parametrize("kind", [Numbers, ShuffledFlow, FlowWithState])
@pytest.mark.parametrize("seed", LARGE_SEEDS)
def test_issue_9_3_seeds_of_64_bits(kind, seed):
    """torch's own first seed has 64 bits, and so may a generator's, a configuration's and a saved position's."""
    shuffle = {"shuffle": True} if kind is Numbers else {}
    found = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        by_torch, state = run(1, dataset=kind(), seed=None, stop=3, **shuffle)
    finally:
        torch.random.set_rng_state(found)
    assert state["seed"] == seed % 2**64
    assert by_torch == run(1, dataset=kind(), seed=state["seed"], stop=3, **shuffle)[0]
    rest, _ = run(2, json.loads(json.dumps(state)), dataset=kind(), seed=1, **shuffle)
    assert sorted(by_torch + rest) == list(range(40))
    generator = torch.Generator().manual_seed(seed)
    assert run(1, dataset=kind(), generator=generator, stop=3, **shuffle)[0] == by_torch


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Noise, ShuffledFlow])
def test_issue_9_3_seeds_of_64_bits_in_workers(kind):
    options = {"dataset": kind(8), "num_workers": 1, "collate_fn": list}
    given = [list(prepared(seed=seed, **options)) for seed in LARGE_SEEDS]
    assert given[0] != given[1] != given[2]


def test_issue_9_14_a_rank_left_without_a_batch_is_said_at_prepare_where_it_is_known():
    text = (
        "prepare: even_batches=False leaves ranks without a last batch, and the others would wait for them (got 1 for "
        "2 ranks); use drop_last=True, even_batches=True or another batch size."
    )
    for options in ({"dataset": Numbers(17)}, {"dataset": Numbers(17), "shuffle": True}, {"sampler": range(17)}):
        for rank in range(2):
            with pytest.raises(UsageError) as caught:
                prepared(rank, 2, even_batches=False, **options)
            assert str(caught.value) == text
    with pytest.raises(UsageError, match=r"got 2 for 3 ranks"):
        batch_sampled(0, 3, even_batches=False)
    assert run(2, dataset=Numbers(18), even_batches=False)[0] == list(range(18))
    assert run(2, dataset=Numbers(17), even_batches=False, drop_last=True)[0] == list(range(16))


class Unsized(Sampler):
    def __iter__(self):
        return iter(range(17))


class UnsizedBatches(Unsized):
    def __iter__(self):
        return iter([[0, 1], [2], [3, 4]])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_issue_9_14_a_rank_left_without_a_batch_is_said_on_all_ranks_when_the_batch_comes(workers):
    uneven = {"even_batches": False, "num_workers": workers}
    for make in (
        lambda rank: prepared(rank, 2, sampler=Unsized(), **uneven),
        lambda rank: batch_sampled(rank, 2, UnsizedBatches(), **uneven),
        lambda rank: prepared(rank, 2, dataset=Flow(17), **uneven),
    ):
        for rank in range(2):
            with pytest.raises(UsageError, match=r"^data: even_batches=False leaves ranks .* \(got 1 for 2 ranks\)"):
                list(make(rank))


def step_together(kind):
    import torch.distributed as dist

    loader = DataLoader(kind(), batch_size=1, sampler=Unsized() if kind is Numbers else None)
    loader = prepare_loader(loader, dist.get_rank(), dist.get_world_size(), CPU, 7, even_batches=False)
    steps = 0
    try:
        for _ in loader:
            dist.all_reduce(torch.zeros(1))
            steps += 1
    except UsageError as error:
        return steps, str(error)


class Flow17(Flow):
    def __init__(self):
        super().__init__(17)


@pytest.mark.parametrize("kind", [Numbers, Flow17])
def test_issue_9_14_all_ranks_leave_at_the_same_step(ranks, kind):
    (steps, text), (others_steps, others_text) = ranks.run(2, step_together, kind)
    assert steps == others_steps == 8
    assert text == others_text
    assert text.startswith("data: even_batches=False leaves ranks without a last batch")
