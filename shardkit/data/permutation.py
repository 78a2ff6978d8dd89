"""A random permutation that is computed, not stored: constant time for any position, and no memory.

A Feistel network over pairs. A number below rows x columns is a pair (row, column); a round adds a keyed hash of one
half to the other half, modulo the size of that half. Each round is invertible, so their composition is a permutation of
rows x columns numbers. Results not below the length pass through the network again until they are ("cycle walking"):
this gives a permutation of range(length). (J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002.)
The same on every platform: integers below 2**63, no torch generator.
"""

import hashlib
import math

import torch

# A short order has small halves, and few rounds leave some orders more likely than others. Counted over a million
# keys at lengths up to 9, all orders are equally likely from 20 rounds on; from some thousand on, 8 are enough.
SHORT = 2**16
ROUNDS, ROUNDS_IF_SHORT = 8, 24

_MASK = 2**32 - 1


class Permutation:
    """range(length) in an order that depends on the key alone. Lengths up to 2**62."""

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        self._rows = math.isqrt(max(0, length - 1)) + 1
        columns = -(-length // self._rows) or 1
        # An even number: rotations of an odd number of columns would only give even permutations.
        self._columns = columns + columns % 2
        self._keys = _round_keys(key, ROUNDS_IF_SHORT if length < SHORT else ROUNDS)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The values at these positions: int64, same shape (1-dim)."""
        found = self._once(positions)
        while len(outside := (found >= self._length).nonzero().flatten()):
            found[outside] = self._once(found[outside])
        return found

    def _once(self, numbers: torch.Tensor) -> torch.Tensor:
        row = numbers.div(self._columns, rounding_mode="floor")
        column = numbers - row * self._columns
        for number, (first, second) in enumerate(self._keys):
            if number % 2:
                column.add_(_hash(row, first, second)).remainder_(self._columns)
            else:
                row.add_(_hash(column, first, second)).remainder_(self._rows)
        return row.mul_(self._columns).add_(column)


def _round_keys(key: int, rounds: int) -> list[tuple[int, int]]:
    """Two 32-bit keys a round."""
    drawn = hashlib.shake_256(str(key).encode()).digest(8 * rounds)
    numbers = [int.from_bytes(drawn[begin : begin + 4], "big") for begin in range(0, len(drawn), 4)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _hash(values: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """32 bits of each value below 2**32. The multipliers are below 2**31, so that no product exceeds 63 bits."""
    mixed = values ^ first
    mixed ^= mixed >> 16
    mixed *= 0x7FEB352D
    mixed &= _MASK
    mixed ^= second
    mixed ^= mixed >> 15
    mixed *= 0x045D9F3B
    mixed &= _MASK
    mixed ^= mixed >> 16
    return mixed
