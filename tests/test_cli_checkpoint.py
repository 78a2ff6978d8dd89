"""`shardkit checkpoint` on checkpoints that real ranks saved: what it prints, writes, deletes and refuses."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardkit.checkpoint.commands import compare
from shardkit.checkpoint.exporting import export, save_model
from shardkit.checkpoint.files import disk, folder, manifest, verify
from shardkit.checkpoint.loading import locate
from shardkit.checkpoint.saving import lock, retention
from shardkit.checkpoint.states import state
from shardkit.cli import checkpoint_text
from shardkit.cli.main import EXIT_UNREAD, run
from shardkit.cli.progress import Progress
from shardkit.distributed import control
from shardkit.errors import EXIT_CHECK_FAILED, EXIT_CHECKPOINT, EXIT_CONFIG, EXIT_MACHINE, CheckpointError
from tests.checkpoints import build, save, train

KINDS = {"sharded": 4, "full": 8}


def make_series(root):
    """Steps 4 (sharded) and 8 (full), on this many ranks, with an export beside the last; the live model is dropped."""
    live = build("fsdp" if torch.distributed.get_world_size() > 1 else "single")
    for kind, step in KINDS.items():
        train(live, 1, first=step)
        final = folder.step_folder(root / "checkpoints", step)
        save(live, final, step, kind, in_series=True, mesh={"names": ["shard"], "shape": [2]}, config_text="a: 1\n")
        save_model.save(live.models[0], root / f"export-{step}", control.start(60.0))


@pytest.fixture(scope="module")
def project(ranks, tmp_path_factory):
    """A project of two ranks; not to be changed."""
    root = tmp_path_factory.mktemp("project")
    ranks.run(2, make_series, root)
    return root


def of_one_rank(root):
    """The steps of `make_series`, saved by one rank from the weights that two ranks saved."""
    from tests.checkpoints import load

    live = build("single")
    load(live, folder.step_folder(root / "checkpoints", 4))
    save(live, root / "one" / "step-00000004", 4, "sharded", config_text="a: 1\n")


def called(capsys, *arguments, code=0):
    """What a command printed, which must end with that code."""
    assert run(["checkpoint", *map(str, arguments)]) == code, capsys.readouterr()
    return capsys.readouterr().out


def flip(path, place=-3):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def copied(project, target):
    import shutil

    shutil.copytree(project / "checkpoints", target / "checkpoints")
    return target / "checkpoints"


def test_list_names_every_step_and_what_is_wrong(project, tmp_path, capsys):
    text = called(capsys, "list", project)
    assert f"{project / 'checkpoints'}: 2 checkpoints" in text
    assert "step        4  sharded    2 ranks" in text
    assert text.rstrip().endswith("UTC  complete, latest")
    root = copied(project, tmp_path)
    (root / "step-00000004" / "index.json").unlink()
    retention.pin(root / "step-00000008")
    rows = json.loads(called(capsys, "list", root, "--json"))["checkpoints"]
    assert [(row["step"], row["pinned"], row["problem"] is None) for row in rows] == [
        (4, False, False),
        (8, True, True),
    ]
    assert "index.json: missing" in rows[0]["problem"]
    assert "DAMAGED" in called(capsys, "list", root)


def test_checkpoints_with_names_of_the_script_are_listed_and_verified(tmp_path, capsys):
    live = build("single")
    for step, name in enumerate(("epoch-0", "best", "step-00000002")):
        train(live, 1, first=step)
        save(live, tmp_path / name, step, "full")
        if name == "best":
            lines = called(capsys, "list", tmp_path).splitlines()
            assert [line.split()[-1] for line in lines[1:]] == ["epoch-0", "best"]
            text = called(capsys, "verify", tmp_path)
            assert f"{tmp_path / 'epoch-0'}: valid" in text and f"{tmp_path / 'best'}: valid" in text
            with pytest.raises(CheckpointError, match=r"its checkpoints are not named by step \(epoch-0, best\)"):
                locate.checkpoint(tmp_path)
    lines = called(capsys, "list", tmp_path).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["complete", "epoch-0", "best"], (
        "a name where it is not the step"
    )


def test_a_project_with_another_checkpoint_in_it_is_listed_with_its_steps(project, tmp_path, capsys, monkeypatch):
    root = copied(project, tmp_path)
    save(build("single"), tmp_path / "best", 1, "full")
    save(build("single"), root / "best", 1, "full")
    monkeypatch.setattr(manifest, "exists", refusing("closed", manifest.exists))
    (root / "closed").mkdir()
    lines = called(capsys, "list", tmp_path).splitlines()
    assert lines[0] == f"{tmp_path}: 4 checkpoints" and [line.split()[-1] for line in lines[3:]] == ["best"] * 2


def refusing(name, look):
    """As `look`, but for a folder of this name, which may not be read."""

    def looked(path):
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path)

    return looked


def test_inspect_finds_the_newest_and_tells_what_is_in_it(project, capsys):
    text = called(capsys, "inspect", project)
    assert text.startswith(str(project / "checkpoints" / "step-00000008"))
    assert "step      8, epoch 0" in text
    assert "full, 2 ranks, mesh shard 2" in text
    assert "; 1 tied" in text
    facts = json.loads(called(capsys, "inspect", project / "checkpoints" / "step-00000004", "--json", "--tensors"))
    assert (facts["step"], facts["kind"], facts["world_size"]) == (4, "sharded", 2)
    assert facts["tensors"]["model"]["embed.weight"]["placements"] == ["S0"]
    assert facts["sections"]["model"]["tied"] == {"head.weight": "embed.weight"}


def test_a_newer_checkpoint_that_is_not_complete_is_told_where_an_older_one_is_used(project, tmp_path, capsys):
    root = copied(project, tmp_path)
    (root / "step-00000008" / "index.json").unlink()
    merge = ["merge", root, "-o", tmp_path / "out", "--json"]
    for verb in (["inspect", root], merge, ["pin", root], ["diff", root, root]):
        assert run(["checkpoint", *map(str, verb)]) == 0
        said = capsys.readouterr()
        assert f"skipped step 8 ({root / 'step-00000008' / 'index.json'}: missing.); step 4 is used.\n" in said.err
        assert verb[0] != "merge" or json.loads(said.out)["step"] == 4


def test_what_a_run_deletes_meanwhile_is_not_told_as_skipped(project, tmp_path, capsys, monkeypatch):
    root = copied(project, tmp_path)
    look = folder.inspect

    def look_and_delete(path):
        if path.name == "step-00000008" and path.exists():
            folder.remove(path)
        return look(path)

    monkeypatch.setattr(folder, "inspect", look_and_delete)
    assert run(["checkpoint", "inspect", str(root)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(str(root / "step-00000004")) and said.err == ""


def test_steps_in_a_project_folder_do_not_hide_those_of_its_run(project, tmp_path, capsys):
    root = copied(project, tmp_path)
    shutil.copytree(root / "step-00000004", tmp_path / "step-00000006")
    rows = json.loads(called(capsys, "list", tmp_path, "--json"))["checkpoints"]
    assert [Path(row["path"]) for row in rows] == [
        root / "step-00000004",
        root / "step-00000008",
        tmp_path / "step-00000006",
    ]
    assert [row["latest"] for row in rows] == [False, True, False]
    assert str(tmp_path / "step-00000006") in called(capsys, "list", tmp_path)
    assert called(capsys, "verify", tmp_path).count(": valid (") == 3
    assert called(capsys, "inspect", tmp_path).startswith(str(root / "step-00000008")), "where a run resumes"


def test_verify_names_what_is_damaged(project, tmp_path, capsys):
    assert called(capsys, "verify", project).count(": valid (") == 2
    root = copied(project, tmp_path)
    damaged = root / "step-00000004" / "optim" / "r00001-of-00002.safetensors"
    flip(damaged)
    assert run(["checkpoint", "verify", str(root)]) == EXIT_CHECKPOINT
    said = capsys.readouterr()
    assert f"{damaged}: its xxh3 digest differs from the manifest (corrupted)" in said.out
    assert "checkpoint: 1 of 2 damaged; resume from another checkpoint." in said.err
    assert run(["checkpoint", "verify", str(root / "step-00000004"), "--json"]) == EXIT_CHECKPOINT
    assert len(json.loads(capsys.readouterr().out)[0]["problems"]) == 1


@pytest.mark.parametrize("verb", ["verify", "list"])
def test_what_a_run_deletes_meanwhile_is_not_damaged(project, tmp_path, capsys, monkeypatch, verb):
    root = copied(project, tmp_path)
    going, find = root / "step-00000004", locate.checkpoints

    def find_and_delete(path):
        found = find(path)
        folder.remove(going)
        return found

    monkeypatch.setattr(locate, "checkpoints", find_and_delete)
    assert run(["checkpoint", verb, str(root)]) == 0
    said = capsys.readouterr()
    assert "step-00000004" not in said.out and "DAMAGED" not in said.out
    assert verb == "list" or said.err == f"note: {going} was deleted before it was verified.\n"
    copied(project, tmp_path / "again")
    going = tmp_path / "again" / "checkpoints" / "step-00000004"
    assert verb == "list" or run(["checkpoint", verb, str(going)]) == EXIT_CHECKPOINT, "the one that was named"


def test_what_may_not_be_read_is_told_with_what_to_do(project, capsys, monkeypatch):
    monkeypatch.setattr(manifest, "read", refusing("step-00000004", manifest.read))
    file = project / "checkpoints" / "step-00000004"
    text = f"{file}: cannot be read (Permission denied); check its permissions and those of the folders above it."
    assert text in called(capsys, "list", project)
    assert text in called(capsys, "verify", project, code=EXIT_CHECKPOINT)


def test_a_named_checkpoint_with_a_damaged_manifest_is_damaged(tmp_path, capsys):
    for name in ("best", "other", "last"):
        save(build("single"), tmp_path / name, 1, "full")
    flip(tmp_path / "last" / manifest.NAME)
    (tmp_path / "other" / manifest.NAME).write_text('{"format": "of another program"}')
    text = called(capsys, "verify", tmp_path, code=EXIT_CHECKPOINT)
    assert f"{tmp_path / 'last' / manifest.NAME}: not valid JSON" in text and "other" not in text
    assert "DAMAGED" in called(capsys, "list", tmp_path).splitlines()[1]


def test_checkpoints_with_a_name_of_their_own_are_found_in_a_project(project, tmp_path, capsys):
    """`save_state("run/best")` saves beside the folder of steps."""
    root = copied(project, tmp_path / "run")
    for name in ("run/best", "run/checkpoints/good"):
        shutil.copytree(root / "step-00000004", tmp_path / name)
    flip(tmp_path / "run/best/index.json")
    assert f"{tmp_path}/run/best/index.json: its xxh3 digest" in called(
        capsys, "verify", tmp_path / "run", code=EXIT_CHECKPOINT
    )
    first, *rows = called(capsys, "list", tmp_path / "run").splitlines()
    assert first == f"{tmp_path / 'run'}: 4 checkpoints" and [row.split()[-1] for row in rows[2:]] == ["good", "best"]
    for step in KINDS.values():
        shutil.rmtree(folder.step_folder(root, step))
    assert called(capsys, "list", tmp_path / "run").startswith(f"{tmp_path / 'run'}: 2 checkpoints")
    called(capsys, "inspect", tmp_path / "run", code=EXIT_CHECKPOINT)


def test_a_project_with_the_manifest_of_another_program_is_no_checkpoint(project, tmp_path, capsys):
    copied(project, tmp_path / "run")
    (tmp_path / "run" / manifest.NAME).write_text('{"name": "a web page"}')
    assert "2 checkpoints" in called(capsys, "list", tmp_path / "run")
    assert called(capsys, "verify", tmp_path / "run").count(": valid (") == 2
    assert called(capsys, "inspect", tmp_path / "run").startswith(str(tmp_path / "run/checkpoints/step-00000008"))


def test_prune_of_another_users_folder_says_what_to_do(project, capsys, monkeypatch):
    def refused(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "checkpoints/.lock")

    monkeypatch.setattr("shardkit.checkpoint.saving.lock.acquire", refused)
    assert run(["checkpoint", "prune", str(project), "--keep-last", "1"]) == EXIT_CHECKPOINT
    advice = "check its permissions and those of the folders above it"
    assert f"checkpoint: checkpoints/.lock: Permission denied; {advice}.\n" == capsys.readouterr().err


def test_a_pin_that_may_not_be_written_says_what_to_do(project, capsys, monkeypatch):
    def refused(self, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refused)
    assert run(["checkpoint", "pin", str(project)]) == EXIT_CHECKPOINT
    advice = "PIN: Permission denied; check its permissions and those of the folders above it.\n"
    assert capsys.readouterr().err.endswith(advice)


def test_prune_makes_room_on_a_full_disk(project, tmp_path, capsys, monkeypatch):
    """Who holds the lock is not written down there; the lock holds all the same."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    root = copied(project, tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    assert "1 checkpoint, " in called(capsys, "prune", root, "--keep-last", 1)
    assert [found.step for found in folder.steps(root)] == [8]


