"""What the param groups of a saved optimizer and of the live one do not have in common."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardkit.checkpoint.states.differences import KEEP, LEAVE_OUT, TAKE_SAVED, Difference, listed
from shardkit.checkpoint.states.numbered import sources
from shardkit.checkpoint.states.optimizers import members_of, parameters_by_name
from shardkit.distributed.tensors import local_part

_ADD = f"call add_param_group before the load, if the saved run had called it, or {LEAVE_OUT}"
# Where torch's schedules keep one value for each group.
_OF_GROUPS = ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas")


def unmatched_parameters(
    optimizer: Optimizer, names: Mapping[int, str], saved: list[dict[str, Any]], section: str
) -> list[Difference]:
    """Parameters of the saved groups or of this optimizer that the other lacks."""
    mine = parameters_by_name(optimizer, names, section).keys()
    theirs = {name for group in saved for name in group["params"]}
    return [
        *listed(section, "in the optimizer, not in the checkpoint", sorted(mine - theirs), KEEP),
        *listed(section, "in the checkpoint, not in the optimizer", sorted(theirs - mine), _ADD),
    ]


def unmatched_groups(
    optimizer: Optimizer, names: Mapping[int, str], saved: list[dict[str, Any]], section: str
) -> list[str]:
    """Live groups whose parameters come from several saved groups: their settings would be ambiguous."""
    owner = {name: number for number, group in enumerate(saved) for name in group["params"]}
    problems = []
    for number, group in enumerate(optimizer.param_groups):
        owners = {owner[name] for name in (names[id(p)] for p in group["params"]) if name in owner}
        if len(owners) > 1:
            text = "its parameters were saved in several groups; use the groups that were saved"
            problems.append(f"{section}: param_groups[{number}]: {text}")
    return problems


def parted_groups(
    optimizer: Optimizer, names: Mapping[int, str], saved: list[dict[str, Any]], section: str
) -> list[Difference]:
    """Live groups with different settings whose parameters were one group when they were saved: they would all get its
    settings."""
    first: dict[int, int] = {}
    found = []
    owners = sources(members_of(optimizer, names), saved)
    for number, (source, group) in enumerate(zip(owners, optimizer.param_groups, strict=True)):
        if source is None:
            continue
        other = optimizer.param_groups[first.setdefault(source, number)]
        settings = saved[source]["settings"].keys() - {"param_names"}  # torch's list of each group's own names
        differ = [
            key for key in sorted(settings) if key in group and key in other and not _is_same(group[key], other[key])
        ]
        if differ:
            which = f"{section}: param_groups[{first[source]}] and [{number}]"
            text = f"{which} were saved as one, and their settings differ ({', '.join(differ[:3])})"
            found.append(Difference(text, f"use the groups that were saved, or {TAKE_SAVED}"))
    return found


def schedule_state(
    schedule: Any, saved: Any, optimizers: Sequence[Optimizer], names: Mapping[int, str], common: Mapping[str, Any]
) -> Any:
    """The saved state of a schedule for the present groups of its optimizer. What it keeps for each group is found by
    the group's parameters, as the settings of the group are; a group that was not saved keeps what the schedule has."""
    number = next((n for n, one in enumerate(optimizers) if one is getattr(schedule, "optimizer", None)), None)
    if number is None or number >= len(common["optimizers"]):
        return saved
    groups = common["optimizers"][number]["groups"]
    members = [[names.get(id(p), "") for p in group["params"]] for group in optimizers[number].param_groups]
    found = sources(members, groups)
    return saved if found == [*range(len(groups))] else _by_group(saved, schedule.state_dict(), found, len(groups))


def _by_group(saved: Any, here: Any, found: list[int | None], count: int) -> Any:
    if isinstance(saved, list):  # the states of schedules that this one steps
        inner = here if isinstance(here, list) and len(here) == len(saved) else [None] * len(saved)
        return [_by_group(one, now, found, count) for one, now in zip(saved, inner, strict=True)]
    if not isinstance(saved, dict):
        return saved
    now = here if isinstance(here, dict) else {}
    changed = {key: _by_group(value, now.get(key), found, count) for key, value in saved.items()}
    for key in saved.keys() & {*_OF_GROUPS}:
        old: Any = saved[key]
        new: Any = now.get(key)
        is_known = isinstance(new, list) and len(new) == len(found)
        if isinstance(old, list) and len(old) == count and (is_known or None not in found):
            changed[key] = [new[at] if source is None else old[source] for at, source in enumerate(found)]
    return changed


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(local_part(one), local_part(other))
    return bool(one == other)
