"""CUDA's caching allocator replayed: its published rules, one by one (c10/cuda/CUDACachingAllocator.cpp)."""

import random

import pytest

from shardkit.plan.allocator import Event, replay, rounded, segment_size, two_steps

KIB, MIB = 2**10, 2**20


def sizes(*allocated: int) -> list[Event]:
    return [Event(number, size) for number, size in enumerate(allocated, 1)]


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_size_classes(size, block, segment):
    assert (rounded(size), segment_size(rounded(size))) == (block, segment)


def test_small_and_large_pools_are_apart():
    assert replay(sizes(MIB, MIB, MIB)) == 4 * MIB
    assert replay(sizes(MIB, 2 * MIB)) == 22 * MIB
    assert replay(sizes(*[2 * MIB] * 10)) == 20 * MIB


def test_a_block_is_split_where_more_than_a_mebibyte_remains():
    whole = [Event(1, 12 * MIB), Event(1)]
    assert replay([*whole, Event(2, 10 * MIB), Event(3, 2 * MIB)]) == 12 * MIB
    assert replay([*whole, Event(2, 11 * MIB), Event(3, MIB + 1)]) == 32 * MIB  # one is left, not more


def test_the_smallest_block_that_is_large_enough_is_taken():
    events = [Event(1, 40 * MIB), Event(2, 20 * MIB), Event(1), Event(2), Event(3, 20 * MIB), Event(4, 40 * MIB)]
    assert replay(events) == 60 * MIB


def test_neighbours_join_when_they_are_freed_in_any_order():
    numbers = [2, 3, 4, 5]
    for order in ([2, 3, 4, 5], [5, 4, 3, 2], [3, 5, 2, 4]):
        events = [Event(1, 40 * MIB), Event(1), *(Event(n, 10 * MIB) for n in numbers), *(Event(n) for n in order)]
        assert replay([*events, Event(6, 40 * MIB)]) == 40 * MIB


def test_streams_share_nothing():
    events = [Event(1, 20 * MIB, "gather"), Event(1), Event(2, 20 * MIB, "compute")]
    assert replay(events) == 40 * MIB


def test_fragments_are_reserved_unless_segments_grow():
    """Ever larger tensors, each freed before the next: every segment stays, but one that grows is used again."""
    events = [event for n in range(1, 6) for event in (Event(n, 20 * n * MIB), Event(n))]
    assert replay(events) == 300 * MIB
    assert replay(events, is_expandable=True) == 100 * MIB


@pytest.mark.parametrize("is_expandable", [False, True])
def test_whatever_comes_reserved_holds_what_is_active(is_expandable):
    chance, alive, events, active, most_active = random.Random(0), {}, [], 0, 0
    for number in range(1, 3000):
        if alive and chance.random() < 0.5:
            freed = chance.choice([*alive])
            events.append(Event(freed))
            active -= alive.pop(freed)
        size = int(10 ** chance.uniform(2, 8))
        events.append(Event(number, size, chance.choice(["compute", "gather"])))
        alive[number] = rounded(size)
        active += alive[number]
        most_active = max(most_active, active)
    found = replay(events, is_expandable)
    assert most_active <= found
    again = [*events, *(Event(number) for number in alive)]
    assert replay([*again, *(Event(-e.number, e.size, e.stream) for e in events)], is_expandable) >= (found)


def test_optimizer_state_appears_in_the_first_steps_optimizer():
    before = [(Event(1, 512), False), (Event(2, 1024), True)]
    step = [Event(3, 2048), Event(3), Event(4, 4096), Event(4), Event(1)]
    found = list(two_steps(before, step, 2))
    assert [(event.number, event.size) for event in found] == [
        *[(1, 512), (3, 2048), (3, 0), (2, 1024), (4, 4096), (4, 0), (1, 0)],
        *[(-3, 2048), (-3, 0), (-4, 4096), (-4, 0)],
    ]
