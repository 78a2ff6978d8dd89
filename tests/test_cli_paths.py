"""Paths as people type them: `.`, `..`, links, `~`."""

import json

import pytest

from shardkit import ProjectConfiguration
from shardkit.checkpoint.saving import retention
from shardkit.cli.main import run
from shardkit.launch import folders
from shardkit.storage.url import place_of
from tests.checkpoints import build, save, train


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory):
    root = tmp_path_factory.mktemp("project") / "checkpoints"
    live = build("single")
    for step in (1, 2):
        train(live, 1, first=step)
        save(live, root / f"step-{step:08}", step, "sharded", in_series=True)
    return root


def answer(capsys, *arguments, code=0):
    """What the command printed on stdout and stderr."""
    assert run([*map(str, arguments)]) == code, capsys.readouterr()
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("inner", ["", "model"])
def test_a_checkpoint_that_is_the_working_folder_or_its_parent(of_one_rank, capsys, monkeypatch, inner):
    step = of_one_rank / "step-00000001"
    monkeypatch.chdir(step / inner)
    typed = ".." if inner else "."
    assert answer(capsys, "checkpoint", "list", typed).startswith(f"{step}: 1 checkpoint\n")
    assert answer(capsys, "checkpoint", "inspect", typed).startswith(f"{step}\n")
    assert answer(capsys, "checkpoint", "verify", typed).startswith(f"{step}: valid")
    answer(capsys, "checkpoint", "pin", typed)
    assert retention.is_pinned(step), "and no file of another name was left"
    assert "pinned" in answer(capsys, "checkpoint", "list", of_one_rank)
    answer(capsys, "checkpoint", "pin", typed, "--undo")
    assert not retention.is_pinned(step)
    assert "give another folder" in answer(capsys, "checkpoint", "merge", typed, "-o", ".", code=3)


def test_a_short_option_takes_its_value_after_an_equals_sign_too(of_one_rank, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer(capsys, "config", "--defaults", "-o=run.yaml")
    answer(capsys, "checkpoint", "merge", of_one_rank, "-o=merged")
    (tmp_path / "train.py").touch()
    text = answer(capsys, "launch", "--config=run.yaml", "--cpu", "-n=3", "--dry-run", "train.py", "-o=its-own")
    assert "1 machine x 3" in text and "train.py -o=its-own" in text
    answer(capsys, "submit", "--config=run.yaml", "--to=slurm", "-n=3", "-o=job.sh", "train.py")
    assert {path.name for path in tmp_path.iterdir()} == {"run.yaml", "merged", "train.py", "job.sh"}


@pytest.mark.parametrize("part", ["model", "model/r00000-of-00001.safetensors", "index.json", "."])
def test_a_part_of_a_checkpoint_names_the_checkpoint(of_one_rank, capsys, monkeypatch, part):
    step = of_one_rank / "step-00000001"
    if part == ".":
        monkeypatch.chdir(step / "model")
    said = answer(capsys, "checkpoint", "inspect", part if part == "." else step / part, code=3)
    assert said.endswith(f": is part of the checkpoint {step}; give that folder.\n")


def test_the_folder_of_several_runs_names_them(of_one_rank, tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "runs" / name).symlink_to(of_one_rank.parent)
    for above in (tmp_path / "runs", tmp_path):  # the latter is where a script runs that saves into runs/a
        text = answer(capsys, "checkpoint", "list", above, code=3)
        runs = ", ".join(str(tmp_path / "runs" / name) for name in ("a", "b"))
        assert text.endswith(f"give the folder of a run, such as {runs}.\n")


def test_a_launch_that_is_to_resume_from_several_checkpoints_names_one(of_one_rank, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "best").symlink_to(of_one_rank / "step-00000001")
    launch = ["launch", "--cpu", "-n", "2", "--dry-run", "--resume"]
    for several in (of_one_rank, of_one_rank.parent):
        said = answer(capsys, *launch, several, "train.py", code=2)
        assert f"launch: resume: {several}: a folder of checkpoints; name one of them, such as" in said
        assert f"{of_one_rank / 'step-00000002'}; or give auto for the newest one." in said
    for part in ("model", "index.json"):
        said = answer(capsys, *launch, of_one_rank / "step-00000001" / part, "train.py", code=2)
        assert f"{part}: a part of a checkpoint; name the checkpoint, {of_one_rank / 'step-00000001'}; or give" in said
    for one in (of_one_rank / "step-00000001", "out/best", "auto"):
        answer(capsys, *launch, one, "train.py")


def test_a_link_to_a_checkpoint_is_pinned_at_the_checkpoint(of_one_rank, tmp_path, capsys):
    best = tmp_path / "best"
    best.symlink_to(of_one_rank / "step-00000001")
    answer(capsys, "checkpoint", "pin", best)
    assert retention.is_pinned(best) and retention.is_pinned(of_one_rank / "step-00000001")
    assert "0 checkpoints" in answer(capsys, "checkpoint", "prune", of_one_rank, "--keep-last", 1)
    answer(capsys, "checkpoint", "pin", best, "--undo")
    assert not retention.is_pinned(of_one_rank / "step-00000001")
    (tmp_path / "best.PIN").touch()
    assert retention.is_pinned(best), "a file that somebody put beside the link"


def test_a_difference_of_every_tensor_is_a_few_lines(of_one_rank, capsys):
    steps = (of_one_rank / "step-00000001", of_one_rank / "step-00000002")
    everything = json.loads(answer(capsys, "checkpoint", "diff", *steps, "--json", code=1))["other_values"]
    lines = answer(capsys, "checkpoint", "diff", *steps, code=1).splitlines()
    left = sum(name.startswith("optim") for name in everything) - 20
    assert left > 0 and f"optim: {left} more (--json lists all)" in lines
    assert lines[-1].endswith(f"{len(everything)} not.") and len(lines) < len(everything)


def test_the_home_folder_is_meant_by_a_tilde(of_one_rank, tmp_path, capsys, monkeypatch):
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    (home / "run").symlink_to(of_one_rank.parent)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    assert json.loads(answer(capsys, "checkpoint", "list", "~/run", "--json"))["checkpoints"][0]["step"] == 1
    answer(capsys, "checkpoint", "merge", "~/run", "--output=~/export")
    answer(capsys, "config", "--defaults", "--set", "use_cpu=true", "--output=~/a.yaml")
    answer(capsys, "config", "validate", "~/a.yaml")
    sizes = "gpt:layers=2,hidden=8,heads=2"
    answer(capsys, "plan", "--model", sizes, "--batch-size", 1, "--config=~/a.yaml", "--plot=~/a.svg")
    logs = folders.make_log_dir("~/logs")
    assert {"export", "a.yaml", "a.svg", "logs"} <= {path.name for path in home.iterdir()} and logs == home / "logs"
    project = ProjectConfiguration("~/project")
    assert (project.project_dir, project.logging_dir) == (str(home / "project"), str(home / "project"))
    assert place_of("~/a") == home / "a" and not [*here.iterdir()]
