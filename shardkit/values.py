"""Plain values to JSON and back, for a fixed set of types, without pickle.

None, bool, int, float, str, list and dict with string keys stay unchanged. Others are tagged: {"$tuple": [...]},
{"$bytes": base64}, {"$float": "inf"}, {"$dict": [[key, value], ...]} for other keys, {"$counter": ...}, {"$set": ...},
{"$deque": ...}, {"$bounded_deque": [maxlen, [...]]}, {"$module_state": [{...}, {module: version}]} for the state dict
of a module with versions, {"$param": fqn} for the number of a parameter, {"$tensor": name} for a tensor, which the
caller stores under this name, or in it, and {"$array": {"$tensor": name}} for an array of numpy. Numpy's scalars become
Python's, and types beside these their plain one: see `as_present`. Any other type is an error that names the path of
the value.
"""

import base64
import math
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardkit.errors import CheckpointCorrupted, CheckpointError

# Called with the path and the value. Stores a tensor and returns its name; returns None for anything else.
StoreTensor = Callable[[str, Any], "str | None"]


@dataclass(frozen=True)
class ParameterName:
    """Stands for a parameter where an optimizer's state_dict() has its number."""

    fqn: str

    def __repr__(self) -> str:
        return f"<{self.fqn}>"


class NotStorable(CheckpointError):
    """A value of a type that cannot be saved; the message names its path."""


def _stores_none(path: str, value: Any) -> None:
    """The StoreTensor for values in which a tensor is not storable."""


def encode(value: Any, path: str, store_tensor: StoreTensor = _stores_none) -> Any:
    """The value as JSON. Raises NotStorable with the path of the first part of an unsupported type."""
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
    array = _as_tensor(value)
    if array is not None and (name := store_tensor(path, array)) is not None:
        return {"$array": {"$tensor": name}}
    if isinstance(value, (int, float, str)):  # enumerations with a plain value
        return encode(value.value if hasattr(value, "value") else _plain(value), path, store_tensor)
    scalar: Any = getattr(sys.modules.get("numpy"), "generic", ())
    if isinstance(value, scalar):
        plain = value.item()
        if type(plain) in (bool, int, float, str, bytes):
            return encode(plain, path, store_tensor)
    raise NotStorable(
        f"{path}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be saved; "
        "return numbers, strings, bytes, lists, dicts or tensors from state_dict()."
    )


