"""The table that rank 0 prints before the first step. It shows the actual objects, not the requested settings."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardkit.config import xla as xla_settings
from shardkit.config.meaning import offloads_state
from shardkit.config.schema import Config
from shardkit.data.loader import PreparedLoader
from shardkit.distributed import xla
from shardkit.distributed.modules import every_parameter, is_fsdp, unwrapped
from shardkit.distributed.process import Process
from shardkit.distributed.tensors import local_part
from shardkit.model import packed
from shardkit.runtime.run import Run
from shardkit.sharding import precision
from shardkit.sharding.gradient_sync import parameters_of_group
from shardkit.wording import count_text, counted

_LONGEST_LIST = 4
_WIDTH = 100
_NO_BREAK = "\N{NO-BREAK SPACE}"


def text(run: Run) -> str:
    """The table: world, strategy, models with their units, dtypes, batch, and where each setting comes from."""
    config, loaders = run.config, run.loaders
    strategy = ", ".join([_division(config, run.mesh), *_extras(config, run.mesh)])
    rows = [("world", of_world(run.process, config)), ("strategy", strategy)]
    rows += _rows_of_models(run.models)
    rows += [("precision", _precision(config, run.models)), ("batch", _batch(run.process, config, loaders))]
    rows += [("settings", line) for line in _settings(config, run.chosen)]
    return "\n".join(["what runs", *_aligned(rows)])


def of_models(models: Sequence[nn.Module]) -> str:
    """The table's rows of models that were prepared after the first ones."""
    return "\n".join(["what runs, too", *_aligned(_rows_of_models(models))])


def _rows_of_models(models: Sequence[nn.Module]) -> list[tuple[str, str]]:
    return [row for model in models for row in _model_rows(model)]


