"""What the Accelerator's single methods give on live ranks: prepare, fp16, gathering, turns, stopping."""

import json
import logging
import logging.handlers
import os
import signal
import socket
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from shardkit import Accelerator, ProjectConfiguration, env, init_empty_weights
from shardkit.config import files
from shardkit.config.schema import Config, DistributedType
from shardkit.distributed import control
from shardkit.errors import CheckpointSaveError, ConfigError, Preempted, UsageError
from shardkit.runtime import objects, preemption, summary
from tests.test_accelerator import FULL, Model, Points, loss_of, parts, plain, weights_of

DDP = {"distributed_type": "MULTI_CPU"}
BOTH = [pytest.param(FULL, id="full"), pytest.param(DDP, id="ddp")]


def one_step(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: Any) -> None:
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()


# ---- prepare ----


def prepared_in_pieces(config: dict, order: str) -> list[torch.Tensor]:
    accelerator = Accelerator(config=config)
    model, optimizer, loader, scheduler = parts(16, 4)
    for batch in loader:  # the optimizer has state before it is prepared
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        break
    if order == "model first":
        model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
    else:
        optimizer, model = accelerator.prepare_optimizer(optimizer), accelerator.prepare_model(model)
    loader, scheduler = accelerator.prepare_data_loader(loader), accelerator.prepare_scheduler(scheduler)
    assert accelerator.prepare(model, optimizer, loader, scheduler) == (model, optimizer, loader, scheduler)
    for batch in loader:
        one_step(accelerator, model, optimizer, batch)
        scheduler.step()
    assert accelerator.counters.step == 2
    return weights_of(model)


def by_hand() -> list[torch.Tensor]:
    model, optimizer, loader, scheduler = parts(16, 4)
    first = next(iter(loader))
    for batch in [first, *DataLoader(Points(16), batch_size=8)]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch is not first:
            scheduler.step()
    return weights_of(model)


@pytest.mark.requirement("D3")
@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_objects_may_be_prepared_one_by_one_and_an_optimizer_keeps_its_state(ranks, config, order):
    for found in ranks.run(2, prepared_in_pieces, config, order):
        torch.testing.assert_close(found, by_hand(), rtol=1e-5, atol=1e-6)


