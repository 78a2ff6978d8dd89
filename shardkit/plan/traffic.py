"""Traffic between ranks in one optimizer step: exact bytes of every collective.

payload: bytes of the collective as torch counts them: the output of an all-gather, the input of a reduce-scatter or of
    an all-to-all, the tensor of an all-reduce. Padding included.
sent: what one rank sends in a ring, the bandwidth-optimal algorithm (Patarasuk and Yuan 2009,
    https://doi.org/10.1016/j.jpdc.2008.09.002): (n-1)/n of the payload, for an all-reduce twice that. In an all-to-all
    each rank sends to every other one.
inside, between: the part of `sent` that goes to a rank on the same machine, and to another machine, as the mean over
    the ranks of a machine. The ring follows the rank order, so one of a machine's m ranks sends to the next machine.
    Machines that the devices' own links join (a pod of TPUs, a rack) count as one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardkit.config.schema import BackwardPrefetch, Config
from shardkit.plan.unit_sizes import ShardedSizes, UnitSizes


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind on one axis in one optimizer step; on the axis "optimizer" those over the shards that
    its step makes, on "context" those of ranks that share sequences (`plan.context`). `calls` is None if torch decides
    it (DDP)."""

    kind: str
    axis: str
    calls: int | None
    payload_bytes: int
    group_size: int
    ranks_on_machine: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends."""
        rounds = 2 if self.kind == "all_reduce" else 1
        return rounds * self.payload_bytes * (self.group_size - 1) // self.group_size

    @property
    def between_bytes(self) -> int:
        """Bytes that one rank sends to other machines, as the mean over its machine's ranks."""
        if self.group_size <= self.ranks_on_machine:
            return 0
        if self.kind == "all_to_all":
            return self.sent_bytes * (self.group_size - self.ranks_on_machine) // (self.group_size - 1)
        return self.sent_bytes // self.ranks_on_machine

    @property
    def inside_bytes(self) -> int:
        """Bytes that one rank sends to ranks on its machine."""
        return self.sent_bytes - self.between_bytes


@dataclass(frozen=True)
class Traffic:
    """All collectives of one optimizer step that move parameters, gradients or slices of sequences."""

    collectives: tuple[Collective, ...]

    def on_axis(self, axis: str) -> "Traffic":
        """Those of one axis."""
        return Traffic(tuple(one for one in self.collectives if one.axis == axis))

    @property
    def payload_bytes(self) -> int:
        return sum(c.payload_bytes for c in self.collectives)

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in self.collectives)

    @property
    def inside_bytes(self) -> int:
        return sum(c.inside_bytes for c in self.collectives)

    @property
    def between_bytes(self) -> int:
        return sum(c.between_bytes for c in self.collectives)


def traffic(plan: ShardedSizes, config: Config, world_size: int, ranks_joined: int) -> Traffic:
    """The step's collectives of parameters and gradients, summed over its micro-batches."""
    machine = min(ranks_joined, world_size)
    match plan.axes.mode:
        case "single":
            return Traffic(())
        case "ddp":
            return Traffic(_of_ddp(plan, config, machine))
        case _:
            return Traffic(_of_fsdp(plan, config, world_size, machine))


def _of_ddp(plan: ShardedSizes, config: Config, machine: int) -> tuple[Collective, ...]:
    """Gradients once per step, in buckets; buffers, if they are broadcast, from rank 0 before forward."""
    gradients = plan.root.reduce_bytes + plan.replicated.reduce_bytes
    ranks = plan.axes.replicas
    buffers = plan.buffer_bytes if config.shardkit.ddp.broadcast_buffers else 0
    return _present(
        [
            Collective("all_reduce", "replicate", None, gradients, ranks, machine),
            Collective("broadcast", "replicate", None, buffers, ranks, machine),
        ]
    )


def _of_fsdp(plan: ShardedSizes, config: Config, world_size: int, machine: int) -> tuple[Collective, ...]:
    """Every micro-batch gathers and reduces over the shards; replicas all-reduce once per step.

    Gradients of replicated parameters are all-reduced over all ranks in their own dtype, in one call per micro-batch.
    Of the optimizers that need whole tensors, Adafactor's step gathers them, and Muon's sends each matrix to one rank,
    and back to all (`plan.whole_steps`).
    """
    shards, replicas = plan.axes.shards, plan.axes.replicas
    times = config.shardkit.gradient_accumulation_steps
    gathers, reduces = list(_gathered(plan, config)), _reduced(plan)
    gathered = sum(unit.gathered_bytes for unit in gathers)
    reduced = sum(unit.reduce_bytes for unit in reduces)
    whole = plan.replicated.gradient_bytes
    near = min(machine, shards)
    step = plan.in_step
    return _present(
        [
            Collective("all_gather", "shard", len(gathers) * times, gathered * times, shards, near),
            Collective("reduce_scatter", "shard", len(reduces) * times, reduced * times, shards, near),
            Collective("all_reduce", "replicate", len(reduces), reduced // shards, replicas, max(1, machine // shards)),
            Collective("all_reduce", "world", times, whole * times, world_size, machine),
            Collective("all_gather", "optimizer", len(step.gathered), sum(step.gathered), shards, near),
            Collective("all_to_all", "optimizer", step.rounds, step.to_owners, shards, near),
            Collective("all_to_all", "optimizer", step.rounds, step.to_shards, world_size, machine),
        ]
    )


def _present(collectives: list[Collective]) -> tuple[Collective, ...]:
    return tuple(c for c in collectives if c.group_size > 1 and c.payload_bytes)


def _gathered(plan: ShardedSizes, config: Config) -> Iterator[UnitSizes]:
    """Units, once per all-gather: in forward, and again in backward if they were freed.

    The root is gathered once: FSDP2 does not free it after forward. Backward gathers no unit below the first trained
    parameter (frozen layers at the bottom), which every strategy frees after forward, except one that was prefetched.
    """
    yield from (unit for unit in [plan.root, *plan.units] if unit.gathered_bytes)
    needed = [unit for unit in plan.units if unit.is_gathered_in_backward]
    if plan.axes.reshards_after_forward:
        yield from needed
    left = len(plan.units) - len(needed)
    if left and needed and config.fsdp.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
        yield plan.units[left - 1]


def _reduced(plan: ShardedSizes) -> list[UnitSizes]:
    return [unit for unit in [*plan.units, plan.root] if unit.reduce_bytes]
