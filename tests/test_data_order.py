"""An epoch's order, computed where it is shuffled, else drawn from the sampler as needed."""

import json
import math
import random
from collections import Counter
from itertools import combinations, count, islice, pairwise
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shardkit.data.permutation import SHORT, Permutation
from shardkit.data.preparing import prepare_loader
from shardkit.data.sampler import COMPUTED, DRAWN_WHOLE
from shardkit.data.skipping import skip_first_batches
from shardkit.distributed.seed import stream_seed
from shardkit.errors import CheckpointError
from tests.golden import positions
from tests.loaders import (
    CPU,
    Backwards,
    Chance,
    Flow,
    Numbers,
    Pairs,
    Reversed,
    batch_sampled,
    distributed,
    flat,
    moved,
    prepared,
    run,
)

GOLDEN = Path(__file__).parent / "golden"
LONG = [SHORT, 100_003, 2**17, 250_000]


def order_of(length, key):
    return Permutation(length, key).at(torch.arange(length))


@pytest.mark.parametrize("length", [*range(1, 70), 4095, 4096, 4097, *LONG])
def test_every_length_is_permuted(length):
    assert torch.equal(order_of(length, length).sort().values, torch.arange(length))


# Noted once: an order that changes would lose and repeat samples of epochs that are resumed.
NOTED = {
    1000: {0: 268, 1: 133, 999: 756},
    10**6: {0: 129929, 1: 63076, 999_999: 867650},
    10**12: {0: 288842972425, 1: 5200991901, 10**12 - 1: 463063348449},
    2**62: {0: 3002253214242046259, 1: 3211226116822392496, 2**62 - 1: 498628568020963569},
}


@pytest.mark.parametrize("length", NOTED)
def test_the_computed_order_never_changes_and_a_place_is_looked_up_alone(length):
    permutation, noted = Permutation(length, 5), NOTED[length]
    assert permutation.at(torch.tensor(list(noted))).tolist() == list(noted.values())
    assert [int(permutation.at(torch.tensor([place]))) for place in noted] == list(noted.values())


def drawn_whole(length, key):
    return torch.randperm(length, generator=torch.Generator().manual_seed(key))


def deviations(counts, degrees_of_freedom):
    """How many standard deviations the chi-square of equally likely counts is from what chance gives."""
    counts = counts.double()
    expected = counts.sum() / counts.numel()
    chi_square = ((counts - expected) ** 2 / expected).sum()
    return abs(float((chi_square - degrees_of_freedom) / math.sqrt(2 * degrees_of_freedom)))


