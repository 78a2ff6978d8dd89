"""Dtypes: in compute, in gradient reduction, of outputs and of what is kept."""

import copy
import functools
import inspect
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit import Accelerator
from shardkit.config.schema import Config
from shardkit.distributed import process
from shardkit.distributed.modules import unwrapped
from shardkit.errors import UsageError
from shardkit.optim import clip, kernels, loss_scale, rebind
from shardkit.sharding import precision
from tests import loops, models
from tests.engine import parallel
from tests.loops import vectors
from tests.loops.net import layers, loss_of, started
from tests.models import Reductions


def config_for(world: int, strategy: int = 1, mixed_precision: str = "no", dtypes: Any = None, **fsdp: Any) -> Config:
    return Config(
        num_processes=world,
        use_cpu=True,
        mixed_precision=mixed_precision,
        shardkit={"precision": dtypes or {}},
        fsdp_config={"fsdp_sharding_strategy": strategy, **fsdp},
    )


def test_what_a_config_means():
    bf16, fp32 = torch.bfloat16, torch.float32
    assert precision.of(config_for(1)) == precision.Precision(None, fp32, None)
    assert precision.of(config_for(1, mixed_precision="bf16")) == precision.Precision(bf16, fp32, fp32)
    chosen = config_for(1, mixed_precision="fp16", dtypes={"reduce_dtype": "bf16", "output_dtype": "fp16"})
    assert precision.of(chosen) == precision.Precision(torch.float16, bf16, torch.float16)


def test_bf16_falls_back_where_the_device_has_none(monkeypatch, caplog):
    monkeypatch.setattr(precision, "has_bf16", lambda device: False)
    monkeypatch.setattr(precision.log, "propagate", True)
    monkeypatch.setattr(precision.log.parent, "propagate", True)
    config = precision.supported(config_for(1, mixed_precision="bf16"), torch.device("cpu"))
    assert precision.of(config).param is None and config.mixed_precision == "no"
    assert "cpu does not support bf16 (got bf16); training in fp32 instead" in caplog.text
    assert precision.supported(config_for(1, mixed_precision="fp16"), torch.device("cpu")).mixed_precision == "fp16"


def one_rank_without_bf16() -> str:
    here = process.start(config_for(2))
    if here.rank == 1:
        precision.has_bf16 = lambda device: False  # type: ignore[assignment]
    try:
        return precision.supported(config_for(2, mixed_precision="bf16"), here.device).mixed_precision
    finally:
        precision.has_bf16 = _HAS_BF16


_HAS_BF16 = precision.has_bf16


@pytest.mark.requirement("B4")
def test_one_rank_without_bf16_decides_for_all(ranks):
    assert ranks.run(2, one_rank_without_bf16) == ["no", "no"]


def dtypes_seen(strategy: int, mixed_precision: str, reduce_dtype: str | None) -> dict[str, Any]:
    """Dtypes in forward, in what is reduced (as the backend gets it), and of what remains."""
    config = config_for(2, strategy, mixed_precision, {"reduce_dtype": reduce_dtype})
    here = process.start(config)
    model = parallel(models.Gpt(), config)
    seen: dict[str, Any] = {}
    unwrapped(model).blocks[0].up.register_forward_hook(lambda m, a, out: seen.update(compute=str(out.dtype)))
    with Reductions() as reductions:
        with precision.autocast(config, here.device):
            output = model(torch.zeros(2, 5, dtype=torch.long))
        output.float().square().mean().backward()
    seen.update(output=str(output.dtype), reduced=sorted(set(reductions.dtypes)))
    parameters = list(model.parameters())
    seen.update(kept=str(parameters[0].dtype), gradient=str(parameters[0].grad.dtype))
    return seen


@pytest.mark.requirement("B4")
def test_fsdp_computes_in_bf16_and_reduces_in_fp32(ranks):
    expected = {"compute": "torch.bfloat16", "reduced": ["torch.float32"], "gradient": "torch.float32"}
    for seen in ranks.run(2, dtypes_seen, 1, "bf16", None):
        assert seen == {**expected, "kept": "torch.float32", "output": "torch.float32"}