def test_diff_compares_what_different_ranks_saved(project, ranks, capsys):
    ranks.run(1, of_one_rank, project)
    steps, one = project / "checkpoints", project / "one" / "step-00000004"
    assert " equal, 0 not." in called(capsys, "diff", steps / "step-00000004", steps / "step-00000004")
    text = called(capsys, "diff", steps / "step-00000004", one)
    assert "world_size: 2 | 1" in text
    assert " equal, 0 not." in text
    found = json.loads(called(capsys, "diff", steps, one, "--json", code=EXIT_CHECK_FAILED))
    assert found["facts"]["step"] == [8, 4]
    assert "model: embed.weight" in found["other_values"]
    assert "model: scale" not in found["other_values"]
    apart = found["magnitudes"]["model: embed.weight"]
    assert 0 < apart["count"] <= apart["of"] and apart["max_abs"] > 0 and 0 < apart["max_rel"] <= 2
    text = called(capsys, "diff", steps, one, code=EXIT_CHECK_FAILED)
    assert re.search(r"model: embed\.weight: [\d,]+ of [\d,]+ values differ, at most by \S+ \(relative: \S+\)", text)
    assert "scheduler.0" in found["other_state"]
    rates = found["state_values"]["optim 0 settings"]["groups.0.settings.lr"]
    assert f"state: optim 0 settings differs: groups.0.settings.lr {rates[0]} | {rates[1]}, " in text
    assert "last_epoch" in found["state_values"]["scheduler.0"]
    assert not found["only_first"] and not found["only_second"]