def counted_at_a_save(config: dict) -> list[tuple[int, int, int]]:
    accelerator = Accelerator(config=config, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = accelerator.prepare(*parts(32, 4))
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            one_step(accelerator, model, optimizer, batch)
            at_step = accelerator.counters.state_dict()
            found.append((at_step["step"], at_step["samples_seen"], accelerator.counters.samples_seen))
    accelerator.counters.load_state_dict({"step": 5, "samples_seen": 60})
    assert accelerator.counters.state_dict() == {"step": 5, "samples_seen": 60}
    return found


@pytest.mark.parametrize("config", BOTH)
def test_a_save_counts_samples_up_to_the_last_step(ranks, config):
    expected = [(0, 0, 8), (1, 16, 16), (1, 16, 24), (2, 32, 32)]
    assert ranks.run(2, counted_at_a_save, config) == [expected] * 2


def two_models(config: dict, zero_first: bool) -> tuple[int, int, list[torch.Tensor]]:
    accelerator = Accelerator(config=config, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    student, teacher = Model(), Model().requires_grad_(False)
    other = Model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (student, other)]
    student, teacher, nothing, other, first, second = accelerator.prepare(student, teacher, None, other, *optimizers)
    assert nothing is None
    loader = accelerator.prepare(DataLoader(Points(32), batch_size=4))
    for batch in loader:
        with accelerator.accumulate(student, other):
            target = teacher(batch["x"])
            for model, optimizer in ((student, first), (other, second)):
                if zero_first:
                    optimizer.zero_grad()
                accelerator.backward(nn.functional.mse_loss(model(batch["x"]), target))
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad()
    return accelerator.counters.step, accelerator.counters.samples_seen, weights_of(student) + weights_of(other)


def two_models_by_hand() -> list[torch.Tensor]:
    torch.manual_seed(1)
    student, teacher = Model(), Model().requires_grad_(False)
    other = Model()
    for model in (student, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Points(32), batch_size=16):
            nn.functional.mse_loss(model(batch["x"]), teacher(batch["x"])).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(student) + weights_of(other)


@pytest.mark.requirement("N4")
@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize("zero_first", [False, True])
def test_several_models_in_turn_and_one_without_an_optimizer(ranks, config, zero_first):
    for steps, samples, weights in ranks.run(2, two_models, config, zero_first):
        assert (steps, samples) == (2, 32)
        torch.testing.assert_close(weights, two_models_by_hand(), rtol=1e-5, atol=1e-6)


def from_file(path: str) -> list[torch.Tensor]:
    accelerator = Accelerator(config=FULL)
    with init_empty_weights():
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer, model = accelerator.prepare(optimizer, model, weights=path)
    for batch in accelerator.prepare(DataLoader(Points(16), batch_size=4)):
        one_step(accelerator, model, optimizer, batch)
    return weights_of(model)


@pytest.mark.requirement("A7")
def test_a_model_without_memory_is_filled_from_a_file_and_its_optimizer_follows(ranks, tmp_path):
    model, optimizer, loader, _ = parts(16, 8)
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(2, from_file, str(tmp_path / "model.safetensors")):
        torch.testing.assert_close(found, weights_of(model), rtol=1e-5, atol=1e-6)


def refusals() -> list[str]:
    accelerator = Accelerator(config=FULL)
    model, other = Model(), Model()
    messages = []
    with pytest.raises(UsageError) as caught:
        accelerator.prepare(model, {"lr": 1}, "text")
    messages.append(str(caught.value))
    model = accelerator.prepare(model)
    with pytest.raises(UsageError) as caught:
        accelerator.prepare(torch.optim.SGD(other.parameters(), lr=1))
    messages.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        accelerator.clip_grad_norm_(other.parameters(), 1.0)
    messages.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        accelerator.register_for_checkpointing(object())
    messages.append(str(caught.value))
    return messages


def test_what_cannot_be_prepared_is_refused_in_words(ranks):
    for kinds, strangers, unknown, registered in ranks.run(2, refusals):
        assert kinds.splitlines() == [
            "prepare: argument 2 is neither model, optimizer, data loader nor scheduler (got dict); leave it out.",
            "prepare: argument 3 is neither model, optimizer, data loader nor scheduler (got str); leave it out.",
        ]
        assert strangers.startswith("prepare: SGD trains parameters of no prepared model (got 10 of 10")
        assert unknown.startswith("clip: not parameters of a prepared model (got 10); use model.parameters()")
        assert "no state_dict and load_state_dict (got object)" in registered


def prepared_again(config: dict, batch_size: int) -> tuple[list[torch.Tensor], list[float]]:
    """An evaluation, a training, an evaluation and a training of one model, as the Transformers Trainer does: each
    begins with `free_memory`, and prepares the model and the same optimizer again."""
    accelerator = Accelerator(config=config | {"shardkit": {"gradient_accumulation_steps": 2}})
    inner, optimizer, loader, scheduler = parts(24, batch_size)
    rates = []
    for _ in range(2):
        inner = accelerator.unwrap_model(accelerator.prepare_model(inner, evaluation_mode=True))
        with torch.no_grad():
            inner(torch.ones(2, 6))
        accelerator.free_memory()
        model, optimizer, batches, scheduler = accelerator.prepare(inner, optimizer, loader, scheduler)
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        inner = accelerator.unwrap_model(model)
        accelerator.free_memory()
    return weights_of(model), [*rates, accelerator.counters.step]


@pytest.mark.slow
def test_a_model_is_prepared_again_after_free_memory(ranks, alone):
    expected, rates = prepared_again({"use_cpu": True}, 8)
    assert rates[-1] == 4
    for config in (FULL, DDP):
        for found, on_rank in ranks.run(2, prepared_again, config, 4):
            assert on_rank == pytest.approx(rates)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


# ---- accumulation by hand, clipping, fp16 ----


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


@pytest.mark.requirement("A9")
@pytest.mark.parametrize("config", BOTH)
def test_fp16_skips_overflows_on_all_ranks_and_the_schedule_waits(ranks, config):
    first, second = ranks.run(2, fp16, config, 2.0**19)
    assert first == second
    assert first["skipped"] >= 1 and first["unchanged"]
    assert first["steps"] == first["scheduler"] == 10 - first["skipped"] >= 1
    assert first["scale"] == 2.0 ** (19 - first["skipped"])
    assert 0 < first["norm"] < 50, "the norm is that of unscaled gradients"


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


# ---- gathering, turns, flags ----


def evaluated(length: int) -> list[int]:
    accelerator = Accelerator(config=FULL)
    loader = accelerator.prepare(DataLoader(Points(length), batch_size=2))
    found: list[int] = []
    for _ in accelerator.prepare(DataLoader(Points(4), batch_size=2)):  # an evaluation inside of a training loop
        for batch in loader:
            indices, values = accelerator.gather_for_metrics((batch["index"], batch["x"]))
            assert len(indices) == len(values)
            found += indices.tolist()
        assert accelerator.gather_for_metrics(torch.ones(2)).tolist() == [1, 1, 1, 1]
    return found


@pytest.mark.parametrize("length", [7, 8, 9])
def test_gather_for_metrics_has_every_sample_once(ranks, length):
    assert ranks.run(2, evaluated, length) == [list(range(length))] * 2


def turns_and_flags(folder: str) -> dict[str, Any]:
    accelerator = Accelerator(config=DDP)
    path = Path(folder) / "made"
    with accelerator.main_process_first():
        seen = path.exists()
        path.touch()
    flags = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    flags += [accelerator.check_trigger(), accelerator.check_trigger()]
    with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as part:
        pass
    with accelerator.split_between_processes({"a": torch.arange(3), "b": "xyz"}) as parts_of_dict:
        pass
    return {
        "seen": seen,
        "flags": flags,
        "part": part,
        "dict": (parts_of_dict["a"].tolist(), parts_of_dict["b"]),
        "main": accelerator.on_main_process(lambda: "main")(),
        "second": accelerator.on_process(process_index=1)(lambda: "second")(),
        "rank 0": accelerator.on_process(lambda: "rank 0")(),
        "last": accelerator.on_last_process(lambda: "last")(),
        "sum": accelerator.reduce(torch.tensor([1.0])).tolist(),
        "who": (accelerator.process_index, accelerator.num_processes, accelerator.is_main_process),
    }


def test_turns_flags_and_parts(ranks, tmp_path):
    first, second = ranks.run(2, turns_and_flags, str(tmp_path))
    assert (first["seen"], second["seen"]) == (False, True)
    assert first["flags"] == second["flags"] == [False, True, False]
    assert (first["part"], second["part"]) == ([1, 2], [3, 3])
    assert (first["dict"], second["dict"]) == (([0, 1], "xy"), ([2], "z"))
    assert (first["main"], second["main"]) == ("main", None)
    assert (first["rank 0"], second["rank 0"]) == ("rank 0", None)
    assert (first["second"], second["second"]) == (None, "second")
    assert (first["last"], second["last"]) == (None, "last")
    assert first["sum"] == [2.0]
    assert (first["who"], second["who"]) == ((0, 2, True), (1, 2, False))


def saved(folder: str) -> None:
    accelerator = Accelerator(config=FULL)
    model = accelerator.prepare(parts(8, 4)[0])
    accelerator.save(dict(model.named_parameters()), f"{folder}/weights.safetensors")
    accelerator.save({"step": 3}, f"{folder}/step.json")
    with pytest.raises(UsageError, match=r"safetensors and JSON only \(got safe_serialization=False\)"):
        accelerator.save({}, f"{folder}/x", safe_serialization=False)
    if accelerator.is_main_process:
        with pytest.raises(UsageError, match=r"only a dict of tensors .* can be saved \(got set"):
            accelerator.save({1}, f"{folder}/set.json")


def test_save_writes_safetensors_or_json(ranks, tmp_path):
    ranks.run(2, saved, str(tmp_path))
    torch.testing.assert_close(
        list(load_file(tmp_path / "weights.safetensors").values()), weights_of_new(), rtol=0, atol=0
    )
    assert json.loads((tmp_path / "step.json").read_text()) == {"step": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.json", "weights.safetensors"]


def weights_of_new() -> list[torch.Tensor]:
    named = dict(parts(8, 4)[0].named_parameters())
    return [named[name].detach() for name in sorted(named)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": torch.ones(2, dtype=torch.complex128)}, "a: safetensors does not support this dtype (got torch.complex"),
        ({"a": torch.eye(2).to_sparse()}, "a: only dense tensors can be saved (got torch.sparse_coo); change these"),
        ({"a": torch.ones(2, device="meta")}, "a: has no values (got a tensor on the meta device); change these"),
        ({0: torch.ones(2), "0": torch.zeros(2)}, "two names are '0' as text; change these first."),
        ({"a": {0: 1, "0": 2}}, "two keys are '0' as text); split the object"),
    ],
)
def test_what_save_cannot_write_is_said_and_nothing_is_left(tmp_path, value, text):
    with pytest.raises(UsageError) as raised:
        objects.save(value, tmp_path / "file")
    assert str(raised.value).startswith(f"save: {tmp_path}/file: ") and text in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_save_names_the_place_that_cannot_be_written(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match=r"taken: a folder has this name; give the name of a file\."):
        objects.save({"a": torch.ones(2)}, tmp_path / "taken")
    (tmp_path / "plain").touch()
    with pytest.raises(CheckpointSaveError, match=r"plain/x: cannot be written \(.*\); fix that, or give"):
        objects.save({"a": 1}, tmp_path / "plain" / "x")
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["plain", "taken"]


def refused_exports(folder: str) -> list[str]:
    accelerator = Accelerator(config=DDP)
    of_all = nn.Linear(2, 2).to(torch.complex128)
    of_one = of_all if accelerator.process_index else nn.Linear(2, 2)
    told = []
    for model in (of_all, of_one):
        with pytest.raises(CheckpointSaveError) as raised:
            accelerator.save_model(model, folder)
        told.append(str(raised.value))
    return told


def test_save_model_says_once_what_all_ranks_say(ranks, tmp_path):
    text = "weight: safetensors does not support this dtype (got torch.complex128); convert it first."
    text += " The previous contents of the folder are unchanged."
    where = f"save_model: {tmp_path}: "
    for told in ranks.run(2, refused_exports, str(tmp_path)):
        assert told == [where + text, f"{where}rank 1 (host {socket.gethostname()}): {text}"]


def test_problems_of_ranks_are_told_shortly():
    answers = [["a", f"{text}."] for text in "xxyzw"]
    expected = "rank 0 (host a) and 1 more: x; rank 2 (host a): y; rank 3 (host a): z (and 1 more)"
    assert control._failure(answers) == expected
    assert control._failure([["a", "x."], ["b", "x"]]) == "x"
    assert control._failure([["a", None], ["b", "x"]]) == "rank 1 (host b): x"
    assert control._failure([["a", None]]) == ""


# ---- configuration ----


def different_configurations() -> str:
    with pytest.raises(ConfigError) as caught:
        Accelerator(config=FULL, gradient_accumulation_steps=1 + dist.get_rank())
    return str(caught.value)


def test_ranks_with_different_configurations_all_stop(ranks):
    first, second = ranks.run(2, different_configurations)
    assert first == second
    assert first.startswith(
        "Accelerator: ranks have different configurations (got shardkit.gradient_accumulation_steps: 1 on rank 0, "
        "2 on rank 1); give every machine the same file"
    )


def test_a_missing_attribute_inside_a_property_is_named():
    class Mine(Accelerator):
        @property
        def rate(self) -> float:
            return self.config.no_such_setting

    with pytest.raises(AttributeError, match="no_such_setting"):
        _ = Mine(config={"use_cpu": True, "distributed_type": "NO"}).rate


def test_a_config_object_passes_the_checks_that_a_file_passes():
    wrong = Config(fsdp={"sharding_strategy": 3, "offload_params": True, "ignored_modules": "["}, num_machines=2)
    with pytest.raises(ConfigError) as caught:
        Accelerator(config=wrong)
    text = str(caught.value)
    assert "Accelerator(config=...): fsdp.offload_params: needs a sharding strategy (got NO_SHARD)" in text
    assert "fsdp.ignored_modules: is not a regular expression" in text and "num_processes: is fewer than one" in text


def address_spelled_otherwise() -> int:
    address = ("localhost", "127.0.0.1")[dist.get_rank()]
    return Accelerator(config=FULL | {"num_machines": 2, "main_process_ip": address}).num_processes


def test_machines_may_spell_the_address_of_machine_0_each_in_their_way(ranks):
    assert ranks.run(2, address_spelled_otherwise) == [2, 2]


def other_world() -> tuple[str, int]:
    with pytest.raises(ConfigError) as caught:
        Accelerator(config=FULL | {"num_processes": 3})
    return str(caught.value), caught.value.exit_code


@pytest.mark.requirement("B2")
def test_another_world_than_the_configured_one_is_an_error(ranks):
    for message, code in ranks.run(2, other_world):
        assert code == 2
        assert message.startswith(
            "Accelerator(config=...): num_processes: 3 requested (got 2 launched); launch the configured "
            "number of ranks, or change it: shardkit launch --num-processes 2 "
        )
        assert message.endswith(".py")


@pytest.mark.requirement("A6")
def test_the_state_dict_type_is_set_for_the_rest_of_the_run():
    accelerator = Accelerator(config=Config(distributed_type=DistributedType.NO, use_cpu=True))
    plugin = accelerator.state.fsdp_plugin
    assert plugin.state_dict_type.value == "SHARDED_STATE_DICT"
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert accelerator.config.fsdp.state_dict_type.value == "FULL_STATE_DICT" == plugin.state_dict_type.value
    with pytest.raises(ConfigError, match=r"unknown kind \(got 'HALF'\); use SHARDED_STATE_DICT or FULL_STATE_DICT"):
        plugin.set_state_dict_type("HALF")
    assert accelerator.state.distributed_type is DistributedType.NO
    assert "rank 0 of 1" in repr(accelerator.state)


def test_code_replaces_the_file_and_the_table_says_so(tmp_path, capsys):
    path = tmp_path / "shardkit.yaml"
    path.write_text("distributed_type: 'NO'\nuse_cpu: true\nmixed_precision: bf16\n")
    accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=4, config=path)
    assert accelerator.mixed_precision == "no" and accelerator.gradient_accumulation_steps == 4
    lines = summary.text(accelerator._run).splitlines()
    assert any(line.strip() == "Accelerator(mixed_precision=...): mixed_precision no" for line in lines)
    assert any(f"{path}:" in line for line in lines) and any("use_cpu True (line 2)" in line for line in lines)
    assert "mixed_precision: no from Accelerator(mixed_precision=...) replaces bf16 from" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"unknown precision \(got 'fp4'\); use no, fp16, bf16, fp8"):
        Accelerator(mixed_precision="fp4", config=path)
    with pytest.raises(ConfigError, match=r"must be an integer of at least 1 \(got 0\)"):
        accelerator.gradient_accumulation_steps = 0


