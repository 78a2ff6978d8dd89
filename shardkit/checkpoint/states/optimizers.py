"""Saving and loading the state of a torch optimizer, with parameters named by fqn instead of numbered.

If an optimizer's class overrides `state_dict` or `load_state_dict`, these are called, since some classes keep more
state than `state` and `param_groups` (wrapped optimizers, slow weights). Parameter numbers in the dict, also in nested
dicts, are saved as names, and turned into numbers in the order of the loading optimizer. Where a class steps another
optimizer (SAM's base optimizer) and does not override `state_dict`, torch would lose the state of that one: it is saved
and restored here.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardkit import values
from shardkit.checkpoint.files.layout import TensorEntry
from shardkit.checkpoint.states import tensors
from shardkit.checkpoint.states.fill import Saved, entry_of_parameter
from shardkit.checkpoint.states.numbered import numbers_of, sources, with_names, with_numbers
from shardkit.distributed.tensors import local_part
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.values import ParameterName

log = get_logger(__name__)

# Settings of the implementation, and the names that belong to `params`: no state, so a load keeps those of the run.
RUN_SETTINGS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
_STANDARD = ("state", "param_groups")


@dataclass(frozen=True)
class OptimizerDescription:
    """An optimizer's whole state: (fqns, settings) of each group, and `rows`, the state of each parameter by fqn."""

    groups: list[tuple[list[str], dict[str, Any]]]
    rows: dict[str, dict[str, Any]]
    globals: dict[str, Any]
    """Entries of `optimizer.state` with string keys, which belong to no parameter."""
    extra: dict[str, Any]
    """Further keys of its overridden state_dict(), or the states of the optimizers that it steps, by attribute."""
    sharded: set[str]
    """The sharded parameters."""
    is_whole: bool = False
    """Whether `extra` is the complete overridden state_dict(), because that does not have torch's format."""


def describe(optimizer: Optimizer, names: Mapping[int, str], section: str) -> OptimizerDescription:
    """The current state. Tensors share memory. Raises CheckpointError if a parameter is in no prepared model."""
    members = [
        [named(parameter, names, f"{section}.param_groups[{number}]") for parameter in group["params"]]
        for number, group in enumerate(optimizer.param_groups)
    ]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = {names[id(parameter)] for parameter in parameters if _is_sharded(parameter)}
    if _overrides(optimizer, "state_dict"):
        return _described_by_itself(optimizer, members, sharded, section)
    rows = {
        name: _with_text_keys(optimizer.state.get(parameter, {}), f"{section}: state of {name}")
        for name, parameter in ((names[id(parameter)], parameter) for parameter in parameters)
    }
    rest = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    groups = [(those, _settings(group)) for those, group in zip(members, optimizer.param_groups, strict=True)]
    inner = {name: _inner_state(one, names) for name, one in inner_of(optimizer).items()}
    return OptimizerDescription(groups, rows, _with_text_keys(rest, f"{section}: state"), inner, sharded)


def inner_of(optimizer: Optimizer) -> dict[str, Optimizer]:
    """The optimizers that this one steps, by attribute: those that have state of their own for its parameters, which
    its state_dict() lacks."""
    if _overrides(optimizer, "state_dict"):
        return {}
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        name: one
        for name, one in vars(optimizer).items()
        if isinstance(one, Optimizer)
        and not (_overrides(one, "state_dict") or _overrides(one, "load_state_dict"))
        and one.state is not optimizer.state
        and own >= {id(parameter) for group in one.param_groups for parameter in group["params"]}
    }


def _inner_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Its state_dict(), with names in place of numbers."""
    members = members_of(optimizer, names)
    state = optimizer.state_dict()
    state["param_groups"] = [_settings(group) | {"params": group["params"]} for group in state["param_groups"]]
    return dict(with_names(state, members))


def named(parameter: torch.Tensor, names: Mapping[int, str], where: str) -> str:
    """The fqn of an optimizer's parameter. Raises CheckpointError if no prepared model has it."""
    if id(parameter) not in names:
        shape = list(parameter.shape)
        raise CheckpointError(
            f"{where}: a parameter of shape {shape} is in no prepared model; prepare its model too, or, if it was "
            "removed from its model, leave it out of the optimizer's param_groups."
        )
    return names[id(parameter)]


