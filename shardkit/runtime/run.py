"""The state of a run. The functions of this package (prepare, save, resume, stop, measure) take it; `Accelerator` is
their facade."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.config.schema import Config
from shardkit.data.loader import PreparedLoader
from shardkit.distributed import collectives
from shardkit.distributed.background_agreement import BackgroundAgreement
from shardkit.distributed.process import Process
from shardkit.errors import UsageError
from shardkit.model.tree import ModuleNode
from shardkit.optim import loss_scale, rebind
from shardkit.runtime import settings
from shardkit.runtime.checkpoints.hooks import StateHooks
from shardkit.runtime.eager import eager
from shardkit.runtime.likely_mistakes.early_steps import EarlySteps
from shardkit.runtime.likely_mistakes.followers import Followers
from shardkit.runtime.likely_mistakes.losses_of_slices import LossesOfSlices
from shardkit.runtime.likely_mistakes.missing_models import MissingModels
from shardkit.runtime.likely_mistakes.same_data import SameData
from shardkit.runtime.likely_mistakes.same_modules import SameModules
from shardkit.runtime.likely_mistakes.same_weights import SameWeights
from shardkit.runtime.likely_mistakes.schedule_lengths import ScheduleLengths
from shardkit.runtime.likely_mistakes.steps_and_windows import StepsAndWindows
from shardkit.runtime.likely_mistakes.whole_sequences import WholeSequences
from shardkit.runtime.lr_scheduler import AcceleratedScheduler
from shardkit.runtime.nan_origin import NanOrigin
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.runtime.project import ProjectConfiguration
from shardkit.runtime.steps import foreign_steps
from shardkit.runtime.steps.accumulate import Accumulation
from shardkit.runtime.steps.counters import Counters
from shardkit.runtime.steps.step_events import StepEvents
from shardkit.sharding.context_parallel.region import Region
from shardkit.tracking.tracker import Tracker
from shardkit.tracking.trackers import Trackers

if TYPE_CHECKING:
    from shardkit.checkpoint.saving.claim import Claim
    from shardkit.runtime.checkpoints.save_session import SaveSession


@dataclass(frozen=True)
class Loops:
    """Conventions of the script's loops, from `Accelerator`'s arguments of the same names."""

    step_scheduler_with_optimizer: bool = True
    device_placement: bool = True
    """Whether `prepare` moves models and batches to the rank's device by default."""


@dataclass
class Taken:
    """A prepared model, the names of its parameters before, and the ids of its new parameters."""

    model: nn.Module
    names_before: rebind.ParameterNames
    parameters: set[int]


