"""Models that cannot be parallelized as configured, and what to do about each."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from shardkit.config.schema import Config
from shardkit.distributed import xla
from shardkit.distributed.modules import is_compiled, is_fsdp, is_fsdp_1
from shardkit.distributed.tensors import is_composed, is_dtensor
from shardkit.errors import MachineError, ModelError
from shardkit.model import packed
from shardkit.sharding.parameters import IN_BACKWARD, has_gradient_hooks, refused_hooks
from shardkit.sharding.shared_memory import pairs_in_same_memory
from shardkit.sharding.units import Units

OLDEST = (2, 11)
"""The oldest torch with the parts of FSDP2 that `sharding/fsdp` uses; `make test-oldest` runs the tests with it."""
OLDEST_FOR_INTEGERS = (2, 12)
"""The oldest torch whose FSDP2 shards parameters that are not floating-point, such as weights packed in 4 bits."""


def problems(model: nn.Module, config: Config) -> list[str]:
    """What is wrong with a model that cannot be parallelized; empty for one that can."""
    if (problem := next(filter(None, (_already(module, config) for module in model.modules())), None)) is not None:
        return [problem]
    lazy = [fqn for fqn, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    found = [f"model: {fqn} has no shape yet; run one batch through the model first." for fqn in lazy]
    found += packed.problems(model)
    if config.mode == "fsdp":
        found += packed.not_yet(model)
        found += _unfit_for_fsdp(model)
    if config.mode == "xla":
        found += _unfit_for_xla(model)
    if config.mode == "ddp" and config.num_processes > 1:
        found += refused_hooks(model)
    if config.mode in ("fsdp", "ddp") and config.num_processes > 1:
        found += _changed_in_forward(model)
    return found


def _already(module: nn.Module, config: Config) -> str | None:
    """What is wrong with a model in which this module is; None where it is neither sharded nor parallel."""
    name = type(module).__name__
    own = (parameter for parameter in module._parameters.values() if parameter is not None)
    if is_fsdp(module) or any(_is_spread(parameter, config) for parameter in own):
        return (
            f"model: is already sharded (got a sharded {name} in it), by the script, by an Accelerator with other "
            "settings, or as a part of another model; build the model anew, and prepare it once."
        )
    if _is_parallel(module, config):
        return f"model: is already parallel (got a {name} in it); give the unwrapped model, once."
    return None


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
        f"model: {fqn or 'it'} has sparse gradients, which FSDP cannot reduce; create it with sparse=False and "
        "train it with another optimizer than SparseAdam, or use strategy NO_SHARD."
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
    problems += [
        f"model: {fqn or 'it'} is compiled by torch.compile, whose compilers do not train on XLA devices; leave that "
        "out: XLA compiles every step by itself."
        for fqn, module in model.named_modules()
        if is_compiled(module) or module._compiled_call_impl is not None
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


def refuse_changed_twice(units: Units, blocks: Iterable[nn.Module]) -> None:
    """Raises ModelError for compiled blocks whose running statistics would take each batch twice. At a unit inside a
    block the compiled graph breaks, and torch then recomputes the block without the contexts that keep its buffers."""
    heads = {id(unit.module) for unit in units.units}
    for block in blocks:
        inner = list(block.modules())[1:]
        norms = [type(one).__name__ for one in inner if isinstance(one, _NormBase) and one.track_running_stats]
        if norms and any(id(one) in heads for one in inner):
            raise ModelError(
                f"model: the running statistics of {norms[0]} would take each batch twice, since "
                f"{type(block).__name__} is compiled and recomputed, and has an FSDP unit in it (got shardkit.compile "
                "and fsdp_activation_checkpointing); write one of the two."
            )


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
                how = " (bnb_4bit_quant_storage=torch.bfloat16)" if packed.holds_bits(parameter) else ""
                raise ModelError(
                    f"model: {name} is {parameter.dtype}, which FSDP shards since torch {major}.{minor} (got "
                    f"{version}); install a newer torch, keep it in a floating-point dtype{how}, or use strategy "
                    "NO_SHARD."
                )


def refuse_composed(units: Units) -> None:
    """Raises ModelError if a parameter consists of several tensors, and its class does not say how FSDP gathers
    them."""
    for unit in units.units:
        for name, parameter in unit.parameters.items():
            if is_composed(parameter) and not hasattr(parameter, "fsdp_pre_all_gather"):
                raise ModelError(
                    f"model: {name} is quantized, in a class that FSDP cannot shard (got {type(parameter).__name__}); "
                    "name its module in fsdp_ignored_modules, which keeps it whole on each rank, use strategy "
                    "NO_SHARD, or quantize by bitsandbytes (load_in_4bit)."
                )


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
