"""Sizes of a sharded model: mode, mesh axes, and the bytes of every FSDP unit in each of its forms.

The units come from `model/cut.py`, as for a live model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import dropwhile
from math import ceil, prod

from shardkit.config.meaning import WIDE, Dtypes, dtypes, mesh_sizes, offloads_state, reshards_after_forward
from shardkit.config.schema import Config, FsdpConfig
from shardkit.model.blocks import repeated_classes
from shardkit.model.cut import Cut, as_trained, cut, outermost, shard_dim, whole
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.optim import division
from shardkit.plan import averages
from shardkit.plan.averages import Ema
from shardkit.plan.optimizers import check, refuse_offload, state_bytes, step_bytes
from shardkit.plan.whole_steps import InStep, WholeTensor, in_step, is_state_whole, needs_whole

_FLOATING = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "fp32": 4, "fp16": 2, "bf16": 2}
_OTHER = {
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
}
_ITEMSIZES = {**_FLOATING, **_OTHER}


@dataclass(frozen=True)
class Axes:
    """`shards` ranks share one copy of the model, `replicas` copies exist; mode is single, ddp or fsdp."""

    mode: str
    shards: int
    replicas: int
    reshards_after_forward: bool = True


@dataclass(frozen=True)
class UnitSizes:
    """Bytes of one FSDP unit on one rank, in each of its forms. The root's fqn is "".

    parameter_bytes: its shard; average_bytes: the shard of the script's weight averages (EMA). step_bytes: what the
    optimizer makes in its step only.
    early_gradient_bytes: unsharded gradients that exist from the start of backward, because their parameters come after
    all other units (the head); root only. rearranged_bytes: gathered parameters that are sharded on a dim other than 0,
    which are copied once more. `blocks`: number of repeated blocks inside that backward reaches. unpacked_bytes: the
    largest packed weight in the compute dtype, in which a product needs it.
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
    rearranged_bytes: int = 0
    is_gathered_in_backward: bool = True
    blocks: int = 0
    average_bytes: int = 0
    step_bytes: int = 0
    unpacked_bytes: int = 0


@dataclass(frozen=True)
class ShardedSizes:
    """Input of the memory and traffic formulas. `units` are in forward order, without the root. `scale_bytes`: those of
    packed weights. `cast_bytes`: copies of parameters that autocast keeps from forward to backward, where nothing is
    sharded. `in_step`: what the step of an optimizer that needs whole parameters makes and exchanges;
    `whole_state_bytes`: its state of sharded ones that every rank keeps whole. `state_in_step`: what the optimizer has
    on the device at a time where its state is in host memory.
    """

    axes: Axes
    units: tuple[UnitSizes, ...]
    root: UnitSizes
    replicated: UnitSizes
    buffer_bytes: int
    scale_bytes: int = 0
    averaged_buffer_bytes: int = 0
    cast_bytes: int = 0
    in_step: InStep = field(default_factory=InStep)
    whole_state_bytes: int = 0
    state_in_step: int = 0

    @property
    def whole_bytes(self) -> int:
        """What every rank holds beside the parameters and their averages."""
        return self.buffer_bytes + self.averaged_buffer_bytes + self.scale_bytes

    @property
    def everything(self) -> tuple[UnitSizes, ...]:
        """The units, the root, and what is replicated."""
        return (*self.units, self.root, self.replicated)


def axes(config: Config, world_size: int, ranks_per_machine: int) -> Axes:
    """Mode and mesh of a configuration for the world size. Raises ConfigError if a given mesh does not fit."""
    mode = config.changed(num_processes=world_size).mode
    if mode == "single" or (mode == "ddp" and world_size == 1):
        return Axes("single", 1, 1)
    sizes = mesh_sizes(config, world_size, min(ranks_per_machine, world_size))
    return Axes(mode, sizes.shard, sizes.replicate, mode != "fsdp" or reshards_after_forward(config.fsdp))


def compute_dtype(tree: ModuleNode, config: Config) -> str:
    """The compute dtype, as named in settings: that of mixed precision, else that of most parameters."""
    if (chosen := dtypes(config).param) is not None:
        return chosen
    sizes: Counter[str] = Counter()
    for node in tree.walk():
        for parameter in node.parameters:
            sizes[parameter.dtype] += parameter.numel
    common = sizes.most_common(1)[0][0] if sizes else "float32"
    return {"bfloat16": "bf16", "float16": "fp16"}.get(common, "fp32")


