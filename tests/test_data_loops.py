"""Loops as people write them. Each reads what plain torch reads in one process, and knows where it is."""

import copy
import io
import pickle
from collections import OrderedDict, defaultdict, namedtuple
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
    StackDataset,
    Subset,
    TensorDataset,
)

from shardkit import Accelerator
from shardkit.data.device import to_device
from shardkit.data.preparing import prepare_loader
from shardkit.data.skipping import skip_first_batches
from shardkit.distributed.collectives import gather
from shardkit.errors import UsageError
from tests.golden.positions import KINDS
from tests.loaders import (
    CPU,
    Example,
    Flow,
    FlowWithState,
    Numbers,
    ShuffledFlow,
    flat,
    lists,
    moved,
    prepared,
    read_inside,
    run,
)
from tests.ranks import log_lines


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
