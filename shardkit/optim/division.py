"""How the steps of optimizers that need whole tensors are divided: into chunks, and between ranks.

The plan asks the same functions, so this imports no torch.
"""

from collections.abc import Hashable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from math import prod
from typing import TypeVar

# Gathered parameters and gradients held at a time; the state of the same parameters comes on top.
WHOLE_BYTES = 256 << 20
# State that is copied to the device at a time, of optimizers that keep it in host memory.
STATE_BYTES = 256 << 20
# Matrices that a rank orthogonalizes between two exchanges; those of the next are on their way meanwhile.
ROUND_BYTES = 128 << 20
# Muon orthogonalizes in bf16 (torch/optim/_muon.py).
MUON_ITEMSIZE = 2

Shape = tuple[int, ...]
Key = TypeVar("Key", bound=Hashable)


def chunks(sizes: Iterable[tuple[Key, int]], limit: int) -> list[set[Key]]:
    """Keys in their order, in chunks that end with the one that reaches the limit. `sizes`: (key, bytes)."""
    found: list[set[Key]] = []
    held = limit
    for key, size in sizes:
        if held >= limit:
            found.append(set())
            held = 0
        found[-1].add(key)
        held += size
    return found


def cost(shape: Shape) -> int:
    """Multiplications in one Newton-Schulz iteration: two products with the smaller side's square, and that square's
    own (https://kellerjordan.github.io/posts/muon)."""
    less, more = sorted(shape)
    return less * less * (2 * more + less)


def owners(shapes: Sequence[Shape], ranks: int) -> list[int]:
    """The rank that orthogonalizes each matrix: the costliest first, each by the rank with the least work so far."""
    work = [(0, rank) for rank in range(ranks)]
    heapify(work)
    found = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: -cost(shapes[index])):
        done, rank = heappop(work)
        found[index] = rank
        heappush(work, (done + cost(shapes[index]), rank))
    return found


def rounds(shapes: Sequence[Shape], ranks: int) -> list[list[list[int]]]:
    """The rounds of a step: in each, which matrices (by index) each rank orthogonalizes, about ROUND_BYTES of them."""
    found: list[list[list[int]]] = []
    latest, held = [-1] * ranks, [0] * ranks  # of each rank: its latest round, and its bytes in it
    for index, owner in enumerate(owners(shapes, ranks)):
        if latest[owner] < 0 or held[owner] >= ROUND_BYTES:
            latest[owner], held[owner] = latest[owner] + 1, 0
        if latest[owner] == len(found):
            found.append([[] for _ in range(ranks)])
        found[latest[owner]][owner].append(index)
        held[owner] += prod(shapes[index]) * MUON_ITEMSIZE
    return found
