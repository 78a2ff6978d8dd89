"""Activation checkpointing: blocks save only their inputs, and recompute their forward in backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial, update_wrapper, wraps
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardkit.distributed.tensors import memory_of
from shardkit.log import get_logger
from shardkit.sharding.changed_buffers import ChangedBuffers
from shardkit.sharding.fsdp.recomputation import Gathered

log = get_logger(__name__)


# Operators that are expensive to recompute: attention kernels of all devices, and matrix products.
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "fused_attention", "flex_attention")
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@cache
def _is_expensive(function: Any) -> bool:
    """Asked for each operator of a block."""
    return function in _PRODUCTS or any(name in str(function) for name in _ATTENTION)


# torch counts every operator, and raises an error where the recomputation has more of one. FSDP marks more ranges for
# the profiler then, where a unit lies inside the block.
_RANGES = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


def checkpoint_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], recompute: Literal["blocks", "operators"] = "blocks", every: int = 1
) -> None:
    """Apply activation checkpointing to every n-th of the blocks; see `recompute_blocks`.

    With `operators`, the outputs of attention and of every second matrix product are saved, and the rest is recomputed:
    half of the products, for about half of the memory savings of whole blocks.
    """
    if recompute == "operators":
        SAC_IGNORED_OPS.update(_RANGES)
    recompute_blocks(model, blocks, partial(_checkpoint, keeps_products=recompute == "operators"), every)


def recompute_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], change: Callable[[nn.Module], None], every: int
) -> None:
    """Call `change`, which lets a block recompute its forward, on every n-th of the blocks, in the order of the model's
    modules; disable the model's key-value cache. `change` should only replace `forward`, so that module names stay."""
    chosen = {id(block) for block in blocks}
    ordered = [module for module in model.modules() if id(module) in chosen]
    for block in ordered[::every]:
        change(block)
    _disable_cache(model)


class _ThisThread(threading.local):
    is_gathering = False


_this_thread = _ThisThread()


@contextmanager
def gathering() -> Iterator[None]:
    """Inside, FSDP gathers a unit: its operators are not the block's. Prefetched, they run before the block in forward,
    and maybe inside of it in the recomputation."""
    found, _this_thread.is_gathering = _this_thread.is_gathering, True
    try:
        yield
    finally:
        _this_thread.is_gathering = found


class _OfBlock:
    """A base of torch's modes of selective checkpointing. They would count operators that gather a unit, too. And they
    keep an output itself: one that is changed in place afterwards (`nn.ReLU(inplace=True)`, gates of `nn.GRU`) would be
    refused in backward, or give wrong gradients where the change is to `_unsafe_view`'s alias. Here a copy is kept from
    the first change on."""

    storage: dict[Any, Any]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _this_thread.is_gathering:
            return func(*args, **kwargs)
        for changed in _changed_by(func, args, kwargs):
            self._keep_copies(changed)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[misc]

    def _keep_copies(self, changed: torch.Tensor) -> None:
        """Copies what is kept in the memory of a tensor that is about to change."""
        for function, outputs in self.storage.items():
            for output in tree_leaves(outputs) if _is_expensive(function) else ():
                kept = getattr(output, "val", None)  # of torch's wrapper, beside the version that it expects
                if isinstance(kept, torch.Tensor) and memory_of(kept) == memory_of(changed):
                    output.val = kept.clone()
                    output.version = output.val._version


def _changed_by(function: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to."""
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_leaves(given) if isinstance(one, torch.Tensor))


@cache
def _of_block(kind: type) -> type:
    return type(kind.__name__, (_OfBlock, kind), {})


def _keeping_products() -> Any:
    """The contexts of a forward and its recomputation, each of which counts products from the start."""
    counts = {False: 0, True: 0}

    def policy(context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if not _is_expensive(function):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if function in _PRODUCTS:
            counts[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if counts[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


_CHANGES = "_shardkit_changes"


def change_forward(block: nn.Module, name: str, around: Callable[..., Any]) -> None:
    """Make the block's forward `around(block, forward, *args, **kwargs)`. It stays a method, so that a copy of the
    block computes with the copy's own parameters. A block gets a change of this `name` once, also where its model is
    prepared again."""
    forward: Any = block.forward
    changes = getattr(forward, _CHANGES, ())
    if name in changes:
        return
    if getattr(forward, "__self__", None) is not block:
        block.forward = update_wrapper(partial(around, block, forward), forward)
        setattr(block.forward, _CHANGES, (*changes, name))
        return
    function = forward.__func__

    @wraps(function)
    def changed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return around(self, partial(function, self), *args, **kwargs)

    setattr(changed, _CHANGES, (*changes, name))
    block.forward = MethodType(changed, block)


def _checkpoint(block: nn.Module, keeps_products: bool) -> None:
    buffers = ChangedBuffers(block)

    def contexts(block: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
        first, again = buffers.contexts(block)
        again = _Both(Gathered(block), again)
        if not keeps_products:
            return first, again
        of_products = _keeping_products()
        for mode in of_products:
            mode.__class__ = _of_block(mode.__class__)
        return _Both(first, of_products[0]), _Both(again, of_products[1])

    def recomputing(block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The random state is saved: otherwise dropout would use another mask in the recomputation: wrong gradients.
        recomputed = partial(checkpoint, forward, *args, use_reentrant=False, preserve_rng_state=True, **kwargs)
        if not torch.compiler.is_compiling():  # a compiled graph takes no contexts but torch's own
            return recomputed(context_fn=partial(contexts, block))
        return recomputed(context_fn=_keeping_products) if keeps_products else recomputed()

    change_forward(block, "recompute", recomputing)


class _Both:
    """A context of two, one inside the other, which may be entered again if both may."""

    def __init__(self, outer: AbstractContextManager, inner: AbstractContextManager) -> None:
        self._outer, self._inner = outer, inner
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._outer)
            stack.enter_context(self._inner)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _disable_cache(model: nn.Module) -> None:
    """Disable the key-value cache of Transformers models, which would grow again in the recomputation. Submodules may
    have their own configuration: the decoder of an encoder-decoder has a copy."""
    configs = [vars(module).get("config") for module in model.modules()]
    caching = {id(config): config for config in configs if getattr(config, "use_cache", False)}
    for config in caching.values():
        config.use_cache = False  # type: ignore[union-attr]
    if caching:
        log.info("activation checkpointing: set use_cache to false in the model's config.")
