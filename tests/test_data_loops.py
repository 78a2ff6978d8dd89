"""Loops as people write them. Each reads what plain torch reads in one process, and knows where it is."""

import copy
import gc
import io
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
import time
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from itertools import accumulate, chain, cycle, islice, product

import pytest
import torch
from torch import nn
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from shardkit import Accelerator
from shardkit.data import padding
from shardkit.data.device import to_device
from shardkit.data.preparing import prepare_loader
from shardkit.data.skipping import skip_first_batches
from shardkit.distributed.collectives import gather
from shardkit.errors import UsageError
from tests.golden.positions import KINDS
from tests.loaders import CPU, Flow, FlowWithState, Numbers, ShuffledFlow, flat, moved, prepared, read_inside, run
from tests.ranks import log_lines


def lists(batches):
    return [batch.tolist() for batch in batches]


def place(loader):
    return loader.epoch, loader.samples_seen


@pytest.fixture
def loader():
    return prepared(shuffle=True)


@pytest.fixture
def epochs():
    same = prepared(shuffle=True)
    return [lists(same) for _ in range(4)]


def test_a_look_at_the_loader_inside_its_loop_changes_nothing(loader, epochs):
    given = []
    for number, batch in enumerate(loader, 1):
        given.append(batch.tolist())
        looked = next(iter(loader)).tolist()
        assert looked == epochs[number % 4][0] if number < 4 else looked not in given
        assert loader.is_iterating and loader.end_of_dataloader == (number == 10)
        assert place(loader) == (0, 4 * number)
        loader.note_step()
        assert loader.state_dict()["samples_seen"] == 4 * number
    assert given == epochs[0]
    assert place(loader) == (1, 0)
    assert lists(loader) == epochs[1]


def test_a_look_at_one_batch_before_the_first_step_is_no_epoch_and_a_longer_loop_is(loader, epochs):
    assert next(iter(loader)).tolist() == epochs[0][0]
    assert place(loader) == (0, 0)
    assert lists(loader) == epochs[0]
    for _ in zip(range(2), loader, strict=False):
        pass
    assert lists(loader) == epochs[2]


def test_a_loop_inside_a_loop_over_the_same_loader_is_one_of_its_own(loader, epochs):
    outer, inner = [], []
    for number, batch in enumerate(loader, 1):
        outer.append(batch.tolist())
        if number in (3, 10):
            inner.append(lists(loader))
            assert loader.end_of_dataloader == (number == 10)
        assert place(loader) == (0, 4 * number)
        assert loader.state_dict()["samples_seen"] == 4 * number
    assert outer == epochs[0]
    assert inner == [epochs[1], epochs[2]]
    assert lists(loader) == epochs[1]


def test_a_loop_inside_a_loop_that_is_resumed(loader, epochs):
    _, state = run(1, shuffle=True, stop=12, epochs=2)
    loader.load_state_dict(state)
    given = []
    for batch in loader:
        given.append(batch.tolist())
        assert lists(loader)[0] not in given
    assert given == epochs[1][2:]


class OpenFile(FlowWithState):
    """Keeps an iterator, as an open file is one."""

    def __init__(self, length=40):
        super().__init__(length)
        self.load_state_dict({"position": 0})

    def __iter__(self):
        for number in self.lines:
            self.position = number + 1
            yield number
        self.load_state_dict({"position": 0})

    def load_state_dict(self, state):
        self.position, self.lines = state["position"], iter(range(state["position"], self.length))

    def __deepcopy__(self, memo):
        return type(self)(self.length)


class SharedFile(FlowWithState):
    """Its position is in an object that it keeps."""

    def __init__(self, length=40):
        super().__init__(length)
        self.file = io.StringIO("\n".join(map(str, range(length))))

    def __iter__(self):
        while line := self.file.readline():
            yield int(line)
        self.file.seek(0)

    def state_dict(self):
        return {"position": self.file.tell()}

    def load_state_dict(self, state):
        self.file.seek(state["position"])


class BeginsAnew(FlowWithState):
    """Every loop begins anew, unless a state was loaded."""

    begin = 0

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for number in range(begin, self.length):
            self.position = number + 1
            yield number

    def load_state_dict(self, state):
        self.begin = self.position = state["position"]


@pytest.mark.parametrize("inner", [1, 2, 10])
@pytest.mark.parametrize("kind", [FlowWithState, OpenFile, SharedFile, BeginsAnew, ShuffledFlow])
def test_a_loop_over_a_stream_goes_on_after_loops_inside_it(kind, inner, capsys):
    read_inside(lambda: prepared(dataset=kind()), inner)
    assert "yields other samples" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [FlowWithState, OpenFile, SharedFile, BeginsAnew])
@pytest.mark.parametrize("length", [40, 38])
def test_a_look_before_a_loop_over_a_stream_is_left_or_ends_does_not_change_the_next_epoch(kind, length):
    """A stream that goes on after a break has given the batch that was read ahead."""
    for stop in (3, 9, 10):
        following = []
        for looks in (False, True):
            loader = prepared(dataset=kind(length))
            for number, _ in enumerate(loader, 1):
                loader.note_step()
                if number == stop:
                    if looks:
                        next(iter(loader))
                    if stop == 3:
                        break
            following.append(lists(loader))
        assert following[0] == following[1]
        assert following[0][0][0] == (16 if stop == 3 and kind is not BeginsAnew else 0)


def test_loops_over_a_stream_with_a_state_take_turns():
    loader = prepared(dataset=FlowWithState())
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
    assert pairs == [(batch, batch) for batch in lists(prepared())]


def test_an_iterator_that_is_kept_leaves_the_position_to_the_loop_that_trains(loader, epochs):
    kept = iter(loader)
    next(kept)
    for number, batch in enumerate(loader, 1):
        assert batch.tolist() == epochs[1][number - 1]
        loader.note_step()
        assert place(loader) == (1, loader.state_dict()["samples_seen"]) == (1, 4 * number)
    assert place(loader) == (2, 0) and not loader.is_iterating
    assert next(kept).tolist() == epochs[0][1]
    assert loader.is_iterating and place(loader) == (0, 8)
    kept.close()
    assert lists(loader) == epochs[2]


