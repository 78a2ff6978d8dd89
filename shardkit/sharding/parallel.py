"""A model made parallel: DDP or FSDP2 as the config says, with what belongs before and after in the right order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from shardkit.config.schema import BackwardPrefetch, Config, FsdpConfig
from shardkit.distributed import control
from shardkit.errors import ModelError
from shardkit.log import get_logger
from shardkit.sharding import precision, units
from shardkit.sharding.activation import checkpoint_blocks
from shardkit.sharding.compiling import compile_blocks
from shardkit.sharding.init import empty_states, fill, fill_from_rank0, same_everywhere

if TYPE_CHECKING:
    from shardkit.distributed.process import Process

log = get_logger(__name__)


def parallelize(
    model: nn.Module, config: Config, mesh: DeviceMesh | None, process: Process, weights: Path | None = None
) -> nn.Module:
    """The model, ready to train on all ranks: itself, changed in place, under FSDP; DDP's wrapper around it under DDP.

    `weights` is a safetensors file or a folder of them; a model built under `init_empty_weights()` is filled from it,
    each rank reading its own rows, or by its own initialisation. Collective: every rank must call it.
    Raises ModelError, on all ranks and before anything is shared out, where the model cannot be sharded as asked.
    """
    cut, blocks = plan(model, config)
    if config.fsdp.sync_module_states and process.world_size > 1:
        same_everywhere(model)
        fill_from_rank0(model, process.device)
    if config.fsdp.activation_checkpointing:
        checkpoint_blocks(model, blocks)
    if config.shardkit.compile:  # after activation checkpointing, which it compiles too; before the sharding hooks
        compile_blocks(blocks)
    if mesh is None:
        _fill(model, cut, config, process, weights, process.device)
        return replicate(model.to(process.device), config, process)
    home = _home(config, process)
    shard(model, cut, config, mesh, offloads=home != process.device)
    _fill(model, cut, config, process, weights, home)
    keep_equal(model, cut.replicated, process)
    return model


def plan(model: nn.Module, config: Config) -> tuple[units.Cut, list[nn.Module]]:
    """How the model is cut, and the blocks that are recomputed or compiled. The units are the root alone without FSDP.

    Raises ModelError, on all ranks: what is wrong on one is agreed on by all. Collective.
    """
    if problems := control.start().union(_unfit(model, config)):
        raise ModelError("\n".join(problems))
    mixed = precision.of(config)
    if mixed.is_mixed and (changed := precision.upcast_(model)):
        log.info("mixed precision: %d trainable 16-bit parameters are kept in fp32.", len(changed))
    cut, blocks = units.Cut([units.Unit("", model, dict(model.named_parameters()))]), []
    try:
        if config.mode == "fsdp":
            cut = units.cut(model, config.fsdp, mixed.param)
        if config.fsdp.activation_checkpointing or config.shardkit.compile:
            blocks = units.blocks(model, config.fsdp)
    except ModelError as error:
        problems = [str(error)]
    if problems := control.start().union(problems):
        raise ModelError("\n".join(problems))
    if cut.remark:
        log.info("%s", cut.remark)
    return cut, blocks


def _unfit(model: nn.Module, config: Config) -> list[str]:
    """What makes a model impossible to parallelize, in words."""
    wrapped = next((m for m in model.modules() if isinstance(m, (FSDPModule, DistributedDataParallel))), None)
    if wrapped is not None:
        return [
            f"model: it is parallel already (got a {type(wrapped).__name__} in it); give the bare model, and only once."
        ]
    lazy = [fqn for fqn, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    problems = [f"model: {fqn} has no shape yet; run one batch through the model first." for fqn in lazy]
    if config.mode == "fsdp":
        problems += [
            f"model: {fqn} makes sparse gradients, which FSDP cannot reduce; build it with sparse=False."
            for fqn, module in model.named_modules()
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        ]
    return problems


def shard(model: nn.Module, cut: units.Cut, config: Config, mesh: DeviceMesh, offloads: bool) -> None:
    """Split every unit's parameters over the mesh, in place. The whole parameters' memory is given back."""
    mixed = precision.of(config)
    device = _device_of(mesh)
    reshards = reshards_after_forward(config.fsdp)
    offload_policy = CPUOffloadPolicy(pin_memory=True) if offloads else OffloadPolicy()
    left_out = set(cut.replicated.values())
    if mixed.param is not None:
        _cast_between(model, cut, mixed.param)
    _move(cut.replicated.values(), device)
    managed = {id(p): unit.fqn for unit in cut.units for p in unit.parameters.values()}
    for unit in cut.units:
        elsewhere = {p for p in unit.module.parameters() if managed.get(id(p), unit.fqn) != unit.fqn}
        _make_contiguous(unit.parameters.values())
        if unit.keeps_dtype:
            policy = precision.apart_policy(mixed, _dtype_of(unit))
        else:
            policy = precision.unit_policy(mixed, is_root=not unit.fqn)
        unit.module.register_forward_hook(_own_outputs)
        fully_shard(
            unit.module,
            mesh=mesh,
            # The root is needed again as soon as backward starts, so torch keeps it unless told otherwise.
            reshard_after_forward=reshards if unit.fqn or not reshards else None,
            mp_policy=policy,
            offload_policy=offload_policy,
            ignored_params=left_out | elsewhere,
        )
        _release(unit.parameters.values())
    modules = [unit.module for unit in cut.units if isinstance(unit.module, FSDPModule)]
    set_prefetch(modules, config.fsdp)
    if config.shardkit.ddp_find_unused_parameters:
        reduce_unused(modules[-1])


def reshards_after_forward(config: FsdpConfig) -> bool:
    """Whether units free their gathered parameters between forward and backward (strategies 1 and 4)."""
    if config.reshard_after_forward is not None:
        return config.reshard_after_forward
    return config.sharding_strategy.reshards_after_forward


def set_prefetch(modules: Sequence[FSDPModule], config: FsdpConfig) -> None:
    """When units are gathered ahead. `modules`: children first, the root last.

    BACKWARD_PRE is what FSDP2 does by itself. Naming only the unit itself turns that off: the next one is gathered
    when backward reaches it, after the gradients of this one were reduced, which is BACKWARD_POST as well as
    NO_PREFETCH. (An empty list would mean the default.)
    """
    if config.backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        for module in modules:
            module.set_modules_to_backward_prefetch([module])
    if config.forward_prefetch:
        for module, following in pairwise(modules[:-1]):
            module.set_modules_to_forward_prefetch([following])


def reduce_unused(root: FSDPModule) -> None:
    """Let parameters without a gradient on this rank take part in reductions with zeros: ranks may use different ones.

    Without it they would reduce buffers of different sizes.
    """
    if not hasattr(root, "set_reduce_scatter_unused_params"):
        raise ModelError(
            f"shardkit.ddp_find_unused_parameters: FSDP has it from torch 2.13 on (got {torch.__version__}); "
            "update torch, or use every parameter on every rank."
        )
    root.set_reduce_scatter_unused_params(True)


def replicate(model: nn.Module, config: Config, process: Process) -> nn.Module:
    """The model in DistributedDataParallel; itself where there is one rank, or nothing in it is trained."""
    if config.mode != "ddp" or process.world_size == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    wrapper = DistributedDataParallel(
        model,
        device_ids=[process.device] if process.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=config.shardkit.ddp_find_unused_parameters,
        # Every rank has rank 0's values already, or was asked to keep its own.
        init_sync=False,
    )
    reduce_dtype = precision.of(config).reduce
    if reduce_dtype is not torch.float32:
        wrapper.register_comm_hook(reduce_dtype, _reduce_in)
    return wrapper


def _reduce_in(dtype, bucket):
    """DDP's communication hook: the mean of a bucket over all ranks, added up in `dtype`.

    Without annotations: DDP compares them with its own types, and here they would be strings.
    """
    buffer = bucket.buffer()
    sent = buffer.to(dtype).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


_REPLICATED: WeakKeyDictionary[nn.Module, _Replicated] = WeakKeyDictionary()
_PAUSED: WeakSet[nn.Module] = WeakSet()


class _Replicated:
    """Parameters that FSDP leaves whole on every rank: the mean of their gradients is taken at the end of backward."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sync = True
        self._queued_in = -1
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _arrived(self, _: torch.Tensor) -> None:
        backward = torch._C._current_graph_task_id()  # a new number each time, so that an aborted one leaves no trace
        if self.sync and self._queued_in != backward:
            self._queued_in = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        """One all-reduce for all of them, in a fixed order. A rank without a gradient takes part with zeros."""
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for same in by_dtype.values():
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for parameter, grad, part in zip(same, grads, flat.split([g.numel() for g in grads]), strict=True):
                parameter.grad = grad.copy_(part.view_as(grad))


