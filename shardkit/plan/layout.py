"""How a configuration lays a model out: mode, axes, dtypes, and the bytes of every FSDP unit in each of its forms.

The rules of the cut are those of the runtime (`runtime/units.py`), on the module tree instead of a live model.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, prod

from shardkit.config.schema import Config, DistributedType, Dtype, ShardingStrategy
from shardkit.errors import UsageError
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.model.units import children_first, repeated_classes, select_units
from shardkit.plan.optimizers import state_numel

_ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "fp32": 4, "fp16": 2, "bf16": 2}
# Their running statistics are fp32, so under a lower dtype they are units of their own that compute in fp32.
_KEPT_APART = {f"{kind}Norm{dims}d" for kind in ("Batch", "Instance") for dims in (1, 2, 3)} | {"SyncBatchNorm"}


@dataclass(frozen=True)
class Axes:
    """`shards` ranks share one copy of the model, `replicas` copies exist; mode is single, ddp or fsdp."""

    mode: str
    shards: int
    replicas: int
    reshards_after_forward: bool = True


@dataclass(frozen=True)
class Unit:
    """Bytes of one FSDP unit on one rank, in each of its forms. The root's fqn is "".

    early_gradient_bytes: unsharded gradients that exist from the start of backward on, because their parameters come
    after all other units (the head); for the root only. `blocks` counts repeated blocks inside.
    """

    fqn: str
    numel: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    unsharded_gradient_bytes: int
    reduce_bytes: int
    early_gradient_bytes: int = 0
    is_gathered_in_backward: bool = True
    blocks: int = 0


@dataclass(frozen=True)
class Layout:
    """Everything that memory and traffic follow from. `units` are in forward order, without the root."""

    axes: Axes
    units: tuple[Unit, ...]
    root: Unit
    replicated: Unit
    buffer_bytes: int


def axes(config: Config, world_size: int, ranks_per_machine: int) -> Axes:
    """Mode and mesh of a configuration on that many ranks. UsageError where a given mesh does not fit."""
    strategy = config.fsdp.sharding_strategy
    if config.distributed_type is DistributedType.NO:
        return Axes("single", 1, 1)
    is_ddp = config.distributed_type in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if is_ddp or strategy is ShardingStrategy.NO_SHARD:
        return Axes("ddp", 1, world_size)
    reshards = config.fsdp.reshard_after_forward
    reshards = strategy.reshards_after_forward if reshards is None else reshards
    if not strategy.is_hybrid:
        return Axes("fsdp", world_size, 1, reshards)
    mesh = config.shardkit.mesh
    shards = mesh.shard_size or (world_size // mesh.replicate_size if mesh.replicate_size else 0)
    shards = shards or min(ranks_per_machine, world_size)
    if world_size % shards or (mesh.replicate_size and mesh.replicate_size * shards != world_size):
        raise UsageError(
            f"mesh: {world_size} ranks are not a whole number of copies (got replicate_size {mesh.replicate_size}, "
            f"shard_size {shards}); choose sizes whose product is {world_size}."
        )
    return Axes("fsdp", shards, world_size // shards, reshards)


def itemsize(dtype: str) -> int:
    """Bytes of one element; 1 for dtypes that are not floating point."""
    return _ITEMSIZES.get(dtype, 1)


def compute_dtype(config: Config) -> Dtype | None:
    """Dtype of the gathered parameters; None: their own."""
    mixed = None if config.mixed_precision == "no" else config.mixed_precision
    return config.shardkit.precision.param_dtype or mixed


def reduce_dtype(config: Config) -> Dtype:
    """Dtype in which FSDP reduces gradients: fp32 unless chosen."""
    return config.shardkit.precision.reduce_dtype or "fp32"


def layout(tree: ModuleNode, config: Config, world_size: int, ranks_per_machine: int, optimizer: str) -> Layout:
    """The model laid out over the ranks. ModelError where the wrap policy does not fit it."""
    found = axes(config, world_size, ranks_per_machine)
    fixed = _replicated(tree, config)
    chosen = _cut(tree, config, set(fixed)) if found.mode == "fsdp" else []
    owners = _owners(tree, chosen, set(fixed))
    blocks = _block_counts(tree, chosen)
    is_ddp = found.mode != "fsdp"
    sizes, whole = _Sizes(config, found.shards, optimizer, is_ddp), _Sizes(config, 1, optimizer, is_ddp)
    early, late = _root_ends(tree, set(chosen))
    classes = {node.fqn: node.class_name for node in tree.walk()}
    units: list[Unit] = []
    has_trainable = any(p.trainable for name, p in owners[""] if name in early)
    for fqn in _forward_order(tree, chosen):
        has_trainable = has_trainable or any(p.trainable for _, p in owners[fqn])
        if owners[fqn]:
            keeps_dtype = classes[fqn] in _KEPT_APART and not is_ddp
            units.append(sizes.unit(fqn, owners[fqn], has_trainable, blocks.get(fqn, 0), keeps_dtype))
    return Layout(
        axes=found,
        units=tuple(units),
        root=sizes.unit("", owners[""], True, blocks.get("", 0), early=late),
        replicated=whole.unit("", list(fixed.items()), True, 0),
        buffer_bytes=sum(b.numel * itemsize(b.dtype) for node in tree.walk() for b in node.buffers),
    )


@dataclass(frozen=True)
class _Sizes:
    """Turns parameters into bytes, for one configuration."""

    config: Config
    shards: int
    optimizer: str
    is_ddp: bool

    def unit(
        self,
        fqn: str,
        parameters: list[tuple[str, Parameter]],
        in_backward: bool,
        blocks: int,
        keeps_dtype: bool = False,
        early: Iterable[str] = (),
    ) -> Unit:
        """A shard of dim 0 is padded to ceil(dim 0 / shards) rows on every rank (FSDPParam._init_sharded_param)."""
        rows = [(name, self._kept(p), self._local_shape(p)) for name, p in parameters]
        trainable = [(name, p, local) for name, p, local in rows if p.trainable]
        compute = None if keeps_dtype else compute_dtype(self.config)
        reduce = "fp32" if keeps_dtype else reduce_dtype(self.config)
        by_ddp = self.is_ddp and reduce == "fp32"  # DDP reduces gradients as they are unless told otherwise
        head = set(early)
        return Unit(
            fqn=fqn,
            numel=sum(p.numel for _, p, _ in rows),
            parameter_bytes=sum(prod(local) * itemsize(p.dtype) for _, p, local in rows),
            gradient_bytes=sum(prod(local) * itemsize(p.dtype) for _, p, local in trainable),
            optimizer_bytes=sum(state_numel(self.optimizer, local) * itemsize(p.dtype) for _, p, local in trainable),
            gathered_bytes=sum(prod(local) * self.shards * itemsize(compute or p.dtype) for _, p, local in rows),
            unsharded_gradient_bytes=sum(p.numel * itemsize(compute or p.dtype) for _, p, _ in trainable),
            reduce_bytes=sum(
                prod(local) * self.shards * itemsize(p.dtype if by_ddp else reduce) for _, p, local in trainable
            ),
            early_gradient_bytes=sum(
                p.numel * itemsize(compute or p.dtype) for name, p, _ in trainable if name in head
            ),
            is_gathered_in_backward=in_backward,
            blocks=blocks,
        )

    def _kept(self, parameter: Parameter) -> Parameter:
        """Mixed precision keeps trainable 16-bit parameters in fp32 for the optimizer (`precision.upcast_`)."""
        if compute_dtype(self.config) and parameter.trainable and itemsize(parameter.dtype) == 2:
            return replace(parameter, dtype="float32")
        return parameter

    def _local_shape(self, parameter: Parameter) -> tuple[int, ...]:
        if not parameter.shape:
            return ()
        return (ceil(parameter.shape[0] / self.shards), *parameter.shape[1:])


def _replicated(tree: ModuleNode, config: Config) -> dict[str, Parameter]:
    """Parameters that every rank holds whole: those without a dimension, and those of ignored modules."""
    pattern = re.compile(config.fsdp.ignored_modules) if config.fsdp.ignored_modules else None

    def is_ignored(name: str) -> bool:
        parts = name.split(".")[:-1]
        return pattern is not None and any(pattern.fullmatch(".".join(parts[:n])) for n in range(1, len(parts) + 1))

    return {name: p for name, p in tree.owned() if not p.shape or is_ignored(name)}


def _cut(tree: ModuleNode, config: Config, fixed: set[str]) -> list[str]:
    """Fqns of the units. A shared parameter whose every occurrence lies in a unit dissolves the smallest of these."""
    chosen = set(select_units(tree, config.fsdp))
    if compute_dtype(config) not in (None, "fp32"):
        chosen |= {node.fqn for node in tree.walk() if node.fqn and node.class_name in _KEPT_APART}
    numel = {node.fqn: node.numel for node in tree.walk() if node.fqn in chosen}
    for name, paths in _occurrences(tree).items():
        if len(paths) > 1 and name not in fixed:
            chains = [_chain(path, chosen) for path in paths]
            common = next(unit for unit in chains[0] if all(unit in chain for chain in chains))
            below = [chain[: chain.index(common)] for chain in chains]
            if all(below):
                smallest = sorted(below, key=lambda chain: [sum(numel[fqn] for fqn in chain)])[0]
                chosen -= set(smallest)
    return children_first(tree, chosen)


def _occurrences(tree: ModuleNode) -> dict[str, list[str]]:
    """Names of the modules in which each parameter occurs, by the parameter's first name."""
    found: dict[str, list[str]] = {}
    for node in tree.walk():
        for parameter in node.parameters:
            name = parameter.tied_to or (f"{node.fqn}.{parameter.name}" if node.fqn else parameter.name)
            found.setdefault(name, []).append(node.fqn)
    return found


