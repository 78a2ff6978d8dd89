"""Memory of one rank by formula: no torch, a few milliseconds, any number of ranks.

One optimizer step is traversed unit by unit, as FSDP2 runs it, and the bytes alive at each moment are summed by
category. For a chain of equal blocks the peak is as follows, with P parameters, b of them in a block and r outside of
all blocks, N shards, bf16 compute, fp32 gradient reduction and AdamW, and activations A with activation checkpointing:

    max(12 P/N + A, 16 P/N) + 2 r + 10 b        FULL_SHARD
    10 b = 2 b gathered + 2 b gathered ahead + 2 b unsharded gradients + 4 b input of the reduce-scatter before

Where the terms come from (torch/distributed/fsdp/_fully_shard): a unit's all-gather output is copied out into its
parameters and freed after that, in forward only when the next unit's was copied out (`foreach_all_gather_copy_out`,
`wait_for_unshard`); backward gathers one unit ahead (`_backward_prefetch`); the input of a reduce-scatter lives until
the next unit's (`post_backward`, `reduce_scatter_states`); the root keeps its parameters between forward and backward
(`_lazy_init`); shards are padded to ceil(dim 0 / N) rows, or split evenly on another dim (`model.cut.shard_dim`).
Sharding by strategy is that of ZeRO (https://arxiv.org/abs/1910.02054, section 5).

Steady state is counted, with optimizer state (which exists from the second step on). Not counted, because it depends on
the device: context, communication buffers, kernel workspaces, fragmentation (`devices.RESERVE_BYTES` allows for them).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardkit.config.meaning import dtypes, offloads_state
from shardkit.config.schema import BackwardPrefetch, Config, ShardingStrategy
from shardkit.model import adapters
from shardkit.model.blocks import inside_blocks, repeated_classes
from shardkit.model.describe import TransformerFacts
from shardkit.model.tree import ModuleNode
from shardkit.plan import activations, context
from shardkit.plan.activations import Activations, Loss, Trained
from shardkit.plan.averages import Ema
from shardkit.plan.rank_memory import Memory, Moment, RankMemory
from shardkit.plan.traffic import Traffic, traffic
from shardkit.plan.unit_sizes import Axes, ShardedSizes, UnitSizes, compute_dtype, itemsize, layout


@dataclass(frozen=True)
class Estimate:
    """Memory per rank of one configuration, and traffic between its ranks in one optimizer step. `step_flops`: products
    of matrices that the optimizer's step computes on a rank."""

    config: Config
    axes: Axes
    units: int
    memory: RankMemory
    traffic: Traffic
    step_flops: int

    @property
    def strategy(self) -> ShardingStrategy:
        return self.config.fsdp.sharding_strategy


def estimate(
    tree: ModuleNode,
    config: Config,
    *,
    world_size: int,
    ranks_per_machine: int = 8,
    ranks_joined: int | None = None,
    optimizer: str = "adamw",
    facts: TransformerFacts | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    loss: Loss = Loss.HELD,
    ema: Ema = Ema.NO,
) -> Estimate:
    """Memory and traffic of a model under a configuration; `batch_size`: sequences per micro-batch and rank, or group
    of ranks that share each. `ranks_joined`: those that fast links join, by default a machine's.

    Raises ModelError if the wrap policy does not fit the model, UsageError for an unknown optimizer or mesh, and where
    ranks cannot share sequences.
    """
    context.check(config.shardkit.mesh.context_size, world_size, facts, _tokens(facts, batch_size, seq_len))
    plan = layout(tree, config, world_size, min(ranks_per_machine, world_size), optimizer, ema)
    kept = known_activations(tree, config, facts, batch_size, seq_len, loss)
    walk = _walk_ddp if plan.axes.mode != "fsdp" else _walk_fsdp
    timeline = tuple(walk(plan, config, kept or Activations()))
    timeline, host = offloaded(timeline, plan, config)
    if keeps_on_host(config) and kept:
        host = replace(host, activations=sum(_saved_bytes(unit, config, kept) for unit in [*plan.units, plan.root]))
    top = max(timeline, key=lambda moment: moment.memory.total)
    gaps = kept.gaps if kept else (_why_unknown(facts, batch_size),)
    if config.fsdp.activation_checkpointing and config.shardkit.recompute == "operators":
        gaps = (*gaps, "products of matrices that shardkit.recompute keeps")
    if kept and facts and facts.layers > 1 and not repeated_classes(tree):
        gaps = (*gaps, "what the blocks save: none repeats in the model, or layers share one")
    memory = RankMemory(top.memory, top.text, timeline, host, not gaps, gaps)
    joined = ranks_joined or ranks_per_machine
    sent = traffic(plan, config, world_size, joined)
    if config.shardkit.mesh.context_size > 1 and kept and facts:
        slices = kept.tokens, itemsize(compute_dtype(tree, config))
        sent = Traffic((*sent.collectives, context.exchange(config, facts, *slices, joined)))
    return Estimate(config, plan.axes, len(plan.units) + 1, memory, sent, plan.in_step.flops)


