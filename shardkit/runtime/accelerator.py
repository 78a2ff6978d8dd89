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

A facade: each method delegates to the module that does the work. The same script is correct on one process and on many:
a window of micro-batches gives the gradient that one process would compute for the same global batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile as profiler
from torch.utils.hooks import RemovableHandle

from shardkit.config.meaning import eight_bits
from shardkit.config.schema import Config
from shardkit.data import loader as data
from shardkit.data import padding
from shardkit.data.loader import PreparedLoader
from shardkit.distributed import buffers, collectives, process, progress
from shardkit.distributed.seed import set_seed
from shardkit.distributed.tensors import is_fsdp, unwrapped
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.optim import clip
from shardkit.runtime import (
    hooks,
    measure,
    objects,
    prepare,
    process_control,
    settings,
    settings_objects,
    speed,
    step_boundary,
    summary,
    unsupported,
)
from shardkit.runtime.accumulate import Counters
from shardkit.runtime.lr_scheduler import AcceleratedScheduler
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.runtime.process_control import ProcessControl
from shardkit.runtime.project import ProjectConfiguration, project_of
from shardkit.runtime.run import Loops, Run
from shardkit.runtime.state import State
from shardkit.runtime.topology import Topology
from shardkit.sharding import gradient_sync, precision
from shardkit.sharding import mesh as layout
from shardkit.sharding.mesh import build_mesh
from shardkit.tracking import trackers
from shardkit.tracking.tracker import Tracker

__all__ = ["Accelerator", "ProjectConfiguration"]

log = get_logger(__name__)


