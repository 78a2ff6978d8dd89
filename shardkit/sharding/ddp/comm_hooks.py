"""DDP's communication hooks that compress gradients, set by `shardkit.ddp`.

fp16 and bf16 hooks lose precision. PowerSGD sends a low-rank approximation, and adds its error to the gradients of the
next step. The errors are not in checkpoints: after a load PowerSGD starts without them, and sends whole gradients
for `power_sgd_start_step` steps again (`forget_errors`).
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from shardkit.config.schema import DdpConfig
from shardkit.sharding.precision import DTYPES, reduce_dtype


def register(model: DistributedDataParallel, section: DdpConfig) -> None:
    """Register the configured hook on the model."""
    if section.comm_hook in DTYPES:
        model.register_comm_hook(DTYPES[section.comm_hook], mean_sent_in)
        return
    hook: Any = powerSGD_hook
    if section.comm_wrapper == "fp16":
        hook = default_hooks.fp16_compress_wrapper(hook)
    elif section.comm_wrapper == "bf16":
        hook = default_hooks.bf16_compress_wrapper(hook)
        hook.__name__ = "power_sgd_in_bf16"  # without NCCL, DDP rejects the wrapper by its name
    state = PowerSGDState(
        process_group=None,
        matrix_approximation_rank=section.power_sgd_rank,
        start_powerSGD_iter=section.power_sgd_start_step,
    )
    model.register_comm_hook(state, hook)
    vars(model)["_shardkit_power_sgd"] = state


def forget_errors(model: nn.Module) -> bool:
    """Reset PowerSGD's state, since its errors belong to other weights. Returns whether the model uses PowerSGD."""
    state = vars(model).get("_shardkit_power_sgd")
    if state is None:
        return False
    fresh = PowerSGDState(None, state.matrix_approximation_rank, state.start_powerSGD_iter)
    for name in PowerSGDState.__slots__:
        setattr(state, name, getattr(fresh, name))
    return True


def mean_sent_in(dtype, bucket):
    """A communication hook for DDP: the mean of a bucket over all ranks, communicated and summed in `dtype`.

    It has no annotations: DDP compares them with types, and with `from __future__ import annotations` they are strings.
    """
    buffer = bucket.buffer()
    sent = buffer.to(dtype, copy=True).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


def mean_reduced_in(dtype, bucket):
    """As `mean_sent_in`, in `dtype`, or in the dtype of fp64 and complex gradients."""
    return mean_sent_in(reduce_dtype(dtype, bucket.buffer().dtype), bucket)