def is_of_no_parameter(section: str, name: str) -> bool:
    """Whether a saved tensor of an optimizer belongs to no parameter: a setting such as a learning rate, or state of
    the optimizer as a whole."""
    return name.startswith((f"{section}.param_groups[", f"{section}.globals.", f"{section}.extra."))


def _is_sharded(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and not all(placement.is_replicate() for placement in parameter.placements)


def _overrides(optimizer: Optimizer, method: str) -> bool:
    """Whether it does more than torch's method: by its class, or by hooks."""
    hooks = [vars(optimizer).get(f"_optimizer_{method}_{when}_hooks") for when in ("pre", "post")]
    is_own = method in vars(optimizer) or getattr(type(optimizer), method, None) is not getattr(Optimizer, method)
    return is_own or any(hooks)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in RUN_SETTINGS}


def _with_text_keys(found: Mapping[Any, Any], where: str) -> dict[str, Any]:
    for key in found:
        if not isinstance(key, str):
            raise CheckpointError(f"{where}[{key!r}]: a key of type {type(key).__name__} cannot be saved; use strings.")
    return dict(found)


def _described_by_itself(
    optimizer: Optimizer, members: list[list[str]], sharded: set[str], section: str
) -> OptimizerDescription:
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":  # only one rank at a time can have its whole state
        raise CheckpointError(
            f"{section}: the state of a ZeroRedundancyOptimizer cannot be saved or loaded; give prepare its inner "
            "optimizer, with strategy SHARD_GRAD_OP, which shards the state as well, or NO_SHARD."
        )
    state = _with_text_keys(optimizer.state_dict(), f"{section}: state_dict()")
    numbers = numbers_of(state, members)
    if numbers is None:
        bare: list[tuple[list[str], dict[str, Any]]] = [(those, {}) for those in members]
        return OptimizerDescription(bare, {}, {}, with_names(state, members), sharded, is_whole=True)
    rows = {
        numbers[key]: _with_text_keys(row, f"{section}: state of {numbers[key]}")
        for key, row in state["state"].items()
        if key in numbers
    }
    rest = {key: value for key, value in state["state"].items() if key not in numbers}
    groups = [(those, _settings(group)) for those, group in zip(members, state["param_groups"], strict=True)]
    extra = {key: with_names(value, members) for key, value in state.items() if key not in _STANDARD}
    return OptimizerDescription(groups, rows, _with_text_keys(rest, f"{section}: state"), extra, sharded)


# ---- loading ----


def members_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """The fqns of each group's parameters."""
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def parameters_by_name(optimizer: Optimizer, names: Mapping[int, str], section: str) -> dict[str, torch.Tensor]:
    """fqn -> parameter, in the order of the groups."""
    return {
        named(parameter, names, section): parameter for group in optimizer.param_groups for parameter in group["params"]
    }


def restore(
    optimizer: Optimizer,
    names: Mapping[int, str],
    section: str,
    state: Mapping[str, Any],
    saved: Saved,
    left_out: Collection[str] = (),
) -> None:
    """Load the optimizer's state; `state` is its entry in common.json. Existing tensors are filled in place.

    The state of the parameters in `left_out` is reset. If this raises, the optimizer's state is incomplete.
    """
    loading = _Loading(optimizer, names, section, state, saved, left_out)
    now = describe(optimizer, names, section) if _overrides(optimizer, "load_state_dict") else None
    expected = inner_of(optimizer) if now is None else now.extra
    missing = [key for key in expected if key not in state.get("extra", {})]
    is_other_form = now is not None and now.is_whole != state.get("is_whole", False)
    if missing or is_other_form:  # saved by a shardkit that did not call state_dict(), or left out inner optimizers
        log.warning(
            "checkpoint: %s: the checkpoint has no %s of this optimizer; it stays unchanged.",
            section,
            ", ".join(missing) or "state_dict()",
        )
    if now is None or missing or is_other_form:
        loading.in_place()
    else:
        loading.by_itself(now)


def _tensors_of(now: OptimizerDescription, section: str) -> dict[str, torch.Tensor]:
    """The tensors that belong to no parameter, by their names in a checkpoint."""
    found: dict[str, torch.Tensor] = {}

    def note(path: str, value: Any) -> str | None:
        if not isinstance(value, torch.Tensor):
            return None
        path = values.unique_name(path, found)
        found[path] = value
        return path

    for kind, entries in (("globals", now.globals), ("extra", now.extra)):
        for key, value in entries.items():
            values.encode(value, f"{section}.{kind}.{key}", note)
    return found