def _as_tensor(value: Any) -> Any:
    """A copy of an array of numpy as a tensor; None for other values, and where torch has no such dtype."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return None
    try:
        return sys.modules["torch"].from_numpy(numpy.array(value))
    except (TypeError, ValueError):
        return None


def _plain(value: Any) -> Any:
    return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))


def _encode_sequence(value: Any, path: str, store_tensor: StoreTensor) -> dict[str, Any]:
    tag = "$tuple" if isinstance(value, tuple) else "$deque" if isinstance(value, deque) else "$set"
    items = sorted(value, key=_in_set) if tag == "$set" else value
    encoded = [encode(item, f"{path}[{number}]", store_tensor) for number, item in enumerate(items)]
    if isinstance(value, deque) and value.maxlen is not None:
        return {"$bounded_deque": [value.maxlen, encoded]}
    return {tag: encoded}


def _in_set(value: Any) -> str:
    """The text by which members of a set are sorted, alike in all processes: the repr of a frozenset is not."""
    if isinstance(value, frozenset):
        return repr(sorted(map(_in_set, value)))
    return repr(tuple(map(_in_set, value))) if isinstance(value, tuple) else repr(value)


def _encode_mapping(value: Mapping[Any, Any], path: str, store_tensor: StoreTensor) -> dict[str, Any]:
    versions = _module_versions(value)
    if any(version != 1 for version in versions.values()):
        return {"$module_state": [_encode_mapping(dict(value), path, store_tensor), versions]}
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {key: encode(item, f"{path}.{key}", store_tensor) for key, item in value.items()}
    pairs = [
        [encode(key, f"{path} (key)", store_tensor), encode(item, f"{path}[{key!r}]", store_tensor)]
        for key, item in value.items()
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def _module_versions(value: Mapping[Any, Any]) -> dict[str, int]:
    """{name: version} of the modules whose state dict this is. Modules that have changed convert a state dict of an
    older version when they load it, and one without a version, too."""
    metadata = getattr(value, "_metadata", None)
    entries = metadata.items() if isinstance(metadata, Mapping) else ()
    found = {name: entry.get("version") for name, entry in entries if isinstance(entry, Mapping)}
    return {name: version for name, version in found.items() if type(name) is str and type(version) is int}


def decode(value: Any, load_tensor: Callable[[str], Any]) -> Any:
    """The inverse of `encode`. `load_tensor` returns the tensor with a name. Raises CheckpointCorrupted for a value
    that `encode` does not write."""
    try:
        return _decode(value, load_tensor)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointCorrupted(f"state: a value is not as it was saved ({error}); the file is damaged.") from error


def _decode(value: Any, load_tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, load_tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, inner),) = value.items()
        if isinstance(tag, str) and tag.startswith("$"):  # a state that never was JSON may have other keys
            return _decode_tagged(tag, inner, load_tensor)
    return {key: _decode(item, load_tensor) for key, item in value.items()}


def _decode_tagged(tag: str, inner: Any, load_tensor: Callable[[str], Any]) -> Any:
    match tag:
        case "$tuple":
            return tuple(_decode(item, load_tensor) for item in inner)
        case "$set":
            return {_hashable(_decode(item, load_tensor)) for item in inner}
        case "$deque":
            return deque(_decode(item, load_tensor) for item in inner)
        case "$bounded_deque":
            bound, items = inner
            return deque((_decode(item, load_tensor) for item in items), maxlen=bound)
        case "$module_state":
            tensors, versions = inner
            state = OrderedDict(_decode(tensors, load_tensor))
            state._metadata = OrderedDict((name, {"version": version}) for name, version in dict(versions).items())  # type: ignore[attr-defined]
            return state
        case "$bytes":
            return base64.b64decode(inner, validate=True)
        case "$float":
            return float(inner)
        case "$param":
            return ParameterName(inner)
        case "$tensor":
            return load_tensor(inner)
        case "$array":
            return _decode(inner, load_tensor).cpu().numpy()
        case "$dict" | "$counter":
            pairs = {_hashable(_decode(key, load_tensor)): _decode(item, load_tensor) for key, item in inner}
            return Counter(pairs) if tag == "$counter" else pairs
        case _:
            raise CheckpointCorrupted(
                f"state: unknown tag (got {tag!r}); it was saved by a newer shardkit, or it is damaged."
            )


def _hashable(value: Any) -> Any:
    """A decoded key, or member of a set: what is a set in it was a frozenset, the only one that can be there."""
    if isinstance(value, tuple):
        return tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, set) else value


def as_present(value: Any, present: Any) -> Any:
    """A decoded value, with the types of the present one where JSON has one for both: a defaultdict comes back as a
    dict, and would raise a KeyError later."""
    if type(value) is dict and isinstance(present, Mapping):
        found = {key: as_present(item, present[key]) if key in present else item for key, item in value.items()}
        if isinstance(present, defaultdict):
            return defaultdict(present.default_factory, found)
        return OrderedDict(found) if type(present) is OrderedDict else found
    if type(value) in (list, tuple) and isinstance(present, type(value)) and len(value) == len(present):
        items = [as_present(item, other) for item, other in zip(value, present, strict=True)]
        return type(present)(*items) if hasattr(present, "_fields") else type(value)(items)
    if type(value) is set and isinstance(present, frozenset):
        return frozenset(value)
    return bytearray(value) if type(value) is bytes and isinstance(present, bytearray) else value


def unique_name(path: str, taken: Container[str]) -> str:
    """The path of a tensor as its name: different paths may read the same, as of {"a.b": ..., "a": {"b": ...}}."""
    while path in taken:
        path += "'"
    return path


# Tags that format version 5 added, and those of version 6.
_NEW_TAGS = frozenset({"$bounded_deque", "$module_state"})
ARRAY_TAGS = frozenset({"$array"})


def has_new_tags(value: Any, tags: frozenset[str] = _NEW_TAGS) -> bool:
    """Whether an encoded value has tags that readers before format version 5 do not know, or other `tags`."""
    return any(not tags.isdisjoint(one) for one in _dicts_in(value))


def tensors_in(value: Any) -> Iterator[str]:
    """The names of all tensors in an encoded value."""
    return (one["$tensor"] for one in _dicts_in(value) if set(one) == {"$tensor"})


def _dicts_in(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _dicts_in(item)
