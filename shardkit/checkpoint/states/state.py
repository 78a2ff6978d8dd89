"""The live objects of a training run, as tensors and plain values by name.

Tensors of models and optimizers are named by fqn (`<fqn>/exp_avg`), so a checkpoint does not depend on the world size,
the strategy or the order of parameters. Sections: `model`, `model_1`, ...; `optim`, `optim_1`, ...; and `objects` for
tensors inside the states of schedulers and registered objects.

State that may differ between ranks (everything except model tensors and sharded tensors) is captured as items, which
`per_rank` compares between ranks.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardkit import values
from shardkit.checkpoint.files.layout import Index, Kind, Mesh, section_name
from shardkit.checkpoint.files.state_json import ItemPlace, extra_state, fqn_at, label_of, section_of
from shardkit.checkpoint.states import optimizers, tensors
from shardkit.distributed import random_state, xla
from shardkit.distributed.modules import clean_name, layers, unwrapped
from shardkit.distributed.tensors import is_dtensor, local_part, outside_inference_mode, whole
from shardkit.errors import CheckpointError, UsageError
from shardkit.model import packed


class Stateful(Protocol):
    """An object with a state: a scheduler, scaler, loader or registered object."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Positioned(Stateful, Protocol):
    """A loader: its state is a position in the data, which may be invalid for other data."""

    def misfit(self, state: Any, saved_ranks: int) -> str | None:
        """Why a position that was saved on `saved_ranks` ranks cannot be loaded; None if it can."""


@dataclass
class Live:
    """The objects that are saved and loaded. The names in `objects` and `loaders` identify them in a checkpoint."""

    models: list[nn.Module]
    optimizers: list[Optimizer] = field(default_factory=list)
    objects: dict[str, Stateful] = field(default_factory=dict)
    loaders: dict[str, Positioned] = field(default_factory=dict)
    seed: int | None = None
    random_states: random_state.States | None = None
    """Of this rank, from before the batches that a resumed run reads again; None: the present ones."""
    elsewhere: frozenset[int] = frozenset()
    """Numbers of the models that a save hook has saved: they are in no section."""
    take: Callable[[Path], set[int]] | None = None
    """Runs the user's load hooks on the folder of the verified checkpoint. Returns the numbers of the models that they
    loaded. Every rank calls it."""

    def classes(self) -> dict[str, str]:
        """{name: class} of the optimizers, schedulers and registered objects."""
        found: dict[str, Any] = {section_name("optim", number): item for number, item in enumerate(self.optimizers)}
        found |= {name: item for name, item in self.objects.items() if name.startswith("registered.")}
        found |= self.schedulers()
        return {name: type(item).__qualname__ for name, item in found.items()}

    def schedulers(self) -> dict[str, Any]:
        """{name: the script's schedule, without the wrapper that `prepare` returns}."""
        found = {name: item for name, item in self.objects.items() if name.startswith("scheduler.")}
        return {name: getattr(item, "scheduler", item) for name, item in found.items()}


@dataclass(frozen=True)
class Item:
    """A value that may differ between ranks: its place in `common`, its JSON value, the names of its plain tensors."""

    at: tuple[str | int, ...]
    value: Any
    section: str
    tensors: tuple[str, ...]
    is_replicated: bool = False
    """Whether its parameter is replicated: large tensors are then compared by a sample."""


@dataclass
class Captured:
    """A captured training state. Tensors share memory with the live objects."""

    index: Index
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    items: dict[str, Item] = field(default_factory=dict)
    own_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Per-rank tensors, by `<section>:<name>`; see `per_rank`."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Buffers that each rank updates independently, by `<section>: <name>`."""
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """The parameters of each model, by section and name."""
    packed: set[tuple[str, str]] = field(default_factory=set)
    """Section and name of those whose numbers are containers of packed weights."""


def is_changed_by_steps_only(section: str, name: str) -> bool:
    """Whether a tensor is optimizer state of a parameter, which only the optimizer's steps change."""
    return section.startswith("optim") and not optimizers.is_of_no_parameter(section, name)