def known_activations(
    tree: ModuleNode,
    config: Config,
    facts: TransformerFacts | None,
    batch_size: int | None,
    seq_len: int | None,
    loss: Loss,
) -> Activations | None:
    """Activations of one micro-batch; None if batch size, sequence length or the model's shape is unknown."""
    tokens = _tokens(facts, batch_size, seq_len)
    if facts is None or not batch_size or not tokens:
        return None
    is_autocast = config.mode != "fsdp" and dtypes(config).param in ("bf16", "fp16")
    size, shared_by = itemsize(compute_dtype(tree, config)), config.shardkit.mesh.context_size
    between = tree.once("between matrices", lambda: adapters.between_matrices(tree))
    trained = Trained(between // facts.layers, tree.once("trains norms", lambda: _trains_norms(tree)))
    return activations.of_transformer(facts, batch_size, tokens, size, loss, is_autocast, shared_by, trained)


def _trains_norms(tree: ModuleNode) -> bool:
    """Whether blocks train vectors, which are weights of norms and biases; all do in a model without repeated ones."""
    vectors = [p.trainable for node in inside_blocks(tree) for p in node.parameters if len(p.shape) == 1]
    return any(vectors) or not vectors


def _tokens(facts: TransformerFacts | None, batch_size: int | None, seq_len: int | None) -> int | None:
    """Tokens of a sequence: as given, else, with a batch, the model's maximum."""
    return seq_len or (facts.seq_len if facts and batch_size else None)


def _why_unknown(facts: TransformerFacts | None, batch_size: int | None) -> str:
    if facts is None:
        shape = "the model's shape is unknown from its source"
        return f"all activations: {shape}; --simulate runs its code, with --batch if that is your own"
    return "all activations: add --seq-len" if batch_size else "all activations: add --batch-size"


def keeps_shards_on_host(config: Config) -> bool:
    return config.fsdp.offload_params and config.mode == "fsdp" and not config.use_cpu


def offloaded(timeline: tuple[Moment, ...], plan: ShardedSizes, config: Config) -> tuple[tuple[Moment, ...], Memory]:
    """The device's timeline without what the configuration keeps in host memory, and that memory."""
    if keeps_shards_on_host(config):
        return _offload(timeline, _never_offloaded(plan), plan.in_step.made)
    if offloads_state(config):
        return _offload_state(timeline, plan.state_in_step + plan.in_step.made)
    return timeline, Memory()


def _never_offloaded(plan: ShardedSizes) -> Memory:
    """What stays on the device when the shards are offloaded: replicated parameters (of ignored modules, which
    `sharding/fsdp/shard_model.py` moves there), with their gradients and optimizer state, buffers
    (`_move_states_to_device` of fully_shard), and Adafactor's rows and columns (`optim/whole_step.py` steps there)."""
    whole = plan.replicated
    return Memory(
        whole.parameter_bytes + whole.average_bytes + plan.whole_bytes,
        whole.gradient_bytes,
        whole.optimizer_bytes + plan.whole_state_bytes,
    )


def _offload(timeline: tuple[Moment, ...], stays: Memory, in_step: int) -> tuple[tuple[Moment, ...], Memory]:
    """The device's timeline with what `stays` of the persistent memory, and the rest of it, the shards, in host memory,
    where the optimizer runs, except for what it makes on the device `in_step`."""

    def on_device(moment: Moment) -> Memory:
        memory, made = moment.memory, in_step if moment.phase == "optimizer" else 0
        of_optimizer = min(memory.optimizer_state, stays.optimizer_state + made)
        gradients = min(memory.gradients, stays.gradients)
        return replace(memory, parameters=stays.parameters, gradients=gradients, optimizer_state=of_optimizer)

    last = timeline[-1].memory
    there = on_device(timeline[-1])
    host = Memory(
        last.parameters - there.parameters,
        last.gradients - there.gradients,
        last.optimizer_state - there.optimizer_state,
    )
    return tuple(replace(moment, memory=on_device(moment)) for moment in timeline), host


def _offload_state(timeline: tuple[Moment, ...], in_step: int) -> tuple[tuple[Moment, ...], Memory]:
    """The device's timeline with the optimizer's state in host memory between steps, and that memory. `in_step`: what
    the optimizer has on the device at most while it steps."""

    def on_device(moment: Moment) -> Moment:
        held = min(moment.memory.optimizer_state, in_step) if moment.phase == "optimizer" else 0
        return replace(moment, memory=replace(moment.memory, optimizer_state=held))

    host = Memory(optimizer_state=timeline[0].memory.optimizer_state)
    return tuple(map(on_device, timeline)), host


def _persistent(plan: ShardedSizes) -> Memory:
    """Memory alive during the whole step: shards of parameters and their averages, buffers, optimizer state."""
    of_units = sum(unit.parameter_bytes + unit.average_bytes for unit in plan.everything)
    return Memory(
        parameters=of_units + plan.whole_bytes,
        optimizer_state=sum(unit.optimizer_bytes for unit in plan.everything),
    )


def _all_gradients(plan: ShardedSizes) -> int:
    return sum(unit.gradient_bytes for unit in plan.everything)


def _in_step(plan: ShardedSizes, kept: Activations) -> Memory:
    """Memory in the optimizer's step, through which a script holds the model's output."""
    base = _persistent(plan)
    made = plan.in_step.made + sum(unit.step_bytes for unit in plan.everything)
    state = base.optimizer_state + made
    return replace(base, gradients=_all_gradients(plan), optimizer_state=state, activations=kept.output_bytes)


def keeps_on_host(config: Config) -> bool:
    """Whether blocks save in another memory than the device's: a CPU's is the host's."""
    return config.shardkit.offload_activations and not config.use_cpu


def _kept_bytes(unit: UnitSizes, config: Config, kept: Activations) -> int:
    """What the unit's blocks save on the device between forward and backward."""
    return 0 if keeps_on_host(config) else _saved_bytes(unit, config, kept)


def _saved_bytes(unit: UnitSizes, config: Config, kept: Activations) -> int:
    """What the unit's blocks save between forward and backward, on the device or on the host."""
    if not config.fsdp.activation_checkpointing:
        return unit.blocks * kept.block_bytes
    every = config.shardkit.recompute_every
    return unit.blocks * (kept.block_input_bytes + (every - 1) * kept.block_bytes) // every


def _working_bytes(unit: UnitSizes, config: Config, kept: Activations) -> int:
    """Additional activations while one of the unit's blocks is recomputed or copied back from the host."""
    comes_back = config.fsdp.activation_checkpointing or config.shardkit.offload_activations
    return kept.block_bytes if comes_back and unit.blocks else 0


def _walk_fsdp(plan: ShardedSizes, config: Config, kept: Activations) -> Iterator[Moment]:
    """The last micro-batch of one optimizer step under FSDP2."""
    yield from _forward(plan, config, kept)
    yield from _backward(plan, config, kept)
    yield Moment("optimizer", "", _in_step(plan, kept))


def _forward(plan: ShardedSizes, config: Config, kept: Activations) -> Iterator[Moment]:
    """A unit is gathered, used, and freed (or kept). The output of its all-gather is alive until that of the next is
    copied out (torch 2.15 frees it earlier)."""
    base = replace(_persistent(plan), gradients=_gradients_before(plan, config))
    alive, held, before = _kept_bytes(plan.root, config, kept), plan.root.gathered_bytes, plan.root
    for unit in plan.units:
        working = alive + _kept_bytes(unit, config, kept) + _working_bytes(unit, config, kept)
        gathered = held + _output_bytes(plan, unit) + unit.gathered_bytes
        copying = gathered + _output_bytes(plan, before) + unit.rearranged_bytes
        when = (
            replace(base, gathered=copying, activations=alive),
            replace(base, gathered=gathered + unit.unpacked_bytes, activations=working),
        )
        yield Moment("forward", unit.fqn, max(when, key=lambda memory: memory.total))
        alive += _kept_bytes(unit, config, kept)
        held += unit.gathered_bytes if _stays_gathered(plan, unit) else 0
        before = unit
    # The output of the last all-gather is freed when the root's forward ends (`_post_forward`).
    working = alive + kept.output_bytes + _working_bytes(plan.root, config, kept)
    gathered = held + _output_bytes(plan, before)
    yield Moment("forward", "the root", replace(base, gathered=gathered, activations=working))
    yield Moment("loss", "", replace(base, gathered=held, activations=alive + kept.logits_bytes))


def _stays_gathered(plan: ShardedSizes, unit: UnitSizes) -> bool:
    """Whether a unit keeps its parameters from forward to backward. One that backward does not reach is always freed
    (`sharding/fsdp/unit_state.py`)."""
    return not plan.axes.reshards_after_forward and unit.is_gathered_in_backward


def _output_bytes(plan: ShardedSizes, unit: UnitSizes) -> int:
    """The output of a unit's all-gather, before it is copied out; with one shard nothing is gathered."""
    return unit.gathered_bytes if plan.axes.shards > 1 else 0


def _gradients_before(plan: ShardedSizes, config: Config) -> int:
    """Sharded gradients alive before the last backward of a step: those of earlier micro-batches."""
    return _all_gradients(plan) if config.shardkit.gradient_accumulation_steps > 1 else 0


def _backward(plan: ShardedSizes, config: Config, kept: Activations) -> Iterator[Moment]:
    """Units in reverse. While one computes, the next is prefetched and the previous one is still being reduced."""
    base, root = _persistent(plan), plan.root
    before = _gradients_before(plan, config)
    alive = _kept_bytes(root, config, kept) + sum(_kept_bytes(unit, config, kept) for unit in plan.units)
    held = sum(unit.gathered_bytes for unit in plan.units if _stays_gathered(plan, unit))
    gradients, in_flight = 0, 0
    for index in range(len(plan.units) - 1, -1, -1):
        unit = plan.units[index]
        if not unit.is_gathered_in_backward:
            break
        held -= unit.gathered_bytes if _stays_gathered(plan, unit) else 0
        working = alive + _working_bytes(unit, config, kept) + kept.output_bytes
        yield Moment(
            "backward",
            unit.fqn,
            replace(
                base,
                gradients=max(before, gradients),
                gathered=root.gathered_bytes + held + _gathered_in_backward(plan, config, index),
                reduction=root.early_gradient_bytes + unit.unsharded_gradient_bytes + in_flight,
                activations=working,
            ),
        )
        alive -= _kept_bytes(unit, config, kept)
        gradients += unit.gradient_bytes
        in_flight = unit.reduce_bytes
    if root.unsharded_gradient_bytes:
        yield from _root_backward(plan, config, kept, alive, in_flight)


def _gathered_in_backward(plan: ShardedSizes, config: Config, index: int) -> int:
    """Parameters of this unit while it computes backward, and of the next one, if it is gathered meanwhile."""
    own = plan.units[index].gathered_bytes + plan.units[index].unpacked_bytes
    prefetches = config.fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    if not prefetches or not index or _stays_gathered(plan, plan.units[index - 1]):
        return own
    return own + _output_bytes(plan, plan.units[index - 1])  # which starts when the unit's own are in place


def _root_backward(
    plan: ShardedSizes, config: Config, kept: Activations, alive: int, in_flight: int
) -> Iterator[Moment]:
    """The root computes its last gradients (embeddings) during the first unit's reduction, then reduces its own."""
    base, root = _persistent(plan), plan.root
    others = max(_gradients_before(plan, config), _all_gradients(plan) - root.gradient_bytes)
    working = alive + _working_bytes(root, config, kept) + kept.output_bytes
    unsharded = root.unsharded_gradient_bytes
    computing = replace(
        base,
        gradients=others,
        gathered=root.gathered_bytes,
        reduction=unsharded + in_flight,
        activations=working,
    )
    yield Moment("backward", "the root", computing)
    reducing = replace(
        base,
        gradients=_all_gradients(plan),
        reduction=unsharded + root.reduce_bytes,
        activations=kept.output_bytes,
    )
    yield Moment("reduction", "the root", reducing)


def _walk_ddp(plan: ShardedSizes, config: Config, kept: Activations) -> Iterator[Moment]:
    """One step of DistributedDataParallel, or of a single process: nothing is sharded.

    The gradients are views of the reducer's buckets (gradient_as_bucket_view), so they exist once. Under mixed
    precision autocast keeps a cast copy of weight matrices from forward to backward.
    """
    base, root = replace(_persistent(plan), reduction=_compression_bytes(plan, config)), plan.root
    alive = _kept_bytes(root, config, kept)
    working = _working_bytes(root, config, kept)
    everything = _all_gradients(plan)
    from_start = everything if plan.axes.mode == "ddp" else _gradients_before(plan, config)
    forward = replace(base, gradients=from_start, gathered=plan.cast_bytes + root.unpacked_bytes)
    yield Moment("forward", "", replace(forward, activations=alive + working))
    yield Moment("loss", "", replace(forward, activations=alive + kept.logits_bytes))
    first = replace(forward, activations=alive + working + kept.output_bytes)
    yield Moment("backward", "the last block", first)
    last = replace(base, gradients=everything, activations=working + kept.output_bytes)
    yield Moment("backward", "the first block", last)
    yield Moment("optimizer", "", replace(_in_step(plan, kept), reduction=base.reduction))


def _compression_bytes(plan: ShardedSizes, config: Config) -> int:
    """power_sgd's error feedback: as large as the gradients (`PowerSGDState.use_error_feedback`)."""
    is_compressed = plan.axes.mode == "ddp" and config.shardkit.ddp.comm_hook == "power_sgd"
    return _all_gradients(plan) if is_compressed else 0