def test_an_iterator_that_is_kept_does_not_make_an_evaluation_a_training():
    train, evaluation = prepared(shuffle=True), prepared()
    kept = iter(evaluation)
    next(kept)
    for number, _ in enumerate(train, 1):
        for loader in (train, evaluation):
            loader.note_step(train.last_yield)
            loader.note_step(train.last_yield)  # as two optimizers do
        assert train.state_dict()["samples_seen"] == 4 * number
        if number > 1:
            assert evaluation.state_dict()["purpose"] == "evaluation"
            assert evaluation.state_dict()["samples_seen"] == 0
        assert lists(evaluation) == lists(prepared())
    assert not evaluation.is_iterating
    assert next(kept).tolist() == [4, 5, 6, 7]


def test_batches_by_hand(loader, epochs):
    batches, given = iter(loader), []
    for number in range(23):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        given.append(batch.tolist())
        loader.note_step()
        assert loader.state_dict()["samples_seen"] == number % 10 * 4 + 4
    assert given == [*epochs[0], *epochs[1], *epochs[2][:3]]
    rest, _ = run(2, loader.state_dict(), shuffle=True)
    assert rest == flat(map(torch.tensor, epochs[2][3:]))


def test_endless_generators_and_repeated_parts(loader, epochs):
    def for_ever():
        while True:
            yield from loader

    assert lists(islice(for_ever(), 13)) == [*epochs[0], *epochs[1][:3]]
    again = prepared(shuffle=True)
    assert [lists(islice(again, 3)) for _ in range(3)] == [epoch[:3] for epoch in epochs[:3]]
    assert lists(islice(cycle(prepared(shuffle=True)), 13)) == [*epochs[0], *epochs[0][:3]]


def test_two_loops_over_one_loader_take_turns(loader, epochs):
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=False)]
    assert pairs == list(zip(epochs[0], epochs[1], strict=True))
    assert lists(loader) == epochs[2]


def test_an_error_inside_the_loop_leaves_it_where_it_is(loader, epochs):
    def fail():
        for number, _ in enumerate(loader):
            if number == 3:
                raise KeyError("the script's own")

    with pytest.raises(KeyError):
        fail()
    assert loader.state_dict()["samples_seen"] == 16
    assert not loader.is_iterating
    assert lists(loader) == epochs[1]
    assert flat(moved(loader, {**loader.state_dict(), "epoch": 0, "samples_seen": 16})) == list(chain(*epochs[0][4:]))


@pytest.mark.parametrize("dataset", [Numbers(), ShuffledFlow(), FlowWithState()])
def test_a_loop_without_training_over_a_loader_that_is_trained_on_is_no_epoch(dataset):
    """An accuracy on the training data, or a look at a batch, before or after each epoch, maybe on one rank only."""
    shuffle = isinstance(dataset, Numbers)
    other = prepared(dataset=dataset, shuffle=shuffle)
    epochs = [lists(other) for _ in range(4)]

    def trained(loader, stop=10):
        given = []
        for batch in loader:
            given.append(batch.tolist())
            loader.note_step()
            if len(given) == stop:
                break
        return given

    loader = prepared(dataset=dataset, shuffle=shuffle)
    assert trained(loader) == epochs[0]
    for epoch in (1, 2):
        assert lists(loader) == epochs[epoch] and loader.epoch == epoch
        assert next(iter(loader)).tolist() == epochs[epoch][0]
        assert place(loader) == (epoch, 0) == used(loader)
        assert trained(loader, 10 if epoch == 1 else 4) == epochs[epoch][: 10 if epoch == 1 else 4]
    state = loader.state_dict()
    assert used(loader) == (2, 16)
    loader = moved(prepared(dataset=dataset, shuffle=shuffle), state)
    assert next(iter(loader)).tolist() == epochs[2][4]
    assert used(loader) == place(loader) == (2, 16)
    assert trained(loader) == epochs[2][4:]
    skip_first_batches(loader, 3)
    next(iter(loader))
    assert trained(loader) == epochs[3][3:]
    loader.set_epoch(1)
    next(iter(loader))
    assert trained(loader) == epochs[1]


def test_a_batch_that_is_trained_on_after_its_loop_is_of_an_epoch(loader, epochs):
    """`batch = next(iter(loader))` in each step, after a loop that trained."""
    for _ in loader:
        loader.note_backward()
        loader.note_step()
    given = []
    for _ in range(3):
        given.append(next(iter(loader)).tolist())
        loader.note_backward()
    assert given == [epoch[0] for epoch in epochs[1:]]
    next(iter(loader))
    loader.set_epoch(2)
    loader.note_backward()
    assert lists(loader) == epochs[2], "the epoch that was named since"


def test_a_look_at_a_loader_before_a_loop_over_another_is_no_epoch(alone):
    """Its batch is not held when the other's are trained on; one that is, is trained on with them."""
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO", "shardkit": {"seed": 3}})
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(8.0)[:, None])
    loaders = [DataLoader(data, batch_size=4, shuffle=True) for _ in range(2)]
    model, optimizer, first, second = accelerator.prepare(model, optimizer, *loaders)

    def trained(loader, read=lambda: None):
        given = []
        for (batch,) in loader:
            beside = read()
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            given.append([one.flatten().tolist() for one in (batch, beside) if one is not None])
        return given

    trained(first), trained(second)
    assert trained(first, lambda: next(iter(second)) and None) and second.epoch == 1
    assert trained(first, lambda: list(second) and None) and second.epoch == 1
    beside = [other for _, other in trained(first, lambda: next(iter(second))[0])]
    assert beside[0] != beside[1] and second.epoch == 2
    accelerator.free_memory()


def test_loops_inside_a_loop_before_and_after_a_step_change_nothing(loader, epochs):
    given = []
    for batch in loader:
        given.append(batch.tolist())
        loader.note_step()
        assert list(loader) and next(iter(loader)) is not None
    assert given == epochs[0] and lists(loader) == epochs[1]


def used(loader):
    return loader.state_dict()["epoch"], loader.state_dict()["samples_seen"]


class FailsOnce(Numbers):
    has_failed = False

    def __getitem__(self, index):
        if not self.has_failed:
            self.has_failed = True
            raise OSError("the disk is away")
        return super().__getitem__(index)


def test_an_epoch_that_could_not_begin_begins_again_where_it_should(epochs):
    _, state = run(1, shuffle=True, stop=12, epochs=2)
    loader = moved(prepared(dataset=FailsOnce(), shuffle=True), state)
    with pytest.raises(OSError, match="the disk is away"):
        next(iter(loader))
    assert lists(loader) == epochs[1][2:]


