"""The form of a checkpoint's state files, checked when they are read, before anything is applied.

    state/common.json       optimizers, objects, loaders, seed, classes; `apart`: the places of per-rank state
    state/rank-*.json       loaders, random generators, classes; `apart`: the per-rank state of this rank

The values of objects are free; `values.decode` checks them.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shardkit.checkpoint.files.layout import section_name
from shardkit.errors import CheckpointCorrupted

ItemPlace = Sequence[str | int]
"""Where a value that may differ between ranks is in common.json: the forms in `_is_place`."""


def extra_state(section: str) -> str:
    """The name, among the states of objects, of the values in a model's state dict that are no tensors."""
    return f"{section}.extra_state"


def is_extra_state(name: str) -> bool:
    """Whether the state of this name is that of a model."""
    return name.startswith("model") and name.endswith(".extra_state")


def section_of(place: ItemPlace) -> str:
    """The section of the tensors in the value at a place."""
    return "objects" if place[0] == "objects" else section_name("optim", int(place[1]))


def fqn_at(place: ItemPlace) -> str | None:
    """The parameter to which the value at a place belongs; None if it belongs to none."""
    return str(place[3]) if len(place) > 3 and place[2] == "plain" else None


def label_of(place: ItemPlace) -> str:
    """What the value at a place is called, as `scheduler.0`, `optim: fqn/key` or `optim.param_groups[0]`."""
    if place[0] == "objects":
        return str(place[1])
    section = section_of(place)
    match place[2]:
        case "plain":
            return f"{section}: {place[3]}/{place[4]}"
        case "groups":
            return f"{section}.param_groups[{place[3]}]"
        case kind:
            return f"{section}.{kind}.{place[3]}"


def common(value: Any, where: str) -> dict[str, Any]:
    """The state that all ranks share. Raises CheckpointCorrupted if it has another form."""
    return _checked(value, where, _is_common)


def of_rank(value: Any, where: str) -> dict[str, Any]:
    """The state of one rank. Raises CheckpointCorrupted if it has another form."""
    return _checked(value, where, _is_of_rank)


def _checked(value: Any, where: str, has_form: Callable[[Any], bool]) -> dict[str, Any]:
    if not isinstance(value, dict) or not has_form(value):
        raise CheckpointCorrupted(f"{where}: not the state that shardkit writes; the file is damaged.")
    return value


def _is_common(value: dict[str, Any]) -> bool:
    return (
        isinstance(value.get("objects"), dict)
        and _is_dict_of_dicts(value.get("loaders"))
        and "seed" in value
        and _is_dict_of_text(value.get("classes", {}))
        and _is_list_of(_is_optimizer, value.get("optimizers"))
        and _is_list_of(_is_place, value.get("apart", []))
    )


def _is_of_rank(value: dict[str, Any]) -> bool:
    return (
        _is_dict_of_dicts(value.get("loaders"))
        and isinstance(value.get("rng"), dict)
        and _is_dict_of_text(value.get("classes", {}))
        and _is_list_of(_is_item, value.get("apart", []))
    )


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_list_of(_is_group, value.get("groups"))
        and _is_dict_of_dicts(value.get("plain", {}))
        and all(isinstance(value.get(kind, {}), dict) for kind in ("globals", "extra"))
    )


def _is_group(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_list_of(lambda name: isinstance(name, str), value.get("params"))
        and isinstance(value.get("settings"), dict)
    )


def _is_item(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("label"), str)
        and _is_place(value.get("at"))
        and "value" in value
    )


def _is_place(value: Any) -> bool:
    """Whether this is the place of an item: of an object, or of a part of an optimizer's state."""
    match value:
        case ["objects", str()] | ["optimizers", int(), "plain", str(), str()]:
            return True
        case ["optimizers", int(), "groups", int(), "settings"] | ["optimizers", int(), "globals" | "extra", str()]:
            return True
    return False


def _is_list_of(is_one: Callable[[Any], bool], value: Any) -> bool:
    return isinstance(value, list) and all(map(is_one, value))


def _is_dict_of_dicts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values())


def _is_dict_of_text(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(inner, str) for inner in value.values())
