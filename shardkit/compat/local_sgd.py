"""Local SGD: every rank trains its own copy of the weights, and all take the mean of their copies now and then."""

import torch
from torch import nn

from shardkit.compat.facade import Accelerator
from shardkit.errors import UsageError
from shardkit.sharding.gradient_sync import gradient_sync


class LocalSGD:
    """Inside, backward exchanges no gradients; after every `local_sgd_steps` calls of `step`, and at the end, all ranks
    get the mean of their weights. Nothing where it is not `enabled`, or there is one rank. Collective: every rank
    enters it with the same numbers of steps.

    Raises UsageError where the model is sharded: no rank then has weights of its own.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if accelerator.is_fsdp2:
            raise UsageError(
                f"LocalSGD: every rank needs a copy of the weights (got {accelerator.distributed_type.value}); use "
                "distributed_type MULTI_GPU or MULTI_CPU."
            )
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self.accelerator, self.model, self.local_sgd_steps = accelerator, model, local_sgd_steps
        self._sync = gradient_sync([model], enabled=False)

    def __enter__(self) -> "LocalSGD":
        if self.enabled:
            self._sync.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        if not self.enabled:
            return
        if raised[0] is None:  # else the others are not here
            self._average()
        self._sync.__exit__(*raised)  # type: ignore[arg-type]

    def step(self) -> None:
        """Counts an optimizer step. Collective where the weights are due."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self.model.parameters():
            parameter.copy_(self.accelerator.reduce(parameter.detach(), "mean"))
