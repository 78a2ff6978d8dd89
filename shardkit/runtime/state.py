"""What `accelerator.state` shows: the topology, and the FSDP settings with the one that may change during a run."""

from typing import Any

import torch

from shardkit.config.schema import DistributedType, FsdpConfig, StateDictType, read_name
from shardkit.errors import ConfigError
from shardkit.runtime.run import Run


class FsdpPlugin:
    """The settings under `fsdp_config`, read as attributes; `set_state_dict_type` changes what saving writes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._section, name)

    @property
    def _section(self) -> FsdpConfig:
        return self._run.config.fsdp

    @property
    def fsdp_version(self) -> int:
        """Always 2: what runs, whatever the file was written for."""
        return 2

    @property
    def cpu_offload(self) -> bool:
        """Whether parameters and gradients live in host memory."""
        return self._section.offload_params

    def set_state_dict_type(self, state_dict_type: str | StateDictType) -> None:
        """From now on save_state writes this kind: SHARDED_STATE_DICT or FULL_STATE_DICT. Loading reads either."""
        try:
            kind = StateDictType(read_name(state_dict_type))
        except ValueError:
            raise ConfigError(
                f"set_state_dict_type: unknown kind (got {state_dict_type!r}); "
                f"use {' or '.join(kind.value for kind in StateDictType)}."
            ) from None
        config = self._run.config
        section = config.fsdp.model_copy(update={"state_dict_type": kind})
        self._run.config = config.model_copy(update={"fsdp": section})


class State:
    """The topology of the run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.fsdp_plugin = FsdpPlugin(run)

    @property
    def distributed_type(self) -> DistributedType:
        """FSDP, MULTI_GPU or MULTI_CPU (DDP), NO (one process without sharding), XLA."""
        config, device = self._run.config, self._run.device
        match config.mode:
            case "fsdp":
                return DistributedType.FSDP
            case "xla":
                return DistributedType.XLA
            case "ddp" if config.num_processes > 1:
                return DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU
            case _:
                return DistributedType.NO

    @property
    def num_processes(self) -> int:
        """Ranks in total."""
        return self._run.process.world_size

    @property
    def process_index(self) -> int:
        """This rank."""
        return self._run.process.rank

    @property
    def local_process_index(self) -> int:
        """This rank among those of its machine."""
        return self._run.process.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._run.process.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is its machine's first rank."""
        return self._run.process.is_local_main

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._run.device

    @property
    def mixed_precision(self) -> str:
        """no, fp16 or bf16."""
        return self._run.config.mixed_precision

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one rank."""
        return self._run.process.world_size > 1

    def __repr__(self) -> str:
        return (
            f"distributed_type: {self.distributed_type.value}, rank {self.process_index} of {self.num_processes} "
            f"(local {self.local_process_index}), device: {self.device}, mixed_precision: {self.mixed_precision}"
        )
