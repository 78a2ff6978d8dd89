"""FSDP2 units that behave like plain modules in any training loop.

torch's units are made for one loop: forward, backward, step. What differs here:

- After any forward the module's parameters are the sharded ones. torch leaves the root (under strategies 2 and 5 every
  unit) gathered until a backward comes; code that reads the parameters in between, or runs a forward after they have
  changed, gets stale values. Here the gathered values that a backward may need are kept separately ("parked"), and
  only backward uses them.
- A unit may be entered through any of its modules: `model.embed(x)`, `peft_model.generate(...)` (`entries.py`).
- Gradients are reduced for any output of forward, also one without tensors; torch relies on hooks on the output's
  tensors.
- Second-order gradients work: parameters stay gathered until the last backward.
- What was gathered and reduced is recorded, so that ranks that used different modules are detected (`trace.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from shardkit.distributed.tensors import outside_inference_mode
from shardkit.errors import ModelError, UsageError
from shardkit.model import packed
from shardkit.sharding.activation import gathering
from shardkit.sharding.fsdp import autograd_grad, entries, messages, unused_parameters, written
from shardkit.sharding.fsdp.internals import (
    groups_of,
    has_gradient,
    is_gathered_once,
    modules_below,
    parameters_of,
    refuse_transforms,
    root_of,
    states_of,
    warn_of_newer,
)
from shardkit.sharding.fsdp.outputs import LeftOnModules, cast, in_objects, may_be_differentiated
from shardkit.sharding.fsdp.recovery import after_forward, recover_if_broken_off
from shardkit.sharding.fsdp.trace import Trace, set_trace
from shardkit.sharding.hooks import accumulates, hook_weakly, is_in_backward, track_autograd
from shardkit.sharding.offloaded_gradients import Turns


@dataclass
class _Pass:
    """State of the current backward, shared by all units of a model."""

    trace: Trace = field(default_factory=Trace)
    keeps_graph: bool = False
    """This backward builds a graph of itself (create_graph=True)."""
    is_second_due: bool = False
    """A graph of gradients exists, which refers to gathered parameters: nothing is freed or reduced until the backward
    that uses it has ended."""
    is_second_due_again: bool = False
    """A backward ends before that one, or keeps the graph for another (retain_graph=True): gradients are reduced,
    nothing is freed."""
    is_unsharded: bool = False
    """Inside `unsharded`: every unit keeps its gathered values from forward to forward."""
    before_forward: list[Callable[[], None]] = field(default_factory=list)
    """Called before each forward, at the first unit that it enters."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called at the end of each backward that leaves gradients in parameters, when those of the units are reduced."""


class UnitState(FSDPState):
    """FSDP2's state of a unit. `adopt` changes the class of torch's object; hooks that torch has registered stay."""

    _pass: _Pass
    _running: int = 0
    """How many methods of the unit's modules (usually forwards) run, one inside the other. A forward of the unit that
    one of them calls, such as `self(x)` in a method beside forward, is a part of it: gathers, frees and hooks
    nothing."""

    def _root_pre_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._state_ctx.iter_forward_root is None and not (is_in_backward() or self._pass.is_unsharded):
            for call in self._pass.before_forward:
                call()
        if args or kwargs:
            return super()._root_pre_forward(module, args, kwargs)
        super()._root_pre_forward(module, (None,), kwargs)  # torch 2.11 fails at no arguments on a GPU
        return args, kwargs

    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._pass.keeps_graph = True
        return super()._pre_backward(grad)

    def _cast_output_dtype(self, output: Any) -> Any:  # torch 2.11 has no such method, and casts by itself
        return cast(output, self._mp_policy.output_dtype)

    def _register_pre_backward_hook(self, output: Any) -> Any:
        return output if self._running else super()._register_pre_backward_hook(output)

    def _gradient_arrived(self, _: torch.Tensor) -> None:
        self._register_root_post_backward_final_callback()

    def _root_post_backward_final_callback(self) -> None:
        if self._pass.keeps_graph:
            self._pass.keeps_graph, self._pass.is_second_due = False, True
            self._begin_second_backward()
            return
        is_kept = torch._C._autograd._get_current_graph_task_keep_graph() or autograd_grad.is_graph_waiting()
        is_due_again = self._pass.is_second_due and is_kept
        self._pass.is_second_due, self._pass.is_second_due_again = False, is_due_again
        super()._root_post_backward_final_callback()
        self._pass.is_second_due, self._pass.is_second_due_again = is_due_again, False
        for call in self._pass.at_end if accumulates() else ():
            call()

    def _begin_second_backward(self) -> None:
        """The backward that built the graph of gradients has ended; parameters stay gathered for the next one."""
        for state in self._state_ctx.all_states:
            goes_on = state._running  # the backward was one of torch.autograd.grad in a method of the unit
            state._training_state = TrainingState.FORWARD if goes_on else TrainingState.IDLE
            for group in groups_of(state):
                group._training_state = state._training_state
                if group.is_unsharded and not goes_on:
                    group._park()
                if any(p._unsharded_param.grad is not None for p in group.fsdp_params if is_gathered_once(p)):
                    raise UsageError(
                        "backward: create_graph=True leaves gradients with a graph in the parameters, which FSDP "
                        "cannot reduce; use torch.autograd.grad(..., inputs, create_graph=True)."
                    )
        self._state_ctx.post_backward_final_callback_queued = False


