"""Calls of `torch.autograd.grad` for sharded parameters that give none. (Those that do: tests/loops/returned.py.)"""

import pytest
import torch
from torch import nn

from shardkit import Accelerator
from shardkit.errors import UsageError
from tests import loops
from tests.loops.net import Net, loss_of


def asked(strategy: int) -> dict[str, str]:
    """What each call says or gives."""
    accelerator = Accelerator(config=loops.config_of(strategy, loops.LOOPS["usual"]))
    model = accelerator.prepare(Net())
    stranger = nn.Parameter(torch.ones(3))
    tokens = torch.zeros(2, 6, dtype=torch.long)
    head, embedded = model.head.weight, model.embed.weight
    said = {}
    for name, ask in {
        "batched": lambda loss: torch.autograd.grad(
            loss[None], head, torch.ones(2, 1), is_grads_batched=True, retain_graph=True
        ),
        "strange": lambda loss: torch.autograd.grad(loss, [head, stranger], retain_graph=True),
        "unused": lambda loss: torch.autograd.grad(model.head.weight.square().sum(), [head, embedded]),
        "allowed": lambda loss: torch.autograd.grad(loss, [head, stranger], allow_unused=True, retain_graph=True),
        "frozen": lambda loss: torch.autograd.grad(loss, [embedded.requires_grad_(False)]),
    }.items():
        try:
            found = ask(loss_of(model, tokens))
            said[name] = ", ".join("None" if one is None else str(tuple(one.shape)) for one in found)
        except (UsageError, RuntimeError) as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize(("world", "strategy"), [(1, 1), (2, 2)])
def test_what_has_no_gradient_is_said(ranks, world, strategy):
    for said in ranks.run(world, asked, strategy):
        assert said["batched"].startswith("torch.autograd.grad: gradients of sharded parameters are not computed in")
        missing = "torch.autograd.grad: an input does not appear to have been used in the graph of the outputs (got"
        assert said["strange"].startswith(f"{missing} number 1 of 2)")
        assert said["unused"].startswith(f"{missing} number 1 of 2)")
        assert said["allowed"] == "(11, 7), None"
        assert "does not require grad" in said["frozen"]
