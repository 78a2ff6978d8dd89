"""Suggests a strategy from memory and traffic, and changes for one that does not fit."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from shardkit.config.meaning import dtypes, with_strategy
from shardkit.config.schema import DistributedType, ShardingStrategy, WrapPolicy
from shardkit.errors import ShardkitError, UsageError
from shardkit.model.adapters import Adapters
from shardkit.plan import context
from shardkit.plan.activations import Loss
from shardkit.plan.answer import USUAL_TOKENS, Change, PlanRequest, Row, configured_strategy, possible_strategies, row
from shardkit.plan.devices import SPARE, Device
from shardkit.plan.rank_memory import RankMemory
from shardkit.plan.traffic import Traffic

_Candidate = tuple[str, PlanRequest]
"""A possible change: its text, and the request with it."""
RULE = f"least traffic over the slowest link among those that fit with {SPARE:.0%} to spare"


@dataclass(frozen=True)
class Candidate:
    """A strategy that could be suggested, with its memory and traffic."""

    strategy: ShardingStrategy
    memory: RankMemory
    traffic: Traffic

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak.total

    def fits(self, device: Device) -> bool | None:
        """Whether it fits, as far as activations are counted; None if the device's memory is unknown."""
        return device.fits(self.peak_bytes, self.memory.host.total)

    def fits_with_spare(self, device: Device) -> bool:
        return self.fits(device) is not False and device.fits_with_spare(self.peak_bytes) is True

    @property
    def slowness(self) -> tuple[int, int, int]:
        return self.traffic.between_bytes, self.traffic.inside_bytes, self.peak_bytes


def suggest(candidates: Sequence[Candidate], device: Device) -> tuple[ShardingStrategy | None, str]:
    """The suggested strategy and the reason. If the device's memory is unknown, the one with the smallest peak.

    Strategies whose activations are not all counted are not compared; None and the reason if that is all of them.
    """
    known = [each for each in candidates if each.memory.activations_known]
    if not known:
        return None, f"not counted: {candidates[0].memory.gaps[0]}"
    left_out = [each for each in candidates if each not in known and each.fits(device) is not False]
    reason = "".join(f"; {each.strategy.value} not compared, without {each.memory.gaps[0]}" for each in left_out)
    found, rule = _best(known, device)
    return found.strategy, rule + reason


def _best(known: Sequence[Candidate], device: Device) -> tuple[Candidate, str]:
    least = min(known, key=lambda each: each.peak_bytes)
    if device.memory_bytes is None:
        return least, "least memory; the device's memory is unknown"
    spare = [each for each in known if each.fits_with_spare(device)]
    if spare:
        return min(spare, key=lambda each: each.slowness), RULE
    fitting = [each for each in known if each.fits(device)]
    if fitting:
        least = min(fitting, key=lambda each: each.peak_bytes)
        return least, f"least memory; it fits, with less than {SPARE:.0%} to spare"
    return least, "least memory; no strategy fits"


def suggest_from(rows: Sequence[Row], device: Device) -> tuple[ShardingStrategy | None, str]:
    """`suggest` for rows; None if only some are simulated."""
    if len({row.simulated is None for row in rows}) > 1:
        return None, "simulated and closed-form memory are not compared; add --strategy all"
    return suggest([Candidate(row.strategy, row.memory, row.estimate.traffic) for row in rows], device)


def changes(request: PlanRequest) -> tuple[Change, ...]:
    """Changes that lower the peak of the request's configuration, each on its own, the largest effect first.

    If none is enough with what is trained as it is, a combination that fits is added at the end, if there is one. Only
    changes whose activations the closed form counts in full: their peak is then below that of the configuration, even
    where that one's is a lower bound.
    """
    same = [change for _, change in _lower(request, _training_the_same(request, request))]
    other = [change for _, change in _lower(request, _training_otherwise(request))]
    found = sorted([*same, *other], key=lambda change: change.peak_bytes)
    together = None if any(change.fits for change in same) else _together(request)
    return (*found, together) if together else tuple(found)


