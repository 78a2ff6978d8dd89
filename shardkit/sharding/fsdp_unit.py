"""FSDP2's units, made to behave like plain modules wherever a loop looks at them or calls them.

torch's own behaviour suits one loop: forward, backward, step. Here, for every loop:

- After any forward the module's parameters are the sharded ones. torch leaves the root (under strategies 2 and 5 every
  unit) gathered until a backward comes; whoever looks at the parameters meanwhile, or runs a forward after they have
  changed, gets stale ones. Here gathered values that a backward may need are kept aside ("parked"), and used by
  backward only.
- A unit may be entered through any of its modules: `model.embed(x)`, `model.loss(x)`, `peft_model.generate(...)`.
- Gradients are reduced whatever forward returned: torch relies on hooks on the output's tensors.
- A gradient of a gradient may be taken: parameters stay until the last backward.
- What was gathered and reduced is recorded, so that ranks which used different modules are found (`trace.py`).

This is the only file that uses private parts of FSDP2. Read and tested on torch 2.11, 2.13 and 2.15; a newer torch is
warned of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, update_wrapper
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.sharding.hooks import hook_weakly, is_in_backward
from shardkit.sharding.outputs import LeftOnModules, may_be_differentiated, without_views
from shardkit.sharding.trace import Trace, attach

# The newest torch whose private parts were read; `make test-newest` runs the tests on it.
NEWEST = (2, 15)

log = get_logger(__name__)


@cache
def warn_of_newer(version: str) -> None:
    """Says, once, that nobody has tried this version of torch."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) > NEWEST:
        log.warning(
            "FSDP: torch %s is newer than any that shardkit was tested with (2.11 to %d.%d); compare a short run with "
            "strategy NO_SHARD, or use torch %d.%d.",
            version,
            *NEWEST,
            *NEWEST,
        )


@dataclass
class _Pass:
    """What all units of a model share about the backward under way."""

    trace: Trace = field(default_factory=Trace)
    keeps_graph: bool = False
    """This backward builds a graph of itself (create_graph=True)."""
    is_second_due: bool = False
    """A graph of gradients exists: nothing is freed or reduced before the backward that uses it is over."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Called at the end of each backward, when the units' gradients are reduced."""


class UnitState(FSDPState):
    """FSDP2's state of a unit. Made of torch's own by `adopt`; the hooks that torch registered before stay in place."""

    _pass: _Pass

    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self._pass.keeps_graph = True
        return super()._pre_backward(grad)

    def _gradient_arrived(self, _: torch.Tensor) -> None:
        self._register_root_post_backward_final_callback()

    def _root_post_backward_final_callback(self) -> None:
        if self._pass.keeps_graph:
            self._pass.keeps_graph, self._pass.is_second_due = False, True
            self._begin_anew()
            return
        self._pass.is_second_due = False
        super()._root_post_backward_final_callback()
        for call in self._pass.at_end:
            call()

    def _begin_anew(self) -> None:
        """The pass that built the graph of gradients is over; the parameters stay gathered for the next one."""
        for state in self._state_ctx.all_states:
            state._training_state = TrainingState.IDLE
            for group in groups_of(state):
                group._training_state = TrainingState.IDLE
                if any(p._unsharded_param.grad is not None for p in group.fsdp_params if is_gathered_once(p)):
                    raise UsageError(
                        "backward: create_graph=True leaves gradients with a graph in the parameters, which FSDP "
                        "cannot reduce; use torch.autograd.grad(..., inputs, create_graph=True)."
                    )
        self._state_ctx.post_backward_final_callback_queued = False


