"""The division of a model into FSDP units. Decided only here, on the module tree, for training, simulation and
formulas."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardkit.config.schema import Dtype, FsdpConfig, WrapPolicy
from shardkit.errors import ModelError
from shardkit.model.blocks import block_classes, candidates_text, repeated_classes
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.wording import near_or

CALLS_NO_CHILD = {"MultiheadAttention", "TransformerEncoderLayer"}  # the latter in evaluation


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered and freed together. The root's fqn is "".

    `parameters`: names of the parameters that the unit manages (first names), without those of inner units.
    `keeps_dtype`: no mixed precision for this unit (batch norm, a different dtype).
    """

    fqn: str
    parameters: tuple[str, ...]
    keeps_dtype: bool = False


@dataclass(frozen=True)
class Cut:
    """Units, children first and the root last; ignored modules; parameters replicated on every rank.

    `remark`: a note for the user where the cut differs from the configuration.
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
    """A single unit, the root: for DDP and a single process."""
    return Cut((Unit("", tuple(name for name, _ in tree.owned())),))


def cut(tree: ModuleNode, config: FsdpConfig, compute: Dtype | None = None) -> Cut:
    """The cut of the model: which unit manages which parameter. `compute`: mixed precision's dtype, None without.

    The tree must have the dtypes of training (see `as_trained`). Raises ModelError with everything that cannot be
    sharded.
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
    return Cut(units, area.ignored, area.replicated, note_on_units(tree, config))


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """The dim along which a parameter of this shape is split over that many ranks: 0, its last pieces shorter or empty.

    Where dim 0 has fewer rows than there are ranks (stacked experts, LoRA's matrices), the first other dim that they
    divide evenly, as fully_shard demands of it; there every rank holds an equal part. So it is on one rank with a
    single row, which DTensor cannot flatten along a dim of size 1.
    """
    if not shape or not 0 < shape[0] < max(shards, 2):
        return 0
    return next((dim for dim, size in enumerate(shape) if size > 1 and size % shards == 0), 0)


def block_names(tree: ModuleNode, config: FsdpConfig) -> list[str]:
    """The repeated blocks for activation checkpointing and compilation, none inside another.

    The named classes under TRANSFORMER_BASED_WRAP, else the repeated ones. Raises ModelError if none repeats.
    """
    is_by_class = config.auto_wrap_policy is WrapPolicy.TRANSFORMER_BASED_WRAP
    names = (config.transformer_layer_cls_to_wrap if is_by_class else []) or repeated_classes(tree)
    if not names:
        policy = "" if is_by_class else ", with fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        raise ModelError(
            f"model: {tree.class_name} has no repeated block class to recompute, offload or compile; "
            f"name one in fsdp_transformer_layer_cls_to_wrap{policy}. {candidates_text(tree)}"
        )
    aliases = {node.fqn for node in tree.walk() if node.alias_of}
    return outermost([fqn for fqn in sorted(_by_class(tree, names)) if fqn not in aliases])


def as_trained(tree: ModuleNode, compute: Dtype | None) -> ModuleNode:
    """The tree with the parameters' dtypes in training; `compute` is the dtype of mixed precision."""
    changes = compute is not None and any(
        trained_dtype(p.dtype, p.trainable) != p.dtype for node in tree.walk() for p in node.parameters
    )
    return _as_trained(tree) if changes else tree


def _as_trained(tree: ModuleNode) -> ModuleNode:
    return replace(
        tree,
        parameters=tuple(replace(p, dtype=trained_dtype(p.dtype, p.trainable)) for p in tree.parameters),
        children=tuple(_as_trained(child) for child in tree.children),
    )


def trained_dtype(dtype: str, is_trainable: bool) -> str:
    """A parameter's dtype under mixed precision: trainable 16-bit parameters are kept in fp32 for the optimizer."""
    return "float32" if is_trainable and dtype in ("float16", "bfloat16") else dtype