class UnitGroup(FSDPParamGroup):
    """FSDP2's parameter group of a unit. `adopt` changes the class of torch's object."""

    _state: UnitState
    _number: int
    _is_parked: bool = False
    _used: tuple[bool, ...] = ()  # for each parameter, whether the last backward reached it
    _reached: list[bool] | None = None  # as `unused_parameters` says
    _on_gathered: Callable[[FSDPParam], None]
    _writes: written.Writes
    _changed_shards: written.ChangedShards | None = None  # while `keep` holds
    _left: LeftOnModules | None = None
    _turns: Turns | None = None  # of the model, where its gradients are in host memory

    # ---- forward ----

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._state._running and self.is_unsharded:
            return args, kwargs
        if self._training_state != TrainingState.FORWARD:
            if self._changed_shards is None:
                self._to_sharded()  # what an earlier forward left may be stale by now
            else:
                self._changed_shards.refuse()
            written.refuse_replaced(self.fsdp_params)
            refuse_transforms()
            if torch.is_inference_mode_enabled():
                self._gather_outside_inference_mode()
        return super().pre_forward(module, args, kwargs)

    def post_forward(self, module: Any, input: Any, output: Any) -> Any:
        if self._state._running:
            return output
        if self.is_unsharded and not is_in_backward():
            self._writes.refuse()
        output = super().post_forward(module, input, output)
        if is_in_backward():
            return output
        if torch.is_grad_enabled() and (self._is_trained() or may_be_differentiated(output)):
            if self._left is not None and (left := [*self._left.tensors(), *in_objects(output)]):
                self._state._register_pre_backward_hook(left)
            if self.is_unsharded:
                self._park()
        else:
            self._to_sharded()
            self._wait_for_copies()
        return output

    def _wait_for_copies(self) -> None:
        """After a forward without a backward, waits until its units' offloaded values are on the device: a script may
        write others into host memory now, such as weights after averaged ones. (torch waits at the end of backward.)"""
        is_outermost = self._state._state_ctx.iter_forward_root is self._state
        if is_outermost and any(parameter.offload_to_cpu for parameter in self.fsdp_params):
            self.comm_ctx.all_gather_copy_in_stream.synchronize()

    def _is_trained(self) -> bool:
        return any(parameter.sharded_param.requires_grad for parameter in self.fsdp_params)

    def _gather_outside_inference_mode(self) -> None:
        """torch makes the gathered parameters once, at the first forward: ones made in inference mode never train."""
        with outside_inference_mode():
            self.unshard()
            self.wait_for_unshard()

    # ---- gathering ----

    def unshard(self, async_op: bool = False) -> None:
        is_kept = self._training_state == TrainingState.PRE_BACKWARD or self._changed_shards is not None
        if self._is_parked and is_kept:
            return
        self._drop_parked()
        is_alone = self._all_gather_process_group.size() == 1  # holds its parameters whole: a gather meets no rank
        if self._all_gather_result is None and not (self.is_unsharded or is_alone):
            self._state._pass.trace.add(self._number, device=self.device)
        with gathering():
            super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        if self._is_parked:
            self.show_kept()
            return
        was_unsharded = self.is_unsharded
        with gathering():
            super().wait_for_unshard()
        if self.is_unsharded:
            for parameter in self.fsdp_params:
                self._on_gathered(parameter)
            if not was_unsharded:
                self._writes.note_gathered()

    def keep(self) -> None:
        """Gathers the values for all forwards until `release`."""
        self._to_sharded()
        self._gather_outside_inference_mode()
        self._changed_shards = written.ChangedShards(self.fsdp_params)
        self._park()

    def refuse_stale(self) -> None:
        """UsageError if the shards have other values than those that `keep` has gathered."""
        if self._changed_shards is not None:
            self._changed_shards.refuse(compares=True)

    def release(self) -> None:
        self._changed_shards = None
        self._to_sharded()

    def _park(self) -> None:
        """Keeps the gathered values for backward; the module shows its sharded parameters until then."""
        for parameter in self.fsdp_params:
            parameter._setattr_on_modules(parameter.sharded_param)
            parameter.sharded_state = ShardedState.SHARDED
        self._sharded_state = ShardedState.SHARDED
        self._is_parked = True

    def is_kept_for_second_backward(self) -> bool:
        return self._is_parked and self._state._pass.is_second_due

    def show_kept(self) -> None:
        self._is_parked = False
        self._to_unsharded()

    def hide_kept(self) -> None:
        if self.is_unsharded:
            self._park()

    def _drop_parked(self) -> None:
        if self._is_parked:
            self._is_parked = False
            for parameter in self.fsdp_params:
                parameter.free_unsharded_param()

    def _to_sharded(self) -> None:
        is_due = self._state._pass.is_second_due or self._state._pass.is_second_due_again
        if is_due or self._changed_shards is not None:
            if self.is_unsharded:
                self._park()
            return
        self._drop_parked()
        super()._to_sharded()

    # ---- backward ----

    def post_backward(self, *unused: Any) -> None:
        is_inside = self._state._running and not accumulates()  # torch.autograd.grad in a method of the unit
        if torch.is_grad_enabled() or self._state._pass.is_second_due or is_inside:
            return  # a later backward still needs the parameters; its end calls this again
        if not self.reduce_grads and not any(map(is_gathered_once, self.fsdp_params)):
            return  # no forward has reached the unit, and torch would look for gradients of its gathered parameters
        if self.reduce_grads and getattr(self, "reduce_scatter_unused_params", False):
            self._reached = unused_parameters.reached(self, self._reached)
        elif self.reduce_grads:
            used = tuple(map(has_gradient, self.fsdp_params))
            self._state._pass.trace.add(self._number, *used, device=self.device)
            self._note_used(used)
        with self._turns.of_fsdp(self.fsdp_params) if self._turns else nullcontext():
            super().post_backward()
        self._end_backward_of_unit()

    def _end_backward_of_unit(self) -> None:
        """Lets a forward that comes later in this backward (of a reversible network, or a reentrant checkpoint of a
        module that was called twice) be entered like any other: torch would gather the parameters for it, and never
        reduce the gradients that its own backward leaves in them."""
        is_over = all(group._training_state == TrainingState.POST_BACKWARD for group in groups_of(self._state))
        if is_over and self._state._training_state == TrainingState.PRE_BACKWARD:
            self._state._training_state = TrainingState.IDLE

    def _note_used(self, used: tuple[bool, ...]) -> None:
        """Raises ModelError if torch would add gradients of other parameters to those that it has not yet reduced
        between the replicas of a hybrid strategy: it adds the buffers of two backwards, whatever is in them."""
        if any(used) and self._partial_reduce_output is not None and used != self._used:
            raise ModelError(
                "backward: two backwards of a window reached different parameters of a unit, whose gradients are "
                "reduced between replicas at the end of the window; set shardkit.ddp_find_unused_parameters: true, or "
                "use all of the unit's parameters in each backward."
            )
        self._used = used if any(used) else self._used

    def _init_mp_dtypes(self) -> None:
        """torch takes the dtypes from trainable parameters only, but a wholly frozen unit may be trained later."""
        super()._init_mp_dtypes()
        for parameter in self.fsdp_params:
            if packed.holds_bits(parameter.sharded_param):
                parameter.param_dtype = None  # gathered as they are
        if getattr(self, "_orig_dtype", self) is None and self.fsdp_params:  # from torch 2.15 on there is none
            first = next((p for p in self.fsdp_params if p.orig_dtype.is_floating_point), self.fsdp_params[0])
            self._orig_dtype, self._reduce_dtype = first.orig_dtype, first.reduce_dtype