@dataclass(frozen=True)
class _Loading:
    """An optimizer whose state is being loaded; as the arguments of `restore`."""

    optimizer: Optimizer
    names: Mapping[int, str]
    section: str
    state: Mapping[str, Any]
    saved: Saved
    left_out: Collection[str]

    @cached_property
    def mine(self) -> dict[str, torch.Tensor]:
        """Its parameters by name."""
        return parameters_by_name(self.optimizer, self.names, self.section)

    @cached_property
    def members(self) -> list[list[str]]:
        return members_of(self.optimizer, self.names)

    @cached_property
    def unsaved(self) -> set[str]:
        """The parameters that the saved optimizer does not have: their state stays as it is."""
        return self.mine.keys() - {fqn for group in self.state["groups"] for fqn in group["params"]}

    @cached_property
    def bare(self) -> dict[str, list[str]]:
        """The keys of the state tensors of each parameter."""
        referenced = {*values.tensors_in(dict(self.state))}
        found: dict[str, list[str]] = {fqn: [] for fqn in self.mine}
        for path in self.saved.names(self.section):
            fqn, _, key = path.rpartition("/")
            if path not in referenced and fqn in self.mine:
                found[fqn].append(key)
        return found

    def in_place(self) -> None:
        groups = self.optimizer.param_groups
        for group, settings in zip(groups, self._saved_settings(), strict=True):
            group.update(settings)
        group_of = {fqn: group for those, group in zip(self.members, groups, strict=True) for fqn in those}
        for fqn, parameter in self.mine.items():
            if fqn in self.unsaved:
                continue
            before = self.optimizer.state.pop(parameter, {})  # frees tensors at once that are not reused
            row = self._row(fqn, before if isinstance(before, Mapping) else {}, group_of[fqn])
            if row:
                self.optimizer.state[parameter] = row
        for key, value in self._decoded("globals", {}).items():
            self.optimizer.state[key] = value  # type: ignore[index]
        _settle(self.optimizer)
        if inner_of(self.optimizer):
            self._fill_inner(with_numbers(self._decoded("extra", {}), self.members))

    def by_itself(self, now: OptimizerDescription) -> None:
        """Load through its overridden load_state_dict(). All tensors are new, since it may still use the old ones."""
        live = _tensors_of(now, self.section)
        state = with_numbers(self._decoded("extra", live), self.members)
        inner = {name: state.pop(name) for name in inner_of(self.optimizer)}
        if not now.is_whole:
            state = self._in_torch_form(now, live) | state
        self.optimizer.load_state_dict(state)
        self._fill_inner(inner)

    def _fill_inner(self, states: Mapping[str, Any]) -> None:
        """Gives the optimizers that this one steps their saved states. Their param groups may be those of this one."""
        parameters = [*self.mine.items()]
        for name, inner in inner_of(self.optimizer).items():
            if name not in states:
                continue
            for group, saved in zip(inner.param_groups, states[name]["param_groups"], strict=False):
                group.update(_settings(saved))
            for fqn, parameter in parameters:
                if fqn not in self.unsaved:
                    inner.state.pop(parameter, None)
            for number, row in states[name]["state"].items():
                fqn, parameter = parameters[number]
                if fqn not in self.left_out:
                    inner.state[parameter] = row
            _settle(inner)

    def _in_torch_form(self, now: OptimizerDescription, live: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        order = {fqn: number for number, fqn in enumerate(self.mine)}
        rows: dict[Any, Any] = {}
        groups = []
        for those, group, settings in zip(
            self.members, self.optimizer.param_groups, self._saved_settings(), strict=True
        ):
            groups.append({**group, **settings, "params": [order[fqn] for fqn in those]})
            for fqn in those:
                is_kept = fqn in self.unsaved
                rows[order[fqn]] = now.rows.get(fqn, {}) if is_kept else self._row(fqn, {}, groups[-1])
        rows = {number: row for number, row in rows.items() if row} | self._decoded("globals", live)
        return {"state": rows, "param_groups": groups}

    def _saved_settings(self) -> list[dict[str, Any]]:
        """The saved settings of each live group. Empty if there are none."""
        saved = self.state["groups"]
        found = []
        loaded: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, group in zip(sources(self.members, saved), self.optimizer.param_groups, strict=True):
            settings = {} if source is None else _settings(saved[source]["settings"])
            found.append(values.decode(settings, partial(self._setting, group, loaded)))
        return found

    def _setting(
        self, group: Mapping[str, Any], loaded: list[tuple[torch.Tensor, torch.Tensor]], name: str
    ) -> torch.Tensor:
        """A saved setting of a group. Groups that share a tensor go on sharing one: a schedule may set it once for all.
        `loaded`: the live tensors of the settings so far, each with the one that replaces it."""
        now = group.get(name.rpartition(".")[2])
        if not isinstance(now, torch.Tensor):
            return self.saved.new(self.section, name)
        new = self.saved.new(self.section, name, None, now.device)
        for live, other in loaded:
            if live is now and other.dtype == new.dtype and torch.equal(other, new):
                return other
        loaded.append((now, new))
        return new

    def _decoded(self, kind: str, live: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The saved "globals" or "extra", with tensors sharded as the current ones are, or as their parameter is."""

        def load(name: str) -> torch.Tensor:
            fqn = next((fqn for fqn in self.mine if f"[{ParameterName(fqn)!r}]" in name), None)
            like = live.get(name, None if fqn is None else self.mine[fqn])
            device = None if like is None else local_part(like).device
            return self.saved.new(self.section, name, like, device)

        return {key: values.decode(value, load) for key, value in self.state.get(kind, {}).items()}

    def _row(self, fqn: str, before: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter, in the tensors of `before` where shape and dtype match, else in new ones."""
        if fqn in self.left_out:
            return {}
        parameter = self.mine[fqn]
        row = {}
        for key, value in self.state["plain"].get(fqn, {}).items():
            device = _device_of(key, parameter, group)
            row[key] = values.decode(value, partial(self._tensor_in_value, parameter, device))
        for key in self.bare[fqn]:
            row[key] = self._tensor(fqn, key, before.get(key), group)
        return row

    def _tensor_in_value(self, parameter: torch.Tensor, device: torch.device | None, name: str) -> torch.Tensor:
        return self.saved.new(self.section, name, parameter, device)

    def _tensor(self, fqn: str, key: str, before: Any, group: Mapping[str, Any]) -> torch.Tensor:
        name, parameter = f"{fqn}/{key}", self.mine[fqn]
        entry = self.saved.entry(self.section, name)
        if _can_hold(entry, before):
            self.saved.fill(self.section, name, before)
            return before
        is_whole = not isinstance(parameter, DTensor)
        like = parameter if is_whole or self._is_kept_as_parameter(fqn, key, entry, before) else None
        return self.saved.new(self.section, name, like, _device_of(key, parameter, group))

    def _is_kept_as_parameter(self, fqn: str, key: str, entry: TensorEntry, before: Any) -> bool:
        """Whether a state tensor is sharded like its parameter, now or when it was saved."""
        if isinstance(before, torch.Tensor) and tuple(before.shape) == entry.shape:
            return isinstance(before, DTensor)
        if key == "step" or entry.shape != tuple(self.mine[fqn].shape):
            return False
        was = entry_of_parameter(self.saved.index, fqn)
        return was is None or not was.is_sharded or entry.is_sharded


def _settle(optimizer: Optimizer) -> None:
    """What torch's load_state_dict does at its end: classes convert a state of another version there, or of the class
    that they derive from. AdamW, for one, sets the decay that is its own in groups of Adam."""
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _can_hold(entry: TensorEntry, before: Any) -> bool:
    """Whether a saved tensor can be read into an existing one."""
    if not isinstance(before, torch.Tensor) or tuple(before.shape) != entry.shape:
        return False
    return tensors.DTYPES.get(before.dtype) == entry.dtype and tensors.has_memory(before)


def _device_of(key: str, parameter: torch.Tensor, group: Mapping[str, Any]) -> torch.device | None:
    """The device of this state in torch's optimizers: that of the parameter; for `step` the CPU, unless fused or
    capturable."""
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return None
    return local_part(parameter).device
