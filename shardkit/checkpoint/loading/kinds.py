"""Whether the live optimizers, schedulers and registered objects are those that were saved: by their classes, by the
keys of their states, and by the settings that the script gave them.

A load matches objects by number. Without this, a state would be given to another object, or a changed setting be
replaced by the saved one, without a word.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from shardkit import values
from shardkit.checkpoint.files.layout import section_name
from shardkit.checkpoint.states.differences import KEEP, Difference
from shardkit.checkpoint.states.optimizers import RUN_SETTINGS, settings_of
from shardkit.checkpoint.states.state import Live
from shardkit.signatures import signature
from shardkit.wording import first_few

# Keys that schedulers add to an optimizer's param groups.
_ADDED = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
# Of a schedule that also moves the momentum.
_CYCLED = {"base_momentum", "max_momentum"}
# What to do after a load.
_SET = "to change them, set them"
_SCALE = "for another rate, multiply the groups' lr and the schedule's base_lrs by a factor"


@dataclass
class Found:
    """What a comparison has found."""

    unlike: set[str] = field(default_factory=set)
    """Objects of another class than was saved. They are not loaded."""
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare(live: Live, common: Mapping[str, Any], classes: Mapping[str, str], names: Mapping[int, str]) -> Found:
    """`classes`: those that were saved, by name; empty in checkpoints without them. `names`: fqns by parameter."""
    found = Found()
    _compare_places(live.classes(), classes, found)
    for name, item, saved, own in _pairs(live, common):
        was = classes.get(name, type(item).__qualname__)
        _compare_keys(name, item, saved, own, was, found)
        if name not in found.unlike:
            if was != type(item).__qualname__:
                here = type(item).__qualname__
                found.notes.append(f"{name}: was saved from {was}; {here} goes on with its state and settings")
            lines = _changed_settings(item, saved, own)
            found.notes += [_kept(name, lines)] if lines else []
    for number, (optimizer, saved) in enumerate(zip(live.optimizers, common["optimizers"], strict=False)):
        section = section_name("optim", number)
        if section not in found.unlike and not optimizer.state:
            is_scheduled = any(optimizer is getattr(one, "optimizer", None) for one in live.schedulers().values())
            found.notes += _changed_in_groups(optimizer, saved["groups"], names, section, is_scheduled)
    return found


def _compare_places(now: Mapping[str, str], classes: Mapping[str, str], found: Found) -> None:
    """Registered objects whose class was saved at another place: they were registered in another order. A class that
    was saved nowhere may have got another name; a note says whose state it gets."""
    here, there = (
        {name: one for name, one in given.items() if name.startswith("registered.")} for given in (now, classes)
    )
    for name in sorted(here.keys() & there.keys()):
        if here[name] == there[name]:
            continue
        if here[name] in there.values() or there[name] in here.values():
            found.unlike.add(name)
            text = f"{name}: was saved from another object (got {here[name]}, saved {there[name]})"
            advice = f"register the objects in the order of the run that saved, new ones last, or {KEEP}"
            found.differences.append(Difference(text, advice))
        else:
            found.notes.append(f"{name}: was saved from {there[name]}; {here[name]} gets its state")


def _pairs(live: Live, common: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """(name, object, saved state, present state): of optimizers the settings of the first group; of schedulers all."""
    for number, (optimizer, saved) in enumerate(zip(live.optimizers, common["optimizers"], strict=False)):
        settings = saved["groups"][0]["settings"] if saved["groups"] else {}
        now = {**optimizer.defaults, **(optimizer.param_groups[0] if optimizer.param_groups else {})}
        yield section_name("optim", number), optimizer, settings_of(settings), settings_of(now)
    for name, schedule in live.schedulers().items():
        if isinstance(saved := common["objects"].get(name), dict):
            yield name, schedule, saved, live.objects[name].state_dict()


def _compare_keys(
    name: str, item: Any, saved: Mapping[str, Any], own: Mapping[str, Any], was: str, found: Found
) -> None:
    """Another class has settings that this one lacks, or lacks some of its."""
    lost, new = sorted(saved.keys() - own.keys() - _ADDED), sorted(own.keys() - saved.keys() - _ADDED)
    here = type(item).__qualname__
    is_of_torch = type(item).__module__.startswith("torch.optim")  # others may add keys as they run
    if saved and ((lost and new) or (was != here and (lost or new) and is_of_torch)):
        found.unlike.add(name)
        parts = [f"it has {', '.join(lost[:3])}"] if lost else []
        parts += [f"{'instead of' if lost else 'it lacks'} {', '.join(new[:3])}"] if new else []
        text = f"{name}: was saved from another class than {here} ({' '.join(parts)})"
        found.differences.append(Difference(text, f"prepare the class that was saved, or {KEEP}"))
    elif lost and is_of_torch:
        found.notes.append(
            f"{name}: the saved state has {', '.join(lost[:3])}, which {here} has not; if it was saved from another "
            "class, its settings are used now"
        )


def _changed_settings(item: Any, saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """The arguments of a scheduler's constructor that the script has changed since the save. The rest of its state
    changes with the steps."""
    if isinstance(item, Optimizer):
        return []
    lines = []
    for argument in _arguments(item) - {"last_epoch", "schedulers"}:
        for key in {argument, f"_{argument}"} & saved.keys() & own.keys():
            lines += _changed(argument, saved[key], own[key])
    parts = (getattr(item, "_schedulers", None), saved.get("_schedulers"), own.get("_schedulers"))
    if all(isinstance(one, list) for one in parts):
        for inner in zip(*parts, strict=False):  # type: ignore[arg-type]
            lines += _changed_settings(*inner)
    return sorted(lines)


def _changed_in_groups(
    optimizer: Optimizer, saved: list[dict[str, Any]], names: Mapping[int, str], section: str, is_scheduled: bool
) -> list[str]:
    """The same of an optimizer that has not stepped yet, for each group that has the parameters of a saved one. The
    rate that a schedule began with is in `initial_lr`; of one that keeps none, as ReduceLROnPlateau, it is unknown."""
    owner = {fqn: group["settings"] for group in saved for fqn in group["params"]}
    notes = []
    for number, group in enumerate(optimizer.param_groups):
        settings: dict[str, Any] = next((owner[names[id(p)]] for p in group["params"] if names.get(id(p)) in owner), {})
        keys = (_arguments(optimizer) | {"initial_lr"}) - {*RUN_SETTINGS}
        keys -= {"lr"} if is_scheduled or "initial_lr" in settings.keys() & group.keys() else set()
        keys -= {"momentum", "betas"} if _CYCLED & settings.keys() else set()
        lines = [
            line
            for key in sorted(keys & settings.keys() & group.keys())
            for line in _changed(key, settings[key], group[key])
        ]
        is_of_schedule = any(line.startswith("initial_lr ") for line in lines) and "max_lr" not in settings
        advice = _SCALE if is_of_schedule else _SET
        notes += [_kept(f"{section}.param_groups[{number}]", lines, advice)] if lines else []
    return notes


def _arguments(item: Any) -> set[str]:
    return {*signature(type(item).__init__).parameters}


def _changed(key: str, saved: Any, own: Any) -> list[str]:
    """A line with both values, if they are plain and differ by more than rounding."""
    try:
        now = values.encode(own, key)
    except values.NotStorable:
        return []
    if now == saved or any(True for _ in values.tensors_in(saved)) or isinstance(own, torch.Tensor):
        return []
    was = values.decode(saved, str)
    if isinstance(was, float) and isinstance(own, float) and math.isclose(was, own):
        return []
    return [f"{key} {_in_words(was)}, not {_in_words(own)}"]


def _in_words(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _kept(name: str, lines: list[str], advice: str = _SET) -> str:
    return f"{name}: the saved settings are used ({first_few(lines, 5)}); {advice} after the load"
