"""The live objects of a training run, as tensors and plain values by name.

Tensors of models and optimizers are named by fqn (`<fqn>/exp_avg`), so neither the world size, nor the strategy, nor
the order of parameters matters to a checkpoint. Sections: `model`, `model_1`, ...; `optim`, `optim_1`, ...; and
`objects` for tensors inside the states of schedulers and registered objects.

What ranks may hold differently (everything that is not a tensor of a model, nor sharded) is captured as items, which
`apart` compares between ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardkit.checkpoint import optimizers, tensors, values
from shardkit.checkpoint.layout import Index, Kind, Mesh
from shardkit.distributed import random_state, xla
from shardkit.distributed.tensors import clean_name, unwrapped
from shardkit.errors import CheckpointError


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
    elsewhere: frozenset[int] = frozenset()
    """Numbers of the models that a hook has saved itself: they are in no section."""
    take: Callable[[Path], set[int]] | None = None
    """The user's load hooks: given the verified checkpoint, they load models themselves, and this gives their numbers.
    Every rank calls it."""


@dataclass(frozen=True)
class Item:
    """A value that ranks may hold differently: where it stands in `common`, as JSON, with its plain tensors."""

    at: tuple[str | int, ...]
    value: Any
    section: str
    tensors: tuple[str, ...]
    is_replicated: bool = False
    """Whether its parameter is held alike by all ranks: large tensors are then compared by a sample."""


@dataclass
class Captured:
    """A training state as it is now: tensors share memory with the live objects."""

    index: Index
    tensors: dict[str, dict[str, torch.Tensor]]
    common: dict[str, Any]
    own: dict[str, Any]
    items: dict[str, Item] = field(default_factory=dict)
    own_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """What this rank has differently from others, by `<section>:<name>`; see `apart`."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Buffers that each rank updates for itself, by `<section>: <name>`."""


def section_name(kind: str, number: int) -> str:
    """model, model_1, ...; optim, optim_1, ..."""
    return kind if number == 0 else f"{kind}_{number}"