def test_a_script_started_by_hand_is_one_process_and_says_so(tmp_path, capsys):
    path = tmp_path / "shardkit.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 4\n")
    accelerator = Accelerator(config=path)
    assert accelerator.num_processes == 1 and accelerator.distributed_type is DistributedType.NO
    assert "num_processes: 4 requested, but this script was started without a launcher" in capsys.readouterr().err


def test_what_accelerate_takes_and_shardkit_does_not_is_refused_in_words():
    with pytest.raises(UsageError) as caught:
        Accelerator(deepspeed_plugin=1, mixed_precison="no", fsdp_plugin=None)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        "Accelerator(deepspeed_plugin=...): not supported (got 1); shardkit does not run DeepSpeed"
    )
    assert lines[1].endswith("unknown argument (got 'no'); did you mean mixed_precision?")
    accelerator = Accelerator(config=Config(distributed_type=DistributedType.NO, use_cpu=True), device_placement=True)
    with pytest.raises(AttributeError, match="lomo_backward is not part of shardkit; LOMO is not supported"):
        accelerator.lomo_backward(1)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        accelerator.nonsense()
    with pytest.raises(UsageError, match="resume: auto needs a project folder"):
        Accelerator(config={"distributed_type": "NO", "shardkit": {"checkpoint": {"resume": "auto"}}}).resume()
    assert accelerator.resume() is False


