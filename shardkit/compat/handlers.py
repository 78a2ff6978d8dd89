"""Accelerate's kwargs handlers: objects with settings that are in shardkit.yaml otherwise.

`shardkit_settings()` of each returns {dotted YAML key: value} for the fields that differ from the class's defaults.
Other settings come from the file.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from shardkit.compat.kinds import DDPCommunicationHookType
from shardkit.errors import UsageError


@dataclass
class KwargsHandler:
    """Keyword arguments for an object that the Accelerator creates."""

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from the class's defaults."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}

    def shardkit_settings(self) -> dict[str, Any]:
        """{dotted key of shardkit.yaml: value}. Raises UsageError for unsupported settings."""
        return {}


def _only(handler: KwargsHandler, known: dict[str, str]) -> dict[str, Any]:
    """{key: value} of the handler's fields. Raises UsageError if a field is set that is not in `known`."""
    given = handler.to_kwargs()
    unknown = {name: value for name, value in given.items() if name not in known}
    if unknown:
        got = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise UsageError(
            f"{type(handler).__name__}: shardkit has no such setting (got {got}); remove it. Supported are "
            f"{', '.join(known)}."
        )
    return {known[name]: value for name, value in given.items()}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Whether `accelerator.autocast` casts."""

    enabled: bool = True
    cache_enabled: bool | None = None

    def shardkit_settings(self) -> dict[str, Any]:
        if not self.enabled:
            raise UsageError(
                "AutocastKwargs(enabled=...): what a run computes in is its mixed precision (got False); leave it out "
                "and give mixed_precision='no', or give it to accelerator.autocast(autocast_handler=...) alone."
            )
        return {}


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How DDP exchanges gradients."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def shardkit_settings(self) -> dict[str, Any]:
        known = {
            "broadcast_buffers": "shardkit.ddp.broadcast_buffers",
            "bucket_cap_mb": "shardkit.ddp.bucket_cap_mb",
            "find_unused_parameters": "shardkit.ddp_find_unused_parameters",
            "static_graph": "shardkit.ddp.static_graph",
            "comm_hook": "shardkit.ddp.comm_hook",
            "comm_wrapper": "shardkit.ddp.comm_wrapper",
            "comm_state_option": "",
            "gradient_as_bucket_view": "",
            "check_reduction": "",
        }
        given = _only(self, known)
        given.pop("", None)  # these two change memory use or nothing; comm_state_option is read by _hook_state
        return {key: getattr(value, "value", value) for key, value in given.items()} | self._hook_state()

    def _hook_state(self) -> dict[str, Any]:
        known = {
            "matrix_approximation_rank": "shardkit.ddp.power_sgd_rank",
            "start_powerSGD_iter": "shardkit.ddp.power_sgd_start_step",
        }
        unknown = sorted(set(self.comm_state_option) - set(known))
        if unknown:
            raise UsageError(
                f"DistributedDataParallelKwargs: comm_state_option: unknown options (got {', '.join(unknown)}); "
                f"use {', '.join(known)}."
            )
        return {known[name]: value for name, value in self.comm_state_option.items()}


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Loss scaling for fp16."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def shardkit_settings(self) -> dict[str, Any]:
        names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
        return _only(self, {name: f"shardkit.precision.{name}" for name in names})


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is created."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def shardkit_settings(self) -> dict[str, Any]:
        """The timeout. The backend is chosen by the device, and the rendezvous by the launcher."""
        return {} if self.timeout is None else {"shardkit.launch.process_group_timeout_s": self.timeout.total_seconds()}


_RECORDED = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@dataclass
class ProfileKwargs(KwargsHandler):
    """What `accelerator.profile()` records."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def shardkit_settings(self) -> dict[str, Any]:
        known = {name: f"shardkit.profile.{name}" for name in ("activities", *_RECORDED)}
        known |= {"output_trace_dir": "shardkit.profile.folder", "schedule_option": "", "on_trace_ready": ""}
        given = _only(self, known)
        given.pop("", None)
        return given | {f"shardkit.profile.{name}": value for name, value in (self.schedule_option or {}).items()}

    def build(self) -> Any:
        """A torch profiler with these options."""
        from torch import profiler

        activities = None
        if self.activities is not None:
            activities = [getattr(profiler.ProfilerActivity, name.upper()) for name in self.activities]
        return profiler.profile(
            activities=activities,
            schedule=profiler.schedule(**self.schedule_option) if self.schedule_option else None,
            on_trace_ready=self.on_trace_ready,
            **{name: getattr(self, name) for name in _RECORDED},
        )
