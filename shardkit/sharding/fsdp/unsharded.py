"""Sharded models whose ranks have the whole weights for a while: to generate, or to evaluate, each by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import torch
from torch import nn

from shardkit.sharding.fsdp.internals import generating_alone, groups_of_model, root_of
from shardkit.sharding.fsdp.recovery import recover_if_broken_off


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Inside, all units keep their gathered values, in the compute dtype: forwards gather nothing, and need no other
    rank. Collective at its start. UsageError if weights change inside."""
    root, groups = root_of(model), groups_of_model(model)
    if root._pass.is_unsharded:
        yield
        return
    recover_if_broken_off(root)
    with torch.no_grad():
        for call in root._pass.before_forward:
            call()
    try:
        for group in groups:
            group.keep()
        root._pass.is_unsharded = True
        with generating_alone(model):
            yield
        for group in groups:
            group.refuse_stale()
    finally:
        root._pass.is_unsharded = False
        for group in groups:
            group.release()


def generate_unsharded(model: nn.Module) -> None:
    """Has the model's `generate`, if it has one, gather the weights once, instead of in each of its forwards."""
    if callable(getattr(type(model), "generate", None)):
        vars(model)["generate"] = _Generate(model)


class _Generate:
    """The method, on whole weights."""

    def __init__(self, model: Any) -> None:
        self._model, inner = model, model.generate
        update_wrapper(self, inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with unsharded(self._model):
            return self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]
