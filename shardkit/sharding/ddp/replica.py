"""DistributedDataParallel that also reduces gradients in loops which torch's does not support."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from shardkit.config.schema import DdpConfig
from shardkit.distributed.modules import every_parameter
from shardkit.distributed.tensors import flat_bytes, is_transformed, travels
from shardkit.errors import ModelError, UsageError
from shardkit.sharding import precision
from shardkit.sharding.ddp import comm_hooks
from shardkit.sharding.ddp.names import take_names_of_the_model
from shardkit.sharding.gradient_sync import EndOfBackward, gradient_sync, take_mean_
from shardkit.sharding.parameters import refused_hooks
from shardkit.wording import first_few

_KEPT = set(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"} | {"require_backward_grad_sync"}
"""Kept when the reducer is created again, also by the forward of a micro-batch whose gradients are not reduced."""

replicas: WeakSet[Replica] = WeakSet()
"""All that there are, also copies."""


class Replica(DistributedDataParallel):
    """DistributedDataParallel that reduces gradients in every backward, and exposes the attributes of the inner model.

    torch's reducer works once per forward of the wrapper, and for the parameters that were trainable at construction. A
    second backward (two losses, retain_graph) or a forward of the inner model (`unwrap_model(model).loss(...)`) would
    silently leave different gradients on the ranks: here they are reduced at the end of such a backward. If other
    parameters became trainable, the dtype or the strides of one changed, a gradient got other memory, or a backward
    raised an exception, torch's reducer is created again.

    Attributes that are set and are not DDP's own are set on the inner model, which reads them: `model.alpha = 0.5`.
    Weights are loaded with or without DDP's prefix `module.` in their names.
    """

    def __init__(self, model: nn.Module, reduce_in: torch.dtype, section: DdpConfig, **settings: Any) -> None:
        self._reduce_in, self._section, self._settings = reduce_in, section, settings
        self._may_be_unused = settings["find_unused_parameters"] or section.static_graph
        self.at_end_of_backward: list[Callable[[], None]] = []
        self.is_alone = False  # its forwards without gradients need no other rank; torch's broadcast buffers
        self._engage(model)
        # Of a replica whose torch reducer is gone, the parameters that it reduces by itself.
        self._left: list[nn.Parameter] | None = None
        self._watch = EndOfBackward(every_parameter(model), self._after_backward)
        take_names_of_the_model(self)
        replicas.add(self)
        self._takes_attributes = True  # from now on those that are not its own are the inner model's

    def _engage(self, model: nn.Module) -> None:
        """Create torch's reducer for the currently trainable parameters. Collective."""
        takes_attributes = vars(self).pop("_takes_attributes", False)
        # By the id of a parameter, its gradient in the reducer's buckets and the address of that.
        self._in_buckets: dict[int, tuple[torch.Tensor, int]] = {}
        mine = {name: value for name, value in vars(self).items() if name in _KEPT}
        for name in ("reducer", "logger", "_group_after_reducer"):  # destroying the old reducer removes its hooks
            vars(self).pop(name, None)
        _leave_out_empty(model)
        super().__init__(model, **self._settings)
        # Freed last: a process group that ends with the reducer waits, holding the GIL, for threads that need it.
        self._group_after_reducer = self.process_group
        self.broadcast_buffers = self._section.broadcast_buffers
        vars(self).update(mine)
        self._all = [p for p in every_parameter(model) if p.numel()]
        self._kinds = self._present_kinds()
        # Of each parameter that torch's reducer reduces, its number there.
        trained = [p for p in self._all if p.requires_grad]
        self._managed = {id(p): number for number, p in enumerate(trained)}
        self._first_node = trained[0], get_gradient_edge(trained[0]).node
        self.is_first_backward = True
        self._is_awaited = False  # whether torch's reducer expects a backward
        # torch would learn a static graph from the first backward through an output, which may be one of
        # torch.autograd.grad (a gradient penalty): that leaves no gradients, so none would ever be reduced.
        self._static_graph_delay_allreduce_enqueued = True
        self._is_graph_known = not self._section.static_graph
        self._missing: set[int] = set()  # ids of the parameters that no backward since the last forward has reached
        dtypes = {p.dtype for p in self._all if p.requires_grad}
        if self._section.comm_hook != "no":
            comm_hooks.register(self, self._section)
        elif any(precision.reduce_dtype(self._reduce_in, dtype) is not dtype for dtype in dtypes):
            self.register_comm_hook(self._reduce_in, comm_hooks.mean_reduced_in)
        self._takes_attributes = takes_attributes

    def _present_kinds(self) -> list[tuple[bool, torch.dtype, tuple[int, ...]]]:
        """Of each parameter what torch's reducer was created for."""
        return [(p.requires_grad, p.dtype, p.stride()) for p in self._all]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self)
        if name in own and not isinstance(value, torch.Tensor | nn.Module):  # in each step: without torch's checks
            own[name] = value
        elif name in own or name == "module" or hasattr(type(self), name) or not own.get("_takes_attributes", False):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the inner model, whose class may redefine which they are."""
        return iter(self.module.parameters()) if recurse else super().parameters(recurse=False)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """That of the inner model, whose class may do more in it, or take other arguments."""
        return self._in_mode(self.module.train(*args, **kwargs))

    def eval(self) -> Any:
        """That of the inner model, whose class may do more in it."""
        return self._in_mode(self.module.eval())

    def _in_mode(self, result: Any) -> Any:
        self.training = self.module.training
        return self if result is self.module else result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A replica of a copy of the model, as torch's copy is one: an average of the weights keeps their names."""
        copied = copy.deepcopy(self.module, memo)
        if not any(p.requires_grad for p in every_parameter(copied)):
            return copied
        return type(self)(copied, self._reduce_in, self._section, **self._settings)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "pickle: a model in DistributedDataParallel cannot be pickled, as by torch.save or for another process, or "
            "copied by copy.copy (got a prepared one); use the inner model: "
            "torch.save(accelerator.unwrap_model(model), path), or save its weights: "
            "accelerator.save_model(model, folder)."
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._left is not None or (self.is_alone and not torch.is_grad_enabled()):
            return self.module(*args, **kwargs)
        kinds = self._present_kinds()
        # torch's reducer works neither in transforms of torch.func nor in forward mode.
        if not any(is_trained for is_trained, *_ in kinds) or is_transformed() or forward_ad._current_level >= 0:
            return self.module(*args, **kwargs)
        if self.is_first_backward and torch.is_grad_enabled() and (problems := refused_hooks(self.module)):
            raise ModelError("\n".join(problems))
        self._renew_reducer(kinds)
        if self._is_awaited and torch.is_grad_enabled() and not self.require_backward_grad_sync:
            self._stop_waiting()  # no backward followed the last forward, and that of this one must not be taken for it
        output = super().forward(*args, **kwargs)
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._await_backward(output)
        return output

    def _renew_reducer(self, kinds: list[tuple[bool, torch.dtype, tuple[int, ...]]]) -> None:
        """Create torch's reducer again if it was created for other parameters than the present ones, of these kinds, or
        for gradients in other memory, or if a backward has broken off. Collective then."""
        if kinds != self._kinds or self._watch.has_broken_off() or self._has_left_buckets():
            with torch.inference_mode(False), torch.no_grad():  # a reducer made in inference mode never trains
                self._reduce_frozen()
                self._engage(self.module)

    def _await_backward(self, output: Any) -> None:
        """Note that torch's reducer expects a backward through the output of a forward."""
        self._is_awaited, self._missing = True, set(self._managed)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                self._watch.watch(tensor)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """As torch's, but with a static graph the first backward reduces in spite of it: torch requires that."""
        with gradient_sync([self], enabled=False):
            yield

    def _reduce_frozen(self) -> None:
        """Average what earlier micro-batches of a window left in parameters that were frozen since. Collective if there
        are such."""
        take_mean_([p for p in self._all if id(p) in self._managed and not p.requires_grad], may_be_unused=True)

    def leave(self, parameters: Set[int]) -> None:
        """Reduce the gradients of these parameters (by id) no more: a newer replica has them, of the same module or of
        a model around a part of it. Two of torch's reducers would mix them up."""
        known = self._all if self._left is None else self._left
        if not any(id(p) in parameters for p in known):
            return
        self._left, self._is_awaited = [p for p in known if id(p) not in parameters], False
        for name in ("reducer", "logger"):  # destroying the reducer removes its hooks
            vars(self).pop(name, None)
        if not self._left:
            self.require_backward_grad_sync = False
            self.at_end_of_backward.clear()

    def before_step(self) -> None:
        """Average gradients that were set without a backward (`torch.autograd.grad`, assignment). Raises ModelError if
        no backward reached a parameter that torch's reducer expects on every rank, or the reducer saw only a part of
        one. Collective if no backward followed the last forward, or there has been none."""
        if self._left is not None:
            return
        self._check_finished()
        if self.is_first_backward or (self._is_awaited and len(self._missing) == len(self._managed)):
            take_mean_([p for p in self._all if p.grad is not None], may_be_unused=False)
        elif self._missing and not self._is_awaited and not self._may_be_unused:
            self._refuse_missing([p for p in self._all if id(p) in self._missing and p.grad is None])

    def _check_finished(self) -> None:
        """Raises ModelError if torch's reducer has not seen all gradients of the last backward: its hooks are on nodes
        of autograd, and `set_()` of a parameter gives it another node. If all parameters have another one, the reducer
        does not wait for any."""
        reducer: Any = self.reducer
        first, node = self._first_node
        is_unseen = first.requires_grad and get_gradient_edge(first).node is not node
        try:
            reducer._check_reducer_finalized()
        except RuntimeError:
            is_unseen = True
        if is_unseen:
            raise ModelError(
                "DDP: the gradients are not reduced, since torch's reducer does not see those of some parameters (got "
                "parameters whose memory was replaced after prepare, by torch.nn.utils.parametrizations or set_(), or "
                "a backward that raised an exception, or reached others than the first one with static_graph); "
                "register parametrizations before prepare, and use shardkit.ddp.static_graph: false where steps differ."
            )

    def _note_buckets(self) -> None:
        """Note where the gradients lie that torch's reducer has just reduced: they are views of its buckets."""
        if self._settings["gradient_as_bucket_view"] and len(self._in_buckets) < len(self._managed):
            for parameter in self._all:
                gradient, own = parameter.grad, id(parameter)
                if own in self._managed and gradient is not None and gradient.layout == torch.strided:
                    self._in_buckets[own] = gradient, gradient.data_ptr()

    def _has_left_buckets(self) -> bool:
        """Whether a script has given gradients other memory (`p.grad.data = values`), which torch's reducer would go on
        to write to instead of its bucket. Then a new reducer is needed, whose buckets are apart from the gradients."""
        views = self._in_buckets
        if torch.is_grad_enabled() and not self._has_rebuilt_buckets:  # this forward may replace the buckets
            self._in_buckets = {}
        if all(gradient.data_ptr() == address for gradient, address in views.values()):
            return False
        self._settings["gradient_as_bucket_view"] = False
        return True

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if inputs or kwargs:
            return super()._pre_forward(*inputs, **kwargs)
        found, self.device_ids = self.device_ids, None  # torch moves what is put in to the first, and fails on nothing
        try:
            return super()._pre_forward()
        finally:
            self.device_ids = found

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if not self.modules_buffers:  # torch raises an internal error if the model had buffers and has none any more
            return
        found = self.modules_buffers
        self.modules_buffers = [buffer if travels(buffer.dtype) else flat_bytes(buffer) for buffer in found]
        super()._sync_module_buffers(authoritative_rank)
        for buffer, sent in zip(found, self.modules_buffers, strict=True):
            if sent.data_ptr() != buffer.data_ptr():  # it does not lie in order in memory
                buffer.copy_(sent.view(buffer.dtype).view(buffer.shape))

    def _refuse_missing(self, missing: list[nn.Parameter]) -> None:
        if missing:
            names = {id(p): fqn for fqn, p in self.module.named_parameters()}
            of_missing = list(dict.fromkeys(names.get(id(p), "those no longer in it") for p in missing))
            raise ModelError(
                f"DDP: the gradients are not reduced, since parameters of the model have no gradient (got none for "
                f"{first_few(of_missing, 3)}); set shardkit.ddp_find_unused_parameters: true, or freeze them; "
                "change and tie modules before prepare, and keep what forward sets in a buffer."
            )

    def _after_backward(self, arrived: list[torch.Tensor]) -> None:
        self.is_first_backward = False
        if self.require_backward_grad_sync:
            self._reduce_beside_reducer(arrived)
        elif not self._is_graph_known:  # of a reducer that was created in the window
            self._kinds = []  # torch has counted these gradients in its static graph: a new reducer is created
        for call in self.at_end_of_backward:
            call()

    def _reduce_beside_reducer(self, arrived: list[torch.Tensor]) -> None:
        """Average the gradients that torch's reducer does not. `arrived`: parameters with a gradient in this
        backward."""
        if self._left is not None:
            take_mean_([p for p in self._left if p.requires_grad], self._may_be_unused)
            return
        managed = [id(parameter) for parameter in arrived if id(parameter) in self._managed]
        left_out = self._left_out(arrived, managed)
        self._missing -= set(managed)
        if not self._is_awaited:
            left_out = set(map(id, self._all))
            if self._section.static_graph:
                self._kinds = []  # as in `_after_backward`
            if self._settings["find_unused_parameters"]:
                self._stop_waiting()
        elif managed:
            self._end_awaited_backward()
        take_mean_([p for p in self._all if p.requires_grad and id(p) in left_out], self._may_be_unused)

    def _left_out(self, arrived: list[torch.Tensor], managed: list[int]) -> set[int]:
        """The parameters, by id, of which torch's reducer has not seen all gradients of a backward that it awaited."""
        left_out = {id(p) for p in self._all} - set(self._managed) if len(arrived) > len(managed) else set()
        if self._section.static_graph:
            return left_out
        # Of modules that reentrant checkpoints have recomputed twice: torch's reducer may be done before the last
        # gradient, which is then added to the mean of the earlier ones, and left on each rank alone.
        return left_out | {one for one, count in Counter(managed).items() if count > 1}

    def _end_awaited_backward(self) -> None:
        """Let torch's reducer end, which waits for parameters that this backward did not reach."""
        self._is_awaited = False
        if not self._is_graph_known:
            self._is_graph_known = True
            reducer: Any = self.reducer
            reducer._delay_all_reduce()
        if self._missing and self._settings["find_unused_parameters"]:  # torch's own end of backward comes first
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_waiting_reducer)
        elif self._missing and not self._may_be_unused:
            self._finish_reducer()
        self._note_buckets()

    def _stop_waiting(self) -> None:
        """Let torch's reducer wait for no backward, and forget which parameters those reached that it did not wait for:
        with `find_unused_parameters` it would take them for used in the next one."""
        reducer: Any = self.reducer
        reducer._reset_state()
        self._is_awaited = self._has_rebuilt_buckets = False

    def _finish_reducer(self) -> None:
        """Let torch's reducer reduce after a backward that did not reach all parameters, such as the loss of one of two
        heads: it would wait for the others, and would refuse the gradients of the next backward of the same forward."""
        reducer: Any = self.reducer
        missing = [p for p in self._all if id(p) in self._missing]
        for parameter in missing:
            reducer._autograd_hook(self._managed[id(parameter)])
        # torch sets zeros where there is no gradient, at the end of backward.
        without = [parameter for parameter in missing if parameter.grad is None]
        torch.autograd.Variable._execution_engine.queue_callback(partial(_drop_gradients, without))

    def _finish_waiting_reducer(self) -> None:
        """The same with `find_unused_parameters`, where the reducer waits for what the output depends on and the loss
        does not: it has only derivatives of the output, or is that of one of two heads."""
        reducer: Any = self.reducer
        try:
            reducer._check_reducer_finalized()
        except RuntimeError:
            for number in [self._managed[id(p)] for p in self._all if id(p) in self._missing]:
                with suppress(RuntimeError):  # the reducer refuses those that it does not wait for
                    reducer._autograd_hook(number)


class ReplicaOfSeveral(Replica):
    """Of a ModuleList, ModuleDict or Sequential. (A `__len__` of other models would make `if model:` an error.)"""

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __len__(self) -> int:
        return len(self.module)


def _leave_out_empty(model: nn.Module) -> None:
    """Keeps torch's reducer from waiting for gradients of parameters without elements, from which some models take
    their device."""
    empty = [name for name, parameter in nn.Module.named_parameters(model) if not parameter.numel()]
    if empty:
        names = (*empty, *(f".{name}" for name in empty))  # torch looks for those of the model itself with a dot
        known: Any = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        model._ddp_params_and_buffers_to_ignore = list(dict.fromkeys((*known, *names)))  # type: ignore[assignment]


def _drop_gradients(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
