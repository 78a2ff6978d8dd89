"""Memory, fit and traffic of each strategy, and the suggested one. From the closed form: instant, without torch."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache

from shardkit.config.meaning import dtypes, offloads_state, with_strategy
from shardkit.config.schema import Config, DistributedType, FsdpConfig, ShardingStrategy, WrapPolicy
from shardkit.errors import ShardkitError, UsageError
from shardkit.model.adapters import Adapters, adapted
from shardkit.model.describe import ModelDescription
from shardkit.plan.answer import fits, yes_no
from shardkit.plan.closed_form import Estimate, estimate
from shardkit.plan.devices import Device
from shardkit.plan.suggest import Candidate, suggest
from shardkit.sizes import GIB, MIB, in_words
from shardkit.wizard.conditions import device_elsewhere
from shardkit.wizard.prompter import Option
from shardkit.wizard.situation import CPU, HERE, SEVERAL, Situation

HEAD = f"{'memory':>11}  {'fits':<4}  traffic a step"
TOKENS = 2048
"""The wizard does not ask for a batch size: memory includes the activations of one sequence of at most this length."""
_USUAL = Adapters(16)
_ONLY_ADAPTERS = f"adapters in place of all weights (shardkit config {' '.join(_USUAL.flags)})"
LABEL_WIDTH = 24
"""Width before the table's head: number, longest strategy name, and gaps."""


class _Offload(Enum):
    """What is in host memory, from the fastest steps to the least device memory."""

    NONE = "nothing"
    STATE = "the optimizer's state"
    ALL = "parameters, gradients and state"

    def in_config(self, config: Config) -> Config:
        return config.changed(
            fsdp={"offload_params": self is _Offload.ALL}, shardkit={"offload_optimizer": self is _Offload.STATE}
        )


def device_of(s: Situation) -> Device:
    """One rank's device for planning: its GPU, or its share of the host; memory is None for another machine."""
    if s.on_tpu:
        return Device("TPU", None, {})
    if s.on_cpu:
        share = s.hardware.memory_bytes // max(1, s.per_machine) if s.where in {HERE, CPU, SEVERAL} else None
        return Device("CPU", share, {}, reserve_bytes=0)
    if (elsewhere := device_elsewhere(s)) is not None:
        return elsewhere
    return Device("GPU", min((d.memory_bytes for d in s.hardware.devices if d.memory_bytes), default=None), {})


def estimates(s: Situation) -> dict[ShardingStrategy, Estimate]:
    """An estimate for each possible strategy; empty without a model."""
    if s.model is None or s.on_tpu:
        return {}
    tried = {each: _estimate(s.model, with_strategy(_config(s), each), s) for each in ShardingStrategy}
    return {strategy: found for strategy, found in tried.items() if found is not None}


def cells(found: Estimate, device: Device) -> str:
    """One strategy's table cells, as wide as `HEAD`."""
    peak, has_room, sent = in_words(found.memory.peak.total), yes_no(fits(device, found.memory)), found.traffic
    unit, name = (GIB, "GiB") if sent.inside_bytes + sent.between_bytes >= GIB / 10 else (MIB, "MiB")
    between = f" + {sent.between_bytes / unit:,.1f}" if sent.between_bytes else ""
    return f"{peak:>11}  {has_room:<4}  {sent.inside_bytes / unit:,.1f}{between} {name}"


def strategy_lines(s: Situation) -> Sequence[str]:
    """The lines above the table."""
    if s.model is None:
        return () if s.on_tpu else ("With a model (--model), memory and traffic are shown for each strategy.",)
    device = device_of(s)
    has = f" (it has {in_words(device.memory_bytes)})" if device.memory_bytes else ""
    trained = f"{s.adapters.text}, " if s.adapters else ""
    what = (
        f"Memory of one rank{has}: {trained}weights, gradients, AdamW state, gathered units; "
        f"{_of_activations(s.model)}."
    )
    kept = f" {in_words(device.reserve_bytes)} are reserved for the driver." if has and device.reserve_bytes else ""
    between = " Traffic + traffic between machines." if s.machines > 1 else ""
    return (what + kept + between, " " * LABEL_WIDTH + HEAD)


def suggest_strategy(s: Situation, possible: Sequence[ShardingStrategy]) -> tuple[ShardingStrategy, str]:
    """The suggested strategy and the reason, as in `shardkit plan`."""
    found = [Candidate(each, one.memory, one.traffic) for each, one in estimates(s).items() if each in possible]
    strategy, reason = suggest(found, device_of(s)) if found else (None, "")
    if strategy is None:
        what = "model is" if not found else "model's activations are"
        return ShardingStrategy.FULL_SHARD, f"least memory, the safe choice while the {what} not known"
    return strategy, reason


def _tokens(model: ModelDescription) -> int | None:
    """Tokens of the sequence whose activations are counted; None where they are unknown."""
    facts = model.facts
    return min(facts.seq_len or TOKENS, TOKENS) if facts and not facts.gaps else None


