"""Shards parameters over a mesh with FSDP2, unit by unit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from shardkit.config import meaning
from shardkit.config.schema import BackwardPrefetch, Config, FsdpConfig
from shardkit.distributed import accelerators
from shardkit.distributed.modules import every_parameter
from shardkit.distributed.tensors import is_dtensor, local_part, own_part, sharded_like
from shardkit.errors import ModelError, UsageError
from shardkit.model.cut import shard_dim
from shardkit.sharding import hooks, original_parameters, parameters, precision
from shardkit.sharding.fsdp import internals, outputs, unit_state, unsharded, unused_parameters
from shardkit.sharding.fsdp.copies import DeepCopy
from shardkit.sharding.fsdp.trace import COMPARED, Trace
from shardkit.sharding.gradient_sync import GradientMean, drop_unreduced, sync_with_model
from shardkit.sharding.precision import Precision
from shardkit.sharding.tensors import behaviours
from shardkit.sharding.tensors.sharded_parameter import ShardedParameter
from shardkit.sharding.units import LiveUnit, Units


def shard(model: nn.Module, units: Units, config: Config, mesh: DeviceMesh, offloads: bool) -> None:
    """Shard every unit's parameters over the mesh, in place. Frees the memory of the whole parameters."""
    behaviours.install()  # before the shards get values, which modules may draw
    mixed = precision.of(config)
    reshards = meaning.reshards_after_forward(config.fsdp)
    offload_policy = CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy()
    left_out, shards = set(units.replicated.values()), mesh.size(mesh.ndim - 1)
    if mixed.param is not None:
        precision.cast_between(model, units, mixed.param)
    _move(units.replicated.values(), accelerators.current(mesh.device_type))
    managed = {id(p): unit.fqn for unit in units.units for p in unit.parameters.values()}
    _keep_weights_apart(model, managed)
    for unit in units.units:
        elsewhere = {p for p in every_parameter(unit.module) if managed.get(id(p), unit.fqn) != unit.fqn}
        _make_contiguous(unit.parameters.values())
        if unit.keeps_dtype:
            policy = _apart_policy(mixed, _dtype_of(unit))
        else:
            policy = _policy(mixed, is_root=not unit.fqn, dtype=_dtype_of(unit))
        unit.module.register_forward_hook(lambda module, args, output: outputs.without_views(output))
        _give_forward(unit.module)
        internals.give_class(type(unit.module))
        with internals.taking_containers():
            fully_shard(
                unit.module,
                mesh=mesh,
                # None for the root: torch then does not reshard it after forward, since backward starts with it.
                reshard_after_forward=reshards if unit.fqn or not reshards else None,
                mp_policy=policy,
                offload_policy=offload_policy,
                ignored_params=left_out | elsewhere,
                shard_placement_fn=lambda parameter: Shard(shard_dim(parameter.shape, shards)),
            )
        _name_as_before(type(unit.module))
        original_parameters.release(unit.parameters)
    modules = [unit.module for unit in units.units if isinstance(unit.module, FSDPModule)]
    set_prefetch(modules, config.fsdp)
    if config.shardkit.ddp_find_unused_parameters:
        reduce_unused(modules[-1])


