"""Activation checkpointing: blocks that keep only their inputs and compute again in backward."""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardkit.log import get_logger

log = get_logger(__name__)


def checkpoint_blocks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Change the blocks in place. Their names stay: only `forward` is replaced, no module is put around them."""
    for block in blocks:
        _checkpoint(block)
    _forget_cache(model)


def _checkpoint(block: nn.Module) -> None:
    forward = block.forward

    @wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The random state is kept, or dropout would draw another mask the second time: wrong gradients, silently.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)

    block.forward = recomputing


def _forget_cache(model: nn.Module) -> None:
    """A key-value cache would grow a second time when a Transformers block computes again. The parts of a model may
    have configurations of their own: an encoder-decoder's decoder has a copy."""
    configs = [vars(module).get("config") for module in model.modules()]
    caching = {id(config): config for config in configs if getattr(config, "use_cache", False)}
    for config in caching.values():
        config.use_cache = False  # type: ignore[union-attr]
    if caching:
        log.info("activation checkpointing: set use_cache to false in the model's config.")
