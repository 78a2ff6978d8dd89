"""Reads the optimizer states that Accelerate or torch.distributed.checkpoint saved, and names their parameters."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardkit.checkpoint.commands import dcp, foreign_files
from shardkit.checkpoint.commands.dcp import LazyTensor
from shardkit.checkpoint.files import folder
from shardkit.checkpoint.states.numbered import with_names
from shardkit.checkpoint.states.state import name_in_run
from shardkit.errors import CheckpointError
from shardkit.model.prepared import Prepared
from shardkit.wording import counted


def saved_in(source: Path) -> list[dict[str, Any]]:
    """The state of each optimizer in the folder that `save_state` of Accelerate made, as `in_parts` gives them."""
    found: list[dict[str, Any]] = []
    while True:
        number = len(found)
        file = source / (f"optimizer_{number}.bin" if number else "optimizer.bin")
        if dcp.is_dcp(source / f"optimizer_{number}"):
            whole = dcp.loaded(dcp.read(source / f"optimizer_{number}"))
            found.append(in_parts(whole.get("optimizer", whole), source / f"optimizer_{number}"))
        elif file.is_file():
            found.append(in_parts(foreign_files.load(file), file))
        else:
            return found


def in_parts(state: Any, where: Path) -> dict[str, Any]:
    """An optimizer's state_dict in parts. DCP has no entry for an empty "state", such as that of SGD.

    State that belongs to no parameter is under "globals"; keys that its class adds to torch's format under "extra".
    """
    inner = state.get("state", {}) if isinstance(state, dict) else None
    groups = state.get("param_groups") if isinstance(state, dict) else None
    if not isinstance(inner, dict) or not isinstance(groups, list) or not all(map(_is_group, groups)) or not groups:
        raise _no_optimizer(state, where)
    members = {str(name) for group in groups for name in group["params"]}  # DCP turns numbers into strings
    rows = {name: row for name, row in inner.items() if str(name) in members}
    if not all(isinstance(row, dict) for row in rows.values()):
        raise _no_optimizer(state, where)
    rest = {str(key): value for key, value in inner.items() if key not in rows}
    extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {"state": rows, "param_groups": groups, "globals": rest, "extra": extra}


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("params"), list)


def _no_optimizer(state: Any, where: Path) -> CheckpointError:
    return CheckpointError(
        f"convert: {where}: not the state_dict of an optimizer (got {type(state).__name__} without valid "
        "param_groups); skip the optimizer with --weights-only."
    )


def by_name(
    state: Mapping[str, Any],
    number: int,
    models: Sequence[Mapping[str, Any]],
    prepared: Prepared | None,
    source: Path,
) -> Mapping[str, Any]:
    """The state of optimizer `number`, with parameters named as in a run.

    Accelerate saves the names of the model with the optimizer's number under FSDP. Under DDP it saves numbers, in the
    order of the param groups.
    """
    if all(isinstance(name, str) for those in _members(state) for name in those):
        return _by_own_names(state, number if number < len(models) else 0)
    here = f"convert: {source}: optimizer {number} numbers its parameters"
    if prepared is None:
        raise CheckpointError(f"{here}; give their names with --model, or skip the optimizer with --weights-only.")
    named = _names(number, [len(those) for those in _members(state)], len(models), prepared, here)
    found = _by_names_of_numbers(state, named)
    _check_shapes(found["state"], models, here)
    return found


def _members(state: Mapping[str, Any]) -> list[list[Any]]:
    """Of each param group, its parameters: names or numbers."""
    return [group["params"] for group in state["param_groups"]]


def _by_own_names(state: Mapping[str, Any], model: int) -> dict[str, Any]:
    """A state with names of the model's parameters, with those that they have in a run."""
    named = [[name_in_run(model, name) for name in those] for those in _members(state)]
    rows = {name_in_run(model, name): row for name, row in state["state"].items()}
    return {**state, "state": rows, "param_groups": _with_members(state, named)}


