"""Makes a model parallel with DDP, FSDP2 or PyTorch/XLA, and defines the order of all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from shardkit.config import xla as xla_settings
from shardkit.config.meaning import dtypes, eight_bits
from shardkit.config.schema import Config
from shardkit.distributed import control, xla
from shardkit.distributed.tensors import is_dtensor, is_fsdp, is_fsdp_1
from shardkit.errors import MachineError, ModelError
from shardkit.log import get_logger
from shardkit.sharding import float8, precision
from shardkit.sharding.activation import checkpoint_blocks
from shardkit.sharding.ddp import Replica, replicate
from shardkit.sharding.gradient_sync import watch_backward
from shardkit.sharding.init import empty_states, fill, fill_from_rank0, refuse_different_models
from shardkit.sharding.parameters import IN_BACKWARD, has_gradient_hooks, refused_hooks
from shardkit.sharding.shared_memory import pairs_in_same_memory
from shardkit.sharding.units import Units, blocks_of, one_unit, units_of

if TYPE_CHECKING:
    from shardkit.distributed.process import Process

log = get_logger(__name__)

_HOST = torch.device("cpu")
OLDEST = (2, 11)
"""The oldest torch with the parts of FSDP2 that `fsdp.py` uses; `make test-oldest` runs the tests with it."""
OLDEST_FOR_INTEGERS = (2, 12)
"""The oldest torch whose FSDP2 shards parameters that are not floating-point, such as weights packed in 4 bits."""


def parallelize(
    model: nn.Module, config: Config, mesh: DeviceMesh | None, process: Process, weights: Path | None = None
) -> nn.Module:
    """The model, ready for training on all ranks: changed in place under FSDP, in DDP's wrapper under DDP.

    See `distribute`, which does everything except DDP's wrapper.
    """
    distribute(model, config, mesh, process, weights)
    return model if mesh is not None else replicate(model, config, process)


def distribute(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh | None,
    process: Process,
    weights: Path | None = None,
    moves: bool = True,
) -> None:
    """Prepare the model for all ranks, in place: sharded under FSDP; else equal on all ranks and, with `moves`, on the
    rank's device.

    `weights`: a safetensors file or a folder of them. A model built under `init_empty_weights()` loads it, each
    rank reading its part, or initialized by its modules. Collective: every rank must call it.
    Raises ModelError, on all ranks and before anything is sharded, if the model cannot be sharded as configured.
    """
    units, blocks = units_and_blocks(model, config)
    if config.fsdp.sync_module_states and process.world_size > 1:
        refuse_different_models(model)
        fill_from_rank0(model, _HOST if config.mode == "xla" else process.device)
    if config.mode == "xla":
        from shardkit.sharding.xla import shard as shard_on_xla

        _fill(model, units, config, weights, _HOST, _HOST)
        shard_on_xla(model, units, blocks, config)
        return
    if config.fsdp.activation_checkpointing:
        checkpoint_blocks(model, blocks, config.shardkit.recompute, config.shardkit.recompute_every)
    if config.shardkit.offload_activations:  # after activation checkpointing, to offload what that still saves
        from shardkit.sharding.offload import offload_blocks

        offload_blocks(blocks)
    if config.shardkit.compile:  # after activation checkpointing, which is compiled, too; before the sharding hooks
        for block in blocks:  # in place; equal blocks share one compilation
            block.compile()
    if mesh is None:
        _fill(model, units, config, weights, process.device, process.device)
        if moves:
            model.to(process.device)
        return
    refuse_old(torch.__version__)
    from shardkit.sharding.fsdp.shard_model import Carried, finish, shard

    home = _device_of_shards(config, process)
    carried = Carried.of(units)
    shard(model, units, config, mesh, offloads=home != process.device)
    _fill(model, units, config, weights, process.device, home)
    finish(model, units, carried, config, process.device, blocks if config.shardkit.compile else [])
    if eight_bits(config) == "fp8" and home == process.device:
        float8.gather_in_fp8(model)


def load_weights(model: nn.Module, config: Config, process: Process, weights: Path) -> None:
    """Load a safetensors file, or a folder of them, into a distributed model, each rank its part. Collective. Raises
    ModelError on all ranks."""
    fill(model, [], process.device, _device_of_shards(config, process), weights, seed=0)  # no tensor is without values


def refuse_old(version: str) -> None:
    """Raises MachineError if this torch is too old for FSDP; PyTorch/XLA, DDP and one process need less."""
    if _release(version) < OLDEST:
        raise MachineError(
            f"FSDP: needs torch {OLDEST[0]}.{OLDEST[1]} or newer (got {version}, which is only supported on TPUs); "
            "install a newer torch, or use strategy NO_SHARD."
        )


def refuse_integers(units: Units, version: str) -> None:
    """Raises ModelError if this torch cannot shard one of the parameters."""
    if _release(version) >= OLDEST_FOR_INTEGERS:
        return
    for unit in units.units:
        for name, parameter in unit.parameters.items():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                major, minor = OLDEST_FOR_INTEGERS
                raise ModelError(
                    f"model: {name} is {parameter.dtype}, which FSDP shards since torch {major}.{minor} (got "
                    f"{version}); install a newer torch, keep it in a floating-point dtype, or use strategy NO_SHARD."
                )


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def at_end_of_backward(model: nn.Module, call: Callable[[], None]) -> None:
    """Call `call` at the end of each backward through a model that `parallelize` returned."""
    if is_fsdp(model):
        from shardkit.sharding.fsdp import unit_state

        unit_state.at_end_of_backward(model, [], call)
    elif isinstance(model, Replica):
        model.at_end_of_backward.append(call)
    else:
        watch_backward(model, lambda _: call())


def units_and_blocks(model: nn.Module, config: Config) -> tuple[Units, list[nn.Module]]:
    """The model's units, and the blocks that are recomputed, offloaded or compiled. Without FSDP there is one unit.

    Collective. Raises ModelError on all ranks if any rank has a problem.
    """
    if problems := control.start().union(_unfit(model, config)):
        raise ModelError("\n".join(problems))
    mixed = precision.of(config)
    if mixed.is_mixed and (changed := precision.upcast_(model)):
        log.info("mixed precision: %d trainable 16-bit parameters are kept in fp32.", len(changed))
    units, blocks = None, []
    try:
        if (kind := eight_bits(config)) is not None:
            float8.convert(blocks_of(model, config.fsdp), kind)
        is_cut = config.mode == "fsdp" or xla_settings.shards(config)
        units = units_of(model, config.fsdp, dtypes(config).param) if is_cut else one_unit(model)
        if config.mode == "fsdp":
            refuse_integers(units, torch.__version__)
        if _needs_blocks(config):
            blocks = blocks_of(model, config.fsdp)
        if config.mode == "fsdp" and config.fsdp.activation_checkpointing and config.shardkit.compile:
            problems = changed_twice(units, blocks)
    except ModelError as error:
        problems = [str(error)]
    if problems := control.start().union(problems):
        raise ModelError("\n".join(problems))
    assert units is not None
    if units.cut.remark:
        _say_once(units.cut.remark)
    return units, blocks


@cache
def _say_once(remark: str) -> None:
    """A script may prepare many models of one kind: a critic, a teacher, one for each fold."""
    log.info("%s", remark)


def changed_twice(units: Units, blocks: Iterable[nn.Module]) -> list[str]:
    """Problems of compiled blocks whose running statistics would take each batch twice. At a unit inside a block the
    compiled graph breaks, and torch then recomputes the block without the contexts that keep its buffers."""
    heads = {id(unit.module) for unit in units.units}
    for block in blocks:
        inner = list(block.modules())[1:]
        norms = [type(one).__name__ for one in inner if isinstance(one, _NormBase) and one.track_running_stats]
        if norms and any(id(one) in heads for one in inner):
            return [
                f"model: the running statistics of {norms[0]} would take each batch twice, since "
                f"{type(block).__name__} is compiled and recomputed, and has an FSDP unit in it (got shardkit.compile "
                "and fsdp_activation_checkpointing); write one of the two."
            ]
    return []


def _needs_blocks(config: Config) -> bool:
    section = config.shardkit
    of_blocks = config.fsdp.activation_checkpointing or section.offload_activations or section.compile
    return of_blocks or xla_settings.recomputes(config)


def _unfit(model: nn.Module, config: Config) -> list[str]:
    """Problems of a model that cannot be parallelized."""
    for module in model.modules():
        name = type(module).__name__
        own = (parameter for parameter in module._parameters.values() if parameter is not None)
        if is_fsdp(module) or any(_is_spread(parameter, config) for parameter in own):
            return [
                f"model: is already sharded (got a sharded {name} in it), by the script, by an Accelerator with other "
                "settings, or as a part of another model; build the model anew, and prepare it once."
            ]
        if _is_parallel(module, config):
            return [f"model: is already parallel (got a {name} in it); give the unwrapped model, once."]
    lazy = [fqn for fqn, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    problems = [f"model: {fqn} has no shape yet; run one batch through the model first." for fqn in lazy]
    if config.mode == "fsdp":
        problems += _unfit_for_fsdp(model)
    if config.mode == "xla":
        problems += _unfit_for_xla(model)
    if config.mode == "ddp" and config.num_processes > 1:
        problems += refused_hooks(model)
    if config.mode in ("fsdp", "ddp") and config.num_processes > 1:
        problems += _changed_in_forward(model)
    return problems


def _is_parallel(module: nn.Module, config: Config) -> bool:
    """Whether it is one of torch's wrappers for several devices."""
    if isinstance(module, nn.DataParallel):
        return config.num_processes > 1
    return isinstance(module, DistributedDataParallel) or is_fsdp_1(module)


