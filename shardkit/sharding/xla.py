"""A model on XLA devices: its parameters are sharded over them, and the outputs of units along the batch.

This follows torch_xla's SpmdFullyShardedDataParallel, but the model is changed in place, so that names stay the same,
parameters stay tied, and models can also be replicated.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardkit.config import xla as settings
from shardkit.config.schema import Config
from shardkit.distributed import xla
from shardkit.distributed.modules import every_parameter
from shardkit.distributed.tensors import outside_inference_mode
from shardkit.sharding import activation, hooks, parameters
from shardkit.sharding.units import Units


def shard(model: nn.Module, units: Units, blocks: Iterable[nn.Module], config: Config) -> None:
    """Move the model from host memory to the devices, in place. Its parameters are replaced by new ones.

    Every process of the run must call it, with equal values.
    """
    replicated = {id(p) for p in units.replicated.values()}
    _move(model, replicated if settings.shards(config) else {id(p) for p in every_parameter(model)})
    if settings.recomputes(config):
        activation.recompute_blocks(model, blocks, _recompute, config.shardkit.recompute_every)
    for unit in units.units:  # the last is the model
        activation.change_forward(unit.module, "inference mode", _without_inference_mode)
    if not settings.shards(config):
        return
    for unit in units.units:
        unit.module.register_forward_hook(_split_outputs)
        if unit.fqn:  # what is before the root has no backward
            unit.module.register_forward_pre_hook(_compile_backward_alone, with_kwargs=True)
    for module in model.modules():
        if spread := [name for name, p in module._parameters.items() if p is not None and xla.is_spread(p)]:
            module.register_load_state_dict_post_hook(partial(_spread_again, spread))


def _move(model: nn.Module, replicated: set[int]) -> None:
    """Move parameters and buffers to the devices. All parameters except `replicated` are sharded. Tied ones stay
    tied."""
    made: dict[int, Any] = {}

    def moved(tensor: Any) -> Any:
        if id(tensor) not in made:
            made[id(tensor)] = _on_devices(tensor, is_spread=id(tensor) not in replicated)
        return made[id(tensor)]

    for module in model.modules():
        for mine in (module._parameters, module._buffers):
            for name, tensor in mine.items():
                if tensor is not None:
                    mine[name] = moved(tensor)


def _on_devices(tensor: torch.Tensor, is_spread: bool) -> torch.Tensor:
    if not isinstance(tensor, nn.Parameter):
        return xla.send(tensor, None)
    spec = xla.shard_spec(tensor.shape) if is_spread and tensor.dim() else None
    new = nn.Parameter(xla.send(tensor.detach(), spec), tensor.requires_grad)
    parameters.carry_over(parameters.attributes_of(tensor), new)
    for hook in parameters.post_accumulate_hooks_of(tensor):
        hooks.hook_whether_trained(new, hook)
    for gradient_hook in (tensor._backward_hooks or {}).values():  # such hooks need whole gradients, which XLA has
        new.register_hook(gradient_hook)
    return new


def _compile_backward_alone(unit: nn.Module, args: Any, kwargs: Any) -> None:
    """Keep the compiler from fusing a unit's backward with that of the units before it. torch_xla does so by torch's
    full backward hooks, under which neither inputs nor outputs can be changed in place."""

    def barrier(gradient: torch.Tensor) -> None:
        xla.optimization_barrier_([gradient, *(p.grad for p in unit.parameters() if p.grad is not None)])

    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and xla.is_xla(leaf) and leaf.grad_fn is not None:
            leaf.register_hook(barrier)
            return  # its gradient is the last that is computed


def _split_outputs(_: nn.Module, __: Any, output: Any) -> None:
    """Annotate a unit's outputs as sharded along the batch, so that the compiler gathers the unit's parameters instead
    of its activations. What has a layout keeps it. With another one, each step is compiled anew for a weight that the
    unit gives, too; and XLA refuses one for logits that the model has computed its loss from, and gives beside it."""
    for leaf in tree_leaves(output):
        is_new = isinstance(leaf, torch.Tensor) and xla.is_xla(leaf) and not xla.layout_of(leaf)
        if is_new and (spec := xla.batch_spec(leaf)) is not None:
            xla.lay_out(leaf, spec)


def _spread_again(names: Iterable[str], module: nn.Module, _: Any) -> None:
    """Shard these parameters of a module again: `load_state_dict` copies whole values into them, with their layout."""
    for name in names:
        xla.spread_again_(module.get_parameter(name))


def _without_inference_mode(_: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward without gradients in `torch.inference_mode()`, in which torch_xla has no views of tensors that were made
    outside, such as weights. Outputs are made inside."""
    if not torch.is_inference_mode_enabled():
        return forward(*args, **kwargs)
    with outside_inference_mode():
        output = forward(*args, **kwargs)
    return tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, output)


def _recompute(block: nn.Module) -> None:
    """Apply activation checkpointing to a block."""

    def recomputing(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        names, given = list(kwargs), [*args, *kwargs.values()]
        is_trained = any(isinstance(one, torch.Tensor) and one.requires_grad for one in given)
        if not (torch.is_grad_enabled() and is_trained):  # without gradients of its inputs, it cannot be recomputed
            return forward(*args, **kwargs)

        def whole(_: nn.Module, *values: Any) -> Any:
            return forward(*values[: len(args)], **dict(zip(names, values[len(args) :], strict=True)))

        return xla.checkpoint(MethodType(whole, block), *given)

    activation.change_forward(block, "recompute", recomputing)