class OneIsCorrupt(Numbers):
    def __getitem__(self, index):
        if index == 9:
            raise ValueError("corrupt")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loop_that_goes_on_after_an_error_of_the_data_does_not_end_as_if_its_epoch_were_over(workers):
    """torch's own iterator gives the batch after the one that failed."""
    batches = iter(prepared(dataset=OneIsCorrupt(20), num_workers=workers))
    assert lists(islice(batches, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="corrupt"):
        next(batches)
    with pytest.raises(UsageError, match=r"ended with an error .* \(got ValueError: corrupt\)"):
        next(batches)
    ended = iter(prepared(dataset=Numbers(4)))
    assert lists(ended) == [[0, 1, 2, 3]] and lists(ended) == []


class Exhausted(Numbers):
    """Reads from an iterator that has fewer samples than its length says."""

    def __getitem__(self, index):
        return torch.tensor(index) if index < 13 else next(iter(()))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_stop_iteration_does_not_end_the_epoch_of_its_rank_alone(workers):
    batches, given = iter(prepared(0, 2, Exhausted(), num_workers=workers)), []
    with pytest.raises(UsageError, match=r"raised StopIteration, which ends the epoch on this rank alone \(got 2"):
        given.extend(batches)
    assert flat(given) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_an_epoch_named_by_hand(loader, epochs):
    for epoch in (2, 0, 0, 3):
        loader.set_epoch(epoch)
        assert lists(loader) == epochs[epoch]
    for number, _ in enumerate(loader):
        if number == 3:
            loader.set_epoch(1)
            assert place(loader) == (4, 16), "the loop that runs goes on"
    assert place(loader) == (1, 0)
    assert lists(loader) == epochs[1]
    for _ in loader:
        skip_first_batches(loader, 2)
    assert lists(loader) == epochs[2][2:]
    for skip_first in (True, False):  # scripts name the epoch before or after they skip, the Trainer after
        if skip_first:
            skip_first_batches(loader, 3)
        loader.set_epoch(1)
        if not skip_first:
            skip_first_batches(loader, 3)
        assert lists(loader) == epochs[1][3:]
        assert lists(loader) == epochs[2], "once"
    loader.set_epoch(1)
    assert lists(loader) == epochs[1]


class KnowsItsEpoch(Numbers):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return torch.tensor(self.epoch)


def test_a_dataset_is_told_the_epoch_that_is_named():
    """As by Accelerate's loaders. Nothing else sets it: the script may count its epochs otherwise."""
    data = KnowsItsEpoch(4)
    loader = prepare_loader(DataLoader(data, batch_size=4), 0, 1, CPU, 7)
    data.set_epoch(7)
    assert lists(loader) == lists(loader) == [[7] * 4]
    for epoch in (3, 3, 4):
        loader.set_epoch(epoch)
        assert lists(loader) == [[epoch] * 4]


def test_attributes_of_a_loader_of_the_scripts_are_set_on_it():
    class Staged(DataLoader):
        stage, told = 0, None

        def staged(self, samples):
            return [self.stage + int(sample) for sample in samples]

        def set_epoch(self, epoch):
            self.told = epoch

    users = Staged(Numbers(4), batch_size=4)
    users.__dict__["collate_fn"] = users.staged
    loader = prepare_loader(users, 0, 1, CPU, 7)
    loader.stage = 10
    loader.set_epoch(3)
    assert list(loader) == [[10, 11, 12, 13]] and loader.told == 3


def test_the_iteration_of_accelerates_loaders_is_the_epoch():
    first, other = prepared(shuffle=True), prepared(shuffle=True)
    first.set_epoch(3)
    other.iteration = 3
    assert other.iteration == 3 and lists(first) == lists(other)
    assert first.iteration == other.iteration == 4


def test_a_copy_begins_where_the_loader_is():
    loader = prepared(shuffle=True)
    epochs = [lists(prepared(shuffle=True))]
    for taken in (copy.deepcopy, copy.copy):
        for batch in loader:
            assert batch.tolist() == epochs[0][0]
            twin = taken(loader)
            assert not twin.is_iterating and lists(twin) == epochs[0]
            break
        loader.set_epoch(0)
    assert lists(pickle.loads(pickle.dumps(loader))) == epochs[0]


def test_a_copy_of_an_accelerators_loader_is_one_of_its_loaders(alone):
    accelerator = Accelerator(config={"use_cpu": True})
    loader = accelerator.prepare(DataLoader(Numbers(10), batch_size=4))
    with pytest.raises(UsageError, match=r"^pickle: a prepared loader cannot be pickled .* the loader's state_dict"):
        pickle.dumps(loader)
    gathered = [accelerator.gather_for_metrics(batch).tolist() for batch in copy.deepcopy(loader)]
    assert gathered == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] and len(accelerator._run.loaders) == 2


class OneList:
    """A batch sampler that fills the list again that it has yielded."""

    def __len__(self):
        return 4

    def __iter__(self):
        batch = []
        for index in range(8):
            batch.append(index)
            if len(batch) == 2:
                yield batch
                batch.clear()


def test_a_batch_sampler_may_fill_one_list_again_and_again():
    loader = DataLoader(Numbers(8), batch_sampler=OneList())
    assert lists(prepare_loader(loader, 0, 1, CPU, 7)) == lists(loader) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert lists(prepare_loader(loader, 1, 2, CPU, 7)) == [[2, 3], [6, 7]]


class OneBuffer(IterableDataset):
    def __init__(self, is_copied):
        self.is_copied = is_copied

    def __iter__(self):
        buffer = torch.empty(2)
        for number in range(4):
            buffer.fill_(number)
            yield {"x": buffer.clone() if self.is_copied else buffer}


def test_a_stream_that_fills_its_batch_again_is_refused():
    """Batches are read ahead: each would have the numbers of a later one."""
    with pytest.raises(UsageError, match=r"data: OneBuffer changes a batch after it has yielded it \(got a tensor"):
        list(prepare_loader(DataLoader(OneBuffer(False), batch_size=None), 0, 1, CPU, 7))
    seen = []
    for batch in prepare_loader(DataLoader(OneBuffer(True), batch_size=None), 0, 1, CPU, 7):
        seen.append(batch["x"].tolist())
        batch["x"].zero_()  # the loop may change what it was given
    assert seen == [[number] * 2 for number in range(4)]


