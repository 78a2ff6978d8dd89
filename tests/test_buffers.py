"""Buffers that ranks updated locally are made equal on request, and a save warns once."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit import Accelerator, ProjectConfiguration
from shardkit.distributed import buffers
from shardkit.errors import UsageError
from shardkit.runtime.checkpoints import saving
from tests.ranks import log_lines


class Kept(nn.Module):
    """Buffers of all kinds; those with `own` in their names differ from rank to rank."""

    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("own_mean", torch.tensor([1.0, 2.0]) + rank)
        self.register_buffer("own_half", torch.full((3,), 1.0 + rank, dtype=torch.bfloat16))
        self.register_buffer("own_double", torch.tensor(0.1 * (1 + rank), dtype=torch.float64))
        self.register_buffer("own_complex", torch.tensor([1j * rank]))
        self.register_buffer("own_count", torch.tensor(10 + rank))
        self.register_buffer("own_mask", torch.tensor([rank == 0, True, False]))
        self.register_buffer("own_cut", torch.full((1, 5), rank)[:, 0])
        self.register_buffer("own_hidden", torch.tensor([float(rank)]), persistent=False)
        self.register_buffer("third", torch.tensor([1 / 3, float("-inf")]))
        self.register_buffer("table", torch.arange(6).view(2, 3).t())


def reduced(reduction, wrapped):
    rank = dist.get_rank()
    inner = Kept(rank)
    model = nn.parallel.DistributedDataParallel(inner) if wrapped else inner
    if wrapped:  # DDP itself begins with rank 0's
        inner.own_mean += rank
    addresses = {name: buffer.data_ptr() for name, buffer in inner.named_buffers()}
    names = buffers.reduce_buffers(model, reduction)
    assert addresses == {name: buffer.data_ptr() for name, buffer in inner.named_buffers()}
    assert buffers.reduce_buffers(model, reduction) == []
    return names, {name: buffer.tolist() for name, buffer in inner.named_buffers()}


OWN = ["own_mean", "own_half", "own_double", "own_complex", "own_count", "own_mask", "own_cut", "own_hidden"]


@pytest.mark.slow
def test_the_mean_of_floats_and_rank_0s_of_the_rest(ranks):
    told = ranks.run(3, reduced, "mean", False)
    assert told[0] == told[1] == told[2]
    names, values = told[0]
    assert names == OWN
    assert values["own_mean"] == [2.0, 3.0] and values["own_half"] == [2.0] * 3
    assert values["own_double"] == pytest.approx(0.2, rel=1e-15) and values["own_complex"] == [1j]
    assert values["own_count"] == 10 and values["own_mask"] == [True, True, False] and values["own_hidden"] == [1.0]
    assert values["third"] == Kept(0).third.tolist(), "what was equal stays, to the bit"


def test_rank_0s_of_all(ranks):
    told = ranks.run(2, reduced, "rank0", False)
    assert told[0] == told[1]
    assert told[0][1] == {name: buffer.tolist() for name, buffer in Kept(0).named_buffers()}


def test_inside_ddp(ranks):
    told = ranks.run(2, reduced, "mean", True)
    assert told[0] == told[1] and told[0][0] == ["own_mean"] and told[0][1]["own_mean"] == [1.5, 2.5]


def refused():
    rank = dist.get_rank()
    model = nn.Module()
    model.register_buffer("statistics", torch.zeros(2 + rank))
    with pytest.raises(UsageError, match=r"rank 1 has other buffers than rank 0 \(got statistics torch.float32"):
        buffers.reduce_buffers(model)
    with pytest.raises(UsageError, match=r"unknown reduction \(got 'sum'\); use mean or rank0"):
        buffers.reduce_buffers(model, "sum")
    with pytest.raises(UsageError, match=r"not a model \(got Tensor\)"):
        buffers.reduce_buffers(torch.zeros(2))


def test_what_cannot_be_reduced_is_said_on_all_ranks(ranks):
    ranks.run(2, refused)
    assert buffers.reduce_buffers(Kept(1)) == [], "one process has nothing to compare"


def normalized(project, strategy, reduce, exports=False):
    """A batch norm under training: what two saves, or exports, say of it."""
    with log_lines() as lines:
        wrap = {"fsdp_auto_wrap_policy": "NO_WRAP"}
        given = {"distributed_type": strategy, "use_cpu": True, "fsdp_config": wrap}
        accelerator = Accelerator(
            config=given, project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
        )
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + accelerator.process_index))
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if reduce:
                buffers.reduce_buffers(model)
            if exports:
                accelerator.save_model(model, project / f"export-{step}")
            else:
                accelerator.save_state(project / str(step))
        saving.close(accelerator._run)
    return [line for line in lines if "buffers differ" in line]


def test_a_save_says_once_which_buffers_drift(ranks, tmp_path):
    told = ranks.run(2, normalized, tmp_path, "FSDP", False)
    assert told[1] == [] and len(told[0]) == 1
    assert "buffers differ between ranks (model: 1.running_mean, model: 1.running_var)" in told[0][0]
    assert "rank 0's are saved" in told[0][0] and "accelerator.reduce_buffers(model)" in told[0][0]


def test_an_export_says_so_too(ranks, tmp_path):
    told = ranks.run(2, normalized, tmp_path, "FSDP", False, True)
    assert told[1] == [] and len(told[0]) == 1 and "(1.running_mean, 1.running_var)" in told[0][0]
    assert ranks.run(2, normalized, tmp_path / "ddp", "MULTI_CPU", False, True) == [[], []]


def test_a_save_says_nothing_of_buffers_that_are_equal(ranks, tmp_path):
    assert ranks.run(2, normalized, tmp_path / "reduced", "FSDP", True) == [[], []]
    assert ranks.run(2, normalized, tmp_path / "ddp", "MULTI_CPU", False) == [[], []], "DDP gives rank 0's to all"
