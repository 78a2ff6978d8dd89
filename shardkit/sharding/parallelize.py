"""Makes a model parallel with DDP, FSDP2 or PyTorch/XLA, and defines the order of all steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.config import xla as xla_settings
from shardkit.config.meaning import dtypes, eight_bits
from shardkit.config.schema import Config
from shardkit.distributed import control
from shardkit.distributed.modules import is_fsdp
from shardkit.errors import ModelError
from shardkit.log import get_logger
from shardkit.model import packed
from shardkit.sharding import float8, precision, unfit
from shardkit.sharding.activation import checkpoint_blocks
from shardkit.sharding.ddp.replica import Replica
from shardkit.sharding.ddp.replicate import replicate
from shardkit.sharding.gradient_sync import watch_backward
from shardkit.sharding.init import empty_states, fill, fill_from_rank0, refuse_different_models
from shardkit.sharding.units import Units, blocks_of, one_unit, units_of
from shardkit.wording import first_few

if TYPE_CHECKING:
    from shardkit.distributed.process import Process

log = get_logger(__name__)

_HOST = torch.device("cpu")


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
    weights: Path | None,
    moves: bool = True,
) -> None:
    """Prepare the model for all ranks, in place: sharded under FSDP; else equal on all ranks and, with `moves`, on the
    rank's device.

    `weights`: a safetensors file or a folder of them. A model built under `init_empty_weights()` loads it, each
    rank reading its part, or initialized by its modules. Collective: every rank must call it.
    Raises ModelError, on all ranks and before anything is sharded, if the model cannot be sharded as configured.
    """
    units, blocks = units_and_blocks(model, config)
    packed.keep_layout(model)
    if config.fsdp.sync_module_states and process.world_size > 1:
        refuse_different_models(model)
        fill_from_rank0(model, _HOST if config.mode == "xla" else process.device)
    if config.mode == "xla":
        from shardkit.sharding.xla import shard as shard_on_xla

        _fill(model, units, config, weights, _HOST, _HOST)
        shard_on_xla(model, units, blocks, config)
        return
    _change_blocks(model, blocks, config)
    if mesh is None:
        _fill(model, units, config, weights, process.device, process.device)
        if moves:
            model.to(process.device)
        return
    unfit.refuse_old(torch.__version__)
    from shardkit.sharding.fsdp.shard_model import Carried, finish, shard

    home = _device_of_shards(config, process)
    carried = Carried.of(units)
    shard(model, units, config, mesh, offloads=home != process.device)
    _fill(model, units, config, weights, process.device, home)
    finish(model, units, carried, config, process.device, blocks if config.shardkit.compile else [])
    if eight_bits(config) == "fp8" and home == process.device:
        float8.gather_in_fp8(model)


def _change_blocks(model: nn.Module, blocks: list[nn.Module], config: Config) -> None:
    """Activation checkpointing, activation offload and compilation of blocks, as configured, in this order."""
    if config.fsdp.activation_checkpointing:
        checkpoint_blocks(model, blocks, config.shardkit.recompute, config.shardkit.recompute_every)
    if config.shardkit.offload_activations:  # after activation checkpointing, to offload what that still saves
        from shardkit.sharding.offload import offload_blocks

        offload_blocks(blocks)
    if config.shardkit.compile:  # after activation checkpointing, which is compiled, too; before the sharding hooks
        for block in blocks:  # in place; equal blocks share one compilation
            block.compile()


def load_weights(model: nn.Module, config: Config, process: Process, weights: Path) -> None:
    """Load a safetensors file, or a folder of them, into a distributed model, each rank its part. Collective. Raises
    ModelError on all ranks."""
    fill(model, [], process.device, _device_of_shards(config, process), weights, seed=0)  # no tensor is without values


def at_end_of_backward(model: nn.Module, call: Callable[[], None]) -> None:
    """Call `call` at the end of each backward through a model that `parallelize` returned."""
    if is_fsdp(model):
        from shardkit.sharding.fsdp import unit_state

        unit_state.at_end_of_backward(model, [], call)
    elif isinstance(model, Replica):
        model.at_end_of_backward.append(call)
    else:
        watch_backward(model, lambda _: call())


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Inside, forwards without gradients of a model that `parallelize` returned need no other rank. Collective at its
    start. UsageError if weights change inside."""
    if is_fsdp(model):
        from shardkit.sharding.fsdp.unsharded import unsharded as of_fsdp

        with of_fsdp(model):
            yield
    elif isinstance(model, Replica):
        before, model.is_alone = model.is_alone, True
        try:
            yield
        finally:
            model.is_alone = before
    else:
        yield


def units_and_blocks(model: nn.Module, config: Config) -> tuple[Units, list[nn.Module]]:
    """The model's units, and the blocks that are recomputed, offloaded or compiled. Without FSDP there is one unit.

    Collective. Raises ModelError on all ranks if any rank has a problem.
    """
    _refuse_on_all(unfit.problems(model, config))
    if precision.of(config).is_mixed and (changed := precision.upcast_(model)):
        log.info("mixed precision: %d trainable 16-bit parameters are kept in fp32.", len(changed))
    problems = []
    try:
        units, blocks = _units_and_blocks(model, config)
    except ModelError as error:
        problems = [str(error)]
    _refuse_on_all(problems)
    if units.cut.remark:
        _say_once(units.cut.remark)
    if config.mode == "fsdp" and (whole := [fqn for fqn, m in units.ignored.items() if packed.is_in_8_bits(m)]):
        _say_once(
            f"model: bitsandbytes' modules in 8 bits are whole on each rank (got {first_few(whole, 2)}), since they "
            "keep their weights outside of the parameters, too; load_in_4bit is sharded."
        )
    return units, blocks


def _refuse_on_all(problems: list[str]) -> None:
    """ModelError on all ranks if any rank has problems. Collective."""
    if found := control.start().union(problems):
        raise ModelError("\n".join(found))


def _units_and_blocks(model: nn.Module, config: Config) -> tuple[Units, list[nn.Module]]:
    """As `units_and_blocks`, on this rank alone; layers in 8 bits are converted before."""
    if (kind := eight_bits(config)) is not None:
        float8.convert(blocks_of(model, config.fsdp), kind)
    is_cut = config.mode == "fsdp" or xla_settings.shards(config)
    units = units_of(model, config.fsdp, dtypes(config).param) if is_cut else one_unit(model)
    if config.mode == "fsdp":
        unfit.refuse_integers(units, torch.__version__)
        unfit.refuse_composed(units)
    blocks = blocks_of(model, config.fsdp) if _needs_blocks(config) else []
    if config.mode == "fsdp" and config.fsdp.activation_checkpointing and config.shardkit.compile:
        unfit.refuse_changed_twice(units, blocks)
    return units, blocks


@cache
def _say_once(remark: str) -> None:
    """A script may prepare many models of one kind: a critic, a teacher, one for each fold."""
    log.info("%s", remark)


def _needs_blocks(config: Config) -> bool:
    section = config.shardkit
    of_blocks = config.fsdp.activation_checkpointing or section.offload_activations or section.compile
    return of_blocks or xla_settings.recomputes(config)


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
    elif config.fsdp.offload_params and process.world_size > 1 and not control.takes_host_memory():
        log.warning(
            "fsdp_offload_params: training works, but p.norm(), p.mean() and other operations of the script on "
            "parameters in host memory will fail, since the process group that it started has no backend there (got "
            "%s); start it with init_process_group(), which takes gloo, too, or leave it to the Accelerator.",
            process.backend,
        )
    return torch.device("cpu") if config.fsdp.offload_params else process.device
