"""Trackers: files of the run's own, the base class, other ranks, and runs that go on from a checkpoint."""

import argparse
import importlib.util
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from shardkit import Accelerator, ProjectConfiguration, Tracker
from shardkit.errors import UsageError
from shardkit.tracking.installed import TensorBoard
from shardkit.tracking.records import Csv, JsonLines
from shardkit.tracking.trackers import KNOWN
from tests.training import parts

ALL = "use jsonl, csv, tensorboard, wandb, mlflow, trackio, all, or a shardkit.Tracker."
PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "trackers.md"
ALONE = {"distributed_type": "NO", "use_cpu": True}
FULL = {"distributed_type": "FSDP", "use_cpu": True}


def test_the_page_names_every_tracker():
    named = PAGE.read_text().partition("`log_with` names ")[2].partition(", or `all`")[0]
    assert named == ", ".join(f"`{name}`" for name in KNOWN)


class Mine(Tracker):
    """As a script writes one."""

    name = "mine"

    def __init__(self) -> None:
        self.said: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.said

    def start(self) -> None:
        self.said.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.said.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **arguments: Any) -> None:
        self.said.append((values, step, arguments))

    def finish(self) -> None:
        self.said.append("finish")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def everywhere(folder: Path) -> dict[str, Any]:
    """A whole loop with trackers, called on every rank alike."""
    mine = Mine()
    accelerator = Accelerator(
        config=FULL | {"shardkit": {"log_speed": True}}, log_with=["csv", mine], project_dir=folder
    )
    model, optimizer, loader, _ = parts(16, 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.log({"loss": 1})
    accelerator.init_trackers("My run", config={"lr": 0.1, "path": folder})
    for batch in loader:
        loss = model(batch["x"]).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.detach(), "phase": "train"}, log_kwargs={"mine": {"more": 1}})
    names = [tracker.name for tracker in accelerator.trackers]
    other = accelerator.get_tracker("mine", unwrap=True)
    accelerator.get_tracker("mine").log({"by hand": 1}, step=99)
    if not accelerator.is_main_process:
        with other.open("x") as image:
            image[0].paste(3)
    with pytest.raises(UsageError) as caught:
        accelerator.log({"image": torch.zeros(2, 2), "list": [1], "weight": next(model.parameters())})
    with pytest.raises(UsageError, match=r"no tracker of this name \(got 'wandb'\); there are csv, mine, jsonl"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    return {"names": names, "said": mine.said, "refused": str(caught.value), "left": len(accelerator.trackers)}


def test_every_rank_logs_and_rank_0_writes(ranks, tmp_path):
    first, second = ranks.run(2, in_own_world, everywhere, tmp_path)
    assert first["names"] == second["names"] == ["csv", "mine", "jsonl"]
    assert second["said"] == [] and first["left"] == second["left"] == 0
    start, config, *steps, by_hand, finish = first["said"]
    assert (start, finish) == ("start", "finish") and config == {"lr": 0.1, "path": tmp_path}
    assert by_hand == ({"by hand": 1}, 99, {})
    assert [step for _, step, _ in steps] == [1, 2, 3, 4] and steps[0][2] == {"more": 1}
    for problem in ("'image': not one number (got 4 of them)", "'list': not a number or text (got list)", "a DTensor"):
        assert problem in first["refused"] and problem in second["refused"]
    folder = tmp_path / "My_run"
    lines = lines_of(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and isinstance(lines[0]["loss"], float)
    assert lines[0].keys() == {"step", "loss", "phase"}
    assert {"speed/step_time_s", "speed/samples_per_s", "speed/peak_memory_gib"} <= lines[3].keys()
    assert lines[3]["speed/samples_per_s"] == pytest.approx(4 / lines[3]["speed/step_time_s"])
    header, *rows = (folder / "metrics.csv").read_text().splitlines()
    assert header.startswith("step,loss,phase,speed/") and len(rows) == 4
    assert json.loads((folder / "config.json").read_text()) == {"lr": 0.1, "path": str(tmp_path)}


def started_on_the_main_process_alone(folder: Path) -> list[Any]:
    accelerator = Accelerator(log_with="csv", project_dir=folder)
    if accelerator.is_main_process:
        accelerator.init_trackers("run")
    accelerator.log({"loss": 1})
    accelerator.get_tracker("csv").log({"loss": 2}, step=3)
    accelerator.get_tracker("csv", unwrap=True)
    named = [tracker.name for tracker in accelerator.trackers]
    accelerator.end_training()
    return named


def test_where_the_main_process_alone_starts_trackers_others_get_one_that_does_nothing(ranks, tmp_path):
    assert ranks.run(2, in_own_world, started_on_the_main_process_alone, tmp_path) == [["csv", "jsonl"], []]
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[2].startswith("3,2")


class Failing(Mine):
    def finish(self) -> None:
        raise ConnectionError("the tracker's server is gone")


def test_a_tracker_that_fails_at_the_end_leaves_no_save_and_no_rank_waiting(tmp_path, alone):
    accelerator = Accelerator(config=ALONE, log_with=Failing())
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.init_trackers("run")
    accelerator.save_state(tmp_path / "saved", blocking=False)
    with pytest.raises(ConnectionError):
        accelerator.end_training()
    assert accelerator._run.saving is None and (tmp_path / "saved" / "MANIFEST.json").exists()


def in_own_world(function: Callable, *args: Any) -> Any:
    """end_training leaves a group that it did not start."""
    result = function(*args)
    assert dist.is_initialized()
    return result


def trained(folder: Path, steps: int, resumes: bool, log_with: str = "csv") -> None:
    """Steps of training, with a checkpoint at step 2; or a run that resumes from it."""
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(config=ALONE, project_config=project, log_with=log_with)
    model, optimizer, _, _ = parts(4, 2)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.init_trackers("run", {"lr": 1})
    if resumes:
        accelerator.load_state()
    while accelerator.counters.step < steps:
        accelerator.backward(model(torch.ones(1, 6)).sum())
        optimizer.step()
        optimizer.zero_grad()
        step = accelerator.counters.step
        accelerator.log({"loss": float(step)})
        if step == 2:
            accelerator.save_state()
            accelerator.log({"eval": float("nan")}, step=2)
    accelerator.end_training()


@pytest.mark.slow
def test_a_resumed_run_appends_and_logs_no_step_twice(tmp_path, alone):
    trained(tmp_path, 4, resumes=False)
    path = tmp_path / "run" / "metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')  # as a kill leaves it
    trained(tmp_path, 5, resumes=True)
    lines = lines_of(path)
    assert [(line["step"], "eval" in line) for line in lines] == [
        (1, False), (2, False), (2, True), (3, False), (4, False), (5, False),
    ]  # fmt: skip
    assert lines[2]["eval"] == "nan"
    table = path.with_suffix(".csv").read_text().splitlines()
    assert [row.split(",")[0] for row in table] == ["step", "1", "2", "2", "3", "4", "5"]
    trained(tmp_path, 1, resumes=False)  # anew: the older run's file is kept
    assert len(lines_of(path)) == 1 and len(lines_of(path.with_name("metrics.1.jsonl"))) == 6


def test_records_of_any_names_and_order(tmp_path):
    for kind in (JsonLines, Csv):
        tracker = kind(tmp_path, lambda: True)
        tracker.log({"a": 1, "text": 'say "so", twice\nover'}, step=1)
        tracker.log({"b": torch.tensor(2.5)}, step=2)
        tracker.log({"a": True}, step=None)
        tracker.rewind(2, frozenset({"a"}))
        tracker.log({"b": 3}, step=3)
        assert [record["step"] for record in tracker.records()] == [1, 2, None, 3]
        tracker.rewind(2, frozenset({"b"}))
        assert [record["step"] for record in tracker.records()] == [1, None]
        assert tracker.records()[0]["text"] == 'say "so", twice\nover'


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_record_that_was_cut_off_does_not_spoil_the_next(kind, tmp_path):
    tracker = kind(tmp_path, lambda: True)
    for step in (1, 2):
        tracker.log({"loss": 0.5}, step=step)
    tracker.path.write_bytes(tracker.path.read_bytes()[:-2])  # by a loss of power
    resumed = kind(tmp_path, lambda: True)
    resumed.rewind(2, frozenset({"loss"}))
    for step in (2, 3):
        resumed.log({"loss": 0.25}, step=step)
    assert [(record["step"], float(record["loss"])) for record in resumed.records()] == [(1, 0.5), (2, 0.25), (3, 0.25)]


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_line_ends_in_a_text_are_kept(kind, tmp_path):
    tracker = kind(tmp_path, lambda: True)
    tracker.log({"text": "one\r\ntwo\rthree\n"}, step=1)
    before = tracker.path.stat()
    tracker.rewind(1, frozenset({"other"}))
    assert tracker.records()[0]["text"] == "one\r\ntwo\rthree\n"
    assert tracker.path.stat().st_ino == before.st_ino, "nothing to drop, so nothing is written"


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_value_named_step_is_not_taken_for_the_step(kind, tmp_path):
    """Records of samples seen, `{"step": 64 * step}`, were all dropped when the run resumed."""
    tracker = kind(tmp_path, lambda: True)
    for step in (1, 2, 3):
        tracker.log({"step": 64 * step, "loss": 0.5}, step=step)
    tracker.rewind(3, frozenset({"step", "loss"}))
    assert [(record["step"], int(record["logged_step"])) for record in tracker.records()] == [(1, 64), (2, 128)]


IN_ASCII = r"""
import sys
from pathlib import Path
from shardkit.tracking.records import Csv, JsonLines
from shardkit.tracking.trackers import KNOWN
for kind in (JsonLines, Csv):
    tracker = kind(Path(sys.argv[1]), lambda: True)
    tracker.log({"a": "\u00e9"}, step=1)
    tracker.log({"b": "\u2192"}, step=2)
    tracker.rewind(2, frozenset({"b"}))
    tracker.log({"b": "\u2192"}, step=3)
    assert [record["step"] for record in tracker.records()] == [1, 3]
    assert tracker.records()[0]["a"] == "\u00e9" and tracker.records()[1]["b"] == "\u2192"
"""


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_records_go_on_where_the_file_or_its_folder_was_taken_away(kind, tmp_path):
    tracker = kind(tmp_path / "logs", lambda: False)
    tracker.log({"loss": 0.5}, step=1)
    tracker.path.unlink()
    tracker.log({"loss": 0.25}, step=2)
    assert [(record["step"], float(record["loss"])) for record in tracker.records()] == [(2, 0.25)]
    shutil.rmtree(tracker.path.parent)
    tracker.log({"loss": 0.125}, step=3)
    assert [(record["step"], float(record["loss"])) for record in tracker.records()] == [(3, 0.125)]


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_forked_worker_logs_into_the_files_of_its_run(kind, tmp_path):
    """Each took the file of the run for that of an older one, and put it aside."""
    tracker = kind(tmp_path, lambda: False)
    for step in (1, 3):
        worker = multiprocessing.get_context("fork").Process(target=tracker.log, args=({"seen": 3, "by": step}, step))
        worker.start()
        worker.join()
        tracker.log({"loss": 0.25}, step=step + 1)
    assert [record["step"] for record in tracker.records()] == [1, 2, 3, 4]
    assert os.listdir(tmp_path) == [tracker.path.name]


def test_one_number_that_python_has_no_json_for_is_logged_as_text(tmp_path):
    tracker = JsonLines(tmp_path, lambda: False)
    tracker.log({"z": torch.tensor(1 + 2j), "day": numpy.datetime64("2026-01-02"), "part": numpy.complex64(1j)}, step=1)
    assert tracker.records() == [{"step": 1, "z": "(1+2j)", "day": "2026-01-02", "part": "1j"}]


def test_records_are_utf_8_in_every_locale(tmp_path):
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    command = [sys.executable, "-c", IN_ASCII, str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, env=os.environ | ascii_only)
    assert (tmp_path / "metrics.csv").read_bytes() == "step,a,b\n1,é,\n3,,→\n".encode()


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_new_name_changes_no_record_before_it(kind, tmp_path):
    """Steps that were no whole numbers, and the rest of a text after a carriage return, were lost from the table."""
    tracker = kind(tmp_path, lambda: False)
    steps = [0.5, 10**20, "last", -3, None, 1e20]
    for number, step in enumerate(steps):
        tracker.log({f"name {number}\r": "one\rtwo", "file \udcff": "\udcff"}, step=step)
    found = tracker.records()
    assert [record["step"] for record in found] == steps
    assert [record[f"name {number}\r"] for number, record in enumerate(found)] == ["one\rtwo"] * len(steps)
    assert {record["file \\udcff"] for record in found} == {"\\udcff"}


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_names_that_are_counted_otherwise_drop_no_others_after_a_load(kind, tmp_path):
    """A number that every start logs at step 0, and epochs beside steps, dropped all records."""
    tracker = kind(tmp_path, lambda: True)
    for step in (1, 2, 3, 4):
        tracker.log({"loss": 0.5, "speed/x": 1}, step=step)
    tracker.log({"accuracy": 0.5}, step=1)
    tracker.rewind(0, frozenset({"size"}))
    tracker.log({"size": 9}, step=0)
    for step in (3, 4):
        tracker.log({"loss": 0.25}, step=step)
    tracker.log({"accuracy": 0.75, "speed/x": 1}, step=1)
    found = [(record["step"], float(record.get("loss") or 0)) for record in tracker.records()]
    assert found == [(1, 0.5), (2, 0.5), (0, 0), (3, 0.25), (4, 0.25), (1, 0)]


def test_a_best_state_that_is_loaded_to_be_tested_hides_nothing_in_tensorboard(tmp_path, monkeypatch):
    """All values after it were purged, at the first log after the load."""
    purged: list[int | None] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            purged.append(purge_step)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    tracker = TensorBoard("run", tmp_path, lambda: True)
    tracker.rewind(5, frozenset({"loss"}))
    for step in (5, 6, 7):
        tracker.log({"loss": 0.5}, step=step)
    tracker.rewind(6, frozenset({"test"}))
    tracker.log({"test": 0.9}, step=6)
    assert purged == [5]
    for step in (7, 8):
        tracker.log({"loss": 0.25}, step=step)
    assert purged == [5, 7]


def test_a_step_may_be_a_number_of_numpy_or_torch(tmp_path, alone):
    accelerator = Accelerator(config=ALONE, log_with="csv", project_dir=tmp_path)
    accelerator.init_trackers("run")
    for step in (numpy.int64(3), torch.tensor(4), numpy.float32(4.5)):
        accelerator.log({"loss": 1}, step=step)
    with pytest.raises(
        UsageError, match=r"log: step: not one number \(got 2 of them\); give a number, or leave it out"
    ):
        accelerator.log({"loss": 1}, step=torch.tensor([1, 2]))
    with pytest.raises(UsageError, match=r"log: log_kwargs for an unknown tracker \(got cvs\); there are csv, jsonl"):
        accelerator.log({"loss": 1}, log_kwargs={"cvs": {}, "wandb": {}})
    accelerator.end_training()
    assert [line["step"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")] == [3, 4, 4.5]


class TakesAll(Mine):
    takes_objects = True


def test_objects_go_to_trackers_that_take_them(tmp_path, alone):
    mine, image = TakesAll(), object()
    accelerator = Accelerator(config=ALONE, log_with=["csv", mine], project_dir=tmp_path)
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0, "image": image}, step=3)
    accelerator.log({"image": [image]})
    with pytest.raises(UsageError, match=r"'pixels': not one number \(got 4 of them\)"):
        accelerator.log({"image": image, "pixels": torch.ones(4)})
    assert mine.said[1:] == [({"loss": 1.0, "image": image}, 3, {}), ({"image": [image]}, 0, {})]
    assert lines_of(tmp_path / "run" / "metrics.jsonl") == [{"step": 3, "loss": 1.0}]


def test_a_configuration_that_json_cannot_hold_is_kept_as_text(tmp_path):
    tracker, loop = JsonLines(tmp_path, lambda: False), {}
    loop["loop"] = loop
    tracker.store_init_configuration({"lr": 0.1, "by pair": {("a", 1): 2}, 3: Path("x"), "loop": loop})
    tracker.finish()
    found = json.loads((tmp_path / "config.json").read_text())
    assert found == {"lr": 0.1, "by pair": "{('a', 1): 2}", "3": "x", "loop": "{'loop': {...}}"}


@pytest.mark.parametrize("kind", [JsonLines, Csv])
def test_a_full_disk_leaves_no_half_record(kind, tmp_path):
    tracker = kind(tmp_path, lambda: True)
    tracker.log({"loss": 0.5}, step=1)
    size, allowed = tracker.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3, allowed[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tracker.log({"loss": 0.25}, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)
        signal.signal(signal.SIGXFSZ, ignored)
    assert tracker.path.stat().st_size == size


def test_speeds_begin_anew_after_a_load(tmp_path):
    accelerator = Accelerator(config=ALONE | {"shardkit": {"log_speed": True}}, project_dir=tmp_path)
    model, optimizer, loader, _ = parts(16, 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.init_trackers("run")
    for number, batch in enumerate(loader):
        accelerator.backward(model(batch["x"]).sum())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            accelerator.save_state(tmp_path / "saved")
    for _ in range(2):
        accelerator.load_state(tmp_path / "saved")
        accelerator.log({"after a load": 1})
    accelerator.end_training()
    assert not [name for line in lines_of(tmp_path / "run" / "metrics.jsonl") for name in line if "speed" in name]


def test_a_project_without_a_name_is_said(tmp_path, alone):
    accelerator = Accelerator(config=ALONE, project_dir=tmp_path)
    with pytest.raises(UsageError, match=r"init_trackers: the project's name is not a text \(got NoneType\); give one"):
        accelerator.init_trackers(None)
    accelerator.end_training()


def test_numbers_in_a_configuration_stay_numbers_and_its_json_is_strict(tmp_path):
    tracker, refused = JsonLines(tmp_path, lambda: False), float("nan")
    values = {"np": numpy.float32(2), "torch": torch.tensor(3), "array": numpy.arange(2)}
    tracker.store_init_configuration({**values, "clip": float("inf"), "nested": {"list": [refused, values]}})
    tracker.finish()
    found = json.loads((tmp_path / "config.json").read_text(), parse_constant=pytest.fail)
    as_read = {"np": 2.0, "torch": 3, "array": "[0 1]"}
    assert found == {**as_read, "clip": "inf", "nested": {"list": ["nan", as_read]}}


def test_a_folder_that_cannot_be_written_is_said_before_the_first_log(tmp_path):
    (tmp_path / "file").touch()
    accelerator = Accelerator(config=ALONE, project_dir=tmp_path / "file")
    with pytest.raises(UsageError, match=r"the folder \S*file/run cannot be written \(Not a directory\); give"):
        accelerator.init_trackers("run")
    accelerator.end_training()


@pytest.mark.slow
def test_what_cannot_be_tracked_is_said(tmp_path):
    with pytest.raises(UsageError) as caught:
        Accelerator(config=ALONE, log_with=["csv", "tensorbord", "aim", Mine, 3])
    assert str(caught.value).splitlines() == [
        "Accelerator(log_with=...): unknown tracker (got tensorbord); did you mean tensorboard?",
        "Accelerator(log_with=...): aim is not supported; subclass shardkit.Tracker, and pass an object.",
        f"Accelerator(log_with=...): unknown tracker (got the class Mine); {ALL}",
        f"Accelerator(log_with=...): unknown tracker (got a int); {ALL}",
    ]
    if importlib.util.find_spec("wandb") is None:
        with pytest.raises(UsageError, match="wandb is not installed; pip install wandb, or leave it out"):
            Accelerator(config=ALONE, log_with="wandb")
    accelerator = Accelerator(config=ALONE, log_with=["csv"])
    with pytest.raises(UsageError, match=r"csv needs a folder \(got none\); give Accelerator\(project_dir="):
        accelerator.init_trackers("run")
    accelerator = Accelerator(config=ALONE, log_with=["all", own := Mine()])
    accelerator.init_trackers("run")  # what needs a folder is left out
    assert own in accelerator.trackers and not {"jsonl", "csv", "tensorboard"} & {
        one.name for one in accelerator.trackers
    }
    accelerator = Accelerator(config=ALONE, log_with="all", project_dir=tmp_path)
    with pytest.raises(UsageError, match=r"init_kwargs for an unknown tracker \(got wandbb\)"):
        accelerator.init_trackers("run", init_kwargs={"wandbb": {}})
    with pytest.raises(UsageError, match=r"config is not values by name \(got Namespace\); give a dict, such as vars"):
        accelerator.init_trackers("run", config=argparse.Namespace(lr=1))
    accelerator.init_trackers("run")
    accelerator.init_trackers("run")  # a cell run again
    assert [tracker.name for tracker in accelerator.trackers][:2] == ["jsonl", "csv"]
    with pytest.raises(UsageError, match=r'log: not values by name \(got float\); write \{"loss": loss\}'):
        accelerator.log(3.0)
    with pytest.raises(UsageError, match=r"a name must be text \(got int\)"):
        accelerator.log({1: 2})
    accelerator.end_training()
    accelerator.end_training()
