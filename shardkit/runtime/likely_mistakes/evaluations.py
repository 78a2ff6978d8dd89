"""Detects a forward without gradients that only some ranks make, as in `if accelerator.is_main_process: evaluate()`.

In each forward of a sharded model the units gather their parameters from all ranks. What the other ranks do meanwhile,
usually the next step, would be taken for a part of it: gloo ends the process, NCCL waits until its timeout, or other
units' values are used.
"""

import torch
from torch import nn

from shardkit.config import meaning
from shardkit.config.schema import Config
from shardkit.distributed import named_barrier
from shardkit.errors import UsageError

_ALONE = "To evaluate on one rank alone, let all ranks enter `with accelerator.unsharded(model):` before it."


def watch(model: nn.Module, config: Config) -> None:
    """Has the ranks meet before the model's first forwards without gradients. UsageError on those that wait in vain."""
    from shardkit.sharding.fsdp import unit_state  # not before: a script may shard nothing

    timeout_s = meaning.longest_wait_s(config)
    call, left = f"{type(model).__name__}.forward(no_grad)", named_barrier.FIRST_TIMES  # of each model

    def meet() -> None:
        nonlocal left
        if left and not torch.is_grad_enabled():
            try:
                named_barrier.meet(call, timeout_s, UsageError)
            except UsageError as error:
                raise UsageError(f"{error}\n  {_ALONE}") from error.__cause__
            left -= 1

    unit_state.before_forward(model).append(meet)
