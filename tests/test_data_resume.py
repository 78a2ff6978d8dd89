"""The position in the data comes back with load_state: on other numbers of ranks, and of a resume."""

import json
import random
from collections import deque
from itertools import chain, product

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from shardkit import Accelerator, ProjectConfiguration, compat, skip_first_batches, values
from shardkit.compat.states import AcceleratorState
from shardkit.data import position, stream
from tests.loaders import Flow, FlowWithState, flat, prepared, run
from tests.loaders import Numbers as Numbers40

LENGTH, GLOBAL_BATCH = 48, 12


class Numbers(Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def train(folder, steps, way="load"):
    """One run of a user's script until a step is reached; the samples of each global batch that it was given."""
    torch.manual_seed(3)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    config = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}
    accelerator = Accelerator(config=config, project_config=project)
    model = nn.Linear(1, 7)
    loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if way == "by hand":
        accelerator.load_state()
        loader = skip_first_batches(loader, accelerator.counters.step % len(loader))
    elif way == "without position":
        accelerator.load_state(data_position=False)
    elif way == "load":
        accelerator.load_state()
    given = []
    while accelerator.counters.step < steps:
        for batch in loader:
            given.append(accelerator.gather(batch).flatten().int().tolist())
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.counters.step == steps:
                accelerator.save_state()
                break
    accelerator.end_training()
    return given


@pytest.mark.slow
@pytest.mark.fault_row(20)
@pytest.mark.requirement("A5")
def test_a_run_over_2_1_and_3_ranks_reads_what_one_uninterrupted_run_reads(ranks, tmp_path):
    whole = ranks.run(2, train, str(tmp_path / "whole"), 9, "fresh")[0]
    assert sorted(chain(*whole[:4])) == sorted(chain(*whole[4:8])) == list(range(LENGTH))
    folder = str(tmp_path / "parts")
    parts = ranks.run(2, train, folder, 3, "fresh")[0]
    for world, until in ((1, 4), (3, 6), (2, 9)):
        parts += ranks.run(world, train, folder, until)[0]
    assert parts == whole


@pytest.mark.slow
def test_skipping_by_hand_does_not_skip_twice_and_the_position_can_be_left_out(ranks, tmp_path):
    folder = str(tmp_path)
    whole = ranks.run(2, train, str(tmp_path / "whole"), 8, "fresh")[0]
    ranks.run(2, train, folder, 6, "fresh")
    assert ranks.run(2, train, folder, 7, "by hand")[0] == whole[6:7]
    assert ranks.run(2, train, folder, 8, "without position")[0] == whole[:1]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_datasets_own_state_resumes_with_workers_and_moves_one_epoch_only(persistent):
    before, state = run(2, dataset=FlowWithState(26), stop=1)
    assert (before, state["dataset"]) == (list(range(8)), {"position": 8})
    workers = {"num_workers": 2, "persistent_workers": persistent}
    rest, _ = run(2, state, dataset=FlowWithState(26), epochs=3, **workers)
    assert rest == [*range(8, 26), *range(26), *range(26)]


class EarlyReset(FlowWithState):
    """Is at its beginning again as soon as it has given its last sample."""

    def __iter__(self):
        for _ in range(self.length - self.position):
            found, self.position = self.position, (self.position + 1) % self.length
            yield found


@pytest.mark.parametrize("kind", [FlowWithState, EarlyReset])
@pytest.mark.parametrize(("length", "drop_last", "batches"), [(26, False, 4), (24, False, 3), (26, True, 3)])
def test_an_epoch_saved_at_its_last_batch_is_not_read_again(kind, length, drop_last, batches):
    options = {"dataset": kind(length), "drop_last": drop_last}
    epoch, _ = run(2, **options)
    _, after = run(2, epochs=2, **options)
    first, state = run(2, stop=batches, **options)
    assert (first, state["epoch"]) == (epoch, 0)
    # What is left of the saved epoch is empty, so two iterations end where two whole epochs do.
    assert run(2, state, epochs=2, **options) == (epoch, after)


