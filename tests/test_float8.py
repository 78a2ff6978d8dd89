"""fp8 and mxfp8: refused in words where they cannot be computed, never something else instead; converted in place.

The kernels need a GPU (tests/test_gpu.py). torchao emulates them on the CPU: where it is installed, training and
checkpoints are shown with that.
"""

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardkit import Accelerator
from shardkit.config import checks, hardware
from shardkit.config.files import read
from shardkit.config.meaning import dtypes, eight_bits
from shardkit.config.schema import Config
from shardkit.distributed import accelerators, process
from shardkit.distributed.tensors import is_dtensor, local_part, whole
from shardkit.errors import ConfigError, MachineError, ModelError
from shardkit.optim.stepping import stepper_of
from shardkit.plan import roofline
from shardkit.sharding import float8, precision
from shardkit.sharding.fsdp import internals
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize
from shardkit.wizard import options
from shardkit.wizard.answers import settle
from shardkit.wizard.situation import Situation
from tests import models

NEEDS_TORCHAO = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed here")


# ---- settings ----


@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_the_key_of_accelerates_files_is_read(tmp_path, kind):
    path = tmp_path / "a.yaml"
    path.write_text(f"distributed_type: FSDP\nmixed_precision: {kind}\nfp8_config:\n  backend: AO\n")
    config = read(path).config
    assert (eight_bits(config), dtypes(config).param, dtypes(config).output) == (kind, "bf16", "fp32")
    path.write_text("mixed_precision: fp8\nfp8_config:\n  backend: TE\n")
    with pytest.raises(
        ConfigError, match=r"fp8_config: fp8 is computed with torchao here \(got TE\); write backend: AO"
    ):
        read(path)
    path.write_text(f"mixed_precision: {kind}\nfp8_config:\n  backend: AO\n  pad_inner_dim: true\n")
    assert read(path).notes[0].endswith("layers whose dims 16 does not divide are not padded, but in bf16.")
    path.write_text("mixed_precision: fp8\nfp8_config:\n  backend: AO\n  use_autocast_during_eval: true\n")
    with pytest.raises(ConfigError, match=r"use_autocast_during_eval cannot be chosen here \(got true\); leave it out"):
        read(path)


def test_a_run_on_the_cpu_is_refused_with_the_file():
    found = checks.problems(Config(mixed_precision="fp8", use_cpu=True))
    assert [one.text for one in found] == ["fp8 needs a GPU (got a run on the CPU); write bf16."]


@pytest.mark.parametrize(
    ("kind", "capability", "says"),
    [
        ("fp8", None, "fp8 needs a GPU of compute capability 8.9 (got cpu); write bf16."),
        ("fp8", (8, 0), "fp8 needs a GPU of compute capability 8.9 (got cpu, 8.0); write bf16."),
        ("mxfp8", (9, 0), "mxfp8 needs a GPU of compute capability 10.0 (got cpu, 9.0); write bf16."),
        ("fp8", (9, 0), None),
        ("mxfp8", (10, 0), None),
    ],
)
def test_a_device_without_it_is_named(monkeypatch, kind, capability, says):
    monkeypatch.setattr(accelerators, "capability", lambda device: capability)
    found = float8.problem(kind, torch.device("cpu"))
    if says is not None:
        assert found == f"mixed_precision: {says}"
    elif find_spec("torchao") is None:
        assert (
            found == f"mixed_precision: {kind} needs the package torchao, which is not installed; pip install torchao."
        )
    else:
        assert found is None


def test_nothing_else_is_computed_instead():
    with pytest.raises(MachineError, match="needs a GPU of compute capability"):
        precision.supported(Config(mixed_precision="fp8"), torch.device("cpu"))


def test_the_wizard_offers_it_where_all_gpus_have_it():
    def offered(capability: float | None) -> list[str]:
        device = hardware.Device("GPU", 80 * 2**30, "cuda", capability)
        situation = settle(Situation(hardware.Hardware((device, device), 16, 2**38)), {})
        return [one.value for one in options.precision(situation)]

    assert offered(8.0) == offered(None) == ["bf16", "fp16", "no"]
    assert offered(8.9) == offered(9.0) == ["bf16", "fp16", "no", "fp8"]
    assert offered(10.0) == ["bf16", "fp16", "no", "fp8", "mxfp8"]