def _lower(request: PlanRequest, candidates: Iterable[_Candidate]) -> Iterator[tuple[PlanRequest, Change]]:
    """The candidates that lower the request's peak, and what each does to it."""
    memory = row(request).memory
    peak, is_bound = memory.peak.total, not memory.activations_known
    for text, changed in candidates:
        try:
            other = row(changed)
        except ShardkitError:
            continue
        after, host = other.memory.peak.total, other.memory.host.total
        is_lower = after < peak or (after == peak and is_bound)  # a bound is below the peak
        if is_lower and other.memory.activations_known:
            yield changed, Change(text, after, peak - after, other.fits, host)


def _together(request: PlanRequest, most: int = 6) -> Change | None:
    """Changes applied one after the other, each one with which it fits or the most effective; None if it never does.

    What is trained, and by which optimizer, is not changed.
    """
    texts, given = list[str](), request
    before = row(request).memory.peak.total
    for _ in range(most):
        possible = list(_lower(request, _training_the_same(request, given)))
        if not possible:
            return None
        request, change = min(possible, key=lambda each: (not each[1].fits, each[1].peak_bytes))
        texts.append(change.text)
        if change.fits:
            saved = before - change.peak_bytes
            return replace(change, text=" and ".join(_last_of_each(texts)), saved_bytes=saved)
    return None


def _last_of_each(texts: list[str]) -> list[str]:
    """The texts without those that a later one overrides (same flag or key)."""
    by_key = {text.split()[0]: text for text in texts}
    return [text for text in texts if by_key[text.split()[0]] is text]


def _training_the_same(request: PlanRequest, given: PlanRequest) -> Iterator[_Candidate]:
    """Changes of how and where the same weights are trained. Texts compare with `given`."""
    config = request.config
    yield from _other_layouts(request, given)
    yield from _other_loads(request, given)
    if not config.fsdp.activation_checkpointing:
        text = "fsdp_activation_checkpointing: true (a third more compute)"
        yield text, request.with_config(config.changed(fsdp={"activation_checkpointing": True}))
    section = config.shardkit
    if config.fsdp.activation_checkpointing and section.recompute == "operators":
        text = "shardkit.recompute: blocks (more compute)"
        yield text, request.with_config(config.changed(shardkit={"recompute": "blocks"}))
    if config.fsdp.activation_checkpointing and section.recompute_every > 1:
        text = "shardkit.recompute_every: 1 (more compute)"
        yield text, request.with_config(config.changed(shardkit={"recompute_every": 1}))
    recomputes_blocks = config.fsdp.activation_checkpointing and section.recompute == "blocks"
    if recomputes_blocks and not (section.offload_activations or section.compile or request.is_on_tpu):
        text = "shardkit.offload_activations: true (slower, host memory)"
        yield text, request.with_config(config.changed(shardkit={"offload_activations": True}))
    if dtypes(config).param is None:
        half = "fp16" if request.device.lacks_bf16 else "bf16"
        yield f"mixed_precision: {half}", request.with_config(config.changed(mixed_precision=half))


def _other_layouts(request: PlanRequest, given: PlanRequest) -> Iterator[_Candidate]:
    config = request.config
    for strategy in possible_strategies(request):
        if strategy is not configured_strategy(config):
            text = ", ".join([f"fsdp_sharding_strategy: {strategy.value}", *_needed_for(strategy, given)])
            yield text, request.with_config(with_strategy(config, strategy))
    offloads_all = config.mode == "fsdp" and config.fsdp.offload_params
    if not (offloads_all or config.shardkit.offload_optimizer or config.use_cpu or request.is_on_tpu):
        text = "shardkit.offload_optimizer: true (slower steps, host memory)"
        yield text, request.with_config(config.changed(shardkit={"offload_optimizer": True}))
    if config.mode == "fsdp" and not config.fsdp.offload_params and not request.is_on_tpu:
        text = "fsdp_offload_params: true (slower steps, host memory)"
        yield text, request.with_config(config.changed(fsdp={"offload_params": True}))
    if config.mode == "fsdp" and config.fsdp.auto_wrap_policy is WrapPolicy.NO_WRAP:
        text = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        update = {"auto_wrap_policy": WrapPolicy.TRANSFORMER_BASED_WRAP, "transformer_layer_cls_to_wrap": []}
        yield text, request.with_config(config.changed(fsdp=update))