class Accelerator(ProcessControl, Topology):
    """The run on this rank: its configuration, its rank and world size, and the prepared objects.

    The configuration is `config` (a Config, a dict with the YAML's keys, or a path), else the launcher's, else the file
    found from the working folder. The other arguments override single settings, and the table at the start shows them.
    `split_batches`: the loader's batch size is that of all ranks together. `even_batches`: a short last batch is padded
    so that every rank gets the same number of samples. `kwargs_handlers` and the plugins are objects with settings
    (`shardkit_settings()`, see `runtime/settings_objects.py`), with the names and checks of the YAML. `rng_types` has
    no effect: the order of the data is a function of (seed, epoch), so no generator has to be synchronised. `log_with`:
    names of trackers, or objects of a shardkit.Tracker; see `init_trackers`. Collective: every rank creates one, with
    equal arguments.

    Raises ConfigError where the launched world differs from the configured one, where ranks have different settings,
    and where an object contradicts a value set elsewhere.
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
        unsupported.refuse_arguments(others)
        objects_given = {
            "fsdp_plugin": fsdp_plugin,
            "dataloader_config": dataloader_config,
            "gradient_accumulation_plugin": gradient_accumulation_plugin,
            "parallelism_config": parallelism_config,
            "dynamo_plugin": dynamo_plugin,
        }
        handlers = tuple(kwargs_handlers or ())
        chosen = settings.settings(
            config, mixed_precision, gradient_accumulation_steps, cpu, split_batches, even_batches
        ).with_given(settings_objects.read(objects_given, handlers))
        selected = trackers.chosen(log_with)
        launched = process.check_world(chosen.config, chosen.chosen)
        place = process.start(launched)
        place.control.agree(trackers.missing(selected) if place.is_main else None, error=UsageError)
        supported = precision.supported(launched, place.device)
        self._run = Run(
            config=supported,
            origins=chosen.chosen,
            process=place,
            mesh=build_mesh(supported, place),
            project=project_of(project_dir, project_config),
            loops=Loops(step_scheduler_with_optimizer, device_placement),
            handlers=handlers,
            selected_trackers=selected,
            started_bytes=measure.start(place.device),
        )
        self.state = State(self._run)
        self._speed: speed.Speed | None = None
        if supported.shardkit.seed is not None:
            set_seed(supported.shardkit.seed)
        step_boundary.watch(self._run)

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property of this class whose body raised AttributeError
            return object.__getattribute__(self, name)
        raise AttributeError(unsupported.attribute_text(name))

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
        if self._run.models and not self._run.is_announced:
            self._run.is_announced = True
            log.info("%s", summary.text(self._run))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
        weights: str | Path | None = None,
    ) -> nn.Module:
        """The prepared model; it needs no optimizer. `weights` (a safetensors file or a folder of them) fills a model
        that was built on the meta device: each rank reads only its own part.

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
        is on the device of its parameters. Collective."""
        return self.prepare(optimizer)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """The prepared data loader. `slice_fn_for_dispatch` raises UsageError: every rank reads its own part.
        Collective."""
        unsupported.refuse_dispatch(slice_fn_for_dispatch)
        return self.prepare(data_loader, device_placement=[device_placement])

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """The prepared scheduler."""
        return self.prepare(scheduler)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> nn.Module:
        """The user's module inside DDP. Under FSDP it is the model itself, with sharded parameters; `get_state_dict`
        gives full ones. `keep_torch_compile`: keep the user's own `torch.compile` wrapper (parameter names then begin
        with `_orig_mod.`). `keep_fp32_wrapper` False: removes mixed precision from its forward.
        """
        inner = unwrapped(model)
        if not keep_fp32_wrapper:
            precision.restore_forward(inner)
        compiled = model.module if isinstance(model, DistributedDataParallel) else model
        return compiled if keep_torch_compile else inner

    def register_for_checkpointing(self, *registered: Any) -> None:
        """Adds objects to save_state and load_state. Each needs state_dict() -> JSON values or tensors, and
        load_state_dict(state). State that differs between ranks is saved per rank, and loads only on the same number of
        ranks."""
        bad = [o for o in registered if not (hasattr(o, "state_dict") and hasattr(o, "load_state_dict"))]
        if bad:
            kinds = ", ".join(type(one).__name__ for one in bad)
            raise UsageError(
                f"register_for_checkpointing: no state_dict and load_state_dict (got {kinds}); give the class both."
            )
        self._run.registered.extend(registered)

    def skip_first_batches(self, loader: Any, num_batches: int = 0) -> Any:
        """The loader; its next iteration skips the first `num_batches` batches of the epoch."""
        return data.skip_first_batches(loader, num_batches)

    def free_memory(self, *released: Any) -> tuple[None, ...]:
        """Drops all prepared objects; returns one None per argument: `model, optimizer = free_memory(model, ...)`.

        The step counters keep counting, so later checkpoints sort after earlier ones.
        """
        if self._run.saving is not None:
            from shardkit.runtime import saving

            saving.forget(self._run)
        self._run.forget()
        step_boundary.watch(self._run)
        if self._speed is not None:
            self._speed = speed.Speed(self._run)
        step_boundary.collect_garbage()
        return (None,) * len(released)

    def clear(self, *released: Any) -> tuple[None, ...]:
        """As `free_memory`."""
        return self.free_memory(*released)

    # ---- a training step ----

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Context of one micro-batch, from forward to zero_grad. Optimizer, scheduler and zero_grad act only in the
        last micro-batch of a window. The last batch of the loader ends a window early, with the correct mean."""
        with self._run.accumulation.micro_batch(models or self._run.models):
            yield

    def register_forward_method(self, model: nn.Module, *names: str) -> None:
        """Makes these methods of a prepared model callable like its forward: parameters are gathered for them.

        Not needed for methods that only call submodules: those can be called from anywhere.
        """
        for name in names:
            if not callable(getattr(model, name, None)):
                raise UsageError(f"register_forward_method: {type(model).__name__} has no method {name}.")
            if is_fsdp(model):
                from shardkit.sharding import fsdp_unit

                fsdp_unit.enter_by(model, name)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward does not reduce gradients. Under FSDP every rank then holds unsharded gradients until the
        next backward outside. `accumulate` gives the same sums with sharded gradients."""
        return gradient_sync.gradient_sync([model], enabled=False)

    def trigger_sync_in_backward(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward reduces gradients, also for forwards that ran under `no_sync`."""
        return gradient_sync.gradient_sync([model], enabled=True)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Does nothing: prepared loaders give every rank the same number of batches, regardless of `even_batches`;
        `prepare` raises where that is impossible."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Computes the gradients of the loss, divided by the number of micro-batches per step, and scaled under
        fp16."""
        self._run.accumulation.backward(loss, **arguments)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """The global norm of the gradients before clipping, a plain tensor; clips them to `max_norm` in place.

        Before the last micro-batch of a window it returns 0 and changes nothing. Collective.
        """
        chosen = self._parameters(parameters)
        if not self.sync_gradients:
            return torch.zeros((), device=self.device)
        self._make_final(chosen)
        return clip.clip_grad_norm_(chosen, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps every element of the gradients to [-clip_value, clip_value]; see `clip_grad_norm_`."""
        chosen = self._parameters(parameters)
        if self.sync_gradients:
            self._make_final(chosen)
            clip.clamp_gradients_(chosen, clip_value)

    def maybe_context_parallel(self, *_: Any, **arguments: Any) -> AbstractContextManager[None]:
        """Does nothing: shardkit has no context parallelism."""
        return nullcontext()

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model is spread over several devices (Transformers' device_map), and so cannot be trained on
        several ranks."""
        return len(set(getattr(model, "hf_device_map", {}).values())) > 1

    def unscale_gradients(self, optimizer: AcceleratedOptimizer | None = None) -> None:
        """Removes fp16's loss scale from the gradients of one optimizer, or of all; does nothing while accumulating."""
        for one in self._run.optimizers if optimizer is None else [optimizer]:
            if self.sync_gradients:
                one.make_gradients_final()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was skipped because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._run.optimizers)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager:
        """The autocast context of a prepared model's forward, for other code under DDP or in one process. Under FSDP it
        does nothing, since units cast their inputs. A handler with `enabled=False` disables autocast inside."""
        if autocast_handler is not None and not autocast_handler.enabled:
            return torch.autocast(self.device.type, enabled=False)
        return precision.autocast(self._run.config, self.device)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its window, so that optimizers step."""
        return self._run.accumulation.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step; a new value applies from the next window on."""
        return self._run.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        settings.check_accumulation(steps)
        self._run.accumulation.steps = steps

    @property
    def counters(self) -> Counters:
        """Optimizer steps, micro-batches since the last one, and samples so far."""
        return self._run.accumulation.counters

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler under fp16, else None."""
        return self._run.accumulation.scaler

    # ---- data ----

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

    # ---- saving and loading ----

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool | None = None,
    ) -> Path:
        """Saves the training state and returns its folder: `output_dir`, else a new folder in the project, named by
        step.

        With `blocking` False (default: `shardkit.checkpoint.blocking`) training continues while the files are written;
        the next optimizer step may wait until its state is copied. If such a save fails, the next save or
        `end_training` raises. Collective. Raises CheckpointSaveError on all ranks; earlier checkpoints stay intact.
        """
        unsupported.refuse_pickle(safe_serialization)
        from shardkit.runtime import saving

        return saving.save_state(self._run, output_dir, blocking=blocking)

    def register_save_state_pre_hook(self, hook: hooks.SaveHook) -> RemovableHandle:
        """Every save_state calls `hook(models, weights, output_dir)` on every rank before it captures the state. Files
        that the hook writes into `output_dir` are committed with the checkpoint. A model whose entry the hook removes
        from `weights` is not saved again (rank 0's list counts). The handle's `remove()` unregisters it. See
        `runtime/state_hooks.py`."""
        return hooks.register(self._run.hooks.at_save, hook, "register_save_state_pre_hook")

    def register_load_state_pre_hook(self, hook: hooks.LoadHook) -> RemovableHandle:
        """Every load calls `hook(models, input_dir)` on every rank after the checkpoint is verified and before it is
        loaded. A model that the hook removes from `models` is not loaded again. The handle's `remove()` unregisters
        it."""
        return hooks.register(self._run.hooks.at_load, hook, "register_load_state_pre_hook")

    def load_state(
        self, input_dir: str | Path | None = None, *, data_position: bool = True, strict: bool = True
    ) -> Path:
        """Restores a training state and returns its folder: `input_dir`, else the project's newest valid one.
        Collective.

        Raises CheckpointError on all ranks with the state unchanged, or StateIncomplete if reading failed half-way."""
        from shardkit.runtime import saving

        return saving.load_state(self._run, input_dir, data_position=data_position, strict=strict)

    def resume(self) -> bool:
        """Restores the checkpoint that `shardkit launch --resume` selects; returns whether it did. Collective.

        Call it after `prepare`. never (the default): nothing is loaded; auto: the project's newest valid checkpoint, if
        there is one; a path: that checkpoint. Without this call nothing is resumed.
        """
        return step_boundary.resume(self._run)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int | None = None,
        dtype: str | torch.dtype | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Writes the full model as safetensors that plain torch and Transformers can open. Collective."""
        unsupported.refuse_pickle(safe_serialization)
        from shardkit.runtime import saving

        size = self._run.config.shardkit.checkpoint.max_shard_size if max_shard_size is None else max_shard_size
        saving.save_model(self._run, model, save_directory, size, dtype)

    def get_state_dict(self, model: nn.Module, *_: Any, **__: Any) -> dict[str, Any]:
        """The model's full state dict on rank 0; other ranks may get an empty one. Collective."""
        from shardkit.runtime import saving

        return saving.get_state_dict(model)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = True) -> None:
        """Rank 0 writes a dict of tensors as safetensors, or JSON values as JSON. Collective where tensors are
        sharded."""
        unsupported.refuse_pickle(safe_serialization)
        whole = objects.prepared(obj)
        if self.is_main_process:
            objects.save(whole, f)

    @property
    def config(self) -> Config:
        """The effective configuration."""
        return self._run.config

    @property
    def project_dir(self) -> str | None:
        """The project folder."""
        return self._run.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The log folder: the project folder unless another one is set."""
        return self._run.project.logging_dir

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The project folder and how its checkpoints are named."""
        return self._run.project

    # ---- trackers ----

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
        """Logs numbers and texts by name to all trackers, on rank 0. `step` defaults to the optimizer step. Any rank
        may call it. Raises UsageError where a value is neither number nor text, on every rank that calls it."""
        measured = {} if self._speed is None else self._speed.values()
        step = self.counters.step if step is None else step
        self._run.trackers.log(values, step, log_kwargs, measured)

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

    # ---- collectives ----

    def gather(self, tensor: Any) -> Any:
        """All ranks' tensors concatenated along dim 0, on every rank; dicts, lists and tuples too. Collective."""
        self._run.accumulation.note_meeting()
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the padding of the loader's last batch; objects that are not tensors as one list.
        Collective."""
        self._run.accumulation.note_meeting()
        return collectives.gather_real(
            input_data, padding.real_samples(self._run.loaders, input_data, use_gather_object), use_gather_object
        )

    def reduce(self, tensor: Any, reduction: Any = "sum", scale: float = 1.0) -> Any:
        """Sum, mean, max or min over all ranks, on every rank; times `scale`. Collective."""
        self._run.accumulation.note_meeting()
        return collectives.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """One rank's tensors, on every rank. Collective."""
        return collectives.broadcast(tensor, from_process)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Tensors padded along `dim` to the longest of all ranks. Collective."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Sets a flag that `check_trigger` sees on all ranks, for instance to stop early."""
        self._run.is_triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank has set the flag; resets it on all ranks. Collective."""
        found = self._run.process.control.any(self._run.is_triggered)
        self._run.is_triggered = self._run.is_triggered and not found
        return found

    def reduce_buffers(self, model: nn.Module, reduction: buffers.Reduction = "mean") -> list[str]:
        """Makes buffers equal that each rank's forward has updated locally (running statistics, codebooks), and returns
        their names. "mean": the mean over ranks; "rank0", and always for integers: rank 0's value. Collective."""
        return buffers.reduce_buffers(model, reduction)

    # ---- for the launcher ----

    def pause(self, phase: str = "pause") -> AbstractContextManager[None]:
        """Context without the launcher's hang detection, for slow work: generation, an evaluation, a download. `phase`
        names it in the launcher's table. Not collective: other ranks that wait for this one in a collective still time
        out after `process_group_timeout_s`."""
        return progress.paused(phase, self.counters.step)

    def progress(self, phase: str = "at work") -> None:
        """Reports progress: the launcher restarts its `hang_timeout_s` clock. Call it now and then in long work of the
        script; it costs microseconds. Not collective."""
        progress.post(phase, self.counters.step)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int = 0) -> Callable[..., Any]:
        """The function on one rank; None elsewhere. Also as `@accelerator.on_process(process_index=1)`."""
        if function is None:
            return lambda later: self.on_process(later, process_index)
        return process_control.only(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int = 0
    ) -> Callable[..., Any]:
        """The function on one rank of each machine; None elsewhere."""
        if function is None:
            return lambda later: self.on_local_process(later, local_process_index)
        return process_control.only(lambda: self.local_process_index == local_process_index, function)

    def end_training(self) -> None:
        """Finishes trackers, waits for all ranks and for a save in flight, then destroys the process group; under
        `launch --measure` reports the memory used. The last call of a script. Collective."""
        step_boundary.end(self._run)

    # ---- ranks and mesh: see also `Topology` ----

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one rank."""
        return self.use_distributed

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The ranks as (replicate, shard), or (shard); None where nothing is sharded."""
        return self._run.mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether models are sharded by FSDP2, whose parameters are DTensors."""
        return self.is_fsdp2

    @property
    def data_parallel_rank(self) -> int:
        """Index of the model replica that this rank belongs to."""
        return layout.replica_of(self._run.mesh, self.process_index)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this rank's shard within its replica."""
        return layout.part_of(self._run.mesh)

    @property
    def tensor_parallel_rank(self) -> int:
        """0: shardkit has no tensor parallelism."""
        return 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """0: shardkit has no pipeline parallelism."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """0: shardkit has no context parallelism."""
        return 0

    @property
    def should_save_model(self) -> bool:
        """Whether this rank should write files that the script saves itself; `save_model` is called by all ranks."""
        return self.is_main_process

    @property
    def fp8_backend(self) -> str | None:
        """AO (torchao) where Linear layers are computed in 8 bits, else None."""
        return "AO" if eight_bits(self.config) else None

    def _parameters(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return prepare.own_parameters(self._run, parameters)

    def _make_final(self, parameters: list[torch.Tensor]) -> None:
        for optimizer in prepare.optimizers_of(self._run, parameters):
            optimizer.make_gradients_final()