def _aligned(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Labels in a column, each printed once."""
    before = ""
    for label, value in rows:
        yield f"  {'' if label == before else label:<10} {value}"
        before = label


def of_world(process: Process, config: Config) -> str:
    """Ranks, machines, devices and backend."""
    ranks = counted(process.world_size, "rank")
    if config.mode == "xla":
        return f"{ranks}, {counted(xla.devices().count, 'device')} ({xla.name_of_hardware()})"
    where = "" if process.num_machines == 1 else f" on {process.num_machines} machines"
    backend = "" if process.backend == "none" else f", {process.backend}"
    return f"{ranks}{where}, {process.device.type}{backend}"


def _division(config: Config, mesh: DeviceMesh | None) -> str:
    """How models are divided."""
    strategy = config.fsdp.sharding_strategy.value
    if config.mode == "single" or (config.mode == "ddp" and config.num_processes == 1):
        return "one process, plain torch"
    if config.mode == "ddp":
        return "DDP: a whole model on every rank"
    if config.mode == "xla":
        here = xla.devices()
        if not xla_settings.shards(config):
            return f"XLA: a whole model on each of {counted(here.count, 'device')}"
        return f"XLA {strategy}, devices {_mesh_of(here)}"
    assert mesh is not None
    axes = " x ".join(f"{name} {size}" for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return f"{strategy}, mesh {axes}"


def _extras(config: Config, mesh: DeviceMesh | None) -> Iterator[str]:
    """What models' blocks and parameters do besides."""
    if mesh is not None and config.fsdp.offload_params and mesh.device_type != "cpu":
        yield "offload to host memory"
    if (size := config.shardkit.mesh.context_size) > 1:
        yield f"sequences shared by {size} ranks"
    if offloads_state(config):
        yield "optimizer state in host memory"
    if config.fsdp.activation_checkpointing or (config.mode == "xla" and xla_settings.recomputes(config)):
        yield "activation checkpointing"
    if config.shardkit.offload_activations:
        yield "activations offloaded"
    if config.shardkit.compile:
        yield "compiled"


def _mesh_of(here: xla.Devices) -> str:
    return f"replicate {here.replicate} x shard {here.shard}" if here.replicate > 1 else f"shard {here.shard}"


def _model_rows(model: nn.Module) -> list[tuple[str, str]]:
    """Size and frozen share; units with count and size; groups of tied parameters."""
    inner = unwrapped(model)
    parameters = list(every_parameter(inner))
    total = sum(map(packed.numel, parameters))
    frozen = sum(packed.numel(parameter) for parameter in parameters if not parameter.requires_grad)
    here = sum(_numel_here(parameter) for parameter in parameters)
    frozen_text = f", {frozen / total:.1%} frozen" if frozen else ""
    is_spread = any(xla.is_xla(parameter) and xla.is_spread(parameter) for parameter in parameters)
    where = f"over {_mesh_of(xla.devices())}" if is_spread else f"{count_text(here)} on this rank"
    rows = [("model", f"{type(inner).__name__}: {count_text(total)} parameters{frozen_text}; {where}")]
    if is_fsdp(model):
        rows.append(("units", ", ".join(unit_texts(model))))
    tied = tied_groups(inner)
    if tied:
        rows.append(("tied", _some([" = ".join(group) for group in tied])))
    return rows


def _numel_here(parameter: torch.Tensor) -> int:
    part = local_part(parameter).numel()
    return part * packed.numel(parameter) // parameter.numel() if packed.holds_bits(parameter) else part


def unit_texts(model: nn.Module) -> list[str]:
    """FSDP units of a model, equal ones together: ["4 x Block (0.8M)", "root (1.2M)"]."""
    from shardkit.sharding.fsdp.internals import groups_of, root_of  # imports DTensor

    units = Counter[tuple[str, int]]()
    for name, module in model.named_modules():
        if is_fsdp(module):
            owned = [parameter for group in groups_of(root_of(module)) for parameter in parameters_of_group(group)]
            units[type(module).__name__ if name else "root", sum(map(packed.numel, owned))] += 1
    ordered = sorted(units.items(), key=lambda unit: (unit[0][0] == "root", -unit[1]))
    return [
        f"{number} x {name} ({count_text(size)})" if name != "root" else f"root ({count_text(size)})"
        for (name, size), number in ordered
    ]


def tied_groups(model: nn.Module) -> list[list[str]]:
    """Fqns that name one parameter, for each parameter with several."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    return [group for group in names.values() if len(group) > 1]


def _precision(config: Config, models: Sequence[nn.Module]) -> str:
    names, dtypes = Counter[str](), Counter[torch.dtype]()
    for parameter in (one for model in models for one in every_parameter(model)):
        name, is_packed = _dtype(parameter.dtype), packed.holds_bits(parameter)
        names[f"4 bits in {name}" if is_packed else name] += packed.numel(parameter)
        if not is_packed and (parameter.dtype.is_floating_point or parameter.dtype.is_complex):
            dtypes[parameter.dtype] += parameter.numel()
    kept = " and ".join(name for name, _ in names.most_common()) or "none"
    own = " and ".join(_dtype(dtype) for dtype, _ in dtypes.most_common()) or "none"
    return f"parameters {kept}, {_computed(config, own, list(dtypes))}"


def _computed(config: Config, own: str, dtypes: Iterable[torch.dtype]) -> str:
    """In what is computed; `own` names these dtypes of the parameters."""
    mixed = precision.of(config)
    compute = own if mixed.param is None else _dtype(mixed.param)
    output = compute if mixed.output is None else _dtype(mixed.output)
    hook = config.shardkit.ddp.comm_hook if config.mode == "ddp" else "no"
    reduced = dict.fromkeys(_dtype(precision.reduce_dtype(mixed.reduce, mixed.param or dtype)) for dtype in dtypes)
    how = f"reduced in {' and '.join(reduced)}" if hook == "no" else f"sent as {hook}"
    exchanged = "" if config.num_processes == 1 else f", gradients {how}"
    return f"compute {compute}{exchanged}, outputs {output}"


def _batch(process: Process, config: Config, loaders: Sequence[PreparedLoader]) -> str:
    steps = config.shardkit.gradient_accumulation_steps
    micro_batches = counted(steps, "micro-batch", "micro-batches")
    if not loaders:
        return f"{micro_batches} a step; no data loader prepared yet"
    size, shared_by = loaders[0].total_batch_size, config.shardkit.mesh.context_size
    count = process.world_size // shared_by
    readers = counted(count, "rank") if shared_by == 1 else f"{counted(count, 'group')} of {shared_by} ranks"
    maker = loaders[0].dataset if loaders[0].has_ready_batches else loaders[0].batch_sampler
    if loaders[0].batch_size is None and getattr(maker, "batch_size", None) is None:
        each = "over" if config.shardkit.data.split_batches else "x"
        return f"1 of {type(maker).__name__} {each} {readers} x {micro_batches} a step"
    each = f"{size // count} x {readers}" if size % count == 0 else f"{size} over {readers}"
    return f"{each} x {micro_batches} = {size * steps} samples a step"


def _settings(config: Config, chosen: Mapping[str, str]) -> Iterator[str]:
    """A line for each source of settings; settings at their default are left out."""
    default = Config()
    by_source: dict[str, list[str]] = {}
    for name, where in chosen.items():
        value = attrgetter(name)(config)
        if value == attrgetter(name)(default) and not where.startswith("Accelerator("):
            continue
        source, line = _source(where)
        at = f" (line {line})" if line else ""
        by_source.setdefault(source, []).append(f"{name} {_shown(value)}{at}")
    if not by_source:
        yield "all defaults"
    for source, entries in by_source.items():
        whole = [entry.replace(" ", _NO_BREAK) for entry in entries]
        text = f"{source}: {', '.join(whole)}"
        lines = wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        yield from (line.replace(_NO_BREAK, " ") for line in lines)


def _source(where: str) -> tuple[str, str]:
    """(the file, the command line, the environment or the code; the line in a file)."""
    if where.startswith("--"):
        return "command line", ""
    if where.startswith("$"):
        return "environment", ""
    source, _, rest = where.partition(":")
    return source.removeprefix(f"{Path.cwd()}/"), rest.partition(":")[0]


def _shown(value: Any) -> str:
    value = getattr(value, "value", value)
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _dtype(dtype: torch.dtype) -> str:
    names = {known: name for name, known in precision.DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - _LONGEST_LIST
    return "; ".join(texts[:_LONGEST_LIST]) + (f"; and {more} more" if more > 0 else "")
