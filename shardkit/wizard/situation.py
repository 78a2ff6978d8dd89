"""The situation of a question: the hardware, the model, the answers so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkit.config.hardware import Hardware
from shardkit.config.schema import Config, ShardingStrategy
from shardkit.model.adapters import Adapters
from shardkit.model.describe import ModelDescription
from shardkit.model.sources import is_by_sizes
from shardkit.wording import counted

HERE, CPU, ELSEWHERE, SEVERAL, SLURM, TPU = "here", "cpu", "elsewhere", "several", "slurm", "tpu"


@dataclass(frozen=True)
class Situation:
    """What is known when a question is asked. `answers`: the settled answers of all earlier questions that apply."""

    hardware: Hardware
    model: ModelDescription | None = None
    adapters: Adapters | None = None
    """What is trained of the model, where that is not all; for the estimates only."""
    answers: Mapping[str, Any] = field(default_factory=dict)
    base: Config = field(default_factory=Config)
    has_base: bool = False
    """Whether `base` was read from a file: its values are then possible answers."""
    folder: Path = field(default_factory=Path.cwd)

    @property
    def is_in_slurm_job(self) -> bool:
        """Whether this shell runs in a SLURM job, so that the machines are known."""
        return self.hardware.scheduler is not None and self.hardware.scheduler.name == "SLURM"

    @property
    def gpus(self) -> int:
        """GPUs of this machine."""
        return len(self.hardware.devices)

    @property
    def devices_text(self) -> str:
        """This machine's devices as text."""
        names = sorted({device.name for device in self.hardware.devices})
        return f"{self.gpus} x {', '.join(names)}" if self.gpus else f"CPU only, {counted(self.hardware.cores, 'core')}"

    @property
    def planned_device(self) -> str | None:
        """The other machines' GPU as `shardkit plan --device` takes it; None if it is detected here or unknown."""
        chosen = self.answers.get("gpu")
        return {"other": self.answers.get("gpu_memory"), "unknown": None}.get(str(chosen), chosen)

    @property
    def where(self) -> str:
        return self.answers.get("where", HERE)

    @property
    def on_tpu(self) -> bool:
        return self.where == TPU

    @property
    def on_cpu(self) -> bool:
        if self.where == HERE:
            return self.gpus == 0
        return self.where == CPU or bool(self.answers.get("use_cpu", False))

    @property
    def machines(self) -> int:
        return int(self.answers.get("num_machines", 1))

    @property
    def per_machine(self) -> int:
        return int(self.answers.get("processes_per_machine", 1))

    @property
    def world_size(self) -> int:
        return self.machines * self.per_machine

    @property
    def strategy(self) -> ShardingStrategy | None:
        """The chosen strategy; None for a single process."""
        name = self.answers.get("fsdp.sharding_strategy")
        return ShardingStrategy(name) if name else None

    @property
    def shards(self) -> bool:
        """Whether FSDP runs: more than one process, and a strategy other than NO_SHARD."""
        return self.strategy not in (None, ShardingStrategy.NO_SHARD)

    @property
    def has_class_names(self) -> bool:
        """Whether the model's class names are those of the training script: False if only sizes are known."""
        return self.model is not None and self.model.has_class_names and not is_by_sizes(self.model.spec)
