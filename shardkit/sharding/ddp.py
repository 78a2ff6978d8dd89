"""A whole model on every rank: DistributedDataParallel, with gradients reduced however the loop is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from shardkit.config.schema import Config
from shardkit.errors import ModelError
from shardkit.sharding import precision
from shardkit.sharding.gradient_sync import EndOfBackward, GradientMean, attach, take_mean_, watch_backward

if TYPE_CHECKING:
    from shardkit.distributed.process import Process


class Replica(DistributedDataParallel):
    """DistributedDataParallel that reduces in every backward, and shows the attributes of the model inside.

    torch reduces once for each forward of the wrapper, and the parameters that were trained when it was made. A second
    backward (two losses; a graph kept) or a forward of the model inside (`unwrap_model(model).loss(...)`) would leave
    each rank with gradients of its own, silently: these are reduced when such a backward is over. Where other
    parameters are trained than before, or a backward broke off, torch's reducer is made anew.
    """

    def __init__(self, model: nn.Module, reduce_in: torch.dtype, **settings: Any) -> None:
        self._reduce_in, self._settings = reduce_in, settings
        self.at_end_of_backward: list[Callable[[], None]] = []
        self._engage(model)
        self._watch = EndOfBackward(model.parameters(), self._after_backward)

    def _engage(self, model: nn.Module) -> None:
        """Let torch's reducer manage what is trained now. Collective."""
        mine = {name: value for name, value in vars(self).items() if name in _OF_EVERY_MODULE}
        for name in ("reducer", "logger"):  # the old reducer takes its hooks along
            vars(self).pop(name, None)
        super().__init__(model, **self._settings)
        vars(self).update(mine)
        self._all = list(model.parameters())
        self._trained = [p.requires_grad for p in self._all]
        self._managed = {id(p) for p in self._all if p.requires_grad}
        self._is_awaited = False  # whether torch's reducer expects a backward
        self._missing: set[int] = set()  # what it still expects
        dtypes = {p.dtype for p in self._all if p.requires_grad}
        if any(precision.reduce_dtype(self._reduce_in, dtype) is not dtype for dtype in dtypes):
            self.register_comm_hook(self._reduce_in, _reduce_in)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trained = [p.requires_grad for p in self._all]
        if True not in trained:
            return self.module(*args, **kwargs)
        if trained != self._trained or self._watch.has_broken_off():
            self._engage(self.module)
        output = super().forward(*args, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._is_awaited, self._missing = True, set(self._managed)
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    self._watch.watch(tensor)
        return output

    def before_step(self) -> None:
        """Gradients that came without a backward (`torch.autograd.grad`, assigned by hand) become the mean of all
        ranks. Raises ModelError where a backward has left out parameters, so that torch's reducer still waits for them.
        Collective where a forward was followed by no backward."""
        if self._is_awaited and len(self._missing) == len(self._managed):
            take_mean_([p for p in self._all if p.grad is not None], may_be_unused=False)
        elif self._is_awaited and self._missing:
            names = {id(p): fqn for fqn, p in self.module.named_parameters()}
            missing = [names[identity] for identity in self._missing if identity in names]
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ModelError(
                f"DDP: the gradients are not reduced, since some parameters got none (got none for "
                f"{', '.join(missing[:3])}{more}); set shardkit.ddp_find_unused_parameters: true, or freeze them."
            )

    def _after_backward(self, arrived: list[torch.Tensor]) -> None:
        if self.require_backward_grad_sync:
            self._reduce_rest(arrived)
        for call in self.at_end_of_backward:
            call()

    def _reduce_rest(self, arrived: list[torch.Tensor]) -> None:
        """Reduce what torch's reducer does not, of a backward in which these parameters got gradients."""
        managed = sum(id(parameter) in self._managed for parameter in arrived)
        left_out = [p for p in self._all if id(p) not in self._managed] if len(arrived) > managed else []
        if self._is_awaited:
            # Without `find_unused_parameters` torch waits until every parameter has got its gradient.
            self._missing -= {id(parameter) for parameter in arrived}
            self._is_awaited = bool(self._missing) and not self.find_unused_parameters
        else:
            left_out = self._all
        take_mean_([p for p in left_out if p.requires_grad], self.find_unused_parameters)


_OF_EVERY_MODULE = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
"""Hooks and the like, which must outlive a new reducer."""


def replicate(model: nn.Module, config: Config, process: Process) -> nn.Module:
    """The model in DistributedDataParallel; itself where there is one rank, or nothing in it is trained yet."""
    if config.mode != "ddp" or process.world_size == 1:
        return model
    may_be_unused = config.shardkit.ddp_find_unused_parameters
    if not any(p.requires_grad for p in model.parameters()):
        means = GradientMean(model.parameters(), may_be_unused)
        attach(model, means)
        watch_backward(model, lambda arrived: means.reduce())
        return model
    return Replica(
        model,
        precision.of(config).reduce,
        device_ids=None if process.device.type == "cpu" else [process.device],
        gradient_as_bucket_view=True,
        find_unused_parameters=may_be_unused,
        # Every rank has rank 0's values already, or was asked to keep its own.
        init_sync=False,
    )


def _reduce_in(dtype, bucket):
    """DDP's communication hook: the mean of a bucket over all ranks, added up in `dtype` or what is wider.

    Without annotations: DDP compares them with its own types, and here they would be strings.
    """
    buffer = bucket.buffer()
    sent = buffer.to(precision.reduce_dtype(dtype, buffer.dtype), copy=True).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))
