"""PartialState and AcceleratorState: all objects of a class share one state, until it is reset.

A PartialState can start the process group without an Accelerator. An Accelerator sets the state of both classes.
"""

from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardkit.compat.kinds import DistributedType
from shardkit.compat.plugins import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from shardkit.distributed import accelerators, process
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.runtime import settings
from shardkit.runtime.process_control import ProcessControl
from shardkit.runtime.run import Run
from shardkit.runtime.state import FsdpPlugin
from shardkit.runtime.topology import distributed_type_of
from shardkit.sharding import precision

log = get_logger(__name__)


def is_initialized() -> bool:
    """Whether an Accelerator or an AcceleratorState was created in this process."""
    return bool(AcceleratorState._shared_state)


def kind_of(mode: str, world_size: int, device: torch.device) -> DistributedType:
    """The distributed type, of Accelerate's enumeration."""
    return DistributedType(distributed_type_of(mode, world_size, device).value)


class _State(ProcessControl):
    """What both states share."""

    device: torch.device
    distributed_type: DistributedType
    _shared_state: ClassVar[dict[str, Any]]
    _known_attributes: ClassVar[list[str]]
    _why_missing: ClassVar[str]
    """Why none of the known attributes may be there, and what to do."""

    @property
    def initialized(self) -> bool:
        """Whether the state is set."""
        return bool(self._shared_state)

    @property
    def default_device(self) -> torch.device:
        """The device type of this machine."""
        return torch.device(accelerators.kind() or "cpu")

    def set_device(self) -> None:
        """Does nothing: the device was chosen when the process group was started."""

    def __getattr__(self, name: str) -> Any:
        if name in self._known_attributes:
            raise AttributeError(f"{type(self).__name__}.{name}: {self._why_missing}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type.value}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


class PartialState(_State):
    """This process's rank and device. The first one starts the process group, which is collective: every rank creates
    one."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attributes: ClassVar[list[str]] = [
        *("_cpu", "_mixed_precision", "_shared_state", "backend", "debug", "device", "distributed_type"),
        *("fork_launched", "local_process_index", "num_processes", "process_index"),
    ]
    _why_missing = "the state was reset (got _reset_state()); create a new PartialState()."
    _has_started_group: ClassVar[bool] = False
    """Whether a PartialState started the current process group; a reset does not end it."""
    _timeout: ClassVar[timedelta | None] = None
    """The timeout of the current process group, if it was given here and not in shardkit.yaml."""

    def __init__(self, cpu: bool = False, **arguments: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self._start(cpu, **arguments)

    def _start(
        self,
        cpu: bool,
        timeout: timedelta | None = None,
        backend: str | None = None,
        init_method: str | None = None,
        _run: Run | None = None,
        **others: Any,
    ) -> None:
        """Start the process group, or use that of an Accelerator's run. The backend is chosen by the device, and
        the rendezvous by the launcher."""
        if any(others.values()):
            raise UsageError(
                f"PartialState: unknown arguments (got {', '.join(others)}); use cpu, timeout, and shardkit.yaml for "
                "other settings."
            )
        place, config = (_run.process, _run.config) if _run else _joined(cpu, timeout)
        PartialState._has_started_group |= place.owns_group
        self.num_processes = place.world_size
        self.process_index = place.rank
        self.local_process_index = place.local_rank
        self.device = place.device
        self.backend = place.backend if place.backend != "none" else None
        self.distributed_type = kind_of("ddp", place.world_size, place.device)
        self.debug = config.debug
        self.fork_launched = False
        self._cpu = place.device.type == "cpu"
        self._is_cpu_asked_for = cpu
        self._mixed_precision = config.mixed_precision

    @staticmethod
    def _reset_state() -> None:
        """Clear the state. The process group stays."""
        PartialState._shared_state.clear()

    def destroy_process_group(self, group: Any = None) -> None:
        """End the process group, if a PartialState started it. Every rank must call it."""
        if group is not None:
            torch.distributed.destroy_process_group(group)
        elif PartialState._has_started_group:
            PartialState._has_started_group, PartialState._timeout = False, None
            process.leave()


def _joined(cpu: bool, timeout: timedelta | None) -> tuple[process.Process, Any]:
    found = settings.settings(None, cpu=cpu or None)
    config = process.check_world(found.config, found.chosen)
    name = "shardkit.launch.process_group_timeout_s"
    if not torch.distributed.is_initialized():
        PartialState._timeout = timeout if name not in found.chosen else None
    if PartialState._timeout is not None:
        config = settings.with_value(config, name, PartialState._timeout.total_seconds())
    return process.start(config), config


class AcceleratorState(_State):
    """As PartialState, with the settings of the newest Accelerator."""

    _shared_state: ClassVar[dict[str, Any]] = {}
    _known_attributes: ClassVar[list[str]] = [
        *PartialState._known_attributes,
        *("deepspeed_plugin", "use_ipex", "fsdp_plugin", "megatron_lm_plugin", "dynamo_plugin"),
    ]
    _why_missing = "no Accelerator exists yet, or the state was reset; create an Accelerator()."

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **arguments: Any) -> None:
        self.__dict__ = self._shared_state
        run = arguments.pop("_run", None)
        if run is not None or not self.initialized:
            self._fill(run, cpu, mixed_precision)
        elif mixed_precision is not None and mixed_precision != self.mixed_precision:
            raise UsageError(
                f"AcceleratorState: the mixed precision of this process is {self.mixed_precision} already (got "
                f"{mixed_precision}); give the same, or call AcceleratorState._reset_state() first."
            )

    def _fill(self, run: Run | None, cpu: bool, mixed_precision: str | None) -> None:
        if run is not None:
            PartialState._reset_state()
        partial = PartialState(cpu, _run=run)
        self.__dict__.update(partial.__dict__)
        self.deepspeed_plugins = self.megatron_lm_plugin = self.torch_tp_plugin = None
        self.dynamo_plugin = TorchDynamoPlugin()
        self.parallelism_config: Any = None
        self.use_ipex = False
        self.fsdp_plugin: FullyShardedDataParallelPlugin | None = None
        self._mixed_precision = mixed_precision or partial._mixed_precision
        self.device_mesh = None
        if run is not None:
            self._mixed_precision = run.config.mixed_precision
            self.device_mesh = run.mesh
            self.distributed_type = kind_of(run.config.mode, run.process.world_size, run.device)
            if run.config.mode == "fsdp":
                self.fsdp_plugin = running_plugin(run)

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self.mixed_precision}\n"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Clear the state; with `reset_partial_state` PartialState's, too. The process group stays."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    @property
    def mixed_precision(self) -> str:
        """no, fp16, bf16, fp8 or mxfp8."""
        return self._mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP is used; it is always FSDP2."""
        return self.distributed_type is DistributedType.FSDP

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed is not supported."""
        return None

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Raises UsageError: DeepSpeed is not supported."""
        raise UsageError(f"get_deepspeed_plugin: DeepSpeed is not supported (got {name!r}); use fsdp_config.")

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Raises UsageError: DeepSpeed is not supported."""
        raise UsageError(f"select_deepspeed_plugin: DeepSpeed is not supported (got {name!r}); use fsdp_config.")

    def destroy_process_group(self, group: Any = None) -> None:
        """As PartialState's."""
        PartialState().destroy_process_group(group)


def running_plugin(run: Run) -> FullyShardedDataParallelPlugin:
    """The FSDP settings of a run as a plugin. Policies are torch's objects, for scripts that shard a model themselves.
    `set_state_dict_type` on it changes the run's type."""
    section, live, dtypes = run.config.fsdp, FsdpPlugin(run), precision.of(run.config)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        sharding_strategy=section.sharding_strategy.value,
        reshard_after_forward=section.sharding_strategy.reshards_after_forward,
        backward_prefetch=section.backward_prefetch.value,
        mixed_precision_policy=MixedPrecisionPolicy(
            param_dtype=dtypes.param if dtypes.is_mixed else None,
            reduce_dtype=dtypes.reduce if dtypes.is_mixed else None,
        ),
        auto_wrap_policy=section.auto_wrap_policy.value,
        cpu_offload=CPUOffloadPolicy() if section.offload_params else OffloadPolicy(),
        ignored_modules=section.ignored_modules,
        state_dict_type=section.state_dict_type.value,
        limit_all_gathers=section.limit_all_gathers,
        use_orig_params=True,
        sync_module_states=section.sync_module_states,
        forward_prefetch=section.forward_prefetch,
        activation_checkpointing=section.activation_checkpointing,
        cpu_ram_efficient_loading=section.cpu_ram_efficient_loading,
        transformer_cls_names_to_wrap=list(section.transformer_layer_cls_to_wrap),
        min_num_params=section.min_num_params,
    )
    plugin.on_state_dict_type = live.set_state_dict_type
    return plugin
