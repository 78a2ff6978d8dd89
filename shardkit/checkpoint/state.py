"""The live objects of a training run, as tensors and plain values by name, and back.

Tensors of models and optimizers are named by fqn (`<fqn>/exp_avg`), so neither the world size, nor the strategy, nor
the order of parameters matters to a checkpoint. Sections: `model`, `model_1`, ...; `optim`, `optim_1`, ...; and
`objects` for tensors inside the states of schedulers and registered objects.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit.checkpoint import tensors, values
from shardkit.checkpoint.layout import Box, Entry, Index, Kind, Mesh
from shardkit.distributed import random_state
from shardkit.distributed.tensors import clean_name, local_part, sharded_like, unwrapped
from shardkit.errors import CheckpointError

# How an optimizer computes, not what it remembers: these stay as the run that loads has them.
RUN_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")


# A run may change its precision between a save and a load; its loss scale then has no place to go, or starts anew.
OPTIONAL = ("scaler",)


class Stateful(Protocol):
    """Whatever has a state: schedulers, scalers, loaders, registered objects."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Positioned(Stateful, Protocol):
    """A loader: its state is a position in the data, which may mean nothing where the data are others."""

    def misfit(self, state: Any, saved_ranks: int) -> str | None:
        """Why a position that so many ranks saved cannot be loaded; None where it can."""


@dataclass
class Live:
    """What a checkpoint is made of, and applied to. Names in `objects` and `loaders` are free, and stay."""

    models: list[nn.Module]
    optimizers: list[Optimizer] = field(default_factory=list)
    objects: dict[str, Stateful] = field(default_factory=dict)
    loaders: dict[str, Positioned] = field(default_factory=dict)
    seed: int | None = None


@dataclass
class Captured:
    """A training state as it is now: `tensors` share memory with the live objects."""

    index: Index
    tensors: dict[str, dict[str, torch.Tensor]]
    common: dict[str, Any]
    own: dict[str, Any]


def section_name(kind: str, number: int) -> str:
    """model, model_1, ...; optim, optim_1, ..."""
    return kind if number == 0 else f"{kind}_{number}"


def is_setting(section: str, name: str) -> bool:
    """Whether a tensor belongs to a param group of an optimizer, such as a learning rate, and not to a parameter."""
    return name.startswith(f"{section}.param_groups[")


def is_changed_by_steps_only(section: str, name: str) -> bool:
    """Whether a tensor is what an optimizer remembers of a parameter, which nothing but its steps changes in place."""
    return section.startswith("optim") and not is_setting(section, name)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by fqn, sharing memory; sharded ones as DTensors."""
    found = {}
    # state_dict() first brings FSDP parameters back to their shards, whatever state the step left them in.
    for name, value in unwrapped(model).state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{name}: extra state of a {type(value).__name__} cannot be saved; return tensors.")
        found[clean_name(name)] = value.detach() if value.requires_grad else value
    return found


def parameter_names(models: list[nn.Module]) -> dict[int, str]:
    """id of each parameter -> fqn; parameters of the second model begin with `1:`, and so on."""
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        prefix = "" if number == 0 else f"{number}:"
        for name, parameter in unwrapped(model).named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), prefix + clean_name(name))
    return names


def capture(live: Live, kind: Kind, rank: int, world_size: int) -> Captured:
    """The state now. The index is the same on all ranks; tensors share memory, values are copies."""
    index = Index(kind, world_size)
    found: dict[str, dict[str, torch.Tensor]] = {}
    for number, model in enumerate(live.models):
        _capture_model(model, section_name("model", number), index, found)
    names = parameter_names(live.models)
    optimizers = [
        _capture_optimizer(optimizer, section_name("optim", number), names, index, found)
        for number, optimizer in enumerate(live.optimizers)
    ]
    objects = _capture_objects(live.objects, index, found)
    loaders = {name: values.encode(it.state_dict(), name, _no_tensor) for name, it in live.loaders.items()}
    index.sort()
    common = {"optimizers": optimizers, "objects": objects, "loaders": loaders, "seed": _seed(live)}
    return Captured(index, found, common, {"loaders": loaders, "rng": random_state.capture(rank)})


def _seed(live: Live) -> int:
    return live.seed if live.seed is not None else torch.initial_seed()


def _capture_model(model: nn.Module, section: str, index: Index, found: dict[str, dict[str, torch.Tensor]]) -> None:
    everyone, first = Mesh((index.world_size,)), Mesh((1,))
    tensors_of_model = model_tensors(model)
    ties = tied_names(model, tensors_of_model)
    parameters = {clean_name(name) for name, _ in unwrapped(model).named_parameters(remove_duplicate=False)}
    entries = index.sections.setdefault(section, {})
    index.aliases[section] = ties
    found[section] = {}
    for name, tensor in tensors_of_model.items():
        if name not in ties:
            # Replicas of a buffer may drift apart (batch norm); rank 0's is written, and never a mix.
            holders = everyone if name in parameters else first
            entries[name] = tensors.entry_of(tensor, index, holders, f"{section}: {name}")
            found[section][name] = tensor


def tied_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Second and further names of one parameter or buffer -> its first name. The same on all ranks."""
    inner = unwrapped(model)
    objects = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    identity = {clean_name(name): id(item) for name, item in objects}
    canonical: dict[int, str] = {}
    ties = {}
    for name in names:
        if name in identity and canonical.setdefault(identity[name], name) != name:
            ties[name] = canonical[identity[name]]
    return ties


