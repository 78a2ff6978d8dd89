"""What a run is made of. The verbs (prepare, save, resume, stop, measure) take it; `Accelerator` is their facade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.config.schema import Config
from shardkit.data.loader import PreparedLoader
from shardkit.distributed.background_agreement import BackgroundAgreement
from shardkit.distributed.process import Process
from shardkit.optim import loss_scale, rebind
from shardkit.runtime import foreign_steps
from shardkit.runtime.accumulate import Accumulation, Counters
from shardkit.runtime.hooks import StateHooks
from shardkit.runtime.lr_scheduler import AcceleratedScheduler
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.runtime.project import ProjectConfiguration
from shardkit.runtime.same_modules import SameModules
from shardkit.tracking.tracker import Tracker
from shardkit.tracking.trackers import Trackers

if TYPE_CHECKING:
    from shardkit.runtime.save_session import SaveSession


@dataclass(frozen=True)
class Loops:
    """How the script's loops are written: what `Accelerator`'s arguments of these names say."""

    step_scheduler_with_optimizer: bool = True
    device_placement: bool = True
    """Whether `prepare` moves models and batches to the rank's device, where the call does not say."""


@dataclass
class Taken:
    """A model that was prepared, and what its parameters were before: their names, and the ids of the new ones."""

    model: nn.Module
    names_before: rebind.ParameterNames
    parameters: set[int]


@dataclass
class Run:
    """One run as this rank sees it. `origins` says where each setting that somebody chose comes from."""

    config: Config
    origins: Mapping[str, str]
    process: Process
    mesh: DeviceMesh | None
    project: ProjectConfiguration
    loops: Loops = field(default_factory=Loops)
    handlers: tuple[Any, ...] = ()
    """The objects that the script gave as `kwargs_handlers`."""
    started_bytes: int = 0
    """What the process had of memory before anything was prepared."""
    watch: BackgroundAgreement | None = None
    selected_trackers: Sequence[str | Tracker] = ()
    """What the script gave as `log_with`."""
    trackers: Trackers = field(init=False)
    loads: int = 0
    """Checkpoints loaded so far."""
    hooks: StateHooks = field(default_factory=StateHooks)
    """The user's code at saves and loads."""
    saving: SaveSession | None = None
    """What saving and loading keep over the run, from their first use on."""
    counters: Counters = field(default_factory=Counters)
    """How far the run is."""
    is_resumed: bool = False
    is_announced: bool = False
    is_triggered: bool = False
    models: list[nn.Module] = field(init=False)
    evaluated: dict[nn.Module, rebind.ParameterNames] = field(init=False)
    """Models that are prepared and not trained, and the names of what their parameters were before."""
    optimizers: list[AcceleratedOptimizer] = field(init=False)
    schedulers: list[AcceleratedScheduler] = field(init=False)
    loaders: list[PreparedLoader] = field(init=False)
    registered: list[Any] = field(init=False)
    taken: list[Taken] = field(init=False)
    accumulation: Accumulation = field(init=False)
    same_modules: SameModules = field(init=False)

    def __post_init__(self) -> None:
        self.trackers = Trackers(self.selected_trackers, self.process.is_main, lambda: self.loads)
        self.forget()

    def forget(self) -> None:
        """Nothing is prepared, as at the start; the counters go on."""
        self.models, self.optimizers, self.schedulers = [], [], []
        self.evaluated = {}
        self.loaders, self.registered, self.taken = [], [], []
        self.is_resumed = self.is_announced = self.is_triggered = False
        scaler = loss_scale.make_scaler(self.config, self.device)
        steps = self.config.shardkit.gradient_accumulation_steps
        ends = self.config.shardkit.end_window_with_data
        self.accumulation = Accumulation(steps, self.models, self.loaders, scaler, self.counters, ends)
        self.same_modules = SameModules(self.models, self.process.control, self.config.debug)
        self.accumulation.before_step = self.same_modules.check
        foreign_steps.watch(self.accumulation)

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.process.device
