"""One training step: accumulation windows, backward, clipping."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardkit.data.sources import padded_as_told
from shardkit.distributed.modules import every_parameter, is_fsdp
from shardkit.distributed.nested import leaves
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.optim import clip, rebind
from shardkit.runtime import prepare, settings
from shardkit.runtime.eager import eager
from shardkit.runtime.optimizer import AcceleratedOptimizer
from shardkit.runtime.run import Run
from shardkit.runtime.steps import foreign_steps
from shardkit.runtime.steps.counters import Counters
from shardkit.runtime.topology import Topology
from shardkit.sharding import gradient_sync, precision
from shardkit.sharding.original_parameters import ReleasedParameter

log = get_logger(__name__)


def accumulate_over(run: Run, steps: int) -> None:
    """From the next window on, accumulate over this many micro-batches, of the world with all machines."""
    settings.check_accumulation(steps)
    kept = settings.kept_accumulation(steps, run.config.shardkit.data.split_batches)
    run.config = settings.with_value(run.config, "shardkit.gradient_accumulation_steps", kept)
    run.accumulation.steps = kept


def _warn_of_other_accelerator(run: Run) -> None:
    """Tells once where the windows are those of another Accelerator, as in a script with one in each module."""
    if run.models:
        return
    owners = [other for other in foreign_steps.others(run.accumulation) if other.models]
    steps = [other.steps for other in owners if other.steps != run.accumulation.steps]
    if steps and run.process.is_main and "other accelerator" not in run.has_warned_of:
        run.has_warned_of.add("other accelerator")
        log.warning(
            "accumulation: this Accelerator has prepared no model, and its windows are its own (micro-batches a step: "
            "got %d; the one that has prepared a model has %d); call backward, clip_grad_norm_ and sync_gradients of "
            "that one.",
            run.accumulation.steps,
            steps[0],
        )


def _refuse_region_of_other_accelerator(run: Run) -> None:
    """UsageError where the models are those of another Accelerator, which know of its own regions alone."""
    if run.region.group.size == 1 or run.models or run.evaluated:
        return
    if any(other.models for other in foreign_steps.others(run.accumulation)):
        raise UsageError(
            "context_parallel: this Accelerator has prepared no model, and another one has; call context_parallel of "
            "that one."
        )


class TrainingStep(Topology):
    """Methods of a training step, between the forward of a micro-batch and `zero_grad`."""

    def accumulate(self, *models: nn.Module | Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Context of one micro-batch of these models (default: of all), from forward to zero_grad. Optimizer, scheduler
        and zero_grad act only in the last micro-batch of a window. The last batch of the loader (of several read side
        by side: of the longest) ends a window early, with the correct mean."""
        return self._run.accumulation.micro_batch(_modules(models) or self._run.models)

    def register_forward_method(self, model: nn.Module, *names: str) -> None:
        """Makes these methods of a prepared model, or of a module inside one, callable like its forward: parameters are
        gathered for them.

        Not needed for methods that only call submodules: those can be called from anywhere.
        """
        for name in names:
            if not callable(getattr(model, name, None)):
                raise UsageError(
                    f"register_forward_method: {type(model).__name__} has no method {name}; name one of its own."
                )
            for prepared in (*self._run.models, *self._run.evaluated):
                if is_fsdp(prepared) and any(one is model for one in prepared.modules()):
                    from shardkit.sharding.fsdp import entries

                    entries.register(prepared, model, name)

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
        """Inside, `even_batches` is the setting of loops that begin, over map-style data. Without it a last batch that
        ranks cannot share equally is split as it is, and one of fewer samples than ranks is padded, with a warning, so
        that all ranks have as many batches; what `joinables` are makes no difference."""
        if even_batches is None:
            return nullcontext()
        return padded_as_told([loader.batches_source for loader in self._run.loaders], bool(even_batches))

    @eager
    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Computes the gradients of the loss, one number: the mean over this rank's samples. It is divided by the
        number of micro-batches per step, and scaled under fp16; ranks are averaged. `arguments` are those of
        `loss.backward`. Collective."""
        _warn_of_other_accelerator(self._run)
        self._run.accumulation.backward(loss, **arguments)

    @eager
    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """The global norm of the gradients before clipping, a plain tensor; clips them to `max_norm` in place.

        Before the last micro-batch of a window it returns 0 and changes nothing. Collective.
        """
        chosen = _own_parameters(self._run, parameters)
        if not self.sync_gradients:
            return torch.zeros((), device=self.device)
        self._make_final(chosen)
        return clip.clip_grad_norm_(chosen, max_norm, norm_type)

    @eager
    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps every element of the gradients to [-clip_value, clip_value]; see `clip_grad_norm_`."""
        chosen = _own_parameters(self._run, parameters)
        if self.sync_gradients:
            self._make_final(chosen)
            clip.clamp_gradients_(chosen, clip_value)

    @contextmanager
    def context_parallel(self, *data: Any, dim: int = 1) -> Iterator[Any]:
        """Inside, the ranks of a group (`shardkit.mesh.context_size`) share each sequence: yields the data (tensors, or
        dicts, lists and tuples of them) with this rank's slices along `dim`, for a forward and its loss.

            with accelerator.context_parallel(tokens, targets) as (tokens, targets):
                loss = loss_function(model(tokens).flatten(0, 1), targets.flatten())

        (samples, positions, ...) -> (samples, positions / size, ...); tensors with fewer dims stay whole. Attention and
        the mean of `cross_entropy` are those of the whole sequence. Without groups it yields the data as they are.
        Collective. Raises UsageError where a sequence or the heads do not divide, and on all ranks, in the first
        forward, where the model gives other values for slices than for whole sequences.
        """
        _refuse_region_of_other_accelerator(self._run)
        with self._run.region.split(data, dim) as slices:
            yield slices[0] if len(slices) == 1 else tuple(slices)

    def sum_slices(self, values: torch.Tensor) -> torch.Tensor:
        """Inside of `context_parallel`: the sum of a tensor over the ranks that share each sequence, with gradients;
        outside, the tensor itself. For what a loss needs of whole sequences:

            log_probabilities = accelerator.sum_slices(of_tokens.sum(1))

        Each of these ranks goes on with it alike, as to the loss that it gives to `backward`. Collective.
        """
        return self._run.region.sum_slices(values)

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """As `context_parallel`, under Accelerate's name: inside, the buffers themselves are the slices, along a dim
        each, and are whole again afterwards, but those of `no_restore_buffers`. Backward is inside, too. Collective."""
        _refuse_region_of_other_accelerator(self._run)
        return self._run.region.split_in_place(buffers or [], buffer_seq_dims or [], no_restore_buffers or ())

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model is spread over several devices (Transformers' device_map), and so cannot be trained on
        several ranks."""
        return len(set(getattr(model, "hf_device_map", {}).values())) > 1

    @eager
    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> None:
        """Removes fp16's loss scale from the gradients of one optimizer, of several, or of all; does nothing while
        accumulating."""
        given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        chosen = self._run.optimizers if given is None else [self._prepared(one) for one in given]
        if self.sync_gradients:
            for one in chosen:
                one.make_gradients_final()

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was skipped because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._run.optimizers)

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager:
        """The autocast context of a prepared model's forward, for other code under DDP or in one process. Under FSDP it
        does nothing, since units cast their inputs. A handler with `enabled=False` disables autocast inside."""
        if not hasattr(autocast_handler, "enabled") and autocast_handler is not None:
            raise UsageError(
                f"autocast: expected an object with `enabled` (got {autocast_handler!r}); give none for the precision "
                "of the run, and for another one use torch.autocast."
            )
        if autocast_handler is not None and not autocast_handler.enabled:
            return torch.autocast(self.device.type, enabled=False)
        return precision.autocast(self._run.config, self.device)

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its window, so that optimizers step."""
        _warn_of_other_accelerator(self._run)
        return self._run.accumulation.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step and rank; a new value applies from the next window on.

        In an elastic run the value that is read is that of the present world. One that is set is that of the world with
        all machines, and is converted.
        """
        return self._run.accumulation.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        accumulate_over(self._run, steps)

    @property
    def counters(self) -> Counters:
        """Optimizer steps (`step`), micro-batches since the last one (`micro_step`), and samples over all ranks
        (`samples_seen`). After a load they go on from the checkpoint's."""
        return self._run.accumulation.counters

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler under fp16, else None."""
        return self._run.accumulation.loss_scale.scaler

    def _prepared(self, optimizer: Any) -> AcceleratedOptimizer:
        if (known := prepare.known_optimizer(self._run, optimizer)) is None:
            raise UsageError(
                f"unscale_gradients: not a prepared optimizer (got {type(optimizer).__name__}); give what "
                "accelerator.prepare returned."
            )
        return known

    def _make_final(self, parameters: list[torch.Tensor]) -> None:
        for optimizer in _optimizers_of(self._run, parameters):
            optimizer.make_gradients_final()


def _modules(models: Iterable[Any]) -> list[nn.Module]:
    """The models, also those in lists and dicts. UsageError for anything else."""
    found = leaves(list(models))
    if others := [type(one).__name__ for one in found if not isinstance(one, nn.Module)]:
        raise UsageError(
            f"accumulate: expected models (got {', '.join(others)}); give those of this micro-batch, or none for all."
        )
    return found


def _own_parameters(run: Run, parameters: Any) -> list[torch.Tensor]:
    """The parameters as a list, those taken from a model before `prepare` as its present ones. Raises UsageError where
    they are not parameters of a prepared model."""
    is_one = isinstance(parameters, torch.Tensor) or not isinstance(parameters, Iterable)
    chosen = [parameters] if is_one else list(parameters)
    if not all(isinstance(one, torch.Tensor) for one in chosen):
        raise UsageError(f"clip: not parameters (got {type(chosen[0]).__name__}); use model.parameters().")
    if not chosen:
        _warn_of_nothing_to_clip(run)
        return chosen
    if any(isinstance(parameter, ReleasedParameter) for parameter in chosen):
        present: dict[int, torch.Tensor] = {}
        for one in run.taken:
            present |= rebind.present_parameters(one.names_before, one.model)
        chosen = [present.get(id(parameter), parameter) for parameter in chosen]
    _refuse_strangers(run, chosen)
    return chosen


def _refuse_strangers(run: Run, parameters: Sequence[torch.Tensor]) -> None:
    """UsageError where none of them has a gradient, nor is of a prepared model."""
    own = (id(parameter) for model in run.models for parameter in every_parameter(model))
    has_gradients = any(parameter.grad is not None for parameter in parameters)
    if run.models and not has_gradients and {id(parameter) for parameter in parameters}.isdisjoint(own):
        raise UsageError(
            f"clip: not parameters of a prepared model (got {len(parameters)}); use model.parameters() of the prepared "
            "model."
        )


def _warn_of_nothing_to_clip(run: Run) -> None:
    if run.process.is_main and "empty clip" not in run.has_warned_of:
        run.has_warned_of.add("empty clip")
        log.warning(
            "clip: no parameters are given, so no gradients are clipped (got an empty list, or an iterator such as "
            "filter(...) that the optimizer has read); give a list."
        )


def _optimizers_of(run: Run, parameters: Sequence[torch.Tensor]) -> list[AcceleratedOptimizer]:
    """The prepared optimizers that train any of the parameters."""
    if len(run.optimizers) < 2:
        return run.optimizers
    chosen = {id(parameter) for parameter in parameters}
    return [one for one in run.optimizers if any(id(parameter) in chosen for parameter in one.parameters)]