def table(config: dict) -> list[str]:
    accelerator = Accelerator(config=config, gradient_accumulation_steps=2)
    model = Model()
    model.head.requires_grad_(False)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    accelerator.prepare(model, DataLoader(Points(16), batch_size=4))
    return summary.text(accelerator._run).splitlines()


def precision_of_fp64() -> str:
    accelerator = Accelerator(config=FULL)
    accelerator.prepare(Model().double())
    (line,) = [line for line in summary.text(accelerator._run).splitlines() if "precision" in line]
    return line


def test_the_table_says_that_fp64_gradients_are_reduced_in_fp64(ranks):
    assert "gradients reduced in float64" in ranks.run(2, precision_of_fp64)[0]


def test_the_table_says_what_runs(ranks):
    config = FULL | {"mixed_precision": "bf16", "fsdp_config": {"fsdp_sharding_strategy": 2}}
    lines = ranks.run(2, table, config)[0]
    text = "\n".join(lines)
    assert lines[:3] == ["what runs", "  world      2 ranks, cpu, gloo", "  strategy   SHARD_GRAD_OP, mesh shard 2"]
    assert "Model: 213 parameters, 9.9% frozen" in text
    assert "blocks.0.up.weight = blocks.1.up.weight" in text
    assert "parameters fp32, compute bf16, gradients reduced in fp32, outputs fp32" in text
    assert "4 x 2 ranks x 2 micro-batches = 16 samples a step" in text
    assert "units      1 x Block (69), root (144)" in text  # the root has the shared weight
    assert "fsdp.sharding_strategy SHARD_GRAD_OP" in text


