"""Trackers of installed packages: a run, and one that resumes from its checkpoint."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shardkit import Accelerator, ProjectConfiguration
from shardkit.tracking import installed
from tests.test_trackers import ALONE, trained

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlflow'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()
    for name in ("WANDB_SERVICE", "MLFLOW_EXPERIMENT_ID", "CRC32C_SW_MODE"):  # what these packages leave there
        os.environ.pop(name, None)


def run(name: str, folder: Path, steps: int, resumes: bool) -> Any:
    trained(folder, steps, resumes, log_with=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PACKAGES)
def test_an_installed_tracker_goes_on_in_its_own_run(name, tmp_path, alone, offline):
    pytest.importorskip(PACKAGES[name], reason=f"{name} is not installed")
    run(name, tmp_path, 4, resumes=False)
    run(name, tmp_path, 5, resumes=True)
    folder = tmp_path / "run"
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        2,
        3,
        4,
        5,
    ]
    match name:
        case "tensorboard":
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

            events = EventAccumulator(str(folder))
            events.Reload()
            assert [(one.step, one.value) for one in events.Scalars("loss")] == [(n, float(n)) for n in range(1, 6)]
            run(name, tmp_path, 1, resumes=False)
            assert len(list((folder / "older.1").iterdir())) == 2
        case "wandb":
            assert len({path.name.split("-")[3] for path in (folder / "wandb").glob("offline-run-*")}) == 1
        case "mlflow":
            (losses,) = (tmp_path / "mlflow").glob("*/*/metrics/loss")
            assert [line.split()[1:] for line in losses.read_text().splitlines()][-1] == ["5.0", "5"]
        case "trackio":
            assert json.loads((folder / "trackio.json").read_text())["id"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PACKAGES)
def test_its_own_object_is_there_before_anything_is_logged(name, tmp_path, alone, offline):
    pytest.importorskip(PACKAGES[name], reason=f"{name} is not installed")
    project = ProjectConfiguration(project_dir=str(tmp_path))
    accelerator = Accelerator(config=ALONE, project_config=project, log_with=name)
    accelerator.init_trackers("run", {"lr": 1, "layers": [1, 2]})
    own = accelerator.get_tracker(name, unwrap=True)
    assert own is accelerator.get_tracker(name).tracker and not isinstance(own, type(accelerator.get_tracker(name)))
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_the_arguments_and_files_of_accelerates_tracker(tmp_path, alone, offline, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    (tmp_path / "notes.txt").write_text("a")
    accelerator = Accelerator(config=ALONE, project_dir=str(tmp_path), log_with="mlflow")
    own = {"nested_run": True, "run_name": "mine", "experiment_name": "named", "logging_dir": str(tmp_path / "files")}
    accelerator.init_trackers("run", init_kwargs={"mlflow": own})
    tracker = accelerator.get_tracker("mlflow")
    tracker.log_artifact(str(tmp_path / "notes.txt"), "texts")
    run = tracker.active_run
    accelerator.end_training()
    assert run.info.run_name == "mine"
    assert mlflow.get_experiment(run.info.experiment_id).name == "named"
    assert [path.read_text() for path in (tmp_path / "files").rglob("texts/notes.txt")] == ["a"]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the shell")
    accelerator.init_trackers("run")
    run = accelerator.get_tracker("mlflow", unwrap=True)
    accelerator.end_training()
    assert mlflow.get_experiment(run.info.experiment_id).name == "of the shell"


def test_tensorboardx_alone_writes_the_event_files(tmp_path, alone, offline, monkeypatch):
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    run("tensorboard", tmp_path, 2, resumes=False)
    assert list((tmp_path / "run").glob("events.out.tfevents.*"))


def test_a_tensorboard_that_cannot_be_imported_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"torch\.utils\.tensorboard"):
        installed._summary_writer()
