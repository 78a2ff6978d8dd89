"""Folders that a script names. Links are followed and stay; the working folder is never replaced."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardkit.checkpoint.files import folder, manifest, verify
from shardkit.checkpoint.loading import locate
from shardkit.checkpoint.saving import retention
from shardkit.cli.main import run as run_command
from shardkit.errors import EXIT_CHECKPOINT, CheckpointError, CheckpointSaveError, UsageError
from shardkit.runtime.checkpoints import objects, saving
from tests.numbered_runs import run_of, train


def saved_and_loaded(project, output):
    """Two steps saved under one name; the step that it holds then, and whether loading it brings the weights back."""
    run = run_of(project / "run")
    for _ in range(2):
        train(run, 1)
        run[0].save_state(output)
    weights = [parameter.full_tensor().clone() for parameter in run[1].parameters()]
    torch.nn.init.zeros_(run[1][0].weight)
    run[0].load_state(output)
    same = all(torch.equal(p.full_tensor(), w) for p, w in zip(run[1].parameters(), weights, strict=True))
    saving.close(run[0]._run)
    return same


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("there", ["an empty folder", "a checkpoint", "nothing yet", "a link to a link"])
def test_a_link_is_followed_and_stays(ranks, tmp_path, there, world):
    scratch, link = tmp_path / "scratch" / "data", tmp_path / "out"
    scratch.parent.mkdir()
    if there in ("an empty folder", "a link to a link"):
        scratch.mkdir()
    if there == "a checkpoint":
        ranks.run(1, saved_and_loaded, tmp_path, scratch)
    if there == "a link to a link":
        (tmp_path / "middle").symlink_to(scratch)
        link.symlink_to("middle")
    else:
        link.symlink_to(scratch)
    target = os.readlink(link)
    assert ranks.run(world, saved_and_loaded, tmp_path, link) == [True] * world
    assert link.is_symlink() and os.readlink(link) == target
    assert manifest.read(scratch).step == 2 and not scratch.is_symlink()
    assert sorted(path.name for path in scratch.parent.iterdir()) == ["data"], "nothing else is left there"
    assert verify.damages(verify.open_checkpoint(link)) == [], "the commands follow it too"


def without_its_disk(project, lost):
    """What a save, a load and a resume say where a link of the project leads nowhere."""
    run = run_of(project / "run", checkpoint={"resume": "auto"})
    lost.symlink_to(project / "unmounted" / "gpt")
    said = []
    for call in (run[0].save_state, run[0].load_state, run[0].resume):
        with pytest.raises(CheckpointError) as caught:
            call()
        said.append(str(caught.value).partition("\n")[0])
    return said


@pytest.mark.parametrize("name", ["run", "run/checkpoints"])
def test_a_project_whose_disk_is_not_mounted_is_not_started_afresh(ranks, tmp_path, name, capsys):
    lost = tmp_path / name
    lost.parent.mkdir(exist_ok=True)
    (said,) = ranks.run(1, without_its_disk, tmp_path, lost)
    to = tmp_path / "unmounted" / "gpt"
    text = f"{lost}: is a link to {to}, where nothing is; mount that disk, or remove the link."
    assert [line.endswith(text) for line in said] == [True] * 3, said
    assert run_command(["checkpoint", "list", str(tmp_path / "run")]) == EXIT_CHECKPOINT
    assert capsys.readouterr().err == f"checkpoint: {text}\n"


@pytest.fixture
def as_in_3_14(monkeypatch):
    """From Python 3.14 on these are False where the disk does not tell."""
    there = {"exists": os.path.exists, "is_dir": os.path.isdir, "is_file": os.path.isfile, "is_symlink": os.path.islink}
    for name, function in there.items():
        monkeypatch.setattr(Path, name, lambda self, function=function: function(self))


def test_a_folder_that_the_disk_does_not_show_is_no_empty_one(as_in_3_14, tmp_path):
    """The name is too long for the disk; as with a disk that fails, nothing is known of what is there."""
    root = tmp_path / ("x" * 300)
    for look in (folder.steps, locate.checkpoints, locate.checkpoint):
        with pytest.raises(CheckpointError, match=r"cannot be read \(File name too long\)"):
            look(root)
    with pytest.raises(OSError, match="File name too long"):
        retention.is_pinned(tmp_path / ("x" * 255))


def test_a_step_that_the_disk_does_not_show_is_not_passed_over(as_in_3_14, tmp_path, monkeypatch):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000002").touch()
    real = os.stat

    def fails(path, *words, **named):
        if str(path).endswith("step-00000001"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *words, **named)

    monkeypatch.setattr(os, "stat", fails)
    assert [found.step for found in folder.steps(tmp_path)] == [1]


def in_a_linked_project(project):
    run = run_of(project)
    train(run, 1)
    path = run[0].save_state()
    train(run, 1)
    run[0].save_state()
    run[0].load_state()
    saving.close(run[0]._run)
    return path.resolve().parent, run[0].counters.step


@pytest.mark.parametrize("linked", ["project", "project/checkpoints"])
def test_a_project_or_its_folder_of_checkpoints_may_be_a_link(ranks, tmp_path, linked):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / linked).parent.mkdir(exist_ok=True)
    (tmp_path / linked).symlink_to(tmp_path / "elsewhere")
    below = tmp_path / "elsewhere" / ("checkpoints" if linked == "project" else "")
    assert ranks.run(2, in_a_linked_project, tmp_path / "project") == [(below, 2)] * 2
    assert (tmp_path / linked).is_symlink()


def archived(project):
    """A step of the series that somebody moved away and linked; the run comes to that step again."""
    run = run_of(project)
    train(run, 1)
    first = run[0].save_state()
    train(run, 1)
    second = run[0].save_state()
    if run[0].is_main_process:
        second.rename(project / "archive")
        second.symlink_to(project / "archive")
    run[0].wait_for_everyone()
    run[0].load_state(first)
    train(run, 1)
    run[0].save_state()
    run[0].load_state()
    saving.close(run[0]._run)
    return run[0].counters.step, second.is_symlink(), manifest.read(project / "archive").step


def test_a_step_that_was_moved_away_and_linked_is_not_written_into(ranks, tmp_path):
    assert ranks.run(2, archived, tmp_path) == [(2, False, 2)] * 2


def refused_here(folder):
    here = folder / "work" / "below"
    os.makedirs(here, exist_ok=True)
    found = os.getcwd()
    run = run_of(folder / "run")
    os.chdir(here)
    try:
        for given in (".", "./", str(here), Path(), "..", here.parent, "../../work"):
            said = "save_state: .*: (is|contains) the working folder.* give a folder below it"
            with pytest.raises(UsageError, match=said):
                run[0].save_state(given)
        assert os.path.samefile(".", here)
        run[0].save_state("./new/")
    finally:
        os.chdir(found)
    return manifest.read(here / "new").step


@pytest.mark.parametrize("world", [1, 2])
def test_the_working_folder_is_never_replaced(ranks, tmp_path, world):
    assert ranks.run(world, refused_here, tmp_path) == [0] * world


def test_a_link_to_the_working_folder_is_the_working_folder(alone, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "link").symlink_to("here")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="is the working folder"):
        run_of(tmp_path / "run")[0].save_state(tmp_path / "link")


@pytest.mark.parametrize("given", [lambda path: f"{path}/", str, Path, lambda path: path.parent / "." / path.name])
def test_a_folder_may_be_written_in_many_ways(alone, tmp_path, given):
    (tmp_path / "out").mkdir()  # an empty folder is as good as none
    run = run_of(tmp_path / "run")
    assert run[0].save_state(given(tmp_path / "out")) == tmp_path / "out"
    run[0].load_state(given(tmp_path / "out"))


def test_a_tilde_is_the_home_folder(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = run_of("~/project")
    run[0].save_state("~/out")
    run[0].load_state("~/out")
    run[0].save_state()
    run[0].save_model(run[1], "~/export")
    run[0].save({"a": 1}, "~/values.json")
    saving.close(run[0]._run)
    assert manifest.read(tmp_path / "out").step == 0
    assert (tmp_path / "export/model.safetensors").exists() and (tmp_path / "values.json").exists()
    assert (tmp_path / "project/checkpoints/step-00000000").is_dir() and not (tmp_path / "~").exists()


def exported(project, folder):
    run = run_of(project)
    run[0].save_model(run[1], folder)
    train(run, 1)
    run[0].save_model(run[1], folder)
    return run[0].get_state_dict(run[1])


@pytest.mark.parametrize("target", ["there", "nothing yet"])
def test_an_export_follows_links(ranks, tmp_path, target):
    if target == "there":
        (tmp_path / target).mkdir()
    (tmp_path / "export").symlink_to(target)
    whole = ranks.run(2, exported, tmp_path / "run", tmp_path / "export")[0]
    assert (tmp_path / "export").is_symlink()
    found = load_file(tmp_path / target / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_an_export_into_the_working_folder_replaces_nothing_of_it(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    run = run_of(tmp_path / "run")
    run[0].save_model(run[1], ".")
    assert (tmp_path / "model.safetensors").exists() and (tmp_path / "notes.txt").read_text() == "mine"


def test_a_saved_file_lies_where_its_link_leads(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.json").symlink_to("real/values.json")
    for number in (1, 2):
        objects.save({"number": number}, tmp_path / "link.json")
        assert (tmp_path / "link.json").is_symlink()
        assert json.loads((tmp_path / "real/values.json").read_text()) == {"number": number}
    with pytest.raises(UsageError, match=r"save: not the path of a file \(got ''\)"):
        objects.save({}, "")


def test_a_link_to_a_file_or_to_itself_is_refused(alone, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "to-file").symlink_to("file")
    (tmp_path / "loop").symlink_to("loop")
    run = run_of(tmp_path / "run")
    with pytest.raises(CheckpointSaveError, match=r"failed: a file; use another name: .*file"):
        run[0].save_state(tmp_path / "to-file")
    with pytest.raises(UsageError, match=r"save_state: .*loop: is a link to itself"):
        run[0].save_state(tmp_path / "loop")
    assert (tmp_path / "loop").is_symlink() and (tmp_path / "file").read_bytes() == b""