# ---- stopping ----


def run_epochs(accelerator: Accelerator, model: nn.Module, optimizer: Any, loader: Any, scheduler: Any) -> None:
    """In the second batch, rank 1 gets a signal."""
    for number, batch in enumerate(chain.from_iterable(repeat(loader, 1000))):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            if number == 1 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def evaluate(accelerator: Accelerator, loader: Any) -> None:
    """In the second batch, rank 1 gets a signal. A loop without an exchange may be one rank's own."""
    if dist.get_rank() == 0:
        list(loader)
    for number, batch in enumerate(chain.from_iterable(repeat(loader, 1000))):
        accelerator.gather_for_metrics(batch["index"])
        if number == 1 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def told_to_stop_in_evaluation(path: str) -> str:
    env.update({env.RESOLVED: path})
    try:
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(Points(32), batch_size=4))
        with pytest.raises(Preempted) as caught:
            evaluate(accelerator, loader)
        return str(caught.value)
    finally:
        preemption.uninstall()


def told_to_stop(path: str) -> tuple[str, int, int, float, list[str]]:
    env.update({env.RESOLVED: path})
    heard = logging.handlers.BufferingHandler(1000)
    logging.getLogger("shardkit").addHandler(heard)
    try:
        accelerator = Accelerator(project_config=ProjectConfiguration(project_dir=None))
        model, optimizer, loader, scheduler = parts(32, 4)
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        with pytest.raises(Preempted) as caught:
            run_epochs(accelerator, model, optimizer, loader, scheduler)
        warnings = [record.getMessage() for record in heard.buffer if record.levelno == logging.WARNING]
        code, step = caught.value.exit_code, accelerator.counters.step
        return str(caught.value), code, step, scheduler.scheduler.last_epoch, warnings
    finally:
        logging.getLogger("shardkit").removeHandler(heard)
        preemption.uninstall()


