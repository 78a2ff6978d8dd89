"""Where torch keeps what FSDP2 knows of a sharded model: units, parameter groups, parameters.

Attributes that differ between versions of torch are read here. Tested on torch 2.11, 2.13 and 2.15; a newer one is
warned of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

from shardkit.distributed.modules import every_parameter
from shardkit.distributed.tensors import is_transformed
from shardkit.errors import UsageError
from shardkit.log import get_logger

# The newest torch whose private parts were read; `make test-newest` runs the tests on it.
NEWEST = (2, 15)

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard._fully_shard"

log = get_logger(__name__)


@cache
def warn_of_newer(version: str) -> None:
    """Warns once that this version of torch is newer than the tested ones."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) > NEWEST:
        log.warning(
            "FSDP: torch %s is newer than any that shardkit was tested with (2.11 to %d.%d); compare a short run with "
            "strategy NO_SHARD, or use torch %d.%d.",
            version,
            *NEWEST,
            *NEWEST,
        )


def takes_transforms() -> bool:
    """Whether FSDP2 of this torch runs in transforms of torch.func: since 2.13."""
    return "setup_context" in vars(RegisterPostBackwardFunction)


def refuse_transforms() -> None:
    """Raises UsageError in a transform of torch.func where FSDP2 does not run in one."""
    if is_transformed() and not takes_transforms():
        raise UsageError(
            f"forward: a sharded model in transforms of torch.func (vmap, jacrev, ...) needs torch 2.13 or newer (got "
            f"{torch.__version__}); update it, use torch.autograd.grad(..., create_graph=True), or strategy NO_SHARD."
        )


@contextmanager
def taking_containers() -> Iterator[None]:
    """Inside, fully_shard takes a ModuleDict or ModuleList that has a forward. (Before torch 2.13 it takes none.)"""
    place = import_module(_FULLY_SHARD)
    found = place._validate_module
    place._validate_module = lambda module, name: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        place._validate_module = found  # type: ignore[attr-defined]


def own_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before fully_shard has put one of FSDP's on it."""
    bases: Any = kind.__mro__
    return next(base for base in bases if not issubclass(base, FSDPModule))


def give_class(kind: Any) -> None:
    """Makes the class that fully_shard then puts on modules of this one. It differs from torch's in two points.

    - It is laid out by theirs, which may have another base before nn.Module, as in `class Model(ABC, nn.Module)`;
      Python refuses such modules a class that is laid out by FSDPModule. The order of methods is the same.
    - Its `__new__` leaves `__init__` to the caller. torch's runs it, so that a method of the class that makes a model
      by `cls.__new__(cls)`, as sentence-transformers loads the best one, ends in an error of missing arguments.
    """
    place = import_module(_FULLY_SHARD)
    known = place.get_cls_to_fsdp_cls()
    if kind in known or issubclass(kind, FSDPModule):
        return

    class Sharded(type(kind)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            order: list[type] = super().mro()
            order.remove(FSDPModule)
            order.insert(order.index(kind), FSDPModule)
            return order

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # a slice of an nn.ModuleList is a plain one
            return kind(*args, **kwargs)

    def plain(cls: type, *args: Any, **kwargs: Any) -> Any:
        return kind.__new__(kind, *args, **kwargs)

    attributes = {"__deepcopy__": place._unimplemented_deepcopy, "__new__": plain, "__module__": kind.__module__}
    known[kind] = Sharded(f"FSDP{kind.__name__}", (kind, FSDPModule), attributes)


def root_of(model: nn.Module) -> Any:
    return model._get_fsdp_state()  # type: ignore[operator]


def states_of(model: nn.Module) -> list[Any]:
    """The states of all units, each once, the outer before the inner."""
    found = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(found))


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of a unit: one, or none where it manages nothing. (Before torch 2.13: another attribute.)"""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def groups_of_model(model: nn.Module) -> list[Any]:
    """The parameter groups of all units; none of a model that is not sharded."""
    return [group for state in states_of(model) for group in groups_of(state)]


def parameters_of(model: nn.Module) -> Iterator[FSDPParam]:
    """FSDP2's record of each parameter that it manages."""
    for group in groups_of_model(model):
        yield from group.fsdp_params


def modules_below(state: Any) -> Iterator[nn.Module]:
    """The modules below a unit's own that have parameters of the unit. Modules in units inside it may have some, too:
    tied ones belong to the unit around all their modules."""
    managed = {id(p.sharded_param) for group in groups_of(state) for p in group.fsdp_params}

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if any(id(parameter) in managed for parameter in every_parameter(child)):
                yield child
                yield from below(child)

    heads: tuple[nn.Module, ...] = state._modules if managed else ()
    return iter({id(module): module for head in heads for module in below(head)}.values())


@contextmanager
def generating_alone(model: nn.Module) -> Iterator[None]:
    """Inside, Transformers' `generate` does not take the model for a sharded one, whose ranks all go on until the last
    of them has ended: it looks for a mark of fully_shard's."""
    mark = "_is_fsdp_managed_module"
    marked = [vars(one) for one in model.modules() if mark in vars(one) and hasattr(type(one), "generate")]
    for attributes in marked:
        attributes[mark] = False
    try:
        yield
    finally:
        for attributes in marked:
            attributes[mark] = True


def gather_by(parameter: FSDPParam, around: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces this rank's shard by a tensor subclass made by `around`, whose `fsdp_pre_all_gather` and
    `fsdp_post_all_gather` then decide how the parameter is gathered."""
    sharded: Any = parameter.sharded_param
    sharded._local_tensor = around(sharded._local_tensor)
    parameter._init_extensions()


def is_gathered_once(parameter: FSDPParam) -> bool:
    """Whether its gathered tensor exists; its memory may be freed."""
    return hasattr(parameter, "_unsharded_param")


def has_gradient(parameter: FSDPParam) -> bool:
    """Whether it has a gradient that is not reduced yet, in its own dtype or in another one."""
    if not is_gathered_once(parameter):
        return False
    return parameter._unsharded_param.grad is not None or parameter.unsharded_accumulated_grad is not None


def reduces(model: nn.Module) -> bool:
    """Whether a backward of the sharded model reduces gradients now."""
    return all(group.reduce_grads for state in root_of(model)._state_ctx.all_states for group in groups_of(state))


def end_backward(model: nn.Module) -> None:
    """Does what FSDP2 does at the end of each backward: reduces gradients that those before it have not."""
    root = root_of(model)
    root._state_ctx.manual_backward_finalization_active = False  # read by torch 2.15
    with torch.no_grad():
        root._root_post_backward_final_callback()


def forget_gradient(parameter: FSDPParam) -> None:
    """Drops the parameter's gradient that is not reduced yet."""
    if is_gathered_once(parameter):
        parameter._unsharded_param.grad = None
    if "unsharded_accumulated_grad" in vars(parameter):  # up to torch 2.14, beside the gradient itself
        parameter.unsharded_accumulated_grad = None


def forget_partial_sums(group: Any) -> None:
    """Drops gradients that are reduced within the shard group, but not between replicas."""
    group._partial_reduce_output = None
    if hasattr(group, "_partial_reduce_output_layout"):  # from torch 2.15 on
        group._partial_reduce_output_layout.clear()