def _needed_for(strategy: ShardingStrategy, given: PlanRequest) -> Iterator[str]:
    """Other settings without which the strategy has no effect, or is refused."""
    mesh = given.config.shardkit.mesh
    if given.is_on_tpu:
        yield "xla: true"
    elif given.config.distributed_type is not DistributedType.FSDP:
        yield "distributed_type: FSDP"
    if not strategy.is_hybrid:
        sizes = {"shard_size": mesh.shard_size, "replicate_size": mesh.replicate_size}
        yield from (f"shardkit.mesh.{name}: 0" for name, size in sizes.items() if size)


def _other_loads(request: PlanRequest, given: PlanRequest) -> Iterator[_Candidate]:
    for factor in (2, 4):
        size = request.world_size * factor
        yield f"--world {size} ({size // given.world_size} x the ranks)", request.with_world(size)
    if request.batch_size and request.batch_size > 1:
        # Gradients of the first micro-batch are kept through the others.
        half, steps = request.batch_size // 2, 2 * request.config.shardkit.gradient_accumulation_steps
        text = f"--batch-size {half}, shardkit.gradient_accumulation_steps: {steps}"
        accumulating = request.config.changed(shardkit={"gradient_accumulation_steps": steps})
        yield text, replace(request, batch_size=half).with_config(accumulating)
    yield from _shared_sequences(request)
    if request.has_unusual_sequences:
        text = f"--seq-len {USUAL_TOKENS} (shorter sequences than the model takes)"
        yield text, replace(request, seq_len=USUAL_TOKENS)
    if request.loss is not Loss.FUSED:
        yield "--loss fused (a fused or chunked loss in the script)", replace(request, loss=Loss.FUSED)


def _training_otherwise(request: PlanRequest) -> Iterator[_Candidate]:
    """Another optimizer; adapters in place of all weights, and those beside weights in 4 bits. No adapters for a model
    without linear layers in its blocks, or with frozen parameters of its own."""
    if request.optimizer in {"adam", "adamw"}:
        yield "--optimizer adafactor (another optimizer)", replace(request, optimizer="adafactor")
    adapters = request.adapters
    with suppress(UsageError):
        if adapters is None:
            yield "--lora 16 (adapters are trained in place of all weights)", request.with_adapters(Adapters(16))
        elif not adapters.are_packed:
            packed = request.with_adapters(replace(adapters, are_packed=True))
            yield "--load-in-4bit (frozen weights in 4 bits)", packed


def _shared_sequences(request: PlanRequest) -> Iterator[_Candidate]:
    """The fewest ranks that have to share each sequence so that it fits, where not even one sequence a rank does.

    None for attention in windows: its masks are of whole sequences on every rank.
    """
    facts, tokens = request.description.facts, request.sequence_tokens
    if facts is None or tokens is None or request.is_on_tpu or (facts.window or tokens) < tokens:
        return
    if row(replace(request, batch_size=1)).fits is not False:
        return
    for ranks in range(request.shared_by + 1, request.world_size + 1):
        if any(whole % ranks for whole in (request.world_size, facts.heads, tokens)):
            continue
        changed = request.with_config(request.config.changed(shardkit={"mesh": {"context_size": ranks}}))
        if row(changed).fits:
            yield f"{context.KEY}: {ranks} ({ranks} ranks share each sequence)", changed
            return
