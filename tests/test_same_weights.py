"""Weights that ranks set by their own samples in the first forward under DDP: rank 0 names them, once."""

import logging

import torch
from torch import nn

from shardkit import Accelerator
from tests import loops
from tests.ranks import log_lines


class Scaled(nn.Module):
    """Divides by the deviation of the first batch, as layers that are initialized by data do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.is_set = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.scale.data.copy_(1 / x.std(0))
            self.is_set = True
        return x * self.scale


def trained(is_set_before: bool) -> tuple[list[str], list[float]]:
    """This rank's warnings of a run of three steps, and the weights at its end."""
    with log_lines(level=logging.WARNING) as lines:
        accelerator = Accelerator(config=loops.config_of(3, loops.LOOPS["usual"]))
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(Scaled(), nn.Linear(4, 1))
        if is_set_before:
            model(x)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            accelerator.backward(model(x[accelerator.process_index :: accelerator.num_processes]).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        values = accelerator.unwrap_model(model)[0].scale.tolist()
        accelerator.free_memory()
    return lines, values


def test_weights_that_each_rank_sets_in_its_first_forward_are_named(ranks):
    (told, first), (quiet, second) = ranks.run(2, trained, False)
    assert first != second and quiet == []
    (text,) = told
    assert "weights differ between ranks before the first step (got 0.scale), so each rank trains a model" in text
    assert "run it on one batch, the same on all ranks, before prepare" in text


def test_weights_set_before_prepare_are_the_same(ranks):
    (told, first), (quiet, second) = ranks.run(2, trained, True)
    assert first == second and told == quiet == []