def _of_activations(model: ModelDescription) -> str:
    tokens = _tokens(model)
    return f"activations of {tokens:,} tokens" if tokens else "NO activations"


def suggest_offload(s: Situation) -> tuple[bool, str]:
    """Whether CPU offload is suggested, and why."""
    if s.on_cpu:
        return False, "on a CPU, everything is already in host memory"
    if _first_that_fits(s) is _Offload.ALL:
        return True, "without it, the chosen strategy does not fit"
    return False, "steps are faster without it"


def suggest_offload_of_state(s: Situation) -> tuple[bool, str]:
    """Whether the optimizer's state alone is suggested for host memory, and why."""
    if not s.on_cpu and _first_that_fits(s) is _Offload.STATE:
        return True, "without it, the chosen strategy does not fit"
    return False, "steps are faster without it"


def offload_texts(s: Situation) -> tuple[str, str]:
    """The consequences of no and yes."""
    if s.on_cpu:
        return "everything is in host memory already", "no effect on a CPU"
    return _offload_texts(s, _Offload.ALL) or ("fastest steps", "least GPU memory, slower steps")


def offload_of_state_texts(s: Situation) -> tuple[str, str]:
    """The same for the optimizer's state alone."""
    return _offload_texts(s, _Offload.STATE) or ("fastest steps", "less GPU memory, a copy there and back each step")


def _offload_texts(s: Situation, offload: _Offload) -> tuple[str, str] | None:
    """None where the model's memory is unknown."""
    without, with_offload = _offload_estimate(s, _Offload.NONE), _offload_estimate(s, offload)
    if without is None or with_offload is None:
        return None
    host = with_offload.memory.host.total * s.per_machine
    room = "" if not s.gpus or host <= s.hardware.memory_bytes else ", more than this machine has"
    return (
        f"{in_words(without.memory.peak.total)} of GPU memory, fastest steps",
        f"{in_words(with_offload.memory.peak.total)}, and {in_words(host)} of each machine's host memory{room}; slower",
    )


def review_lines(s: Situation, config: Config) -> Sequence[str]:
    """The review's lines about memory."""
    if s.model is None or s.on_tpu:
        return ()
    found = _estimate(s.model, config, s)
    if found is None:
        return ()
    device, peak, host = device_of(s), found.memory.peak.total, found.memory.host.total
    has = f" of {in_words(device.memory_bytes)}" if device.memory_bytes else ""
    kind = f" ({device.name})" if s.planned_device else ""
    lines = [
        f"Memory of each rank: {in_words(peak)}{has}{kind}, with {_of_activations(s.model)} "
        "(an estimate, as in shardkit plan)."
    ]
    if device.fits(peak) is False:
        ways = ", ".join(_less_memory(s, config, peak)) or "a smaller model, or devices with more memory"
        lines.append(f"! This does not fit. It needs less with: {ways}.")
    elif config.fsdp.offload_params and host:
        lines.append(f"CPU offload is on: {in_words(host * s.per_machine)} of host memory on each machine.")
    elif offloads_state(config) and host:
        lines.append(f"Optimizer state is in host memory: {in_words(host * s.per_machine)} on each machine.")
    return tuple(lines)


def _less_memory(s: Situation, config: Config, peak_bytes: int) -> list[str]:
    """What would lower the peak, by estimates: settings that the configuration does not have yet, and machines."""
    assert s.model is not None
    tried = {
        "FULL_SHARD": with_strategy(config, ShardingStrategy.FULL_SHARD),
        "activation checkpointing": config.changed(fsdp={"activation_checkpointing": True}),
    }
    if config.mode == "fsdp" and not s.on_cpu:
        tried["optimizer state in host memory"] = _Offload.STATE.in_config(config)
        tried["CPU offload"] = _Offload.ALL.in_config(config)
    if (ranks := _sharing_that_fits(s, config)) is not None:
        tried[f"sequences shared by {ranks} ranks"] = _shared_by(config, ranks)
    found = {name: _estimate(s.model, other, s) for name, other in tried.items()}
    found["more machines"] = _estimate(s.model, config, _with_twice_the_machines(s))
    found[_ONLY_ADAPTERS] = _estimate(s.model, config, replace(s, adapters=_USUAL)) if _may_have_adapters(s) else None
    return [name for name, other in found.items() if other and other.memory.peak.total < peak_bytes]


def _with_twice_the_machines(s: Situation) -> Situation:
    return replace(s, answers={**s.answers, "num_machines": 2 * s.machines})


def _may_have_adapters(s: Situation) -> bool:
    """Whether adapters alone could be trained in place of all weights."""
    try:
        return s.adapters is None and s.model is not None and bool(adapted(s.model, _USUAL))
    except UsageError:
        return False