APART = [
    (torch.tensor([2**53, 1]), torch.tensor([2**53 + 1, 1]), (1, 1.0)),
    (torch.tensor([2**63 - 1, 1]), torch.tensor([-(2**63), 1]), (1, 2.0**64)),
    (torch.tensor([2**63], dtype=torch.uint64), torch.tensor([2**63 - 1], dtype=torch.uint64), (1, 1.0)),
    (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), (0, None)),
    (torch.tensor([torch.inf, torch.nan]), torch.tensor([0.0, torch.nan]), (1, None)),
]


@pytest.mark.parametrize(("one", "two", "expected"), APART)
def test_diff_counts_values_and_not_what_doubles_hold_of_them(tmp_path, one, two, expected):
    for name, values in (("a", one), ("b", two)):
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
        model.register_buffer("values", values)
        save(state.Live([model]), tmp_path / name)
    found = compare.compare(*(verify.open_checkpoint(tmp_path / name) for name in ("a", "b")))
    magnitude = found.magnitudes["model: values"]
    assert (magnitude.count, magnitude.max_abs) == expected
    text = "no value differs, only their bits" if not magnitude.count else "1 of "
    assert f"model: values: {text}" in "\n".join(checkpoint_text.difference(found))


@pytest.mark.parametrize("section", ["model", "optim"])
def test_diff_refuses_damaged_bytes(project, tmp_path, capsys, section):
    whole = project / "checkpoints" / "step-00000004"
    path = copied(project, tmp_path) / "step-00000004"
    damaged = path / section / "r00001-of-00002.safetensors"
    flip(damaged)
    for pair in ((whole, path), (path, whole), (path, path)):
        assert run(["checkpoint", "diff", *map(str, pair)]) == EXIT_CHECKPOINT
        said = capsys.readouterr()
        assert f"{damaged}: its xxh3 digest differs from the manifest (corrupted)\n" in said.err
        assert said.err.count("corrupted") == 1
        assert said.err.endswith("checkpoint: damaged checkpoints are not compared.\n")
        assert not said.out


