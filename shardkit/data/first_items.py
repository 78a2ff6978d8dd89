"""Tells whether ranks read the same: each reads what a custom sampler or a stream yields whole, and keeps its part."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

COMPARED = 16
"""The first items that are compared. An epoch begins with them, so they take little of its time."""
MOST_FIELDS = 64
KEPT = 8
"""The first items of a stream that a saved position keeps digests of."""
_BEGINS = "begins "


def fields_of(items: Iterable[Any]) -> list[str]:
    """A digest of each field of the first items: of an index, of the image or the label of a sample.

    Fields without a value of their own, such as objects, are empty.
    """
    texts = [[_text(leaf) for leaf in tree_leaves(item)[:MOST_FIELDS]] for item in islice(items, COMPARED)]
    count = min(map(len, texts), default=0)
    fields = ["\n".join(of_item[number] for of_item in texts) for number in range(count)]
    return [hashlib.sha256(field.encode()).hexdigest()[:16] if field.strip() else "" for field in fields]


def digests_of(items: Iterable[Any]) -> list[str]:
    """A digest of each of the first items, in the batches of a batch sampler of each of their items."""
    texts = map(_text, tree_leaves([*islice(items, COMPARED)])[:COMPARED])
    return [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]


def beginning_of(items: Iterable[Any]) -> str:
    """Digests of the fields of the first items of a stream, as a saved position keeps them."""
    return _BEGINS + json.dumps([fields_of([item]) for item in islice(items, KEPT)])


def is_beginning(state: Any) -> bool:
    """Whether a position keeps these digests, and no state of the dataset's own."""
    return isinstance(state, str) and state.startswith(_BEGINS)


def begin_differently(now: str, before: str) -> bool:
    """Whether no field is the same in all the items that both have. (Their numbers differ with the batch size.)"""
    both = (json.loads(beginning.removeprefix(_BEGINS)) for beginning in (now, before))
    items = [list(zip(*pair, strict=False)) for pair in zip(*both, strict=False)]
    fields = [field for field in zip(*items, strict=False) if all(map(all, field))]
    return bool(fields) and all(any(own != other for own, other in field) for field in fields)


def are_different(fields: Sequence[list[str]]) -> bool:
    """Whether no field is the same on all ranks. Samples that are the same may differ in one, such as a path."""
    columns = [column for column in zip(*fields, strict=False) if all(column)]
    return bool(columns) and all(len(set(column)) > 1 for column in columns)


def _text(leaf: Any) -> str:
    """The value as text; empty where it has none that is the same in all processes."""
    if isinstance(leaf, (torch.Tensor, bool, int, float, str, bytes)) or type(leaf).__module__ == "numpy":
        return repr(leaf)
    return ""
