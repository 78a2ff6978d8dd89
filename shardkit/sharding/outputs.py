"""What a unit's forward returns, and what it leaves on its modules: where a backward may come from."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only


def without_views(output: Any) -> Any:
    """A unit's outputs without views. FSDP2 hangs the backward gather on them, and an in-place operation on a view
    (`x += residual`) would drop it without a word: wrong gradients. To be called before FSDP2's own hook."""
    if torch.compiler.is_compiling():  # a compiled graph returns no views of what it was given
        return output
    if isinstance(output, torch.Tensor):
        return _own(output)
    return tree_map_only(torch.Tensor, _own, output)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return _Own.apply(tensor) if tensor.requires_grad and tensor._is_view() else tensor


class _Own(torch.autograd.Function):
    """The same values in the same memory, but no view: what is changed in place later keeps its hooks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def may_be_differentiated(output: Any) -> bool:
    """Whether a backward may come through what a frozen unit returned. True for what is no structure of tensors."""
    leaves = tree_leaves(output)
    return any(leaf.requires_grad if isinstance(leaf, torch.Tensor) else leaf is not None for leaf in leaves)


class LeftOnModules:
    """Tensors that a forward leaves on the unit's modules, such as the auxiliary loss of a router.

    A backward that comes through them alone must find the unit gathered: its freed memory would be read otherwise.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [(vars(module), len(vars(module)), _slots(vars(module))) for module in modules]

    def tensors(self) -> list[torch.Tensor]:
        """Those that a backward may come through. Cheap where there are none: it looks at what may hold a tensor."""
        found: list[torch.Tensor] = []
        for place, size, slots in self._places:
            if slots or len(place) != size:
                names = slots if len(place) == size else _slots(place)
                found += [t for name in names for t in tree_leaves(place.get(name)) if _is_computed(t)]
        return found


_OF_EVERY_MODULE = set(vars(nn.Module()))


def _slots(attributes: Mapping[str, Any]) -> list[str]:
    """Names of attributes that hold a tensor, or may come to hold one."""
    kinds = (torch.Tensor, list, tuple, dict, type(None))
    return [name for name, value in attributes.items() if name not in _OF_EVERY_MODULE and isinstance(value, kinds)]


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None
