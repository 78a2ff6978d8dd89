"""A model's initial values: from rank 0, a safetensors file, or the initialization by its modules.

A model built under `init_empty_weights()` has parameters on the meta device. It is sharded first. Then every rank
allocates its shards, and fills them with slices of a file, or of the tensors that the modules initialize, one unit at a
time. A tensor without a value is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardkit.distributed import control
from shardkit.distributed.modules import clean_name, every_parameter
from shardkit.distributed.tensors import flat_bytes, is_dtensor, parts_of, put
from shardkit.errors import ModelError
from shardkit.log import get_logger
from shardkit.model import packed
from shardkit.sharding.units import LiveUnit
from shardkit.sharding.weight_files import load
from shardkit.signatures import signature
from shardkit.wording import first_few, ranks_text

log = get_logger(__name__)


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """A context in which parameters of new modules are on the meta device, without memory. Buffers have memory.

    Buffers are small, and often computed in the constructor (rotary frequencies, masks), so they could not be
    initialized later.
    """
    register = nn.Module.register_parameter
    made = WeakTensorKeyDictionary()  # keeps a parameter that is registered twice tied

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
    """Fqns of parameters and buffers on the meta device."""
    return [fqn for fqn, tensor in states(model) if tensor.is_meta]


def refuse_different_models(model: nn.Module) -> None:
    """Raises ModelError, on all ranks, unless their models have the same names, shapes and dtypes. Collective."""
    text = "\n".join(f"{fqn} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for fqn, t in states(model))
    different = control.start().decide(sha256(text.encode()).hexdigest(), control.unlike_rank_0)
    if different:
        raise ModelError(
            "model: its parameters differ from rank 0's in name, shape or dtype (got this on "
            f"{ranks_text(different)}); build the same model on every rank."
        )


def fill_from_rank0(model: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's parameters and buffers, one tensor at a time. Collective.

    Tensors on the meta device are allocated if rank 0 has values. Those without values on rank 0 stay unchanged.
    """
    empty_here = set(empty_states(model))
    empty_on_0 = set(control.start().share(sorted(empty_here)))
    allocate(model, lambda fqn, tensor: torch.device("cpu") if fqn not in empty_on_0 else None)
    for fqn, tensor in states(model):
        if fqn not in empty_on_0:
            for part in (*parts_of(tensor), *packed.scales_of(tensor)):
                _broadcast(part, device)


@torch.no_grad()
def _broadcast(tensor: torch.Tensor, device: torch.device) -> None:
    """Broadcast rank 0's values into `tensor`: as bytes, since backends do not support all dtypes, on the ranks'
    device."""
    staged = tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()
    dist.broadcast(flat_bytes(staged), src=0)
    if tensor.device != device or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor.copy_(staged)


