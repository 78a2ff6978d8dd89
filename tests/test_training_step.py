"""Accumulation by hand, clipping, and fp16: losses and weights are those of one process."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardkit import Accelerator
from shardkit.errors import UsageError
from shardkit.sharding.fsdp.shard_model import can_reduce_unused
from tests.training import BOTH, DDP, FULL, loss_of, one_step, parts, plain, weights_of


def unsynced_by_hand(config: dict) -> list[torch.Tensor]:
    accelerator = Accelerator(config=config)
    model, optimizer, loader, scheduler = parts(24, 4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    batches = list(loader)
    for batch in batches[:-1]:
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, batch) / 3)
    accelerator.backward(loss_of(model, batches[-1]) / 3)
    accelerator.clip_grad_norm_(model.parameters(), 0.3)
    optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("config", BOTH)
def test_no_sync_gives_the_same_sums(ranks, config):
    expected = plain(24, 8, 3, 1)["weights"]
    for found in ranks.run(2, unsynced_by_hand, config):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def dropped_unsynced(config: dict, folder: str, way: str) -> list[torch.Tensor]:
    """A loop that gives up the gradients of a micro-batch under no_sync, as at the end of an epoch."""
    accelerator = Accelerator(config=config)
    model, optimizer, loader, _ = parts(24, 8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first, second, third = loader
    one_step(accelerator, model, optimizer, first)
    accelerator.save_state(folder)
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model, second))
    if way == "load":
        accelerator.load_state(folder)
    else:
        (model if way == "model" else optimizer).zero_grad()
    one_step(accelerator, model, optimizer, third)
    return weights_of(model)


@pytest.mark.parametrize("way", ["optimizer", "model", "load"])
@pytest.mark.parametrize("config", BOTH)
def test_gradients_under_no_sync_can_be_dropped(ranks, alone, tmp_path, config, way):
    expected = dropped_unsynced({"use_cpu": True}, str(tmp_path / "alone"), way)
    for found in ranks.run(2, dropped_unsynced, config, str(tmp_path / "ranks"), way):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def stepped_unsynced(config: dict) -> list[torch.Tensor]:
    """A loop whose micro-batches before a step are all under no_sync."""
    accelerator = Accelerator(config=config)
    model, optimizer, loader, _ = parts(32, 8 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, batch in enumerate(loader):
        with accelerator.no_sync(model):
            accelerator.backward(loss_of(model, batch))
        if number % 2:
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.counters.step == 2
    return weights_of(model)


SCALED = FULL | {"mixed_precision": "fp16", "shardkit": {"precision": {"init_scale": 64}}}


HYBRID = FULL | {
    "fsdp_config": {"fsdp_sharding_strategy": 4},
    "shardkit": {"mesh": {"replicate_size": 2, "shard_size": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "world"),
    [
        pytest.param(FULL, 2, id="full"),
        pytest.param(DDP, 2, id="ddp"),
        pytest.param(SCALED, 2, id="fp16"),
        pytest.param(HYBRID, 4, id="hybrid"),
        pytest.param(
            FULL | {"shardkit": {"ddp_find_unused_parameters": True}},
            2,
            id="unused",
            marks=pytest.mark.skipif(not can_reduce_unused(), reason="FSDP reduces them from torch 2.13 on"),
        ),
    ],
)
def test_a_step_after_no_sync_alone_reduces_its_gradients(ranks, alone, config, world):
    expected = stepped_unsynced({"distributed_type": "NO", "use_cpu": True})
    for found in ranks.run(world, stepped_unsynced, config):
        bound = 5e-3 if "mixed_precision" in config else 1e-5
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def clipped_by(config: dict, batch_size: int, kind: str) -> tuple[list[torch.Tensor], list[float]]:
    """Steps that clip parameters collected before `prepare`: all, by value, or with others collected after it."""
    accelerator = Accelerator(config=config)
    model, optimizer, loader, _ = parts(16, batch_size)
    early = list(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if kind == "some":
        early = early[:3] + list(model.parameters())[3:]
    norms = []
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        if kind == "value":
            accelerator.clip_grad_value_(early, 0.01)
        else:
            norms.append(float(accelerator.clip_grad_norm_(iter(early), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model), norms


@pytest.mark.parametrize("kind", ["all", "some", "value"])
def test_parameters_collected_before_prepare_are_clipped(ranks, alone, kind):
    expected, norms = clipped_by({"use_cpu": True}, 8, kind)
    for found, norms_on_rank in ranks.run(2, clipped_by, FULL, 4, kind):
        assert norms_on_rank == pytest.approx(norms, rel=1e-4)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_an_iterator_that_the_optimizer_has_read_clips_nothing_and_says_so(alone, caplog):
    accelerator = Accelerator(config={"use_cpu": True})
    model, _, loader, _ = parts(16, 4)
    trained = filter(lambda parameter: parameter.requires_grad, model.parameters())
    optimizer = torch.optim.SGD(trained, lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        assert accelerator.clip_grad_norm_(trained, 1e-9) == 0
        optimizer.step()
    assert [one.split(",")[0] for one in caplog.messages if "clip" in one] == ["clip: no parameters are given"]


def with_and_without_accumulate() -> list[torch.Tensor]:
    accelerator = Accelerator(config=FULL | {"mixed_precision": "fp16", "shardkit": {"precision": {"init_scale": 64}}})
    model, optimizer, loader, _ = parts(16, 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    norms = []
    for epoch in range(4):
        for batch in loader:
            with accelerator.accumulate(model) if epoch % 2 else nullcontext():
                for _ in range(2):  # as a critic has more steps than its generator
                    accelerator.backward(loss_of(model, batch))
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 100.0))
                    optimizer.step()
                    optimizer.zero_grad()
    assert accelerator.counters.step == 16
    return norms


def test_loops_with_and_without_accumulate_may_follow_one_another(ranks):
    norms = ranks.run(2, with_and_without_accumulate)[0]
    assert max(norms) < 20, "one that still had the loss scale would be 64 times as large"


def clamped() -> float:
    accelerator = Accelerator(config=FULL)
    model, optimizer, loader, _ = parts(8, 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch) * 100)
        accelerator.clip_grad_value_(model.parameters(), 0.25)
    return max(float(p.grad.full_tensor().abs().max()) for p in model.parameters())


def test_values_are_clamped(ranks):
    assert ranks.run(2, clamped) == [0.25, 0.25]


def fp16(config: dict, init_scale: float) -> dict[str, Any]:
    config = config | {"mixed_precision": "fp16", "shardkit": {"precision": {"init_scale": init_scale}}}
    accelerator = Accelerator(config=config)
    model, optimizer, loader, scheduler = parts(160, 8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    before, skipped, unchanged, norms = weights_of(model), 0, True, []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        skipped += accelerator.optimizer_step_was_skipped
        if accelerator.counters.step == 0:
            now = weights_of(model)
            unchanged = unchanged and all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    return {
        "skipped": skipped,
        "steps": accelerator.counters.step,
        "scheduler": scheduler.scheduler.last_epoch,
        "scale": accelerator.scaler.get_scale(),
        "unchanged": unchanged,
        "norm": norms[-1],
    }


@pytest.mark.slow
@pytest.mark.requirement("A9")
@pytest.mark.parametrize("config", BOTH)
def test_fp16_skips_overflows_on_all_ranks_and_the_schedule_waits(ranks, config):
    first, second = ranks.run(2, fp16, config, 2.0**19)
    assert first == second
    assert first["skipped"] >= 1 and first["unchanged"]
    assert first["steps"] == first["scheduler"] == 10 - first["skipped"] >= 1
    assert first["scale"] == 2.0 ** (19 - first["skipped"])
    assert 0 < first["norm"] < 50, "the norm is that of unscaled gradients"


def norms_after_unscaling(config: dict) -> list[float]:
    """Norms of the gradients by torch, whose loss scale was removed: of all optimizers, of one, of the one inside, of
    several; in the end what is said of one that was not prepared."""
    config = config | {"mixed_precision": "fp16", "shardkit": {"precision": {"init_scale": 1024}}}
    accelerator = Accelerator(config=config)
    model, inner, loader, _ = parts(40, 4)
    model, optimizer, loader = accelerator.prepare(model, inner, loader)
    norms = []
    for batch, given in zip(loader, (None, optimizer, inner, [optimizer], (inner,)), strict=True):
        accelerator.backward(loss_of(model, batch))
        accelerator.unscale_gradients(given)
        accelerator.unscale_gradients()
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.zero_grad()
        accelerator.scaler.update()
    with pytest.raises(UsageError, match=r"unscale_gradients: not a prepared optimizer \(got SGD\)"):
        accelerator.unscale_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    return norms


@pytest.mark.parametrize("config", BOTH)
def test_the_loss_scale_is_removed_of_the_optimizers_given(ranks, config):
    for norms in ranks.run(2, norms_after_unscaling, config):
        assert len(norms) == 5 and max(norms) < 20, "one that still had the loss scale would be 1024 times as large"


def overflow_on_one_rank() -> tuple[bool, float]:
    accelerator = Accelerator(config=FULL | {"mixed_precision": "fp16", "shardkit": {"precision": {"init_scale": 8}}})
    model, optimizer, loader, _ = parts(8, 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        if dist.get_rank() == 1:
            next(model.parameters()).grad.to_local().fill_(float("inf"))
        optimizer.step()
    return accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale()


def test_an_overflow_on_one_rank_is_one_on_all(ranks):
    assert ranks.run(2, overflow_on_one_rank) == [(True, 4.0), (True, 4.0)]


def steps_left_out(config: dict) -> tuple[int, float]:
    """A script that leaves a step out where the norm is not finite; the steps taken, and the scale after them."""
    config = config | {"mixed_precision": "fp16", "shardkit": {"precision": {"init_scale": 2.0**19}}}
    accelerator = Accelerator(config=config)
    model, optimizer, loader, _ = parts(160, 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        if accelerator.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        optimizer.zero_grad()
    return accelerator.counters.step, accelerator.scaler.get_scale()


@pytest.mark.parametrize("config", BOTH)
def test_a_script_may_leave_out_the_step_after_an_overflow(ranks, config):
    first, second = ranks.run(2, steps_left_out, config)
    taken, scale = first
    assert first == second
    assert 0 < taken < 10 and scale == 2.0 ** (19 - (10 - taken)), "each overflow halves the scale"


def test_what_is_no_loss_or_no_parameter_is_refused_in_words():
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True})
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 1)))
    loss = model(torch.ones(3, 2)).mean()
    for wrong, got in ((loss.item(), "float"), ({"loss": loss}, "dict"), (None, "NoneType")):
        with pytest.raises(
            UsageError, match=rf"backward: the loss must be a tensor \(got {got}\); give the loss itself"
        ):
            accelerator.backward(wrong)
    accelerator.backward(loss)
    for wrong, got in (
        (model, "Linear"),
        (model[0], "Linear"),
        (list(model.named_parameters()), "tuple"),
        (1.0, "float"),
    ):
        for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
            with pytest.raises(UsageError, match=rf"clip: not parameters \(got {got}\); use model\.parameters\(\)"):
                clip(wrong, 1.0)
    with pytest.raises(UsageError, match=r"autocast: expected an object with `enabled` \(got False\)"):
        accelerator.autocast(False)


@pytest.mark.parametrize("lose", ["gather", "reduce"])
def test_a_loss_of_what_was_gathered_without_gradients_is_refused(alone, lose):
    accelerator = Accelerator(config={"use_cpu": True, "num_processes": 1})
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    with pytest.raises(UsageError, match=r"depends on nothing that is trained .* accelerator\.gather_with_gradients"):
        accelerator.backward(getattr(accelerator, lose)(model(torch.ones(3, 2))).mean())
    accelerator.backward(accelerator.gather_with_gradients(model(torch.ones(3, 2))).mean())
    assert model.weight.grad.full_tensor().tolist() == [[1, 1]]


def test_a_backward_between_clipping_and_step_is_told(alone):
    accelerator = Accelerator(config={"use_cpu": True, "mixed_precision": "fp16"})
    model, optimizer, loader, _ = parts(16, 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first, second = loader
    accelerator.backward(loss_of(model, first))
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.backward(loss_of(model, second))
    with pytest.raises(UsageError) as told:
        optimizer.step()
    assert str(told.value) == (
        "optimizer step: gradients of AdamW have fp16's loss scale in part only (got a backward after clip_grad_norm_ "
        "or unscale_gradients, before its step); call step() of the prepared optimizer, or its zero_grad() to leave "
        "the step out, before the next backward."
    )


def test_a_step_without_gradients_is_a_warning_under_fp16_too(alone, caplog):
    accelerator = Accelerator(config={"use_cpu": True, "mixed_precision": "fp16"})
    model, optimizer, loader, _ = parts(16, 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    optimizer.step()
    assert any(one.startswith("optimizer: no parameter had a gradient in the first step") for one in caplog.messages)
    for batch in loader:
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        optimizer.step()
    assert accelerator.scaler.get_scale() == 2.0**16


def optimizers_that_stay(config: dict) -> int:
    """Cells of a notebook, run again, each with an Accelerator and an optimizer of its own; the optimizers that are
    still there."""
    model, _, loader, _ = parts(8, 4)
    (batch,) = list(loader)[:1]
    made = []
    for _ in range(3):
        accelerator = Accelerator(config=config)
        optimizer = torch.optim.AdamW(model.parameters())
        made.append(weakref.ref(optimizer))
        prepared, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(loss_of(prepared, batch))
        optimizer.step()
        optimizer.zero_grad()
        del accelerator, optimizer
        gc.collect()
    return sum(one() is not None for one in made)


@pytest.mark.parametrize("config", BOTH)
def test_an_earlier_accelerator_ends_though_its_model_is_prepared_again(ranks, config):
    assert ranks.run(2, optimizers_that_stay, config) == [1, 1]
