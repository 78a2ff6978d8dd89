"""Gradients of micro-batches before the last one of a window, which wait on each rank for their reduction.

The backward of the last micro-batch reduces them. Where it does not reach a model (the loop skipped a loss), or not all
of its units, they are reduced before the optimizer uses them, or the step is refused.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from shardkit.distributed.modules import every_parameter
from shardkit.sharding.gradient_sync import drop_unreduced, is_partly_reduced, reduce_deferred, refuse_unreduced

Parameters = Callable[[], Iterable[torch.Tensor]]


class DeferredGradients:
    """The models whose gradients may wait for their reduction."""

    def __init__(self) -> None:
        self._waiting: list[nn.Module] = []
        """Models with a backward that reduced nothing, or not all, and none since that did."""
        self._begun: list[nn.Module] = []
        """Models with such a backward; a later one may have left out some of their units."""
        self.is_finishing = False
        """Whether gradients are being reduced as at the end of a backward, which is none of the script's."""

    def note_backward(self, model: nn.Module, is_deferred: bool) -> None:
        """Notes a backward through a model, and whether it waits for a later one to reduce its gradients."""
        self._waiting = [one for one in self._waiting if one is not model]
        if is_deferred:
            self._waiting.append(model)
            self._begun = [one for one in self._begun if one is not model] + [model]

    def finish(self, parameters: Parameters) -> None:
        """Reduces what waits in these parameters. Collective if anything does. UsageError if it cannot be reduced."""
        if not self._begun:
            return
        own = {id(parameter) for parameter in parameters()}
        for model in [one for one in self._begun if any(id(p) in own for p in every_parameter(one))]:
            if any(model is one for one in self._waiting):
                self._reduce(model)
            refuse_unreduced(model, own)
            self._waiting = [one for one in self._waiting if one is not model]
        self._begun = [one for one in self._begun if one in self._waiting or is_partly_reduced(one)]

    def _reduce(self, model: nn.Module) -> None:
        self.is_finishing = True
        try:
            reduce_deferred(model)
        finally:
            self.is_finishing = False

    def drop(self, parameters: Parameters) -> None:
        """Drops what waits in these parameters, beside their gradients."""
        if self._begun:
            own = {id(parameter) for parameter in parameters()}
            for model in self._begun:
                drop_unreduced(model, own)