def _sharing_that_fits(s: Situation, config: Config) -> int | None:
    """The fewest ranks that have to share each sequence so that it fits; None where no number is enough. None for
    attention in windows, whose masks are of whole sequences on every rank."""
    facts = s.model.facts if s.model is not None else None
    if s.model is None or facts is None or facts.window:
        return None
    for ranks in range(config.shardkit.mesh.context_size + 1, s.world_size + 1):
        if s.world_size % ranks == 0 and facts.heads % ranks == 0:
            found = _estimate(s.model, _shared_by(config, ranks), s)
            if found is not None and fits(device_of(s), found.memory):
                return ranks
    return None


def shared_text(s: Situation, ranks: int) -> str:
    """A rank's peak memory where so many share each sequence; "" where it is unknown."""
    if s.model is None or s.strategy is None:
        return ""
    found = _estimate(s.model, _shared_by(_with_details(s), ranks), s)
    return f"{in_words(found.memory.peak.total)}, with {_of_activations(s.model)}" if found else ""


def _shared_by(config: Config, ranks: int) -> Config:
    return config.changed(shardkit={"mesh": {"context_size": ranks}})


def _first_that_fits(s: Situation) -> _Offload | None:
    """The cheapest way in which the chosen strategy fits; None where none does, or it is unknown whether one does."""
    for offload in _Offload:
        found = _offload_estimate(s, offload)
        if found is None or (is_enough := fits(device_of(s), found.memory)) is None:
            return None
        if is_enough:
            return offload
    return None


def _offload_estimate(s: Situation, offload: _Offload) -> Estimate | None:
    """The chosen strategy with that in host memory."""
    if s.model is None or s.strategy is None:
        return None
    return _estimate(s.model, offload.in_config(with_strategy(_config(s), s.strategy)), s)


def with_peaks(s: Situation, field: str, options: Sequence[Option]) -> Sequence[Option]:
    """The options of an FSDP setting, with a rank's peak memory for each if the model is known."""
    if s.model is None or s.strategy is None:
        return options
    shown = []
    for option in options:
        found = _estimate(s.model, _with_details(s, **{field: option.value}), s)
        peak = f"{in_words(found.memory.peak.total)}; " if found else ""
        shown.append(replace(option, consequence=peak + option.consequence))
    return shown


def _with_details(s: Situation, **chosen: object) -> Config:
    """The configuration from the answers so far, with one more FSDP setting."""
    assert s.strategy is not None
    data = with_strategy(_config(s), s.strategy).model_dump()
    data["fsdp"] |= {key.removeprefix("fsdp."): given for key, given in s.answers.items() if key.startswith("fsdp.")}
    data["fsdp"] |= chosen
    return Config.model_validate(data)


def _config(s: Situation) -> Config:
    """The configuration from the answers so far, without offload, with wrapping that suits the model."""
    sharing = s.base.shardkit.mesh.context_size
    return s.base.changed(
        distributed_type=DistributedType.FSDP,
        mixed_precision=s.answers.get("mixed_precision", s.base.mixed_precision),
        num_machines=s.machines,
        num_processes=s.world_size,
        fsdp={"offload_params": False, "reshard_after_forward": None, **_wrapping(s)},
        shardkit={"offload_optimizer": False, "mesh": {"context_size": 1 if s.world_size % sharing else sharing}},
    )


def _wrapping(s: Situation) -> dict[str, object]:
    default = FsdpConfig()
    as_given = s.base.fsdp.auto_wrap_policy is not default.auto_wrap_policy or s.base.fsdp.transformer_layer_cls_to_wrap
    if as_given or s.model is None or s.model.suggested_classes:
        return {}
    return {"auto_wrap_policy": WrapPolicy.SIZE_BASED_WRAP, "min_num_params": max(1, s.model.numel // 4)}


def _estimate(model: ModelDescription, config: Config, s: Situation) -> Estimate | None:
    """The estimate; None where the closed form does not apply, such as an invalid mesh."""
    trained = _trained(_Model(model), s.adapters, dtypes(config).param or "fp32")
    return _estimated(trained, config.model_dump_json(), s.world_size, s.per_machine)


class _Model:
    """A description hashed by identity, so that large trees are not compared by value."""

    def __init__(self, description: ModelDescription) -> None:
        self.description = description

    def __hash__(self) -> int:
        return id(self.description)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and other.description is self.description


@lru_cache(maxsize=16)
def _trained(model: _Model, adapters: Adapters | None, compute: str) -> _Model:
    """The model as it is trained."""
    return model if adapters is None else _Model(adapted(model.description, replace(adapters, compute=compute)))


@lru_cache(maxsize=256)
def _estimated(model: _Model, config_json: str, world_size: int, per_machine: int) -> Estimate | None:
    config = Config.model_validate_json(config_json)
    tokens = _tokens(model.description)
    try:
        return estimate(
            model.description.tree,
            config,
            world_size=world_size,
            ranks_per_machine=per_machine,
            facts=model.description.facts,
            batch_size=1 if tokens else None,
            seq_len=tokens,
        )
    except ShardkitError:
        return None
