"""A step reads no value of a tensor on the host, where on a GPU it would wait for the device. fp16 reads one, whether
the gradients overflowed, as torch's own scaler does. `make gpu` counts the waits themselves."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator
from tests import models

OPERATORS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2"}
METHODS = {"__array__", "__contains__", "__format__", "__repr__", "cpu", "numpy", "tolist"}
TO_A_DEVICE = {torch.tensor, torch.as_tensor}
"""From numbers: the copy to a device is not asynchronous."""


class Operators(TorchDispatchMode):
    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func._schema.name.removeprefix("aten::")) in OPERATORS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    def __init__(self, found: Counter) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in METHODS or func in TO_A_DEVICE:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def reads(strategy: int, precision: str, accumulation: int) -> dict[str, float]:
    """A step, after those whose losses and modules the ranks compare."""
    section = {"fsdp_sharding_strategy": strategy, "fsdp_activation_checkpointing": strategy == 2}
    mesh = {"mesh": {"replicate_size": 2}} if strategy == 4 else {}
    fsdp = {"distributed_type": "FSDP", "fsdp_config": section, "shardkit": mesh}
    accelerator = Accelerator(
        config={"use_cpu": True, "num_processes": 2, "mixed_precision": precision, **fsdp},
        gradient_accumulation_steps=accumulation,
    )
    model: Any = models.Gpt()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randint(19, (20 * accumulation, 9))), 1, shuffle=True))
    found: Counter = Counter()
    steps = 0
    for (tokens,) in loader:
        is_counted = optimizer.steps_taken >= 4
        into = found if is_counted else Counter()
        with Operators(into), Methods(into), accelerator.accumulate(model):
            accelerator.backward(models.next_token_loss(model, tokens))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        steps += is_counted and accelerator.sync_gradients
    assert steps >= 4
    return {name: count / steps for name, count in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision", "accumulation"),
    [(1, "fp16", 1), (1, "bf16", 2), (2, "no", 1), (4, "bf16", 2), (3, "fp16", 2), (3, "no", 1)],
)
def test_a_step_reads_nothing_on_the_host_but_whether_fp16_overflowed(ranks, strategy, precision, accumulation):
    expected = {"_local_scalar_dense": 1} if precision == "fp16" else {}
    assert ranks.run(2, reads, strategy, precision, accumulation) == [expected] * 2
