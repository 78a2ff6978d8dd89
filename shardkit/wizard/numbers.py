"""Memory, fit and traffic beside each strategy, and which one follows from them. The closed form: instant, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardkit.config.schema import Config, DistributedType, FsdpConfig, ShardingStrategy, WrapPolicy
from shardkit.errors import ShardkitError
from shardkit.model.blocks import BlockClass
from shardkit.model.describe import Description
from shardkit.plan.closed_form import Estimate, estimate, with_strategy
from shardkit.wizard.situation import CPU, ELSEWHERE, HERE, SEVERAL, Situation

SPARE = 0.2
"""Part of the memory that must stay free, for activations and fragments, where a strategy is suggested."""
GIB = 2**30
HEAD = f"{'memory':>11}  {'fits':<4}  traffic/step (+ between machines)"
LABEL_WIDTH = 24
"""Blanks before the table's head: number, longest strategy name, and the gaps between."""


@dataclass(frozen=True)
class Row:
    """One strategy on the hardware that was chosen: bytes on a rank, and bytes that it sends in one step."""

    memory_bytes: int
    host_bytes: int
    inside_bytes: int
    across_bytes: int

    def fits(self, available_bytes: int | None, spare: float = 0.0) -> bool | None:
        """Whether it fits with a part left over; None where nobody knows."""
        return None if available_bytes is None else self.memory_bytes <= available_bytes * (1 - spare)

    def text(self, available_bytes: int | None) -> str:
        """The cells of the table, as wide as `HEAD`."""
        fits = {None: "-", True: "yes", False: "NO"}[self.fits(available_bytes)]
        unit, name = (GIB, "GiB") if self.inside_bytes + self.across_bytes >= GIB / 10 else (2**20, "MiB")
        across = f" + {self.across_bytes / unit:,.1f}" if self.across_bytes else ""
        return f"{gib(self.memory_bytes):>11}  {fits:<4}  {self.inside_bytes / unit:,.1f}{across} {name}"


