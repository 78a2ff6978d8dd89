"""PyTorch/XLA: TPUs, and the CPU as several devices to try it out. The only file that imports torch_xla.

One process drives all devices of its machine (SPMD): a tensor has its whole shape, and lies spread over a mesh of all
devices of all machines. What a script computes is recorded, and runs when `flush` is called or a value is asked for.

torch_xla 2.9 goes with torch 2.9: what this file and its callers use of torch, that version has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.amp.autocast_mode import _cast

from shardkit import env
from shardkit.config import xla as settings
from shardkit.config.meaning import xla_sizes
from shardkit.config.schema import Config
from shardkit.errors import ConfigError, MachineError, UsageError
from shardkit.wording import counted

REPLICATE, SHARD = "replicate", "shard"
BATCH = (REPLICATE, SHARD)
"""The axes of the mesh over which a batch is split: both."""


@dataclass(frozen=True)
class Devices:
    """All devices of the run, as this process sees them: one, under this name."""

    device: torch.device
    mesh: Any
    replicate: int
    shard: int
    processes: int

    @property
    def count(self) -> int:
        """Of all machines together."""
        return self.replicate * self.shard


_started: list[Devices] = []
"""The devices, once they are started: for good, as long as the process lives. A later start may arrange them anew."""

_registered: list[Any] = []
"""What is registered with torch for as long as the process lives."""


def is_started() -> bool:
    """Whether this process computes on XLA devices."""
    return bool(_started)


def devices() -> Devices:
    """What `start` has started."""
    return _started[0]


def start(config: Config, processes: int) -> Devices:
    """The devices of the run, this process driving those of its machine. Every process of the run must call it.

    Raises MachineError where torch_xla is missing, of another version than torch, or finds no devices, or where these
    processes are not the machines of one TPU; ConfigError where the configuration asks for what PyTorch/XLA has no
    counterpart for.
    """
    if problem := settings.installed_problem():
        raise MachineError(problem)
    if problems := settings.problems(config):
        raise ConfigError(problems)
    if not _started:
        env.update(settings.variables(config, env.copy()))
        _cast_attention()
    runtime = import_module("torch_xla.runtime")
    runtime.use_spmd()
    try:
        device, count = import_module("torch_xla").device(), runtime.global_runtime_device_count()
    except (OSError, RuntimeError) as error:
        raise MachineError(
            f"distributed_type XLA: torch_xla starts no device here (got {str(error).partition(chr(10))[0]}); on a TPU "
            "pip install 'shardkit[tpu]', elsewhere try it with --cpu."
        ) from error
    if runtime.process_count() != processes:
        raise MachineError(
            f"distributed_type XLA: the devices are those of {counted(runtime.process_count(), 'machine')} (got "
            f"{processes} launched); launch one process on each machine of the TPU, and no other; in a notebook call "
            "the function itself, without notebook_launcher."
        )
    sizes = xla_sizes(config, count, count // processes)
    numpy = import_module("numpy")
    mesh = import_module("torch_xla.distributed.spmd").Mesh(numpy.arange(count), (sizes.replicate, sizes.shard), BATCH)
    _started[:] = [Devices(device, mesh, sizes.replicate, sizes.shard, processes)]
    return _started[0]


def _cast_attention() -> None:
    """Makes autocast cast the inputs of attention, as on other devices: torch_xla 2.9 leaves it out, and queries
    in fp32 with values in bf16, which rotary embeddings make, are an error."""

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        args, kwargs = _cast((args, kwargs), "xla", torch.get_autocast_dtype("xla"))
        with torch.autocast("xla", enabled=False):
            return torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutocastXLA")
    _registered.append(library)


def flush() -> None:
    """Runs what is recorded so far; nothing without XLA. The end of a step: else its record would grow for ever.

    The generator of the devices stays where it is. `sync` alone moves it, so that what is drawn would depend on how
    often it was called, and be another after a resume.
    """
    if _started:
        model = import_module("torch_xla.core.xla_model")
        state = model.get_rng_state()
        import_module("torch_xla").sync()
        model.set_rng_state(state)


def is_xla(tensor: torch.Tensor) -> bool:
    """Whether the tensor lies on XLA devices."""
    return tensor.device.type == "xla"


def shard_spec(shape: Sequence[int]) -> tuple[Any, ...]:
    """How a parameter of this shape, or what an optimizer keeps of it, is spread: along its longest dim. XLA pads what
    does not divide."""
    longest = max(range(len(shape)), key=lambda dim: shape[dim], default=None)
    return tuple(SHARD if dim == longest else None for dim in range(len(shape)))


def batch_spec(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """How a tensor whose dim 0 is the batch is spread; None where that does not divide over the devices."""
    if tensor.dim() == 0 or tensor.shape[0] == 0 or tensor.shape[0] % _batch_parts():
        return None
    return (BATCH, *[None] * (tensor.dim() - 1))


def _batch_parts() -> int:
    """Into how many parts this process's share of a batch is split: one a device of its own."""
    return devices().count // devices().processes