def differences(one, other):
    """How evenly the differences of two orders, modulo their length, lie in 64 ranges."""
    length = len(one)
    return deviations(torch.bincount((one - other).remainder(length) * 64 // length, minlength=64), 63)


@pytest.mark.slow
@pytest.mark.parametrize("make", [order_of, drawn_whole])
@pytest.mark.parametrize("length", [6_400, *LONG])
def test_the_computed_order_is_mixed_as_a_drawn_one_is(make, length):
    order, positions_in_32 = make(length, 1), torch.arange(length) * 32 // length
    assert deviations(torch.bincount(positions_in_32 * 32 + order * 32 // length, minlength=1024), 31**2) < 4
    columns = math.isqrt(length - 1) + 1
    for lag in (1, 2, 3, 64, columns, columns + 1):
        assert differences(order[lag:], order[:-lag]) < 4, lag
    rises = int((order[1:] > order[:-1]).sum())
    assert abs(rises - length / 2) < 4 * math.sqrt(length / 12)
    orders = [make(length, key) for key in range(64)]
    stays = sum(int((one == torch.arange(length)).sum()) for one in orders)
    assert abs(stays - 64) < 4 * 8
    for one, following in pairwise(orders):  # neighbouring keys
        assert differences(one, following) < 5
        assert int((one == following).sum()) < 10


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_a_short_epoch_are_equally_likely(length):
    keys = range(max(400, 20 * math.factorial(length)))
    found = Counter(tuple(order_of(length, key).tolist()) for key in keys)
    assert len(found) == math.factorial(length)
    assert deviations(torch.tensor(list(found.values())), len(found) - 1) < 4


def test_neighbouring_epochs_seeds_and_ranks():
    epochs = flat_epochs(prepared(dataset=Numbers(1000), shuffle=True, batch_size=50), 4)
    other_seed = flat_epochs(prepared(dataset=Numbers(1000), shuffle=True, batch_size=50, seed=8), 4)
    for one, other in combinations([*epochs, *other_seed], 2):
        assert sorted(one) == list(range(1000))
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 10
    assert (
        run(3, dataset=Numbers(999), shuffle=True, batch_size=37)[0]
        == run(1, dataset=Numbers(999), shuffle=True, batch_size=111)[0]
    )


def flat_epochs(loader, epochs):
    return [flat(loader) for _ in range(epochs)]


@pytest.mark.parametrize("kind", positions.KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_epoch_that_an_older_version_began_ends_in_its_order(kind, world):
    for path in GOLDEN.glob(f"*/{positions.NAME}"):
        golden = json.loads(path.read_text())[kind]
        read, state = run(world, golden["state"], make=positions.KINDS[kind])
        assert read[: len(golden["rest"])] == golden["rest"]
        assert (state["epoch"], state["samples_seen"], state["order"]) == (2, 0, COMPUTED)


def test_such_an_epoch_can_be_saved_again_and_the_next_one_is_computed():
    golden = json.loads((GOLDEN / "0.1.0" / positions.NAME).read_text())["shuffled"]
    first, state = run(2, golden["state"], stop=1, shuffle=True)
    assert (state["order"], state["samples_seen"]) == (DRAWN_WHOLE, 24)
    rest, after = run(1, state, shuffle=True)
    assert first + rest == golden["rest"]
    second, _ = run(1, after, shuffle=True)
    assert second == flat(moved(prepared(shuffle=True), {**after, "epoch": 2}))
    by_hand = skip_first_batches(moved(prepared(shuffle=True), golden["state"]), 5)
    assert flat(by_hand) == golden["rest"][4:], "5 batches of 4 are left out of the epoch that the checkpoint was in"


def test_an_order_of_a_newer_version_is_refused():
    _, state = run(1, shuffle=True, stop=1)
    with pytest.raises(CheckpointError, match=r"an order that this version does not know \(got 'feistel-9'\)"):
        prepared(shuffle=True).load_state_dict({**state, "order": "feistel-9"})
    assert sorted(flat(moved(prepared(shuffle=True), {**state, "order": "feistel-9", "samples_seen": 0}))) == list(
        range(40)
    )


class Endless(Sampler):
    """Infinite; has a length of 40, if any. Counts the items that were requested."""

    asked = 0

    def __iter__(self):
        for number in count():
            self.asked += 1
            yield number * 7 % 40 if number % 3 else random.randrange(40)


class EndlessWithLength(Endless):
    def __len__(self):
        return 40


class EndlessBatches(Endless):
    def __iter__(self):
        single = super().__iter__()
        while True:
            yield list(islice(single, random.randint(1, 3)))


def endless(rank, world, kind=Endless, **options):
    if issubclass(kind, EndlessBatches):
        return prepare_loader(DataLoader(Numbers(), batch_sampler=kind()), rank, world, CPU, 7, **options)
    return prepare_loader(DataLoader(Numbers(), batch_size=4, sampler=kind()), rank, world, CPU, 7, **options)


@pytest.mark.parametrize("kind", [Endless, EndlessWithLength, EndlessBatches])
def test_issue_9_14_an_endless_sampler_is_drawn_from_as_batches_are_needed(kind):
    whole, _ = run(2, make=endless, kind=kind, stop=30)
    for stop in (1, 7, 12):
        before, state = run(2, make=endless, kind=kind, stop=stop)
        assert before == whole[: len(before)]
        rest, _ = run(2, state, make=endless, kind=kind, stop=30 - stop)
        assert before + rest == whole
        alone, _ = run(1, state, make=endless, kind=kind, stop=10)
        assert alone == whole[len(before) :][: len(alone)]
    loader = endless(0, 2, kind)
    sampler = loader.batch_sampler if kind is EndlessBatches else loader.sampler
    for number, _ in enumerate(loader):
        if number == 9:
            break
    assert sampler.asked <= 11 * (2 * 3 if kind is EndlessBatches else 8)
    assert len(skip_first_batches(endless(0, 2, kind), 5).state_dict()) and not loader.end_of_dataloader


def test_len_is_what_the_users_sampler_says():
    assert len(endless(0, 2, EndlessWithLength)) == 5
    for kind in (Endless, EndlessBatches):
        with pytest.raises(TypeError, match=f"object of type '{kind.__name__}' has no len"):
            len(endless(0, 2, kind))
    assert len(distributed(0, 2, Reversed)) == 5, "all ranks' samples, in batches of 2 x 4"


class UnknownLength(Pairs):
    def __len__(self):
        raise ValueError("the number of batches is not known before they are made")


def test_a_batch_sampler_that_refuses_to_tell_its_length_is_read_to_its_end():
    loader = prepare_loader(DataLoader(Numbers(), batch_sampler=UnknownLength()), 0, 1, CPU, 7)
    assert flat(loader) == list(range(40))
    with pytest.raises(ValueError, match="not known before they are made"):
        len(loader)


def test_what_a_sampler_draws_is_a_function_of_seed_and_epoch_whatever_the_loop_draws():
    def draw(disturb):
        loader, given = prepared(sampler=Chance()), []
        for batch in loader:
            given += batch.tolist()
            if disturb:
                random.random(), torch.rand(3)
        return given

    assert draw(False) == draw(True) == flat(prepared(sampler=Chance()))
    random.seed(3)
    states = random.getstate(), torch.get_rng_state().tolist()
    flat(prepared(sampler=Chance()))
    flat(prepared(shuffle=True))
    assert (random.getstate(), torch.get_rng_state().tolist()) == states


class SeededOnce(Backwards):
    """Has a generator of its own, seeded when it is made."""

    def __init__(self):
        self.own = random.Random(5)

    def __iter__(self):
        return iter(self.own.sample(range(40), 40))


def seeded_once(rank, world):
    return prepared(rank, world, sampler=SeededOnce())


def test_a_sampler_is_read_once_for_an_epoch_also_if_resumed_or_skipped_in():
    first = list(SeededOnce())
    before, state = run(2, make=seeded_once, stop=2)
    assert before + run(1, state, make=seeded_once)[0] == first
    assert flat(skip_first_batches(seeded_once(0, 1), 3)) == first[12:]
    _, state = run(1, make=seeded_once, stop=10)
    loader = moved(seeded_once(0, 1), state)
    assert (flat(loader), flat(loader)) == ([], first), "the epoch that is over is not drawn"


def seeded_once_in_batches(rank, world):
    batches = type("InBatches", (BatchSampler,), {})(SeededOnce(), 3, drop_last=False)
    return batch_sampled(rank, world, batches)


@pytest.mark.parametrize("make", [seeded_once, seeded_once_in_batches])
def test_another_order_than_the_saved_one_is_told(capsys, make):
    """In the second epoch a new generator is at the beginning of its first."""
    for stop, epoch in ((2, 0), (7, 1) if make is seeded_once else (9, 1)):
        _, state = run(2, make=make, stop=stop, epochs=2)
        assert state["epoch"] == epoch and state["samples_seen"]
        capsys.readouterr()
        run(1, json.loads(json.dumps(state)), make=make)
        assert ("yields another order than when the position was saved" in capsys.readouterr().err) is (epoch == 1)
        flat(skip_first_batches(moved(make(0, 1), state), 2))
        assert not capsys.readouterr().err


@pytest.mark.parametrize("batches", [6, 7, 9])
def test_more_batches_may_be_skipped_than_a_short_epoch_has(batches):
    rest = list(range(24, 26)) if batches == 6 else []
    for options in ({"sampler": range(26)}, {"sampler": Short()}, {"dataset": Flow(26)}, {"dataset": Numbers(26)}):
        loader = skip_first_batches(prepared(**options), batches)
        assert flat(loader) == rest
        assert (loader.epoch, flat(loader)) == (1, list(range(26)))
    fours = [list(range(begin, min(begin + 4, 26))) for begin in range(0, 26, 4)]
    assert flat(skip_first_batches(batch_sampled(0, 1, fours), batches)) == rest


class Short(Sampler):
    """Has no length."""

    def __iter__(self):
        return iter(range(26))


class OwnGenerator(Backwards):
    """Shuffles with numpy's generator."""

    def __init__(self):
        self.generator = numpy.random.default_rng(0)

    def __iter__(self):
        return iter(self.generator.permutation(40).tolist())


class Generates(Backwards):
    def generator(self):
        yield from range(40)

    def __iter__(self):
        return self.generator()


class Fresh(Backwards):
    @property
    def generator(self):
        return torch.Generator().manual_seed(1)

    def __iter__(self):
        return iter(torch.randperm(40, generator=self.generator).tolist())


class RankOfItsOwn(Backwards):
    num_replicas = 1

    @property
    def rank(self):
        return 0


@pytest.mark.parametrize("kind", [OwnGenerator, Generates, Fresh, RankOfItsOwn])
def test_names_that_samplers_have_for_things_of_their_own(kind):
    expected = list(kind())
    assert run(2, make=lambda rank, world: prepared(rank, world, sampler=kind()))[0] == expected
    batches = type("Own", (BatchSampler,), {})(kind(), 4, False)
    assert run(1, make=batch_sampled, sampler=batches)[0] == expected


@pytest.mark.parametrize("world", [1, 2, 3])
def test_padding_and_drop_last_of_drawn_orders(world):
    for even, drop in ((True, False), (True, True), (False, True)):
        sampled = {"sampler": Chance(), "batch_size": 12 // world, "even_batches": even, "drop_last": drop}
        given, _ = run(world, **sampled)
        assert len(given) == (36 if drop else 40 + -40 % 12 % world)
        assert given[40:] == given[: len(given) - 40 if len(given) > 40 else 0]


def test_a_sampler_with_fewer_samples_than_the_position_is_refused():
    _, state = run(1, sampler=Chance(), stop=5)
    with pytest.raises(CheckpointError, match=r"Chance ended after 6 samples, before the saved position \(got 20\)"):
        flat(moved(prepared(sampler=Chance(6)), state))


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(5, 25)),
        WeightedRandomSampler([1.0 + number for number in range(40)], 20),
        RandomSampler(Numbers(), replacement=True, num_samples=20),
        RandomSampler(Numbers(), num_samples=20),
        RandomSampler(Numbers(8), num_samples=20),
    ],
)
def test_torchs_other_samplers_give_what_they_give_for_a_generator_of_the_epoch(sampler):
    given = flat(prepared(sampler=sampler))
    sampler.generator = torch.Generator().manual_seed(stream_seed(7, 0))
    assert given == list(sampler)