@pytest.mark.requirement("N2")
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
@pytest.mark.parametrize("strategy", [1, 3])
def test_the_reduction_dtype_is_chosen_on_its_own(ranks, strategy, mixed_precision):
    for seen in ranks.run(2, dtypes_seen, strategy, mixed_precision, "bf16"):
        assert seen["compute"] == {"no": "torch.float32", "bf16": "torch.bfloat16"}[mixed_precision]
        assert seen["reduced"] == ["torch.bfloat16"]
        assert seen["kept"] == seen["gradient"] == "torch.float32"


def batch_norm(strategy: int) -> dict[str, Any]:
    config = config_for(2, strategy, "bf16", fsdp_transformer_layer_cls_to_wrap="ConvBlock")
    here = process.start(config)
    torch.manual_seed(0)
    model = models.ConvNet()
    reference = copy.deepcopy(model)
    sharded = parallel(model, config)
    inner = unwrapped(sharded)
    seen: dict[str, Any] = {}
    norm = inner.blocks[0].norm
    norm.register_forward_pre_hook(lambda m, args: seen.update(weight=str(m.weight.dtype)))
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with precision.autocast(config, here.device):
        loss = sharded(images).float().square().mean()
    loss.backward()
    expected = reference(images).square().mean()
    expected.backward()
    grad = inner.head.weight.grad
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    seen["loss"] = (loss - expected).abs().item()
    seen["gradient"] = ((grad - reference.head.weight.grad).norm() / reference.head.weight.grad.norm()).item()
    seen["statistics"] = str(norm.running_mean.dtype)
    seen["mean"] = (norm.running_mean - reference.blocks[0].norm.running_mean).abs().max().item()
    return seen


@pytest.mark.requirement("B4")
@pytest.mark.parametrize("strategy", [1, 3])
def test_batch_norm_stays_in_fp32(ranks, strategy):
    for seen in ranks.run(2, batch_norm, strategy):
        assert seen["weight"] == seen["statistics"] == "torch.float32"
        assert seen["loss"] < 0.02 and seen["gradient"] < 0.05 and seen["mean"] < 0.01


