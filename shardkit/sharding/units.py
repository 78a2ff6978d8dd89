"""A live model cut into FSDP units: which module manages which parameters, and what stays replicated.

`shardkit.model.units` decides by names and sizes alone; here the decision meets what only a live model shows:
parameters shared between modules, several dtypes in one unit, parameters that cannot be split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from shardkit.config.schema import FsdpConfig, WrapPolicy
from shardkit.errors import ModelError
from shardkit.model.live import tree_of
from shardkit.model.tree import ModuleNode
from shardkit.model.units import (
    candidates_text,
    children_first,
    missing_blocks,
    repeated_classes,
    select_units,
)


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and freed together. The root's fqn is "".

    `parameters` are those that the unit manages, without those of units inside it; `keeps_dtype` says that mixed
    precision leaves it alone (batch norm, an odd dtype).
    """

    fqn: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    keeps_dtype: bool = False


@dataclass
class Cut:
    """What `cut` found: units children first with the root last, ignored modules, parameters left on every rank.

    `remark` is for the user, where the cut is not the one that the configuration names.
    """

    units: list[Unit]
    ignored: dict[str, nn.Module] = field(default_factory=dict)
    replicated: dict[str, nn.Parameter] = field(default_factory=dict)
    remark: str | None = None

    def owner(self, parameter: nn.Parameter) -> str | None:
        """Fqn of the unit that manages the parameter; None where it stays replicated."""
        for unit in self.units:
            if any(parameter is mine for mine in unit.parameters.values()):
                return unit.fqn
        return None


def blocks(model: nn.Module, config: FsdpConfig) -> list[nn.Module]:
    """The repeated blocks that activation checkpointing and compilation work on, none inside another.

    The named classes under TRANSFORMER_BASED_WRAP, else what repeats in the model. Raises ModelError if nothing does.
    """
    tree = tree_of(model)
    names = config.transformer_layer_cls_to_wrap if config.auto_wrap_policy is WrapPolicy.TRANSFORMER_BASED_WRAP else []
    names = names or repeated_classes(tree)
    if not names:
        raise ModelError(
            f"model: {tree.class_name} has no repeated block class to recompute or compile; "
            f"name one in fsdp_transformer_layer_cls_to_wrap. {candidates_text(tree)}"
        )
    fqns = set(select_units(tree, FsdpConfig(transformer_layer_cls_to_wrap=names)))
    outermost = [fqn for fqn in sorted(fqns) if not any(fqn.startswith(f"{other}.") for other in fqns)]
    modules = dict(model.named_modules())
    return list({id(modules[fqn]): modules[fqn] for fqn in outermost if fqn in modules}.values())