def test_len_is_that_of_a_whole_epoch(loader):
    assert len(loader) == len(DataLoader(Numbers(), batch_size=4)) == 10
    assert len(skip_first_batches(loader, 3)) == 10
    assert len(prepared(0, 3)) == len(prepared(2, 3)) == len(list(prepared(2, 3))) == 4
    assert len(prepared(0, 3, drop_last=True)) == len(list(prepared(1, 3, drop_last=True))) == 3
    assert len(prepared(dataset=SizedFlow())) == 10
    with pytest.raises(TypeError, match="has no len"):
        len(prepared(dataset=Flow()))


class SizedFlow(Flow):
    def __len__(self):
        return self.length


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_position_saved_on_n_ranks_goes_on_on_m(kind):
    make = KINDS[kind]
    whole = [run(1, make=make, epochs=2)[0][40 * epoch :][:40] for epoch in range(2)]
    for saved_on, loaded_on in product((1, 2, 3), repeat=2):
        for stop in range(1, 8):
            _, state = run(saved_on, make=make, stop=stop, epochs=2)
            epoch, seen = state["epoch"], state["samples_seen"]
            rest, _ = run(loaded_on, state, make=make)
            assert rest[: 40 - seen] == whole[epoch][seen:]
            assert set(rest[40 - seen :]) <= set(whole[epoch]), "padding"
            after, _ = run(loaded_on, state, make=make, epochs=2 - epoch)
            assert epoch or after[len(rest) :][:40] == whole[1]


@dataclass
class Example:
    x: torch.Tensor


class Sendable:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Sendable(self.x.to(device))


class MovesItself(Sendable):
    def to(self, device):
        self.x = self.x.to(device)


Pair = namedtuple("Pair", ["x", "to"])  # a field that bears the name of a method


COLLATED = {
    "dict": lambda numbers: {"x": torch.stack(numbers), "name": "text"},
    "ordered": lambda numbers: OrderedDict(x=torch.stack(numbers)),
    "default": lambda numbers: defaultdict(list, x=torch.stack(numbers)),
    "tuple": lambda numbers: (torch.stack(numbers), None, 3.5),
    "named tuple": lambda numbers: Pair(torch.stack(numbers), torch.ones(1)),
    "object": lambda numbers: Sendable(torch.stack(numbers)),
    "object that moves itself": lambda numbers: MovesItself(torch.stack(numbers)),
    "data class": lambda numbers: Example(torch.stack(numbers)),
    "list": list,
    "nothing": lambda numbers: None,
    "ragged": lambda numbers: {
        "x": torch.stack(numbers),
        "parts": torch.nested.nested_tensor([*map(torch.ones, numbers)]),
    },
    "text": lambda numbers: "text",
}


def first_tensor(batch):
    batch = batch if isinstance(batch, (dict, list, tuple)) else getattr(batch, "x", batch)
    batch = batch["x"] if isinstance(batch, dict) else batch
    return batch[0] if isinstance(batch, (list, tuple)) else batch


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("kind", COLLATED)
@pytest.mark.parametrize("dataset", [Numbers, Flow])
def test_batches_of_any_kind_are_as_plain_torch_gives_them(kind, dataset):
    data = dataset(9) if dataset is Numbers else TensorFlow(9)
    plain = list(DataLoader(data, batch_size=4, collate_fn=COLLATED[kind]))
    ours = list(prepared(dataset=data, collate_fn=COLLATED[kind]))
    for one, other in zip(plain, ours, strict=True):
        assert type(one) is type(other)
        found, expected = first_tensor(other), first_tensor(one)
        assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


class TensorFlow(Flow):
    def __iter__(self):
        return map(torch.tensor, super().__iter__())


def test_mappings_and_fields_keep_their_class_on_the_device():
    meta = torch.device("meta")
    moved_to = to_device(
        {kind: COLLATED[kind]([torch.ones(1)]) for kind in ("ordered", "default", "named tuple")}, meta
    )
    assert [type(value) for value in moved_to.values()] == [OrderedDict, defaultdict, Pair]
    assert all(first_tensor(value).is_meta for value in moved_to.values())
    assert moved_to["default"].default_factory is list


class Images(list):
    """A list with a size, which it needs."""

    def __init__(self, images, size):
        super().__init__(images)
        self.size = size


class TwoViews(tuple):
    def __new__(cls, one, other):
        return super().__new__(cls, (one, other))


def test_sequences_that_are_made_in_their_own_way():
    meta = torch.device("meta")
    images = to_device(Images([torch.ones(2), "text"], size=7), meta)
    assert (type(images), images.size, images[0].is_meta, images[1]) == (Images, 7, True, "text")
    assert all(tensor.is_meta for tensor in to_device(TwoViews(torch.ones(1), torch.ones(1)), meta))
    assert type(to_device(TwoViews(torch.ones(1), 2), CPU)) is TwoViews
    assert type(gather(images[:1])) is list and type(gather(Images([torch.ones(2)], size=7))) is Images
    shape = torch.ones(2, 3).shape
    assert type(to_device(shape, meta)) is torch.Size and to_device((1, [2]), meta) == (1, [2])


class AtOnce(Numbers):
    """Fetches a batch in one call."""

    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices]


DATASETS = {
    "at once": AtOnce(26),
    "subset": Subset(Numbers(60), range(30, 56)),
    "concatenated": ConcatDataset([Numbers(13), Numbers(13)]),
    "tensors": TensorDataset(torch.arange(26)),
    "stacked": StackDataset(Numbers(26), Numbers(26)),
    "chained": ChainDataset([Flow(13), Flow(13)]),
    "empty": Numbers(0),
    "one": Numbers(1),
}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("drop_last", [False, True])
def test_data_sets_of_torch_give_what_a_plain_loader_gives(kind, batch_size, drop_last):
    if drop_last and batch_size is None:
        pytest.skip("torch refuses it")
    options = {"batch_size": batch_size, "drop_last": drop_last}
    plain = list(DataLoader(DATASETS[kind], **options))
    loader = prepared(dataset=DATASETS[kind], **options)
    assert str(list(loader)) == str(plain)
    assert place(loader) == (1, 0)
    if kind != "chained":
        assert len(loader) == len(plain)


class Unsized(Dataset):
    """Its length is known to the sampler alone."""

    def __getitem__(self, index):
        return index


def test_a_data_set_without_a_length_is_read_by_its_sampler():
    assert run(2, dataset=Unsized(), sampler=range(5, 21))[0] == list(range(5, 21))