class UnitGroup(FSDPParamGroup):
    """FSDP2's parameters of a unit. Made of torch's own by `adopt`."""

    _state: UnitState
    _number: int
    _is_parked: bool = False
    _on_gathered: Callable[[FSDPParam], None]
    _left: LeftOnModules | None = None

    # ---- forward ----

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._training_state != TrainingState.FORWARD:
            self._to_sharded()  # what an earlier forward left may be stale by now
            self._refuse_foreign_values()
            if torch.is_inference_mode_enabled():
                self._gather_for_inference()
        return super().pre_forward(module, args, kwargs)

    def _refuse_foreign_values(self) -> None:
        """What the gathered parameters would silently take the place of."""
        for parameter in self.fsdp_params:
            info = parameter._module_info
            if info.module._parameters.get(info.param_name) is not parameter.sharded_param:
                raise UsageError(
                    f"forward: {parameter._param_fqn or info.param_name} is not what prepare put there (got "
                    "torch.func.functional_call, or a new parameter, which puts other values in the place of sharded "
                    "parameters); set values by p.data = ..., or use strategy NO_SHARD."
                )

    def post_forward(self, module: Any, input: Any, output: Any) -> Any:
        output = super().post_forward(module, input, output)
        if is_in_backward():
            return output
        if torch.is_grad_enabled() and (self._is_trained() or may_be_differentiated(output)):
            if self._left is not None and (left := self._left.tensors()):
                self._state._register_pre_backward_hook(left)
            if self.is_unsharded:
                self._park()
        else:
            self._to_sharded()
        return output

    def _is_trained(self) -> bool:
        return any(parameter.sharded_param.requires_grad for parameter in self.fsdp_params)

    def _gather_for_inference(self) -> None:
        """torch makes the gathered parameters once, at the first forward: ones made in inference mode never train."""
        with torch.inference_mode(False), torch.no_grad():
            self.unshard()
            self.wait_for_unshard()

    # ---- gathering ----

    def unshard(self, async_op: bool = False) -> None:
        if self._is_parked and self._training_state == TrainingState.PRE_BACKWARD:
            return
        self._drop_parked()
        if self._all_gather_result is None and not self.is_unsharded:
            self._state._pass.trace.add(self._number)
        super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        if self._is_parked:
            self._is_parked = False
            self._to_unsharded()
            return
        super().wait_for_unshard()
        if self.is_unsharded:
            for parameter in self.fsdp_params:
                self._on_gathered(parameter)

    def _park(self) -> None:
        """Keep the gathered values for backward, and show the sharded parameters meanwhile."""
        for parameter in self.fsdp_params:
            parameter._setattr_on_modules(parameter.sharded_param)
            parameter.sharded_state = ShardedState.SHARDED
        self._sharded_state = ShardedState.SHARDED
        self._is_parked = True

    def _drop_parked(self) -> None:
        if self._is_parked:
            self._is_parked = False
            for parameter in self.fsdp_params:
                parameter.free_unsharded_param()

    def _to_sharded(self) -> None:
        self._drop_parked()
        super()._to_sharded()

    # ---- backward ----

    def post_backward(self, *unused: Any) -> None:
        if torch.is_grad_enabled() or self._state._pass.is_second_due:
            return  # a later backward still needs the parameters; its end calls this again
        if self.reduce_grads and not getattr(self, "reduce_scatter_unused_params", False):
            self._state._pass.trace.add(self._number, *map(_has_gradient, self.fsdp_params))
        super().post_backward()

    def _init_mp_dtypes(self) -> None:
        """A unit that is frozen whole may be trained later; torch takes dtypes from trainable parameters alone."""
        super()._init_mp_dtypes()
        if getattr(self, "_orig_dtype", self) is None and self.fsdp_params:  # from torch 2.15 on there is none
            first = next((p for p in self.fsdp_params if p.orig_dtype.is_floating_point), self.fsdp_params[0])
            self._orig_dtype, self._reduce_dtype = first.orig_dtype, first.reduce_dtype


