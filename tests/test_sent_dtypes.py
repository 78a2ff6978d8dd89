"""Tensors in dtypes that backends lack: NCCL and gloo have no int16 and no large unsigned integers, gloo no 8-bit
floats, and NCCL no complex numbers."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardkit.distributed.tensors import travels, whole
from tests.engine import config_for, parallel

DTYPES = ["int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e8m0fnu"]


def values(dtype: str, first: int = 0) -> torch.Tensor:
    """(5, 8 / size of a value), of bytes from `first` on."""
    return torch.arange(first, first + 40, dtype=torch.uint8).view(5, 8).view(getattr(torch, dtype))


class Packed(nn.Module):
    """A frozen weight, in a unit of its own."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.codes = nn.Parameter(values(dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.codes.view(torch.uint8).float().sum()


def of_packed_weight(dtype: str) -> list[bool]:
    """Whether the output, and the whole weight in three ways, are those of one process."""
    settings = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": "Packed"}
    model = parallel(nn.Sequential(Packed(dtype), nn.Linear(2, 1)), config_for(2, **settings))
    with torch.no_grad():
        model[1].weight.fill_(1)
        model[1].bias.fill_(0)
    is_output = float(model(torch.ones(1, 2)).sum().detach()) == 2 * sum(range(40))
    codes = model[0].codes
    found = (whole(codes), codes.full_tensor(), whole(codes.detach()))
    return [is_output, *(torch.equal(one.view(torch.uint8), values(dtype).view(torch.uint8)) for one in found)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sharded_weight_is_gathered_in_any_dtype(ranks, dtype):
    assert not travels(getattr(torch, dtype))
    if "int" in dtype and torch.__version__ < (2, 12):  # type: ignore[operator]
        pytest.skip("this torch shards no integers")
    assert ranks.run(2, of_packed_weight, dtype) == [[True] * 4] * 2


def of_buffers(dtype: str) -> list[bool]:
    """Whether buffers of this dtype, one of which does not lie in order in memory, are rank 0's after a forward."""
    module: Any = nn.Linear(2, 1)
    for name, value in {"codes": values(dtype), "turned": values(dtype).T, "mean": torch.zeros(2)}.items():
        module.register_buffer(name, value)
    model = parallel(module, config_for(2, strategy=3))
    rank = dist.get_rank()
    module.codes.copy_(values(dtype, rank))
    module.turned.copy_(values(dtype, rank).T)
    module.mean.fill_(rank)
    model(torch.ones(1, 2))
    expected = values(dtype).view(torch.uint8)
    found = [module.codes, module.turned.T]
    same = [torch.equal(one.view(torch.uint8), expected) for one in found]
    return [*same, not module.mean.any(), not module.turned.is_contiguous()]


@pytest.mark.parametrize("dtype", ["int16", "uint32", "float8_e4m3fn"])
def test_buffers_of_any_dtype_are_rank_0s_under_ddp(ranks, dtype):
    assert ranks.run(2, of_buffers, dtype) == [[True] * 4] * 2


def of_reductions(strategy: int) -> tuple[list[str], torch.Tensor]:
    """The dtypes that reduce-scatters get, and a reduced complex gradient."""
    seen: list[str] = []
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    reduce = getattr(dist, name)

    def noted(output: torch.Tensor, input: torch.Tensor, **settings: Any) -> Any:
        seen.append(str(input.dtype))
        return reduce(output=output, input=input, **settings)

    setattr(dist, name, noted)
    try:
        model = parallel(nn.Linear(3, 4, dtype=torch.complex64), config_for(2, strategy))
        model(torch.full((1, 3), 1 + 1j * (dist.get_rank() + 1))).abs().sum().backward()
        return seen, whole(model.weight.grad).numpy()
    finally:
        setattr(dist, name, reduce)


def test_complex_gradients_are_reduced_as_real_numbers(ranks):
    (seen, sharded), _ = ranks.run(2, partial(of_reductions, 1))
    assert seen and set(seen) == {"torch.float32"}
    (_, again), _ = ranks.run(2, partial(of_reductions, 2))
    assert (sharded == again).all() and sharded.any()
