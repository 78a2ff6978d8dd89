"""Loads the saved state of a torch optimizer.

If an optimizer's class overrides `load_state_dict`, this is called, with numbers in the order of its own parameters in
place of the saved names; else existing tensors are filled in place. The optimizers that it steps (SAM's base optimizer)
get their states too.
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
from shardkit.checkpoint.states.numbered import sources, with_numbers
from shardkit.checkpoint.states.optimizers import (
    OptimizerDescription,
    describe,
    inner_of,
    members_of,
    overrides,
    parameters_by_name,
    settings_of,
)
from shardkit.distributed.host_memory import device_of_state
from shardkit.distributed.tensors import local_part
from shardkit.log import get_logger
from shardkit.values import ParameterName

log = get_logger(__name__)


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
    now = describe(optimizer, names, section) if overrides(optimizer, "load_state_dict") else None
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
                group.update(settings_of(saved))
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
            settings = {} if source is None else settings_of(saved[source]["settings"])
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
        dims = len(entry.shape)
        device = device_of_state(self.optimizer, parameter, dims) if dims else _device_of(key, parameter, group)
        return self.saved.new(self.section, name, like, device)

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
    """The device of a number of the state in torch's optimizers: that of the parameter; for `step` the CPU, unless
    fused or capturable."""
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return None
    return local_part(parameter).device
