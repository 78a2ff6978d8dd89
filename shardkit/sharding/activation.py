"""Activation checkpointing: blocks save only their inputs, and recompute their forward in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, update_wrapper, wraps
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardkit.log import get_logger

log = get_logger(__name__)


# Operators that are expensive to recompute: attention kernels of all devices, and matrix products.
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention", "flex_attention")
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def checkpoint_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], recompute: Literal["blocks", "operators"] = "blocks", every: int = 1
) -> None:
    """Apply activation checkpointing to every n-th of the blocks; see `change_blocks`.

    With `operators`, the outputs of attention and of every second matrix product are saved, and the rest is recomputed:
    half of the products, for about half of the memory savings of whole blocks.
    """
    change_blocks(model, blocks, partial(_checkpoint, keeps_products=recompute == "operators"), every)


def change_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], change: Callable[[nn.Module], None], every: int = 1
) -> None:
    """Call `change` on every n-th of the blocks, in the order of the model's modules. It should only replace `forward`,
    so that module names stay the same."""
    chosen = {id(block) for block in blocks}
    ordered = [module for module in model.modules() if id(module) in chosen]
    for block in ordered[::every]:
        change(block)
    _disable_cache(model)


def _keeping_products() -> Any:
    """The contexts of a forward and its recomputation, each of which counts products from the start."""
    counts = {False: 0, True: 0}

    def policy(context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if any(name in str(function) for name in _ATTENTION):
            return CheckpointPolicy.MUST_SAVE
        if function in _PRODUCTS:
            counts[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if counts[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def change_forward(block: nn.Module, around: Callable[..., Any]) -> None:
    """Make the block's forward `around(forward, *args, **kwargs)`. It stays a method, so that a copy of the block
    computes with the copy's own parameters."""
    forward: Any = block.forward
    if getattr(forward, "__self__", None) is not block:
        block.forward = update_wrapper(partial(around, forward), forward)
        return
    function = forward.__func__

    @wraps(function)
    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(MethodType(function, self), *args, **kwargs)

    block.forward = MethodType(changed, block)


def _checkpoint(block: nn.Module, keeps_products: bool) -> None:
    def recomputing(forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The random state is saved: otherwise dropout would use another mask in the recomputation: wrong gradients.
        if not keeps_products:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=True, context_fn=_keeping_products, **kwargs
        )

    change_forward(block, recomputing)


def _disable_cache(model: nn.Module) -> None:
    """Disable the key-value cache of Transformers models, which would grow again in the recomputation. Submodules may
    have their own configuration: the decoder of an encoder-decoder has a copy."""
    configs = [vars(module).get("config") for module in model.modules()]
    caching = {id(config): config for config in configs if getattr(config, "use_cache", False)}
    for config in caching.values():
        config.use_cache = False  # type: ignore[union-attr]
    if caching:
        log.info("activation checkpointing: set use_cache to false in the model's config.")