def spread_batch(tensor: torch.Tensor) -> torch.Tensor:
    """A batch from host memory on the devices, each with its part of dim 0; where that does not divide, the whole on
    each, which computes the same. On several machines each gives its own part of the global batch; UsageError where
    it does not divide over the machine's devices."""
    spec, here = batch_spec(tensor), devices()
    if spec is None and here.processes > 1 and tensor.dim():
        raise UsageError(
            f"data: on several TPU machines a batch is split over the devices of each (got {tensor.shape[0]} samples "
            f"for {_batch_parts()} devices); choose a batch size that they divide, and drop_last=True."
        )
    return _send_part(tensor, spec) if spec is not None and here.processes > 1 else send(tensor, spec)


def lay_out(tensor: torch.Tensor, spec: tuple[Any, ...]) -> None:
    """Spread a tensor that is on the devices, in place; values stay."""
    spmd = import_module("torch_xla.distributed.spmd")
    if layout_of(tensor):
        spmd.clear_sharding(tensor)
    spmd.mark_sharding(tensor, devices().mesh, spec)


def layout_of(tensor: torch.Tensor) -> str:
    """How a tensor is spread, in XLA's words; empty where nothing has been said of it."""
    return str(import_module("_XLAC")._get_xla_sharding_spec(tensor))


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether the devices have parts of it."""
    return layout_of(tensor) not in ("", "{replicated}")


def send(host: torch.Tensor, spec: tuple[Any, ...] | None) -> torch.Tensor:
    """A tensor in host memory, the same on all machines, on the devices; None: the whole on each. It is copied when it
    is first used, so that no device gets more than its part."""
    sent = host.to(devices().device)
    if spec is not None:
        lay_out(sent, spec)
    return sent


def _send_part(host: torch.Tensor, spec: tuple[Any, ...]) -> torch.Tensor:
    """This machine's part of a batch; the tensor is that of all machines."""
    wanted = import_module("torch_xla.distributed.spmd").ShardingSpec(devices().mesh, spec, minibatch=True)
    (sent,) = import_module("torch_xla.core.xla_model").send_cpu_data_to_device([host], devices().device, wanted)
    return sent


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor in new host memory. A spread one is put together there, where this process has all of its parts:
    torch_xla compiles a program for each tensor that it gathers, every time."""
    if devices().processes > 1 or not is_spread(tensor):
        return tensor.detach().cpu().clone()
    native = import_module("_XLAC")
    (parts,), (places,) = native._get_local_shards([tensor]), native._get_local_shard_replica_and_indices([tensor])
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    for (part, _), (_, place) in zip(parts, places, strict=True):
        if place is Ellipsis:
            return part
        host[tuple(place)] = part[tuple(slice(one.stop - one.start) for one in place)]  # without XLA's padding
    return host


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of which each device has the whole: `cpu()` takes it without a program that is compiled for each tensor,
    every time."""
    copy = torch.cat([tensor]) if tensor.dim() else tensor.clone()  # a clone has the layout, which cannot be changed
    lay_out(copy, (None,) * tensor.dim())
    return copy


def like(host: torch.Tensor, example: torch.Tensor | None) -> torch.Tensor:
    """A tensor in host memory on the devices, spread as a parameter of its shape is."""
    fits = example is not None and is_xla(example) and example.shape == host.shape and is_spread(example)
    return send(host, shard_spec(host.shape) if fits else None)


def replace_(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Gives a tensor on the devices (itself, and no alias of it) the values of one in host memory of its shape and
    dtype. Its layout stays, which `copy_` would lose."""
    _replace(tensor, like(host, tensor))


def spread_again_(tensor: torch.Tensor) -> None:
    """Spreads a parameter whose layout a `copy_` from host memory has lost, in place, by way of host memory."""
    _replace(tensor, send(to_host(tensor), shard_spec(tensor.shape)))


def _replace(tensor: torch.Tensor, by: torch.Tensor) -> None:
    with torch.no_grad():
        import_module("_XLAC")._replace_xla_tensor(tensor, by)
        torch._functionalize_commit_update(tensor)  # else views of it (`detach()`, `t()`) are made of what was there


def optimization_barrier_(tensors: list[torch.Tensor]) -> None:
    """Keeps the compiler from fusing what computes these tensors with what is computed of them, in place."""
    import_module("torch_xla.core.xla_model").optimization_barrier_(tensors)


def checkpoint(function: Any, *args: Any) -> Any:
    """torch's activation checkpointing, with what keeps XLA from computing once what is to be computed twice."""
    return import_module("torch_xla.utils.checkpoint").checkpoint(function, *args)


def seed(number: int) -> None:
    """Seeds the generator of the devices; nothing without XLA."""
    if _started:
        import_module("torch_xla").manual_seed(number % 2**63)


def random_state() -> torch.Tensor:
    """Where the generator of the devices stands: eight bytes."""
    number = import_module("torch_xla.core.xla_model").get_rng_state()
    return torch.tensor(list(int(number).to_bytes(8, "little")), dtype=torch.uint8)


def set_random_state(state: torch.Tensor) -> None:
    """What `random_state` gave."""
    import_module("torch_xla.core.xla_model").set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))


def name_of_hardware() -> str:
    """The kind of device, such as TPU v4; XLA's own word where it says no more."""
    (first, *_) = import_module("torch_xla.runtime").global_runtime_device_attributes()
    return str(first.get("device_kind") or str(first["name"]).split(":")[0])
