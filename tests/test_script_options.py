"""Parts of a script, on two ranks and as the plan counts them: averages of the weights, a loss over tokens, and
frozen weights in 4 bits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardkit.config.schema import Config, FsdpConfig
from shardkit.distributed.tensors import local_part
from shardkit.errors import ModelError
from shardkit.model.live import tree_of
from shardkit.plan.averages import Ema
from shardkit.plan.closed_form import estimate
from shardkit.runtime.accelerator import Accelerator
from shardkit.sharding.unfit import refuse_integers
from shardkit.sharding.units import units_of
from tests import models

STEPS, RANKS = 2, 2
SETTINGS = {"num_processes": RANKS, "use_cpu": True, "fsdp_config": {"fsdp_sharding_strategy": 1}}


def labels_of(number: int) -> torch.Tensor:
    """Labels (2, 9) of a micro-batch; each has another number of tokens that count."""
    found = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(number))
    found[:, 1 + number :] = -100
    return found


def loss_of(model: nn.Module, labels: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    logits = model(labels.clamp(min=0))
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def plain() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """In one process, all ranks' micro-batches at once: the loss is the mean over all tokens of the window."""
    torch.manual_seed(0)
    model = models.Gpt()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for window in range(2):
        first = window * STEPS * RANKS
        labels = torch.cat([labels_of(first + n) for n in range(STEPS * RANKS)])
        loss_of(model, labels, "mean").backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    return [p.detach() for p in model.parameters()], [p.detach() for p in averaged.parameters()]


def trained() -> dict[str, Any]:
    """The same on this rank, as in docs/how-to/plan.md and docs/concepts/loops.md."""
    settings = {"gradient_accumulation_steps": STEPS, "end_window_with_data": False}
    accelerator = Accelerator(config={**SETTINGS, "shardkit": settings})
    torch.manual_seed(0)
    model = models.Gpt()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader([labels_of(n) for n in range(8)], batch_size=None)
    model, optimizer, averaged = accelerator.prepare(model, optimizer, averaged)
    mine = [batch for n, batch in enumerate(loader) if n % RANKS == accelerator.process_index]
    for window in zip(*[iter(mine)] * STEPS, strict=True):
        tokens = accelerator.reduce(sum((labels != -100).sum() for labels in window))
        for labels in window:
            with accelerator.accumulate(model):
                loss = loss_of(model, labels) * RANKS * STEPS / tokens
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        averaged.update_parameters(model)
    sizes = [sum(local_part(p).nbytes for p in each.parameters()) for each in (model, averaged)]
    whole = [[p.full_tensor().detach().numpy() for p in each.parameters()] for each in (model, averaged)]
    return {"weights": whole[0], "averages": whole[1], "bytes": sizes}


@pytest.mark.slow
def test_a_loss_over_tokens_and_averages_are_those_of_one_process(ranks):
    found = ranks.run(RANKS, trained)
    weights, averages = plain()
    for name, expected in (("weights", weights), ("averages", averages)):
        for mine, own in zip(found[0][name], expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(mine), own)
    tree, config = tree_of(models.Gpt()), Config.model_validate(SETTINGS)
    without, planned = (estimate(tree, config, world_size=RANKS, ema=ema).memory for ema in (Ema.NO, Ema.MODEL))
    more = planned.peak.parameters - without.peak.parameters
    buffers = 64 * 12 * 4  # a copy of the model has its buffers too
    assert found[0]["bytes"][1] + buffers == more


class Packed(nn.Module):
    """A frozen matrix in 4 bits, two elements a byte, its scales, and a trained low-rank part."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        values = torch.arange(width * width // 2).remainder(251).to(torch.uint8).view(width, width // 2)
        self.packed = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(torch.full((width, 1), 0.01), requires_grad=False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = torch.stack([self.packed & 15, self.packed >> 4], -1).flatten(1)
        return x @ ((halves.to(x.dtype) - 8) * self.scale.to(x.dtype)).t() + self.up(self.down(x))


def packed_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Packed() for _ in range(3)))


def losses_of_packed(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def steps_of_packed(precision: str) -> tuple[list[float], str, int, int]:
    accelerator = Accelerator(config={**SETTINGS, "mixed_precision": precision})
    model = packed_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=0.01))
    losses = losses_of_packed(model, optimizer)
    gathered: list[int] = []
    model[0].register_forward_pre_hook(lambda module, _: gathered.append(sum(p.nbytes for p in module.parameters())))
    model(torch.ones(4, 64))
    kept = sum(local_part(p).nbytes for p in model.parameters())
    return losses, str(local_part(model[0].packed).dtype), kept, gathered[0]


def test_a_torch_that_cannot_shard_integers_is_named():
    units = units_of(packed_model(), FsdpConfig(), torch.float32)
    refuse_integers(units, "2.12.1+cpu")
    with pytest.raises(
        ModelError, match=r"model: 0\.packed is torch\.uint8, which FSDP shards since torch 2\.12 \(got 2"
    ):
        refuse_integers(units, "2.11.0")


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="FSDP shards integers since torch 2.12")
def test_frozen_weights_in_4_bits_are_trained_with_and_planned(ranks):
    losses, *_ = ranks.run(RANKS, steps_of_packed, "no")[0]
    alone = packed_model()
    optimizer = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=0.01)
    assert losses == pytest.approx(losses_of_packed(alone, optimizer), rel=1e-4)
    _, dtype, kept, gathered = ranks.run(RANKS, steps_of_packed, "bf16")[0]
    assert dtype == "torch.uint8"
    config = Config(num_processes=RANKS, mixed_precision="bf16", fsdp=FsdpConfig(sharding_strategy=1))
    planned = estimate(tree_of(packed_model()), config, world_size=RANKS).memory
    assert planned.peak.parameters == kept
    assert planned.timeline[0].memory.gathered == 2 * gathered  # and the all-gather's output