@pytest.mark.requirement("D4")
@pytest.mark.parametrize("step", [4, 8])
def test_merge_equals_save_model(project, tmp_path, capsys, step):
    path = project / "checkpoints" / f"step-{step:08d}"
    text = called(capsys, "merge", path, "-o", tmp_path / "merged")
    assert f"in 1 file, step {step}" in text
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (
        project / f"export-{step}" / "model.safetensors"
    ).read_bytes()


def test_merge_casts_and_splits(project, tmp_path, capsys):
    arguments = ["merge", project, "-o", tmp_path / "merged", "--dtype", "bf16", "--max-shard-size", "300B", "--json"]
    told = json.loads(called(capsys, *arguments))
    files = [tmp_path / "merged" / name for name in told["written"][0]["files"]]
    assert len(files) > 2
    expected = load_file(project / "export-8" / "model.safetensors")
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.bfloat16() if tensor.is_floating_point() else tensor)


def test_merge_publishes_nothing_of_damaged_bytes(project, tmp_path, capsys):
    root = copied(project, tmp_path)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "model.safetensors").write_text("the one before")
    named = ((4, "model/r00001-of-00002.safetensors"), (8, "model/model.safetensors"), (8, "state/common.json"))
    for step, name in named:
        flip(damaged := root / f"step-{step:08d}" / name)
        arguments = ["checkpoint", "merge", str(root / f"step-{step:08d}"), "-o", str(tmp_path / "merged")]
        assert run(arguments) == EXIT_CHECKPOINT
        said = capsys.readouterr()
        assert "digest differs from the manifest (corrupted)" in said.err and said.out == ""
        flip(damaged)
    assert [path.name for path in (tmp_path / "merged").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "merged" / "model.safetensors").read_text() == "the one before"


