"""Operators and shapes that DTensor lacks give on sharded tensors what they give in one process."""

from typing import Any

import pytest
import torch

from shardkit import Accelerator
from tests.loops.run import whole


def largest(p, count):
    """A mask of the largest values, as gradients are made sparse."""
    _, places = p.abs().flatten().topk(count)
    return torch.zeros_like(p).flatten().scatter_(0, places, 1.0).view(p.shape)


NEW: dict[str, Any] = {
    "limited norms": lambda p: torch.renorm(p, 2, 0, 0.5),
    "limited norms of columns": lambda p: torch.renorm(p, 2, 1, 0.5),
    "largest": lambda p: largest(p, 7),
    "values chosen by a plain index": lambda p: p.gather(1, torch.arange(10).view(5, 2) % 3),
    "values chosen by a sharded index": lambda p: p.gather(1, p.argsort(1)),
    "taken": lambda p: p.take(torch.tensor([0, 4, 14])),
    "membership": lambda p: torch.isin(p.round(decimals=1), torch.tensor([0.1, -0.2])),
    "windows": lambda p: p.unfold(0, 2, 1),
    "histogram": lambda p: torch.histc(p, 5, -1, 1),
    "added by a plain index": lambda p: p.scatter_add(0, torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3)),
    "largest of each": lambda p: p.scatter_reduce(0, torch.zeros(5, 3, dtype=torch.long), p * 2, "amax"),
    "distances": lambda p: torch.cdist(p, 2 * p),
    "distances of pairs": lambda p: torch.nn.functional.pdist(p),
    "values without repeats": lambda p: p.round(decimals=1).unique(),
    "blocks": lambda p: torch.block_diag(p, p),
    "columns filled": lambda p: p.index_fill(1, torch.tensor([2]), 9.0),
    "buckets": lambda p: torch.bucketize(p, torch.tensor([-0.1, 0.0, 0.1])),
    "places among others": lambda p: torch.searchsorted(torch.tensor([-0.1, 0.0, 0.1]), p),
    "in 8 bits": lambda p: torch.fake_quantize_per_tensor_affine(p, 0.01, 0, -128, 127),
    "rows in 8 bits": lambda p: torch.fake_quantize_per_channel_affine(
        p, p.abs().amax(1).detach(), torch.zeros(5, dtype=torch.int32), 0, -128, 127
    ),
    "entropy": lambda p: torch.nn.functional.cross_entropy(p, p.argmax(1)),
}
VIEWS: dict[str, Any] = {
    "row": lambda p: p[1],
    "last row": lambda p: p[-1],
    "column": lambda p: p[..., 0],
    "rows": lambda p: p[1:3],
    "one by one": lambda p: next(iter(p)),
    "halves": lambda p: p.chunk(2)[1],
    "splits": lambda p: p.split([1, 4])[0],
    "transposed": lambda p: p.t(),
    "permuted": lambda p: p.permute(1, 0),
    "with one more dim": lambda p: p[None].expand(2, -1, -1),
    "flattened": lambda p: p.view(-1),
    "diagonal": lambda p: p.diagonal(),
    "products": lambda p: torch.kron(p, torch.ones(2, 2)),
}
WRITES: dict[str, Any] = {
    "limited norms": lambda p: p.renorm_(2, 0, 0.5),
    "lower half": lambda p: p.tril_(),
    "upper half": lambda p: p.triu_(1),
    "running sums": lambda p: p.cumsum_(0),
    "places filled": lambda p: p.scatter_(1, p.argmax(1, keepdim=True), 9.0),
    "places filled by a plain index": lambda p: p.scatter_(1, torch.tensor([[2], [0], [1], [2], [0]]), 9.0),
    "places set": lambda p: p.scatter_(0, torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3)),
    "added": lambda p: p.scatter_add_(0, p.argsort(0), p * 2),
    "put": lambda p: p.put_(torch.tensor([1, 13]), torch.tensor([5.0, 6.0])),
    "masked": lambda p: p.masked_scatter_(p > 0, torch.arange(15.0)),
    "whole numbers": lambda p: p.floor_divide_(0.1),
    "flattened": lambda p: p.view(-1).mul_(2.0),
    "assigned": lambda p: setattr(p, "data", torch.renorm(p.data, 2, 0, 0.5)),
}


def results(weight: torch.Tensor) -> dict[str, Any]:
    found, start = {}, whole(weight).clone()
    for name, new in (NEW | VIEWS).items():
        found[name] = whole(new(weight)).tolist()
        with torch.inference_mode():
            found[f"{name}, in inference mode"] = whole(new(weight)).tolist()
    for name, write in WRITES.items():
        weight.copy_(start)
        write(weight)
        assert weight.shape == start.shape
        found[f"written: {name}"] = whole(weight).tolist()
    return found


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 5)


@torch.no_grad()
def on_ranks() -> dict[str, Any]:
    fsdp = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": fsdp})
    return results(accelerator.prepare(model()).weight)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_operators_that_dtensor_lacks_are_those_of_whole_tensors(ranks, world):
    with torch.no_grad():
        expected = results(model().weight)
    for found in ranks.run(world, on_ranks):
        assert set(found) == set(expected)
        for name, values in found.items():
            torch.testing.assert_close(torch.tensor(values), torch.tensor(expected[name]), msg=name)


RESHAPES: dict[str, Any] = {
    "heads that two ranks do not divide": ((10, 4), lambda p: p.view(5, 8).norm(dim=1)),
    "without a dim of one": ((1, 4), lambda p: p.squeeze(0)),
    "without all dims of one": ((1, 1, 4), lambda p: p.squeeze()),
    "expanded": ((1, 4), lambda p: p.expand(3, 4)),
    "flattened": ((5, 3), lambda p: p.flatten()),
    "columns flattened": ((4, 6), lambda p: p.T.reshape(-1) * torch.arange(24.0)),
}


def gradients(accelerator: Accelerator | None = None) -> list[list[float]]:
    torch.manual_seed(0)
    weights = torch.nn.ParameterList(torch.randn(shape) for shape, _ in RESHAPES.values())
    if accelerator is not None:
        weights = accelerator.prepare(weights)
    loss: Any = sum(
        reshape(weight).square().sum() for weight, (_, reshape) in zip(weights, RESHAPES.values(), strict=True)
    )
    loss.backward() if accelerator is None else accelerator.backward(loss)
    with torch.no_grad():
        weights[0].view(5, 8).mul_(2.0)
    return [torch.cat([whole(one).flatten() for one in (w.grad, w.detach())]).tolist() for w in weights]


def gradients_on_ranks() -> list[list[float]]:
    fsdp = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    return gradients(Accelerator(config={"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": fsdp}))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_shapes_that_dtensor_refuses_are_those_of_whole_tensors(ranks, world):
    expected = gradients()
    for found in ranks.run(world, gradients_on_ranks):
        for name, values, wanted in zip(RESHAPES, found, expected, strict=True):
            assert values == pytest.approx(wanted, abs=1e-5), name