def allocate(model: nn.Module, where: Callable[[str, torch.Tensor], torch.device | None]) -> None:
    """Allocate the model's tensors on the meta device, on the device that `where(fqn, tensor)` returns; None: skip it.

    Tied parameters stay tied, also if they are not sharded.
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
    if any(is_dtensor(p) and p.is_meta for p in every_parameter(model)):
        model._apply(lambda tensor: real(tensor) if is_dtensor(tensor) else tensor)


def fill(
    model: nn.Module,
    units: Iterable[LiveUnit],
    device: torch.device,
    parameter_device: torch.device,
    weights: Path | None,
    seed: int,
) -> None:
    """Allocate tensors on the meta device, and fill the model in place: from `weights` (a safetensors file or a folder
    of them), else by the modules' initialization, which is equal for any number of ranks. Collective.

    `parameter_device`: the device of sharded parameters (the CPU if they are offloaded).
    Raises ModelError, on all ranks, that names the tensors without a value or with a wrong shape.
    """
    empty = set(empty_states(model))
    allocate(model, lambda _, tensor: parameter_device if is_dtensor(tensor) else device)
    problems: list[str] = []
    if weights is not None:
        loaded, problems = load(model, weights)
        parameters = {fqn for fqn, _ in model.named_parameters()}
        persistent = set(model.state_dict(keep_vars=True))
        missing = sorted((empty & (parameters | persistent)) - loaded)
        if missing and (loaded or not problems):  # else no file was read
            lacked = first_few(sorted(map(clean_name, missing)), _LISTED)
            problems.append(f"{weights}: has no {lacked}, for which the model has no values either{_ADVICE}")
        empty -= loaded | set(missing)
    if empty and not problems and (left := initialize(model, units, empty, device, seed)):
        problems.append(f"model: no value after initialization for {first_few(left, _LISTED)}{_ADVICE}")
    problems = control.start().union(problems)
    if problems:
        raise ModelError("\n".join(problems))


_LISTED = 20
"""Number of tensors that an error names."""
_ADVICE = (
    "; build the module outside of init_empty_weights(), give it a reset_parameters() that initializes it, "
    "or use weights that contain it."
)


def initialize(
    model: nn.Module, units: Iterable[LiveUnit], wanted: set[str], device: torch.device, seed: int
) -> list[str]:
    """Initialize the tensors named in `wanted` by their modules. Returns the fqns that no module initializes.

    For each unit, its modules temporarily get whole tensors and initialize them with generators seeded by `seed` and
    the module's name; each rank keeps its part. So the values do not depend on the ranks or units. A module is
    initialized by its reset_parameters(), then by `_init_weights` of the model that contains it. One that also resets
    modules in other units draws whole tensors there, too (`random_values`).
    """
    areas = _areas(model, units)
    devices = [device] if device.type != "cpu" else []
    left: list[str] = []
    kind = device.type if devices else "cuda"  # fork_rng's default, if there are no devices
    with torch.random.fork_rng(devices=devices, device_type=kind), torch.no_grad(), _out_of_reach(model, wanted):
        for area in areas:
            left += _initialize_area(model, area, wanted, device, seed)
    return left


def _out_of_reach(model: nn.Module, wanted: set[str]) -> AbstractContextManager[None]:
    """A context in which the tensors that are not in `wanted` are replaced, parameters by some without memory. A module
    that resets all modules in it would overwrite loaded values in other units."""
    kept = [tensor for fqn, tensor in states(model) if fqn not in wanted]
    return _holding(model.modules(), {id(t): _on_meta(t) if isinstance(t, nn.Parameter) else t.clone() for t in kept})


def _areas(model: nn.Module, units: Iterable[LiveUnit]) -> list[dict[str, nn.Module]]:
    """{fqn: module} of each unit, without nested units, children first."""
    areas: dict[int, dict[str, nn.Module]] = {id(head): {} for head in (*(unit.module for unit in units), model)}
    seen: set[int] = set()

    def visit(fqn: str, module: nn.Module, head: int) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        head = id(module) if id(module) in areas else head
        for name, child in module.named_children():
            visit(f"{fqn}.{name}" if fqn else name, child, head)
        areas[head][fqn] = module

    visit("", model, id(model))
    return list(areas.values())


def _initialize_area(
    model: nn.Module, area: dict[str, nn.Module], wanted: set[str], device: torch.device, seed: int
) -> list[str]:
    """`initialize` for one unit. Its tensors are replaced temporarily, so that unwanted ones are not overwritten."""
    own = _tensors_of(area)
    if wanted.isdisjoint(own):
        return []
    wholes = {id(tensor): _whole_like(tensor, device) for tensor in own.values()}
    versions = {identity: whole._version for identity, whole in wholes.items()}
    with _holding(area.values(), wholes):
        for fqn, module in area.items():
            torch.manual_seed(int.from_bytes(sha256(f"{seed} {fqn}".encode()).digest()[:7], "little"))
            _call_initializer(model, fqn, module)
        made = _tensors_of(area)
    left: list[str] = []
    done: set[int] = set()
    for fqn, target in own.items():
        if fqn not in wanted or id(target) in done:
            continue
        if made[fqn] is wholes[id(target)] and made[fqn]._version == versions[id(target)]:
            left.append(fqn)
        else:
            done.add(id(target))
            _take(target, made[fqn])
    return left


def _take(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copies the whole value, or this rank's part of it, into the target."""
    put(target, lambda slices: value if slices is None else value[slices])


def _tensors_of(area: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """{fqn: tensor} of the modules' own parameters and buffers; a tied one under each of its names."""
    return {
        f"{fqn}.{name}" if fqn else name: tensor
        for fqn, module in area.items()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def _whole_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole


@contextmanager
def _holding(modules: Iterable[nn.Module], others: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """A context in which modules hold other tensors in the places of their own, by the ids of these."""
    found = [(module, module._parameters, module._buffers) for module in modules]
    try:
        for module, parameters, buffers in found:
            module._parameters = {name: others.get(id(one), one) for name, one in parameters.items()}  # type: ignore[misc]
            module._buffers = {name: others.get(id(one), one) for name, one in buffers.items()}
        yield
    finally:
        for module, parameters, buffers in found:
            module._parameters, module._buffers = parameters, buffers


def _call_initializer(model: nn.Module, fqn: str, module: nn.Module) -> None:
    """Run the module's initialization, if it has one; then, as a constructor does, that of the model around it."""
    names = ("reset_parameters", "_reset_parameters")
    if (reset := next(filter(callable, (getattr(module, name, None) for name in names)), None)) is not None:
        reset()
    around = [model.get_submodule(".".join(fqn.split(".")[:depth])) for depth in range(len(fqn.split(".")) + 1)]
    by_model = next((m for m in reversed([*around, module]) if callable(getattr(m, "_init_weights", None))), None)
    if by_model is None:
        return
    own: Any = by_model._init_weights
    if signature(own).parameters:
        own(module)
    elif by_model is module:  # all modules in it at once
        own()
