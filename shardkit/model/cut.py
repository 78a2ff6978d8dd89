"""How a model is cut into FSDP units: decided here alone, on the module tree, for training, simulation and formulas."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

from shardkit.config.schema import Dtype, FsdpConfig, WrapPolicy
from shardkit.errors import ModelError
from shardkit.model.blocks import block_classes, candidates_text, repeated_classes
from shardkit.model.tree import ModuleNode, Parameter

CALLS_NO_CHILD = {"MultiheadAttention", "TransformerEncoderLayer"}  # the latter in evaluation


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and freed together. The root's fqn is "".

    `parameters` names those that the unit manages, without those of units inside it, each by its first name.
    `keeps_dtype`: mixed precision leaves it alone (batch norm, an odd dtype).
    """

    fqn: str
    parameters: tuple[str, ...]
    keeps_dtype: bool = False


@dataclass(frozen=True)
class Cut:
    """Units, children first and the root last; modules that are not sharded; parameters that every rank holds whole.

    `remark` is for the user, where the cut is not the one that the configuration names.
    """

    units: tuple[Unit, ...]
    ignored: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    remark: str | None = None

    @cached_property
    def owner(self) -> dict[str, str]:
        """Fqn of the unit that manages each sharded parameter."""
        return {name: unit.fqn for unit in self.units for name in unit.parameters}

    def __str__(self) -> str:
        lines = [f"{unit.fqn or 'root'}: {', '.join(unit.parameters)}" for unit in self.units]
        return "\n".join([*lines, *(f"{name}: on every rank" for name in self.replicated)])


def whole(tree: ModuleNode) -> Cut:
    """One unit, the root: what DDP and a single process have."""
    return Cut((Unit("", tuple(name for name, _ in tree.owned())),))


def cut(tree: ModuleNode, config: FsdpConfig, compute: Dtype | None = None) -> Cut:
    """Which module manages which parameter. `compute` is the dtype of mixed precision, None without.

    The tree has the dtypes that training starts with (see `as_trained`). Raises ModelError with everything that cannot
    be sharded.
    """
    area = _Area(tree, _ignored(tree, config.ignored_modules))
    chosen = {fqn for fqn in select_units(tree, config) if not area.is_ignored(fqn)}
    apart = {node.fqn for node in tree.walk() if compute not in (None, "fp32") and _is_apart(node, area)}
    chosen = {area.first_name[fqn] for fqn in chosen | apart}
    odd = _odd_dtypes(area, chosen)
    chosen = _dissolve_for_shared(area, chosen | odd)
    owners: dict[str, list[str]] = {}
    for name, paths in area.occurrences.items():
        owners.setdefault(_common([area.chain(path, chosen) for path in paths]), []).append(name)
    order = [*children_first(tree, chosen), ""]
    units = tuple(Unit(fqn, tuple(owners.get(fqn, ())), fqn in apart or fqn in odd) for fqn in order)
    _refuse_mixed_dtypes(units, area.parameters)
    return Cut(units, area.ignored, area.replicated, missing_blocks(tree, config))


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """The dim along which a parameter of this shape is split over that many ranks: 0, its last pieces shorter or empty.

    Where dim 0 has fewer rows than there are ranks (stacked experts, LoRA's matrices), the first other dim that they
    divide evenly, as fully_shard demands of it; there every rank holds an equal part.
    """
    if not shape or not 0 < shape[0] < shards:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % shards == 0), 0)


def block_names(tree: ModuleNode, config: FsdpConfig) -> list[str]:
    """The repeated blocks that activation checkpointing and compilation work on, none inside another.

    The named classes under TRANSFORMER_BASED_WRAP, else what repeats in the model. Raises ModelError if nothing does.
    """
    names = config.transformer_layer_cls_to_wrap if config.auto_wrap_policy is WrapPolicy.TRANSFORMER_BASED_WRAP else []
    names = names or repeated_classes(tree)
    if not names:
        raise ModelError(
            f"model: {tree.class_name} has no repeated block class to recompute, offload or compile; "
            f"name one in fsdp_transformer_layer_cls_to_wrap. {candidates_text(tree)}"
        )
    aliases = {node.fqn for node in tree.walk() if node.alias_of}
    return outermost([fqn for fqn in sorted(_by_class(tree, names)) if fqn not in aliases])


def as_trained(tree: ModuleNode, compute: Dtype | None) -> ModuleNode:
    """The tree with the dtypes that parameters have when training starts; `compute` is that of mixed precision."""
    if compute is None:
        return tree
    return replace(
        tree,
        parameters=tuple(replace(p, dtype=trained_dtype(p.dtype, p.trainable)) for p in tree.parameters),
        children=tuple(as_trained(child, compute) for child in tree.children),
    )