def test_a_loader_class_with_an_iteration_of_its_own_is_named(capsys):
    class Own(DataLoader):
        def __iter__(self):
            return map(str, super().__iter__())

    assert flat(prepare_loader(Own(Numbers(8)), 0, 1, CPU)) == list(range(8))
    assert "data: Own overrides __iter__, which is not used" in capsys.readouterr().err

    class Filtering(DataLoader):
        def _get_iterator(self):
            return map(str, super()._get_iterator())

    assert flat(prepare_loader(Filtering(Numbers(8)), 0, 1, CPU)) == list(range(8))
    assert "data: Filtering overrides _get_iterator, which is not used" in capsys.readouterr().err


class Repeated:
    """A batch sampler that begins again for ever, so that workers are kept over epochs."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        while True:
            yield from self.batches


def test_a_loader_class_that_ends_epochs_of_an_endless_sampler_is_refused():
    class KeepsWorkers(DataLoader):
        def __len__(self):
            return len(self.batch_sampler.batches)

        def __iter__(self):
            return islice(super().__iter__(), len(self))

    loader = KeepsWorkers(Numbers(8), batch_sampler=Repeated([[0, 1], [2, 3]]))
    assert len(list(loader)) == 2
    with pytest.raises(UsageError, match=r"prepare: KeepsWorkers ends its epochs by itself .*Repeated\); use a torch"):
        prepare_loader(loader, 0, 1, CPU)


class Slow(Numbers):
    """The first worker is slower than the second."""

    def __getitem__(self, index):
        if get_worker_info().id == 0:
            time.sleep(0.05)
        return super().__getitem__(index)


@pytest.mark.slow
def test_batches_come_in_order_whatever_worker_is_first(capsys):
    loader = prepared(dataset=Slow(24), num_workers=2, in_order=False)
    assert flat(loader) == list(range(24))
    assert "data: in_order=False is ignored" in capsys.readouterr().err


def noisy(numbers):
    """Draws while it collates, as masking does."""
    return [(int(number), int(torch.randint(10**6, ())), random.random()) for number in numbers]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Numbers, ShuffledFlow, FlowWithState])
def test_what_collating_draws_in_workers_goes_on_after_a_resume_and_differs_between_ranks(kind, persistent):
    def loader(rank=0):
        return prepared(rank, 2, kind(40), num_workers=2, persistent_workers=persistent, collate_fn=noisy)

    whole = [*(one := loader()), *one]
    for stop in (1, 2, 5, 6):
        one, given = loader(), []
        while len(given) < stop:
            given += islice(one, stop - len(given))
        assert given == whole[:stop]
        resumed = moved(loader(), one.state_dict())
        assert [*resumed, *resumed][: len(whole) - stop] == whole[stop:]
    drawn, others = ({draw for batch in loader(rank) for _, draw, _ in batch} for rank in range(2))
    assert not drawn & others


class HalfFlow(Flow):
    """A stream that gives a rank its part."""

    split_by_rank = (0, 2)


@pytest.mark.parametrize("batch_size", [4, None])
@pytest.mark.parametrize("kind", [Numbers, Flow, FlowWithState, HalfFlow])
def test_without_workers_collating_draws_between_the_draws_of_the_loop_as_in_plain_torch(kind, batch_size):
    """No batch is collated ahead: a masking collate_fn would draw others after a resume, and so would the model."""
    world = 2 if kind is HalfFlow else 1
    collate = noisy if batch_size else (lambda number: noisy([number]))

    def drawn(batches):
        return [(batch, float(torch.rand(()))) for batch in batches]

    random.seed(0)
    torch.manual_seed(0)
    plain = DataLoader(kind(20), batch_size=batch_size, collate_fn=collate, generator=torch.Generator())
    expected = drawn(plain)
    random.seed(0)
    torch.manual_seed(0)
    loader = prepared(0, world, kind(20), batch_size=batch_size, collate_fn=collate)
    assert drawn(loader) == expected


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_ready_batches_in_workers_draw_otherwise_on_every_rank(persistent):
    def drawn(rank):
        options = {"batch_size": None, "num_workers": 1, "persistent_workers": persistent}
        return {float(value) for value in prepared(rank, 2, Noise(8), **options)}

    assert drawn(0) == drawn(0)
    assert not drawn(0) & drawn(1)


class Noise(Numbers):
    def __getitem__(self, index):
        return torch.rand(())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, ShuffledFlow, FlowWithState])
def test_loops_that_are_left_begin_anew_with_workers_that_persist(kind):
    shuffle = {"shuffle": True} if kind is Numbers else {}
    plain = prepared(dataset=kind(40), num_workers=2, **shuffle)
    loader = prepared(dataset=kind(40), num_workers=2, persistent_workers=True, prefetch_factor=4, **shuffle)
    for stop in (1, 10, 3, 10):
        assert lists(islice(loader, stop)) == lists(islice(plain, stop))
    skip_first_batches(loader, 6)
    skip_first_batches(plain, 6)
    assert lists(loader) == lists(plain)
    assert len(lists(loader)) == 10


CYCLE = """
import gc, multiprocessing
from tests.loaders import FlowWithState, prepared

if __name__ == "__main__":
    loader = prepared(dataset=FlowWithState(40), num_workers=1, persistent_workers=True)
    next(iter(loader))
    loader.loader = loader  # as a traceback that is kept refers to it
    del loader
    gc.collect()
    for worker in multiprocessing.active_children():
        worker.join(60)  # a worker that does not answer for 5 s is killed, and torch does not wait for that
    print(len(multiprocessing.active_children()))
"""


@pytest.mark.slow
def test_workers_of_a_loader_in_a_cycle_end_and_let_the_process_end(tmp_path):
    """They ignore the signal with which torch ends those that do not answer, and Python's exit waits for them."""
    (tmp_path / "script.py").write_text(CYCLE)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


