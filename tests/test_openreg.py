"""Training on a device of an extension: PyTorch's own test extension torch_openreg, which needs no hardware.

Its operators run on the CPU, so that losses are those of plain torch there; its memory cannot be read from the host, so
that a tensor left on the wrong device ends the process. Skipped with the reason where it is not installed;
`docs/contributing.md` says how to build it.
"""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from shardkit.compat.operations import send_to_device
from tests import openreg, test_plain_operands
from tests.loops.run import Run
from tests.printed import ROOT
from tests.test_gpu import PARTS, carry, check_offloaded_state, fsdp, loops_part, reference, run, variables

pytestmark = [
    pytest.mark.openreg,
    pytest.mark.skipif(find_spec("torch_openreg") is None, reason="torch_openreg is not installed here"),
]
DEVICE = "openreg"


@pytest.fixture(scope="module", autouse=True)
def collectives() -> None:
    """Compiled before ranks need it: they would wait for each other."""
    openreg.built()


def launch(folder, script, *arguments):
    """A script of tests/scripts on both devices."""
    command = [sys.executable, "-m", "shardkit", "launch", "-n", "2", ROOT / "tests" / "scripts" / script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=variables())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("strategy", "precision"), [*((strategy, "no") for strategy in range(1, 6)), (1, "bf16"), (1, "fp16"), (3, "fp16")]
)
def test_two_devices_train_as_one_process(tmp_path, strategy, precision):
    """As `launch` finds them, through the backend that is registered for them; with a save beside training."""
    order, answer = tmp_path / "order.json", tmp_path / "answer.json"
    section = {"mesh": {"replicate_size": 2}} if strategy > 3 else {}
    config = fsdp(strategy, mixed_precision=precision, shardkit=section)
    beside = {"save_beside_at": 2, "save_beside": str(tmp_path / "state")}
    order.write_text(json.dumps({"device": DEVICE, "steps": 4, "config": config, "ends_alone": True, **beside}))
    launch(tmp_path, "on_device.py", order, answer)
    found = [json.loads((tmp_path / f"answer.json.{rank}").read_text()) for rank in range(2)]
    assert [one["device"] for one in found] == ["openreg:0", "openreg:1"]
    assert found[0]["norms"] == found[1]["norms"]
    losses = [sum(pair) / 2 for pair in zip(*(one["losses"] for one in found), strict=True)]
    assert losses == pytest.approx(reference("cpu", 4), abs=1e-4 if precision == "no" else 0.05)


def test_plain_operands_on_two_devices_are_those_of_one_process(tmp_path):
    launch(tmp_path, "operands_on_device.py", tmp_path / "found")
    for rank in range(2):
        found = json.loads((tmp_path / f"found.{rank}").read_text())
        for name, expected in test_plain_operands.results(Run()).items():
            assert torch.allclose(torch.tensor(found[name]), torch.tensor(expected), atol=3e-5), name


@pytest.mark.parametrize(
    "name", ["with_muon", "rows_and_elements_one_by_one", "a_scaler_of_the_script", "a_scaler_of_the_script_with_adam"]
)
def test_loops_on_two_devices_are_plain_torch(tmp_path, name):
    """Muon divides its work between them; a backward of rows of offloaded weights meets the other ranks on the CPU; a
    scaler's numbers are copied to host memory, where the gradients of offloaded weights are."""
    launch(tmp_path, "loops_on_device.py", DEVICE, name, "1", tmp_path / "problems")
    assert json.loads((tmp_path / "problems").read_text()) == {}


def test_collectives_are_refused_where_nccl_refuses_them(tmp_path):
    """So that a call of shardkit which only gloo takes fails in these tests."""
    launch(tmp_path, "refused_on_device.py", tmp_path / "told")
    told = json.loads((tmp_path / "told").read_text())
    assert {call: "as NCCL" in text for call, text in told.items()} == dict.fromkeys(told, True) and len(told) == 8


def test_offloaded_parameters_live_in_pinned_host_memory(tmp_path):
    found = run(tmp_path, DEVICE, config=fsdp(fsdp_offload_params=True))
    assert found["parameter"] == {"device": "cpu", "dtype": "torch.float32", "pinned": True}
    assert found["losses"] == pytest.approx(reference("cpu"), abs=1e-4)


@pytest.mark.parametrize("strategy", [1, 3])
def test_offloaded_state_lives_in_pinned_host_memory_between_steps(tmp_path, strategy):
    check_offloaded_state(tmp_path, DEVICE, strategy)


def test_a_resumed_run_is_equal_to_the_bit(tmp_path):
    """With recomputed dropout: the state of the device's generator is that of the saved step."""
    config = fsdp(fsdp_activation_checkpointing=True)
    whole = run(tmp_path, DEVICE, dropout=0.1, config=config)
    run(tmp_path, DEVICE, steps=3, dropout=0.1, config=config, save=tmp_path / "state")
    rest = run(tmp_path, DEVICE, first=3, dropout=0.1, config=config, load=tmp_path / "state")
    assert (rest["losses"], rest["sum"]) == (whole["losses"][3:], whole["sum"])


@pytest.mark.parametrize(("first", "second"), [(DEVICE, "cpu"), ("cpu", DEVICE)])
def test_a_state_and_an_export_go_from_one_device_to_another(tmp_path, first, second):
    carry(tmp_path, first, second)


@pytest.mark.parametrize("part", range(PARTS))
def test_loops_that_people_write_are_plain_torch(tmp_path, part):
    loops_part(tmp_path, DEVICE, part)


def test_a_device_named_by_its_number_is_this_machines():
    assert send_to_device({"tokens": torch.ones(2)}, 1)["tokens"].device == torch.device(DEVICE, 1)