def itemsize(dtype: str) -> int:
    """Bytes of one element; 1 for dtypes of 8 bits (fp8, int8, bool, packed 4 bits)."""
    return _ITEMSIZES.get(dtype, 1)


def layout(
    tree: ModuleNode, config: Config, world_size: int, ranks_per_machine: int, optimizer: str, ema: Ema = Ema.NO
) -> ShardedSizes:
    """Sizes of the model sharded over the ranks. Raises ModelError if it cannot be divided as configured.

    They are kept with the tree: most of the changes that a plan compares leave them as they are.
    """
    found, used, offloads = axes(config, world_size, ranks_per_machine), dtypes(config), offloads_state(config)
    if found.mode == "ddp" and (hook := config.shardkit.ddp.comm_hook) in ("fp16", "bf16"):
        used = replace(used, reduce=hook)
    key = ("layout", found, used, offloads, optimizer, ema, config.fsdp.model_dump_json())
    return tree.once(
        key, lambda: _layout(as_trained(tree, used.param), config.fsdp, found, used, optimizer, ema, offloads)
    )


def _layout(
    tree: ModuleNode, config: FsdpConfig, found: Axes, used: Dtypes, optimizer: str, ema: Ema, offloads: bool
) -> ShardedSizes:
    is_sharded = found.mode == "fsdp"
    decided = cut(tree, config, used.param) if is_sharded else whole(tree)
    sizes = _Sizes(used, found.shards, optimizers_of(tree, optimizer), not is_sharded, ema)
    units, root = _units(tree, decided, sizes)
    parameters = dict(tree.owned())
    sharded = parameters.keys() - decided.replicated if is_sharded else set()
    of_whole = _whole_tensors(parameters, sharded, sizes)
    buffer_bytes = sum(b.numel * itemsize(b.dtype) for node in tree.walk() for b in node.buffers if not b.tied_to)
    return ShardedSizes(
        axes=found,
        units=units,
        root=root,
        replicated=replace(sizes, shards=1).unit("", [(n, parameters[n]) for n in decided.replicated], True, 0),
        buffer_bytes=buffer_bytes,
        scale_bytes=sum(p.scale_bytes for p in parameters.values()),
        averaged_buffer_bytes=buffer_bytes if ema is Ema.MODEL else 0,
        cast_bytes=0 if is_sharded else _cast_bytes(tree, used.param),
        in_step=in_step(optimizer, [tensor for _, tensor in of_whole], found.shards, found.replicas),
        whole_state_bytes=sum(
            state_bytes(kind, tensor.shape, tensor.itemsize)
            for kind, tensor in of_whole
            if tensor.part is not None and is_state_whole(kind, tensor.shape)
        ),
        state_in_step=_state_in_step(parameters, sharded, sizes) if offloads else 0,
    )


def _units(tree: ModuleNode, decided: Cut, sizes: _Sizes) -> tuple[tuple[UnitSizes, ...], UnitSizes]:
    """The units in forward order, and the root."""
    parameters = dict(tree.owned())
    owned = {unit.fqn: [(name, parameters[name]) for name in unit.parameters] for unit in decided.units}
    keeps_dtype = {unit.fqn: unit.keeps_dtype for unit in decided.units}
    chosen = {fqn for fqn in owned if fqn}
    early, late = _root_ends(tree, chosen)
    blocks = _block_counts(tree, chosen)
    units: list[UnitSizes] = []
    has_trainable = any(p.trainable for name, p in owned[""] if name in early)
    for fqn in [node.fqn for node in tree.walk() if node.fqn in chosen]:
        has_trainable = has_trainable or any(p.trainable for _, p in owned[fqn])
        if owned[fqn]:
            units.append(sizes.unit(fqn, owned[fqn], has_trainable, blocks[fqn], keeps_dtype[fqn]))
    return tuple(units), sizes.unit("", owned[""], True, blocks[""], early=late)


def _whole_tensors(
    parameters: Mapping[str, Parameter], sharded: Container[str], sizes: _Sizes
) -> list[tuple[str, WholeTensor]]:
    """(optimizer, parameter) of those whose optimizer needs them whole."""
    return [
        (kind, WholeTensor(p.shape, itemsize(p.dtype), sizes.local_shape(p) if name in sharded else None))
        for name, p in parameters.items()
        if p.trainable and needs_whole(kind := sizes.optimizers[name])
    ]