def _is_spread(parameter: nn.Parameter, config: Config) -> bool:
    """Whether it is sharded already, but not by the script itself (tensor parallelism)."""
    if config.mode == "fsdp" and is_dtensor(parameter):
        from shardkit.sharding.tensors.sharded_parameter import ShardedParameter

        return isinstance(parameter, ShardedParameter)
    return xla.is_xla(parameter) and xla.is_spread(parameter)


def _unfit_for_fsdp(model: nn.Module) -> list[str]:
    """Problems of a model whose parameters cannot be sharded."""
    problems = [
        f"model: {fqn} has a gradient hook (register_hook), which needs whole gradients; change gradients between "
        "backward and step, or use strategy NO_SHARD."
        for fqn, parameter in model.named_parameters()
        if has_gradient_hooks(parameter)
    ]
    problems += [
        f"model: {fqn} has an optimizer in backward, {IN_BACKWARD}"
        for fqn, parameter in model.named_parameters()
        if hasattr(parameter, "_in_backward_optimizers")
    ]
    problems += [
        f"model: {one} and {other} are different tensors in the same memory, which shards cannot keep equal; give "
        "both modules the same parameter, copy one of them (.clone()), or use strategy NO_SHARD."
        for one, other in pairs_in_same_memory(model)[:3]
    ]
    problems += [
        f"model: {fqn or 'it'} has sparse gradients, which FSDP cannot reduce; create it with sparse=False."
        for fqn, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ]
    problems += [
        f"model: named_parameters of {type(module).__name__} leaves out its own parameters, which FSDP would not shard "
        f"(got {fqn or 'the model'} without {', '.join(left_out)}); redefine parameters() instead, or use strategy "
        "NO_SHARD."
        for fqn, module in model.named_modules()
        if (left_out := _left_out_by_name(module))
    ]
    problems += [
        f"model: {name} is a TorchScript module, whose parameters FSDP cannot shard; give the module that it was made "
        "from, or use strategy NO_SHARD."
        for name in _scripts(model)
    ]
    return problems


