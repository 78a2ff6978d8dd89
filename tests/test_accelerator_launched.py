"""A script under `shardkit launch`: the table, stopping at an agreed step, resuming, equal weights at the end."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardkit import env
from tests.training import parts, plain

SCRIPT = Path(__file__).parent / "accelerator_script.py"


def launch(folder: Path, ranks: int, stop_at: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """The script on so many ranks; stdout and stderr together."""
    command = [sys.executable, "-m", "shardkit", "launch", "-n", str(ranks), "--cpu", "--logs", str(folder / "logs")]
    return subprocess.run(
        [*command, *flags, str(SCRIPT), str(folder), str(stop_at)],
        env=env.copy() | {"PYTHONPATH": str(SCRIPT.parent.parent)},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.requirement("D3")
@pytest.mark.fault_row(32)
def test_a_launched_run_stops_resumes_and_ends_as_if_nothing_had_happened(tmp_path):
    (tmp_path / "shardkit.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: 2\n")
    stopped = launch(tmp_path, 2, 3)
    assert stopped.returncode == 75, stopped.stdout
    assert "strategy   SHARD_GRAD_OP, mesh shard 2" in stopped.stdout
    assert " shardkit.yaml: " in stopped.stdout
    assert "fsdp.sharding_strategy SHARD_GRAD_OP (line 3)" in stopped.stdout
    assert "command line: num_processes 2" in stopped.stdout
    step = int(re.findall(r"stopped by a signal after step (\d+); saved in", stopped.stdout)[0])
    assert 3 <= step < 8
    assert [path.read_bytes() for path in tmp_path.rglob(".lock")] == [b""]  # it left the folder to others
    finished = launch(tmp_path, 2, 99, "--resume", "auto", "--set", "fsdp.sharding_strategy=1", "--measure")
    assert finished.returncode == 0, finished.stdout
    assert f"resumed True at step {step}" in finished.stdout
    assert "ended without leaving" not in finished.stdout
    assert "trained 8 steps, 112 samples" in finished.stdout
    assert "measured: peak" in finished.stdout
    assert "for a simulated step): shardkit plan --model MODULE:FUNCTION --world 2 --measured" in finished.stdout
    memory = json.loads((tmp_path / "logs" / "rank1.memory.json").read_text())
    assert memory["parameter_bytes"] == memory["gradient_bytes"] == 4 * (267 - 144)
    assert memory["optimizer_bytes"] >= 2 * memory["parameter_bytes"]
    weights = load_file(tmp_path / "weights.safetensors")
    expected = dict(zip(dict(parts(8, 4)[0].named_parameters()), plain(56, 8, 2, 2)["weights"], strict=True))
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.requirement("B2")
def test_torchrun_alone_sets_rank_and_world_size(tmp_path):
    (tmp_path / "shardkit.yaml").write_text("distributed_type: FSDP\nuse_cpu: true\n")
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path), "99"],
        env=env.copy() | {"PYTHONPATH": str(SCRIPT.parent.parent)},
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert found.returncode == 0, found.stdout
    assert "world      2 ranks, cpu, gloo" in found.stdout
    assert "trained 8 steps, 112 samples" in found.stdout
