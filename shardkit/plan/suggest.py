"""Which strategy follows from the numbers, and what to change where one does not fit."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardkit.config.meaning import dtypes
from shardkit.config.schema import Config, ShardingStrategy, WrapPolicy
from shardkit.errors import ShardkitError
from shardkit.plan.answer import Change, Request, Row, configured_strategy, possible_strategies, row
from shardkit.plan.closed_form import Estimate, with_strategy
from shardkit.plan.devices import SPARE, Device

RULE = f"least traffic over the slowest link among those that fit with {SPARE:.0%} to spare"


def suggest(estimates: Mapping[ShardingStrategy, Estimate], device: Device) -> tuple[ShardingStrategy, str]:
    """The strategy to take, and why. Without a known memory, the one that needs least."""

    def peak(strategy: ShardingStrategy) -> int:
        return estimates[strategy].memory.peak.total

    def slowness(strategy: ShardingStrategy) -> tuple[int, int, int]:
        sent = estimates[strategy].traffic
        return sent.between_bytes, sent.inside_bytes, peak(strategy)

    least = min(estimates, key=peak)
    if device.memory_bytes is None:
        return least, "least memory; the device's is not known"
    spare = [strategy for strategy in estimates if device.fits_with_spare(peak(strategy))]
    if spare:
        return min(spare, key=slowness), RULE
    tight = [strategy for strategy in estimates if device.fits(peak(strategy))]
    if tight:
        return least, f"least memory; it fits, with less than {SPARE:.0%} to spare"
    return least, "least memory; nothing fits as it is"


def changes(request: Request) -> tuple[Change, ...]:
    """What would lower the peak of the request's own configuration, the largest effect first, each on its own.

    Where none of them is enough, the last one is a combination that is, if there is one. Changes without effect on the
    peak are left out.
    """
    found = sorted((change for _, change in _tried(request)), key=lambda change: change.peak_bytes)
    together = None if any(change.fits for change in found) else _together(request)
    return (*found, together) if together else tuple(found)


def _tried(request: Request) -> Iterator[tuple[Request, Change]]:
    """Every single change that lowers the peak, and the request with it."""
    peak = row(request).memory.peak.total
    for text, changed in _candidates(request):
        try:
            other = row(changed)
        except ShardkitError:
            continue
        if other.memory.peak.total < peak:
            yield changed, Change(text, other.memory.peak.total, other.fits)


def _together(request: Request, most: int = 6) -> Change | None:
    """Changes one after the other, the most effective first, until it fits; None where it never does.

    The optimizer stays: another one is another training.
    """
    texts: list[str] = []
    for _ in range(most):
        possible = [(r, c) for r, c in _tried(request) if r.optimizer == request.optimizer]
        if not possible:
            return None
        request, change = min(possible, key=lambda each: each[1].peak_bytes)
        texts.append(change.text)
        if change.fits:
            return Change(" and ".join(_last_of_each(texts)), change.peak_bytes, True)
    return None


def _last_of_each(texts: list[str]) -> list[str]:
    """Texts without those that a later one replaces: the same flag or key with another value."""
    by_key = {text.split()[0]: text for text in texts}
    return [text for text in texts if by_key[text.split()[0]] is text]


def _candidates(request: Request) -> Iterator[tuple[str, Request]]:
    config = request.config
    yield from _other_layouts(request)
    yield from _other_loads(request)
    if not config.fsdp.activation_checkpointing:
        text = "fsdp_activation_checkpointing: true (a third more compute)"
        yield text, request.with_config(_fsdp(config, activation_checkpointing=True))
    if dtypes(config).param is None:
        yield "mixed_precision: bf16", request.with_config(config.model_copy(update={"mixed_precision": "bf16"}))


def _other_layouts(request: Request) -> Iterator[tuple[str, Request]]:
    config = request.config
    for strategy in possible_strategies(request):
        if strategy is not configured_strategy(config):
            text = f"fsdp_sharding_strategy: {strategy.value}"
            yield text, request.with_config(with_strategy(config, strategy))
    if config.mode == "fsdp" and not config.fsdp.offload_params:
        text = "fsdp_offload_params: true (slower steps, host memory)"
        yield text, request.with_config(_fsdp(config, offload_params=True))
    if config.mode == "fsdp" and config.fsdp.auto_wrap_policy is WrapPolicy.NO_WRAP:
        text = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"
        update = {"auto_wrap_policy": WrapPolicy.TRANSFORMER_BASED_WRAP, "transformer_layer_cls_to_wrap": []}
        yield text, request.with_config(_fsdp(config, **update))


def _other_loads(request: Request) -> Iterator[tuple[str, Request]]:
    from dataclasses import replace

    for factor in (2, 4):
        size = request.world_size * factor
        yield f"--world {size} ({factor} x the ranks)", replace(request, world_size=size)
    if request.batch_size and request.batch_size > 1:
        half = request.batch_size // 2
        text = f"--batch-size {half}, accumulating twice as often"
        yield text, replace(request, batch_size=half)
    if request.optimizer in {"adam", "adamw"}:
        yield "--optimizer adafactor (another optimizer)", replace(request, optimizer="adafactor")


def _fsdp(config: Config, **update: Any) -> Config:
    return config.model_copy(update={"fsdp": config.fsdp.model_copy(update=update)})


def suggest_from(rows: list[Row], device: Device) -> tuple[ShardingStrategy, str]:
    """`suggest` for rows."""
    return suggest({r.strategy: r.estimate for r in rows}, device)
