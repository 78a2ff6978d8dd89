"""Weights that bitsandbytes has packed, with parameters that look like its own: in 4 bits, sharded in any dtype that
holds the bits, and in 8 bits, whole on each rank. With the library itself: tests/test_compat_launched.py."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardkit.config.schema import Config, FsdpConfig
from shardkit.distributed.tensors import local_part
from shardkit.errors import ModelError
from shardkit.model.describe import ModelDescription, TransformerFacts, from_json, to_json
from shardkit.model.live import tree_of
from shardkit.plan.closed_form import estimate
from shardkit.plan.roofline import work_per_token
from shardkit.runtime import summary
from shardkit.runtime.accelerator import Accelerator
from shardkit.sharding import unfit
from shardkit.sharding.units import units_of
from tests.ranks import log_lines

WIDTH = 64
TAKES_BYTES = pytest.mark.skipif(torch.__version__ < (2, 12), reason="FSDP shards integers since torch 2.12")


class Bits(nn.Parameter):
    """As Params4bit: bits in a column of any dtype, and beside them what makes weights of them."""

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, **known: Any) -> "Bits":
        made: Any = torch.Tensor._make_subclass(cls, data, requires_grad)
        vars(made).update(known)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bits":
        return Bits(self.data.clone(), self.requires_grad, **copy.deepcopy(vars(self), memo))


class Linear4(nn.Module):
    """A frozen matrix in 4 bits and a trained part of low rank."""

    support_avx512bf16_for_cpu = True

    def __init__(self, storage: str) -> None:
        super().__init__()
        bits = torch.randint(0, 256, (WIDTH * WIDTH // 2,), dtype=torch.uint8)
        scales = torch.rand(WIDTH, 1) / 100
        state = SimpleNamespace(shape=torch.Size((WIDTH, WIDTH)), state2=SimpleNamespace(absmax=scales))
        self.weight = Bits(bits.view(getattr(torch, storage)).view(-1, 1), quant_state=state, kind="nf4")
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bits = self.weight.data.view(-1).view(torch.uint8)
        halves = torch.stack([bits & 15, bits >> 4], -1).view(WIDTH, WIDTH)
        weight = (halves.to(x.dtype) - 8) * self.weight.quant_state.state2.absmax.to(x.dtype)
        return functional.linear(x, weight) + self.up(self.down(x))


def model_in_4_bits(storage: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(Linear4(storage) for _ in range(3)))


def losses_of(model: nn.Module, optimizer: Any, backward: Any = torch.Tensor.backward) -> list[float]:
    found = []
    for step in range(3):
        loss = model(torch.full((4, WIDTH), 1.0 + step)).float().square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def trained(storage: str, precision: str, strategy: int) -> dict[str, Any]:
    fsdp = {"fsdp_sharding_strategy": strategy, "fsdp_transformer_layer_cls_to_wrap": "Linear4"}
    accelerator = Accelerator(config={"use_cpu": True, "mixed_precision": precision, "fsdp_config": fsdp})
    model = model_in_4_bits(storage, seed=accelerator.process_index)  # rank 0's weights and scales are for all
    model, optimizer = accelerator.prepare(model, adam(model))
    losses = losses_of(model, optimizer, accelerator.backward)
    inner = accelerator.unwrap_model(model)
    copied = copy.deepcopy(inner)
    x = torch.ones(4, WIDTH)
    with torch.no_grad():
        same = torch.equal(copied(x), model(x)) or precision != "no"
    weight = copied[0].weight
    return {
        "losses": losses,
        "table": summary.text(accelerator._run),
        "here": local_part(inner[0].weight).numel() / weight.numel(),
        "copy": (type(weight).__name__, weight.kind, str(weight.dtype), same),
        "layout": inner[0].support_avx512bf16_for_cpu,
    }


@pytest.mark.parametrize(
    ("storage", "precision"),
    [
        pytest.param("uint8", "no", marks=TAKES_BYTES),
        ("bfloat16", "no"),
        ("bfloat16", "bf16"),
        ("bfloat16", "fp16"),
        ("float32", "bf16"),
    ],
)
def test_packed_weights_are_sharded_and_never_cast(ranks, storage, precision):
    """The compute dtype of mixed precision is one of numbers; the bits are none."""
    found = ranks.run(2, trained, storage, precision, 1)[0]
    alone = model_in_4_bits(storage)
    bound = 1e-5 if precision == "no" else 2e-2
    assert found["losses"] == pytest.approx(losses_of(alone, adam(alone)), rel=bound)
    assert found["here"] == 0.5
    assert found["copy"] == ("Bits", "nf4", f"torch.{storage}", True)
    assert not found["layout"]


def test_replicas_take_the_scales_of_rank_0_and_the_table_counts_weights(ranks):
    found = ranks.run(2, trained, "bfloat16", "no", 3)[0]
    alone = model_in_4_bits("bfloat16")
    assert found["losses"] == pytest.approx(losses_of(alone, adam(alone)), rel=1e-5)
    assert f"{3 * (WIDTH * WIDTH + 8 * WIDTH):,} parameters" in found["table"]
    assert "parameters 4 bits in bf16 and fp32, compute fp32," in found["table"]


@pytest.mark.parametrize(("storage", "is_packed"), [("uint8", True), ("bfloat16", True), ("bfloat16", False)])
def test_a_plan_counts_the_weights_and_has_the_bytes_of_their_containers(storage, is_packed):
    """Before bitsandbytes packs them, too: a plan builds no values."""
    model = model_in_4_bits(storage)
    if not is_packed:
        for layer in model:
            data = torch.empty(WIDTH, WIDTH, device="meta")
            layer.weight = Bits(data, bnb_quantized=False, quant_storage=getattr(torch, storage))
    description = from_json(to_json(ModelDescription("", "Model", tree_of(model))))
    matrices, low_rank = 3 * WIDTH * WIDTH, 3 * 8 * WIDTH
    assert description.numel == matrices + low_rank
    facts = TransformerFacts(layers=1, hidden=WIDTH, heads=1, key_value_heads=1, feed_forward=WIDTH)
    work = work_per_token(description.tree, facts, 0)
    assert work.forward == 2 * (matrices + low_rank)
    assert work.backward == 2 * (2 * matrices // 3 + 2 * low_rank)  # nothing before the first trained one
    planned = estimate(description.tree, Config(mixed_precision="bf16", num_processes=2), world_size=2)
    # Scales are whole on each rank: of 64 weights one in fp32, which double quantization makes a byte, and one of 256.
    scales = 3 * (4 * WIDTH * WIDTH // 64 if is_packed else WIDTH * WIDTH // 64 + 4)
    assert planned.memory.peak.parameters == (matrices // 2 + 4 * low_rank) // 2 + scales


def test_a_layout_for_inference_is_refused():
    model = model_in_4_bits("uint8")
    model[1].weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(ModelError, match=r"model: 1\.weight is stored in the layout for inference on this CPU"):
        Accelerator(cpu=True).prepare(model)


def test_an_old_torch_is_told_the_setting_of_bitsandbytes():
    units = units_of(model_in_4_bits("uint8"), FsdpConfig(), torch.float32)
    with pytest.raises(ModelError, match=r"floating-point dtype \(bnb_4bit_quant_storage=torch\.bfloat16\), or use"):
        unfit.refuse_integers(units, "2.11.0")


def test_weights_that_are_to_be_packed_are_planned_as_packed_and_not_sharded_before():
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model.weight = Bits(model.weight.data, bnb_quantized=False, quant_storage=torch.bfloat16)
    (weight,) = tree_of(model).parameters
    assert (weight.shape, weight.dtype) == ((WIDTH * WIDTH // 4, 1), "bfloat16")
    (problem,) = unfit.problems(model, Config.model_validate({"distributed_type": "FSDP", "use_cpu": True}))
    assert problem.startswith("model: weight is not in 4 bits yet") and "model.to(accelerator.device)" in problem
    model.weight = Bits(torch.ones(WIDTH, 3), CB=None, SCB=None, has_fp16_weights=False)
    (weight,) = tree_of(model).parameters
    assert (weight.shape, weight.dtype) == ((WIDTH, 3), "int8")


class Linear8(nn.Module):
    """As Linear8bitLt, which computes with `CB`, a second name of the weight's values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (WIDTH, WIDTH), dtype=torch.int8), requires_grad=False)
        self.weight.CB, self.weight.SCB = self.weight.data, torch.rand(WIDTH)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.CB.to(x.dtype)) * self.weight.SCB.to(x.dtype) / 127


