"""Plain values to JSON and back, over a closed set of types; nothing is ever unpickled.

None, bool, int, float, str, list and dict with text keys are themselves. The rest is tagged: {"$tuple": [...]},
{"$bytes": base64}, {"$float": "inf"}, {"$dict": [[key, value], ...]} for other keys, {"$counter": ...}, {"$set": ...},
{"$param": fqn} for a parameter that stood there as a number, and {"$tensor": name} for a tensor, which the caller
stores beside. Anything else is refused by its path.
"""

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.errors import CheckpointCorrupted, CheckpointError

# Takes the path of a value that JSON has no type for; returns the name it is stored under, or None: not a tensor.
StoreTensor = Callable[[str, Any], "str | None"]


@dataclass(frozen=True)
class ParameterName:
    """Stands for a parameter where an optimizer's own state_dict() has its number."""

    fqn: str

    def __repr__(self) -> str:
        return f"<{self.fqn}>"


class NotStorable(CheckpointError):
    """A value of a type that has no place in a checkpoint; the message names where it stands."""


def encode(value: Any, path: str, store_tensor: StoreTensor) -> Any:
    """The value as JSON. NotStorable names the path of the first part that is none of the known types."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, ParameterName):
        return {"$param": value.fqn}
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is list:
        return [encode(item, f"{path}[{number}]", store_tensor) for number, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset, deque)):
        return _encode_sequence(value, path, store_tensor)
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, store_tensor)
    name = store_tensor(path, value)
    if name is not None:
        return {"$tensor": name}
    if isinstance(value, (int, float, str)):  # numpy scalars and enumerations with a plain value
        return encode(value.value if hasattr(value, "value") else _plain(value), path, store_tensor)
    raise NotStorable(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved; "
        "return numbers, text, bytes, lists, dicts or tensors from state_dict()."
    )


def _plain(value: Any) -> Any:
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))


def _encode_sequence(value: Any, path: str, store_tensor: StoreTensor) -> dict[str, Any]:
    tag = "$tuple" if isinstance(value, tuple) else "$deque" if isinstance(value, deque) else "$set"
    items = sorted(value, key=repr) if tag == "$set" else value
    return {tag: [encode(item, f"{path}[{number}]", store_tensor) for number, item in enumerate(items)]}


def _encode_mapping(value: Mapping[Any, Any], path: str, store_tensor: StoreTensor) -> dict[str, Any]:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {key: encode(item, f"{path}.{key}", store_tensor) for key, item in value.items()}
    pairs = [
        [encode(key, f"{path} (key)", store_tensor), encode(item, f"{path}[{key!r}]", store_tensor)]
        for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def decode(value: Any, load_tensor: Callable[[str], Any]) -> Any:
    """The value that `encode` was given. `load_tensor` returns the tensor of a name."""
    if isinstance(value, list):
        return [decode(item, load_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if tag.startswith("$"):
            return _decode_tagged(tag, inner, load_tensor)
    return {key: decode(item, load_tensor) for key, item in value.items()}


def _decode_tagged(tag: str, inner: Any, load_tensor: Callable[[str], Any]) -> Any:
    match tag:
        case "$tuple":
            return tuple(decode(item, load_tensor) for item in inner)
        case "$set":
            return {decode(item, load_tensor) for item in inner}
        case "$deque":
            return deque(decode(item, load_tensor) for item in inner)
        case "$bytes":
            return base64.b64decode(inner, validate=True)
        case "$float":
            return float(inner)
        case "$param":
            return ParameterName(inner)
        case "$tensor":
            return load_tensor(inner)
        case "$dict" | "$counter":
            pairs = {decode(key, load_tensor): decode(item, load_tensor) for key, item in inner}
            return Counter(pairs) if tag == "$counter" else pairs
        case _:
            raise CheckpointCorrupted(f"state: unknown tag {tag!r}; a newer shardkit wrote this, or it is damaged.")


def tensors_in(value: Any) -> Iterator[str]:
    """The names of all tensors that an encoded value refers to."""
    if isinstance(value, list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        if set(value) == {"$tensor"}:
            yield value["$tensor"]
        else:
            yield from tensors_in(list(value.values()))