def _capture_optimizer(
    optimizer: Optimizer,
    section: str,
    names: Mapping[int, str],
    index: Index,
    found: dict[str, dict[str, torch.Tensor]],
) -> dict[str, Any]:
    """Param groups and non-tensor state as JSON; the tensors go into the index and `found`."""
    everyone = Mesh((index.world_size,))
    entries, mine = index.sections.setdefault(section, {}), found.setdefault(section, {})
    index.aliases.setdefault(section, {})

    def store(path: str, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        entries[path] = tensors.entry_of(value, index, everyone, f"{section}: {path}")
        mine[path] = value
        return path

    plain: dict[str, dict[str, Any]] = {}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        where = f"{section}.param_groups[{number}]"
        members = [named(parameter, names, where) for parameter in group["params"]]
        settings = {key: value for key, value in group.items() if key not in RUN_SETTINGS}
        groups.append({"params": members, "settings": values.encode(settings, where, store)})
        for name, parameter in zip(members, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                encoded = values.encode(value, f"{name}/{key}", store)
                if not isinstance(value, torch.Tensor):
                    plain.setdefault(name, {})[str(key)] = encoded
    return {"groups": groups, "plain": plain}


def named(parameter: torch.Tensor, names: Mapping[int, str], where: str) -> str:
    """The fqn of an optimizer's parameter; CheckpointError where no model has it."""
    if id(parameter) not in names:
        shape = list(parameter.shape)
        raise CheckpointError(f"{where}: a parameter of shape {shape} is in no prepared model; prepare its model too.")
    return names[id(parameter)]


def _capture_objects(
    objects: Mapping[str, Stateful], index: Index, found: dict[str, dict[str, torch.Tensor]]
) -> dict[str, Any]:
    first = Mesh((1,))
    entries, mine = index.sections.setdefault("objects", {}), found.setdefault("objects", {})
    index.aliases.setdefault("objects", {})

    def store(path: str, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        entries[path] = tensors.entry_of(value, index, first, path)
        mine[path] = value
        return path

    return {name: values.encode(item.state_dict(), name, store) for name, item in objects.items()}


def _no_tensor(path: str, value: Any) -> str | None:
    return None


@dataclass
class Target:
    """A saved tensor that this rank wants a part of; `staged` is filled by the reader. `live` is what it is for."""

    section: str
    name: str
    entry: Entry
    box: Box
    live: torch.Tensor | None
    staged: torch.Tensor


@dataclass
class Wanted:
    """All that a load needs to read, and what does not fit the live objects."""

    targets: dict[tuple[str, str], Target]
    problems: list[str]


def wanted(live: Live, index: Index, common: Mapping[str, Any], strict: bool) -> Wanted:
    """Which saved tensors, and which part of each, this rank needs. Allocates the host memory to read them into."""
    result = Wanted({}, [])
    for number, model in enumerate(live.models):
        _want_model(model, section_name("model", number), index, strict, result)
    for number, optimizer in enumerate(live.optimizers):
        _want_optimizer(optimizer, number, live, index, common, strict, result)
    _want_objects(live, index, common, strict, result)
    if strict:
        result.problems += _unclaimed(live, index, common)
    return result


def _unclaimed(live: Live, index: Index, common: Mapping[str, Any]) -> list[str]:
    """Whole models and optimizers of the checkpoint that nothing live takes: forgotten, or not prepared yet."""
    models = {name for name in index.sections if name.startswith("model")}
    models -= {section_name("model", number) for number in range(len(live.models))}
    optimizers = [section_name("optim", n) for n in range(len(live.optimizers), len(common["optimizers"]))]
    return [
        f"{section}: in the checkpoint, and not prepared now; prepare it before loading, or load with strict=False"
        for section in [*sorted(models), *optimizers]
    ]


def _want(result: Wanted, section: str, name: str, source: str, entry: Entry, live: torch.Tensor | None) -> None:
    """Note that `name` is to be read, from the saved tensor `source`: another one where it was tied when saved."""
    box = entry.whole if live is None else tensors.held_box(live)
    result.targets[section, name] = Target(section, source, entry, box, live, tensors.empty(entry.dtype, box.sizes))


def _want_model(model: nn.Module, section: str, index: Index, strict: bool, result: Wanted) -> None:
    if section not in index.sections:
        if strict:
            result.problems.append(_not_saved(section))
        return
    entries, aliases = index.sections[section], index.aliases[section]
    mine = model_tensors(model)
    saved = {*entries, *aliases}
    ties = tied_names(model, mine)
    missing = [name for name in mine if name not in saved and ties.get(name) not in saved]
    unexpected = [name for name in saved if name not in mine]
    if strict:
        result.problems += _listed(section, "in the model, not in the checkpoint", missing)
        result.problems += _listed(section, "in the checkpoint, not in the model", sorted(unexpected))
    for name, tensor in mine.items():
        source = aliases.get(name, name)
        if source not in entries or name in ties:
            continue
        problem = _mismatch(entries[source], tensor)
        if problem:
            result.problems.append(f"{section}: {name}: {problem}")
        else:
            _want(result, section, name, source, entries[source], tensor)


def _not_saved(section: str) -> str:
    return f"{section}: prepared now, and not in the checkpoint; load with strict=False to leave it as it is"


def _listed(section: str, what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return [f"{section}: {what}: {', '.join(names[:5])}{more}"] if names else []


def _mismatch(entry: Entry, tensor: torch.Tensor) -> str | None:
    if entry.shape != tuple(tensor.shape):
        return f"shape {list(entry.shape)} in the checkpoint, {list(tensor.shape)} in the model"
    if entry.dtype != tensors.DTYPES.get(tensor.dtype):
        return f"dtype {entry.dtype} in the checkpoint, {tensors.DTYPES.get(tensor.dtype)} in the model"
    return None


def _want_optimizer(
    optimizer: Optimizer,
    number: int,
    live: Live,
    index: Index,
    common: Mapping[str, Any],
    strict: bool,
    result: Wanted,
) -> None:
    section = section_name("optim", number)
    if section not in index.sections or number >= len(common["optimizers"]):
        if strict:
            result.problems.append(_not_saved(section))
        return
    mine = _parameters_by_name(optimizer, live.models, section)
    saved = {name for group in common["optimizers"][number]["groups"] for name in group["params"]}
    if strict:
        result.problems += _listed(section, "in the optimizer, not in the checkpoint", sorted({*mine} - saved))
        result.problems += _listed(section, "in the checkpoint, not in the optimizer", sorted(saved - {*mine}))
    result.problems += _unmatched_groups(optimizer, mine, common["optimizers"][number]["groups"], section)
    for path, entry in index.sections[section].items():
        parameter = mine.get(path.rpartition("/")[0])
        if parameter is not None or is_setting(section, path):
            shaped = parameter is not None and tuple(parameter.shape) == entry.shape
            _want(result, section, path, path, entry, parameter if shaped else None)


def _parameters_by_name(optimizer: Optimizer, models: list[nn.Module], section: str) -> dict[str, torch.Tensor]:
    names = parameter_names(models)
    return {
        named(parameter, names, section): parameter for group in optimizer.param_groups for parameter in group["params"]
    }


def _unmatched_groups(
    optimizer: Optimizer, mine: Mapping[str, torch.Tensor], saved: list[dict[str, Any]], section: str
) -> list[str]:
    """A live group must lie within one saved group, or nobody knows its learning rate."""
    names = {id(parameter): name for name, parameter in mine.items()}
    owner = {name: number for number, group in enumerate(saved) for name in group["params"]}
    problems = []
    for number, group in enumerate(optimizer.param_groups):
        owners = {owner[name] for name in (names[id(p)] for p in group["params"]) if name in owner}
        if len(owners) > 1:
            text = "its parameters were in several groups when saved; group them as they were"
            problems.append(f"{section}: param_groups[{number}]: {text}")
    return problems


def _want_objects(live: Live, index: Index, common: Mapping[str, Any], strict: bool, result: Wanted) -> None:
    if strict:
        missing = [name for name in live.objects if name not in (*common["objects"], *OPTIONAL)]
        unexpected = [name for name in common["objects"] if name not in (*live.objects, *OPTIONAL)]
        result.problems += _listed("objects", "registered now, not in the checkpoint", missing)
        result.problems += _listed("objects", "in the checkpoint, not registered now", unexpected)
    now: dict[str, torch.Tensor] = {}

    def note(path: str, value: Any) -> str | None:
        if isinstance(value, torch.Tensor):
            now[path] = value
            return path
        return None

    for name, item in live.objects.items():
        if any(path.startswith(name) for path in index.sections.get("objects", {})):
            values.encode(item.state_dict(), name, note)
    for path, entry in index.sections.get("objects", {}).items():
        found = now.get(path)
        like = found if isinstance(found, DTensor) and tuple(found.shape) == entry.shape else None
        _want(result, "objects", path, path, entry, like)


def apply_objects(
    live: Live,
    targets: Mapping[tuple[str, str], Target],
    common: Mapping[str, Any],
    own: Mapping[str, Any] | None,
    applied: list[tuple[Stateful, Any]],
) -> None:
    """Give schedulers, registered objects and loaders their states. `applied` notes what each was before."""
    for item, state in _object_states(live, targets, common, own):
        applied.append((item, copy.deepcopy(item.state_dict())))
        item.load_state_dict(state)


def take_back(applied: list[tuple[Stateful, Any]]) -> None:
    """Undo `apply_objects`."""
    for item, before in reversed(applied):
        item.load_state_dict(before)


def _object_states(
    live: Live, targets: Mapping[tuple[str, str], Target], common: Mapping[str, Any], own: Mapping[str, Any] | None
) -> Iterator[tuple[Stateful, Any]]:
    load = _loader_of(targets, "objects")
    for name, item in live.objects.items():
        if name in common["objects"]:
            yield item, values.decode(common["objects"][name], load)
    positions = common["loaders"] if own is None else own["loaders"]
    for name, loader in live.loaders.items():  # last: that they take their positions is known, so none is taken back
        if name in positions:
            yield loader, values.decode(positions[name], load)


def _loader_of(targets: Mapping[tuple[str, str], Target], section: str) -> Callable[[str], torch.Tensor]:
    return lambda name: _finished(targets[section, name])


def _finished(target: Target) -> torch.Tensor:
    """The staged part as the tensor that the live object expects: sharded as it is, or plain."""
    if not isinstance(target.live, DTensor):
        return target.staged
    like = target.live
    part = target.staged.to(local_part(like).device)
    if part.device.type != like.device_mesh.device_type:  # offloaded: from_local would move it to the mesh's device
        whole = torch.empty_like(like.detach(), dtype=part.dtype)
        local_part(whole).copy_(part)
        return whole
    return sharded_like(part, like)


def apply_tensors(live: Live, targets: Mapping[tuple[str, str], Target], common: Mapping[str, Any]) -> None:
    """Copy the weights in place, and set the optimizers' states. Nothing in here depends on user code."""
    sections = {section_name("model", number) for number in range(len(live.models))}
    with torch.no_grad():
        for (section, _), target in targets.items():
            if section in sections and target.live is not None:
                local_part(target.live).copy_(target.staged)
    for number, (optimizer, saved) in enumerate(zip(live.optimizers, common["optimizers"], strict=False)):
        _apply_optimizer(optimizer, number, live, targets, saved)


def _apply_optimizer(
    optimizer: Optimizer,
    number: int,
    live: Live,
    targets: Mapping[tuple[str, str], Target],
    saved: Mapping[str, Any],
) -> None:
    section = section_name("optim", number)
    mine = _parameters_by_name(optimizer, live.models, section)
    names = {id(parameter): name for name, parameter in mine.items()}
    owner = {name: group for group in saved["groups"] for name in group["params"]}
    used: set[str] = set()

    def load(path: str) -> torch.Tensor:
        used.add(path)
        return _finished(targets[section, path])

    states: dict[str, dict[str, Any]] = {name: {} for name in mine}
    groups: dict[str, Mapping[str, Any]] = {}
    for group in optimizer.param_groups:
        source = next((owner[names[id(p)]] for p in group["params"] if names[id(p)] in owner), None)
        if source is not None:
            group.update(values.decode(source["settings"], load))
            groups.update({names[id(p)]: group for p in group["params"]})
    for name, plain in saved["plain"].items():
        if name in states:
            states[name].update({key: values.decode(value, load) for key, value in plain.items()})
    for (where, path), target in targets.items():
        name, _, key = path.rpartition("/")
        if where == section and path not in used and name in states:
            states[name][key] = _on_device(_finished(target), key, mine[name], groups.get(name, {}))
    for name, parameter in mine.items():
        if states[name]:
            optimizer.state[parameter] = states[name]
        else:
            optimizer.state.pop(parameter, None)


def _on_device(value: torch.Tensor, key: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Where torch's optimizers keep it: beside the parameter, but a `step` in host memory unless fused or captured."""
    if isinstance(value, DTensor):
        return value
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value
    return value.to(local_part(parameter).device)