def keep_equal(model: nn.Module, replicated: dict[str, nn.Parameter], process: Process) -> None:
    """Reduce the gradients of the parameters that stay whole, so that all ranks take the same step."""
    trained = [p for p in replicated.values() if p.requires_grad]
    if trained and process.world_size > 1:
        _REPLICATED[model] = _Replicated(trained)


@contextmanager
def gradient_sync(models: Iterable[nn.Module], enabled: bool) -> Iterator[None]:
    """Inside, backward reduces gradients over the ranks (`enabled`) or only adds them up locally.

    Put forward and backward of a micro-batch inside. Without reduction, FSDP holds the gradients of the whole model
    in the reduce dtype on every rank until the next reducing backward: four bytes a parameter for fp32. A model that
    has no room for that is trained with `enabled` in every micro-batch: the same sums, one reduce-scatter more each.
    """
    found = [(model, _sync_state(model)) for model in models]
    for model, _ in found:
        _set_sync(model, enabled)
    try:
        yield
    finally:
        for model, state in found:
            _set_sync(model, state)


def _sync_state(model: nn.Module) -> bool:
    if isinstance(model, DistributedDataParallel):
        return model.require_backward_grad_sync
    return model not in _PAUSED


def _set_sync(model: nn.Module, enabled: bool) -> None:
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = enabled
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        (_PAUSED.discard if enabled else _PAUSED.add)(model)
    if model in _REPLICATED:
        _REPLICATED[model].sync = enabled