def adopt(model: nn.Module, on_gathered: Callable[[FSDPParam], None] = lambda parameter: None) -> Trace:
    """Let the units of a sharded model behave as this file says; what they will have done.

    `on_gathered` is called for each parameter when it is gathered for the first time.
    """
    warn_of_newer(torch.__version__)
    shared = _Pass()
    for number, state in enumerate(states_of(model)):
        state.__class__ = UnitState
        state._pass = shared
        for group in groups_of(state):
            group.__class__ = UnitGroup
            group._state, group._number = state, number
            group._on_gathered = _Once(state, on_gathered)
    attach(model, shared.trace)
    return shared.trace


class _Once:
    """Calls a function with each parameter that it has not seen, and has its gradient end in a reduction."""

    def __init__(self, state: UnitState, then: Callable[[FSDPParam], None]) -> None:
        self._state, self._then = state, then
        self._seen: set[int] = set()

    def __call__(self, parameter: FSDPParam) -> None:
        if id(parameter) in self._seen:
            return
        self._seen.add(id(parameter))
        gathered = parameter._unsharded_param
        if gathered.is_floating_point() or gathered.is_complex():
            hook_weakly(gathered, self._state._gradient_arrived)
        self._then(parameter)


def finish(model: nn.Module, compiled: Iterable[nn.Module] = ()) -> None:
    """The last thing that is done to a sharded model: its root is known, and its units can be entered anywhere.

    torch takes the first unit that runs forward for the root. Nothing is changed inside of `compiled` modules.
    """
    root = _root_of(model)
    root._lazy_init()
    model.register_forward_pre_hook(lambda module, args: _recover_if_broken_off(root), prepend=True)
    model.register_forward_hook(lambda module, args, output: _recover_if_raised(root), always_call=True)
    for state in states_of(model):
        for group in groups_of(state):
            if group._reshard_after_forward:
                group._left = LeftOnModules([*state._modules, *_modules_of_unit(state)])
    inside_compiled = {id(inner) for module in compiled for inner in module.modules()}
    for state in states_of(model):
        for module in _modules_of_unit(state):
            if id(module) not in inside_compiled and not isinstance(module.__dict__.get("forward"), _Entry):
                module.forward = _Entry(module, state)


def enter_by(model: nn.Module, name: str) -> None:
    """Let a method of the model enter its unit, as forward does: for methods that use the model's own parameters."""
    (state,) = [one for one in states_of(model) if model in one._modules]
    if groups_of(state) and not isinstance(getattr(model, name), _Entry):
        setattr(model, name, _Entry(model, state, name))


