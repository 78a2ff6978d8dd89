"""Modules in wrappers of torch (DDP, FSDP, torch.compile): the user's module inside, its parameters and their names.

FSDP takes half a second to import, so this module does not import it.
"""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Wrappers that torch puts into module names.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def is_fsdp(value: Any) -> bool:
    """Whether the value is an FSDP2 module, without importing torch's module."""
    return _is_of_fsdp(value, "FSDPModule")


def is_fsdp_1(value: Any) -> bool:
    """Whether the value is the wrapper of torch's first FSDP, without importing torch's module."""
    return _is_of_fsdp(value, "FullyShardedDataParallel")


def _is_of_fsdp(value: Any, name: str) -> bool:
    return isinstance(value, getattr(sys.modules.get("torch.distributed.fsdp"), name, ()))


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module, without the wrappers of DistributedDataParallel and torch.compile."""
    *_, inner = layers(model)
    return inner


def layers(model: nn.Module) -> Iterator[nn.Module]:
    """The model and what its wrappers, those of DistributedDataParallel and torch.compile, contain; the user's module
    is the last."""
    inner: nn.Module | None = model
    while isinstance(inner, nn.Module):
        yield inner
        modules = inner.__dict__.get("_modules", {})
        is_ddp = isinstance(inner, DistributedDataParallel)
        inner = modules.get("module") if is_ddp else modules.get("_orig_mod") if is_compiled(inner) else None


def every_parameter(model: nn.Module) -> Iterator[nn.Parameter]:
    """All parameters of a model, also where its class redefines `parameters()`, such as to leave its discriminator
    out."""
    return (parameter for _, parameter in nn.Module.named_parameters(model))


def is_compiled(module: nn.Module) -> bool:
    """Whether this is torch.compile's wrapper, without importing torch's module."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return isinstance(module, getattr(dynamo, "OptimizedModule", ()))


def clean_name(name: str) -> str:
    """An fqn without the names of torch's wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