@pytest.mark.slow
@pytest.mark.requirement("A9")
def test_a_signal_to_one_rank_stops_all_at_the_same_boundary(ranks, tmp_path):
    path = tmp_path / "resolved.yaml"
    text = "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nshardkit: {checkpoint: {resume: auto}}\n"
    files.write(files.read_text(text).config, path)
    warnings = []
    steps = set()
    for message, code, step, scheduled, heard in ranks.run(2, told_to_stop, str(path)):
        assert message.startswith(
            f"launch: stopped by a signal after step {step}; nothing was saved, because the script"
        )
        assert (code, scheduled) == (75, step)
        steps.add(step)
        warnings += heard
    assert len(steps) == 1 and min(steps) >= 2
    assert warnings == [
        "checkpoint.resume: nothing was resumed (got auto), and this run trains from the start; "
        "call accelerator.resume() after prepare."
    ], "one rank says it, once"
    assert all("after step 0" in message for message in ranks.run(2, told_to_stop_in_evaluation, str(path)))


@pytest.mark.parametrize(
    ("loop", "project_dir", "is_signalled", "is_told"),
    [
        ("plain", "run", False, True),
        ("plain", None, False, False),
        ("plain", None, True, True),
        ("backward", "run", True, False),
        ("loader", "run", False, False),
        ("two optimizers", "run", False, False),
    ],
)
def test_a_loop_without_step_boundaries_is_told_that_no_signal_stops_it(
    tmp_path, monkeypatch, capsys, loop, project_dir, is_signalled, is_told
):
    settings = {"use_cpu": True, "distributed_type": "NO"}
    files.write(files.read_text("distributed_type: 'NO'\nuse_cpu: true\n").config, tmp_path / "resolved.yaml")
    monkeypatch.setenv(env.RESOLVED, str(tmp_path / "resolved.yaml"))
    folder = project_dir and str(tmp_path / project_dir)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=bool(folder))
    try:
        accelerator = Accelerator(config=settings, project_config=project)
        model = torch.nn.Linear(2, 2)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(1 + (loop == "two optimizers"))]
        model, *optimizers = accelerator.prepare(model, *optimizers)
        batches = accelerator.prepare(DataLoader(Points(4))) if loop in ("loader", "two optimizers") else range(4)
        if is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted) if loop == "backward" else nullcontext():
            for _ in batches:
                for optimizer in optimizers:
                    loss = model(torch.ones(1, 2)).sum()
                    accelerator.backward(loss) if loop == "backward" else loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        preemption.uninstall()
    assert capsys.readouterr().err.count("stop signals: this loop cannot save and stop at one") == is_told


@pytest.mark.parametrize(("saved_at", "is_told"), [(2, True), (3, False), (0, False)])
def test_a_run_that_ends_after_its_newest_checkpoint_says_so(tmp_path, capsys, saved_at, is_told):
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"}, project_config=project)
    model = torch.nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(1, 4):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, saved_at) and saved_at:
            accelerator.save_state(blocking=False)
    accelerator.end_training()
    told = "the run ends at step 3, but its newest checkpoint is of step 2" in capsys.readouterr().err
    assert told == is_told
