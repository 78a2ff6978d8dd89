"""A trace of the gathers and reductions of a sharded model's units, to detect ranks that used different units.

The first ones are compared before they happen: experts that only some ranks use make different numbers or sizes of
them, at which gloo ends the process and NCCL waits until its timeout. Later ones are compared after a step, or in the
background.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import active_fake_mode
from torch.utils._python_dispatch import _disable_current_modes

from shardkit.distributed.control import is_simulated, unlike_rank_0
from shardkit.distributed.tensors import outside_transforms
from shardkit.errors import ModelError
from shardkit.wording import ranks_text

COMPARED = 6
"""So many events for each unit are compared: in two steps it is gathered four times and reduced twice."""


@dataclass
class Trace:
    """A hash of what a model's units have done; equal on ranks that used the same modules in the same order."""

    value: int = 0
    left: float = 0
    """How many more events are compared."""

    def add(self, *event: int, device: torch.device) -> None:
        """Before the event. Collective where it is compared: then ModelError on all ranks, if it is not the same."""
        self.value = hash((self.value, *event))
        if self.left > 0 and not is_simulated() and active_fake_mode() is None:
            self.left -= 1
            with outside_transforms(), _disable_current_modes():  # these are no operators of a recomputed block
                _compare(self.value, device)


def _compare(value: int, device: torch.device) -> None:
    own = torch.tensor([value], device=device)
    values = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(values, own)
    if different := unlike_rank_0(torch.cat(values).tolist()):
        raise ModelError(different_modules(different, "the weights have not been changed by this step"))


def different_modules(different: list[int], consequence: str) -> str:
    """The error text for ranks that have used other modules than rank 0."""
    return (
        f"model: {ranks_text(different)} used other modules or parameters than rank 0 in a step, and FSDP mixes their "
        f"gradients; {consequence}. Use the same on all ranks. Where one may leave out parameters of a unit, set "
        "shardkit.ddp_find_unused_parameters: true; where it may leave out units (experts), make one of them, too: "
        "name the class around them in fsdp_transformer_layer_cls_to_wrap, with fsdp_auto_wrap_policy: "
        "TRANSFORMER_BASED_WRAP, or set NO_WRAP."
    )


def set_trace(model: nn.Module, trace: Trace) -> None:
    """Set the model's trace."""
    vars(model)["_shardkit_trace"] = trace


def trace_of(model: nn.Module) -> Trace | None:
    """The model's trace; None if it has none."""
    return vars(model).get("_shardkit_trace")
