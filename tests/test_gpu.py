"""The whole way by the public face on one device: equivalence, 16 bits, offloading, recomputation, saving, resuming.

On CUDA all rows run (`make gpu`), and are skipped with the reason where there is none. On the CPU, where other tests
show the same, rows run in `make test-loops`, and one in `make test`: so that all are known to work as they are written.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardkit.sharding import float8
from tests import models
from tests.launches import free_port
from tests.printed import ROOT

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available(), reason="no CUDA device on this machine, or not asked for by -m gpu"
        ),
        # torch's first product in a thread of its own, in plain backward passes here as well
        pytest.mark.filterwarnings("default:.*no current CUDA context:UserWarning"),
    ],
)
CPU = pytest.param("cpu", marks=pytest.mark.loops)
ON_CUDA = pytest.mark.parametrize("device", [CUDA])
ON_BOTH = pytest.mark.parametrize("device", [CPU, CUDA])
STRATEGY = "fsdp_sharding_strategy"
PARTS = 12


def run(
    folder: Path, device: str, steps: int = 6, config: dict[str, Any] | None = None, **order: Any
) -> dict[str, Any]:
    """What one process reports that trained in this way; of its own, since a process group is for good."""
    number = len([*folder.glob("order-*.json")])
    asked, answer = folder / f"order-{number}.json", folder / f"answer-{number}.json"
    given = {name: str(value) if isinstance(value, Path) else value for name, value in order.items()}
    asked.write_text(json.dumps({"device": device, "steps": steps, "config": config or {}, **given}))
    done = started(asked, answer, {})
    _, errors = done.communicate(timeout=280)
    assert done.returncode == 0, errors
    return json.loads(answer.read_text())


def variables() -> dict[str, str]:
    """This process's, with the checkout on the path of Python's modules."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def started(asked: Path, answer: Path, more: dict[str, str]) -> subprocess.Popen:
    """A process that carries out an order."""
    return subprocess.Popen(
        [sys.executable, ROOT / "tests" / "scripts" / "on_device.py", asked, answer],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=asked.parent,
        env={**variables(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONFAULTHANDLER": "1", **more},
    )


def reference(device: str, steps: int = 6, optimizer_name: str = "AdamW", penalty: float = 0.0) -> list[float]:
    """The losses of plain torch."""
    torch.manual_seed(0)
    model = models.Gpt(width=64, layers=4).to(device)
    optimizer = models.optimizer(optimizer_name, model)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 19, (8, 33), generator=torch.Generator().manual_seed(step)).to(device)
        loss = models.next_token_loss(model, tokens) + penalty * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fsdp(strategy: int = 1, **settings: Any) -> dict[str, Any]:
    section = {STRATEGY: strategy, **{name: settings.pop(name) for name in [*settings] if name.startswith("fsdp_")}}
    return {"distributed_type": "FSDP", "fsdp_config": section, **settings}


@pytest.mark.parametrize(
    ("device", "strategy", "precision"),
    [
        pytest.param("cpu", 1, "no", marks=pytest.mark.slow),
        pytest.param("cpu", 2, "bf16", marks=pytest.mark.loops),
        *[pytest.param("cuda", s, p, marks=CUDA.marks) for s in (1, 2, 3) for p in ("no", "bf16", "fp16")],
    ],
)
def test_training_equals_plain_torch(tmp_path, device, strategy, precision):
    found = run(tmp_path, device, config=fsdp(strategy, mixed_precision=precision))
    assert found["skipped"] == []
    assert found["losses"] == pytest.approx(reference(device), abs=1e-4 if precision == "no" else 0.05)
    assert found["parameter"] == {"device": device, "dtype": "torch.float32", "pinned": False}
    assert found["device"].startswith(device)


@ON_BOTH
@pytest.mark.parametrize("strategy", [1, 3])
@pytest.mark.parametrize(("optimizer", "before"), [("Adagrad", 0), ("AdamW", 2), ("NAdam", 2)])
def test_state_from_before_prepare_follows_to_the_device(tmp_path, device, strategy, optimizer, before):
    """Adagrad has state from the start."""
    found = run(tmp_path, device, optimizer=optimizer, steps_before=before, config=fsdp(strategy))
    assert found["losses"] == pytest.approx(reference(device, optimizer_name=optimizer)[before:], abs=1e-4)


@ON_BOTH
def test_recomputing_activations_changes_nothing(tmp_path, device):
    found = run(tmp_path, device, config=fsdp(fsdp_activation_checkpointing=True))
    assert found["losses"] == pytest.approx(reference(device), abs=1e-4)


@ON_CUDA
def test_compiled_units_train_alike(tmp_path, device):
    found = run(tmp_path, device, config=fsdp(shardkit={"compile": True}))
    assert found["losses"] == pytest.approx(reference(device), abs=1e-3)


@pytest.mark.requirement("A2")
@ON_CUDA
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_offloaded_parameters_live_in_pinned_host_memory(tmp_path, device, precision):
    found = run(tmp_path, device, config=fsdp(fsdp_offload_params=True, mixed_precision=precision))
    assert found["skipped"] == []
    assert found["parameter"] == {"device": "cpu", "dtype": "torch.float32", "pinned": True}
    assert found["state"]["device"] == "cpu"
    assert found["losses"] == pytest.approx(reference(device), abs=1e-4 if precision == "no" else 0.05)


@ON_CUDA
@pytest.mark.parametrize("strategy", [1, 3])
def test_offloaded_state_lives_in_pinned_host_memory_between_steps(tmp_path, device, strategy):
    check_offloaded_state(tmp_path, device, strategy)


def check_offloaded_state(tmp_path, device, strategy):
    """Where it is, also after a load, and that no result changes."""
    plain, offloaded = fsdp(strategy), fsdp(strategy, shardkit={"offload_optimizer": True})
    whole = run(tmp_path, device, exact=True, config=plain)
    found = run(tmp_path, device, exact=True, steps=3, config=offloaded, save=tmp_path / "state")
    rest = run(tmp_path, device, exact=True, first=3, config=offloaded, load=tmp_path / "state")
    assert found["parameter"]["device"] == device
    assert found["state"] == rest["state"] == {"device": "cpu", "dtype": "torch.float32", "pinned": True}
    assert found["losses"] + rest["losses"] == whole["losses"]
    assert rest["sum"] == whole["sum"]


@ON_BOTH
def test_a_penalty_on_offloaded_weights_is_added_to_the_other_gradients(tmp_path, device):
    """By another thread, while those are still copied to host memory."""
    found = run(tmp_path, device, steps=30, penalty=0.1, config=fsdp(fsdp_offload_params=True))
    assert found["losses"] == pytest.approx(reference(device, 30, penalty=0.1), rel=1e-3)


@ON_BOTH
def test_a_resumed_run_is_equal_to_the_bit(tmp_path, device):
    whole = run(tmp_path, device, exact=True, dropout=0.1, config=fsdp())
    run(tmp_path, device, exact=True, steps=3, dropout=0.1, config=fsdp(), save=tmp_path / "state")
    rest = run(tmp_path, device, exact=True, first=3, dropout=0.1, config=fsdp(), load=tmp_path / "state")
    assert rest["losses"] == whole["losses"][3:]
    assert rest["sum"] == whole["sum"]


@ON_BOTH
def test_a_save_beside_training_holds_the_moment_it_was_asked_for(tmp_path, device):
    run(tmp_path, device, exact=True, save_beside_at=3, save_beside=tmp_path / "state", config=fsdp())
    then = run(tmp_path, device, exact=True, steps=3, config=fsdp())
    loaded = run(tmp_path, device, steps=0, config=fsdp(), load=tmp_path / "state")
    assert loaded["sum"] == then["sum"]


def carry(tmp_path: Path, first: str, second: str) -> None:
    """A state and an export of one device give the same weights on another."""
    saved = run(tmp_path, first, steps=3, config=fsdp(), save=tmp_path / "state", export=tmp_path / "model")
    loaded = run(tmp_path, second, steps=0, config=fsdp(2), load=tmp_path / "state", export=tmp_path / "again")
    assert loaded["sum"] == saved["sum"]
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "again"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


ACROSS = [pytest.param(*pair, marks=CUDA.marks) for pair in (("cuda", "cpu"), ("cpu", "cuda"))]


@pytest.mark.parametrize(("first", "second"), [pytest.param("cpu", "cpu", marks=pytest.mark.loops), *ACROSS])
def test_a_state_and_an_export_go_from_one_device_to_another(tmp_path, first, second):
    carry(tmp_path, first, second)


@ON_BOTH
@pytest.mark.parametrize("strategy", [1, 3])
def test_two_ranks_share_one_device_through_gloo(tmp_path, device, strategy):
    """Each rank is told that it is alone on its machine, so both take the first device, which NCCL does not allow."""
    asked = tmp_path / "order.json"
    asked.write_text(json.dumps({"device": device, "steps": 4, "config": fsdp(strategy), "gloo": True}))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    answers = [tmp_path / f"answer-{rank}.json" for rank in range(2)]
    both = [started(asked, answers[rank], {**meeting, **place, "RANK": str(rank)}) for rank in range(2)]
    try:
        for process in both:
            _, errors = process.communicate(timeout=280)
            if process.returncode and ("not supported" in errors or "does not support" in errors):
                pytest.skip(f"gloo of this torch lacks a collective on the device: {errors.strip().splitlines()[-1]}")
            assert process.returncode == 0, errors
    finally:
        for process in both:
            process.kill()
            process.wait()
            process.stderr.close()
    found = [json.loads(answer.read_text()) for answer in answers]
    assert found[0]["norms"] == found[1]["norms"]
    losses = [sum(pair) / 2 for pair in zip(*(one["losses"] for one in found), strict=True)]
    assert losses == pytest.approx(reference(device, 4), abs=1e-4)


@ON_BOTH
@pytest.mark.parametrize("part", range(PARTS))
def test_loops_that_people_write_are_plain_torch(tmp_path, device, part):
    loops_part(tmp_path, device, part)


def loops_part(tmp_path: Path, device: str, part: int, parts: int = PARTS) -> None:
    """A part of `tests/loops`, on one rank: sharded, not sharded, and with parameters in host memory."""
    answer = tmp_path / "problems.json"
    script = [ROOT / "tests" / "scripts" / "loops_on_device.py", device, str(part), str(parts), answer]
    done = subprocess.run(
        [sys.executable, *script], capture_output=True, text=True, timeout=280, cwd=tmp_path, env=variables()
    )
    assert done.returncode == 0, done.stderr[-3000:]
    problems = json.loads(answer.read_text())
    assert not problems, "\n".join(f"{where}: {problem}" for where, problem in problems.items())


@ON_BOTH
def test_the_starter_script_is_launched_and_resumed(tmp_path, device):
    """As in the README, on this machine's device."""
    place = ["--cpu"] if device == "cpu" else []
    launch = [sys.executable, "-m", "shardkit", "launch", "-n", "1", *place, "--set", "distributed_type=FSDP"]
    launch += ["--mixed-precision", "bf16"]
    script = [ROOT / "templates" / "train.py", "--save-every=4", "--log-every=1"]
    said = ""
    for resume, steps in (("never", 4), ("auto", 6)):
        command = [*launch, "--resume", resume, *script, f"--steps={steps}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=140, cwd=tmp_path, env=variables())
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
    assert f"1 rank, {device}, " in said and "compute bf16" in said
    assert "step    5  loss" in said and "step    4  loss" not in said


SEVERAL = [
    pytest.param("cpu", marks=pytest.mark.loops),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has fewer than two GPUs"),
        ],
    ),
]


