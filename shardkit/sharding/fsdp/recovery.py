"""FSDP2's units after a pass that did not end: an exception in forward or backward that the script caught."""

import sys
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from shardkit.sharding.fsdp.internals import forget_gradient, forget_partial_sums, groups_of
from shardkit.sharding.hooks import is_in_backward


def recover_if_broken_off(root: Any) -> None:
    """Called before a forward: resets the units if an exception ended the last forward or backward."""
    if is_in_backward() or root._running:
        return
    if root._training_state != TrainingState.IDLE or root._state_ctx.post_backward_final_callback_queued:
        _recover(root)


def recover_if_raised(state: Any) -> None:
    """Called after a forward: resets the units if it raised; torch's post-forward hook has not run then."""
    if state._training_state == TrainingState.FORWARD:
        _explain(sys.exc_info()[1])
        _recover(state)


def after_forward(root: Any) -> None:
    """Called after each forward of the root, also one that raised: one that was called by another method of the root's
    unit ends neither the pass nor the method."""
    if root._running and not is_in_backward():
        root._training_state, root._state_ctx.iter_forward_root = TrainingState.FORWARD, root
    else:
        recover_if_raised(root)


def _explain(error: BaseException | None) -> None:
    """Replaces torch's text for an input that a forward has changed in place: it names a class of FSDP2's."""
    if isinstance(error, RuntimeError) and "RegisterPostBackwardFunction" in str(error):
        error.args = (
            "forward: the input of a wrapped block is changed in place (got an operation such as x *= 2), and FSDP2 "
            "needs it as it is; write x = x * 2, or inplace=False, or use strategy NO_SHARD.",
        )


def _recover(state: Any) -> None:
    """Resets all units of the model to their state between steps. After a backward, gradients that are not reduced yet
    are dropped; a forward that raised leaves those of the micro-batches before it."""
    context, shared = state._state_ctx, state._comm_ctx
    _join_streams(shared)
    is_backward = context.post_backward_final_callback_queued
    if is_backward:
        state._pass.keeps_graph = state._pass.is_second_due = state._pass.is_second_due_again = False
    for one in context.all_states:
        one._training_state = TrainingState.IDLE
        for group in groups_of(one):
            _wait_for_gather(group)
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            if is_backward:
                _forget_gradients(group)
            group._to_sharded()
    shared.post_forward_order.clear()
    shared.all_gather_state = None
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
    context.manual_backward_finalization_active = None  # read by torch 2.15


def _join_streams(shared: Any) -> None:
    """Makes what comes next on the device wait for what is in flight there: the memory of a gather that is dropped here
    may be used again at once, while another stream still reads it."""
    gathers = [shared.all_gather_copy_in_stream, shared.all_gather_stream]
    streams = [*gathers, shared.reduce_scatter_stream, shared.all_reduce_stream]
    current = shared.device_handle.current_stream()
    for stream in streams:
        current.wait_stream(stream)
    for stream in streams:
        stream.wait_stream(current)


def _forget_gradients(group: Any) -> None:
    """Drops gradients that are not reduced yet, or only within the shard group."""
    forget_partial_sums(group)
    for parameter in group.fsdp_params:
        forget_gradient(parameter)
    if hasattr(group, "_set_unsharded_grad_dtypes"):  # from torch 2.15 on
        group._set_unsharded_grad_dtypes(defer_upcast=False)
        group._post_backward_pending = False


def _wait_for_gather(group: Any) -> None:
    """Waits for an all-gather in flight: it was started on every rank."""
    result, group._all_gather_result = group._all_gather_result, None
    work = getattr(result, "all_gather_work", None)
    if work is not None and hasattr(work, "wait"):
        work.wait()