@pytest.mark.parametrize("dataset", [Numbers40(), FlowWithState(40), Flow(40)])
def test_a_script_that_counts_its_steps_goes_on_after_the_last_batch_of_an_epoch(dataset):
    def restored():
        loader = prepared(dataset=dataset, shuffle=not isinstance(dataset, Flow))
        loader.load_state_dict(state)
        return loader

    loader = prepared(dataset=dataset, shuffle=not isinstance(dataset, Flow))
    epochs = []
    for _ in range(3):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch)
            loader.note_step()
            if len(epochs) == 2 and len(epochs[-1]) == 10:
                state = loader.state_dict()
    epochs = [flat(epoch) for epoch in epochs]
    for batches in (0, 3):  # of the next epoch, where such a script is
        assert flat(skip_first_batches(restored(), batches)) == epochs[2][4 * batches :]
    loader = skip_first_batches(restored(), 10)  # of the epoch that is over
    assert (flat(loader), flat(loader)) == ([], epochs[2])
    loader = restored()
    loader.pass_finished_epoch()
    assert (trained(loader), loader.epoch) == (epochs[2], 3)
    loader = restored()
    loader.pass_finished_epoch()
    loader.set_epoch(1)  # the script has stored its epoch
    assert (flat(loader), flat(loader)) == ([], epochs[2])


def trained(loader):
    """The samples of an epoch with a step for each batch."""
    batches = []
    for batch in loader:
        batches.append(batch)
        loader.note_step()
    return flat(batches)


@pytest.mark.parametrize("dataset", [Numbers40(), FlowWithState(40), Flow(40)])
def test_a_look_at_the_training_data_after_a_load_between_epochs_is_no_epoch(dataset):
    """Such as an accuracy on them at the end of an epoch, of which the resumed run has only another loader's part."""
    loader = prepared(dataset=dataset, shuffle=not isinstance(dataset, Flow))
    trained(loader)
    assert flat(loader)
    state = loader.state_dict()
    expected = trained(loader)
    loader = prepared(dataset=dataset, shuffle=not isinstance(dataset, Flow))
    loader.load_state_dict(state)
    assert flat(loader) == expected and loader.epoch == 1
    assert trained(loader) == expected and loader.epoch == 2


def test_the_epoch_after_a_finished_one_drops_nothing(caplog):
    loader = prepared()
    for _ in loader:
        loader.note_step()
        state = loader.state_dict()
    loader = prepared()
    loader.load_state_dict(state)
    loader.set_epoch(1)
    assert not caplog.records and len(flat(loader)) == 40
    loader = prepared()
    loader.load_state_dict(state)
    with caplog.at_level("INFO"):
        assert not flat(loader)
    assert caplog.messages == [
        "data: the restored position is the end of epoch 0, so this loop has no batches; the next one runs epoch 1."
    ]