def select_units(root: ModuleNode, config: FsdpConfig) -> list[str]:
    """Fqns of the modules that become units, children before parents; the root is always a unit and not listed.

    By class, if no class is named: the repeated ones, or by size if none repeats (see `note_on_units`). Raises
    ModelError, with candidates, where a named class is not in the model.
    """
    match config.auto_wrap_policy:
        case WrapPolicy.NO_WRAP:
            return []
        case WrapPolicy.SIZE_BASED_WRAP:
            return _by_size(root, config.min_num_params)
        case WrapPolicy.TRANSFORMER_BASED_WRAP:
            names = config.transformer_layer_cls_to_wrap or repeated_classes(root)
            return _by_class(root, names) if names else _by_size(root, config.min_num_params)


def note_on_units(root: ModuleNode, config: FsdpConfig) -> str | None:
    """What the user should know of units by class where no class is named; None if there is nothing."""
    if config.auto_wrap_policy is not WrapPolicy.TRANSFORMER_BASED_WRAP or config.transformer_layer_cls_to_wrap:
        return None
    repeated = repeated_classes(root)
    return _large_block(root, repeated) if repeated else _missing_blocks(root, config)


# A unit with a larger share of the parameters is mentioned: gathered, it takes that share of the unsharded memory.
LARGE = 0.4


def _large_block(root: ModuleNode, repeated: Sequence[str]) -> str | None:
    """The note for blocks of different sizes (the stages of a vision model), of which one holds much of the model and
    has repeated blocks in it."""
    inner = (node for node in root.walk() if node is not root)
    blocks = [node for node in inner if node.class_name in repeated and node.numel and not node.alias_of]
    largest = max(blocks, key=lambda node: node.numel, default=None)
    if largest is None or largest.numel < max(LARGE * root.numel, 2 * min(node.numel for node in blocks)):
        return None
    inside = repeated_classes(largest)
    if not inside:
        return None
    return (
        f"fsdp_auto_wrap_policy: one unit, {largest.fqn} ({largest.class_name}), holds "
        f"{largest.numel / root.numel:.0%} of the parameters, which are gathered together; "
        f"fsdp_transformer_layer_cls_to_wrap: {','.join(inside)} makes units of its blocks."
    )


def _missing_blocks(root: ModuleNode, config: FsdpConfig) -> str:
    """The note for wrapping by class where no class repeats."""
    return (
        f"fsdp_auto_wrap_policy: no block class repeats in the model ({root.class_name}), so it is wrapped by size: "
        f"units of at least {config.min_num_params:,} parameters (fsdp_min_num_params), or one unit."
    ) + (f" {candidates_text(root)}" if block_classes(root) else "")


def _by_class(root: ModuleNode, names: Sequence[str]) -> list[str]:
    present = {node.class_name for node in root.walk()}
    missing = [name for name in names if name not in present]
    if missing:
        raise ModelError("\n".join(_missing_text(root, name, present) for name in missing))
    containers = sorted({node.class_name for node in root.walk() if node.is_container} & set(names))
    if containers:
        raise ModelError(
            f"fsdp_transformer_layer_cls_to_wrap: {', '.join(containers)} is a container without a forward, so it "
            f"cannot be a unit; name the class inside it. {candidates_text(root)}"
        )
    return children_first(root, {node.fqn for node in root.walk() if node.class_name in set(names) and node.fqn})


def _missing_text(root: ModuleNode, name: str, present: set[str]) -> str:
    hint = near_or(name, present, "name another one." if block_classes(root) else "leave it out.")
    return (
        f"fsdp_transformer_layer_cls_to_wrap: no module of class {name} in the model ({root.class_name}); "
        f"{hint} The class of another model may be named where both are prepared in one call. {candidates_text(root)}"
    )


