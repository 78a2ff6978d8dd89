"""A live torch module as a module tree."""

from math import prod

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from shardkit.model import packed
from shardkit.model.tree import ModuleNode, Parameter

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def tree_of(model: nn.Module) -> ModuleNode:
    """The module tree of a torch module on any device. Tied parameters refer to their first name."""
    first_names: dict[int, str] = {}
    modules: dict[int, str] = {}

    def parameter(fqn: str, name: str, tensor: torch.Tensor) -> Parameter:
        full = f"{fqn}.{name}" if fqn else name
        first = first_names.setdefault(id(tensor), full)
        shape, kind = packed.shape_and_dtype(tensor)
        dtype = str(kind).removeprefix("torch.")
        count = packed.numel(tensor)
        holds = count if count != prod(shape) else 0
        tied_to = None if first == full else first
        return Parameter(name, shape, dtype, tensor.requires_grad, tied_to, holds, packed.scale_bytes(tensor))

    def visit(module: nn.Module, fqn: str, is_kept_whole: bool = False) -> ModuleNode:
        prefix = f"{fqn}." if fqn else ""
        first = modules.setdefault(id(module), fqn)
        return ModuleNode(
            fqn,
            type(module).__name__,
            tuple(parameter(fqn, name, p) for name, p in module._parameters.items() if p is not None),
            tuple(
                visit(child, prefix + name, _is_called_to_save(module, name) or packed.is_in_8_bits(child))
                for name, child in module._modules.items()
                if child is not None
            ),
            _is_container(module),
            tuple(parameter(fqn, name, b) for name, b in module._buffers.items() if b is not None),
            None if first == fqn else first,
            isinstance(module, nn.modules.batchnorm._NormBase),
            isinstance(module, (nn.Embedding, nn.EmbeddingBag)),
            is_kept_whole,
        )

    return visit(model, "")


def _is_called_to_save(module: nn.Module, name: str) -> bool:
    """Whether a model of peft with prompt learning has this module, which it calls where it saves: on one rank."""
    return name == "prompt_encoder" and hasattr(module, "get_prompt_embedding_to_save")


def _is_container(module: nn.Module) -> bool:
    """Whether it has no forward; or is a parametrization, which is called within that of its module, and which
    fully_shard of torch 2.11 refuses as a ModuleList."""
    has_no_forward = isinstance(module, CONTAINERS) and type(module).forward is nn.Module.forward
    return has_no_forward or isinstance(module, ParametrizationList)