def steps_of(folder, first=0, skips=False):
    """A script for Accelerate, whose epoch is its step by the length of the loader; samples of each global batch."""
    accelerator = compat.Accelerator(cpu=True)
    torch.manual_seed(3)
    model = nn.Linear(1, 1)
    loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if first:
        accelerator.load_state(f"{folder}/{first}")
    given, step = [], first
    for epoch in range(first // len(loader), 3):
        skipped = first % len(loader) if epoch == first // len(loader) else 0
        for batch in accelerator.skip_first_batches(loader, skipped) if first and skips else loader:
            given.append(accelerator.gather(batch).flatten().int().tolist())
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if not first and step in (4, 6):
                accelerator.save_state(f"{folder}/{step}")
        skips = False
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    return given


@pytest.mark.slow
def test_a_script_for_accelerate_goes_on_after_a_whole_number_of_epochs(ranks, tmp_path):
    whole = ranks.run(2, steps_of, str(tmp_path))[0]
    for first in (4, 6):  # an epoch has four steps
        for skips in (False, True):
            assert ranks.run(2, steps_of, str(tmp_path), first, skips)[0] == whole[first:], (first, skips)


def test_an_epoch_that_is_over_is_not_skipped_through():
    _, state = run(1, dataset=FlowWithState(26), stop=7)
    loader = prepared(dataset=FlowWithState(26))
    loader.load_state_dict(state)
    assert (flat(loader), loader.dataset.reads, loader.epoch) == ([], 0, 1)
    assert flat(loader) == list(range(26))


class LiveState(FlowWithState):
    """Its state_dict returns the dict that it changes later."""

    def __init__(self, length):
        super().__init__(length)
        self.live = {"position": 0}

    def state_dict(self):
        self.live.update(super().state_dict())
        return self.live

    def __iter__(self):
        for value in super().__iter__():
            self.state_dict()
            yield value


def test_a_state_that_goes_on_changing_is_copied():
    assert run(2, dataset=LiveState(26), stop=1)[1]["dataset"] == {"position": 8}


class TakesState(LiveState):
    """Goes on with the dict that it is given."""

    def load_state_dict(self, state):
        self.live = state
        super().load_state_dict(state)


def test_a_state_that_the_dataset_goes_on_with_is_still_the_position():
    loader = prepared(dataset=TakesState(26))
    for _ in loader:
        loader.note_step()
        state = loader.state_dict()
        break
    loader = prepared(dataset=TakesState(26))
    loader.load_state_dict(state)
    batches = iter(loader)
    next(batches)
    next(batches)  # no step has used them
    assert loader.state_dict()["dataset"] == state["dataset"] == {"position": 4}
    batches.close()
    assert run(1, loader.state_dict(), dataset=FlowWithState(26))[0] == list(range(4, 26))


class Drawing(FlowWithState):
    """Draws its samples from generators of its own, which it keeps in its state."""

    def __init__(self, length, kept=None):
        super().__init__(length)
        self.kept = kept
        self.drawing, self.shuffling = numpy.random.default_rng(0), torch.Generator().manual_seed(3)
        self.legacy = numpy.random.RandomState(5)

    def __iter__(self):
        for _ in super().__iter__():
            first, second = self.drawing.integers(1000), torch.randint(1000, (), generator=self.shuffling)
            yield torch.tensor(first * 10**6 + int(second) * 10**3 + self.legacy.randint(1000))

    def state_dict(self):
        generators = {"numpy": self.drawing.bit_generator.state, "torch": self.shuffling.get_state()}
        own = {"legacy": self.legacy.get_state(), "position": numpy.int64(self.position), "by": {3: (1.5, None)}}
        return generators | own | ({} if self.kept is None else {"kept": self.kept})

    def load_state_dict(self, state):
        assert state["by"] == {3: (1.5, None)} and type(state["legacy"]) is tuple and state.get("kept") == self.kept
        self.position = state["position"]
        self.drawing.bit_generator.state = state["numpy"]
        self.shuffling.set_state(state["torch"])
        self.legacy.set_state(state["legacy"])


def test_a_state_with_arrays_tensors_sets_and_scalars_of_numpy(capsys):
    kept = [{1, 2}, b"raw", deque([float("inf")], maxlen=2)]
    whole, _ = run(1, dataset=Drawing(26, kept), epochs=3)
    for stop, read in ((2, 16), (6, 26 + 16)):
        _, state = run(2, dataset=Drawing(26, kept), epochs=2, stop=stop)
        saved = values.decode(json.loads(json.dumps(values.encode(state, "", no_tensor))), no_tensor)
        rest, _ = run(1, saved, dataset=Drawing(26, kept))
        assert rest == whole[read : 26 if stop == 2 else 52]
    assert not capsys.readouterr().err


class Mixed(IterableDataset):
    """Reads its sources in turn, in the order of a dict that is in its state."""

    def __init__(self):
        self.read = {"web": 0, "books": 100, "code": 200}

    def __iter__(self):
        while True:
            for name in self.read:
                self.read[name] += 1
                yield torch.tensor([float(self.read[name])])

    def state_dict(self):
        return {"read": dict(self.read)}

    def load_state_dict(self, state):
        self.read = state["read"]


def in_turn(folder, is_resumed):
    accelerator = Accelerator(config={"use_cpu": True})
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Mixed(), batch_size=3))
    if is_resumed:
        accelerator.load_state(folder)
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        accelerator.save_state(folder)
        break
    accelerator.end_training()
    return batch.flatten().tolist()


@pytest.mark.slow
def test_a_datasets_state_keeps_the_order_of_its_dicts(tmp_path):
    assert in_turn(tmp_path / "c", is_resumed=False) == [1, 101, 201]
    assert in_turn(tmp_path / "c", is_resumed=True) == [2, 102, 202]