def test_the_wizard_offers_what_the_gpus_of_another_machine_have():
    def asked(gpu: str) -> tuple[str, list[str]]:
        situation = settle(Situation(hardware.Hardware((), 2, 2**34)), {"where": "elsewhere", "gpu": gpu})
        possible = [one.value for one in options.precision(situation) if not one.disabled]
        return situation.answers["mixed_precision"], possible

    assert asked("h100-80") == ("bf16", ["bf16", "fp16", "no", "fp8"])
    assert asked("b200-180") == ("bf16", ["bf16", "fp16", "no", "fp8", "mxfp8"])
    assert asked("a100-80") == asked("unknown") == ("bf16", ["bf16", "fp16", "no"])
    assert asked("t4-16") == ("fp16", ["fp16", "no"])


def test_the_plan_counts_the_published_gain():
    assert roofline.EIGHT_BIT_SPEEDUP["fp8"] == pytest.approx(8532 / 6667, abs=0.005)
    assert roofline.EIGHT_BIT_SPEEDUP["mxfp8"] == pytest.approx(7401 / 6169, abs=0.005)


# ---- conversion ----


def config_for(world: int, strategy: int, kind: str) -> Config:
    return Config(
        num_processes=world, use_cpu=True, mixed_precision=kind, fsdp_config={"fsdp_sharding_strategy": strategy}
    )


def trained(kind: str, strategy: int, steps: int = 4) -> dict[str, Any]:
    """Losses of a small GPT on this world's global batch, by torchao's emulation; and what became of its layers."""
    float8.EMULATES = True
    world = torch.distributed.get_world_size()
    config = config_for(world, strategy, kind)
    torch.manual_seed(0)
    model: Any = models.Gpt(width=64, layers=2)
    here = process.start(config)
    before = {name: type(module) for name, module in model.named_modules()}
    prepared = parallelize(model, config, build_mesh(config, here), here)
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2, eps=1e-4)
    stepper = stepper_of(optimizer)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 19, (4, 33), generator=torch.Generator().manual_seed(step))
        mine = tokens[here.rank :: world]
        with precision.autocast(config, here.device):
            loss = models.next_token_loss(prepared, mine)
        loss.backward()
        stepper.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / world)
    float8.EMULATES = False
    weight = model.blocks[0].up.weight
    gathered = {p._param_fqn: p for p in internals.parameters_of(model)} if strategy != 3 else {}
    return {
        "gathered": {name: str(p.all_gather_outputs[0].dtype) for name, p in gathered.items()},
        "losses": losses,
        "changed": sorted(name for name, module in model.named_modules() if type(module) is not before[name]),
        "local": type(weight._local_tensor).__name__ if is_dtensor(weight) else "",
        "sum": (whole(weight) if is_dtensor(weight) else weight).detach().abs().sum().item(),
        "plain": type(local_part(weight)).__name__,
        "names": sorted(model.state_dict()),
    }


@NEEDS_TORCHAO
@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_sharded_training_in_8_bits_is_near_to_bf16(ranks, kind):
    """On two ranks and one, under FSDP and DDP; the head and what no block holds stay as they are."""
    (bf16, _) = ranks.run(2, trained_in_bf16)
    two = ranks.run(2, trained, kind, 1)
    assert two[0]["losses"] == two[1]["losses"] == pytest.approx(bf16, abs=0.3)
    assert two[0]["losses"] != pytest.approx(bf16, abs=1e-6)
    ddp = ranks.run(2, trained, kind, 3)[0]
    assert ddp["losses"] == pytest.approx(two[0]["losses"], abs=0.3)
    assert two[0]["names"] == sorted(models.Gpt(width=64, layers=2).state_dict())
    assert two[0]["plain"] == "Tensor"
    if kind == "fp8":
        carried = two[0]["gathered"]
        assert carried["blocks.0.up.weight"] == "torch.float8_e4m3fn" and carried["head.weight"] == "torch.bfloat16"
        assert two[0]["local"] == "Fp8Weight"
        assert any(name.endswith("blocks.0.up") for name in two[0]["changed"])
        assert not any("head" in name or "embed" in name for name in ddp["changed"])


def with_scales(at_once: bool) -> tuple[list[float], int, int]:
    """Losses, and how often maxima of all weights, and of one, were reduced over the ranks."""
    utils = import_module("torchao.float8.float8_utils")
    compute, reduce, counts = float8._Scales.compute, utils.all_reduce, [0, 0]

    def counted_once(self: Any) -> None:
        counts[0] += at_once
        if at_once:
            compute(self)

    def counted_each(*arguments: Any) -> Any:
        counts[1] += 1
        return reduce(*arguments)

    float8._Scales.compute, utils.all_reduce = counted_once, counted_each
    try:
        return trained("fp8", 1)["losses"], *counts
    finally:
        float8._Scales.compute, utils.all_reduce = compute, reduce