def is_changed_by_steps_only(section: str, name: str) -> bool:
    """Whether a tensor is what an optimizer remembers of a parameter, which nothing but its steps changes in place."""
    return section.startswith("optim") and not optimizers.is_of_no_parameter(section, name)


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by fqn, sharing memory; sharded ones as DTensors, on XLA devices themselves:
    what is put into an alias there does not reach them."""
    found: dict[str, torch.Tensor] = {}
    is_xla = xla.is_started()
    # state_dict() first brings FSDP parameters back to their shards, whatever state the step left them in.
    for name, value in unwrapped(model).state_dict(keep_vars=is_xla).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{name}: extra state of a {type(value).__name__} cannot be saved; return tensors.")
        found[clean_name(name)] = value.detach() if value.requires_grad and not is_xla else value
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
    """The state now. Tensors share memory, values are copies. Of what is in the index, sharded tensors and those of
    models are the same on all ranks; the rest is in `items` as well."""
    taken = _Capture(Index(kind, world_size))
    for number, model in enumerate(live.models):
        if number not in live.elsewhere:
            taken.add_model(model, section_name("model", number))
    names = parameter_names(live.models)
    for number, optimizer in enumerate(live.optimizers):
        taken.add_optimizer(optimizer, number, names)
    taken.begin("objects")
    for name, item in live.objects.items():
        taken.add(name, ("objects", name), item.state_dict(), "objects", name, Mesh((1,)))
    loaders = {name: values.encode(it.state_dict(), name, _no_tensor) for name, it in live.loaders.items()}
    taken.index.sort()
    seed = live.seed if live.seed is not None else torch.initial_seed()
    common = {**taken.common, "loaders": loaders, "seed": seed}
    own = {"loaders": loaders, "rng": random_state.capture(rank)}
    return Captured(taken.index, taken.tensors, common, own, taken.items, buffers=taken.buffers)


def _no_tensor(path: str, value: Any) -> str | None:
    return None


class _Capture:
    """A capture under way."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.common: dict[str, Any] = {"optimizers": [], "objects": {}}
        self.items: dict[str, Item] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def begin(self, section: str) -> None:
        self.index.sections[section], self.index.aliases[section], self.tensors[section] = {}, {}, {}

    def store(self, section: str, name: str, tensor: torch.Tensor, holders: Mesh, where: str) -> None:
        self.index.sections[section][name] = tensors.entry_of(tensor, self.index, holders, where)
        self.tensors[section][name] = tensor

    def add_model(self, model: nn.Module, section: str) -> None:
        everyone, first = Mesh((self.index.world_size,)), Mesh((1,))
        found = model_tensors(model)
        ties = tied_names(model, found)
        parameters = {clean_name(name) for name, _ in unwrapped(model).named_parameters(remove_duplicate=False)}
        is_drifting = not gets_buffers_of_rank_0(model)
        self.begin(section)
        self.index.aliases[section] = ties
        for name, tensor in found.items():
            if name in ties:
                continue
            # Replicas of a buffer may drift apart (batch norm); rank 0's is written, and never a mix.
            self.store(section, name, tensor, everyone if name in parameters else first, f"{section}: {name}")
            if is_drifting and name not in parameters and not isinstance(tensor, DTensor):
                self.buffers[f"{section}: {name}"] = tensor

    def add_optimizer(self, optimizer: Optimizer, number: int, names: Mapping[int, str]) -> None:
        """Param groups and what is no tensor as JSON; tensors into the index."""
        section, everyone, at = section_name("optim", number), Mesh((self.index.world_size,)), ("optimizers", number)
        found = optimizers.describe(optimizer, names, section)
        self.begin(section)
        groups = [{"params": members, "settings": {}} for members, _ in found.groups]
        whole = {"is_whole": True} if found.is_whole else {}
        self.common["optimizers"].append({"groups": groups, "plain": {}, **whole})
        for position, (_, settings) in enumerate(found.groups):
            label = f"{section}.param_groups[{position}]"
            self.add(label, (*at, "groups", position, "settings"), settings, section, label, everyone)
        for fqn, row in found.rows.items():
            for key, value in row.items():
                path, place = f"{fqn}/{key}", (*at, "plain", fqn, str(key))
                self.add(f"{section}: {path}", place, value, section, path, everyone, fqn not in found.sharded)
        for kind, found_there in (("globals", found.globals), ("extra", found.extra)):
            for key, value in found_there.items():
                path = f"{section}.{kind}.{key}"
                self.add(path, (*at, kind, key), value, section, path, everyone)

    def add(
        self,
        label: str,
        at: tuple[str | int, ...],
        value: Any,
        section: str,
        path: str,
        holders: Mesh,
        is_replicated: bool = False,
    ) -> None:
        """Note a value that ranks may hold differently, with the tensors inside."""
        plain: list[str] = []

        def store(name: str, item: Any) -> str | None:
            if not isinstance(item, torch.Tensor):
                return None
            self.store(section, name, item, holders, f"{section}: {name}" if section != "objects" else name)
            if not isinstance(item, DTensor):
                plain.append(name)
            return name

        encoded = values.encode(value, path, store)
        if not isinstance(value, DTensor):
            self.items[label] = Item(at, encoded, section, tuple(plain), is_replicated)
        if not (isinstance(value, torch.Tensor) and fqn_at(at)):  # such a tensor is found by its name
            put(self.common, at, encoded)


def fqn_at(at: Sequence[str | int]) -> str | None:
    """The parameter of which an item at this place is kept; None where it is of none."""
    return str(at[3]) if len(at) > 3 and at[2] == "plain" else None


def put(tree: Any, at: Sequence[str | int], value: Any) -> None:
    """Set what stands at a place of a tree of dicts and lists; dicts on the way are made."""
    *inner, last = at
    for key in inner:
        tree = tree.setdefault(key, {}) if isinstance(tree, dict) else tree[key]
    tree[last] = value


def gets_buffers_of_rank_0(model: nn.Module) -> bool:
    """Whether DistributedDataParallel gives rank 0's buffers to all at each forward: those count, and none drifts."""
    if isinstance(model, DistributedDataParallel):
        return bool(model.broadcast_buffers)
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")
    return isinstance(inner, nn.Module) and gets_buffers_of_rank_0(inner)


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