def _by_names_of_numbers(state: Mapping[str, Any], named: list[list[str]]) -> dict[str, Any]:
    """A state with numbers for parameters, with these names in their place; `named`: of each param group."""
    numbers = [str(parameter) for those in _members(state) for parameter in those]  # DCP turns keys into strings
    names = dict(zip(numbers, (name for those in named for name in those), strict=True))
    rows = {names[str(key)]: row for key, row in state["state"].items()}
    groups, extra = _with_members(state, named), with_names(state["extra"], named)
    return {**state, "state": rows, "param_groups": groups, "extra": extra}


def _with_members(state: Mapping[str, Any], named: list[list[str]]) -> list[dict[str, Any]]:
    return [{**group, "params": those} for group, those in zip(state["param_groups"], named, strict=True)]


def _names(number: int, sizes: list[int], model_count: int, prepared: Prepared, here: str) -> list[list[str]]:
    """The names of an optimizer's parameters, for each of its param groups of these sizes."""
    if prepared.optimizers:
        built = prepared.optimizers[number] if number < len(prepared.optimizers) else []
        if [len(group) for group in built] != sizes:
            text = f"{_sizes(sizes)} in the checkpoint, {_sizes([len(group) for group in built])} in that of --model"
            raise CheckpointError(f"{here}, and its param groups differ ({text}); build it as it was for the run.")
        return [[name_in_run(*parameter) for parameter in group] for group in built]
    with_optimizers = (
        "let the function of --model return the models and optimizers that the run prepared, as `return model, "
        "optimizer`, or skip the optimizer with --weights-only"
    )
    if len(sizes) > 1 or model_count > 1:
        parts = counted(len(sizes), "param group") if len(sizes) > 1 else counted(model_count, "model")
        raise CheckpointError(f"{here}, and there are {parts}; {with_optimizers}.")
    whole = prepared.models[0]
    trained = [name for name, is_trained in whole.items() if is_trained]
    order = next((names for names in (trained, list(whole)) if len(names) == sizes[0]), None)
    if order is None:
        text = f"{sizes[0]} in the optimizer, {len(whole)} in --model, {len(trained)} of them trained"
        raise CheckpointError(
            f"{here}, and their count differs ({text}); give the model that was trained; if the optimizer had only a "
            f"part of its parameters, {with_optimizers}."
        )
    return [order]


def _sizes(groups: list[int]) -> str:
    return " + ".join(map(str, groups)) + " parameters" if groups else "no optimizer of that number"


def _check_shapes(rows: Mapping[str, Mapping[str, Any]], models: Sequence[Mapping[str, Any]], here: str) -> None:
    """Raises CheckpointError where the names cannot be those of the parameters: their states have other shapes."""
    shapes = {
        name_in_run(number, fqn): tuple(t.shape) for number, model in enumerate(models) for fqn, t in model.items()
    }
    problems = [text for name, row in rows.items() for text in _misfits(name, row, shapes.get(name))]
    if problems:
        raise CheckpointError(
            f"{here}, and --model does not match: {'; '.join(problems[:3])}; give the model that was trained."
        )


def _misfits(name: str, row: Mapping[str, Any], shape: tuple[int, ...] | None) -> list[str]:
    if shape is None:
        return [f"{name} is not in the checkpoint"]
    tensors = {key: value for key, value in row.items() if isinstance(value, (torch.Tensor, LazyTensor))}
    return [
        f"{name} has shape {list(shape)}, its {key} {list(value.shape)}"
        for key, value in tensors.items()
        if tuple(value.shape) not in ((), shape)
    ]


def steps_made(states: Iterable[Mapping[str, Any]]) -> int:
    """The number of steps that the optimizers have made, from their states; 0 if they do not count steps."""
    steps = [row["step"] for state in states for row in state["state"].values() if "step" in row]
    found = max((int(step.to("cpu")) if hasattr(step, "to") else int(step) for step in steps), default=0)
    return found if folder.STEP.fullmatch(folder.step_name(found)) else 0
