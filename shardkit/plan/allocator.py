"""Memory that CUDA's caching allocator reserves for a sequence of allocations and frees, by replaying its algorithm.

After c10/cuda/CUDACachingAllocator.cpp of torch 2.13: sizes are rounded to 512 bytes; those up to 1 MiB are served from
segments of 2 MiB, others from segments of 20 MiB or, from 10 MiB on, of their own size rounded to 2 MiB. The smallest
free block that is large enough is taken and split where enough remains; a freed block joins its free neighbours. Blocks
belong to the stream that they were allocated on. Segments are not released. With expandable segments there is one
segment per pool and stream, which grows at its end.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardkit.sizes import MIB

_ROUND = 512
_SMALL = 1 * MIB
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB
_OWN_SEGMENT = 10 * MIB
_OWN_ROUND = 2 * MIB


@dataclass(frozen=True)
class Event:
    """An allocation of `size` bytes on a stream; with size 0, the free of the allocation with that number."""

    number: int
    size: int = 0
    stream: str = "compute"


@dataclass
class Recording:
    """Allocations and frees of one step, by the keys of their storages. `before`: the allocations that the step found,
    and whether each is optimizer state; `optimizer_at`: index of the event at which the optimizer starts."""

    events: list[Event] = field(default_factory=list)
    before: list[tuple[Event, bool]] = field(default_factory=list)
    optimizer_at: int = 0
    is_over: bool = False
    """Frees after the step are not recorded: they come from deleting model and optimizer."""
    _numbers: dict[int, int] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    _serial: int = 0

    def restart(self, alive: Iterable[tuple[int, int, bool]]) -> None:
        """A step begins, with these storages alive: (key, bytes, whether it is optimizer state)."""
        found = sorted((self._numbers[key], size, is_state) for key, size, is_state in alive)
        self.before = [(Event(number, size), is_state) for number, size, is_state in found]
        self.events, self._places = [], {}

    def begin(self, key: int, size: int, stream: str) -> None:
        """A storage is allocated."""
        self._serial += 1
        self._numbers[key], self._places[key] = self._serial, len(self.events)
        if size:
            self.events.append(Event(self._serial, size, stream))

    def end(self, key: int) -> None:
        """A storage is freed."""
        number = self._numbers.pop(key)
        if not self.is_over:
            self.events.append(Event(number))
        self._places.pop(key, None)

    def move(self, key: int, stream: str) -> None:
        """The storage's latest allocation was on this stream."""
        place = self._places.get(key)
        if place is not None and place < len(self.events):
            self.events[place] = replace(self.events[place], stream=stream)


def replay(events: Iterable[Event], is_expandable: bool = False) -> int:
    """The bytes that are reserved after these events, which is their maximum. A free without an allocation is
    ignored."""
    allocator = _Allocator(is_expandable)
    for event in events:
        if event.size:
            allocator.allocate(event.number, event.size, event.stream)
        else:
            allocator.free(event.number)
    return allocator.reserved


def two_steps(before: Sequence[tuple[Event, bool]], step: Sequence[Event], optimizer_at: int) -> Iterator[Event]:
    """The first two steps of a run, from one recorded step: optimizer state is allocated in the first step's optimizer.

    `before` are the allocations that the step found, and whether each is optimizer state; the optimizer of the step
    begins at `optimizer_at`.
    """
    yield from (event for event, is_state in before if not is_state)
    yield from step[:optimizer_at]
    yield from (event for event, is_state in before if is_state)
    yield from step[optimizer_at:]
    own = {event.number for event in step if event.size}
    yield from (replace(event, number=-event.number) for event in step if event.number in own)


def rounded(size: int) -> int:
    """The block size for a request, if a free block is split exactly."""
    return max(_ROUND, -(-size // _ROUND) * _ROUND)


def segment_size(size: int) -> int:
    """The size of the segment requested from the driver for a block of this rounded size."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _OWN_ROUND) * _OWN_ROUND


@dataclass(eq=False)
class _Block:
    """A part of a segment; `before` and `after`: its neighbours in the segment."""

    size: int
    pool: "_Pool"
    address: int
    is_free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass
class _Pool:
    """The free blocks of one stream and kind, by size and then by address; `end` is the last block of the segment that
    grows."""

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    end: _Block | None = None

    def put(self, block: _Block) -> None:
        block.is_free = True
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]

    def best(self, size: int) -> _Block | None:
        """The smallest free block of at least this size; of equal ones, the lowest address."""
        position = bisect_left(self.free, (size, 0))
        return self.blocks[self.free[position][1]] if position < len(self.free) else None


class _Allocator:
    """All pools of one device. Addresses only grow, because segments are never released."""

    def __init__(self, is_expandable: bool) -> None:
        self.reserved = 0
        self._is_expandable = is_expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self._held: dict[int, _Block] = {}
        self._next_address = 0

    def allocate(self, number: int, size: int, stream: str) -> None:
        size = rounded(size)
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _Pool(is_small))
        block = pool.best(size) or (self._grown(pool, size) if self._is_expandable else self._segment(pool, size))
        pool.remove(block)
        self._split(block, size)
        self._held[number] = block

    def free(self, number: int) -> None:
        block = self._held.pop(number, None)
        if block is None:
            return
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                block = self._joined(block, neighbour)
        block.pool.put(block)

    def _segment(self, pool: _Pool, size: int) -> _Block:
        """A new segment, free."""
        block = _Block(segment_size(size), pool, self._next_address)
        self._next_address += block.size
        self.reserved += block.size
        pool.put(block)
        return block

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """The free end of the pool's one segment, large enough."""
        page = _SMALL_SEGMENT if pool.is_small else _LARGE_SEGMENT
        last = pool.end
        tail = last.size if last is not None and last.is_free else 0
        more = -(-(size - tail) // page) * page
        self.reserved += more
        if last is not None and last.is_free:
            pool.remove(last)
            last.size += more
        else:
            block = _Block(more, pool, self._next_address, before=last)
            if last is not None:
                last.after = block
            last = pool.end = block
        # Addresses only order blocks of one size: those of a segment that grows are far from all others.
        self._next_address = max(self._next_address, last.address + last.size) + 2**50
        pool.put(last)
        return last

    def _split(self, block: _Block, size: int) -> None:
        """Put back what is left of a block, where that is enough to be one."""
        rest = block.size - size
        if not (rest >= _ROUND if block.pool.is_small else rest > _SMALL):
            return
        left = _Block(rest, block.pool, block.address + size, before=block, after=block.after)
        if block.after is not None:
            block.after.before = left
        block.size, block.after = size, left
        if block.pool.end is block:
            block.pool.end = left
        block.pool.put(left)

    def _joined(self, block: _Block, other: _Block) -> _Block:
        """Two neighbours as one, which is not yet free again."""
        other.pool.remove(other)
        first, second = (other, block) if other.address < block.address else (block, other)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        if second.pool.end is second:
            second.pool.end = first
        return first
