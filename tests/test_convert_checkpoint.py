"""`shardkit checkpoint convert`: states that torch and Accelerate saved go on here, and nothing in them is executed."""

import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)

from shardkit.checkpoint.commands import convert, dcp
from shardkit.checkpoint.states import state
from shardkit.cli.main import run
from shardkit.errors import EXIT_CHECKPOINT, CheckpointCorrupted, CheckpointError
from shardkit.model.prepared import Prepared
from shardkit.runtime.checkpoints import resuming
from tests.checkpoints import Counter, build, digest_of, dropout_off, load, train


def extras(live, folder):
    torch.save(live.objects["scheduler.0"].state_dict(), folder / "scheduler.bin")
    torch.save(live.objects["registered.0"].state_dict(), folder / "custom_checkpoint_0.pkl")


def trained():
    live = build("fsdp")
    dropout_off(live)
    train(live, 2)
    return live


def as_sharded(folder):
    """What Accelerate writes for SHARDED_STATE_DICT: the same calls of torch, the same names."""
    live = trained()
    model, optimizer = live.models[0], live.optimizers[0]
    torch_dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    state = get_optimizer_state_dict(model, optimizer)
    torch_dcp.save({"optimizer": state}, checkpoint_id=folder / "optimizer_0")
    if torch.distributed.get_rank() == 0:
        extras(live, folder)
    return digest_of(live), train(live, 2, first=2)


def as_full(folder):
    """What Accelerate writes for FULL_STATE_DICT: rank 0 has it all."""
    live = trained()
    model, optimizer = live.models[0], live.optimizers[0]
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    if torch.distributed.get_rank() == 0:
        torch.save(weights, folder / "pytorch_model_fsdp.bin")
        torch.save(state, folder / "optimizer.bin")
        extras(live, folder)
    return digest_of(live), train(live, 2, first=2)


def as_bare(folder):
    """What a script on torch.distributed.checkpoint alone writes."""
    live = trained()
    model, optimizer = live.models[0], live.optimizers[0]
    both = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer), "epoch": 3}
    torch_dcp.save({"app": both}, checkpoint_id=folder)
    return digest_of(live), train(live, 2, first=2)


def go_on(path, with_objects):
    live = build("fsdp", seed=5)
    dropout_off(live)
    live.objects["counters"] = Counter()
    load(live, path, strict=with_objects)
    digest, count = digest_of(live), live.objects["registered.0"].value["count"]
    return digest, train(live, 2, first=2), live.objects["counters"].value, count


@pytest.mark.slow
@pytest.mark.requirement("A5")
@pytest.mark.parametrize("save", [as_sharded, as_full, as_bare], ids=lambda save: save.__name__)
def test_a_converted_run_goes_on(ranks, tmp_path, save, capsys):
    source = tmp_path / "source"
    source.mkdir()
    expected = ranks.run(2, save, source)
    arguments = ["checkpoint", "convert", str(source), "-o", str(tmp_path / "checkpoints"), "--json"]
    assert run(arguments) == 0, capsys.readouterr().err
    told = json.loads(capsys.readouterr().out)
    assert told["path"] == str(tmp_path / "checkpoints" / "step-00000002")
    assert run(["checkpoint", "verify", told["path"]]) == 0
    whole = save is not as_bare
    assert ("not converted: epoch" in told["notes"]) is not whole
    found = ranks.run(2, go_on, told["path"], whole)
    for (digest, losses), (digest_now, losses_now, counters, count) in zip(expected, found, strict=True):
        assert digest_now == digest
        assert counters == {"step": 2, "samples_seen": 0}
        assert count == (1 if whole else 0)
        if whole:
            assert losses_now == pytest.approx(losses, abs=1e-6)


ACCELERATE = """
import sys, torch
from accelerate import Accelerator
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

def step():
    loss = model(torch.ones(2, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()

for _ in range(3):
    step()
accelerator.save_state(sys.argv[1])
print([step(), step()])
"""

MODEL = """
import torch

def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 3))
"""


