"""--find: the largest batch, the fewest GPUs, the strategy. Each evaluates the closed form or the simulation many
times."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import lcm

from shardkit.config.meaning import with_strategy
from shardkit.config.schema import ShardingStrategy
from shardkit.errors import ShardkitError, UsageError
from shardkit.plan import context
from shardkit.plan.answer import (
    USUAL_TOKENS,
    PlanRequest,
    Row,
    SearchResult,
    configured_strategy,
    possible_strategies,
    row,
)
from shardkit.plan.devices import HOST_RESERVE_BYTES
from shardkit.plan.rank_memory import Memory, RankMemory
from shardkit.plan.suggest import suggest_from
from shardkit.sizes import GIB
from shardkit.wording import counted

LARGEST_BATCH = 2**16
LARGEST_WORLD = 2**16

Evaluate = Callable[[PlanRequest], Row]


class Question(str, Enum):
    """What --find looks for."""

    MAX_BATCH = "max-batch"
    MIN_GPUS = "min-gpus"
    STRATEGY = "strategy"


def check(question: Question, request: PlanRequest) -> None:
    """Raises UsageError if the device's memory has to be known, and is not."""
    if question is not Question.STRATEGY and request.device.memory_bytes is None:
        raise UsageError(f"--find {question.value}: the device's memory is unknown; add --memory, for example 64GiB.")


def find(question: Question, request: PlanRequest, evaluate: Evaluate = row) -> SearchResult:
    """The answer. `evaluate` gives the row of a request's own configuration.

    Raises UsageError if the device's memory or the activations are unknown.
    """
    check(question, request)
    match question:
        case Question.MAX_BATCH:
            return max_batch(request, evaluate)
        case Question.MIN_GPUS:
            return min_gpus(request, evaluate)
        case Question.STRATEGY:
            return strategy(request, evaluate)


def max_batch(request: PlanRequest, evaluate: Evaluate) -> SearchResult:
    """The largest micro-batch per rank (or group that shares sequences) that fits, for the configured strategy."""
    first = evaluate(replace(request, batch_size=1))
    _check_known("max-batch", first)
    device = request.rank_device

    def over(memory: RankMemory) -> int:
        """The bytes by which a rank exceeds its device or its part of the host memory, whichever is more."""
        on_device = memory.peak.total + device.reserve_bytes - (device.memory_bytes or 0)
        if not memory.host.total or device.host_bytes is None:
            return on_device
        return max(on_device, memory.host.total + HOST_RESERVE_BYTES - device.host_bytes)

    largest = _largest(
        lambda size: over(evaluate(replace(request, batch_size=size)).memory), over(first.memory), LARGEST_BATCH
    )
    where = f"{configured_strategy(request.config).value} on {request.world_size:,} x {request.device.name}"
    tokens = request.sequence_tokens
    length = f" of {counted(tokens, 'token')}" if tokens else ""
    shorter = " --seq-len plans shorter ones." if tokens and tokens > USUAL_TOKENS and not request.seq_len else ""
    reader = "rank" if request.shared_by == 1 else f"{request.shared_by} ranks, which share each,"
    if largest == 0:
        return SearchResult("max-batch", None, f"Not even one sequence{length} per {reader} fits: {where}.{shorter}")
    beyond = ", the most that is tried" if largest == LARGEST_BATCH else ""
    sequences = f"{counted(largest, 'sequence')}{length}"
    text = f"Largest micro-batch: {sequences} per {reader.rstrip(',')}{beyond} ({where}).{shorter}"
    return SearchResult("max-batch", largest, text)


def _check_known(question: str, found: Row) -> None:
    if not found.memory.activations_known:
        gap = found.memory.gaps[0]
        other = "or add" if "add --" in gap else "add"
        more = "." if "--simulate" in gap else f"; {other} --simulate, which counts everything."
        raise UsageError(f"--find {question}: the peak would be too low, because it does not count {gap}{more}")


def _largest(over: Callable[[int], int], first: int, limit: int) -> int:
    """The largest number up to `limit` that is not over the limit, 0 for none. `first`: by how much 1 is. It grows
    almost linearly, so 2, the secant's number and its neighbour are mostly enough; every third guess bisects."""
    known = {1: first}
    if known[1] > 0:
        return 0
    known[2] = over(2)
    low, high = (2, limit + 1) if known[2] <= 0 else (1, 2)
    while high - low > 1:
        other = high if high in known else 1 if low > 1 else 2
        slope = max(1.0, (known[other] - known[low]) / (other - low))
        secant = low + int(-known[low] / slope)
        guess = (low + min(high, 8 * low)) // 2 if len(known) % 3 == 1 else min(max(secant, low + 1), high - 1)
        known[guess] = over(guess)
        low, high = (guess, high) if known[guess] <= 0 else (low, guess)
    return low