def _state_in_step(parameters: Mapping[str, Parameter], sharded: Container[str], sizes: _Sizes) -> int:
    """The largest chunk of state that is copied to the device in a step, with what the step makes (`optim.host_state`).
    An optimizer that needs whole parameters has all of its state there. UsageError for one that is not offloaded."""
    of_kind: defaultdict[str, dict[str, tuple[int, int]]] = defaultdict(dict)  # bytes of the parameter, of its state
    for name, p in parameters.items():
        if p.trainable:
            kind, local = sizes.optimizers[name], sizes.local_shape(p) if name in sharded else p.shape
            size = itemsize(p.dtype)
            held = sizes.state_bytes(name, p, local) + step_bytes(kind, local, size)
            of_kind[kind][name] = prod(local) * size, held
    found = [0]
    for kind, rows in of_kind.items():
        refuse_offload(kind)
        limit = sum(2 * size for size, _ in rows.values()) if needs_whole(kind) else division.STATE_BYTES
        chunks = division.chunks(((name, 2 * size) for name, (size, _) in rows.items()), limit)
        found += [sum(rows[name][1] for name in chunk) for chunk in chunks]
    return max(found)


def optimizers_of(tree: ModuleNode, optimizer: str) -> dict[str, str]:
    """The optimizer of each parameter, by name: Muon is for the matrices of blocks (where none repeats, for those that
    are no tables), with AdamW for the others (https://kellerjordan.github.io/posts/muon)."""
    name = check(optimizer)
    if name != "muon":
        return {parameter: name for parameter, _ in tree.owned()}
    blocks, nodes = set(_blocks(tree)), {node.fqn: node for node in tree.walk()}

    def is_hidden(parameter: str, shape: tuple[int, ...]) -> bool:
        module = parameter.rpartition(".")[0]
        inside = _unit_around(module, blocks) if blocks else not nodes[module].is_lookup
        return len(shape) == 2 and bool(inside)

    return {n: "muon" if is_hidden(n, p.shape) else "adamw" for n, p in tree.owned()}


def _cast_bytes(tree: ModuleNode, compute: str | None) -> int:
    """Autocast casts fp32 matrices, and backward needs the copies of those that a gradient passes: all from the first
    trained parameter on, in the order of registration. No copies of tables and vectors stay."""
    if compute in (None, "fp32"):
        return 0
    sizes: dict[str, int] = {}
    has_trainable = False
    for node in tree.walk():
        for parameter in node.parameters:
            has_trainable = has_trainable or parameter.trainable
            is_matrix = len(parameter.shape) > 1 and not node.is_lookup
            if has_trainable and is_matrix and parameter.dtype == "float32" and not parameter.packed:
                sizes[parameter.tied_to or node.name_of(parameter)] = parameter.numel
    return sum(sizes.values()) * itemsize(compute)


def _computed_itemsize(parameter: Parameter, compute: str | None) -> int:
    """Bytes per element of a gathered parameter. Integers are not cast (FSDPParam.init_dtype_attrs), nor what holds
    packed weights."""
    if compute is None or parameter.packed or parameter.dtype not in _FLOATING:
        return itemsize(parameter.dtype)
    return itemsize(compute)