def _chain(path: str, chosen: set[str]) -> list[str]:
    """Units around a module, the innermost first, the root last."""
    parts = path.split(".") if path else []
    around = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return [*(fqn for fqn in around if fqn in chosen), ""]


def _owners(tree: ModuleNode, chosen: list[str], fixed: set[str]) -> dict[str, list[tuple[str, Parameter]]]:
    """Parameters by the unit that manages them: the innermost one around all their occurrences."""
    units, occurrences = set(chosen), _occurrences(tree)
    chain_of: dict[str, list[str]] = {}
    owners: dict[str, list[tuple[str, Parameter]]] = {fqn: [] for fqn in [*chosen, ""]}
    for name, parameter in tree.owned():
        if name not in fixed:
            paths = occurrences[name]
            for path in paths:
                if path not in chain_of:
                    chain_of[path] = _chain(path, units)
            chains = [chain_of[path] for path in paths]
            unit = next(fqn for fqn in chains[0] if all(fqn in chain for chain in chains))
            owners[unit].append((name, parameter))
    return owners


def _forward_order(tree: ModuleNode, chosen: list[str]) -> list[str]:
    units = set(chosen)
    return [node.fqn for node in tree.walk() if node.fqn in units]


def _root_ends(tree: ModuleNode, chosen: set[str]) -> tuple[set[str], set[str]]:
    """Names of parameters that occur before the first unit or block in registration order, and after the last.

    Registration order stands for the order of forward, which a module tree does not say.
    """
    marks = chosen or _block_names(tree)
    order: list[tuple[str, bool]] = []

    def visit(node: ModuleNode, inside: bool) -> None:
        inside = inside or node.fqn in marks
        if inside:
            order.append(("", True))
        for parameter in node.parameters:
            name = parameter.tied_to or (f"{node.fqn}.{parameter.name}" if node.fqn else parameter.name)
            order.append((name, inside))
        for child in node.children:
            visit(child, inside)

    visit(tree, False)
    positions = [index for index, (_, inside) in enumerate(order) if inside]
    if not positions:
        return {name for name, _ in order}, {name for name, _ in order}
    before = {name for name, _ in order[: positions[0]]}
    after = {name for name, inside in order[positions[-1] :] if not inside}
    return before, after


def _block_names(tree: ModuleNode) -> set[str]:
    """Fqns of the repeated blocks, those inside another left out."""
    classes = set(repeated_classes(tree))
    names = [node.fqn for node in tree.walk() if node.class_name in classes]
    found: set[str] = set()
    for name in names:
        if not any(name[:n] in found for n in (i for i, c in enumerate(name) if c == ".")):
            found.add(name)
    return found


def _block_counts(tree: ModuleNode, chosen: list[str]) -> dict[str, int]:
    """How many repeated blocks lie in each unit; "" counts those outside of all."""
    counts: dict[str, int] = {}
    units = set(chosen)
    for name in _block_names(tree):
        unit = _chain(name, units)[0]
        counts[unit] = counts.get(unit, 0) + 1
    return counts