@pytest.mark.slow
def test_workers_of_a_loader_that_is_freed_end_at_once():
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"})
    others = multiprocessing.active_children()
    loader = accelerator.prepare(DataLoader(Numbers(), num_workers=1, persistent_workers=True))
    assert len(list(loader)) == 40
    (worker,) = [one for one in multiprocessing.active_children() if one not in others]
    gc.disable()
    try:
        accelerator._run.loaders.clear()
        del loader
        assert not worker.is_alive()
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [FlowWithState, ShuffledFlow])
def test_a_stream_that_is_moved_by_hand_is_brought_back_first(kind):
    loader = prepared(dataset=kind())
    first, second = lists(loader), lists(loader)
    loader = prepared(dataset=kind())
    assert lists(islice(loader, 5)) == first[:5]
    assert lists(skip_first_batches(loader, 3)) == first[3:]
    start = prepared(dataset=kind()).state_dict()
    next(iter(loader))
    assert lists(moved(loader, start)) == first
    _, over = run(1, dataset=kind(), stop=10)
    next(iter(loader))
    assert lists(moved(loader, over)) == []
    assert lists(loader) == second
    loader.set_epoch(1)
    assert lists(loader) == second


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Numbers, ShuffledFlow])
def test_loops_inside_a_loop_with_workers_that_persist(kind):
    """torch's persistent workers serve one loop: a second one takes them from the first."""
    options = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1}
    epochs = [lists(alone := prepared(dataset=kind(20), num_workers=1)), *(lists(alone) for _ in range(2))]
    loader, outer, inner = prepared(dataset=kind(20), **options), [], []
    for number, batch in enumerate(loader):
        outer.append(batch.tolist())
        if number == 1:
            looked = next(iter(loader)).tolist()
        elif number in (2, 4):
            inner.append(lists(loader))
    assert (outer, looked, *inner) == (epochs[0], epochs[1][0], epochs[2], lists(alone))
    assert lists(loader) == epochs[1]
    pairs = zip(loader, loader, strict=True)
    assert [(one.tolist(), other.tolist()) for one, other in pairs] == list(zip(epochs[2], inner[1], strict=True)), (
        "after epoch 1 come 2 and 3"
    )
    kept = iter(loader)
    next(kept)
    assert len(lists(loader)) == len(lists(kept)) + 1 == 5


def test_a_data_set_whose_state_needs_arguments_is_skipped_through():
    class Needs(FlowWithState):
        def state_dict(self, samples, from_beginning):
            raise AssertionError

    _, state = run(1, dataset=Needs(), stop=2)
    assert run(1, state, dataset=Needs())[0] == list(range(8, 40))


def two_loaders(seed=None, generators=(None, None)):
    """The orders of two data sets of one length, prepared by one accelerator."""
    torch.manual_seed(1)
    config = {"use_cpu": True, "distributed_type": "NO", "shardkit": {"seed": seed}}
    accelerator = Accelerator(config=config)
    loaders = [DataLoader(Numbers(), batch_size=4, shuffle=True, generator=one) for one in generators]
    return [flat(loader) for loader in accelerator.prepare(*loaders)]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_two_data_sets_of_one_length_are_not_shuffled_alike_unless_by_equal_generators():
    for seed in (None, 3):
        first, second = two_loaders(seed)
        assert first != second
        assert two_loaders(seed) == [first, second]
    shared = seeded(3)
    first, second = two_loaders(7, (shared, shared))
    assert first != second
    assert two_loaders(7, (seeded(3), seeded(3))) == [first, first]
    assert two_loaders(8, (seeded(3), seeded(4)))[1] not in (first, second)


def train_with_looks():
    """A training loop that looks at its own loader in many places; samples and steps as without."""
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"}, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader, evaluation = DataLoader(Ones(40), batch_size=4, shuffle=True), DataLoader(Ones(7), batch_size=2)
    model, optimizer, loader, evaluation = accelerator.prepare(model, optimizer, loader, evaluation)
    counts = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            next(iter(loader))
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).mean())
                optimizer.step()
                optimizer.zero_grad()
            if number == 2:
                seen = torch.cat([accelerator.gather_for_metrics(other) for other in loader])
                assert sorted(seen.flatten().tolist()) == list(range(40))
            metrics = torch.cat([accelerator.gather_for_metrics(other) for other in evaluation])
            assert metrics.flatten().tolist() == list(range(7))
            counts.append((accelerator.counters.step, accelerator.counters.samples_seen, loader.samples_seen))
    return counts


def gathered_by_another(samples: int) -> tuple[list[int], list[int], list[str]]:
    """A module of the script has an Accelerator of its own, which gathers what the first one's loaders yield, also
    inside a loop over a loader of its own; and it is asked for the window, and calls backward."""
    first, own = (Accelerator(config={"use_cpu": True, "shardkit": {"gradient_accumulation_steps": n}}) for n in (2, 1))
    loader, outer = first.prepare(DataLoader(Numbers(samples), batch_size=2)), own.prepare(DataLoader(Ones(8)))
    seen = torch.cat([own.gather_for_metrics(batch) for batch in loader])
    nested = next(torch.cat([own.gather_for_metrics(batch) for batch in loader]) for _ in outer)
    model = first.prepare(nn.Linear(1, 1))
    with log_lines() as lines:
        for _ in range(2):
            assert own.sync_gradients
            assert len(lines) == first.is_main_process
            own.backward(model(torch.ones(2, 1)).mean())
    return seen.flatten().tolist(), nested.flatten().tolist(), lines


def test_an_accelerator_gathers_what_loaders_of_another_yield(ranks):
    for samples in (7, 8, 9):
        for rank, (seen, nested, lines) in enumerate(ranks.run(2, gathered_by_another, samples)):
            assert seen == nested == list(range(samples))
            assert len(lines) == (rank == 0)
    assert "accumulation: this Accelerator has prepared no model" in ranks.run(2, gathered_by_another, 7)[0][2][0]


class Ones(Numbers):
    def __getitem__(self, index):
        return torch.tensor([float(index)])