@dataclass
class Run:
    """One run on this rank. `chosen`: where each explicitly set setting comes from."""

    config: Config
    chosen: Mapping[str, str]
    process: Process
    mesh: DeviceMesh | None
    region: Region
    """Of the sequences that ranks share."""
    project: ProjectConfiguration
    loops: Loops = field(default_factory=Loops)
    handlers: tuple[Any, ...] = ()
    """The script's `kwargs_handlers`."""
    started_bytes: int = 0
    """Resident memory of the process before anything was prepared."""
    watch: BackgroundAgreement | None = None
    selected_trackers: Sequence[str | Tracker] = ()
    """From `log_with`."""
    trackers: Trackers = field(init=False)
    loads: int = 0
    """Checkpoints loaded so far."""
    hooks: StateHooks = field(default_factory=StateHooks)
    """The user's save and load hooks."""
    saving: SaveSession | None = None
    """State of saving and loading, from the first save or load on."""
    saving_alone: SaveSession | None = None
    """As `saving`, for saves that rank 0 makes without the others."""
    claim: Claim | None = None
    """On rank 0: the checkpoints in the project's folder that this run knows, from a load or its first save on."""
    counters: Counters = field(default_factory=Counters)
    """Steps, micro-batches and samples so far."""
    mean_metric: Callable[[float], float] = collectives.mean_number
    """The mean over all ranks of what a schedule decides by."""
    is_resumed: bool = False
    announced: int = 0
    """How many of the models are in what the run has printed."""
    is_triggered: bool = False
    has_warned_of: set[str] = field(default_factory=set)
    """What is told once in a run."""
    watched: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Models whose backwards this run notes, also those dropped since."""
    models: list[nn.Module] = field(init=False)
    evaluated: dict[nn.Module, rebind.ParameterNames] = field(init=False)
    """Models prepared for evaluation, with the names of their parameters before."""
    trees: WeakKeyDictionary[nn.Module, ModuleNode] = field(init=False)
    """The module trees, before they were sharded, of all models prepared or about to be."""
    optimizers: list[AcceleratedOptimizer] = field(init=False)
    schedulers: list[AcceleratedScheduler] = field(init=False)
    loaders: list[PreparedLoader] = field(init=False)
    generators: list[torch.Generator] = field(init=False)
    """The generator, where it has one, of each loader that was prepared, also of those dropped since."""
    registered: list[Any] = field(init=False)
    taken: list[Taken] = field(init=False)
    events: StepEvents = field(default_factory=StepEvents)
    accumulation: Accumulation = field(init=False)
    same_modules: SameModules = field(init=False)
    same_data: SameData = field(init=False)
    losses_of_slices: LossesOfSlices = field(init=False)
    followers: Followers = field(init=False)
    schedule_lengths: ScheduleLengths = field(init=False)
    nan_origin: NanOrigin | None = field(init=False)
    """Under `debug`."""
    checks_before_step: Sequence[Callable[[], None]] = field(init=False)
    """Of likely mistakes, in this order."""

    def __post_init__(self) -> None:
        self.trackers = Trackers(self.selected_trackers, self.process.is_main, lambda: self.loads)
        self.events.before_step = self._check_step
        self.events.before_foreign_step = self._check_foreign_step
        self.events.on_loss = self._note_loss
        self.forget()

    def forget(self) -> None:
        """Drops all prepared objects, and begins anew with what follows these; the step counters keep counting."""
        self.models, self.optimizers, self.schedulers = [], [], []
        self.evaluated = {}
        self.trees = WeakKeyDictionary()
        self.loaders, self.generators, self.registered, self.taken = [], [], [], []
        self.is_triggered = False
        self.announced = 0
        self.counters.forget_window()
        self.counters.loaders = 0
        section = self.config.shardkit
        self.accumulation = Accumulation(
            section.gradient_accumulation_steps,
            self.models,
            self.loaders,
            loss_scale.LossScale(loss_scale.make_scaler(self.config, self.device)),
            self.counters,
            self.events,
            ends_with_data=section.end_window_with_data,
        )
        self._watch_for_mistakes()
        foreign_steps.watch(self.accumulation)

    def _watch_for_mistakes(self) -> None:
        """Makes what tells likely mistakes, and the order of its checks before a step."""
        full = settings.full_world_size() or 0
        keeps_batch = full > self.process.world_size
        may_keep_it = full == self.process.world_size and not self.config.shardkit.data.split_batches
        is_main, control = self.process.is_main, self.process.control
        self.same_modules = SameModules(self.models, control, self.config.debug)
        self.same_data = SameData(self.loaders, control, self.region.group.size)
        self.losses_of_slices = LossesOfSlices(self.region, control)
        self.followers = Followers(self.evaluated, is_main)
        self.schedule_lengths = ScheduleLengths(self.accumulation, is_main)
        debugs = self.config.debug and self.config.mode != "xla"  # there each look would be a program of its own
        self.nan_origin = NanOrigin(self.counters, self.accumulation.loss_scale, control) if debugs else None
        steps_and_windows = StepsAndWindows(self.accumulation)
        self.events.before_skipped_step = steps_and_windows.check
        self.checks_before_step = (
            steps_and_windows.check,
            EarlySteps(self.accumulation, self.loaders, keeps_batch, may_keep_it, is_main).check,
            self.same_modules.check,
            SameWeights(self.models, control).check,
            self.same_data.check,
            MissingModels(self.models, self.optimizers, control).check,
            self.followers.note_step,
            self.schedule_lengths.check,
            WholeSequences(self.region, is_main).check,
        )

    def refuse_if_left(self, call: str) -> None:
        """UsageError where the process group of this run's ranks has ended: each would take itself for all of them."""
        if self.process.world_size > 1 and self.process.backend != "none" and not dist.is_initialized():
            raise UsageError(
                f"{call}: the {self.process.world_size} ranks have left their process group (got a call after "
                "end_training, or after destroy_process_group); call it before."
            )

    def refuse_without_objects(self) -> None:
        """UsageError where there is nothing to save: such a checkpoint would replace one that has the model."""
        of_script: tuple[Sized, ...] = (self.models, self.optimizers, self.schedulers, self.loaders, self.registered)
        if not (any(map(len, of_script)) or self.hooks.at_save):
            raise UsageError(
                "save_state: nothing to save (got no prepared model, optimizer or loader, and no registered object); "
                "call it after prepare() and before free_memory()."
            )

    def _note_loss(self, loss: torch.Tensor) -> None:
        self.same_data.note_loss(loss)
        self.losses_of_slices.note_loss(loss)
        if self.nan_origin is not None:
            self.nan_origin.note_loss(loss)

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        for check in self.checks_before_step:
            check()
        if self.nan_origin is not None:
            self.nan_origin.check(optimizer)

    @eager
    def _check_foreign_step(self) -> None:
        self.same_data.check()
        self.schedule_lengths.check()

    @property
    def readers(self) -> int:
        """Number of ranks, or groups of ranks that share each sequence, that read different samples."""
        return self.process.world_size // self.region.group.size

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.process.device


class OfModel:
    """Keeps the newest run that has prepared a model alive as long as the model: earlier ones end with what the script
    keeps of them, and with them their optimizers' states. In copies and pickles of the model it is None."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __reduce__(self) -> Any:
        return type(None), ()