def in_8_bits(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Linear8(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


def trained_in_8_bits() -> tuple[list[float], list[str], tuple[int, ...]]:
    with log_lines() as lines:
        accelerator = Accelerator(config={"use_cpu": True, "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}})
        model = in_8_bits(accelerator.process_index)
        model, optimizer = accelerator.prepare(model, adam(model))
    return losses_of(model, optimizer), lines, tuple(local_part(model[0].weight).shape)


def test_weights_in_8_bits_are_whole_on_each_rank_and_said_to_be(ranks):
    losses, lines, shape = ranks.run(2, trained_in_8_bits)[0]
    alone = in_8_bits(0)
    assert losses == pytest.approx(losses_of(alone, adam(alone)), rel=1e-5)
    assert shape == (WIDTH, WIDTH)
    told = [line for line in lines if "in 8 bits are whole on each rank (got 0), since they" in line]
    assert len(told) == 1, lines


def saved_and_generated(folder: str) -> tuple[list[str], float]:
    """What a save says of bits that would be NaN as numbers, and a loss on whole weights, apart from one on shards."""
    fsdp = {"fsdp_transformer_layer_cls_to_wrap": "Linear4"}
    accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": fsdp})
    model = accelerator.prepare(model_in_4_bits("bfloat16"))
    assert any(local_part(one).isnan().any() for one in model.parameters())
    with log_lines("shardkit.checkpoint") as lines:
        accelerator.save_state(folder)
    x = torch.ones(4, WIDTH)
    with torch.no_grad():
        sharded = model(x)
        with accelerator.unsharded(model):
            whole = model(x)
    return [line for line in lines if "NaN" in line], (whole - sharded).abs().max().item()


def test_packed_bits_are_no_nan_and_are_gathered_for_a_while(ranks, tmp_path):
    assert ranks.run(2, saved_and_generated, str(tmp_path / "state")) == [([], 0.0)] * 2