def _by_size(root: ModuleNode, min_num_params: int) -> list[str]:
    """Bottom-up: a module becomes a unit when its parameters outside of inner units reach the minimum.

    A container is never a unit: its parameters count for its parent. Neither are children whose weights the parent uses
    without calling them: they would not be gathered.
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
    """The chosen fqns in the order of sharding: inner units first."""
    order: list[str] = []

    def visit(node: ModuleNode) -> None:
        for child in node.children:
            visit(child)
        if node.fqn in chosen:
            order.append(node.fqn)

    visit(root)
    return order


class _Area:
    """The sharded part of a tree, with lookups by name."""

    def __init__(self, tree: ModuleNode, ignored: tuple[str, ...]) -> None:
        self.tree, self.ignored = tree, ignored
        self.nodes = {node.fqn: node for node in tree.walk()}
        self.first_name = {node.fqn: node.alias_of or node.fqn for node in self.nodes.values()}
        found: dict[str, list[str]] = {}  # for each parameter, the modules that contain it, aliases included
        for node in self.nodes.values():
            for parameter in node.parameters:
                found.setdefault(parameter.tied_to or node.name_of(parameter), []).append(node.fqn)
        self.parameters = dict(tree.owned())
        self.replicated = tuple(
            name
            for name, parameter in self.parameters.items()
            if not parameter.shape or 0 in parameter.shape or any(self.is_ignored(path) for path in found[name])
        )
        self.occurrences = {name: paths for name, paths in found.items() if name not in set(self.replicated)}

    def is_ignored(self, fqn: str) -> bool:
        return any(fqn == root or fqn.startswith(f"{root}.") for root in self.ignored)

    def chain(self, path: str, chosen: set[str]) -> list[str]:
        """Units around a module, innermost first, root last; an alias belongs to the units of its first name."""
        around = []
        while path:
            if (first := self.first_name[path]) in chosen:
                around.append(first)
            path = path.rpartition(".")[0]
        return [*around, ""]

    def trainable_here(self, node: ModuleNode) -> list[Parameter]:
        """The module's own trainable, sharded parameters, tied ones included."""
        return [p for p in node.parameters if p.trainable and (p.tied_to or node.name_of(p)) in self.occurrences]


def _ignored(tree: ModuleNode, pattern: str | None) -> tuple[str, ...]:
    """Names of the outermost modules that match or are kept whole."""
    kept = [node.fqn for node in tree.walk() if node.is_kept_whole]
    if not pattern:
        return tuple(kept)
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
            f"fsdp_ignored_modules: no module name fully matches (got {pattern!r}); "
            f"names look like {', '.join(all_names[:3])}."
        )
    return tuple(outermost([*names, *(fqn for fqn in kept if fqn not in names)]))


def outermost(names: Sequence[str]) -> list[str]:
    """The names that are in none of the others, in the given order."""
    chosen = set(names)
    return [fqn for fqn in names if not any(fqn[:end] in chosen for end, c in enumerate(fqn) if c == ".")]


def _is_apart(node: ModuleNode, area: _Area) -> bool:
    """Norms with running statistics: their buffers are fp32, so under a lower dtype the norm computes in fp32."""
    return bool(node.fqn) and node.has_statistics and not area.is_ignored(node.fqn)


def _odd_dtypes(area: _Area, chosen: set[str]) -> set[str]:
    """Modules that become units because the dtype of their trainable parameters differs from the unit's main dtype.

    fully_shard reduces the gradients of a unit in one buffer, so one unit has one dtype.
    """
    found: set[str] = set()
    for unit in area.nodes.values():
        if unit.fqn and unit.fqn not in chosen:
            continue
        inside = [(node, area.trainable_here(node)) for node in _members(unit, chosen)]
        sizes: Counter[str] = Counter()
        for _, parameters in inside:
            for parameter in parameters:
                sizes[parameter.dtype] += parameter.numel
        if len(sizes) > 1:
            of_itself = {parameter.dtype for parameter in area.trainable_here(unit)}  # which cannot leave the unit
            main = of_itself.pop() if len(of_itself) == 1 else sizes.most_common(1)[0][0]
            odd = [node.fqn for node, own in inside if own and all(p.dtype != main for p in own)]
            found.update(area.first_name[fqn] for fqn in odd if fqn != unit.fqn)
    return found


def _members(node: ModuleNode, chosen: set[str]) -> Iterator[ModuleNode]:
    """The node and the nodes inside, without the units among these and what is in them."""
    yield node
    for child in node.children:
        if child.fqn not in chosen:
            yield from _members(child, chosen)


def _dissolve_for_shared(area: _Area, chosen: set[str]) -> set[str]:
    """The units, reduced so that every shared parameter belongs to the innermost unit around all its occurrences.

    fully_shard manages only parameters outside of inner units. If each occurrence is in an inner unit, the smallest of
    these is merged into the common unit.
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
    """The innermost unit of all chains."""
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
