"""`accelerator.state`: the topology, and the FSDP settings, of which the state dict type may change during a run."""

from typing import Any

from shardkit.config.schema import FsdpConfig, StateDictType, read_name
from shardkit.errors import ConfigError
from shardkit.runtime import settings
from shardkit.runtime.run import Run
from shardkit.runtime.topology import Topology


class FsdpPlugin:
    """The settings under `fsdp_config` as attributes; `set_state_dict_type` changes what save_state writes."""

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
        """Always 2: the version that runs, regardless of the file."""
        return 2

    @property
    def cpu_offload(self) -> bool:
        """Whether parameters and gradients are kept in host memory."""
        return self._section.offload_params

    def set_state_dict_type(self, state_dict_type: str | StateDictType) -> None:
        """Sets what save_state writes from now on: SHARDED_STATE_DICT or FULL_STATE_DICT. Loading reads both."""
        try:
            kind = StateDictType(read_name(state_dict_type))
        except ValueError:
            raise ConfigError(
                f"set_state_dict_type: unknown kind (got {state_dict_type!r}); "
                f"use {' or '.join(kind.value for kind in StateDictType)}."
            ) from None
        self._run.config = settings.with_value(self._run.config, "fsdp.state_dict_type", kind)


class State(Topology):
    """The topology of the run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.fsdp_plugin = FsdpPlugin(run)

    def __repr__(self) -> str:
        return (
            f"distributed_type: {self.distributed_type.value}, rank {self.process_index} of {self.num_processes} "
            f"(local {self.local_process_index}), device: {self.device}, mixed_precision: {self.mixed_precision}"
        )
