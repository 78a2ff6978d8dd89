"""The outputs of a unit's forward, and tensors that it stores on its modules: backward may start from both."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map_only

from shardkit.sharding.cast_outputs import cast_output


def without_views(output: Any) -> Any:
    """A unit's outputs without views. FSDP2 registers its backward hook on them, and an in-place operation on a view
    (`x += residual`) would silently drop the hook: wrong gradients. Must run before FSDP2's forward hook."""
    if torch.compiler.is_compiling():  # a compiled graph returns no views of its inputs
        return output
    if isinstance(output, torch.Tensor):
        return _own(output)
    for holder, name, value in _attributes(output):
        if any(_is_computed(leaf) and leaf._is_view() for leaf in tree_leaves(value)):
            object.__setattr__(holder, name, tree_map_only(torch.Tensor, _own, value))  # of a frozen dataclass, too
    return tree_map_only(torch.Tensor, _own, output)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return _Own.apply(tensor) if tensor.requires_grad and tensor._is_view() else tensor


class _Own(torch.autograd.Function):
    """The same values in the same memory, but not a view, so that hooks survive in-place operations."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def cast(output: Any, dtype: torch.dtype | None) -> Any:
    """A unit's outputs in its output dtype, if it has one. torch casts them, too, but none can be differentiated by."""
    return output if dtype is None else _apply_to_tensors(partial(cast_output, dtype=dtype), output)


def in_objects(output: Any) -> list[torch.Tensor]:
    """The tensors with a grad_fn in objects that a forward returns. torch looks into dataclasses since 2.13 only, and
    never into other objects, such as a distribution: a backward from them would read freed memory."""
    if isinstance(output, torch.Tensor):
        return []
    return [leaf for _, _, value in _attributes(output) for leaf in tree_leaves(value) if _is_computed(leaf)]


def _attributes(output: Any) -> Iterator[tuple[Any, str, Any]]:
    """(object, name, value) of the attributes of objects in the output; of objects in these, only where they are parts
    of a dataclass or a distribution: another object, such as a cache, may hold the tensors of all blocks."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, (torch.Tensor, nn.Module, type)):
            continue
        named = {field.name: getattr(leaf, field.name, None) for field in fields(leaf)} if is_dataclass(leaf) else {}
        for name, value in {**named, **getattr(leaf, "__dict__", {})}.items():
            yield leaf, name, value
            if is_dataclass(leaf) or isinstance(leaf, Distribution):
                yield from _attributes(value)


def may_be_differentiated(output: Any) -> bool:
    """Whether backward may reach a frozen unit through its output. True if the output contains other objects than
    tensors."""
    leaves = tree_leaves(output)
    return any(leaf.requires_grad if isinstance(leaf, torch.Tensor) else leaf is not None for leaf in leaves)


class LeftOnModules:
    """Tensors that a forward stores on the unit's modules, such as the auxiliary loss of a router.

    A backward that starts only from them must gather the unit, too: otherwise it would read freed memory.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*modules]

    @cached_property
    def _attributes(self) -> list[tuple[dict[str, Any], int, list[str]]]:
        """As of the first forward: until then, `prepare` adds some."""
        return [(vars(module), len(vars(module)), _slots(vars(module))) for module in self._modules]

    def tensors(self) -> list[torch.Tensor]:
        """The stored tensors with a grad_fn. Only looks at attributes that can hold a tensor."""
        found: list[torch.Tensor] = []
        for attributes, size, slots in self._attributes:
            if slots or len(attributes) != size:
                names = slots if len(attributes) == size else _slots(attributes)
                found += [t for name in names for t in tree_leaves(attributes.get(name)) if _is_computed(t)]
        return found


_OF_EVERY_MODULE = set(vars(nn.Module()))


def _slots(attributes: Mapping[str, Any]) -> list[str]:
    """Names of attributes that hold a tensor, or may hold one later."""
    kinds = (torch.Tensor, list, tuple, dict, type(None))
    return [name for name, value in attributes.items() if name not in _OF_EVERY_MODULE and isinstance(value, kinds)]


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