@pytest.mark.parametrize(
    ("kept", "why"),
    [
        (object(), "a value of type builtins.object cannot be saved"),
        (torch.zeros(2**19), "a tensor cannot be saved (it has 2,097,152 bytes, more than 1 MiB)"),
        (torch.eye(3).to_sparse(), "a tensor cannot be saved ("),
        (numpy.array(["a"]), "an array cannot be saved (can't convert"),
    ],
)
def test_a_state_that_cannot_be_saved_is_told(capsys, kept, why):
    position._warn_of_state.cache_clear()
    for _ in range(2):
        _, state = run(2, dataset=Drawing(26, kept), stop=2)
        assert state["dataset"] is None
    said = capsys.readouterr().err
    assert said.count("data: the state of Drawing cannot be saved") == 1 and f"state_dict().kept: {why}" in said


def no_tensor(*_):
    raise AssertionError


class DrawnOrder(FlowWithState):
    """Draws its order when an epoch starts, and keeps how far it is in it."""

    def __iter__(self):
        order = random.sample(range(self.length), self.length)
        return (order[number] for number in super().__iter__())


def test_an_order_drawn_at_an_epochs_start_is_drawn_again_for_a_restored_position():
    whole, _ = run(2, dataset=DrawnOrder(26), epochs=2)
    before, state = run(2, dataset=DrawnOrder(26), stop=2)
    rest, _ = run(2, state, dataset=DrawnOrder(26), epochs=2)
    assert (before + rest, state["dataset"]) == (whole, {"position": 16})


def zipped(first, second):
    yield from zip(first, second, strict=False)


def zipped_the_other_way(first, second):
    yield from ((one, other) for other, one in zip(second, first, strict=False))


def beside_an_iterator(first, second):
    """The second's iterator is made for each epoch; an epoch ends with the first that has no more batches."""
    others = iter(second)
    for one in first:
        if (other := next(others, None)) is None:
            return
        yield one, other


def side_by_side(folder, pairs, lengths, save_at, is_saved_inside=True, loads=False, again=""):
    """Epochs over two loaders side by side, saved after a step, or after the epoch that ends there. What each step got,
    from the present place on. `again`: what is done after the load: a look at the longer one, saves."""
    accelerator = Accelerator(config={"use_cpu": True, "shardkit": {"seed": 3, "data": {"split_batches": True}}})
    model = nn.Linear(1, 1)
    data = [torch.arange(6.0 * length)[:, None] for length in lengths]
    loaders = [DataLoader(one, batch_size=6, shuffle=True) for one in data]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, first, second = accelerator.prepare(model, optimizer, *loaders)
    if loads:
        accelerator.load_state(folder)
    for what in again.split():
        if what == "look":
            next(iter(first if lengths[0] > lengths[1] else second))
        else:
            accelerator.save_state(folder)
    given = []
    for epoch in range((first if lengths[0] <= lengths[1] else second).epoch, 3):
        for one, other in pairs(first, second):
            accelerator.backward(model(one).mean() + model(other).mean())
            optimizer.step()
            optimizer.zero_grad()
            given.append([epoch, *(accelerator.gather(part).flatten().tolist() for part in (one, other))])
            if is_saved_inside and len(given) == save_at and not loads:
                accelerator.save_state(folder)
        if len(given) == save_at and not (is_saved_inside or loads):
            accelerator.save_state(folder)
    accelerator.free_memory()
    return given


def resumed_side_by_side(folder, pairs):
    """Of each case: whether a run that goes on from its save gets what the run that was not interrupted got."""
    found = {}
    for lengths in ((2, 2), (2, 3), (3, 2)):
        for save_at, is_inside in ((2, True), (2, False), (3, True), (4, True), (4, False)):
            place = folder / f"{lengths}-{save_at}-{is_inside}"
            whole = side_by_side(place, pairs, lengths, save_at, is_inside)
            rest = side_by_side(place, pairs, lengths, save_at, loads=True)
            found[place.name] = (rest == whole[save_at:]) or f"{len(rest)} of {len(whole) - save_at}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [zipped, zipped_the_other_way, beside_an_iterator])
def test_loaders_side_by_side_begin_the_next_epoch_together_after_a_resume(ranks, tmp_path, pairs):
    (found,) = ranks.run(1, resumed_side_by_side, tmp_path, pairs)
    assert set(found.values()) == {True}, found


