"""Where a model's first values come from: rank 0, a safetensors file, or the modules' own initialisation.

A model built under `init_empty_weights()` has no memory behind its parameters. It is sharded like that; then every
rank allocates its own shards and fills them with slices of a file, or with slices of what the modules initialise,
one unit at a time. What stays without a value is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardkit.distributed import control
from shardkit.distributed.tensors import is_dtensor, local_part, local_slices
from shardkit.errors import ModelError
from shardkit.log import get_logger
from shardkit.sharding.units import LiveUnit

log = get_logger(__name__)

Reader = Callable[[tuple[slice, ...] | None], torch.Tensor]


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules built inside have parameters on the meta device: shapes without memory. Buffers stay real.

    Buffers are small and often computed in the constructor (rotary frequencies, masks), where nobody could do it
    again later.
    """
    register = nn.Module.register_parameter
    made = WeakTensorKeyDictionary()  # the same parameter registered twice stays one

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            if parameter not in made:
                made[parameter] = _on_meta(parameter)
            parameter = made[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)
    return empty


def states(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(fqn, tensor) of all parameters and buffers, non-persistent ones included, each tensor once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def empty_states(model: nn.Module) -> list[str]:
    """Fqns of parameters and buffers without memory behind them."""
    return [fqn for fqn, tensor in states(model) if tensor.is_meta]


def same_everywhere(model: nn.Module) -> None:
    """Returns if all ranks have a model of the same names, shapes and dtypes; ModelError on all of them if not.

    Collective.
    """
    text = "\n".join(f"{fqn} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for fqn, t in states(model))
    different = control.start().decide(sha256(text.encode()).hexdigest(), _unlike_rank_0)
    if different:
        raise ModelError(
            f"model: its parameters differ from rank 0's in name, shape or dtype (got this on ranks {different}); "
            "build the same model on every rank."
        )


def _unlike_rank_0(digests: list[str]) -> list[int]:
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def fill_from_rank0(model: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, one tensor at a time. Collective.

    Where only some ranks have memory behind a tensor, the others get it. Empty on rank 0: stays as it is.
    """
    empty_here = set(empty_states(model))
    empty_on_0 = set(control.start().share(sorted(empty_here)))
    allocate(model, lambda fqn, tensor: torch.device("cpu") if fqn not in empty_on_0 else None)
    for fqn, tensor in states(model):
        if fqn not in empty_on_0:
            _broadcast(tensor, device)


@torch.no_grad()
def _broadcast(tensor: torch.Tensor, device: torch.device) -> None:
    """Rank 0's values in `tensor`; as bytes, since backends do not know all dtypes, on the ranks' own device."""
    staged = tensor.detach().to(device).contiguous()
    dist.broadcast(staged.reshape(-1).view(torch.uint8), src=0)
    if tensor.device != device or not tensor.is_contiguous():
        tensor.copy_(staged)


def allocate(model: nn.Module, where: Callable[[str, torch.Tensor], torch.device | None]) -> None:
    """Put memory behind the model's empty tensors, on the device that `where(fqn, tensor)` gives; None: leave it.

    Tied parameters stay tied, also where they are not sharded.
    """
    devices = {id(tensor): where(fqn, tensor) for fqn, tensor in states(model) if tensor.is_meta}
    made: dict[int, torch.Tensor] = {}

    def real(tensor: torch.Tensor) -> torch.Tensor:
        device = devices.get(id(tensor)) if tensor.is_meta else None
        if device is None:
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = torch.empty_like(tensor, device=device)
        return made[id(tensor)]

    for _, parameter in list(model.named_parameters()):
        if not is_dtensor(parameter) and (data := real(parameter)) is not parameter:
            torch.utils.swap_tensors(parameter, nn.Parameter(data, requires_grad=parameter.requires_grad))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = real(buffer)
    if any(is_dtensor(p) and p.is_meta for p in model.parameters()):
        model._apply(lambda tensor: real(tensor) if is_dtensor(tensor) else tensor)


@torch.no_grad()
def put(target: torch.Tensor, read: Reader) -> None:
    """Copy into `target` what `read(slices)` gives: this rank's part of a sharded tensor, else (None) the whole."""
    if not is_dtensor(target):
        target.copy_(read(None))
    elif (local := local_part(target)).numel():
        local.copy_(read(local_slices(target)))


def fill(
    model: nn.Module,
    units: Iterable[LiveUnit],
    device: torch.device,
    parameter_device: torch.device,
    weights: Path | None,
    seed: int,
) -> None:
    """Allocate what is empty and fill the model: from `weights` (a safetensors file or a folder of them), else by
    the modules' own initialisation, equal on every rank and for any number of ranks. In place. Collective.

    `parameter_device` is where sharded parameters live (the CPU when they are offloaded).
    Raises ModelError, on all ranks, naming everything that has no value or does not fit.
    """
    empty = set(empty_states(model))
    allocate(model, lambda _, tensor: parameter_device if is_dtensor(tensor) else device)
    problems: list[str] = []
    if weights is not None:
        loaded, problems = load(model, weights)
        parameters = {fqn for fqn, _ in model.named_parameters()}
        persistent = set(model.state_dict(keep_vars=True))
        missing = sorted((empty & (parameters | persistent)) - loaded)
        problems += [f"{weights}: has no {fqn}, and the model has no values for it{_ADVICE}" for fqn in missing]
        empty -= loaded | set(missing)
    if empty and not problems:
        left = initialise(model, units, empty, device, seed)
        problems += [f"model: {fqn} has no value after initialisation{_ADVICE}" for fqn in left]
    problems = control.start().union(problems)
    if problems:
        raise ModelError("\n".join(problems))


_ADVICE = (
    "; build that module outside of init_empty_weights(), give it a reset_parameters() that fills it, "
    "or use weights that contain it."
)


def load(model: nn.Module, weights: Path) -> tuple[set[str], list[str]]:
    """(fqns filled, problems): every parameter and persistent buffer that the files contain, only this rank's part.

    A tied parameter is found under any of its names.
    """
    try:
        files = _model_names(model, _where(weights))
    except (OSError, ValueError, KeyError) as error:
        return set(), [f"{weights}: cannot be read as safetensors (got {error}); give a .safetensors file or a folder."]
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for fqn, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            names.setdefault(id(tensor), []).append(fqn)
            tensors[id(tensor)] = tensor
    loaded: set[str] = set()
    problems: list[str] = []
    opened: dict[Path, Any] = {}
    for identity, aliases in names.items():
        found = next((fqn for fqn in aliases if fqn in files), None)
        if found is not None:
            name, path = files[found]
            if path not in opened:
                opened[path] = safe_open(path, framework="pt")
            problem = _read_one(opened[path], name, tensors[identity])
            problems += [f"{path}: {problem}"] if problem else []
            loaded.update(aliases)
    return loaded, problems


def _where(weights: Path) -> dict[str, Path]:
    """The file of each tensor: by the index in the folder if there is one, else by looking into every file."""
    weights = Path(weights)
    if weights.is_dir():
        indices = sorted(weights.glob("*.safetensors.index.json"))
        if indices:
            return {fqn: weights / name for fqn, name in json.loads(indices[0].read_text())["weight_map"].items()}
        paths = sorted(weights.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError("a folder without .safetensors files")
    else:
        paths = [weights]
    found: dict[str, Path] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except Exception as error:  # safetensors raises its own class, which is no OSError
            raise OSError(f"{path.name}: {error}") from error
    return found


def _model_names(model: Any, files: dict[str, Path]) -> dict[str, tuple[str, Path]]:
    """(name in the file, file) by the model's name. Transformers may store a model under its family's older names."""
    named = {fqn: (fqn, path) for fqn, path in files.items()}
    if not hasattr(model, "base_model_prefix") or not hasattr(model, "save_pretrained"):
        return named
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # Transformers before 5 stores the model's own names
        return named
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    states = model.state_dict(keep_vars=True)
    for fqn, path in files.items():
        if fqn not in states:
            new, converted = rename_source_key(fqn, renamings, converters, model.base_model_prefix, states)
            if converted is None:
                named.setdefault(new, (fqn, path))
    return named


def _read_one(file: Any, fqn: str, target: torch.Tensor) -> str | None:
    """What is wrong with the tensor in the file, None where it was read into `target`."""
    piece = file.get_slice(fqn)
    shape = tuple(piece.get_shape())
    if shape != tuple(target.shape):
        return (
            f"{fqn} has another shape than in the model (got {shape}, the model has {tuple(target.shape)}); "
            "use weights of this model."
        )
    put(target, lambda slices: piece[slices] if slices is not None else file.get_tensor(fqn))
    return None


def initialise(
    model: nn.Module, units: Iterable[LiveUnit], wanted: set[str], device: torch.device, seed: int
) -> list[str]:
    """Fill the tensors named in `wanted` by the modules' own initialisation; fqns that no module fills come back.

    Unit by unit: its modules get whole tensors for a moment, initialise them with generators seeded by `seed` and the
    module's name, and each rank keeps its part. So the values depend neither on the ranks nor on the units. A module's
    own initialisation is `_init_weights` of the Transformers model around it, else its reset_parameters().
    """
    areas = _areas(model, units)
    devices = [device] if device.type != "cpu" else []
    left: list[str] = []
    kind = device.type if devices else "cuda"  # of no devices: what fork_rng assumes
    with torch.random.fork_rng(devices=devices, device_type=kind), torch.no_grad():
        for area in areas:
            left += _initialise_area(model, area, wanted, device, seed)
    return left


def _areas(model: nn.Module, units: Iterable[LiveUnit]) -> list[dict[str, nn.Module]]:
    """The modules of each unit by fqn, without those of units inside it, children first."""
    heads = {id(unit.module): unit.fqn for unit in units} | {id(model): ""}
    areas: dict[int, dict[str, nn.Module]] = {identity: {} for identity in heads}
    seen: set[int] = set()

    def visit(fqn: str, module: nn.Module, head: int) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        head = id(module) if id(module) in heads else head
        for name, child in module.named_children():
            visit(f"{fqn}.{name}" if fqn else name, child, head)
        areas[head][fqn] = module

    visit("", model, id(model))
    return list(areas.values())


def _initialise_area(
    model: nn.Module, area: dict[str, nn.Module], wanted: set[str], device: torch.device, seed: int
) -> list[str]:
    """One unit's part of `initialise`. Tensors that are not wanted are put aside, so that nothing overwrites them."""
    if not any(_full(fqn, name) in wanted for fqn, m in area.items() for name in [*m._parameters, *m._buffers]):
        return []
    scratch: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in scratch:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            is_parameter = isinstance(tensor, nn.Parameter)
            scratch[id(tensor)] = nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole
        return scratch[id(tensor)]

    found = {fqn: (dict(module._parameters), dict(module._buffers)) for fqn, module in area.items()}
    try:
        for module in area.values():
            for mine in (module._parameters, module._buffers):
                for name, tensor in mine.items():
                    if tensor is not None:
                        mine[name] = stand_in(tensor)  # type: ignore[assignment]
        before = {identity: tensor._version for identity, tensor in scratch.items()}
        for fqn, module in area.items():
            torch.manual_seed(int.from_bytes(sha256(f"{seed} {fqn}".encode()).digest()[:7], "little"))
            _call_initialiser(model, fqn, module)
        made = {fqn: {**module._parameters, **module._buffers} for fqn, module in area.items()}
    finally:
        for fqn, module in area.items():
            module._parameters, module._buffers = found[fqn]
    return _keep(found, made, scratch, before, wanted)


def _keep(
    found: dict[str, tuple[dict, dict]],
    made: dict[str, dict],
    scratch: dict[int, torch.Tensor],
    before: dict[int, int],
    wanted: set[str],
) -> list[str]:
    """Copy what the initialisers made into the wanted tensors; fqns of those that none of them wrote come back."""
    left = []
    done: set[int] = set()
    for fqn, (parameters, buffers) in found.items():
        for name, target in {**parameters, **buffers}.items():
            if target is None or _full(fqn, name) not in wanted or id(target) in done:
                continue
            value = made[fqn][name]
            stand_in = scratch[id(target)]
            if value is stand_in and value._version == before[id(target)]:
                left.append(_full(fqn, name))
                continue
            done.add(id(target))
            put(target, partial(_part_of, value))
    return left


def _part_of(value: torch.Tensor, slices: tuple[slice, ...] | None) -> torch.Tensor:
    return value if slices is None else value[slices]


def _call_initialiser(model: nn.Module, fqn: str, module: nn.Module) -> None:
    """Run the module's own initialisation, if it has one."""
    around = [model.get_submodule(".".join(fqn.split(".")[:depth])) for depth in range(len(fqn.split(".")) + 1)]
    by_model = next((m for m in reversed([*around, module]) if callable(getattr(m, "_init_weights", None))), None)
    if by_model is not None:
        by_model._init_weights(module)  # type: ignore[operator]
        if hasattr(by_model, "config"):
            return
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return


def _full(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name
