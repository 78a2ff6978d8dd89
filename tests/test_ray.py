"""The Accelerator inside a real, local Ray: what `shardkit submit --to ray` writes, reports, failures, fewer workers.

Needs the package ray[train]: `make test-ray`.
"""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardkit.cli.main import run
from shardkit.config import files
from shardkit.ray import configuration_for
from tests.launches import script

CPU = "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n"


def test_the_configuration_follows_the_number_of_workers():
    text = "distributed_type: FSDP\nnum_machines: 4\nnum_processes: 32\n"
    assert configuration_for(text, 32) == text
    for workers, machines in ((16, 2), (8, 1), (12, 1), (3, 1)):
        found = files.read_text(configuration_for(text, workers))
        assert (found.config.num_processes, found.config.num_machines) == (workers, machines)
        assert found.chosen.keys() == {"distributed_type", "num_machines", "num_processes"}


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shardkit.yaml").write_text(CPU)
    return tmp_path


def in_python(folder: Path, *words: str, cpus: int = 4) -> str:
    """A driver, in a Ray of its own with so many cores; what it printed."""
    start = "import runpy, sys, ray\n"
    start += f"ray.init(num_cpus={cpus}, include_dashboard=False, log_to_driver=True)\n"
    start += "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", start, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def losses(path: Path) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in (line.split() for line in path.read_text().splitlines())}


@needs_ray
@pytest.mark.ray
@pytest.mark.timeout(1300)
def test_the_driver_trains_the_script_as_a_launch_does(folder):
    words = ["it's", "a b", "$HOME", 'say "hi"', "a\\b"]
    arguments = [script("losses"), str(folder / "run"), "12", "0", *words]
    (folder / "train.py").write_text(Path(script("losses")).read_text())
    submit = ["submit", "--to", "ray", "--option", f"storage={folder}/ray", "-o", "driver.py"]
    assert run([*submit, "train.py", *arguments[1:]]) == 0
    in_python(folder, "driver.py")
    assert ast.literal_eval((folder / "run" / "words.txt").read_text()) == words
    launched = [sys.executable, "-m", "shardkit", "launch", *[script("losses"), str(folder / "alone"), "12", "0"]]
    subprocess.run(launched, cwd=folder, check=True, capture_output=True, timeout=200)
    assert losses(folder / "run" / "losses.txt") == losses(folder / "alone" / "losses.txt")


@needs_ray
@pytest.mark.ray
@pytest.mark.timeout(1300)
def test_reported_checkpoints_bring_a_failed_run_back(folder):
    """A worker dies after the second of three reports: the run goes on from there, with the losses of one without."""
    in_python(folder, script("ray_driver"), str(folder), "2", "dies")
    in_python(folder, script("ray_driver"), str(folder), "2", "lives")
    found, wanted = losses(folder / "dies.txt"), losses(folder / "lives.txt")
    assert found == wanted and list(found) == list(range(1, 13))
    reported = sorted((folder / "ray" / "dies").glob("step-*"))
    assert [path.name for path in reported] == ["step-00000004", "step-00000008", "step-00000012"]
    for path in reported:
        assert run(["checkpoint", "verify", str(path)]) == 0


@needs_ray
@pytest.mark.ray
@pytest.mark.timeout(1300)
def test_an_elastic_run_goes_on_with_fewer_workers(folder):
    """Two workers where there is room for two; then for one: the same global batch, so the same losses."""
    in_python(folder, script("ray_driver"), str(folder), "1:2", "lives", "8")
    in_python(folder, script("ray_driver"), str(folder), "1:2", "lives", "12", cpus=1)
    found = losses(folder / "lives.txt")
    in_python(folder, script("ray_driver"), str(folder), "2", "other")
    wanted = losses(folder / "other.txt")
    assert list(found) == list(wanted)
    assert max(abs(found[step] - wanted[step]) for step in found) < 1e-5
    assert (folder / "lives.workers.txt").read_text().split() == ["2", "1"]
