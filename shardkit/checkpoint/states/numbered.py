"""Parameters in states of optimizers: numbered in torch's state_dict(), named by fqn in a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from shardkit.errors import CheckpointError
from shardkit.values import ParameterName


def numbers_of(value: Any, members: list[list[str]]) -> dict[int, str] | None:
    """{number: fqn} if a dict has the format of torch's state_dict() for these parameters; else None."""
    if not (isinstance(value, Mapping) and isinstance(value.get("state"), Mapping)):
        return None
    groups = value.get("param_groups")
    if not (isinstance(groups, list) and all(isinstance(group, Mapping) for group in groups)):
        return None
    params = [group.get("params") or [] for group in groups]
    if [*map(len, params)] != [*map(len, members)]:
        return None
    numbers = [number for those in params for number in those]
    if not all(type(number) is int for number in numbers) or len({*numbers}) < len(numbers):
        return None
    return dict(zip(numbers, (fqn for those in members for fqn in those), strict=True))


def with_names(value: Any, members: list[list[str]]) -> Any:
    """The value, with a ParameterName for each parameter number in dicts of torch's format, at any depth."""
    numbers = numbers_of(value, members)
    if isinstance(value, Mapping):
        found = {key: with_names(item, members) for key, item in value.items()}
        if numbers is not None:
            found["state"] = {
                ParameterName(numbers[key]) if key in numbers else key: item for key, item in found["state"].items()
            }
            for group in found["param_groups"]:
                group["params"] = [ParameterName(numbers[number]) for number in group["params"]]
        return found
    if isinstance(value, (list, tuple)):
        return type(value)(with_names(item, members) for item in value) if type(value) in (list, tuple) else value
    return value


def with_numbers(value: Any, members: list[list[str]]) -> Any:
    """The inverse of `with_names`, with the numbers that parameters have in the current groups."""
    order = {fqn: number for number, fqn in enumerate(fqn for those in members for fqn in those)}
    if isinstance(value, ParameterName):
        if value.fqn not in order:
            raise CheckpointError(
                f"{value.fqn}: the saved optimizer has this parameter, this optimizer does not; "
                "give it the parameters that were saved."
            )
        return order[value.fqn]
    if isinstance(value, Mapping):
        return {with_numbers(key, members): with_numbers(item, members) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_numbers(item, members) for item in _in_present_order(value, members))
    return value


def _in_present_order(value: Sequence[Any], members: list[list[str]]) -> Sequence[Any]:
    """Saved groups, or the parameters of one, in the current order, since torch matches them with the optimizer's by
    position."""
    if value and all(isinstance(item, Mapping) and _names(item.get("params")) for item in value):
        place = {frozenset(those): number for number, those in enumerate(members)}
        saved = [_names(group["params"]) for group in value]
        return sorted(value, key=lambda group: place[_names(group["params"])]) if {*saved} == {*place} else value
    names = _names(value)
    return next(([ParameterName(fqn) for fqn in those] for those in members if names and {*those} == names), value)


def _names(value: Any) -> frozenset[str]:
    """The names in a list of parameters; none if it has anything else."""
    names = [item.fqn for item in value if isinstance(item, ParameterName)] if isinstance(value, list) else []
    return frozenset(names) if names and len(names) == len(value) else frozenset()


def sources(members: list[list[str]], saved: list[dict[str, Any]]) -> list[int | None]:
    """For each group, by its parameters, the number of the saved group that they were in; None if there is none. Of a
    group without parameters its own number, if the group of this number was saved without them, too."""
    owner = {fqn: number for number, group in enumerate(saved) for fqn in group["params"]}
    found = [next((owner[fqn] for fqn in those if fqn in owner), None) for those in members]
    if len(saved) == len(members):
        pairs = zip(found, members, saved, strict=True)
        found = [i if not (those or was["params"]) else one for i, (one, those, was) in enumerate(pairs)]
    return found