class _Entry:
    """A method of a module inside a unit, its forward above all. It enters the unit where nothing around it has: a
    call such as `model.embed(x)` finds the module's parameters gathered, and its gradients are reduced."""

    def __init__(self, module: nn.Module, state: UnitState, name: str = "forward") -> None:
        self._module, self._state, self._name, self._forward = module, state, name, getattr(module, name)
        self._group = groups_of(state)[0]
        update_wrapper(self, self._forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._group._sharded_state is ShardedState.UNSHARDED:
            return self._forward(*args, **kwargs)
        args, kwargs = self._state._pre_forward(self._module, args, kwargs)
        try:
            output = without_views(self._forward(*args, **kwargs))
            return self._state._post_forward(self._module, args, output)
        finally:
            _recover_if_raised(self._state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is no part of the unit: it has the method of its class."""
        copied = memo.get(id(self._module))
        return self if copied is None else MethodType(getattr(type(self._module), self._name), copied)


def _modules_of_unit(state: Any) -> Iterator[nn.Module]:
    """The modules below a unit's own, without those of units inside it, that have parameters of the unit."""
    managed = {id(p.sharded_param) for group in groups_of(state) for p in group.fsdp_params}

    def below(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, FSDPModule):
                continue
            if any(id(parameter) in managed for parameter in child.parameters()):
                yield child
            yield from below(child)

    heads: tuple[nn.Module, ...] = state._modules if managed else ()
    return iter({id(module): module for head in heads for module in below(head)}.values())


def _recover_if_broken_off(root: Any) -> None:
    """Before a forward: a pass that an exception ended, which the script caught, has left the units in the middle."""
    if is_in_backward():
        return
    if root._training_state != TrainingState.IDLE or root._state_ctx.post_backward_final_callback_queued:
        _recover(root)


def _recover_if_raised(state: Any) -> None:
    """After a forward: torch's own hook has not run where the forward raised."""
    if state._training_state == TrainingState.FORWARD:
        _recover(state)


def _recover(state: Any) -> None:
    """All units of the model as before the pass that was broken off; its gradients are lost, as its results are."""
    context, shared = state._state_ctx, state._comm_ctx
    for one in context.all_states:
        one._training_state = TrainingState.IDLE
        for group in groups_of(one):
            _wait_for_gather(group)
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            _forget_gradients(group)
            group._to_sharded()
    shared.post_forward_order.clear()
    shared.all_gather_state = None
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    context.manual_backward_finalization_active = None  # read by torch 2.15
    state._pass.keeps_graph = state._pass.is_second_due = False


def _forget_gradients(group: Any) -> None:
    """Those that are not reduced yet, or reduced in part."""
    group._partial_reduce_output = None
    for parameter in group.fsdp_params:
        if is_gathered_once(parameter):
            parameter._unsharded_param.grad = None
        if "unsharded_accumulated_grad" in vars(parameter):  # up to torch 2.14, beside the gradient itself
            parameter.unsharded_accumulated_grad = None
    if hasattr(group, "_set_unsharded_grad_dtypes"):  # from torch 2.15 on
        group._set_unsharded_grad_dtypes(defer_upcast=False)
        group._partial_reduce_output_layout.clear()
        group._post_backward_pending = False


def _wait_for_gather(group: Any) -> None:
    """A gather that was begun ends on every rank, also where nobody waits for its values."""
    result, group._all_gather_result = group._all_gather_result, None
    work = getattr(result, "all_gather_work", None)
    if work is not None and hasattr(work, "wait"):
        work.wait()


def at_end_of_backward(model: nn.Module, parameters: Iterable[nn.Parameter], call: Callable[[], None]) -> None:
    """Call this at the end of each backward through the model or one of these parameters, which are in no unit."""
    root = _root_of(model)
    root._pass.at_end.append(call)
    for parameter in parameters:
        hook_weakly(parameter, root._gradient_arrived)


def _root_of(model: nn.Module) -> Any:
    return model._get_fsdp_state()  # type: ignore[operator]


def states_of(model: nn.Module) -> list[Any]:
    """The states of all units, each once, the outer before the inner."""
    found = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list(dict.fromkeys(found))


def groups_of(state: Any) -> list[Any]:
    """The parameter groups of a unit: one, or none where it manages nothing. (Before torch 2.13: another attribute.)"""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def groups_of_model(model: nn.Module) -> list[Any]:
    """The parameter groups of all units; none of a model that is not sharded."""
    return [group for state in states_of(model) for group in groups_of(state)]


def parameters_of(model: nn.Module) -> Iterator[FSDPParam]:
    """What FSDP2 knows of each parameter that it manages."""
    for group in groups_of_model(model):
        yield from group.fsdp_params


def gather_by(parameter: FSDPParam, around: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From now on the parameter is gathered as the tensor that `around` puts around this rank's part says, by torch's
    `fsdp_pre_all_gather` and `fsdp_post_all_gather`."""
    sharded: Any = parameter.sharded_param
    sharded._local_tensor = around(sharded._local_tensor)
    parameter._init_extensions()


def is_gathered_once(parameter: FSDPParam) -> bool:
    """Whether its gathered form exists; the memory behind it may be freed."""
    return hasattr(parameter, "_unsharded_param")


def _has_gradient(parameter: FSDPParam) -> bool:
    if not is_gathered_once(parameter):
        return False
    return parameter._unsharded_param.grad is not None or parameter.unsharded_accumulated_grad is not None