@dataclass(frozen=True)
class _Sizes:
    """Computes bytes of parameters under one configuration."""

    dtypes: Dtypes
    shards: int
    optimizers: dict[str, str]
    is_ddp: bool
    ema: Ema

    def unit(
        self,
        fqn: str,
        parameters: list[tuple[str, Parameter]],
        in_backward: bool,
        blocks: int,
        keeps_dtype: bool = False,
        early: Iterable[str] = (),
    ) -> UnitSizes:
        """A shard of dim 0 is padded to ceil(dim 0 / shards) rows on every rank (FSDPParam._init_sharded_param). A
        shard of another dim is first gathered into a separate buffer (foreach_all_gather_copy_out)."""
        rows = [(name, p, self.local_shape(p)) for name, p in parameters]
        trainable = [(name, p, local) for name, p, local in rows if p.trainable]
        compute = None if keeps_dtype else self.dtypes.param
        reduce = "fp32" if keeps_dtype and self.dtypes.param else self.dtypes.reduce
        # DDP reduces gradients in their own dtype unless another is configured.
        by_ddp = self.is_ddp and reduce == "fp32"
        head = set(early)
        return UnitSizes(
            fqn=fqn,
            numel=sum(p.numel for _, p, _ in rows),
            parameter_bytes=sum(prod(local) * itemsize(p.dtype) for _, p, local in rows),
            gradient_bytes=sum(prod(local) * itemsize(p.dtype) for _, p, local in trainable),
            optimizer_bytes=sum(self.state_bytes(name, p, local) for name, p, local in trainable),
            gathered_bytes=sum(prod(local) * self.shards * _computed_itemsize(p, compute) for _, p, local in rows),
            rearranged_bytes=sum(
                p.numel * _computed_itemsize(p, compute) for _, p, _ in rows if self._is_rearranged(p)
            ),
            unsharded_gradient_bytes=sum(p.numel * _computed_itemsize(p, compute) for _, p, _ in trainable),
            reduce_bytes=sum(
                prod(local) * self.shards * itemsize(p.dtype if by_ddp or p.dtype in WIDE else reduce)
                for _, p, local in trainable
            ),
            early_gradient_bytes=sum(
                p.numel * _computed_itemsize(p, compute) for name, p, _ in trainable if name in head
            ),
            is_gathered_in_backward=in_backward,
            blocks=blocks,
            average_bytes=sum(prod(local) * self._average_itemsize(p) for _, p, local in rows),
            step_bytes=sum(step_bytes(self.optimizers[name], local, itemsize(p.dtype)) for name, p, local in trainable),
            unpacked_bytes=max((p.packed for _, p, _ in rows), default=0) * itemsize(self.dtypes.param or "fp32"),
        )

    def state_bytes(self, name: str, parameter: Parameter, local: tuple[int, ...]) -> int:
        kind = self.optimizers[name]
        shape = parameter.shape if is_state_whole(kind, parameter.shape) else local
        return state_bytes(kind, shape, itemsize(parameter.dtype))

    def _average_itemsize(self, parameter: Parameter) -> int:
        return averages.itemsize(self.ema, itemsize(parameter.dtype), parameter.trainable)

    def local_shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape of a shard, padded."""
        split = shard_dim(parameter.shape, self.shards)
        return tuple(ceil(size / self.shards) if dim == split else size for dim, size in enumerate(parameter.shape))

    def _is_rearranged(self, parameter: Parameter) -> bool:
        return self.shards > 1 and shard_dim(parameter.shape, self.shards) > 0


def _root_ends(tree: ModuleNode, chosen: set[str]) -> tuple[set[str], set[str]]:
    """Names of parameters before the first and after the last unit or block, in registration order.

    Registration order is taken as forward order, which a module tree does not contain.
    """
    marks = chosen or set(_blocks(tree))
    order: list[tuple[str, bool]] = []

    def visit(node: ModuleNode, inside: bool) -> None:
        inside = inside or node.fqn in marks
        if inside:
            order.append(("", True))
        for parameter in node.parameters:
            order.append((parameter.tied_to or node.name_of(parameter), inside))
        for child in node.children:
            visit(child, inside)

    visit(tree, False)
    positions = [index for index, (_, inside) in enumerate(order) if inside]
    if not positions:
        return {name for name, _ in order}, {name for name, _ in order}
    before = {name for name, _ in order[: positions[0]]}
    after = {name for name, inside in order[positions[-1] :] if not inside}
    return before, after


def _blocks(tree: ModuleNode) -> list[str]:
    """Fqns of the repeated blocks, none inside another. One that has a second name in its list runs again; under a name
    elsewhere (`self.blocks = self.model.blocks`) it is the same block."""
    classes = set(repeated_classes(tree))
    return outermost([node.fqn for node in tree.walk() if node.class_name in classes and not _is_named_again(node)])


def _is_named_again(node: ModuleNode) -> bool:
    return node.alias_of is not None and node.alias_of.rpartition(".")[0] != node.fqn.rpartition(".")[0]


def _block_counts(tree: ModuleNode, chosen: set[str]) -> Counter[str]:
    """Number of repeated blocks in each unit, without those below the first trained parameter, which save nothing for
    backward; "" for those outside all units."""
    blocks = set(_blocks(tree))
    from_first_trained = dropwhile(lambda node: not any(p.trainable for p in node.parameters), tree.walk())
    reached = {_unit_around(node.fqn, blocks) for node in from_first_trained}
    return Counter(_unit_around(fqn, chosen) for fqn in reached if fqn)


def _unit_around(fqn: str, chosen: set[str]) -> str:
    """The innermost unit that contains or is the module; "" for the root."""
    while fqn and fqn not in chosen:
        fqn = fqn.rpartition(".")[0]
    return fqn