def trained_dtype(dtype: str, is_trainable: bool) -> str:
    """What a parameter has under mixed precision: a trainable 16-bit one is kept in fp32 for the optimizer."""
    return "float32" if is_trainable and dtype in ("float16", "bfloat16") else dtype


def select_units(root: ModuleNode, config: FsdpConfig) -> list[str]:
    """Fqns of the modules that become units of their own, children before parents; the root is one always, unlisted.

    By class without a class named: those that repeat in the model, or by size where none does (see `missing_blocks`).
    Raises ModelError where a named class is not in the model, with the model's candidates.
    """
    match config.auto_wrap_policy:
        case WrapPolicy.NO_WRAP:
            return []
        case WrapPolicy.SIZE_BASED_WRAP:
            return _by_size(root, config.min_num_params)
        case WrapPolicy.TRANSFORMER_BASED_WRAP:
            names = config.transformer_layer_cls_to_wrap or repeated_classes(root)
            return _by_class(root, names) if names else _by_size(root, config.min_num_params)


def missing_blocks(root: ModuleNode, config: FsdpConfig) -> str | None:
    """The sentence for a model that was to be cut by class, with no class named and none that repeats; else None."""
    by_class = config.auto_wrap_policy is WrapPolicy.TRANSFORMER_BASED_WRAP
    if not by_class or config.transformer_layer_cls_to_wrap or repeated_classes(root):
        return None
    return (
        f"fsdp_auto_wrap_policy: no block class repeats in the model ({root.class_name}), so it is cut by size: units "
        f"of at least {config.min_num_params:,} parameters (fsdp_min_num_params), or one unit."
    ) + (f" {candidates_text(root)}" if block_classes(root) else "")


def _by_class(root: ModuleNode, names: Sequence[str]) -> list[str]:
    present = {node.class_name for node in root.walk()}
    missing = [name for name in names if name not in present]
    if missing:
        raise ModelError("\n".join(_missing_text(root, name, present) for name in missing))
    containers = sorted({node.class_name for node in root.walk() if node.is_container} & set(names))
    if containers:
        raise ModelError(
            f"fsdp_transformer_layer_cls_to_wrap: {', '.join(containers)} only holds modules and has no forward of its "
            f"own, so it cannot be a unit; name the class inside it. {candidates_text(root)}"
        )
    return children_first(root, {node.fqn for node in root.walk() if node.class_name in set(names) and node.fqn})


def _missing_text(root: ModuleNode, name: str, present: set[str]) -> str:
    near = get_close_matches(name, present, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"fsdp_transformer_layer_cls_to_wrap: no module of class {name} in the model ({root.class_name}); "
        f"{hint}{candidates_text(root)}"
    )


def _by_size(root: ModuleNode, min_num_params: int) -> list[str]:
    """Bottom-up: a module becomes a unit when what is left in it, beside the units below, reaches the minimum.

    A container is never one: its parameters count for the module around it. Neither is what lies in a module that uses
    its children's weights without calling them: nobody would gather these.
    """
    chosen: set[str] = set()

    def left_over(node: ModuleNode) -> int:
        own = sum(p.numel for p in node.parameters if p.tied_to is None)
        if node.class_name in CALLS_NO_CHILD:
            rest = node.numel
        else:
            rest = own + sum(left_over(child) for child in node.children)
        if node.fqn and not node.is_container and rest >= min_num_params:
            chosen.add(node.fqn)
            return 0
        return rest

    left_over(root)
    return children_first(root, chosen)


def children_first(root: ModuleNode, chosen: set[str]) -> list[str]:
    """The chosen fqns in the order in which they are sharded: what lies inside a unit before the unit."""
    order: list[str] = []

    def visit(node: ModuleNode) -> None:
        for child in node.children:
            visit(child)
        if node.fqn in chosen:
            order.append(node.fqn)

    visit(root)
    return order


class _Area:
    """The part of a tree that is sharded, with its names looked up."""

    def __init__(self, tree: ModuleNode, ignored: tuple[str, ...]) -> None:
        self.tree, self.ignored = tree, ignored
        self.nodes = {node.fqn: node for node in tree.walk()}
        self.first_name = {node.fqn: node.alias_of or node.fqn for node in self.nodes.values()}
        found: dict[str, list[str]] = {}  # of every parameter, the modules in which it occurs; aliases count
        for node in self.nodes.values():
            for parameter in node.parameters:
                found.setdefault(parameter.tied_to or node.name_of(parameter), []).append(node.fqn)
        self.parameters = dict(tree.owned())
        self.replicated = tuple(
            name
            for name, parameter in self.parameters.items()
            if not parameter.shape or any(self.is_ignored(path) for path in found[name])
        )
        self.occurrences = {name: paths for name, paths in found.items() if name not in set(self.replicated)}

    def is_ignored(self, fqn: str) -> bool:
        return any(fqn == root or _lies_in(fqn, root) for root in self.ignored)

    def chain(self, path: str, chosen: set[str]) -> list[str]:
        """Units around a module, the innermost first, the root last; an alias is in its first name's units."""
        around = []
        while path:
            if (first := self.first_name[path]) in chosen:
                around.append(first)
            path = path.rpartition(".")[0]
        return [*around, ""]

    def trainable_here(self, node: ModuleNode) -> list[Parameter]:
        """The module's own trainable parameters that are sharded, tied ones too."""
        return [p for p in node.parameters if p.trainable and (p.tied_to or node.name_of(p)) in self.occurrences]