def adopt(model: nn.Module, on_gathered: Callable[[FSDPParam], None]) -> Trace:
    """Makes the units of a sharded model behave as described above; returns the trace of what they gather and reduce.

    `on_gathered` is called for each parameter when it is gathered for the first time.
    """
    warn_of_newer(torch.__version__)
    track_autograd()
    shared = _Pass()
    offloaded = [parameter for parameter in parameters_of(model) if parameter.offload_to_cpu]
    turns = Turns(offloaded) if offloaded else None
    if offloaded:
        # The backward of a term on the weights (`sum(row.norm() for row in weight)`) meets the other ranks on the CPU,
        # where autograd has a thread of its own beside the device's: two threads do so in another order on each rank.
        torch.autograd.set_multithreading_enabled(False)
    for number, state in enumerate(states_of(model)):
        state.__class__ = UnitState
        state._pass = shared
        for group in groups_of(state):
            group.__class__ = UnitGroup
            group._state, group._number, group._turns = state, number, turns
            group._on_gathered = _Once(state, on_gathered)
            group._writes = written.Writes(group.fsdp_params)
            messages.take_all_dtypes(group)
    set_trace(model, shared.trace)
    return shared.trace


class _Once:
    """Calls a function with each parameter it has not seen yet, and makes sure that its gradient is reduced."""

    def __init__(self, state: UnitState, then: Callable[[FSDPParam], None]) -> None:
        self._state, self._then = state, then
        self._seen: set[int] = set()

    def __call__(self, parameter: FSDPParam) -> None:
        if id(parameter) in self._seen:
            return
        self._seen.add(id(parameter))
        gathered = parameter._unsharded_param
        if gathered.is_floating_point() or gathered.is_complex():
            hook_weakly(gathered, UnitState._gradient_arrived, self._state)
            autograd_grad.redirect(parameter)
        self._then(parameter)


