"""Local SGD: every rank trains its copy of the weights, and the copies are averaged every few steps."""

import torch
from torch import nn

from shardkit.compat.facade import Accelerator
from shardkit.distributed.modules import every_parameter
from shardkit.errors import UsageError
from shardkit.sharding.gradient_sync import gradient_sync


class LocalSGD:
    """A context manager inside which backward exchanges no gradients. After every `local_sgd_steps` calls of `step`,
    and at the end, the weights are averaged over all ranks. Does nothing if not `enabled`, or with one rank.
    Collective: every rank enters it, and calls `step` equally often.

    Raises UsageError if it is enabled and the model is sharded, or ranks share sequences.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if enabled and accelerator.is_fsdp2:
            raise UsageError(
                f"LocalSGD: every rank needs all weights (got {accelerator.distributed_type.value}); use "
                "distributed_type MULTI_GPU or MULTI_CPU."
            )
        if enabled and accelerator.config.shardkit.mesh.context_size > 1:
            raise UsageError(
                "LocalSGD: ranks that share each sequence need one another's gradients (got shardkit.mesh.context_size "
                f"{accelerator.config.shardkit.mesh.context_size}); set 1."
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
        if raised[0] is None:  # after an error, other ranks may not get here
            self._average()
        self._sync.__exit__(*raised)  # type: ignore[arg-type]

    def step(self) -> None:
        """Count an optimizer step. Collective in every `local_sgd_steps`-th call, which averages the weights."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in every_parameter(self.model):
            parameter.copy_(self.accelerator.reduce(parameter.detach(), "mean"))
