"""Finds the largest batch size that fits, by calling a function with decreasing sizes, equal on all ranks."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from shardkit.distributed import accelerators, control, named_barrier
from shardkit.errors import MachineError, UsageError
from shardkit.launch.diagnosis import OUT_OF_MEMORY_SIGNS
from shardkit.log import get_logger
from shardkit.signatures import signature
from shardkit.wording import ranks_text

log = get_logger(__name__)

# How long a rank whose call has failed waits for the others. They end their calls at about the same time, unless they
# wait for this rank in an exchange.
ALONE_S = 120.0
# How long one that is through waits for those that still train.
LONGEST_S = 1800.0


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """A wrapper of the function that supplies its first parameter, the batch size: `starting_batch_size`, then smaller
    ones as long as a rank runs out of memory. Also usable as a decorator.

    `reduce_batch_size_fn(size)` gives the next size, once for each that did not fit; by default 90 % of it. One without
    parameters is called without the size, as Accelerate does. After each call all ranks agree: if one ran out of
    memory, all call the function again, and the results of the others are discarded. So build model, optimizer and
    loaders inside the function, and call `accelerator.free_memory()` first. Use batches of equal size on all ranks: a
    rank that runs out of memory alone, between two collectives of a step, leaves the others waiting in the next one
    until the run ends. Collective.

    Raises MachineError on all ranks where not even the smallest size fits, and, after two minutes, on a rank that ran
    out of memory alone; UsageError where the function has no parameter.
    """
    if function is None:
        return partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    reduce = _of_size(reduce_batch_size_fn or (lambda size: size * 9 // 10))
    if not signature(function).parameters:
        raise UsageError(
            f"find_executable_batch_size: {function.__name__} takes no batch size (got no parameters); make the batch "
            "size its first parameter."
        )

    @wraps(function)
    def called(*arguments: Any, **settings: Any) -> Any:
        size = starting_batch_size
        while size > 0:
            accelerators.collect_garbage()
            result, did_fit = _attempt(function, size, arguments, settings)
            if did_fit:
                return result
            too_large, size = size, reduce(size)
            if size > 0:
                log.info("find_executable_batch_size: a batch of %d does not fit; going on with %d.", too_large, size)
        raise MachineError(
            f"find_executable_batch_size: {function.__name__} runs out of memory with every batch size (got "
            f"{starting_batch_size} to start with); shard more, or recompute activations."
        )

    return called


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether the exception means out of memory, on the device or the host."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(sign in str(exception) for sign in OUT_OF_MEMORY_SIGNS)


def _wait_for_others(size: int, failure: Exception | None) -> None:
    """Returns when the call is over on all ranks. Collective.

    On a rank whose own call has failed, the others are likely to wait for it in the middle of a step: it raises its
    error after `ALONE_S`, and MachineError where that is a lack of memory.
    """
    if failure is None:
        return named_barrier.meet("find_executable_batch_size", LONGEST_S, MachineError)
    try:
        named_barrier.await_all("find_executable_batch_size", ALONE_S)
    except named_barrier.NotMetError as reason:
        if not is_out_of_memory(failure):
            raise failure from None
        raise MachineError(
            f"find_executable_batch_size: out of memory with a batch of {size} on this rank alone, in the middle of a "
            f"step (got: {reason.what}); start with a smaller batch, or give all ranks batches of one size, so that "
            "they run out of memory together."
        ) from failure


def _of_size(reduce: Callable[..., int]) -> Callable[[int], int]:
    """The function, called with the size where it has a parameter."""
    return reduce if signature(reduce).parameters else lambda size: reduce()


def _attempt(
    function: Callable[..., Any], size: int, arguments: tuple[Any, ...], settings: dict[str, Any]
) -> tuple[Any, bool]:
    """(the function's result, whether it fitted on all ranks). Any other error is raised on its rank; the other ranks
    raise UsageError that names it."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = function(size, *arguments, **settings)
        outcome = "fits"
    except Exception as error:
        failure = error
        outcome = "is too large" if is_out_of_memory(error) else "fails"
    _wait_for_others(size, failure)
    outcomes = control.start().decide(outcome, list)
    if "fails" in outcomes:
        if outcome == "fails":
            assert failure is not None
            raise failure
        who = ranks_text([rank for rank, one in enumerate(outcomes) if one == "fails"])
        raise UsageError(f"find_executable_batch_size: {who} failed with a batch of {size}; see the error there.")
    if failure is not None:
        failure.__traceback__ = None  # it holds the tensors of the call
    return result, "is too large" not in outcomes