def fp16_steps(strategy: int, overflow_on: int | None) -> tuple[list[float], list[float], bool]:
    """(losses, scales, whether all ranks have the same weights) of a model with a parameter that is not sharded."""
    config = config_for(2, strategy, "fp16", {"init_scale": 256.0}, fsdp_transformer_layer_cls_to_wrap="Sequential")
    here = process.start(config)
    torch.manual_seed(0)
    model = models.Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    names = rebind.ParameterNames.of(model)
    model = parallel(model, config)
    rebind.rebind(optimizer, names, model)
    kernels.choose_kernels(optimizer)
    scaler = loss_scale.make_scaler(config, here.device)
    assert scaler is not None
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(here.rank))
    losses, scales = [], []
    for step in range(4):
        with precision.autocast(config, here.device):
            loss = (model(data).float() - 1).square().mean()
        scaler.scale(loss).backward()
        if step == 1 and here.rank == overflow_on:
            grad = unwrapped(model).inner[0][0].weight.grad
            (grad.to_local() if isinstance(grad, DTensor) else grad)[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        clip.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    scale = unwrapped(model).scale.detach().clone()
    dist.all_reduce(scale)
    return losses, scales, bool((scale / 2 - unwrapped(model).scale).abs() < 1e-6)


@pytest.mark.requirement("A9")
@pytest.mark.parametrize("strategy", [1, 3])
def test_fp16_trains_with_loss_scaling(ranks, strategy):
    for losses, scales, equal in ranks.run(2, fp16_steps, strategy, None):
        assert losses[-1] < losses[0] and equal
        assert scales == [256.0] * 4


def test_an_overflow_on_one_rank_is_everyones(ranks):
    for _, scales, equal in ranks.run(2, fp16_steps, 1, 1):
        assert scales == [256.0, 128.0, 128.0, 128.0] and equal


class Copies(TorchDispatchMode):
    """Counts copies from a GPU to the host that nothing waits for."""

    unfinished = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        is_to_host = isinstance(found, torch.Tensor) and found.is_cpu and args and getattr(args[0], "is_cuda", False)
        self.unfinished += bool(is_to_host and (kwargs or {}).get("non_blocking"))
        return found


def test_offloaded_gradients_are_unscaled_when_their_scale_has_arrived_from_the_gpu():
    with FakeTensorMode(), Copies() as copies:
        weight = nn.Parameter(torch.zeros(4))
        weight.grad = torch.ones(4)
        scale, found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        found = loss_scale.GradScaler("cpu")._unscale_grads_(torch.optim.SGD([weight]), scale, found_inf, False)
    assert copies.unfinished == 0
    assert [str(device) for device in found] == ["cpu"]


def loaded_in_bf16() -> tuple[str, str]:
    model = models.Gpt().to(torch.bfloat16)
    model.embed.weight.requires_grad_(False)
    model = parallel(model, config_for(2, 1, "bf16"))
    models.next_token_loss(model, torch.zeros(1, 4, dtype=torch.long)).backward()
    assert model.embed.weight.grad is None and model.head.weight.grad.dtype == torch.float32
    return str(model.head.weight.dtype), str(model.embed.weight.dtype)


@pytest.mark.requirement("B4")
def test_a_model_loaded_in_bf16_trains_on_fp32_weights(ranks):
    assert ranks.run(2, loaded_in_bf16) == [("torch.float32", "torch.bfloat16")] * 2


@pytest.mark.parametrize("patched", [False, True])
def test_a_copy_under_autocast_computes_with_its_own_parameters(patched):
    """Of a teacher that averages a prepared model, for instance. A forward that was replaced stays the replacement."""
    model = nn.Linear(4, 2)
    if patched:
        model.forward = lambda x: x + 1
    signature = inspect.signature(model.forward)
    precision.autocast_forward(model, Config(mixed_precision="bf16", use_cpu=True), torch.device("cpu"))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    ones = torch.ones(1, 4)
    expected = ones + 1 if patched else torch.zeros(1, 2)
    assert torch.equal(copied(ones), expected) and not torch.equal(model(ones), torch.zeros(1, 2))
    assert inspect.signature(model.forward) == signature
    precision.restore_forward(copied)
    assert ("forward" in vars(copied)) == patched


def test_each_accelerator_computes_in_its_own_precision(alone):
    model = nn.Linear(4, 2)
    expected = model(torch.ones(1, 4))
    for number, kind in enumerate(["bf16", "no", "bf16", "no"]):
        accelerator = Accelerator(mixed_precision=kind, config={"distributed_type": "NO", "use_cpu": True})
        output = accelerator.prepare(model)(torch.ones(1, 4))
        assert torch.equal(output, expected) == (kind == "no"), f"Accelerator {number}"


def test_a_forward_that_the_script_has_wrapped_since_stays(alone):
    model, calls = nn.Linear(4, 2), []
    Accelerator(mixed_precision="bf16", config={"distributed_type": "NO", "use_cpu": True}).prepare(model)
    before = model.forward
    model.forward = functools.wraps(before)(lambda x: calls.append(x) or before(x))
    Accelerator(mixed_precision="bf16", config={"distributed_type": "NO", "use_cpu": True}).prepare(model)
    precision.restore_forward(model)
    assert model(torch.ones(1, 4)).shape == (1, 2) and len(calls) == 1


def output_of(strategy: int, param: str | None) -> torch.dtype:
    model = nn.Linear(4, 2)
    config = config_for(dist.get_world_size(), strategy, dtypes={"output_dtype": "bf16", "param_dtype": param})
    precision.autocast_forward(model, config, torch.device("cpu"))
    return parallel(model, config)(torch.ones(1, 4)).dtype


@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize("param", [None, "fp32", "bf16"])
def test_outputs_have_their_dtype_in_any_mode_and_compute_dtype(ranks, strategy, param):
    assert ranks.run(2, output_of, strategy, param) == [torch.bfloat16] * 2


class LatentsAndImage(nn.Module):
    """Its values are whole numbers, which bf16 has exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.image = nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False)
        for parameter in self.parameters():
            parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter) % 3 - 1

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latents = self.style(x)
        return self.image(latents), latents


def penalty_on_latents(model: nn.Module) -> list[torch.Tensor]:
    image, latents = model(torch.tensor([[1.0, 2.0, 0.0, -1.0]]))
    (gradient,) = torch.autograd.grad(image.square().sum() + latents.sum(), latents, create_graph=True)
    gradient.square().sum().backward()
    whole = [torch.empty(p.shape).copy_(p.grad) for p in model.parameters()]
    return [image.detach(), latents.detach(), gradient.detach(), *whole]


def penalty_in_bf16(strategy: int) -> list[torch.Tensor]:
    config = config_for(dist.get_world_size(), strategy, "bf16", fsdp_auto_wrap_policy="NO_WRAP")
    model = LatentsAndImage()
    precision.autocast_forward(model, config, torch.device("cpu"))
    return penalty_on_latents(parallel(model, config))


@pytest.mark.parametrize("strategy", [1, 3])
def test_gradients_for_an_output_are_those_before_its_cast(ranks, strategy):
    if strategy == 1 and not hasattr(FSDPState, "_cast_output_dtype"):
        pytest.skip("torch 2.11 casts the outputs of a unit itself")
    expected = penalty_on_latents(LatentsAndImage())
    for found in ranks.run(2, penalty_in_bf16, strategy):
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == torch.float32 and torch.equal(one, other)


def test_what_changes_an_output_in_place_is_differentiated_by_itself(alone):
    model = Accelerator(mixed_precision="bf16", config={"distributed_type": "NO", "use_cpu": True}).prepare(
        LatentsAndImage()
    )
    _, latents = model(torch.ones(1, 4))
    latents *= 2
    (gradient,) = torch.autograd.grad((3 * latents).sum(), latents)
    assert torch.equal(gradient, torch.full((1, 6), 3.0))


def backward_by_hand(begins_well: bool) -> str:
    accelerator = Accelerator(config={"use_cpu": True, "num_processes": 2, "mixed_precision": "fp16"})
    model = models.Gpt(width=16, layers=1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(0, 19, (2, 8))
    if begins_well:
        accelerator.backward(models.next_token_loss(model, tokens))
        optimizer.step()
        optimizer.zero_grad()
    models.next_token_loss(model, tokens).backward()
    try:
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    except UsageError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize("begins_well", [False, True])
def test_gradients_without_fp16s_loss_scale_are_refused(ranks, begins_well):
    for said in ranks.run(2, backward_by_hand, begins_well):
        assert said == (
            "optimizer step: gradients lack the loss scale that fp16 needs (got a call of loss.backward()); call "
            "accelerator.backward(loss)."
        )


def run_under_fp16(strategy: int, loop: str = "usual") -> loops.Run:
    """A run with the settings of a loop, and fp16; strategy 0: of plain torch, in fp32."""
    if not strategy:
        return loops.Run()
    config = loops.config_of(strategy, loops.LOOPS[loop]).model_copy(update={"mixed_precision": "fp16"})
    return loops.RanksRun(accelerator=Accelerator(config=config))


def gradient_penalty(strategy: int, is_in_loss: bool) -> list[float]:
    """Losses under fp16, with gradients of the inputs: in the loss, or between backward and step."""
    torch.manual_seed(0)
    run = run_under_fp16(strategy, "gradient_penalty")
    model = layers(5, 7, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        loss = 0.01 * model(run.draw(step, 5)).square().mean()
        if is_in_loss:
            inputs = run.draw(step, 5).requires_grad_()
            (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
            loss = loss + 0.01 * slope.square().mean()
        run.backward(loss)
        if not is_in_loss:
            inputs = run.draw(step, 5).requires_grad_()
            torch.autograd.grad(model(inputs).sum(), inputs)
        assert run.accelerator.clip_grad_norm_(model.parameters(), 1.0).isfinite()
        run.step(optimizer)
        run.see_mean(loss)
    return run.seen


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 3])
def test_gradients_of_inputs_need_no_loss_scale(ranks, strategy):
    for is_in_loss in (True, False):
        for losses in ranks.run(2, gradient_penalty, strategy, is_in_loss):
            assert losses == pytest.approx(ranks.run(1, gradient_penalty, strategy, is_in_loss)[0], abs=1e-4)


def clipped_for_another(strategy: int) -> list[float]:
    """Norms under fp16, where a second optimizer of the same parameters takes over; in the last step they overflow."""
    run = run_under_fp16(strategy)
    torch.manual_seed(0)
    model, first = started(run)
    second = run.prepare(torch.optim.SGD(run.unwrap(model).parameters(), lr=0.1))
    for step in range(5):
        loss = loss_of(model, run.batch(step)) * (float("inf") if step == 4 else 1.0)
        run.backward(loss)
        run.clip(model.parameters(), 0.5)
        optimizer = second if step >= 2 else first
        optimizer.step()
        optimizer.zero_grad()
        if not run.is_plain:
            assert optimizer.step_was_skipped == (step == 4)
    return run.seen[:4]


@pytest.mark.parametrize("strategy", [1, 3])
def test_two_optimizers_of_the_same_parameters_unscale_their_gradients_once(ranks, strategy):
    expected = clipped_for_another(0)
    for norms in ranks.run(2, clipped_for_another, strategy):
        assert norms == pytest.approx(expected, rel=0.03)


def trained_by_two(strategy: int, is_alternating: bool) -> list[float]:
    """Losses and norms under fp16, where a second optimizer steps on some of the parameters of the first, before it.
    `is_alternating`: each on a backward of its own, as in adversarial training."""
    run = run_under_fp16(strategy)
    torch.manual_seed(0)
    model, _ = started(run)
    head = run.unwrap(model).head
    first = run.prepare(torch.optim.SGD(run.unwrap(model).parameters(), lr=0.1))
    second = run.prepare(torch.optim.SGD(head.parameters(), lr=0.1))
    for step in range(5):
        overflows = step == 2
        with run.accumulate(model):
            for number, optimizer in enumerate((second, first)):
                if number == 0 or is_alternating:
                    first.zero_grad()
                    loss = loss_of(model, run.batch(step)) * (float("inf") if overflows else 1.0)
                    run.backward(loss)
                if run.is_plain and overflows:
                    continue
                optimizer.step()
                if not run.is_plain:
                    assert optimizer.step_was_skipped == overflows
                run.see_mean(loss)
                run.see(head.weight.grad.norm())
    return [value for value in run.seen if math.isfinite(value)]


@pytest.mark.slow
@pytest.mark.parametrize("is_alternating", [False, True])
@pytest.mark.parametrize("strategy", [1, 3])
def test_two_optimizers_that_share_some_parameters_unscale_those_once(ranks, strategy, is_alternating):
    expected = trained_by_two(0, is_alternating)
    assert len(expected) == 16
    for seen in ranks.run(2, trained_by_two, strategy, is_alternating):
        assert seen == pytest.approx(expected, rel=0.02)


def weighed_by_returned_gradients(strategy: int) -> float:
    """The norm of the gradients of a step, before which `torch.autograd.grad` has returned some without a scale."""
    run = run_under_fp16(strategy)
    torch.manual_seed(0)
    model, optimizer = started(run)
    loss = loss_of(model, run.batch(0))
    torch.autograd.grad(loss, run.unwrap(model).head.weight, retain_graph=True)
    run.backward(loss)
    norm = float(run.accelerator.clip_grad_norm_(model.parameters(), 10.0))
    optimizer.step()
    return norm


@pytest.mark.parametrize("strategy", [1, 3])
def test_gradients_that_are_returned_need_no_loss_scale(ranks, strategy):
    run = loops.Run()
    torch.manual_seed(0)
    model, _ = started(run)
    loss_of(model, run.batch(0)).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0))
    assert ranks.run(2, weighed_by_returned_gradients, strategy) == [pytest.approx(expected, rel=0.02)] * 2


def joined_and_split(strategy: int) -> list[float]:
    """Losses under fp16 where a script halves all gradients in one vector."""
    torch.manual_seed(0)
    model = vectors.Scaled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run, losses = run_under_fp16(strategy, "gradients_joined_and_split"), []
    model, optimizer = run.prepare(model, optimizer)
    for step in range(4):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        parameters = list(model.parameters())
        joined = torch.cat([p.grad.flatten() for p in parameters]) * 0.5
        for p, gradient in zip(parameters, joined.split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.reshape(p.shape)
        run.step(optimizer)
        losses.append(float(run.mean(loss)))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 3])
def test_gradients_that_a_script_has_put_together_are_unscaled(ranks, strategy):
    expected = joined_and_split(0)
    assert expected[-1] < expected[0] - 0.05
    for found in ranks.run(2, joined_and_split, strategy):
        assert found == pytest.approx(expected, abs=0.01)