@NEEDS_TORCHAO
def test_the_scales_of_all_weights_are_reduced_at_once(ranks):
    """And are those that each weight would get by itself."""
    for found, by_itself in zip(ranks.run(2, with_scales, True), ranks.run(2, with_scales, False), strict=True):
        assert found[0] == by_itself[0]
        assert found[1:] == (4, 0) and by_itself[1] == 0 and by_itself[2] >= 8 * 4


def trained_in_bf16() -> list[float]:
    return trained_plainly("bf16")


def trained_plainly(kind: str) -> list[float]:
    return trained(kind, 1)["losses"]


def saved_and_loaded(folder: str) -> list[float]:
    """Sums of the parameters of a model trained in fp8, of one that loads its state, and of the export."""
    float8.EMULATES = True
    accelerator = Accelerator(config={"distributed_type": "FSDP", "num_processes": 2, "mixed_precision": "fp8"})

    def fresh() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = models.Gpt(width=64, layers=2)
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    model, optimizer = fresh()
    start = sums(accelerator.get_state_dict(model))
    tokens = torch.randint(0, 19, (2, 33), generator=torch.Generator().manual_seed(accelerator.process_index))
    accelerator.backward(models.next_token_loss(model, tokens))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    found = [start, sums(accelerator.get_state_dict(model))]
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    accelerator.free_memory()
    again, _ = fresh()
    accelerator.load_state(f"{folder}/state")
    found.append(sums(accelerator.get_state_dict(again)))
    found.append(sums(load_file(f"{folder}/model/model.safetensors")))
    float8.EMULATES = False
    return found


def sums(state: dict[str, torch.Tensor]) -> float:
    return sum(value.double().abs().sum().item() for value in state.values())


@NEEDS_TORCHAO
def test_what_is_saved_has_the_dtype_of_the_parameters(ranks, tmp_path):
    start, trained_to, loaded, exported = ranks.run(2, saved_and_loaded, str(tmp_path))[0]
    assert start != trained_to == loaded == exported


@NEEDS_TORCHAO
def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ModelError, match=r"no block has a Linear layer with dims divisible by 16 \(got 1 layers\)"):
        float8.convert([nn.Sequential(nn.Linear(8, 8))], "fp8")


@pytest.mark.parametrize("rows", [(2, 31), (64,), (1,)])
def test_any_number_of_tokens_has_the_rows_that_the_kernels_need(rows):
    linear, seen = nn.Linear(4, 8), []

    def multiply(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[:-1].numel())
        return linear(x)

    x = torch.randn(*rows, 4, requires_grad=True)
    found, expected = float8._with_whole_rows(multiply, 32, x), linear(x)
    assert seen[0] % 32 == 0 and torch.allclose(found, expected, rtol=1e-5)
    parameters = [x, *linear.parameters()]
    of_found, of_expected = (torch.autograd.grad(y.square().sum(), parameters) for y in (found, expected))
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(of_found, of_expected, strict=True))


@NEEDS_TORCHAO
@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_a_batch_of_any_length_is_trained_on_in_8_bits(monkeypatch, kind):
    monkeypatch.setattr(float8, "EMULATES", True)
    torch.manual_seed(0)
    model = models.Gpt(width=64, layers=1)
    tokens = torch.randint(0, 19, (1, 32))
    with torch.autocast("cpu", torch.bfloat16):
        expected = models.next_token_loss(model, tokens)
        float8.convert(model.blocks, kind)
        found = models.next_token_loss(model, tokens)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), abs=0.1)
    assert model.blocks[0].up.weight.grad.shape == (128, 64)


@NEEDS_TORCHAO
@pytest.mark.filterwarnings("default:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch.compile's
@pytest.mark.parametrize("kind", ["fp8", "mxfp8"])
def test_equal_blocks_in_8_bits_are_compiled_once(monkeypatch, kind):
    monkeypatch.setattr(float8, "EMULATES", True)
    model, graphs = models.Gpt(width=64, layers=3), []

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    float8.convert(model.blocks, kind)
    for block in model.blocks:
        block.compile(backend=counted)
    with torch.autocast("cpu", torch.bfloat16):
        models.next_token_loss(model, torch.randint(0, 19, (1, 33))).backward()
    assert len(graphs) == 1


def test_which_layers_fit():
    assert float8._fits(nn.Linear(32, 64), 32) and not float8._fits(nn.Linear(48, 64), 32)
    assert replace(hardware.Device("a", 1, "cuda"), capability=8.9).multiplies_in("fp8")