def gib(count: int) -> str:
    """Bytes in GiB, or in MiB where there are few."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:,.1f} MiB"


def available_bytes(s: Situation) -> int | None:
    """Memory for one rank: its GPU's, or its part of the host's; None where the machine is not this one."""
    if s.on_tpu or s.where == ELSEWHERE:
        return None
    if s.on_cpu:
        return s.hardware.memory_bytes // max(1, s.per_machine) if s.where in {HERE, CPU, SEVERAL} else None
    return min((device.memory_bytes for device in s.hardware.devices if device.memory_bytes), default=None)


def strategy_rows(s: Situation) -> dict[ShardingStrategy, Row]:
    """A row for each strategy that is possible; empty without a model."""
    if s.model is None or s.on_tpu:
        return {}
    rows = {}
    for strategy in ShardingStrategy:
        row = _row(s.model, with_strategy(_config(s), strategy), s.world_size, s.per_machine)
        if row is not None:
            rows[strategy] = row
    return rows


def strategy_lines(s: Situation) -> Sequence[str]:
    """What stands above the table."""
    if s.model is None:
        return () if s.on_tpu else ("Add --model module:function, and memory and traffic stand beside each.",)
    memory = available_bytes(s)
    has = f" of {gib(memory)}" if memory else ""
    what = f"Memory{has} on one rank: weights, gradients, AdamW, gathered units; activations NOT counted."
    return (what, " " * LABEL_WIDTH + HEAD)


def suggest(s: Situation, possible: Sequence[ShardingStrategy]) -> tuple[ShardingStrategy, str]:
    """The strategy to begin with, and why: least traffic over the slowest link among those that fit with 20% spare."""
    rows = {strategy: row for strategy, row in strategy_rows(s).items() if strategy in possible}
    memory = available_bytes(s)
    if not rows or memory is None:
        unknown = "the model" if not rows else "the machine's memory"
        return ShardingStrategy.FULL_SHARD, f"least memory; {unknown} is not known"
    roomy = [strategy for strategy, row in rows.items() if row.fits(memory, SPARE)]
    if not roomy:
        least = min(rows, key=lambda strategy: rows[strategy].memory_bytes)
        return least, "least memory; nothing fits with 20% to spare"
    best = min(roomy, key=lambda one: (rows[one].across_bytes, rows[one].inside_bytes, rows[one].memory_bytes))
    link = "between machines" if any(rows[one].across_bytes for one in roomy) else ""
    return best, " ".join(filter(None, ["least traffic", link, "of those that fit with 20% to spare"]))


def suggest_offload(s: Situation) -> tuple[bool, str]:
    """Whether CPU offload is on unless somebody says otherwise, and why."""
    if s.on_cpu:
        return False, "on a CPU there is nothing to offload from"
    without, with_offload = _offload_rows(s)
    memory = available_bytes(s)
    if without and with_offload and without.fits(memory) is False and with_offload.fits(memory):
        return True, "nothing fits without"
    return False, "every step is faster without"


def offload_texts(s: Situation) -> tuple[str, str]:
    """The consequences of no and yes."""
    if s.on_cpu:
        return "everything is in host memory already", "changes nothing on a CPU"
    without, with_offload = _offload_rows(s)
    if without is None or with_offload is None:
        return "fastest steps", "least GPU memory, slower steps"
    host = with_offload.host_bytes * s.per_machine
    room = "" if not s.gpus or host <= s.hardware.memory_bytes else ", more than this one has"
    return (
        f"{gib(without.memory_bytes)} of GPU memory, fastest steps",
        f"{gib(with_offload.memory_bytes)}, and {gib(host)} on each machine's host{room}; slower",
    )


def review_lines(s: Situation, config: Config) -> Sequence[str]:
    """What the review says about memory."""
    if s.model is None or s.on_tpu:
        return ()
    row = _row(s.model, config, s.world_size, s.per_machine)
    if row is None:
        return ()
    memory, lines = available_bytes(s), []
    has = f" of {gib(memory)}" if memory else ""
    lines.append(f"Memory on each rank: {gib(row.memory_bytes)}{has} and activations (an estimate; see shardkit plan).")
    if row.fits(memory) is False:
        lines.append("! This does not fit. Use more machines, a strategy that splits more, or CPU offload (Advanced).")
    elif config.fsdp.offload_params and row.host_bytes:
        lines.append(f"CPU offload is on: {gib(row.host_bytes * s.per_machine)} on each machine's host.")
    return tuple(lines)


def _offload_rows(s: Situation) -> tuple[Row | None, Row | None]:
    if s.model is None or s.strategy is None:
        return None, None
    config = with_strategy(_config(s), s.strategy)
    offloads = config.model_copy(update={"fsdp": config.fsdp.model_copy(update={"offload_params": True})})
    return tuple(_row(s.model, c, s.world_size, s.per_machine) for c in (config, offloads))  # type: ignore[return-value]


def _config(s: Situation) -> Config:
    """The configuration as far as it is answered, without offload, with the wrapping that suits the model."""
    update = {"offload_params": False, "reshard_after_forward": None}
    fsdp = s.base.fsdp.model_copy(update=update | _wrapping(s))
    return s.base.model_copy(
        update={
            "distributed_type": DistributedType.FSDP,
            "mixed_precision": s.answers.get("mixed_precision", s.base.mixed_precision),
            "num_machines": s.machines,
            "num_processes": s.world_size,
            "fsdp": fsdp,
        }
    )


def _wrapping(s: Situation) -> dict[str, object]:
    default = FsdpConfig()
    as_given = s.base.fsdp.auto_wrap_policy is not default.auto_wrap_policy or s.base.fsdp.transformer_layer_cls_to_wrap
    if as_given or s.model is None or suggested_classes(s.model):
        return {}
    return {"auto_wrap_policy": WrapPolicy.SIZE_BASED_WRAP, "min_num_params": max(1, s.model.numel // 4)}


def _row(model: Description, config: Config, world_size: int, per_machine: int) -> Row | None:
    found = _estimated(_Model(model), config.model_dump_json(), world_size, per_machine)
    if found is None:
        return None
    memory = found.memory
    return Row(memory.peak.total, memory.host.total, found.traffic.inside_bytes, found.traffic.between_bytes)


class _Model:
    """A description that is its own key: large trees are not compared value by value."""

    def __init__(self, description: Description) -> None:
        self.description = description

    def __hash__(self) -> int:
        return id(self.description)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Model) and other.description is self.description


def suggested_classes(model: Description) -> list[str]:
    """The model's repeated block classes; a large tree is walked once."""
    return _suggested_classes(_Model(model))


def block_classes(model: Description) -> list[BlockClass]:
    """Classes of the model that could be units; a large tree is walked once."""
    return _block_classes(_Model(model))


@lru_cache(maxsize=16)
def _block_classes(model: _Model) -> list[BlockClass]:
    return model.description.block_classes


@lru_cache(maxsize=16)
def _suggested_classes(model: _Model) -> list[str]:
    return model.description.suggested_classes


@lru_cache(maxsize=256)
def _estimated(model: _Model, config_json: str, world_size: int, per_machine: int) -> Estimate | None:
    """None where the closed form has no answer, such as a mesh that does not fit."""
    config = Config.model_validate_json(config_json)
    try:
        return estimate(
            model.description.tree,
            config,
            world_size=world_size,
            ranks_per_machine=per_machine,
            facts=model.description.facts,
        )
    except ShardkitError:
        return None
