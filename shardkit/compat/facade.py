"""Accelerate's `Accelerator`: a subclass of shardkit's with Accelerate's arguments, attributes and states.

The functionality is in `shardkit.runtime.accelerator`. This module only has what Accelerate names or shows differently.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.profiler import profile as profiler

from shardkit.compat import mesh_sizes, operations, trainers
from shardkit.compat.attributes import PlainAttributes
from shardkit.compat.differences import takes_back
from shardkit.compat.given import GivenObjects
from shardkit.compat.handlers import AutocastKwargs, InitProcessGroupKwargs, ProfileKwargs
from shardkit.compat.kinds import DistributedType, DynamoBackend, PrecisionType, RNGType
from shardkit.compat.loaders import Rest, skip_first_batches
from shardkit.compat.mesh_sizes import ParallelismConfig
from shardkit.compat.one_rank import place_of_one_rank
from shardkit.compat.operations import extract_model_from_parallel
from shardkit.compat.plugins import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from shardkit.compat.schedulers import set_steps_per_call
from shardkit.compat.sequences import SharedSequences
from shardkit.compat.states import AcceleratorState, PartialState
from shardkit.compat.touched import TOUCHED, note_member
from shardkit.compat.window import GradientState
from shardkit.config.schema import StateDictType
from shardkit.distributed import collectives
from shardkit.distributed.modules import every_parameter, is_fsdp
from shardkit.distributed.nested import leaves, map_tensors
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.runtime import accelerator as own
from shardkit.runtime import settings_objects, unsupported
from shardkit.runtime.checkpoints import objects, save_pretrained
from shardkit.runtime.prepare import kind_of, one_for_each
from shardkit.runtime.project import ProjectConfiguration
from shardkit.sharding.gradient_sync import gradient_sync
from shardkit.storage.url import Url

log = get_logger(__name__)


class Accelerator(GivenObjects, PlainAttributes, SharedSequences, own.Accelerator):
    """The training run on this rank, with Accelerate's arguments. Arguments that are not given come from shardkit.yaml.
    Collective: every rank creates one, with equal arguments.

    Raises UsageError for features that shardkit does not support, ConfigError if an argument contradicts shardkit.yaml.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: PrecisionType | str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        **others: Any,
    ) -> None:
        if gradient_accumulation_plugin is not None and gradient_accumulation_steps != 1:
            raise UsageError(
                "Accelerator: gradient_accumulation_steps and gradient_accumulation_plugin are both given (got "
                f"{gradient_accumulation_steps} and {gradient_accumulation_plugin.num_steps}); keep one of them."
            )
        if dynamo_backend is not None and dynamo_plugin is None:
            dynamo_plugin = TorchDynamoPlugin(backend=dynamo_backend)
        refused = {
            "deepspeed_plugin": deepspeed_plugin,
            "deepspeed_plugins": deepspeed_plugins,
            "torch_tp_plugin": torch_tp_plugin,
            "megatron_lm_plugin": megatron_lm_plugin,
        }
        super().__init__(
            mixed_precision=getattr(mixed_precision, "value", mixed_precision),
            gradient_accumulation_steps=gradient_accumulation_steps if gradient_accumulation_steps != 1 else None,
            cpu=cpu or PartialState._shared_state.get("_is_cpu_asked_for") or None,
            project_dir=project_dir,
            project_config=project_config,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            split_batches=split_batches,
            device_placement=device_placement,
            kwargs_handlers=_with_timeout(settings_objects.handlers_of(kwargs_handlers)),
            fsdp_plugin=fsdp_plugin,
            dataloader_config=dataloader_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            parallelism_config=parallelism_config,
            dynamo_plugin=dynamo_plugin,
            rng_types=rng_types,
            log_with=log_with or None,
            **{name: value for name, value in refused.items() if value},
            **others,
        )
        self.rng_types = list(rng_types or [])
        if (sharing := self._run.region.group.size) > 1:
            trainers.refuse_unsplit(sys._getframe(1), sharing, self.is_main_process)
        self._parallelism_config = mesh_sizes.of_run(parallelism_config, self._run)
        self._logged_alone: set[str] = set()
        self._run.trackers.counts_for_objects = False
        self._run.mean_metric = self._mean_metric
        self.state = self._new_state(dynamo_plugin)
        self._follow_objects(dataloader_config)
        self.gradient_state = GradientState(gradient_accumulation_plugin, _run=self._run)
        # Accelerate shows hooks no sharded model, so scripts remove what is there and rely on the checkpoint's copy.
        self._run.hooks.keep_models = self.is_fsdp2
        if self.is_fsdp2:
            self._choose_state_dict_type()

    def _new_state(self, dynamo_plugin: TorchDynamoPlugin | None) -> AcceleratorState:
        state = AcceleratorState(_run=self._run)
        state.parallelism_config = self._parallelism_config
        compiles = DynamoBackend.INDUCTOR if self.config.shardkit.compile else DynamoBackend.NO
        state.dynamo_plugin = dynamo_plugin or TorchDynamoPlugin(compiles)
        return state

    def _choose_state_dict_type(self) -> None:
        if "fsdp.state_dict_type" not in self._run.chosen:
            # Accelerate's default: the Trainer writes a model for from_pretrained only with FULL_STATE_DICT.
            self.state.fsdp_plugin.set_state_dict_type(StateDictType.FULL_STATE_DICT)
            return
        is_sharded = self.config.fsdp.state_dict_type == StateDictType.SHARDED_STATE_DICT
        if is_sharded and "transformers.trainer" in sys.modules and self.is_main_process:
            log.warning(
                "fsdp_state_dict_type: with SHARDED_STATE_DICT the Trainer's save_model writes nothing; set "
                "FULL_STATE_DICT, or export a checkpoint: "
                "shardkit checkpoint merge checkpoint-500/pytorch_model_fsdp_0 -o export"
            )

    def __getattribute__(self, name: str) -> Any:
        if TOUCHED.is_on:
            note_member(name)
        return super().__getattribute__(name)

    # ---- what is prepared ----

    def prepare(self, *args: Any, device_placement: Any = None, **arguments: Any) -> Any:
        """As shardkit's; other objects than models, optimizers, loaders and schedulers are returned unchanged, and so
        are loaders that skip batches. Collective."""
        self._read_objects()
        known = [kind_of(one) is not None and type(one) is not Rest for one in args]
        if device_placement is not None:
            places = zip(one_for_each(device_placement, len(args)), known, strict=True)
            arguments["device_placement"] = [place for place, is_known in places if is_known]
        given = [one for one, is_known in zip(args, known, strict=True) if is_known]
        prepared = super().prepare(*given, **arguments) if given else ()
        found = iter(prepared if len(given) > 1 else [prepared])
        self._add_accelerates_behavior()
        result = tuple(next(found) if is_known else one for one, is_known in zip(args, known, strict=True))
        return result[0] if len(result) == 1 else result

    def _add_accelerates_behavior(self) -> None:
        """Give FSDP models the method `no_sync`, optimizers `train` and `eval`; and schedulers Accelerate's number of
        steps if the run asks for it. Refuse `save_pretrained` of a sharded model on the main process only."""
        for model in [*self._run.models, *self._run.evaluated]:
            save_pretrained.before_calls(model, self._is_called_on_one_rank)
        for model in self._run.models:
            if is_fsdp(model) and not hasattr(model, "no_sync"):
                vars(model)["no_sync"] = partial(gradient_sync, [model], enabled=False)
        for optimizer in self._run.optimizers:
            for name in ("train", "eval"):  # of schedule-free optimizers
                if not hasattr(optimizer, name):
                    vars(optimizer)[name] = lambda: None
        for scheduler in self._run.schedulers if self.step_scheduler_with_optimizer else ():
            set_steps_per_call(scheduler, self.num_processes, self.split_batches)

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The script's module without DDP's wrapper; under FSDP the model itself."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """As shardkit's; but the length is that of the rest."""
        return skip_first_batches(dataloader, num_batches)

    # ---- a training step ----

    def accumulate(self, *models: Any) -> AbstractContextManager[None]:
        """As shardkit's; what is no model has no effect, as with Accelerate."""
        return super().accumulate(*(one for one in leaves(models) if isinstance(one, nn.Module)))

    def gather(self, tensor: Any) -> Any:
        """As shardkit's; in one process a 0-dim tensor stays one. Collective."""
        gathered = super().gather(tensor)
        return gathered if self.use_distributed else operations.detached(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As shardkit's; in one process a 0-dim tensor stays one. Collective."""
        gathered = super().gather_for_metrics(input_data, use_gather_object)
        has_tensors = not use_gather_object and all(map(operations.is_torch_tensor, leaves(input_data)))
        if self.use_distributed or not has_tensors:
            return gathered
        given = iter(leaves(input_data))
        return map_tensors(lambda found: found if next(given).dim() else found.squeeze(0), gathered)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager:
        """As shardkit's, with the `autocast_handler` of the Accelerator where none is given."""
        return super().autocast(autocast_handler or self.autocast_handler)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profiler]:
        """As shardkit's, with the `profile_handler` of the Accelerator where none is given."""
        return super().profile(profile_handler or self._changed_profile_handler())

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its accumulation window, so that the optimizer steps."""
        return self._run.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state._set_sync_gradients(sync_gradients)

    # ---- saving ----

    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path | Url:
        """As shardkit's. Collective; but inside `if accelerator.is_main_process` rank 0 saves alone if no model is
        sharded."""
        if self._is_called_on_one_rank("save_state", sys._getframe(1)):
            unsupported.refuse_pickle(safe_serialization)
            from shardkit.runtime.checkpoints import saving

            return saving.save_alone(self._run, output_dir)
        return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)

    def save_model(  # type: ignore[override]  # Accelerate's order
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int | None = "10GB",
        safe_serialization: bool = True,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        """As shardkit's. Collective, except inside `if accelerator.is_main_process`, as `save_state`."""
        if self._is_called_on_one_rank("save_model", sys._getframe(1)):
            unsupported.refuse_pickle(safe_serialization)
            from shardkit.runtime.checkpoints import saving

            return saving.save_model_alone(self._run, model, save_directory, max_shard_size or "10GB")
        return super().save_model(model, save_directory, max_shard_size, dtype, safe_serialization)

    def get_state_dict(self, model: nn.Module, *others: Any, **options: Any) -> dict[str, Any]:
        """As shardkit's. Raises UsageError where the script calls it on the main process only and the model is
        sharded: rank 0 would gather it from ranks that are elsewhere."""
        if isinstance(model, nn.Module) and objects.has_sharded([*every_parameter(model)]):
            self._is_called_on_one_rank("get_state_dict", sys._getframe(1))
        return super().get_state_dict(model, *others, **options)

    def _is_called_on_one_rank(self, call: str, frame: FrameType | None) -> bool:
        """Whether the script calls this on the main process only. Raises UsageError if the call needs all ranks."""
        place = place_of_one_rank(frame, call) if self.use_distributed else None
        if place is None:
            return False
        if self.is_fsdp2 or not self.is_main_process:
            raise _called_by_some(call, place)
        if call not in self._logged_alone:
            self._logged_alone.add(call)
            log.info("%s: only rank 0 calls it (the condition at %s), so rank 0 saves alone.", call, place)
        return True

    def _mean_metric(self, metric: float) -> float:
        """The mean over all ranks of what a schedule decides by. Collective: raises UsageError where the script steps
        the schedule on the main process only."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and str(frame.f_globals.get("__name__")).startswith("shardkit."):
            frame = frame.f_back
        if self.use_distributed and (place := place_of_one_rank(frame, "step")) is not None:
            raise _called_by_some("scheduler.step", place)
        return collectives.mean_number(metric)

    def load_state(
        self, input_dir: str | Path | None = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> Path | Url:
        """As shardkit's. From a save at the last batch of an epoch the next loop runs the next epoch, since scripts for
        Accelerate count epochs in steps. With `--accelerates-meaning position` the next loop starts its epoch again,
        and a loop around the call goes on. Collective."""
        if load_kwargs:
            raise UsageError(f"load_state: load_kwargs is not supported (got {load_kwargs!r}); remove it.")
        starts_again = takes_back("position")
        if starts_again and any(loader.is_iterating for loader in self._run.loaders):
            load_model_func_kwargs.setdefault("data_position", False)  # a loader cannot be moved inside its loop
        folder = super().load_state(input_dir, **load_model_func_kwargs)
        for loader in self._run.loaders:
            if not starts_again:
                loader.pass_finished_epoch()
            elif not loader.is_iterating:
                loader.skip_to(0)
        return folder

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """As `utils.save`. Raises UsageError where only the main process calls it with sharded tensors."""
        if objects.has_sharded(obj):
            self._is_called_on_one_rank("save", sys._getframe(1))
        operations.save(obj, f, safe_serialization=safe_serialization)

    @property
    def save_iteration(self) -> int:
        """The iteration of the project configuration. Checkpoints are named by their step instead."""
        return self.project_configuration.iteration

    def log(
        self,
        values: Any,
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """As shardkit's. A dict among the values is logged as one value per key, `name/key`; wandb, trackio and a
        script's own trackers get a step only where the script gives one. Before `init_trackers` nothing is recorded
        or checked: libraries log images there, too."""
        super().log(_flat(values) if self._run.trackers.active else {}, step, log_kwargs)

    def end_training(self) -> None:
        """As shardkit's; also ends the process group if a PartialState started it. Collective, except inside `if
        accelerator.is_main_process`: there it only finishes the trackers, which are on rank 0."""
        if self.use_distributed and place_of_one_rank(sys._getframe(1), "end_training") is not None:
            self._run.trackers.finish()
            return
        super().end_training()
        PartialState().destroy_process_group()

    # ---- what is shown ----

    @property
    def distributed_type(self) -> DistributedType:  # type: ignore[override]
        """FSDP, MULTI_GPU, MULTI_CPU, XLA or NO."""
        return self.state.distributed_type

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raises UsageError: LOMO is not supported."""
        raise UsageError(f"lomo_backward: LOMO is not supported (got learning rate {learning_rate}); use backward.")


def _called_by_some(call: str, place: str) -> UsageError:
    return UsageError(
        f"{call}: every rank must call it, but only some do (got the condition at {place}); call it outside of the "
        "condition."
    )


def _flat(values: Any) -> Any:
    """The values by name, without dicts among them; anything else than a dict unchanged."""
    if not isinstance(values, Mapping):
        return values
    found: dict[Any, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{key}": inner for key, inner in _flat(value).items()}
        else:
            found[name] = value
    return found


def _with_timeout(handlers: Sequence[Any]) -> list[Any]:
    """The handlers, and the timeout of a process group that a PartialState started before, unless they contain one."""
    has_timeout = any(isinstance(one, InitProcessGroupKwargs) and one.timeout is not None for one in handlers)
    if has_timeout or PartialState._timeout is None:
        return list(handlers)
    return [*handlers, InitProcessGroupKwargs(timeout=PartialState._timeout)]
