"""The Accelerator: the interface of a training script.

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.resume()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

A facade: each method delegates to the module that does the work. Methods of one topic are in base classes:
`training_step`, `checkpointing`, `communication`, `process_control`, `topology`. The same script is correct on one
process and on many: a window of micro-batches gives the gradient that one process would compute for the same global
batch.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile as profiler

from shardkit.config.meaning import eight_bits
from shardkit.config.schema import Config
from shardkit.data import skipping
from shardkit.data.loader import PreparedLoader
from shardkit.distributed import accelerators, process
from shardkit.distributed.modules import unwrapped
from shardkit.distributed.seed import set_seed
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.runtime import (
    distributed_model,
    ending,
    measure,
    prepare,
    settings,
    settings_objects,
    speed,
    summary,
    unsupported,
)
from shardkit.runtime.checkpoints.checkpointing import Checkpointing
from shardkit.runtime.communication import Communication
from shardkit.runtime.lr_scheduler import AcceleratedScheduler
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.runtime.process_control import ProcessControl
from shardkit.runtime.project import ProjectConfiguration, problem_of, project_of, warn_of_folder
from shardkit.runtime.run import Loops, Run
from shardkit.runtime.state import State
from shardkit.runtime.steps import step_boundary
from shardkit.runtime.steps.training_step import TrainingStep
from shardkit.sharding import precision
from shardkit.sharding.context_parallel.groups import build_group
from shardkit.sharding.context_parallel.region import Region
from shardkit.sharding.mesh import build_mesh
from shardkit.signatures import signature
from shardkit.tracking import trackers
from shardkit.tracking.tracker import Tracker

log = get_logger(__name__)


class Accelerator(ProcessControl, TrainingStep, Checkpointing, Communication):
    """The run on this rank: its configuration, its rank and world size, and the prepared objects.

    Without arguments the configuration is the launcher's, else that of the file found from the working folder. An
    argument overrides it, and the table that is printed at the first `prepare` shows where each value comes from.

    - `mixed_precision`: "no", "bf16", "fp16", "fp8" or "mxfp8". `cpu`: train on the CPU.
    - `gradient_accumulation_steps`: micro-batches per optimizer step, for `accumulate`.
    - `split_batches`: the loader's batch size is that of all ranks together; by default that of each rank.
      `even_batches` (default True): a short last batch is padded, so that all ranks get the same number of samples.
    - `project_dir`, or `project_config`, a ProjectConfiguration: the folder of checkpoints, metrics and traces.
    - `log_with`: trackers, by name ("wandb") or as objects of a shardkit.Tracker; see `init_trackers`.
    - `config`: in place of launcher and file: a Config, a dict with the YAML's keys, or a path.
    - `device_placement`: False leaves models and batches where they are.
    - `step_scheduler_with_optimizer`: False lets a scheduler step at each call, also in the middle of a window.
    - `kwargs_handlers`, `fsdp_plugin` and other plugins: objects with settings, by their names in the YAML.
    - `rng_types`: no effect, since the order of the data needs no generator to be the same on all ranks.

    Collective: every rank creates one, with equal arguments. Raises ConfigError where the launched world differs from
    the configured one, where ranks have different settings, and where an object contradicts a value set elsewhere.
    """

    def __init__(
        self,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        step_scheduler_with_optimizer: bool = True,
        split_batches: bool | None = None,
        even_batches: bool | None = None,
        device_placement: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        fsdp_plugin: Any = None,
        dataloader_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        parallelism_config: Any = None,
        dynamo_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        **others: Any,
    ) -> None:
        if others:
            unsupported.refuse_arguments(others, list(signature(Accelerator.__init__).parameters)[1:-1])
        objects_given = {
            "fsdp_plugin": fsdp_plugin,
            "dataloader_config": dataloader_config,
            "gradient_accumulation_plugin": gradient_accumulation_plugin,
            "parallelism_config": parallelism_config,
            "dynamo_plugin": dynamo_plugin,
        }
        handlers = settings_objects.handlers_of(kwargs_handlers)
        found = settings.with_kept_batch(
            settings.settings(
                config, mixed_precision, gradient_accumulation_steps, cpu, split_batches, even_batches
            ).with_given(settings_objects.read(objects_given, handlers))
        )
        selected = trackers.chosen(log_with)
        launched = process.check_world(found.config, found.chosen)
        here = process.start(launched)
        project = project_of(project_dir, project_config)
        missing = trackers.missing(selected) if here.is_main else None
        here.control.agree(missing or problem_of(project), error=UsageError)
        warn_of_folder(project, here.control)
        supported = precision.supported(launched, here.device)
        self._run = Run(
            config=supported,
            chosen=found.chosen,
            process=here,
            mesh=build_mesh(supported, here),
            region=Region(build_group(supported, here), here.control),
            project=project,
            loops=Loops(step_scheduler_with_optimizer, device_placement),
            handlers=handlers,
            selected_trackers=selected,
            started_bytes=measure.start(here.device),
        )
        self.state = State(self._run)
        self._speed: speed.Speed | None = None
        if supported.shardkit.seed is not None:
            set_seed(supported.shardkit.seed)
        step_boundary.watch(self._run)
        prepare.watch_optimizers(self._run)

    if not TYPE_CHECKING:  # a type checker reports unknown names

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property of this class whose body raised AttributeError
                return object.__getattribute__(self, name)
            raise AttributeError(unsupported.attribute_text(name, dir(type(self))))

    def __reduce__(self) -> Any:
        raise UsageError(
            "Accelerator: cannot be pickled or copied (it holds the process group and the prepared objects); leave it "
            "out of what is saved, and of what goes to other processes, such as the object of a method that is given "
            "to a DataLoader's workers."
        )

    # ---- prepare ----

    def prepare(
        self,
        *arguments: Any,
        weights: str | Path | None = None,
        device_placement: Sequence[bool | None] | None = None,
    ) -> Any:
        """The given models, optimizers, data loaders and schedulers, prepared for all ranks, in the order given.

        An optimizer may be built before its model is prepared, with or without state: its param groups are rebound to
        the new parameters. None is returned as None. `weights`: see `prepare_model`. `device_placement`: for each
        argument, whether it (of a loader: its batches) is moved to the rank's device; None: as set in the constructor.
        Collective: every rank must call it with the same kinds of objects.
        """
        prepared = prepare.prepare(self._run, arguments, weights, device_placement)
        told, self._run.announced = self._run.announced, len(self._run.models)
        if new := self._run.models[told:]:
            log.info("%s", summary.of_models(new) if told else summary.text(self._run))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        weights: str | Path | None = None,
    ) -> nn.Module:
        """The prepared model; it needs no optimizer. `weights` (a safetensors file or a folder of them) fills the
        model, also one on the meta device, or one prepared before: each rank reads only its own part.

        With `evaluation_mode` the model is not trained: a teacher, a reference, or a model that is evaluated before
        training. Under FSDP it is sharded; it is never wrapped in DDP and is part of no checkpoint. Preparing it again
        without `evaluation_mode` makes it trainable. Its `requires_grad` flags and train/eval mode are kept; freeze it
        (`model.requires_grad_(False)`) to keep a 16-bit dtype under mixed precision. Collective.
        """
        if evaluation_mode:
            return prepare.for_evaluation(self._run, model, weights, device_placement)
        return self.prepare(model, weights=weights, device_placement=[device_placement])

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """The prepared optimizer of a model that is prepared now or later. `device_placement` has no effect: the state
        is where its parameters are, or in host memory (`shardkit.offload_optimizer`). Collective."""
        return self.prepare(optimizer)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """The prepared data loader. `slice_fn_for_dispatch` raises UsageError: every rank reads its own part.
        Collective."""
        unsupported.refuse_dispatch(slice_fn_for_dispatch)
        return self.prepare(data_loader, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """The prepared scheduler: it steps once per optimizer step, on any number of ranks."""
        return self.prepare(scheduler)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> nn.Module:
        """The user's module inside DDP. Under FSDP it is the model itself, with sharded parameters; `get_state_dict`
        gives full ones. `keep_torch_compile`: keep the user's own `torch.compile` wrapper (parameter names then begin
        with `_orig_mod.`). `keep_fp32_wrapper` False: removes mixed precision from its forward.
        """
        if not isinstance(model, nn.Module):  # as in Accelerate, whose scripts also ask for what is no module
            return model
        inner = unwrapped(model)
        if not keep_fp32_wrapper:
            precision.restore_forward(inner)
        compiled = model.module if isinstance(model, DistributedDataParallel) else model
        return compiled if keep_torch_compile else inner

    def unsharded(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Inside, each rank has the whole weights of these prepared models (without any: of all) in the compute dtype.

        For generation and evaluation: forwards gather nothing, and under `torch.no_grad()` need no other rank. Ranks
        may make any number of them, or one rank alone, also under DDP (which otherwise broadcasts buffers). It takes
        the memory of the whole model. Collective at its start. Raises UsageError if weights are changed inside.
        """
        self._begin("unsharded")
        return distributed_model.unsharded(self._run, models)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As `shardkit.skip_first_batches`."""
        return skipping.skip_first_batches(dataloader, num_batches)

    def free_memory(self, *released: Any) -> tuple[None, ...]:
        """Drops all prepared objects, to train another model in the same process, or to try another batch size. Returns
        one None per argument: `model, optimizer = accelerator.free_memory(model, optimizer)`.

        The step counters keep counting, so later checkpoints sort after earlier ones.
        """
        if self._run.saving is not None:
            from shardkit.runtime.checkpoints import saving

            saving.forget(self._run)
        self._run.forget()
        if self._speed is not None:
            self._speed = speed.Speed(self._run)
        accelerators.collect_garbage()
        return (None,) * len(released)

    def clear(self, *released: Any) -> tuple[None, ...]:
        """As `free_memory`."""
        return self.free_memory(*released)

    # ---- settings ----

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all ranks together."""
        return self.config.shardkit.data.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether a short last batch is padded, so that every rank gets the same number of samples."""
        return self.config.shardkit.data.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        """Applies to loaders that are prepared later."""
        self._run.config = settings.with_value(self._run.config, "shardkit.data.even_batches", bool(value))

    @property
    def dispatch_batches(self) -> bool:
        """False: every rank reads its own part of the data."""
        return False

    @property
    def use_seedable_sampler(self) -> bool:
        """True: the order of the data is a function of (seed, epoch)."""
        return True

    @property
    def non_blocking(self) -> bool:
        """True: batches in pinned memory are copied to the device asynchronously."""
        return True

    @property
    def use_stateful_dataloader(self) -> bool:
        """True: save_state saves the position in the data."""
        return True

    @property
    def config(self) -> Config:
        """The configuration that runs, by the names of the schema: `accelerator.config.fsdp.sharding_strategy`. Read it
        only."""
        return self._run.config

    @property
    def fp8_backend(self) -> str | None:
        """AO (torchao) where Linear layers are computed in 8 bits, else None."""
        return "AO" if eight_bits(self.config) else None

    # ---- trackers, profile, end ----

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers named in `log_with`, and always a `metrics.jsonl` in the log folder (in a subfolder named
        by the project), if there is a log folder. `init_kwargs`: constructor arguments by tracker name."""
        self._run.trackers.start(project_name, self.logging_dir, config, init_kwargs)
        if self.config.shardkit.log_speed and self._speed is None:
            self._speed = speed.Speed(self._run)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Logs numbers and texts by name to all trackers: rank 0's, so reduce a loss over the ranks before. Images and
        tables go to wandb and trackio. `step` defaults to the optimizer step. Any rank may call it. Raises UsageError
        where a value is neither number nor text and no tracker takes it, on every rank that calls it."""
        measured = {} if self._speed is None else self._speed.values()
        self._run.trackers.log(values, step, self.counters.step, log_kwargs, measured)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name, or with `unwrap` its native object: a wandb run, TensorBoard's writer. On other ranks
        than 0 an object that accepts every call and does nothing."""
        return self._run.trackers.get(name, unwrap)

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers between `init_trackers` and `end_training`."""
        return list(self._run.trackers.active)

    def profile(self, profile_handler: Any = None) -> AbstractContextManager[profiler]:
        """torch.profiler over a block, with a trace per rank, as `shardkit.profile` configures it; a settings object as
        argument overrides that. With a schedule, call `profiler.step()` after each step."""
        from shardkit.runtime import profiling

        return profiling.traced(self._run, profile_handler)

    def end_training(self) -> None:
        """Waits for a save in flight and for all ranks, finishes trackers, then destroys the process group; under
        `launch --measure` reports the memory used. The last call of a script. Collective."""
        ending.end(self._run)
