"""Accelerate's `Accelerator`: shardkit's own, with the arguments, attributes and states that scripts know.

What it does is `shardkit.runtime.accelerator`'s; here is only what is called otherwise, or shown otherwise.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.compat.differences import takes_back
from shardkit.compat.handlers import InitProcessGroupKwargs
from shardkit.compat.kinds import DistributedType, PrecisionType, RNGType
from shardkit.compat.mesh_sizes import ParallelismConfig
from shardkit.compat.operations import extract_model_from_parallel
from shardkit.compat.plugins import (
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from shardkit.compat.states import AcceleratorState, PartialState
from shardkit.compat.touched import TOUCHED, note_member, note_scheduler
from shardkit.compat.window import GradientState
from shardkit.config.schema import StateDictType
from shardkit.errors import UsageError
from shardkit.runtime import accelerator as own
from shardkit.runtime.prepare import kind_of
from shardkit.runtime.project import ProjectConfiguration
from shardkit.storage.url import Url


class Accelerator(own.Accelerator):
    """The run as this rank sees it. The arguments are Accelerate's; what shardkit.yaml says holds where they are left
    out. Collective: every rank creates one, with equal arguments.

    Raises UsageError on what shardkit does not run, ConfigError where an argument contradicts shardkit.yaml.
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
            kwargs_handlers=_with_timeout(kwargs_handlers or ()),
            fsdp_plugin=fsdp_plugin,
            dataloader_config=dataloader_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            parallelism_config=parallelism_config,
            dynamo_plugin=dynamo_plugin,
            rng_types=rng_types,
            **{name: value for name, value in {"log_with": log_with, **refused, **others}.items() if value},
        )
        self.device_placement = device_placement
        self.rng_types = list(rng_types or [])
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._parallelism_config = parallelism_config
        state = AcceleratorState(_run=self._run)
        state.parallelism_config = parallelism_config
        self.state = state  # type: ignore[assignment]
        self.gradient_state = GradientState(gradient_accumulation_plugin, _run=self._run)
        if self.is_fsdp2 and "fsdp.state_dict_type" not in self._run.origins:
            # As Accelerate's callers have it: the Trainer writes a model only where this says FULL.
            self.state.fsdp_plugin.set_state_dict_type(StateDictType.FULL_STATE_DICT)

    def __getattribute__(self, name: str) -> Any:
        if TOUCHED.is_on:
            note_member(name)
        return super().__getattribute__(name)

    # ---- what is prepared ----

    def prepare(self, *args: Any, device_placement: Any = None, **arguments: Any) -> Any:
        """As shardkit's; what is neither model, optimizer, loader nor scheduler comes back as it is. Collective."""
        known = [kind_of(one) is not None for one in args]
        if device_placement is not None:
            arguments["device_placement"] = [
                place for place, is_known in zip(device_placement, known, strict=True) if is_known
            ]
        given = [one for one, is_known in zip(args, known, strict=True) if is_known]
        prepared = super().prepare(*given, **arguments) if given else ()
        found = iter(prepared if len(given) > 1 else [prepared])
        self._as_accelerate()
        result = tuple(next(found) if is_known else one for one, is_known in zip(args, known, strict=True))
        return result[0] if len(result) == 1 else result

    def _as_accelerate(self) -> None:
        """What prepared schedulers do, where this run takes a difference back."""
        for scheduler in self._run.schedulers:
            if self.num_processes > 1 and self.step_scheduler_with_optimizer:
                note_scheduler()
                if takes_back("scheduler") and not self.split_batches:
                    scheduler.steps_per_call = self.num_processes

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The script's own module below DDP; under FSDP the model itself."""
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    # ---- a training step ----

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its window: the optimizer steps."""
        return self._run.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state._set_sync_gradients(sync_gradients)

    # ---- saving ----

    def save_state(
        self, output_dir: str | Path | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path | Url:
        """As shardkit's. Collective."""
        return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)

    def load_state(
        self, input_dir: str | Path | None = None, load_kwargs: Any = None, **load_model_func_kwargs: Any
    ) -> Path | Url:
        """As shardkit's. Collective."""
        if load_kwargs:
            raise UsageError(f"load_state: load_kwargs: there are none here (got {load_kwargs!r}); leave them out.")
        return super().load_state(input_dir, **load_model_func_kwargs)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Rank 0 writes a dict of tensors as safetensors, or JSON-able values as JSON; with
        `--accelerates-meaning save` torch's pickle."""
        if takes_back("save") and not safe_serialization:
            if self.is_main_process:
                torch.save(obj, f)
            return
        super().save(obj, f)

    @property
    def save_iteration(self) -> int:
        """As the project says; checkpoints are named by their step."""
        return self.project_configuration.iteration

    def end_training(self) -> None:
        """As shardkit's; the process group ends with it where a PartialState has started it. Collective."""
        super().end_training()
        PartialState().destroy_process_group()

    # ---- what is shown ----

    @property
    def distributed_type(self) -> DistributedType:  # type: ignore[override]
        """FSDP, MULTI_GPU, MULTI_CPU or NO."""
        return self.state.distributed_type  # type: ignore[return-value]

    @property
    def deepspeed_plugin(self) -> None:
        """None: DeepSpeed does not run here."""
        return None

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP runs: it is version 2 here."""
        return self._run.config.mode == "fsdp"

    @property
    def parallelism_config(self) -> ParallelismConfig | None:  # type: ignore[override]
        """As it was given."""
        return self._parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh of the parallelism config, by its names of axes; None where none was given. Collective at first."""
        if self._parallelism_config is None:
            return None
        return self._parallelism_config.get_device_mesh(self.device.type)

    @property
    def native_amp(self) -> bool:
        """Whether compute is in fp16 or bf16."""
        return self.mixed_precision != "no"

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """UsageError: LOMO does not run here."""
        raise UsageError(
            f"lomo_backward: LOMO does not run here (got a learning rate of {learning_rate}); use backward."
        )

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: nn.Module) -> Any:
        """UsageError: sequences are not split here."""
        raise UsageError("deepspeed_ulysses_dl_adapter: shardkit splits no sequences; use FSDP.")

    @property
    def _models(self) -> list[nn.Module]:
        return self._run.models

    @property
    def _optimizers(self) -> list[Any]:
        return self._run.optimizers

    @property
    def _schedulers(self) -> list[Any]:
        return self._run.schedulers

    @property
    def _dataloaders(self) -> list[Any]:
        return self._run.loaders

    @property
    def _custom_objects(self) -> list[Any]:
        return self._run.registered


def _with_timeout(handlers: Sequence[Any]) -> list[Any]:
    """The handlers, with the timeout of a process group that a PartialState has started before, unless they say one."""
    says_it = any(isinstance(one, InitProcessGroupKwargs) and one.timeout is not None for one in handlers)
    if says_it or PartialState._timeout is None:
        return list(handlers)
    return [*handlers, InitProcessGroupKwargs(timeout=PartialState._timeout)]