def model_state(model: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The model's state dict by fqn: its tensors, sharing memory (sharded ones as DTensors), and what are no tensors:
    extra state. On XLA devices the parameters themselves, since writes to an alias do not reach them there."""
    found: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    is_xla = xla.is_started()
    # state_dict() first reshards FSDP parameters that are still gathered.
    for name, value in unwrapped(model).state_dict(keep_vars=is_xla).items():
        name = clean_name(name)
        if name in found or name in others:
            raise CheckpointError(
                f"{name}: two tensors of the model have this name, without torch's wrappers; rename one."
            )
        if not isinstance(value, torch.Tensor):
            others[name] = value
        else:
            found[name] = value.detach() if value.requires_grad and not is_xla else value
    return found, others


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, persistent buffers and other tensors of the state dict by fqn, as `model_state` has them."""
    return model_state(model)[0]


@outside_inference_mode()
def whole_tensors(model: nn.Module) -> dict[str, Any]:
    """The model's full state dict in host memory: of a sharded model on rank 0, and `OfRankZero` elsewhere. The names
    of a tied parameter have one tensor, which Transformers then writes once. Collective: gathers tensor by tensor."""
    own, others = model_state(model)
    ties = tied_names(model, own)
    is_kept = not any(is_dtensor(tensor) for tensor in own.values()) or dist.get_rank() == 0
    found = {}
    for name, tensor in own.items():
        if name in ties:
            continue
        full = whole(tensor) if is_dtensor(tensor) else tensor
        if is_kept:
            is_new = full.is_cpu and local_part(tensor).shape != full.shape  # else a view, if this rank has all of it
            found[name] = full if is_new else tensors.copied(full)
    return others | {name: found[ties.get(name, name)] for name in own} if is_kept else OfRankZero()


class OfRankZero(dict[str, Any]):
    """The empty state dict of the ranks that get none. UsageError where it is written to a file, which would often be
    left empty where all ranks write it, and where a model loads it. For everything else it is a dict."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_empty(sys._getframe(1))
        return dict, (dict(self),)

    def keys(self) -> Any:
        _refuse_empty(sys._getframe(1))
        return super().keys()

    def items(self) -> Any:
        _refuse_empty(sys._getframe(1))
        return super().items()


_WRITTEN = "call get_state_dict on all ranks, then {} under `if accelerator.is_main_process`."
_ADVICE_BY_READER = {
    "torch.serialization": ("torch.save", _WRITTEN.format("torch.save")),
    "safetensors.torch": ("safetensors", _WRITTEN.format("save_file")),
    "torch.nn.modules.module": (
        "load_state_dict",
        "to keep weights of this run, call copy.deepcopy(model.state_dict()) on all ranks, and load that.",
    ),
}
"""{module that reads a state dict: its function, and advice for ranks that have none}."""


def _refuse_empty(reader: FrameType) -> None:
    if found := _ADVICE_BY_READER.get(reader.f_globals.get("__name__", "")):
        function, advice = found
        raise UsageError(
            f"{function}: only rank 0 has what get_state_dict gathers of a sharded model (got an empty dict on rank "
            f"{dist.get_rank()}); {advice}"
        )


def parameter_names(models: list[nn.Module], saved: Index | None = None) -> dict[int, str]:
    """{id of the parameter: its name among the parameters of all models}. Of tied names the first; for a load the first
    under which the tensor was `saved`, since a model may have got its layers in another order."""
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        entries = {} if saved is None else saved.sections.get(section_name("model", number), {})
        found = unwrapped(model).named_parameters(remove_duplicate=False)
        named = [(clean_name(name), parameter) for name, parameter in found]
        for name, parameter in sorted(named, key=lambda item: item[0] not in entries):
            names.setdefault(id(parameter), name_in_run(number, name))
    return names


def name_in_run(model: int, fqn: str) -> str:
    """The name of a parameter among those of all models: fqns of the second model get the prefix `1:`, and so on."""
    return f"{model}:{fqn}" if model else fqn


@outside_inference_mode()
def capture(live: Live, kind: Kind, rank: int, world_size: int) -> Captured:
    """Capture the current state. Tensors share memory, other values are copied. Index entries of sharded tensors and of
    models are equal on all ranks; the other values are in `items`, too."""
    found = Captured(Index(kind, world_size), common={"optimizers": [], "objects": {}})
    taken = _Capture(found)
    for number, model in enumerate(live.models):
        if number not in live.elsewhere:
            taken.add_model(model, section_name("model", number))
    names = parameter_names(live.models)
    for number, optimizer in enumerate(live.optimizers):
        taken.add_optimizer(optimizer, number, names)
    taken.begin("objects")
    states = taken.extra_states | {name: item.state_dict() for name, item in live.objects.items()}
    for name, value in states.items():
        taken.add(("objects", name), value)
    loaders = {name: values.encode(it.state_dict(), name) for name, it in live.loaders.items()}
    found.index.sort()
    seed = live.seed if live.seed is not None else torch.initial_seed()
    classes = {"classes": known} if (known := live.classes()) else {}
    found.common |= {"loaders": loaders, "seed": seed, **classes}
    found.own = {"loaders": loaders, "rng": random_state.capture(rank, live.random_states), **classes}
    return found


class _Capture:
    """A capture in progress, which fills `found`."""

    def __init__(self, found: Captured) -> None:
        self.found, self.index = found, found.index
        self.extra_states: dict[str, dict[str, Any]] = {}

    def begin(self, section: str) -> None:
        self.index.sections[section], self.index.aliases[section], self.found.tensors[section] = {}, {}, {}

    def store(self, section: str, name: str, tensor: torch.Tensor, holders: Mesh, where: str) -> None:
        if name in self.index.sections[section]:
            raise CheckpointError(f"{where}: two tensors have this name; give one of them another name.")
        if local_part(tensor).is_meta:
            raise CheckpointError(f"{where}: has no values (got a tensor on the meta device); fill it before a save.")
        self.index.sections[section][name] = tensors.entry_of(tensor, self.index, holders, where)
        self.found.tensors[section][name] = tensor

    def add_model(self, model: nn.Module, section: str) -> None:
        everyone, first = Mesh((self.index.world_size,)), Mesh((1,))
        found, others = model_state(model)
        if others:
            self.extra_states[extra_state(section)] = others
        ties = tied_names(model, found)
        parameters = {clean_name(name): p for name, p in unwrapped(model).named_parameters(remove_duplicate=False)}
        is_drifting = not gets_buffers_of_rank_0(model)
        self.begin(section)
        self.index.aliases[section] = ties
        for name, tensor in found.items():
            if name in ties:
                continue
            # Replicas of a buffer may differ (batch norm): rank 0 writes it alone, so that the result is not a mix.
            self.store(section, name, tensor, everyone if name in parameters else first, f"{section}: {name}")
            if is_drifting and name not in parameters and not isinstance(tensor, DTensor):
                self.found.buffers[f"{section}: {name}"] = tensor
        self.found.weights[section] = {
            name: tensor for name, tensor in self.found.tensors[section].items() if name in parameters
        }
        self.found.packed |= {(section, name) for name, parameter in parameters.items() if packed.holds_bits(parameter)}

    def add_optimizer(self, optimizer: Optimizer, number: int, names: Mapping[int, str]) -> None:
        """Add param groups and other values as JSON, and tensors to the index."""
        section, at = section_name("optim", number), ("optimizers", number)
        found = optimizers.describe(optimizer, names, section)
        self.begin(section)
        groups = [{"params": members, "settings": {}} for members, _ in found.groups]
        whole = {"is_whole": True} if found.is_whole else {}
        self.found.common["optimizers"].append({"groups": groups, "plain": {}, **whole})
        for position, (_, settings) in enumerate(found.groups):
            self.add((*at, "groups", position, "settings"), settings)
        for fqn, row in found.rows.items():
            for key, value in row.items():
                self.add((*at, "plain", fqn, str(key)), value, fqn not in found.sharded)
        for kind, found_there in (("globals", found.globals), ("extra", found.extra)):
            for key, value in found_there.items():
                self.add((*at, kind, key), value)

    def add(self, at: tuple[str | int, ...], value: Any, is_replicated: bool = False) -> None:
        """Add a value that may differ between ranks, with its tensors."""
        section, label = section_of(at), label_of(at)
        path = label if fqn_at(at) is None else label.removeprefix(f"{section}: ")
        holders = Mesh((1,)) if section == "objects" else Mesh((self.index.world_size,))
        plain: list[str] = []

        def store(name: str, item: Any) -> str | None:
            if not isinstance(item, torch.Tensor):
                return None
            if name != path:  # a path below the value's own
                name = values.unique_name(name, self.index.sections[section])
            self.store(section, name, item, holders, f"{section}: {name}" if section != "objects" else name)
            if not isinstance(item, DTensor):
                plain.append(name)
            return name

        try:
            encoded = values.encode(value, path, store)
        except RecursionError:
            raise CheckpointError(f"{label}: contains itself, or is nested too deeply to be saved.") from None
        if not isinstance(value, DTensor):
            self.found.items[label] = Item(at, encoded, section, tuple(plain), is_replicated)
        # A parameter's tensor is found by its name, `<fqn>/<key>`.
        if not (isinstance(value, torch.Tensor) and fqn_at(at) and "/" not in str(at[-1])):
            put(self.found.common, at, encoded)


def put(tree: Any, at: ItemPlace, value: Any) -> None:
    """Set the value at a place in a tree of dicts and lists. Missing dicts are created."""
    *inner, last = at
    for key in inner:
        tree = tree.setdefault(key, {}) if isinstance(tree, dict) else tree[key]
    tree[last] = value


def gets_buffers_of_rank_0(model: nn.Module) -> bool:
    """Whether DistributedDataParallel broadcasts rank 0's buffers in each forward, so that they cannot differ."""
    return any(bool(one.broadcast_buffers) for one in layers(model) if isinstance(one, DistributedDataParallel))


def tied_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """{further name of a parameter or buffer: its first name}. The same on all ranks."""
    inner = unwrapped(model)
    objects = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
    identity = {clean_name(name): id(item) for name, item in objects}
    canonical: dict[int, str] = {}
    ties = {}
    for name in names:
        if name in identity and canonical.setdefault(identity[name], name) != name:
            ties[name] = canonical[identity[name]]
    return ties