def saved_again_side_by_side(folder, pairs):
    """Of each case: whether three runs in turn, which each load and save again, get what follows the first save."""
    found = {}
    for lengths in ((2, 3), (3, 2)):
        for again, is_inside in product(("save", "look save", "save look save"), (True, False)):
            place = folder / f"{lengths}-{again}-{is_inside}"
            whole = side_by_side(place, pairs, lengths, 2, is_inside)
            rests = [side_by_side(place, pairs, lengths, 99, loads=True, again=again) for _ in range(3)]
            found[place.name] = rests == [whole[2:]] * 3
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [zipped, zipped_the_other_way])
def test_loaders_side_by_side_that_are_saved_again_after_a_load(ranks, tmp_path, pairs):
    (found,) = ranks.run(1, saved_again_side_by_side, tmp_path, pairs)
    assert set(found.values()) == {True}, found


@pytest.mark.slow
def test_loaders_side_by_side_on_another_number_of_ranks(ranks, tmp_path):
    for is_inside in (True, False):
        place = tmp_path / str(is_inside)
        whole, _ = ranks.run(2, side_by_side, place, zipped, (2, 3), 4, is_inside)
        for rest in ranks.run(3, side_by_side, place, zipped, (2, 3), 4, is_inside, True):
            assert rest == whole[4:]


def kept_beside(folder, loads):
    """A loader is read by one iterator, which goes on from epoch to epoch of a shorter one."""
    accelerator = Accelerator(config={"use_cpu": True, "shardkit": {"seed": 3}})
    model = nn.Linear(1, 1)
    first, second = (DataLoader(torch.arange(2.0 * length)[:, None], batch_size=2, shuffle=True) for length in (2, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, first, second = accelerator.prepare(model, optimizer, first, second)
    if loads:
        accelerator.load_state(folder)
    given, others = [], iter(second)
    for _ in range(first.epoch, 3):
        for one in first:
            other = next(others, None)
            if other is None:
                others = iter(second)
                other = next(others)
            accelerator.backward(model(one).mean() + model(other).mean())
            optimizer.step()
            optimizer.zero_grad()
            given.append([one.flatten().tolist(), other.flatten().tolist()])
            if len(given) == 2 and not loads:
                accelerator.save_state(folder)
    accelerator.free_memory()
    return given


def test_an_iterator_that_is_kept_goes_on_after_a_resume_at_the_end_of_another_loader(ranks, tmp_path):
    (whole,) = ranks.run(1, kept_beside, tmp_path / "saved", False)
    assert ranks.run(1, kept_beside, tmp_path / "saved", True) == [whole[2:]]


class OwnShuffle(Flow):
    """Shuffles with a generator of its own, which goes on from epoch to epoch; paths differ from run to run."""

    path = "/scratch/1"

    def __init__(self, by_epoch=False):
        super().__init__(40)
        self.random, self.by_epoch = random.Random(0), by_epoch

    def set_epoch(self, epoch):
        if self.by_epoch:
            self.random = random.Random(epoch)

    def __iter__(self):
        return ((number, f"{self.path}/{number}") for number in self.random.sample(range(self.length), self.length))


def own_shuffle(rank, world, by_epoch=False, **options):
    return prepared(
        rank, world, OwnShuffle(by_epoch), collate_fn=lambda items: torch.tensor([one[0] for one in items]), **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_a_stream_that_begins_otherwise_than_when_the_position_was_saved_is_told(capsys, monkeypatch, options):
    """In the second epoch a new generator is at the beginning of its first."""
    for by_epoch, stop, is_told in ((False, 2, False), (False, 7, True), (True, 7, False)):
        stream._warn_of_another_stream.cache_clear()
        monkeypatch.setattr(OwnShuffle, "path", "/scratch/1")
        _, state = run(2, make=own_shuffle, stop=stop, epochs=2, by_epoch=by_epoch, **options)
        assert state["samples_seen"] and state["epoch"] == (stop == 7)
        capsys.readouterr()
        monkeypatch.setattr(OwnShuffle, "path", "/scratch/2")
        run(1, json.loads(json.dumps(state)), make=own_shuffle, by_epoch=by_epoch, batch_size=3, **options)
        assert ("yields other samples than when the position was saved" in capsys.readouterr().err) is is_told
