"""Steps of optimizers with sharded parameters, with torch's own kernels on plain tensors.

    stepper_of(optimizer, operations).step()

Elementwise optimizers (Adam, SGD, ...) work on this rank's local tensors (`local_step.py`). Muon and Adafactor need
whole matrices: of Muon's, each is orthogonalized by one rank (`muon_step.py`); for Adafactor they are gathered on all
(`whole_step.py`). Any other optimizer runs unchanged, on DTensors (`plain_step.py`).

Where an optimizer keeps its state in host memory, a step copies it to the device and back (`host_state.py`).

Outside of the step the param groups hold the model's parameters, and the state is sharded as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardkit.distributed.host_memory import keeps_state_there
from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import UsageError
from shardkit.optim.host_state import StepInChunks, StepWithState
from shardkit.optim.kernels import ELEMENTWISE, choose_kernels, kind_of, parameters_of
from shardkit.optim.local_step import LocalStep
from shardkit.optim.muon_step import MuonStep, can_divide
from shardkit.optim.plain_step import Operations, PlainStep, ShardedStep, Stepper
from shardkit.optim.whole_step import WholeStep

# Each update needs one whole tensor, and no other.
WHOLE_TENSORS = ("torch.optim.Adafactor", "torch.optim.Muon", "transformers.optimization.Adafactor")
# They exchange parameters between ranks: of different shards they would make a mix.
OF_REPLICAS = (
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer",
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer",
)


def stepper_of(optimizer: torch.optim.Optimizer, operations: Callable[[], Operations] | None = None) -> Stepper:
    """The stepper for this optimizer and its current parameters; `operations`: what fills the gaps of DTensor where it
    steps on these. UsageError where it cannot step on its parameters."""
    is_sharded = any(is_dtensor(p) for p in parameters_of(optimizer))
    refuse_unfit(optimizer)
    choose_kernels(optimizer)
    is_elementwise = kind_of(optimizer) in ELEMENTWISE
    if is_sharded and is_elementwise:
        return LocalStep(optimizer)
    if not keeps_state_there(optimizer):
        return _stepper_of(optimizer, is_sharded, operations)
    if is_elementwise:
        return StepInChunks(optimizer)
    return StepWithState(optimizer, _stepper_of(optimizer, is_sharded, operations))


def _stepper_of(
    optimizer: torch.optim.Optimizer, is_sharded: bool, operations: Callable[[], Operations] | None
) -> Stepper:
    """Of an optimizer that has its state where its parameters are."""
    if is_sharded and can_divide(optimizer):
        return MuonStep(optimizer)
    if is_sharded and needs_whole_tensors(optimizer):
        return WholeStep(optimizer)
    if is_sharded and operations is not None:
        return ShardedStep(optimizer, operations)
    return PlainStep(optimizer)


def needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step needs whole parameters, of which its state may have rows and columns."""
    kind = kind_of(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}" in WHOLE_TENSORS


def refuse_unfit(optimizer: torch.optim.Optimizer) -> None:
    """UsageError where the optimizer cannot step on sharded parameters in any way, or its state cannot be offloaded."""
    if keeps_state_there(optimizer) and not (kind_of(optimizer) in ELEMENTWISE or needs_whole_tensors(optimizer)):
        raise UsageError(
            "prepare: shardkit.offload_optimizer is for torch's elementwise optimizers, Muon and Adafactor (got "
            f"{kind_of(optimizer).__name__}, which may keep state elsewhere); use one of these, or fsdp_offload_params."
        )
    has_parts = any(is_dtensor(p) and p.device_mesh.size() > 1 for p in parameters_of(optimizer))
    if has_parts and isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "prepare: LBFGS treats all parameters as one vector, which no rank holds (got sharded parameters); use "
            "strategy NO_SHARD, or another optimizer."
        )
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in kind_of(optimizer).__mro__}
    if has_parts and kinds & set(OF_REPLICAS):
        raise UsageError(
            f"prepare: {kind_of(optimizer).__name__} exchanges parameters between ranks as if each held all of them "
            "whole (got sharded parameters); give its inner optimizer, whose state is sharded as the parameters are, "
            "or use strategy NO_SHARD."
        )