def _left_out_by_name(module: nn.Module) -> list[str]:
    """The module's own parameters that a redefined `named_parameters`, by which FSDP finds them, leaves out."""
    if type(module).named_parameters is nn.Module.named_parameters:
        return []
    found = {id(parameter) for _, parameter in module.named_parameters(recurse=False)}
    return [name for name, p in module._parameters.items() if p is not None and id(p) not in found]


def _unfit_for_xla(model: nn.Module) -> list[str]:
    """Problems of a model whose parameters cannot be replaced by others on XLA devices."""
    problems = [
        f"model: {one} and {other} are different tensors in the same memory, which they would not share on XLA "
        "devices; give both modules the same parameter, or copy one of them (.clone())."
        for one, other in pairs_in_same_memory(model)[:3]
    ]
    problems += [
        f"model: {name} is a TorchScript module, whose parameters stay in host memory; give the module that it was "
        "made from."
        for name in _scripts(model)
    ]
    return problems


def _scripts(model: nn.Module) -> list[str]:
    """Names of TorchScript modules with parameters of their own."""
    return [
        fqn or "it"
        for fqn, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters(recurse=False))
    ]


def _changed_in_forward(model: nn.Module) -> list[str]:
    """Problems of modules that write to their weights for the samples that they see."""
    return [
        f"model: {fqn} changes its weight in forward, each rank the rows of its own samples (got max_norm="
        f"{module.max_norm}); create it without max_norm, and limit the norms after the optimizer's step."
        for fqn, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm and module.weight.requires_grad
    ]


def _fill(
    model: nn.Module,
    units: Units,
    config: Config,
    weights: Path | None,
    device: torch.device,
    parameter_device: torch.device,
) -> None:
    """Fill tensors on the meta device, and load `weights` if given; initialization runs on `device`."""
    if weights is None and not empty_states(model):
        return
    seed = config.shardkit.seed
    if seed is None:
        seed = control.start().share(torch.initial_seed() % 2**63)
    fill(model, units.units, device, parameter_device, weights, seed)


def _device_of_shards(config: Config, process: Process) -> torch.device:
    """The device of sharded parameters, their gradients and optimizer state."""
    if config.fsdp.offload_params and process.device.type == "cpu":
        log.info("fsdp_offload_params: no effect on the CPU: parameters and gradients are already in host memory.")
    return torch.device("cpu") if config.fsdp.offload_params else process.device