def _keep_weights_apart(model: nn.Module, managed: Container[int]) -> None:
    """Recurrent networks otherwise move their weights into one memory, at a forward on a GPU that finds others than
    before: gathered ones would no longer be what FSDP gathers into. cuDNN now joins them in each forward, and warns."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and any(id(p) in managed for p in module._parameters.values()):
            module.__dict__["flatten_parameters"] = _flattens_nothing
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk", UserWarning)


def _flattens_nothing() -> None:
    """In the place of `flatten_parameters` of a sharded module."""


def _give_forward(module: nn.Module) -> None:
    """Give a ModuleDict or ModuleList the forward of every module, which raises: fully_shard refuses one without. Its
    submodules are called, such as two models that share a part."""
    kind = type(module)
    if isinstance(module, (nn.ModuleDict, nn.ModuleList)) and kind.forward is nn.Module.forward:
        module.__class__ = type(kind.__name__, (kind,), {"forward": _refuse_call, "__module__": kind.__module__})


def _refuse_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return nn.Module.forward(module, *args, **kwargs)


def _name_as_before(kind: type[nn.Module]) -> None:
    """Give the class that fully_shard has put on a module, FSDPGpt, the names of the module's own class.

    Libraries look up models by these: the Trainer whether labels are shifted, diffusers what a saved pipeline loads.
    """
    own = internals.own_class(kind)
    kind.__name__, kind.__qualname__, kind.__module__ = own.__name__, own.__qualname__, own.__module__


def _policy(mixed: Precision, is_root: bool, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """The policy of a unit with parameters of this dtype: gathered in the compute dtype, reduced in the reduce dtype.

    Only the root casts its outputs, so that activations between blocks stay in the compute dtype.
    """
    return MixedPrecisionPolicy(
        param_dtype=mixed.param,
        reduce_dtype=precision.reduce_dtype(mixed.reduce, mixed.param or dtype),
        output_dtype=mixed.output if is_root else None,
    )


def _apart_policy(mixed: Precision, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """The policy of a unit that keeps its dtype: inputs are cast to it, outputs to the compute dtype."""
    if mixed.param is None:
        return MixedPrecisionPolicy(reduce_dtype=precision.reduce_dtype(mixed.reduce, dtype), cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=precision.reduce_dtype(torch.float32, dtype), output_dtype=mixed.param
    )


@dataclass(frozen=True)
class Carried:
    """What a parameter had before it was sharded."""

    kind: type
    attributes: dict[str, Any]
    hooks: list[Any]

    @classmethod
    def of(cls, units: Units) -> dict[str, Carried]:
        """{fqn: what it had} of all parameters of the units."""
        return {
            fqn: cls(type(p), parameters.attributes_of(p), parameters.post_accumulate_hooks_of(p))
            for unit in units.units
            for fqn, p in unit.parameters.items()
        }

    def to(self, parameter: nn.Parameter) -> None:
        """Carries it over to the sharded parameter, in place."""
        parameter.__class__ = ShardedParameter  # type: ignore[assignment]
        parameters.carry_over(self.attributes, parameter)
        parameters.note_class(self.kind, parameter)
        for hook in self.hooks:
            hooks.hook_whether_trained(parameter, hook)


def finish(
    model: nn.Module,
    units: Units,
    carried: Mapping[str, Carried],
    config: Config,
    device: torch.device,
    compiled: Sequence[nn.Module],
) -> None:
    """The last step, when every parameter has its values: restores attributes and hooks, and installs the hooks of
    `unit_state`."""
    for fqn, one in carried.items():
        one.to(model.get_parameter(fqn))
    _replace_methods(model, config, device)
    shared = unit_state.adopt(model, _carry_to_gathered)
    shared.left = math.inf if config.debug else COMPARED * len(units.units)
    unit_state.finish(model, compiled)
    if config.shardkit.ddp_find_unused_parameters:
        unit_state.at_end_of_backward(model, (), partial(unused_parameters.drop, internals.groups_of_model(model)))
    if config.shardkit.unsharded_generate:
        unsharded.generate_unsharded(model)
    means = GradientMean(units.replicated.values(), config.shardkit.ddp_find_unused_parameters)
    if means.parameters and config.num_processes > 1:
        sync_with_model(model, means)
        unit_state.at_end_of_backward(model, means.parameters, partial(_reduce_replicated, means, shared))


def _replace_methods(model: nn.Module, config: Config, device: torch.device) -> None:
    """Replaces methods that torch's modules have for plain parameters. A script may load, move or copy a part of the
    model: `model.encoder.load_state_dict(...)`, `model.encoder.to(device)`."""
    vars(model)["zero_grad"] = partial(_zero_grad, model)
    wait_s = meaning.longest_wait_s(config)
    autocast = partial(precision.autocast_forward, config=meaning.without_shards(config), device=device)  # of a copy
    for module in model.modules():
        if isinstance(module, FSDPModule):
            vars(module)["__reduce_ex__"] = _refuse_pickling
        if any(map(is_dtensor, every_parameter(module))):
            vars(module)["__deepcopy__"] = DeepCopy(module, wait_s, autocast if module is model else None)
            vars(module)["_apply"] = partial(_apply_in_place, module)
            module.register_load_state_dict_pre_hook(_shard_what_is_loaded)


def _reduce_replicated(means: GradientMean, trace: Trace) -> None:
    trace.add(*means.used(), device=means.parameters[0].device)
    means.reduce()


def _refuse_pickling(protocol: int) -> Any:
    raise UsageError(
        "pickle: a sharded model cannot be pickled, as by torch.save or for another process (got a prepared one); save "
        "its weights: accelerator.save_model(model, folder), or on rank 0 what accelerator.get_state_dict(model) "
        "returns there; or save copy.deepcopy(accelerator.unwrap_model(model)) on rank 0. All ranks must call these "
        "three."
    )


def _zero_grad(model: nn.Module, set_to_none: bool = True) -> None:
    """As the model's own, also for gradients that wait for their reduction."""
    type(model).zero_grad(model, set_to_none)
    drop_unreduced(model, {id(p) for p in every_parameter(model)})