def _fill(
    model: nn.Module,
    cut: units.Cut,
    config: Config,
    process: Process,
    weights: Path | None,
    parameter_device: torch.device,
) -> None:
    """Values for what is still empty, or all that a given file has."""
    if weights is None and not empty_states(model):
        return
    seed = config.shardkit.seed
    if seed is None:
        seed = control.start().share(torch.initial_seed() % 2**63)
    fill(model, cut.units, process.device, parameter_device, weights, seed)


def _home(config: Config, process: Process) -> torch.device:
    """Where sharded parameters, their gradients and optimizer state live."""
    if config.fsdp.offload_params and process.device.type == "cpu":
        log.info("fsdp_offload_params: this run is on the CPU, where parameters and gradients are anyway.")
    return torch.device("cpu") if config.fsdp.offload_params else process.device


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


class _Own(torch.autograd.Function):
    """The same values in the same memory, but no view: what is changed in place later keeps its hooks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _own_outputs(_module: nn.Module, _args: Any, output: Any) -> Any:
    """A unit's outputs without views. FSDP2 hangs the backward gather on them, and an in-place operation on a view
    (`x += residual`) would drop it without a word: wrong gradients. Registered before FSDP2's own hook."""
    if torch.compiler.is_compiling():  # a compiled graph returns no views of what it was given
        return output
    if isinstance(output, torch.Tensor):
        return _own(output)
    return tree_map_only(torch.Tensor, _own, output)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return _Own.apply(tensor) if tensor.requires_grad and tensor._is_view() else tensor


def _dtype_of(unit: units.Unit) -> torch.dtype:
    return next((p.dtype for p in unit.parameters.values()), torch.float32)


def _cast_between(model: nn.Module, cut: units.Cut, dtype: torch.dtype) -> None:
    """Let each module that has parameters of its own get its inputs in the dtype that these have in forward.

    FSDP2 casts at the borders of units only; inside, one fp32 buffer added to a bf16 activation makes it fp32 for
    every module that follows. Ignored modules keep their dtype, and give back the dtype around them.
    """
    inside_ignored = {id(inner) for module in cut.ignored.values() for inner in module.modules()}
    heads = {id(unit.module) for unit in cut.units}
    for module in cut.ignored.values():
        own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
        _cast_inputs(module, own)
        module.register_forward_hook(lambda _module, _args, output: _cast(output, dtype))
    for module in model.modules():
        if module._parameters and id(module) not in inside_ignored | heads:
            _cast_inputs(module, dtype)


def _cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    def cast(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    module.register_forward_pre_hook(cast, with_kwargs=True)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors of (nested) tuples, lists and dicts in `dtype`."""
    if isinstance(data, torch.Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, dict):
        return {key: _cast(value, dtype) for key, value in data.items()}
    if type(data) in (tuple, list):
        return type(data)(_cast(value, dtype) for value in data)
    return data


@torch.no_grad()
def _move(parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    for parameter in parameters:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(device)


def _make_contiguous(parameters: Iterable[nn.Parameter]) -> None:
    """fully_shard refuses other strides, such as channels_last."""
    for parameter in parameters:
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def _release(parameters: Iterable[nn.Parameter]) -> None:
    """Give back the memory of whole parameters, which an optimizer built before still refers to."""
    for parameter in parameters:
        if not isinstance(parameter, DTensor) and not parameter.is_meta:
            parameter.data = parameter.data.new_empty(0)