def resume_here(path):
    from shardkit import Accelerator

    wrap = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "FSDP", "fsdp_config": wrap})
    model = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.load_state(path)
    losses = []
    for _ in range(2):
        loss = model(torch.ones(2, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator.counters.step


@pytest.mark.slow
@pytest.mark.requirement("A5")
def test_a_checkpoint_of_accelerate_itself_goes_on(ranks, tmp_path, capsys, monkeypatch):
    source = tmp_path / "source"
    done = subprocess.run(
        [sys.executable, "-c", ACCELERATE, str(source)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    expected = json.loads(done.stdout.splitlines()[-1])
    (tmp_path / "given.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    arguments = ["checkpoint", "convert", str(source), "-o", str(tmp_path / "checkpoints")]
    assert run(arguments) == EXIT_CHECKPOINT
    text = "optimizer 0 numbers its parameters; give their names with --model, or skip the optimizer with"
    assert text in capsys.readouterr().err
    assert run([*arguments, "--model", "given:build"]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    assert "step-00000003: step 3, 1 model, 1 optimizer" in said.out
    assert "note: it has no position in the data" in said.err
    for losses, step in ranks.run(2, resume_here, str(tmp_path / "checkpoints" / "step-00000003")):
        assert losses == pytest.approx(expected, abs=1e-6)
        assert step == 5


class _Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.mark.parametrize("name", ["pytorch_model_fsdp.bin", "pytorch_model_fsdp_0/.metadata"])
def test_no_code_of_a_checkpoint_runs(tmp_path, capsys, name):
    path = tmp_path / "source" / name
    path.parent.mkdir(parents=True)
    mark = tmp_path / "executed"
    if path.suffix == ".bin":
        torch.save({"weight": torch.ones(1), "more": _Evil(str(mark))}, path)
    else:
        path.write_bytes(pickle.dumps(_Evil(str(mark))))
    assert run(["checkpoint", "convert", str(tmp_path / "source"), "-o", str(tmp_path / "out")]) == EXIT_CHECKPOINT
    said = capsys.readouterr().err
    assert "weights-only unpickler" in said or "mkdir is not allowed in it" in said
    assert not mark.exists()
    assert not (tmp_path / "out").exists()


def one_folder(folder):
    torch_dcp.save({"weight": torch.arange(12.0).reshape(3, 4)}, checkpoint_id=folder)


def test_damaged_folders_are_refused(ranks, tmp_path):
    ranks.run(1, one_folder, tmp_path)
    assert torch.equal(dcp.read(tmp_path)["weight"].to("cpu"), torch.arange(12.0).reshape(3, 4))
    (data,) = tmp_path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-200])
    with pytest.raises(CheckpointCorrupted, match=r"distcp: ends at byte \d+; it is truncated"):
        dcp.read(tmp_path)["weight"].to("cpu")
    index = Path(tmp_path, ".metadata")
    index.write_bytes(index.read_bytes().replace(data.name.encode(), b"../__0.distcp"[: len(data.name)]))
    with pytest.raises(CheckpointCorrupted, match="the index has no file for it"):
        dcp.read(tmp_path)["weight"].to("cpu")
    index.write_bytes(index.read_bytes()[:-9])
    with pytest.raises(CheckpointCorrupted, match="not a DCP index"):
        dcp.read(tmp_path)


def test_the_wrapper_of_ddp_leaves_no_name(tmp_path, capsys):
    (tmp_path / "source").mkdir()
    torch.save({"module.weight": torch.ones(2), "module.bias": torch.ones(1)}, tmp_path / "source/pytorch_model.bin")
    arguments = ["checkpoint", "convert", str(tmp_path / "source"), "-o", str(tmp_path / "out"), "--json"]
    assert run(arguments) == 0
    assert "its step is unknown; saved as step 0: set it with --step" in json.loads(capsys.readouterr().out)["notes"]
    assert run(["checkpoint", "inspect", str(tmp_path / "out"), "--json", "--tensors"]) == 0
    assert {*json.loads(capsys.readouterr().out)["tensors"]["model"]} == {"weight", "bias"}


def test_what_is_none_is_said_so(tmp_path, capsys):
    assert run(["checkpoint", "convert", str(tmp_path / "no"), "-o", str(tmp_path / "out")]) == EXIT_CHECKPOINT
    assert "no such folder; give the folder that save_state made." in capsys.readouterr().err
    assert run(["checkpoint", "convert", str(tmp_path), "-o", str(tmp_path / "out")]) == EXIT_CHECKPOINT
    assert "is not a checkpoint of Accelerate, torch.distributed.checkpoint or DeepSpeed" in capsys.readouterr().err


def one_step(optimizer=None, **settings):
    """A small model with a frozen parameter in the middle, trained for one step by an optimizer over all of them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 5), torch.nn.Linear(5, 2))
    model[1].weight.requires_grad_(False)
    trained = (optimizer or torch.optim.AdamW)(model.parameters(), lr=0.01, **settings)
    model(torch.ones(3, 4)).square().mean().backward()
    trained.step()
    trained.zero_grad()
    return model, trained


def save_alone(value, folder):
    """dcp.save of one process, which torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(value, checkpoint_id=folder, no_dist=True)


def only(model):
    """What `--model` gives for a function that returns the model alone."""
    return Prepared([{name: parameter.requires_grad for name, parameter in model.named_parameters()}], [])


def resumed(path, model, optimizer):
    """Weights after one more step with what was saved, and with the originals."""
    other, theirs = one_step(type(optimizer))
    load(state.Live([other], [theirs], {}, {}, seed=0), path, strict=False)
    found = []
    for one, own in ((model, optimizer), (other, theirs)):
        one(torch.ones(3, 4)).square().mean().backward()
        own.step()
        found.append(one.state_dict())
    return found


def test_an_optimizer_without_state_is_converted(tmp_path):
    model, optimizer = one_step(torch.optim.SGD)
    weights, momenta = get_state_dict(model, optimizer)
    save_alone({"model": weights}, tmp_path / "parts/pytorch_model_fsdp_0")
    save_alone({"optimizer": momenta}, tmp_path / "parts/optimizer_0")
    save_alone({"model": weights, "optimizer": momenta}, tmp_path / "bare")
    paths = [convert.convert(tmp_path / name, tmp_path / f"{name}-out").path for name in ("parts", "bare")]
    original, *loaded = [item for path in paths for item in resumed(path, *one_step(torch.optim.SGD))][1:]
    for weights in loaded:
        torch.testing.assert_close(weights, original, rtol=0, atol=0)


def test_several_models_in_one_folder_of_dcp_are_told_what_to_do(tmp_path):
    one, two = (one_step()[0].state_dict() for _ in range(2))
    saved = {"generator, critic": {"generator": one, "critic": two}, "0, 1": {"model": [one, two]}, "net": {"net": one}}
    for number, (got, value) in enumerate(saved.items()):
        save_alone(value, tmp_path / str(number))
        with pytest.raises(CheckpointError) as caught:
            convert.convert(tmp_path / str(number), tmp_path / "out", weights_only=True)
        told = f"{number}: holds several models, or one of another name (got {got}), and of a folder of torch.distr"
        assert told in str(caught.value) and "in a script with torch.distributed.checkpoint.load" in str(caught.value)


@pytest.mark.parametrize("kind", ["ddp", "dcp"])
@pytest.mark.parametrize("members", ["all", "trained"])
def test_an_optimizer_may_have_numbers_and_frozen_parameters(tmp_path, kind, members):
    model, optimizer = one_step()
    saved = optimizer.state_dict()
    if members == "trained":  # as if the frozen one, number 2, had never been given to it
        kept = {number - (number > 2): row for number, row in saved["state"].items()}
        saved = {"state": kept, "param_groups": [{**saved["param_groups"][0], "params": list(range(5))}]}
    if kind == "ddp":
        (tmp_path / "source").mkdir()
        torch.save(model.state_dict(), tmp_path / "source/pytorch_model.bin")
        torch.save(saved, tmp_path / "source/optimizer.bin")
    else:
        both = {"model": model.state_dict(), "optimizer": saved}
        save_alone(both, tmp_path / "source")
    done = convert.convert(tmp_path / "source", tmp_path / "out", prepared=only(model))
    expected, found = resumed(done.path, model, optimizer)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"count differs \(\d in the optimizer, 1 in --model, 1 of them"):
        convert.convert(tmp_path / "source", tmp_path / "more", prepared=Prepared([{"weight": True}], []))


TWO = """
import torch

def generator():
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2))

def both():
    first, second = generator(), generator()
    decayed = [p for p in second.parameters() if p.dim() > 1]
    others = [p for p in second.parameters() if p.dim() == 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed}]
    return first, second, torch.optim.AdamW(first.parameters(), lr=0.01), torch.optim.AdamW(groups, lr=0.02)

def one_optimizer():
    return both()[:3]

def strangers():
    first, second, *optimizers = both()
    return first, *optimizers
"""


REFUSED_FUNCTIONS = {
    "generator": "there are 2 models; let the function of --model return the models and optimizers that the run",
    "one_optimizer": "(4 + 2 parameters in the checkpoint, no optimizer of that number in that of --model)",
    "strangers": "an optimizer of 6 parameters that no model it returns has); check both names, and",
}


def two_models():
    """Two models with the same names and shapes, each with its optimizer; all trained for one step."""
    given: dict[str, Any] = {}
    exec(TWO, given)
    torch.manual_seed(0)
    return given["both"]()


def step_both(first, second, *optimizers):
    for number, model in enumerate((first, second)):
        (model(torch.ones(3, 4)).square().mean() * (number + 1)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return {"first": first.state_dict(), "second": second.state_dict()}


@pytest.mark.parametrize("kind", [pytest.param("numbers", marks=pytest.mark.slow), "names"])
def test_several_models_and_optimizers_go_on(tmp_path, monkeypatch, capsys, kind):
    *models, _, _ = parts = two_models()
    optimizers = parts[2:]
    step_both(*parts)
    source = tmp_path / "source"
    source.mkdir()
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        tail = f"_{number}" if number else ""
        if kind == "numbers":  # Accelerate under DDP
            torch.save(model.state_dict(), source / f"pytorch_model{tail}.bin")
            torch.save(optimizer.state_dict(), source / f"optimizer{tail}.bin")
        else:
            save_alone({"model": get_model_state_dict(model)}, source / f"pytorch_model_fsdp_{number}")
            save_alone({"optimizer": get_optimizer_state_dict(model, optimizer)}, source / f"optimizer_{number}")
    (tmp_path / "given.py").write_text(TWO)
    monkeypatch.chdir(tmp_path)
    arguments = ["checkpoint", "convert", str(source), "-o", str(tmp_path / "out"), "--step", "1"]
    if kind == "numbers":
        for name, words in REFUSED_FUNCTIONS.items():
            assert run([*arguments, "--model", f"given:{name}"]) != 0
            assert words in capsys.readouterr().err
    assert run([*arguments, *(["--model", "given:both"] if kind == "numbers" else [])]) == 0, capsys.readouterr().err
    others = two_models()
    step_both(*others)
    step_both(*others)
    load(state.Live([*others[:2]], [*others[2:]], {}, {}, seed=0), tmp_path / "out/step-00000001", strict=False)
    torch.testing.assert_close(step_both(*others), step_both(*parts), rtol=0, atol=0)


@pytest.mark.slow
def test_param_groups_need_the_optimizer(tmp_path, monkeypatch, capsys):
    _, second, _, optimizer = two_models()
    second(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    (tmp_path / "source").mkdir()
    torch.save(second.state_dict(), tmp_path / "source/pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "source/optimizer.bin")
    (tmp_path / "given.py").write_text(TWO + "\ndef second():\n    return both()[1], both()[3]\n")
    monkeypatch.chdir(tmp_path)
    arguments = ["checkpoint", "convert", str(tmp_path / "source"), "-o", str(tmp_path / "out"), "--model"]
    for name, words in {
        "generator": "there are 2 param groups; let the function",
        "second": "parameters that no",
    }.items():
        assert run([*arguments, f"given:{name}"]) != 0
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_optimizer_of_a_part_needs_the_optimizers(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizers = [torch.optim.AdamW(part.parameters()) for part in model]
    step_both(*model, *optimizers)
    source = tmp_path / "source"
    source.mkdir()
    torch.save(model.state_dict(), source / "pytorch_model.bin")
    torch.save(optimizers[0].state_dict(), source / "optimizer.bin")
    torch.save(optimizers[1].state_dict(), source / "optimizer_1.bin")
    told = "if the optimizer had only a part of its parameters, let the function of --model return the models and opt"
    with pytest.raises(CheckpointError, match=told):
        convert.convert(source, tmp_path / "out", prepared=only(model))
    parts = [[[(0, f"{number}.{name}") for name in ("weight", "bias")]] for number in (0, 1)]
    done = convert.convert(source, tmp_path / "out", prepared=Prepared(only(model).models, parts))
    assert (done.models, done.optimizers, done.step) == (1, 2, 1)


def test_a_model_of_other_shapes_is_refused(tmp_path):
    model, optimizer = one_step()
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save_alone(both, tmp_path / "source")
    backwards = Prepared([dict(reversed(only(model).models[0].items()))], [])
    with pytest.raises(CheckpointError, match=r"--model does not match: 2.bias has shape \[2\], its exp_avg \[5, 4\]"):
        convert.convert(tmp_path / "source", tmp_path / "out", prepared=backwards)


def test_what_is_left_out_is_not_opened(tmp_path, capsys):
    ddp, bare = tmp_path / "ddp", tmp_path / "bare"
    ddp.mkdir()
    model, _ = one_step()
    torch.save(model.state_dict(), ddp / "pytorch_model.bin")
    (ddp / "optimizer.bin").write_bytes(b"PK\x03\x04 cut short")
    torch.save({"more": _Evil(str(tmp_path / "executed"))}, ddp / "custom_checkpoint_0.pkl")
    rest = {"optimizer": {"param_groups": _Evil(str(tmp_path / "executed"))}, "more": _Evil(str(tmp_path / "executed"))}
    save_alone({"model": model.state_dict(), **rest}, bare)
    for source in (ddp, bare):
        arguments = ["checkpoint", "convert", str(source), "-o", str(tmp_path / "out" / source.name)]
        assert run(arguments) == EXIT_CHECKPOINT
        said = capsys.readouterr().err
        assert ("optimizer.bin: cannot be read" if source is ddp else "convert only the model with") in said
        assert run([*arguments, "--weights-only"]) == 0, capsys.readouterr().err
        assert "1 model, 0 optimizers" in capsys.readouterr().out
    assert not (tmp_path / "executed").exists()


def test_what_is_not_read_is_said_also_if_its_name_resembles_that_of_a_model(tmp_path, capsys):
    source = tmp_path / "source"
    source.mkdir()
    model, optimizer = one_step()
    read = ["pytorch_model.bin", "pytorch_model_1.bin", "pytorch_model_2-00001-of-00001.bin"]
    not_read = ["model_ema.safetensors", "model_vae.bin", "pytorch_model_4.bin", "pytorch_model_fsdp_rank0.bin"]
    for name in (*read, *not_read):
        torch.save(model.state_dict(), source / name)
    for name in ("optimizer_1.bin", "optimizer_2.bin"):  # without the first
        torch.save(optimizer.state_dict(), source / name)
    assert run(["checkpoint", "convert", str(source), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    assert "step 0, 3 models, 0 optimizers" in said.out
    expected = ", ".join(sorted([*not_read, "optimizer_1.bin", "optimizer_2.bin"]))
    assert f"note: not converted: {expected}\n" in said.err


def test_what_a_script_saved_beside_the_first_model_is_said(tmp_path):
    parts = {}
    for name in ("generator", "critic"):
        model, optimizer = one_step()
        parts[name] = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    save_alone({**parts, "epoch": 3}, tmp_path / "source")
    done = convert.convert(tmp_path / "source", tmp_path / "out")
    assert (done.models, done.optimizers) == (1, 1)
    assert "not converted: critic, epoch" in done.notes


COMPLEX = {"q": torch.ones(2, dtype=torch.complex128)}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("model.safetensors", b"", "not a complete safetensors file (Error while deserializing header: header"),
        ("model.safetensors", b"\x40" + bytes(9), "not a complete safetensors file (Error while"),
        ("pytorch_model.bin", COMPLEX, "q: safetensors does not support this dtype (got torch.complex128); convert"),
        ("pytorch_model.bin", {"q": torch.eye(2).to_sparse()}, "q: only dense tensors can be stored (got torch.sparse"),
        ("pytorch_model.bin", {"q": torch.ones(2, device="meta")}, "q: it has no values (got a tensor on the meta"),
        ("pytorch_model.bin", {1: torch.ones(2)}, "the model holds more than named tensors (got 1); save only its"),
        ("pytorch_model.bin", [1, 2], "the model is not a dict of tensors (got list); save its state_dict()."),
        ("pytorch_model.bin", {}, "the model has no tensors (got an empty dict); give another checkpoint"),
        ("pytorch_model.bin", b"what is this", "cannot be read (not a torch.save file); it is damaged or of another"),
        ("optimizer.bin", [3], "not the state_dict of an optimizer (got list without valid param_groups)"),
        ("optimizer.bin", {"state": [], "param_groups": []}, "not the state_dict of an optimizer (got dict"),
    ],
)
@pytest.mark.filterwarnings("ignore:(Sparse invariant|Validating sparse)")  # torch 2.11 and 2.15 warn as they read
def test_files_that_cannot_be_taken_are_named(tmp_path, name, value, text):
    if name == "optimizer.bin":
        torch.save({"q": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    if isinstance(value, bytes):
        (tmp_path / name).write_bytes(value)
    else:
        torch.save(value, tmp_path / name)
    with pytest.raises(CheckpointError, match=re.escape(f"convert: {tmp_path / name}: {text}")) as raised:
        convert.convert(tmp_path, tmp_path / "out")
    assert "weights_only" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_has_no_place_is_said_so(tmp_path):
    save_alone(COMPLEX, tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=r"dcp: q: safetensors does not support this dtype \(got torch.complex"):
        convert.convert(tmp_path / "dcp", tmp_path / "out")
    (tmp_path / "ddp").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "ddp/pytorch_model.bin")
    torch.save(COMPLEX, tmp_path / "ddp/custom_checkpoint_0.pkl")
    with pytest.raises(CheckpointError, match=r"ddp: objects: registered.0.q: safetensors does not support this dtype"):
        convert.convert(tmp_path / "ddp", tmp_path / "out")


def test_a_refused_pickle_is_refused_in_our_words(tmp_path):
    torch.save({"weight": torch.ones(1), "more": _Evil("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as raised:
        convert.convert(tmp_path, tmp_path / "out")
    assert str(raised.value) == (
        f"convert: {tmp_path}/pytorch_model.bin: holds more than tensors and plain values (got posix.mkdir), which "
        "torch's weights-only unpickler refuses; save only the state_dict, or convert only the model with "
        "--weights-only."
    )


def test_a_step_that_exists_is_not_written_again(tmp_path):
    (tmp_path / "source").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "source/pytorch_model.bin")
    done = convert.convert(tmp_path / "source", tmp_path / "out", step=3)
    with pytest.raises(CheckpointError) as raised:
        convert.convert(tmp_path / "source", tmp_path / "out", step=3)
    text = "exists already, and checkpoints are not overwritten; give another --step, or another folder."
    assert str(raised.value) == f"convert: {done.path}: {text}"
    with pytest.raises(CheckpointError, match=r"a file, not a folder; .*; load a file of torch.save in the"):
        convert.convert(tmp_path / "source/pytorch_model.bin", tmp_path / "out")


def test_what_is_converted_into_a_project_is_where_its_run_looks(tmp_path, caplog):
    (tmp_path / "source").mkdir()
    torch.save({"w": torch.ones(2)}, tmp_path / "source/pytorch_model.bin")
    done = convert.convert(tmp_path / "source", tmp_path / "new", step=3)
    assert done.path == tmp_path / "new" / "step-00000003", "not yet a project"
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    done = convert.convert(tmp_path / "source", tmp_path / "run", step=3)
    assert done.path == tmp_path / "run" / "checkpoints" / "step-00000003"
    resuming._tell_of_the_start(tmp_path / "new" / "checkpoints")
    assert f"trains from the start. It does not look at {tmp_path / 'new' / 'step-00000003'}: move" in caplog.text
    caplog.clear()
    resuming._tell_of_the_start(tmp_path / "empty" / "checkpoints")
    assert "trains from the start." in caplog.text and "It does not look" not in caplog.text


def test_a_checkpoint_of_shardkit_needs_no_conversion(tmp_path, capsys):
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "MANIFEST.json").write_text("{}")
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000001"):
        assert run(["checkpoint", "convert", str(place), "-o", str(tmp_path / "to")]) == EXIT_CHECKPOINT
        assert f"{place}: is shardkit's own; load it with resume() or load_state()." in capsys.readouterr().err
