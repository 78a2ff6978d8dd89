"""Scripts that were written for Accelerate, run by `shardkit launch --as-accelerate`, against one process."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
DDP = ("--set", "distributed_type=MULTI_CPU")
FULL_SHARD = ("--set", "distributed_type=FSDP")
SHARD_GRAD = (*FULL_SHARD, "--set", "fsdp.sharding_strategy=2")
HYBRID = (*FULL_SHARD, "--set", "fsdp.sharding_strategy=4")
HYBRID += ("--set", "shardkit.mesh.replicate_size=2", "--set", "shardkit.mesh.shard_size=2")

SHARED = ("--set", "shardkit.mesh.context_size=2")

pytestmark = pytest.mark.slow


def launch(folder: Path, flags: tuple[str, ...], script: str, *arguments: object) -> subprocess.CompletedProcess:
    """`shardkit launch --as-accelerate` from the folder, to its end."""
    words = [sys.executable, "-m", "shardkit", "launch", "--cpu", "--as-accelerate", *flags]
    words += [str(SCRIPTS / f"{script}.py"), *map(str, arguments)]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=280, check=False)


def found(folder: Path, flags: tuple[str, ...], script: str, *arguments: object) -> dict[str, Any]:
    """What the script has written into found.json."""
    folder.mkdir(parents=True, exist_ok=True)
    done = launch(folder, flags, script, *arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def alike(one: dict[str, Any], other: dict[str, Any], bound: float = 1e-4) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, (float, list)) and key != "hooks":
            assert value == pytest.approx(other[key], abs=bound), key
        else:
            assert value == other[key], key


SCHEDULER = ("--accelerates-meaning", "scheduler")


@pytest.mark.requirement("U1")
def test_an_unchanged_script_is_one_process_says_what_differs_and_goes_on_where_it_was(tmp_path):
    alone = found(tmp_path / "1", ("-n", "1"), "theirs", "--output_dir", tmp_path / "1", "--batch_size", 8)
    two = tmp_path / "2"
    two.mkdir()
    done = launch(two, ("-n", "2", *FULL_SHARD, *SCHEDULER), "theirs", "--output_dir", two)
    assert done.returncode == 0, done.stderr
    assert "used, by script: Accelerator, Accelerator.accumulate" in done.stderr
    assert "differs: save_state writes one checkpoint atomically" in done.stderr
    assert "differs: a prepared scheduler steps once" not in done.stderr, "here it steps as Accelerate's"
    told = next((two / "runs").glob("*/accelerate.txt")).read_text()
    assert "utils.set_seed" in told and "and 1" not in told.splitlines()[1], "the file holds every name"
    alike(json.loads((two / "found.json").read_text()), alone)
    # Its checkpoint, of step 6 of 8, on one rank and unsharded.
    rest = found(two, ("-n", "1", *SCHEDULER), "theirs", "--output_dir", two, "--batch_size", 8, "--resume")
    assert rest["losses"] == pytest.approx(alone["losses"][-4:], abs=1e-4)
    assert rest["lr"] != alone["lr"], "the schedule counts in steps of ranks, as the script wrote it"


@cache
def trainer_alone(kind: str, samples: int, folder: str) -> dict[str, Any]:
    return found(Path(folder), ("-n", "1"), "trainer_run", kind, folder, samples)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("alone")


def needs(*packages: str) -> None:
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed here")


def compare_trainer(kind: str, world: int, flags: tuple[str, ...], tmp_path: Path, shared: Path) -> None:
    """`world`: the ranks, or groups of ranks that share each sequence, that read different samples."""
    needs("transformers")
    alone = trainer_alone(kind, 4, str(shared / kind))
    count = world * 2 if SHARED[1] in flags else world
    ranks = found(tmp_path, ("-n", str(count), *flags), "trainer_run", kind, tmp_path, 4 // world)
    alike(ranks, alone, bound=2e-3 if kind == "seq2seq" else 1e-3)
    assert ranks["again"] == pytest.approx(ranks["losses"], abs=1e-5), "resumed in the middle of an epoch"


@pytest.mark.requirement("U1")
@pytest.mark.compat  # test_launch has a Trainer on two ranks
def test_the_trainer_on_two_shards_is_one_process(tmp_path, shared):
    compare_trainer("causal", 2, FULL_SHARD, tmp_path, shared)
    names = {path.name for path in (tmp_path / "first" / "checkpoint-4").iterdir()}
    assert {"pytorch_model_fsdp_0", "optimizer_0", "model.safetensors"} <= names


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["causal", "seq2seq", "lora", "qlora"])
@pytest.mark.parametrize(("world", "flags"), [(2, DDP), (2, FULL_SHARD), (2, SHARD_GRAD), (4, HYBRID)])
def test_trainers_are_one_process(kind, world, flags, tmp_path, shared):
    needs(*{"lora": ["peft"], "qlora": ["peft", "bitsandbytes"]}.get(kind, []))
    compare_trainer(kind, world, flags, tmp_path, shared)


@pytest.mark.requirement("U1")
@pytest.mark.compat
@pytest.mark.parametrize("kind", ["causal", "lora"])
@pytest.mark.parametrize(("world", "flags"), [(1, FULL_SHARD), (2, DDP), (2, SHARD_GRAD)])
def test_trainers_whose_ranks_share_sequences_are_one_process(kind, world, flags, tmp_path, shared):
    needs(*{"lora": ["peft"]}.get(kind, []))
    compare_trainer(kind, world, (*flags, *SHARED), tmp_path, shared)


@pytest.mark.requirement("U1")
@pytest.mark.compat
@pytest.mark.parametrize("flags", [DDP, FULL_SHARD, SHARD_GRAD])
def test_a_loop_over_several_models_is_one_process(tmp_path, flags):
    alone = found(tmp_path / "1", ("-n", "1"), "several_models", tmp_path / "1", 8)
    ranks = found(tmp_path / "2", ("-n", "2", *flags), "several_models", tmp_path / "2", 4)
    assert alone["same"] and ranks["same"], "a loaded state goes on as the first time"
    alike(ranks, alone, bound=1e-5)
    assert ranks["hooks"] == [["save", 1], ["load", 1]]


trl_alone: dict[str, dict[str, Any]] = {}


@pytest.mark.requirement("U1")
@pytest.mark.compat
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "grpo"])
@pytest.mark.parametrize(("world", "flags"), [(2, DDP), (2, FULL_SHARD), (2, SHARD_GRAD), (4, HYBRID)])
def test_trl_is_one_process(kind, world, flags, tmp_path, shared):
    needs("trl", "datasets")
    if kind not in trl_alone:
        trl_alone[kind] = found(shared / "trl" / kind, ("-n", "1"), "trl_run", kind, shared / "trl" / kind, 4)
    alone = trl_alone[kind]
    ranks = found(tmp_path, ("-n", str(world), *flags), "trl_run", kind, tmp_path, 4 // world)
    if kind == "grpo":  # what is sampled differs with the number of ranks
        assert ranks["steps"] == alone["steps"]
    else:
        alike(ranks, alone, bound=1e-3)


@pytest.mark.requirement("U1")
@pytest.mark.compat
@pytest.mark.parametrize(("world", "flags"), [(1, FULL_SHARD), (2, DDP)])
def test_trls_sft_whose_ranks_share_sequences_is_one_process(world, flags, tmp_path):
    needs("trl", "datasets")
    alone = found(tmp_path / "1", ("-n", "1"), "trl_run", "sft", tmp_path / "1", 4, 4)
    count = ("-n", str(2 * world))
    ranks = found(tmp_path / "2", (*count, *flags, *SHARED), "trl_run", "sft", tmp_path / "2", 4 // world, 4)
    alike(ranks, alone, bound=1e-3)
    done = launch(tmp_path, (*count, *flags, *SHARED), "trl_run", "dpo", tmp_path / "2", 4 // world)
    assert done.returncode == 2 and "DPOTrainer: its loss needs whole sequences" in done.stderr


def test_check_says_what_a_script_names_and_starts_nothing(tmp_path):
    done = launch(tmp_path, ("--check",), "theirs")
    assert done.returncode == 0, done.stderr
    assert "0 not supported, 0 unknown. Nothing was started (--check)." in done.stdout
    assert not (tmp_path / "runs").exists()
    (tmp_path / "bad.py").write_text(
        "from accelerate import Accelerator\naccelerator = Accelerator()\naccelerator.lomo_backward(1, 2)\n"
    )
    words = [sys.executable, "-m", "shardkit", "launch", "--as-accelerate", "--check", "bad.py"]
    bad = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 1
    assert "bad.py:3: Accelerator.lomo_backward: not supported: LOMO is not supported; use backward." in bad.stdout
    (tmp_path / "bad.py").write_text("from accelerate import Accelerator\nAccelerator(\n")
    bad = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 1 and "bad.py:2: not valid Python for this interpreter" in bad.stdout
    dry = launch(tmp_path, ("-n", "2", "--dry-run"), "theirs")
    assert "note: theirs.py:42: num_processes: the schedule's length is multiplied by the number of ranks" in dry.stderr
    assert "note:" not in launch(tmp_path, ("-n", "2", "--dry-run", *SCHEDULER), "theirs").stderr
    (tmp_path / "bad.py").write_text(
        "total = 3 * len(loader)\nmodel, loader, scheduler = accelerator.prepare(model, loader, scheduler)\n"
    )
    dry = launch(tmp_path, ("-n", "2", "--dry-run"), str(tmp_path / "bad"))
    assert "note: bad.py:1: len(loader): before prepare a loader's length counts the batches of all ranks" in dry.stderr
    (tmp_path / "bad.py").write_text("if accelerator.is_main_process:\n    accelerator.save_state()\n")
    sharded = launch(tmp_path, ("-n", "2", "--dry-run"), str(tmp_path / "bad"))
    assert "note: bad.py:2: save_state: only one rank calls it; where FSDP shards the model every" in sharded.stderr
    whole = ("-n", "2", "--dry-run", "--set", "distributed_type=MULTI_CPU")
    assert "note:" not in launch(tmp_path, whole, str(tmp_path / "bad")).stderr
    wrong = subprocess.run(
        [*words[:4], "--check", "--accelerates-meaning", "clocks", "--accelerates-meaning=moon,save", "bad.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert wrong.returncode == 2
    assert "--as-accelerate is missing (got --check, --accelerates-meaning)" in wrong.stderr
    assert "unknown value (got clocks, moon); use scheduler, position, save" in wrong.stderr