def _ignored(tree: ModuleNode, pattern: str | None) -> tuple[str, ...]:
    """Names of the modules that match, outermost only."""
    if not pattern:
        return ()
    try:
        matches = re.compile(pattern).fullmatch
    except re.error as error:
        raise ModelError(
            f"fsdp_ignored_modules: not a regular expression (got {pattern!r}: {error}); correct it."
        ) from None
    all_names = [node.fqn for node in tree.walk() if node.fqn]
    names = [fqn for fqn in all_names if matches(fqn)]
    if not names:
        raise ModelError(
            f"fsdp_ignored_modules: no module name matches in full (got {pattern!r}); "
            f"names look like {', '.join(all_names[:3])}."
        )
    return tuple(outermost(names))


def outermost(names: Sequence[str]) -> list[str]:
    """Those that lie in none of the others, in the order given."""
    chosen = set(names)
    return [fqn for fqn in names if not any(fqn[:end] in chosen for end, c in enumerate(fqn) if c == ".")]


def _lies_in(fqn: str, around: str) -> bool:
    return fqn.startswith(f"{around}.")


def _is_apart(node: ModuleNode, area: _Area) -> bool:
    """Norms with running statistics: these are fp32, so under a lower dtype the norm computes in fp32."""
    return bool(node.fqn) and node.has_statistics and not area.is_ignored(node.fqn)


def _odd_dtypes(area: _Area, chosen: set[str]) -> set[str]:
    """Modules that become units because their trainable parameters have another dtype than most around them.

    fully_shard reduces the gradients of a unit in one buffer, so one unit has one dtype.
    """
    found: set[str] = set()

    def members(node: ModuleNode) -> Iterator[ModuleNode]:
        yield node
        for child in node.children:
            if child.fqn not in chosen:
                yield from members(child)

    for unit in area.nodes.values():
        if unit.fqn and unit.fqn not in chosen:
            continue
        inside = [(node, area.trainable_here(node)) for node in members(unit)]
        sizes: Counter[str] = Counter()
        for _, parameters in inside:
            for parameter in parameters:
                sizes[parameter.dtype] += parameter.numel
        if len(sizes) > 1:
            common = sizes.most_common(1)[0][0]
            odd = [node.fqn for node, own in inside if own and all(p.dtype != common for p in own)]
            found.update(area.first_name[fqn] for fqn in odd if fqn != unit.fqn)
    return found


def _dissolve_for_shared(area: _Area, chosen: set[str]) -> set[str]:
    """Units such that every shared parameter occurs directly in the innermost unit around all its occurrences.

    fully_shard finds a parameter only outside of the units below; where each occurrence lies in one, the smallest
    of these goes up into the common unit.
    """
    numel = {fqn: area.nodes[fqn].numel_with_tied for fqn in chosen}
    for paths in area.occurrences.values():
        if len(paths) > 1:
            chains = [area.chain(path, chosen) for path in paths]
            common = _common(chains)
            below = [chain[: chain.index(common)] for chain in chains]
            if all(below):
                sizes = [sum(numel[fqn] for fqn in inner) for inner in below]
                chosen = chosen - set(below[sizes.index(min(sizes))])
    return chosen


def _common(chains: list[list[str]]) -> str:
    """The innermost unit that is in every chain."""
    return next(unit for unit in chains[0] if all(unit in chain for chain in chains))


def _refuse_mixed_dtypes(units: tuple[Unit, ...], parameters: dict[str, Parameter]) -> None:
    problems = []
    for unit in units:
        dtypes: dict[str, str] = {}
        for name in unit.parameters:
            if parameters[name].trainable:
                dtypes.setdefault(parameters[name].dtype, name)
        if len(dtypes) > 1:
            listed = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            problems.append(
                f"model: unit {unit.fqn or 'root'} has trainable parameters of several dtypes (got {listed}); "
                "convert the model to one dtype, or name the odd modules in fsdp_ignored_modules."
            )
    if problems:
        raise ModelError("\n".join(problems))