def test_merge_publishes_all_models_or_none(tmp_path, capsys):
    path, merged = tmp_path / "two", tmp_path / "new" / "merged"
    models = [torch.nn.Linear(3, 2), torch.nn.Linear(2, 5)]
    save(state.Live(models, [], {}, {}, seed=7), path)
    arguments = ["checkpoint", "merge", str(path), "-o", str(merged)]
    second = path / "model_1" / "r00000-of-00001.safetensors"
    flip(second)
    assert run(arguments) == EXIT_CHECKPOINT
    assert f"{second}: its xxh3 digest differs" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    flip(second)
    called(capsys, *arguments[1:])
    for where, model in zip((merged, merged / "model_1"), models, strict=True):
        assert torch.equal(load_file(where / "model.safetensors")["weight"], model.weight)
        assert [path.name for path in where.iterdir() if path.is_file()] == ["model.safetensors"]


def test_merge_tells_of_the_further_models_of_an_earlier_export(project, tmp_path, capsys):
    of_two, target = build("single"), tmp_path / "out"
    of_two.models.append(build("single").models[0])
    save(of_two, tmp_path / "two", 1)
    for source, told in (
        (tmp_path / "two", ""),
        (project, f"(got {target / 'model_1'}); delete what you do not need.\n"),
    ):
        (target / "model_2").mkdir(parents=True, exist_ok=True)
        assert run(["checkpoint", "merge", str(source), "-o", str(target)]) == 0
        err = capsys.readouterr().err
        assert err.endswith(told) and ("earlier export" in err) == bool(told)
    assert (target / "model_1/model.safetensors").exists()


def test_merge_reads_a_bounded_number_of_bytes_at_once(project, tmp_path, capsys, monkeypatch):
    largest, found = [0], disk.read_into

    def counted(descriptor, target, offset, where):
        if not where.endswith("MANIFEST.json"):
            largest[0] = max(largest[0], len(target))
        found(descriptor, target, offset, where)

    monkeypatch.setattr(disk, "read_into", counted)
    monkeypatch.setattr(disk, "BLOCK_BYTES", 128)
    monkeypatch.setattr(disk, "JSON_LIMIT_BYTES", 1 << 20)
    from shardkit.checkpoint.commands import merge
    from shardkit.checkpoint.files import verify

    checkpoint = verify.open_checkpoint(project / "checkpoints" / "step-00000008")
    _ = checkpoint.index
    size = 0
    with verify.Files(checkpoint) as files:
        size = min(item.begin for item in files.header("model/model.safetensors").values())
    largest[0] = 0
    merge.merge(checkpoint, tmp_path / "merged")
    assert largest[0] <= max(size, 128)
    expected = (project / "export-8" / "model.safetensors").read_bytes()
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == expected


def test_prune_keeps_the_newest_and_what_is_pinned(project, tmp_path, capsys):
    root = copied(project, tmp_path)
    (root / ".tmp-step-00000012-dead").mkdir()
    assert "would delete" in called(capsys, "prune", root, "--keep-last", "1", "--dry-run")
    assert len(folder.steps(root)) == 2
    retention.pin(root / "step-00000004")
    assert json.loads(called(capsys, "prune", root, "--keep-last", "1", "--json"))["removed"] == []
    assert not (root / ".tmp-step-00000012-dead").exists()
    retention.unpin(root / "step-00000004")
    told = json.loads(called(capsys, "prune", tmp_path, "--keep-last", "1", "--json"))
    assert told["removed"] == [str(root / "step-00000004")] and told["bytes"] > 1000
    assert [found.step for found in folder.steps(root)] == [8]


def test_prune_reads_what_it_would_keep(project, tmp_path, capsys):
    root = copied(project, tmp_path)
    damaged = root / "step-00000008" / "model" / "model.safetensors"
    flip(damaged)
    said = called(capsys, "prune", root, "--keep-last", "1", "--dry-run")
    assert f"kept, not counted: {damaged}: its xxh3 digest differs" in said
    told = json.loads(called(capsys, "prune", root, "--keep-last", "1", "--json"))
    assert told["removed"] == [] and len(told["damaged"]) == 1
    assert [found.step for found in folder.steps(root)] == [8, 4]
    flip(damaged)
    flip(root / "step-00000004" / "index.json")  # older than what stays: nobody asks
    assert called(capsys, "prune", root, "--keep-last", "1").startswith(f"deleted {root / 'step-00000004'}\n")