def _why_not(tried: "_Tried") -> str:
    """What stops it, and what to change."""
    peak, host, device = tried.memory.peak, tried.memory.host.total, tried.request.rank_device
    if device.fits(peak.total) and not device.host_has_room(host):
        part = f"{(device.host_bytes or 0) / GIB:,.1f} GiB"
        return (
            f"{_what_stops(peak)}, and {host / GIB:,.1f} GiB in host memory, where its part is {part}. Use machines "
            "with more host memory"
        )
    return f"{_what_stops(peak)}. {_what_helps(peak, tried.request)}"


def _what_stops(peak: Memory) -> str:
    """A peak as text, with its two largest parts."""
    parts = sorted(((getattr(peak, name), words) for name, words in _PARTS.items()), reverse=True)[:2]
    listed = " and ".join(f"{size / GIB:,.1f} are {words}" for size, words in parts if size)
    return f"{peak.total / GIB:,.1f} GiB per rank, of which {listed}"


def _what_helps(peak: Memory, request: PlanRequest) -> str:
    """What to change where the peak's largest part is too large."""
    config = request.config
    is_split = configured_strategy(config) is ShardingStrategy.FULL_SHARD
    match max(_PARTS, key=lambda name: getattr(peak, name)):
        case "activations":
            recomputes = config.fsdp.activation_checkpointing
            helps = [*([] if recomputes else ["activation checkpointing"]), "a smaller micro-batch, shorter sequences"]
            helps += [] if request.is_on_tpu else [f"sequences that ranks share ({context.KEY})"]
        case "gathered" | "reduction":
            helps = [*([] if is_split else ["FULL_SHARD"]), "smaller units"]
        case _:
            offload = [] if request.is_on_tpu else ["fsdp_offload_params"]
            helps = [*(offload if is_split else ["FULL_SHARD"]), "an optimizer with less state"]
    return f"Use {', '.join(helps)} or larger devices"


_PARTS = {
    "parameters": "the rank's parameters",
    "gradients": "its gradients",
    "optimizer_state": "optimizer state",
    "gathered": "gathered units",
    "reduction": "gradients being reduced",
    "activations": "activations",
}


@dataclass(frozen=True)
class _Tried:
    request: PlanRequest
    memory: RankMemory


@dataclass
class _Worlds:
    """Evaluates numbers of ranks and remembers the one with the smallest peak."""

    request: PlanRequest
    evaluate: Evaluate
    least: _Tried | None = None

    def fits(self, world_size: int) -> bool:
        try:
            request = self.request.with_world(world_size)
            found = self.evaluate(request)
        except ShardkitError:
            return False
        if self.least is None or found.memory.peak.total < self.least.memory.peak.total:
            self.least = _Tried(request, found.memory)
        return bool(found.fits)


def min_gpus(request: PlanRequest, evaluate: Evaluate) -> SearchResult:
    """The fewest ranks on which the configured strategy fits; beyond one machine, whole machines only."""
    _check_known("min-gpus", evaluate(request))
    name = configured_strategy(request.config).value
    worlds = _Worlds(request, evaluate)
    mesh = request.config.shardkit.mesh
    groups = lcm(mesh.context_size, (mesh.shard_size or 1) * (mesh.replicate_size or 1))
    per_machine = request.full_machine or request.ranks_per_machine
    found = _fewest(worlds.fits, per_machine, groups)
    if found is None:
        text = f"{name} does not fit on any number up to {LARGEST_WORLD:,}"
        if (least := worlds.least) is not None:
            text += f"; the smallest peak is on {least.request.world_size:,}: {_why_not(least)}"
        return SearchResult("min-gpus", None, f"{text}.")
    machines = -(-found // per_machine)
    where = f"{request.device.name} ({counted(machines, 'machine')})"
    return SearchResult("min-gpus", found, f"Fewest: {found:,} x {where}, {name}.")


def _fewest(fits: Callable[[int], bool], ranks_per_machine: int, groups: int = 1) -> int | None:
    """Tries every number on one machine, then whole machines, which `groups` divides, by doubling and bisection."""
    for size in range(1, ranks_per_machine + 1):
        if fits(size):
            return size
    least = lcm(ranks_per_machine, groups)
    times = 1 if least > ranks_per_machine else 2
    while not fits(times * least):
        times *= 2
        if times * least > LARGEST_WORLD:
            return None
    low = times // 2
    while times - low > 1:
        middle = (low + times) // 2
        low, times = (low, middle) if fits(middle * least) else (middle, times)
    return times * least


def strategy(request: PlanRequest, evaluate: Evaluate = row) -> SearchResult:
    """The suggested strategy; the value is None if it does not fit."""
    configs = [with_strategy(request.config, each) for each in possible_strategies(request)]
    rows = [evaluate(request.with_config(config)) for config in configs]
    found, reason = suggest_from(rows, request.rank_device)
    if found is None:
        raise UsageError(
            f"--find strategy: no strategy can be suggested ({reason}); add --simulate, which counts everything."
        )
    fits = next(each.fits for each in rows if each.strategy is found)
    return SearchResult(
        "strategy", None if fits is False else found.value, f"Strategy: {found.number} {found.value} ({reason})."
    )