@torch.no_grad()
def _apply_in_place(
    model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> nn.Module:
    """The `_apply` of a module with sharded parameters, which `.to(...)`, `.half()` and the like call. These parameters
    stay as they are, and offloaded ones where they are. UsageError where they would get another dtype or device, which
    FSDP does not follow."""
    for fqn, parameter in model.named_parameters():
        mine = local_part(parameter)
        wanted = convert(mine)
        if wanted.dtype != mine.dtype or wanted.device not in _places(parameter):
            raise UsageError(
                f"model.to: a sharded model keeps its dtype and device (got {wanted.dtype} on {wanted.device}, {fqn} "
                f"has {mine.dtype} on {mine.device}); convert the model before prepare, or set mixed_precision; "
                "accelerator.get_state_dict(model) gives whole weights on the CPU."
            )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
    return model


def _places(parameter: torch.Tensor) -> list[torch.device]:
    """Where a parameter is, and where it is used: one that is offloaded comes to the device for each use."""
    mine = local_part(parameter).device
    return [mine, accelerators.current(parameter.device_mesh.device_type)] if is_dtensor(parameter) else [mine]


def _shard_what_is_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace whole tensors in a state dict by this rank's shards, for sharded parameters. Not collective."""
    sharded = {name: p for name, p in module.named_parameters(remove_duplicate=False) if is_dtensor(p)}
    for name, parameter in sharded.items():
        given = state_dict.get(prefix + name)
        if isinstance(given, torch.Tensor) and not is_dtensor(given) and given.shape == parameter.shape:
            part = own_part(given.detach(), parameter).to(local_part(parameter).device).contiguous()
            state_dict[prefix + name] = sharded_like(part, parameter)


def _carry_to_gathered(parameter: Any) -> None:
    parameters.carry_over(parameters.attributes_of(parameter.sharded_param), parameter._unsharded_param)


def set_prefetch(modules: Sequence[FSDPModule], config: FsdpConfig) -> None:
    """Configure prefetching. `modules`: children first, the root last.

    BACKWARD_PRE is FSDP2's default. A list with only the unit itself disables it: the next unit is then gathered when
    backward reaches it, after the gradients of this one were reduced. This is used for BACKWARD_POST and NO_PREFETCH.
    (An empty list would mean the default.)
    """
    if config.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        for module in modules:
            module.set_modules_to_backward_prefetch([module])
    if config.forward_prefetch:
        for module, following in pairwise(modules[:-1]):
            module.set_modules_to_forward_prefetch([following])


def can_reduce_unused() -> bool:
    """Whether this torch has what `reduce_unused` needs: since 2.13."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def reduce_unused(root: FSDPModule) -> None:
    """Reduce parameters without a gradient on this rank as zeros, since ranks may use different parameters.

    Otherwise the ranks would reduce buffers of different sizes.
    """
    if not can_reduce_unused():
        raise ModelError(
            f"shardkit.ddp_find_unused_parameters: FSDP supports it since torch 2.13 (got {torch.__version__}); "
            "update torch, or remove the setting and use the same parameters on all ranks."
        )
    root.set_reduce_scatter_unused_params(True)


def _dtype_of(unit: LiveUnit) -> torch.dtype:
    return next((p.dtype for p in unit.parameters.values()), torch.float32)


@torch.no_grad()
def _move(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    for parameter in parameters:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def _make_contiguous(parameters: Iterable[nn.Parameter]) -> None:
    """Make parameters contiguous: fully_shard does not accept other strides, such as channels_last."""
    for parameter in parameters:
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