@pytest.mark.parametrize("device", SEVERAL)
@pytest.mark.parametrize(("strategy", "precision"), [(1, "no"), (1, "fp16"), (3, "no"), (4, "no")])
def test_several_devices_train_as_one(tmp_path, device, strategy, precision):
    """Through the device's own backend, with a save beside training, and ranks that do not wait for the others' end;
    the hybrid strategy as on two machines."""
    script = [ROOT / "tests" / "scripts" / "on_device.py", tmp_path / "order.json", tmp_path / "answer.json"]
    section = {"mesh": {"replicate_size": 2}} if strategy == 4 else {}
    config = fsdp(strategy, mixed_precision=precision, shardkit=section)
    order = {"device": device, "steps": 4, "config": config, "ends_alone": True}
    script[1].write_text(json.dumps(order | {"save_beside_at": 2, "save_beside": str(tmp_path / "state")}))
    place = ["--cpu"] if device == "cpu" else []
    command = [sys.executable, "-m", "shardkit", "launch", "-n", "2", *place, *script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path, env=variables())
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads((tmp_path / f"answer.json.{rank}").read_text()) for rank in range(2)]
    assert found[0]["norms"] == found[1]["norms"]
    losses = [sum(pair) / 2 for pair in zip(*(one["losses"] for one in found), strict=True)]
    assert losses == pytest.approx(reference(device, 4), abs=1e-4 if precision == "no" else 0.05)


MISSING_8_BITS = float8.problem("fp8", torch.device("cuda", 0)) if torch.cuda.is_available() else "no CUDA device"


@pytest.mark.gpu
@pytest.mark.skipif(MISSING_8_BITS is not None, reason=str(MISSING_8_BITS))
@pytest.mark.parametrize("strategy", [1, 3])
def test_training_in_fp8_is_near_to_plain_torch(tmp_path, strategy):
    found = run(tmp_path, "cuda", config=fsdp(strategy, mixed_precision="fp8"), save=tmp_path / "state")
    assert found["losses"] == pytest.approx(reference("cuda"), abs=0.2)
    rest = run(tmp_path, "cuda", config=fsdp(2, mixed_precision="bf16"), steps=0, load=tmp_path / "state")
    assert rest["sum"] == found["sum"]


@ON_CUDA
def test_a_step_waits_for_the_device_no_more_often_than_plain_fsdp(tmp_path, device):
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--only", "waits", "--small"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=ROOT,
    )
    assert found.returncode == 0, found.stderr
    assert "within the goal" in found.stdout