def test_prune_tells_what_cut_off_saves_left(project, tmp_path, capsys):
    root = copied(project, tmp_path)
    left = [root / name for name in (".old-step-00000008", ".tmp-step-00000012-dead", ".trash-0123")]
    for path in left:
        path.mkdir()
        (path / "part").write_bytes(bytes(1000))
    said = called(capsys, "prune", root, "--keep-last", "2", "--dry-run")
    assert all(f"would delete {path} (leftover of a killed save)\n" in said for path in left)
    assert said.endswith("0 checkpoints, 2.9 KiB (dry run)\n")
    assert all(path.exists() for path in left)
    told = json.loads(called(capsys, "prune", root, "--keep-last", "2", "--json"))
    assert told["debris"] == [str(path) for path in left] and told["bytes"] == 3000
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize("name", ["best", "step-00000004"])
def test_one_checkpoint_is_listed_alone_and_not_pruned(project, tmp_path, capsys, name):
    path = copied(project, tmp_path) / name
    if name == "best":
        path.with_name("step-00000004").rename(path)
    lines = called(capsys, "list", path).splitlines()
    assert lines[0] == f"{path}: 1 checkpoint"
    assert lines[1].startswith("  step        4  sharded    2 ranks") and len(lines) == 2
    assert run(["checkpoint", "prune", str(path), "--keep-last", "1"]) == EXIT_CHECKPOINT
    assert f"checkpoint: {path}: is a single checkpoint; give the folder" in capsys.readouterr().err
    assert not (path.parent / ".lock").exists()
    (path / "index.json").unlink()
    assert "  DAMAGED  " in called(capsys, "list", path)


def test_what_is_deleted_before_it_is_merged_is_named(project, tmp_path, capsys, monkeypatch):
    path = folder.steps(copied(project, tmp_path))[0].path
    real = export.begin

    def begin(*given):
        shutil.rmtree(path)
        return real(*given)

    monkeypatch.setattr(export, "begin", begin)
    assert run(["checkpoint", "merge", str(path), "-o", str(tmp_path / "export")]) == EXIT_CHECKPOINT
    assert f"{path}: was deleted; use another checkpoint." in capsys.readouterr().err
    assert not (tmp_path / "export").exists()


def test_what_is_deleted_while_it_is_read_is_deleted_and_not_damaged(project, tmp_path, capsys, monkeypatch):
    path = folder.steps(copied(project, tmp_path))[0].path
    read = verify.hash_file

    def read_and_delete(*given):
        if path.exists():
            folder.remove(path)
        return read(*given)

    monkeypatch.setattr(verify, "hash_file", read_and_delete)
    assert run(["checkpoint", "diff", str(path), str(project)]) == EXIT_CHECKPOINT
    assert capsys.readouterr().err.startswith(f"{path}: was deleted; use another checkpoint.\ncheckpoint: ")


def replaced_at(monkeypatch, where, name, root):
    """A checkpoint in whose place another is saved at the first call of this function."""
    path, other = (found.path for found in folder.steps(root))
    aside = os.path.join(root, "aside")
    os.rename(other, aside)
    call = getattr(where, name)

    def replace_and_call(*given, **settings):
        if os.path.exists(aside):
            disk.exchange(aside, path)
            shutil.rmtree(aside)
        return call(*given, **settings)

    monkeypatch.setattr(where, name, replace_and_call)
    return path


@pytest.mark.parametrize(
    ("where", "name"), [(manifest, "check_sizes"), (verify.Checkpoint, "text"), (verify.Files, "source")]
)
def test_what_is_replaced_while_it_is_read_is_not_damaged(project, tmp_path, capsys, monkeypatch, where, name):
    root = copied(project, tmp_path)
    path = replaced_at(monkeypatch, where, name, root)
    assert f"{path}: valid" in called(capsys, "verify", root)


def test_a_comparison_tells_what_was_replaced_meanwhile(project, tmp_path, capsys, monkeypatch):
    path = replaced_at(monkeypatch, verify.Checkpoint, "text", copied(project, tmp_path))
    assert run(["checkpoint", "diff", str(path), str(project)]) == EXIT_CHECKPOINT
    said = capsys.readouterr().err
    assert "was replaced by another checkpoint while it was read" in said and "corrupted" not in said


def test_a_run_may_begin_while_prune_verifies(project, tmp_path, capsys, monkeypatch):
    """It takes the lock to delete; what it verifies can be read for an hour."""
    root = copied(project, tmp_path)
    real, free = verify.damages, []

    def damages(*given):
        with open(root / lock.NAME) as file:
            free.append(not file.read())
        return real(*given)

    monkeypatch.setattr(verify, "damages", damages)
    called(capsys, "prune", root, "--keep-last", 1)
    assert free == [True] and len(folder.steps(root)) == 1


@pytest.mark.parametrize("flags", [["--dry-run"], []])
def test_prune_calls_nothing_damaged_that_a_run_deletes_meanwhile(project, tmp_path, capsys, monkeypatch, flags):
    root = copied(project, tmp_path)
    going, real = max(found.path for found in folder.steps(root)), verify.damages

    def damages(checkpoint, *given):
        if checkpoint.path == going:
            folder.remove(going)
        return real(checkpoint, *given)

    monkeypatch.setattr(verify, "damages", damages)
    told = json.loads(called(capsys, "prune", root, "--keep-last", 1, "--json", *flags))
    assert (told["damaged"], told["removed"]) == ([], [])