def finish(model: nn.Module, compiled: Iterable[nn.Module] = ()) -> None:
    """The last step of sharding a model: sets its root, and lets its units be entered through any of their modules.

    torch takes the first unit that runs forward as the root. Modules inside `compiled` ones are not changed.
    """
    root = root_of(model)
    root._lazy_init()
    model.register_forward_pre_hook(lambda module, args: recover_if_broken_off(root), prepend=True)
    model.register_forward_hook(lambda module, args, output: after_forward(root), always_call=True)
    for state in states_of(model):
        for group in groups_of(state):
            if group._reshard_after_forward:
                group._left = LeftOnModules([*state._modules, *modules_below(state)])
    inside_compiled = {id(inner) for module in compiled for inner in module.modules()}
    for state in states_of(model):
        for module in entries.entrances(state):
            if id(module) not in inside_compiled:
                entries.enter_by(state, module, "forward")


def before_forward(model: nn.Module) -> list[Callable[[], None]]:
    """What is called before each forward, whichever unit it enters first, before parameters are gathered."""
    found: list[Callable[[], None]] = root_of(model)._pass.before_forward
    return found


def at_end_of_backward(model: nn.Module, parameters: Iterable[nn.Parameter], call: Callable[[], None]) -> None:
    """Calls `call` at the end of each backward through the model or through `parameters`, which are in no unit."""
    root = root_of(model)
    root._pass.at_end.append(call)
    for parameter in parameters:
        hook_weakly(parameter, UnitState._gradient_arrived, root)