@pytest.mark.slow
def test_a_training_loop_that_looks_at_its_own_loader(ranks):
    for world in (1, 2, 3):
        batches = -(-40 // (4 * world))
        ends = [number % 2 == 0 or number == batches for _ in range(2) for number in range(1, batches + 1)]
        steps = list(accumulate(ends))
        for counts in ranks.run(world, train_with_looks):
            assert [step for step, *_ in counts] == steps
            assert counts[-1][1] == 80
            assert [seen for *_, seen in counts] == [
                min(40, 4 * world * (n + 1)) for _ in range(2) for n in range(batches)
            ]


def gathered(loop) -> list[int]:
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    first = accelerator.prepare(DataLoader(torch.arange(24), batch_size=4))
    second = accelerator.prepare(DataLoader(torch.arange(100, 117), batch_size=4))
    found = loop(accelerator, first, second)
    accelerator.free_memory()
    return [value for part in found for value in part.tolist()]


def both_of_a_zip(accelerator, first, second):
    return [accelerator.gather_for_metrics(part) for pair in zip(first, second, strict=False) for part in pair]


def one_ahead(accelerator, first, second):
    found, batches = [], iter(second)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        found.append(accelerator.gather_for_metrics(batch))
        batch = following
    return found


def labels_read_ahead(accelerator, first, second):
    """The 15 samples fill all but one place of their two batches, which are as long on both ranks."""
    loader, found = accelerator.prepare(DataLoader(torch.arange(15), batch_size=4)), []
    for ahead in (1, 2):
        waiting = []
        for batch in chain(loader, [None] * ahead):
            waiting.append(batch)
            if len(waiting) > ahead and (batch := waiting.pop(0)) is not None:
                found.append(accelerator.gather_for_metrics((batch * 2, batch))[0] // 2)
    return found


class Encoding(UserDict):
    """As Transformers' BatchEncoding."""

    def to(self, device):
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


def batches_as(kind, accelerator):
    """The same two loaders, with batches of this kind, and what takes the numbers out of a batch."""
    collate, numbers = {
        "encoding": (lambda found: Encoding(x=torch.stack(found)), lambda batch: batch["x"]),
        "data class": (lambda found: Example(torch.stack(found)), lambda batch: batch.x),
    }[kind]
    loaders = [DataLoader(data, batch_size=4, collate_fn=collate) for data in (Numbers(24), Numbers(17))]
    return (*accelerator.prepare(*loaders), numbers)


def encodings_one_ahead(accelerator, first, second, kind="encoding"):
    _, second, numbers = batches_as(kind, accelerator)
    found, batches = [], iter(second)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        found.append(accelerator.gather_for_metrics(numbers(batch)))
        batch = following
    return found


def data_classes_one_ahead(*given):
    return encodings_one_ahead(*given, kind="data class")


def encodings_of_a_zip(accelerator, first, second, kind="encoding"):
    first, second, numbers = batches_as(kind, accelerator)
    pairs = zip(first, second, strict=False)
    return [accelerator.gather_for_metrics(numbers(part)) for pair in pairs for part in pair]


def data_classes_of_a_zip(*given):
    return encodings_of_a_zip(*given, kind="data class")


def predictions_inside(accelerator, first, second):
    return [accelerator.gather_for_metrics(x * 2) // 2 for _ in islice(first, 2) for x in second]


def objects_of_each_sample(accelerator, first, second):
    """One object a sample, with tensors of any length in it."""
    found = []
    for batch in second:
        own = [{"number": value, "boxes": torch.zeros(int(value) % 3 + 1)} for value in batch]
        found += [one["number"] for one in accelerator.gather_for_metrics(own, use_gather_object=True)]
    return [torch.stack(found)]


def ready_batches(accelerator, first, second):
    """The last of the three has no partner on the other rank."""
    loader = accelerator.prepare(DataLoader(torch.arange(15).reshape(3, 5), batch_size=None))
    return [accelerator.gather_for_metrics(batch * 2) // 2 for batch in loader]


def single_samples(accelerator, first, second):
    """0-dim: the last of the 15 has no partner on the other rank."""
    loader = accelerator.prepare(DataLoader(torch.arange(15), batch_size=None))
    return [accelerator.gather_for_metrics(sample * 2) // 2 for sample in loader]


def a_value_of_each_sample(accelerator, first, second):
    """A metric of one sample is 0-dim."""
    loader = accelerator.prepare(DataLoader(torch.arange(15), batch_size=1))
    return [accelerator.gather_for_metrics(batch.sum()) for batch in loader]


def objects_of_single_samples(accelerator, first, second):
    loader = accelerator.prepare(DataLoader(torch.arange(15), batch_size=1))
    return [torch.tensor(accelerator.gather_for_metrics(int(batch))) for batch in loader]


def a_value_of_each_batch(accelerator, first, second):
    loader = accelerator.prepare(DataLoader(torch.arange(9), batch_sampler=OfLengths(4, 2, 3)))
    return [accelerator.gather_for_metrics(batch.sum()) for batch in loader]


class OfLengths(Sampler):
    """A batch sampler of batches of these lengths."""

    def __init__(self, *lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        numbers = iter(range(100))
        return (list(islice(numbers, length)) for length in self.lengths)


def batches_of_different_lengths(accelerator, first, second):
    """The last of the three has no partner on the other rank, which gets the first again."""
    found = []
    for lengths in ((4, 2, 3), (2, 2, 3), (2, 3, 2)):
        loader = accelerator.prepare(DataLoader(torch.arange(9), batch_sampler=OfLengths(*lengths)))
        for batch in loader:
            together = accelerator.gather_for_metrics(accelerator.pad_across_processes(batch, pad_index=-1))
            found.append(together[together >= 0])
    return found


def objects_of_batches_of_different_lengths(accelerator, first, second):
    loader = accelerator.prepare(DataLoader(torch.arange(9), batch_sampler=OfLengths(4, 2, 3)))
    return [
        torch.tensor(accelerator.gather_for_metrics([int(value) for value in batch], use_gather_object=True))
        for batch in loader
    ]


def losses_of_whole_batches(accelerator, first, second):
    """Numbers of values: a batch's mean repeated for each sample of a whole one. The last has 1 sample and padding."""
    return [torch.tensor([len(accelerator.gather_for_metrics(batch.float().mean().repeat(4)))]) for batch in second]


def values_that_differ_are_not_cut(accelerator, first, second):
    """As long as a whole batch, but not a repeated mean."""
    return [accelerator.gather_for_metrics(torch.arange(4)) for batch in second][-1:]


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (losses_of_whole_batches, [8, 8, 1]),
        (values_that_differ_are_not_cut, [0, 1, 2, 3] * 2),
        (batches_of_different_lengths, [*range(9), *range(7), *range(7)]),
        (objects_of_batches_of_different_lengths, [*range(9)]),
        (ready_batches, [*range(15)]),
        (single_samples, [*range(15)]),
        (a_value_of_each_sample, [*range(15)]),
        (objects_of_single_samples, [*range(15)]),
        (a_value_of_each_batch, [6, 9, 21]),
        (objects_of_each_sample, [*range(100, 117)]),
        (both_of_a_zip, [*range(24), *range(100, 117)]),
        (one_ahead, [*range(100, 117)]),
        (labels_read_ahead, [*range(15)] * 2),
        (encodings_one_ahead, [*range(17)]),
        (data_classes_one_ahead, [*range(17)]),
        (encodings_of_a_zip, [*range(24), *range(17)]),
        (data_classes_of_a_zip, [*range(24), *range(17)]),
        (predictions_inside, [*range(100, 117)] * 2),
    ],
)
def test_samples_for_metrics_are_those_of_their_own_loader(ranks, loop, expected):
    for found in ranks.run(2, gathered, loop):
        assert sorted(found) == sorted(expected)


def gathered_after_the_loop(samples):
    """The warnings, with predictions of all batches; and with those of other loaders since."""
    padding._warn_of_ended_loop.cache_clear()
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    loader, other = accelerator.prepare(DataLoader(Numbers(samples), batch_size=4), DataLoader(Numbers(8)))
    with log_lines("shardkit.data") as lines:
        predictions = torch.cat([batch * 2 for batch in loader])
        for _ in other:
            accelerator.gather_for_metrics(predictions)
            break
        assert not lines
        for _ in range(2):
            for _batch in other:
                found = [prediction * 2 for prediction in loader]
                accelerator.gather_for_metrics(torch.zeros(1))
                accelerator.gather_for_metrics(torch.cat(found))
    accelerator.free_memory()
    return lines


def predictions_read_ahead():
    """Whether those of the last batch, which are no tensors of it, are warned of."""
    padding._warn_of_ended_loop.cache_clear()
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    batches = iter(accelerator.prepare(DataLoader(Numbers(13), batch_size=4)))
    with log_lines("shardkit.data") as lines:
        batch = next(batches)
        while batch is not None:
            predicted, batch = batch * 2, next(batches, None)
            accelerator.gather_for_metrics(predicted)
    accelerator.free_memory()
    return any("or of the last one if the loop was read ahead" in line for line in lines)


def test_values_of_a_whole_loop_gathered_after_it_are_told_to_have_the_padding(ranks):
    for lines in ranks.run(2, gathered_after_the_loop, 13):
        (line,) = lines
        assert line.startswith("gather_for_metrics: called after the loop with the values of all its batches")
    assert ranks.run(2, predictions_read_ahead) == [True, True]
    assert ranks.run(2, gathered_after_the_loop, 12) == [[], []]
    assert ranks.run(1, gathered_after_the_loop, 13) == [[]]


def gathered_objects(batch_size):
    """The warnings, and the objects of the last batch, for what is no list of one value per sample."""
    padding._warn_of_objects.cache_clear()
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    loader = accelerator.prepare(DataLoader(Numbers(7), batch_size=batch_size))
    with log_lines("shardkit.data") as lines:
        for batch in loader:
            accelerator.gather_for_metrics(float(batch.sum()))
            accelerator.gather_for_metrics([str(int(number)) for number in batch])
        assert not lines
        for batch in loader:
            found = accelerator.gather_for_metrics({"number": batch, "text": [str(int(number)) for number in batch]})
    accelerator.free_memory()
    return lines, [text for one in found for text in one["text"]]


def test_objects_that_hold_several_samples_are_told_to_have_the_padding(ranks):
    for lines, found in ranks.run(2, gathered_objects, 2):
        (line,) = lines
        assert "one object for all samples of a rank (got dict), so no padding is dropped; pass a list" in line
        assert found == ["4", "5", "6", "0"]
    assert ranks.run(2, gathered_objects, 1) == [([], ["6"])] * 2
    assert ranks.run(1, gathered_objects, 2) == [([], ["6"])]


def repeated_losses_of_uneven_batches(samples):
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True}, even_batches=False)
    loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=4))
    gathered = [accelerator.gather_for_metrics(batch.float().mean().repeat(4)) for batch in loader]
    return [value for part in gathered for value in part.tolist()]