def cut(model: nn.Module, config: FsdpConfig, param_dtype: torch.dtype | None = None) -> Cut:
    """Which module manages which parameter. `param_dtype` is the compute dtype, None without mixed precision.

    Raises ModelError with everything that cannot be sharded, in words.
    """
    tree = tree_of(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    ignored = _ignored_modules(modules, config.ignored_modules)
    replicated = _replicated(model, ignored)
    chosen = {fqn for fqn in select_units(tree, config) if not _inside(fqn, ignored)}
    apart = {fqn for fqn in _kept_apart(modules, param_dtype) if not _inside(fqn, ignored)}
    fixed = {id(p) for p in replicated.values()}
    chosen = _without_aliases(chosen | apart, modules)
    chosen |= (odd := _odd_dtypes(tree, chosen, modules, fixed))
    chosen = _dissolve_for_shared(model, chosen, modules, fixed)
    owners = _owners(model, chosen, modules, fixed)
    units = [
        Unit(fqn, modules[fqn], owners.get(fqn, {}), fqn in apart or fqn in odd)
        for fqn in [*children_first(tree, chosen), ""]
    ]
    _refuse_mixed_dtypes(units)
    return Cut(units, ignored, replicated, missing_blocks(tree, config))


def _ignored_modules(modules: dict[str, nn.Module], pattern: str | None) -> dict[str, nn.Module]:
    """Modules whose name matches, outermost only."""
    if not pattern:
        return {}
    try:
        matches = re.compile(pattern).fullmatch
    except re.error as error:
        raise ModelError(
            f"fsdp_ignored_modules: not a regular expression (got {pattern!r}: {error}); correct it."
        ) from None
    names = [fqn for fqn in modules if fqn and matches(fqn)]
    if not names:
        raise ModelError(
            f"fsdp_ignored_modules: no module name matches in full (got {pattern!r}); "
            f"names look like {', '.join(list(modules)[1:4])}."
        )
    return {fqn: modules[fqn] for fqn in names if not any(fqn.startswith(f"{other}.") for other in names)}


def _replicated(model: nn.Module, ignored: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters that no rank splits: those of ignored modules, and those without a dimension."""
    of_ignored = {id(p) for module in ignored.values() for p in module.parameters()}
    return {fqn: p for fqn, p in model.named_parameters() if p.dim() == 0 or id(p) in of_ignored}


def _inside(fqn: str, roots: dict[str, nn.Module]) -> bool:
    return any(fqn == root or fqn.startswith(f"{root}.") for root in roots)


def _kept_apart(modules: dict[str, nn.Module], param_dtype: torch.dtype | None) -> list[str]:
    """Norms with running statistics: their statistics are fp32, so under a lower dtype they compute in fp32."""
    if param_dtype in (None, torch.float32):
        return []
    return [fqn for fqn, module in modules.items() if fqn and isinstance(module, nn.modules.batchnorm._NormBase)]


def _without_aliases(fqns: set[str], modules: dict[str, nn.Module]) -> set[str]:
    """One fqn a module, where a module is registered under several."""
    order = [fqn for fqn in modules if fqn in fqns]
    return set({id(modules[fqn]): fqn for fqn in reversed(order)}.values())


def _paths(model: nn.Module) -> dict[int, list[str]]:
    """Module fqns at which each parameter occurs, by id of the parameter; a module that occurs twice counts twice."""
    found: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(fqn.rpartition(".")[0])
    return found


def _chain(path: str, units: dict[int, str], modules: dict[str, nn.Module]) -> list[str]:
    """Units around a module, innermost first, the root last; by identity, so that aliases lead to the same unit."""
    chain = []
    while path:
        if (unit := units.get(id(modules[path]))) is not None:
            chain.append(unit)
        path = path.rpartition(".")[0]
    return [*chain, ""]


def _common(chains: list[list[str]]) -> str:
    """The innermost unit that is in every chain."""
    return next(unit for unit in chains[0] if all(unit in chain for chain in chains))


def _dissolve_for_shared(
    model: nn.Module, chosen: set[str], modules: dict[str, nn.Module], fixed: set[int]
) -> set[str]:
    """Units such that every shared parameter occurs directly in the innermost unit around all its occurrences.

    fully_shard finds a parameter only outside of the units below; where each occurrence lies in one, the smallest
    of these goes up into the common unit.
    """
    numel = {fqn: sum(p.numel() for p in modules[fqn].parameters()) for fqn in chosen}
    for identity, paths in _paths(model).items():
        if len(paths) < 2 or identity in fixed:
            continue
        units = {id(modules[fqn]): fqn for fqn in chosen}
        chains = [_chain(path, units, modules) for path in paths]
        common = _common(chains)
        below = [chain[: chain.index(common)] for chain in chains]
        if all(below):
            sizes = [sum(numel[fqn] for fqn in inner) for inner in below]
            chosen = chosen - set(below[sizes.index(min(sizes))])
    return chosen


def _owners(
    model: nn.Module, chosen: set[str], modules: dict[str, nn.Module], fixed: set[int]
) -> dict[str, dict[str, nn.Parameter]]:
    """Parameters by the unit that manages them; a shared one belongs to the unit around all its occurrences."""
    paths = _paths(model)
    units = {id(modules[fqn]): fqn for fqn in chosen}
    owners: dict[str, dict[str, nn.Parameter]] = {}
    for fqn, parameter in model.named_parameters():
        if id(parameter) not in fixed:
            unit = _common([_chain(path, units, modules) for path in paths[id(parameter)]])
            owners.setdefault(unit, {})[fqn] = parameter
    return owners


def _odd_dtypes(tree: ModuleNode, chosen: set[str], modules: dict[str, nn.Module], fixed: set[int]) -> set[str]:
    """Modules that become units because their trainable parameters have another dtype than most around them.

    fully_shard reduces the gradients of a unit in one buffer, so one unit has one dtype.
    """
    found: set[str] = set()

    def own(fqn: str) -> list[nn.Parameter]:
        return [
            p for p in modules[fqn]._parameters.values() if p is not None and p.requires_grad and id(p) not in fixed
        ]

    def area(node: ModuleNode) -> Iterator[str]:
        yield node.fqn
        for child in node.children:
            if child.fqn not in chosen:
                yield from area(child)

    for node in tree.walk():
        if node.fqn and node.fqn not in chosen:
            continue
        sizes: Counter[torch.dtype] = Counter()
        members = list(area(node))
        for fqn in members:
            for parameter in own(fqn):
                sizes[parameter.dtype] += parameter.numel()
        if len(sizes) > 1:
            common = sizes.most_common(1)[0][0]
            odd = [fqn for fqn in members if own(fqn) and all(p.dtype != common for p in own(fqn))]
            found.update(fqn for fqn in odd if fqn != node.fqn)
    return found


def _refuse_mixed_dtypes(units: list[Unit]) -> None:
    problems = []
    for unit in units:
        dtypes: dict[str, str] = {}
        for fqn, parameter in unit.parameters.items():
            if parameter.requires_grad:
                dtypes.setdefault(str(parameter.dtype).removeprefix("torch."), fqn)
        if len(dtypes) > 1:
            listed = ", ".join(f"{fqn} is {dtype}" for dtype, fqn in dtypes.items())
            problems.append(
                f"model: unit {unit.fqn or 'root'} has trainable parameters of several dtypes (got {listed}); "
                "convert the model to one dtype, or name the odd modules in fsdp_ignored_modules."
            )
    if problems:
        raise ModelError("\n".join(problems))