def test_prune_respects_a_live_run(project, tmp_path, capsys):
    root = copied(project, tmp_path)
    code = f"""
import sys
from pathlib import Path
from shardkit.checkpoint.saving import lock
held = lock.acquire(Path({str(root)!r}), "a run")
print("held", flush=True)
sys.stdin.readline()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        assert run(["checkpoint", "prune", str(root), "--keep-last", "1"]) == EXIT_CHECKPOINT
        said = capsys.readouterr().err
        assert f"on {socket.gethostname()}) saves into this folder; prune after it has ended." in said
        assert len(folder.steps(root)) == 2
    finally:
        holder.communicate("\n", timeout=60)


def test_what_is_no_checkpoint_is_said_so(tmp_path, capsys):
    assert run(["checkpoint", "list", str(tmp_path / "none")]) == EXIT_CHECKPOINT
    assert "no such folder; give a project folder or a folder of checkpoints." in capsys.readouterr().err
    assert run(["checkpoint", "inspect", str(tmp_path)]) == EXIT_CHECKPOINT
    assert "no step-* folder, and neither does its folder checkpoints; give the folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run(["checkpoint", "list", str(tmp_path / "file")]) == EXIT_CHECKPOINT
    assert "is a file; give a project folder or a folder of checkpoints." in capsys.readouterr().err
    (tmp_path / "step-00000001").mkdir()
    assert run(["checkpoint", "inspect", str(tmp_path)]) == EXIT_CHECKPOINT
    assert "none of its 1 checkpoints is complete" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"file: is a file; give the folder of a checkpoint\."):
        manifest.read(tmp_path / "file")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / ".metadata").touch()
    assert run(["checkpoint", "verify", str(tmp_path / "other")]) == EXIT_CHECKPOINT
    assert "was saved by Accelerate or torch.distributed.checkpoint; write it" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="other: was saved by Accelerate or torch"):
        manifest.read(tmp_path / "other")
    assert run(["checkpoint", "merge", str(tmp_path)]) == EXIT_CONFIG


def test_a_folder_that_is_deleted_while_runs_are_looked_for_is_no_other_error(tmp_path, capsys, monkeypatch):
    def glob(folder, pattern):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder / "gone"))

    monkeypatch.setattr(Path, "glob", glob)
    assert run(["checkpoint", "verify", str(tmp_path)]) == EXIT_CHECKPOINT
    assert f"{tmp_path}: contains no step-* folder" in capsys.readouterr().err


def test_what_the_file_system_refuses_is_told(project, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(["checkpoint", "merge", str(project), "-o", str(tmp_path / "file" / "below")]) == EXIT_CHECKPOINT
    assert f"checkpoint: {tmp_path / 'file' / 'below'}: Not a directory; choose another path" in capsys.readouterr().err


EMPTY = [
    ["list", ""], ["verify", ""], ["pin", ""], ["prune", "", "--keep-last", "1"], ["merge", "PROJECT", "-o", ""],
    ["convert", "", "-o", "out"], ["convert", "PROJECT", "-o", ""],
]  # fmt: skip


@pytest.mark.parametrize("words", EMPTY, ids=" ".join)
def test_an_empty_name_is_refused(project, capsys, monkeypatch, words):
    """As from a shell variable that is not set: it is not the current folder."""
    monkeypatch.chdir(project)
    before = sorted(project.rglob("*"))
    assert run(["checkpoint", *(str(project) if word == "PROJECT" else word for word in words)]) == EXIT_CONFIG
    assert "not the path of a folder (got ''); give a folder, or . for the current one." in capsys.readouterr().err
    assert sorted(project.rglob("*")) == before


def test_a_folder_that_cannot_be_read_is_told(project, capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    root = project / "checkpoints"
    for line in (["list"], ["inspect"], ["verify"], ["diff", str(root)], ["prune", "--keep-last", "1"]):
        assert run(["checkpoint", *line, str(root)]) == EXIT_CHECKPOINT
        assert (
            f"checkpoint: {root}: cannot be read (Permission denied); check its permissions" in capsys.readouterr().err
        )
    monkeypatch.setattr(disk, "is_there", refuse)
    assert run(["checkpoint", "inspect", str(root / "step-00000004")]) == EXIT_CHECKPOINT
    assert "step-00000004: cannot be read (Permission denied); check its permissions" in capsys.readouterr().err


def output_nobody_reads():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def test_output_that_nobody_reads_is_no_failure(project, monkeypatch, capsys):
    steps = project / "checkpoints"
    for line, code in (
        (["list", steps], 0),
        (["diff", steps, steps], 0),
        (["diff", steps / "step-00000004", steps], EXIT_CHECK_FAILED),
    ):
        with output_nobody_reads() as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert run(["checkpoint", *map(str, line)]) == code
    with output_nobody_reads() as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(checkpoint_text, "facts", lambda facts: ["x" * 1_000_000])
        assert run(["checkpoint", "inspect", str(steps)]) == EXIT_UNREAD
    assert not capsys.readouterr().err


def test_an_error_that_nobody_reads_keeps_its_exit_code(project):
    with output_nobody_reads() as stderr:
        command = [sys.executable, "-m", "shardkit", "checkpoint", "verify", project / "nothing"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, check=False)
    assert (done.returncode, done.stdout) == (EXIT_CHECKPOINT, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no such device")
def test_output_onto_a_full_disk_is_told(project, monkeypatch, capsys):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run(["checkpoint", "list", str(project)]) == EXIT_MACHINE
    text = "shardkit checkpoint: the output: No space left on device; free some space and try again.\n"
    assert capsys.readouterr().err == text


def test_all_wrong_flags_of_a_merge_are_refused_at_once_and_nothing_is_written(project, tmp_path, capsys):
    target = tmp_path / "all.safetensors"
    wrong = ["--dtype", "int4", "--max-shard-size", "abc"]
    assert run(["checkpoint", "merge", str(project), "-o", str(target), *wrong]) == EXIT_CONFIG
    assert capsys.readouterr().err.splitlines() == [
        "--output: is a folder, which gets model.safetensors, or several files and their index "
        f"(got {target}); give a folder, such as {tmp_path / 'all'}.",
        "--dtype: unknown dtype (got 'int4'); use fp32, bf16, fp16 or fp64.",
        "--max-shard-size: not a size (got 'abc'); write it with its unit: 5GB, 500MB or 2GiB.",
    ]
    assert not target.exists()
    target.mkdir()
    called(capsys, "merge", project, "-o", target)


def test_all_wrong_numbers_are_refused_at_once(project, capsys):
    wrong = ["--keep-last", "0", "--keep-every", "x"]
    assert run(["checkpoint", "prune", str(project), *wrong]) == EXIT_CONFIG
    assert capsys.readouterr().err.splitlines() == [
        "--keep-last: is not a whole number from 1 to 1,000,000,000 (got '0'); give one.",
        "--keep-every: is not a whole number from 0 to 1,000,000,000 (got 'x'); give one.",
    ]
    assert run(["checkpoint", "convert", str(project), "-o", "x", "--step", "-1"]) == EXIT_CONFIG
    assert "--step: is not a whole number from 0 to 999,999,999,999,999,999 (got '-1')" in capsys.readouterr().err


def test_long_work_is_told_on_stderr(capsys):
    clock = iter([0.0, 1.0, 3.0, 4.0, 14.0])
    with Progress("merged", 4 * 2**20, lambda: next(clock)) as progress:
        for _ in range(4):
            progress.add(2**20)
    assert capsys.readouterr().err == "merged 2.0 MiB of 4.0 MiB\nmerged 4.0 MiB of 4.0 MiB\n"


def test_no_command_needs_torch_but_casting_and_converting(project, tmp_path):
    steps = project / "checkpoints"
    lines = [
        ["list", steps], ["inspect", steps, "--tensors"], ["verify", steps], ["diff", steps, steps],
        ["merge", steps, "-o", tmp_path / "merged"], ["prune", steps, "--keep-last", "9", "--dry-run"],
    ]  # fmt: skip
    calls = "".join(f"assert run({['checkpoint', *map(str, line)]!r}) == 0\n" for line in lines)
    code = f"import sys\nfrom shardkit.cli.main import run\n{calls}assert 'torch' not in sys.modules\n"
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Path(tmp_path / "merged" / "model.safetensors").exists()


def test_a_pinned_checkpoint_outlives_prune_until_it_is_unpinned(project, tmp_path, capsys):
    root = copied(project, tmp_path)
    oldest = folder.step_folder(root, 4)
    assert called(capsys, "pin", oldest) == f"{oldest}: pinned\n"
    called(capsys, "prune", root, "--keep-last", 1)
    assert oldest.exists() and "pinned" in called(capsys, "list", root)
    assert json.loads(called(capsys, "pin", oldest, "--json")) == {"checkpoint": str(oldest), "pinned": True}
    assert called(capsys, "pin", oldest, "--undo") == f"{oldest}: no longer pinned\n"
    called(capsys, "prune", root, "--keep-last", 1)
    assert not oldest.exists()