@pytest.mark.parametrize("samples", [13, 15])
def test_a_repeated_loss_counts_the_samples_of_each_rank_where_they_differ(ranks, samples):
    first, second = ranks.run(2, repeated_losses_of_uneven_batches, samples)
    assert first == second and len(first) == samples
    assert sum(first) == sum(range(samples)), "each batch's mean, as often as it has samples"


def batches_inside_join_uneven_inputs(samples, even_batches):
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True})
    loader = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=2))
    accelerator.prepare(DataLoader(Flow(4), batch_size=2))
    with log_lines("shardkit.data") as lines, accelerator.join_uneven_inputs([], even_batches=even_batches):
        inside = lists(loader)
    return inside[-1], lists(loader)[-1], lines


def test_join_uneven_inputs_pads_as_it_is_told_and_the_last_sample_with_a_warning(ranks):
    shares = [(inside, after) for inside, after, _ in ranks.run(2, batches_inside_join_uneven_inputs, 7, False)]
    assert shares == [([4, 5], [4, 5]), ([6], [6, 0])]
    for even_batches in (True, None):
        assert [inside for inside, *_ in ranks.run(2, batches_inside_join_uneven_inputs, 7, even_batches)][1] == [6, 0]
    (first, *_, lines), (second, *_) = ranks.run(2, batches_inside_join_uneven_inputs, 5, False)
    assert (first, second) == ([4], [0]) and "fewer samples than ranks (1 for 2); it is padded" in lines[0]


def several_rows(samples):
    return torch.tensor([*samples, *samples])


def of_different_lengths(samples):
    return {"values": torch.tensor(samples), "pairs": several_rows(samples)}


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("collate", [several_rows, of_different_lengths])
def test_a_loss_counts_the_samples_where_a_collate_fn_makes_several_rows_of_each(ranks, collate, kind):
    for losses, values in ranks.run(2, losses_of_rows, collate, kind):
        assert losses == [*[1.5] * 4, *[5.5] * 4, 8.0, 9.0], "the last batch has one sample a rank"
        assert values == [float(value) for value in range(10)]
    for losses, values in ranks.run(2, losses_of_rows, collate, kind, 9):
        assert losses[8:] == [8.0] and values == [float(value) for value in range(9)]


def losses_of_rows(collate, kind, samples=10):
    """A repeated mean of each pair of ranks' batches, and one value for each sample."""
    data = Flow(samples) if kind == "stream" else torch.arange(samples)
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    losses, values = [], []
    for batch in accelerator.prepare(DataLoader(data, batch_size=2, collate_fn=collate)):
        rows = (batch["values"] if isinstance(batch, dict) else batch.chunk(2)[0]).float()
        loss = accelerator.reduce(rows.sum(), "sum") / 4 if len(rows) == 2 else rows.mean()
        losses += accelerator.gather_for_metrics(loss.repeat(2)).tolist()
        values += accelerator.gather_for_metrics(rows.clone()).tolist()
    return losses, values


def test_a_repeated_loss_of_a_short_batch_counts_its_samples_in_one_process(ranks):
    assert ranks.run(1, gathered, losses_of_whole_batches) == [[4, 4, 4, 4, 1]]
