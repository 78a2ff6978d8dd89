"""Checkpoints that were damaged, cut, swapped or forged: found before anything is applied, and named."""

import json
import logging
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from shardkit import Accelerator, ProjectConfiguration
from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.loading import read
from shardkit.checkpoint.saving import lock
from shardkit.errors import CheckpointCorrupted, CheckpointError, CheckpointSaveError
from shardkit.wording import counted
from tests import checkpoints, forked, stores
from tests.checkpoints import fill, prepared, values_in
from tests.ranks import log_lines


def save_steps(root, kind, steps):
    live = prepared("fsdp")
    for step in steps:
        fill(live, step)
        checkpoints.save(live, folder.step_folder(root, step), step, kind, in_series=True, config_text="a: 1\n")


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Steps 1, 2 and 3 saved by two ranks, of either kind."""
    found = {}
    for kind in ("sharded", "full"):
        found[kind] = tmp_path_factory.mktemp(kind)
        ranks.run(2, save_steps, found[kind], kind, (1, 2, 3))
    return found


@pytest.fixture
def copy(saved, tmp_path):
    """A fresh copy of them: `copy("full")` is its folder."""

    def copied(kind="sharded"):
        shutil.copytree(saved[kind], tmp_path / kind)
        return tmp_path / kind

    return copied


def files_of(path):
    return sorted(item for item in path.rglob("*") if item.is_file())


def refused(path, text=None, error=CheckpointError):
    """Loading it raises, and leaves the live objects as they were."""
    live = prepared("plain")
    fill(live, 77)
    with pytest.raises(error, match=text) as caught:
        checkpoints.load(live, path)
    assert values_in(live) == {77.0}
    return str(caught.value)


def flip(path, generator):
    data = bytearray(path.read_bytes())
    position = generator.randrange(len(data))
    data[position] ^= 1 << generator.randrange(8)
    path.write_bytes(data)


def flips_detected(saved, kind, flips, seed):
    """Each flip is one bit of one file, in turn; the checkpoint is healed after each."""
    generator = random.Random(seed)
    path = saved[kind] / "step-00000003"
    names = files_of(path)
    live = prepared("plain")
    for number in range(flips):
        victim = names[number % len(names)]
        before = victim.read_bytes()
        flip(victim, generator)
        try:
            with pytest.raises(CheckpointError) as caught:
                checkpoints.load(live, path)
            assert victim.name in str(caught.value), f"{victim} is not named in: {caught.value}"
        finally:
            victim.write_bytes(before)
    checkpoints.load(live, path)


@pytest.mark.slow
@pytest.mark.fault_row(9)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_any_flipped_bit_is_found_and_its_file_named(saved, kind):
    flips_detected(saved, kind, 100, seed=1)


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.fault_row(9)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_thousand_flipped_bits(saved, kind):
    flips_detected(saved, kind, 1000, seed=2)


def cut_to(share):
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def zero_some(path):
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(len(data[middle : middle + 4096]))
    path.write_bytes(data)


DAMAGES = {
    "cut to nothing": cut_to(0),
    "cut to one byte": lambda path: os.truncate(path, 1),
    "cut in half": cut_to(0.5),
    "one byte less": lambda path: os.truncate(path, path.stat().st_size - 1),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "deleted": lambda path: path.unlink(),
    "zeroed in part": zero_some,
    "a folder instead": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.slow
@pytest.mark.fault_row(10)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_any_damaged_file_is_found_and_named(saved, kind):
    path = saved[kind] / "step-00000003"
    for victim in files_of(path):
        before = victim.read_bytes()
        for name, damage in DAMAGES.items():
            damage(victim)
            try:
                told = refused(path)
                assert victim.name in told, f"{victim} {name}: not named in {told}"
            finally:
                shutil.rmtree(victim) if victim.is_dir() else victim.unlink(missing_ok=True)
                victim.write_bytes(before)


@pytest.mark.fault_row(10)
def test_swapped_shards_and_strange_files_are_found(copy):
    path = copy() / "step-00000003"
    first, second = sorted((path / "optim").iterdir())
    data = first.read_bytes(), second.read_bytes()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    refused(path, "optim/r0000[01]-of-00002.safetensors")
    first.write_bytes(data[0])
    second.write_bytes(data[1])
    for name in (".DS_Store", "Thumbs.db", "model/desktop.ini", "model/@eaDir/x@SynoEAStream", ".ipynb_checkpoints/a"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"an operating system's")
    checkpoints.load(prepared("plain"), path)
    for name in ("epoch.json", "config.json", "model/config.json", "ema/ema.safetensors"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(b"a script's own")
    checkpoints.load(prepared("plain"), path)
    (path / "model" / "r00002-of-00003.safetensors").write_bytes(b"")
    refused(path, "r00002-of-00003.safetensors: not part of this checkpoint")


def forged(path, change):
    """The manifest with a change and, unless the change is about that, a right digest of itself."""
    value = json.loads((path / manifest.NAME).read_text())
    value.pop("self_sha256")
    change(value)
    import hashlib

    value.setdefault("self_sha256", hashlib.sha256(disk.to_json(value)).hexdigest())
    (path / manifest.NAME).write_bytes(disk.to_json(value))


def set_to(key, to):
    return lambda value: value.__setitem__(key, to)


def rename_file(name):
    def change(value):
        files = value["files"]
        files[name] = files.pop("index.json")

    return change


FORGERIES = [
    (set_to("self_sha256", "0" * 64), "its digest does not match its contents"),
    (set_to("format", "other"), "not a shardkit manifest"),
    (lambda value: value.update(version=99, min_reader=99), "format version 99 is newer than this shardkit supports"),
    (set_to("step", "3"), "must be non-negative integers"),
    (set_to("digest", "md5"), "unknown digest or kind"),
    (set_to("files", {"index.json": {"bytes": 1, "digests": {}}}), "size or digests are missing"),
    (set_to("files", {}), "index.json"),
    (rename_file("../outside"), "an invalid file name"),
    (rename_file("/etc/hostname"), "an invalid file name"),
    (rename_file("model/../../x.safetensors"), "an invalid file name"),
    (rename_file("a" * 300), "an invalid file name"),
    (lambda value: value["files"]["index.json"].update(bytes=10**9), "bytes instead of the 1000000000 that were saved"),
    (lambda value: value["files"].pop("state/common.json"), "common.json: not part of this checkpoint"),
]


@pytest.mark.fault_row(11)
@pytest.mark.fault_row(24)
@pytest.mark.parametrize(("change", "text"), FORGERIES, ids=[text[:30] for _, text in FORGERIES])
def test_a_forged_manifest_is_refused_with_the_reason(copy, change, text):
    path = copy() / "step-00000003"
    forged(path, change)
    refused(path, re.escape(text))


@pytest.mark.fault_row(11)
def test_a_manifest_that_is_not_strict_json_is_refused(copy):
    path = copy() / "step-00000003"
    good = (path / manifest.NAME).read_text()
    for text, reason in [
        (good.replace('"step":3', '"step":3,"step":4'), "duplicate key"),
        (good.replace('"step":3', '"step":NaN'), "NaN is not a number"),
        ("[" * 100_000, "not valid JSON"),
        ("", "not valid JSON"),
        ("\xff\xfe", "not"),
        ("[]", "not a shardkit manifest"),
    ]:
        (path / manifest.NAME).write_text(text)
        refused(path, reason)
    os.truncate(path / manifest.NAME, 0)
    with (path / manifest.NAME).open("ab") as file:
        file.truncate(disk.JSON_LIMIT_BYTES + 1)
    refused(path, "too large for this file")


@pytest.mark.fault_row(24)
def test_links_are_refused(copy, tmp_path):
    path = copy() / "step-00000003"
    victim = path / "model" / "r00000-of-00002.safetensors"
    shutil.move(victim, tmp_path / "elsewhere")
    victim.symlink_to(tmp_path / "elsewhere")
    refused(path, "r00000-of-00002.safetensors: not a regular file")
    victim.unlink()
    victim.write_bytes((tmp_path / "elsewhere").read_bytes())
    shutil.move(path / "optim", tmp_path / "optim")
    (path / "optim").symlink_to(tmp_path / "optim")
    refused(path, "not a regular file")
    (path / "optim").unlink()
    shutil.move(tmp_path / "optim", path / "optim")
    (path / manifest.NAME).rename(tmp_path / "manifest")
    (path / manifest.NAME).symlink_to(tmp_path / "manifest")
    refused(path, "MANIFEST.json: cannot be read")


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


@pytest.mark.fault_row(23)
def test_no_file_is_ever_unpickled(copy, tmp_path):
    import pickle

    root = copy()
    bomb = pickle.dumps(Bomb(str(tmp_path / "mark")))
    path = root / "step-00000003"
    for victim in files_of(path):
        before = victim.read_bytes()
        for planted in (bomb, bomb.ljust(len(before), b".")[: max(len(before), len(bomb))]):
            victim.write_bytes(planted)
            refused(path)
        victim.write_bytes(before)
    (path / "optimizer.pkl").write_bytes(bomb)
    checkpoints.load(prepared("plain"), path)
    assert not (tmp_path / "mark").exists()


def load_damaged(root):
    live = prepared("fsdp")
    fill(live, 77)
    try:
        checkpoints.load(live, root / "step-00000003")
    except CheckpointCorrupted as error:
        import torch

        local = next(live.models[0].parameters()).to_local()
        return str(error), bool(torch.all(local == 77))
    return "loaded", False


@pytest.mark.fault_row(9)
def test_all_ranks_refuse_what_one_rank_finds_damaged(ranks, copy):
    root = copy()
    victim = root / "step-00000003/optim/r00001-of-00002.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    told = ranks.run(2, load_damaged, root)
    assert told[0] == told[1] and told[0][1]
    assert "optim/r00001-of-00002.safetensors: its xxh3 digest differs from the manifest (corrupted)" in told[0][0]


def damage(path, how):
    if how == "flip":
        flip(next((path / "model").iterdir()), random.Random(4))
    elif how == "cut":
        os.truncate(next((path / "optim").iterdir()), 100)
    else:
        (path / manifest.NAME).unlink()


@pytest.mark.fault_row(12)
@pytest.mark.parametrize("damaged", [("flip",), ("cut",), ("gone",), ("flip", "cut")], ids=str)
def test_auto_falls_back_and_counts_the_steps(copy, damaged, caplog):
    root = copy()
    for step, how in zip((3, 2), damaged, strict=False):
        damage(root / f"step-{step:08d}", how)
    live = prepared("plain")
    caplog.set_level("WARNING", "shardkit")
    loaded = checkpoints.load_newest(live, root)
    good = 3 - len(damaged)
    assert loaded.checkpoint.manifest.step == good and values_in(live) == {float(good)}
    lines = [record.getMessage() for record in caplog.records if "skipped step" in record.getMessage()]
    assert len(lines) == len(damaged)
    for step, line in zip((3, 2), lines, strict=False):
        assert (
            f"skipped step {step}" in line
            and f"resuming at step {good}, {counted(step - good, 'step is', 'steps are')} repeated" in line
        )


def fallen_back(root):
    with log_lines(level=logging.WARNING) as lines:
        loaded = checkpoints.load_newest(prepared("fsdp"), root)
    return loaded.checkpoint.manifest.step, [line for line in lines if "skipped step" in line]


@pytest.mark.fault_row(12)
def test_several_ranks_are_told_once_that_they_fall_back(ranks, copy):
    root = copy()
    damage(root / "step-00000003", "flip")
    (step, told), other = ranks.run(2, fallen_back, root)
    assert step == 2 and other == (2, [])
    assert len(told) == 1 and "skipped step 3" in told[0] and "resuming at step 2, 1 step is repeated" in told[0]


@pytest.mark.fault_row(12)
@pytest.mark.parametrize("at", ["open_together", "plan_of", "_verify"])
@pytest.mark.parametrize("deleted", [(2, 1), (2,), ()], ids=str)
def test_a_run_that_saves_and_deletes_meanwhile_is_followed(copy, monkeypatch, caplog, at, deleted):
    root = copy()
    newest, aside = folder.step_folder(root, 3), root / "aside"
    os.rename(newest, aside)
    call = getattr(read, at)

    def call_after_a_save(*given):
        if aside.exists():
            os.rename(aside, newest)
            for step in deleted:
                folder.remove(folder.step_folder(root, step))
        return call(*given)

    monkeypatch.setattr(read, at, call_after_a_save)
    caplog.set_level("WARNING", "shardkit")
    live = prepared("plain")
    step = checkpoints.load_newest(live, root).checkpoint.manifest.step
    assert values_in(live) == {float(step)} and step == (3 if deleted else 2)
    assert "skipped" not in caplog.text and "higher steps" not in caplog.text


@pytest.mark.fault_row(13)
def test_when_all_are_damaged_nothing_starts_anew(copy):
    root = copy()
    for found in folder.steps(root):
        damage(found.path, "flip")
    live = prepared("plain")
    fill(live, 77)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* can be loaded; nothing was changed, and training"
    ) as e:
        checkpoints.load_newest(live, root)
    assert e.value.exit_code == 3 and values_in(live) == {77.0}
    assert checkpoints.load_newest(live, root / "nowhere") is None


@pytest.mark.fault_row(12)
def test_an_explicit_path_never_falls_back(copy):
    root = copy()
    damage(root / "step-00000003", "cut")
    refused(root / "step-00000003", "bytes instead of the .* that were saved")


LATESTS = [None, "", "garbage", '{"dir": "step-00000001"}', '{"dir": "../x"}', '{"dir": "step-00000099"}', "[]"]


@pytest.mark.fault_row(5)
@pytest.mark.parametrize("text", LATESTS, ids=str)
def test_latest_is_a_hint_only(copy, text):
    root = copy()
    (root / folder.LATEST).unlink()
    if text is not None:
        (root / folder.LATEST).write_text(text)
    for name in ("step-00000009.part", "x-step-00000010", "step-11", ".tmp-step-00000012-abc"):
        shutil.copytree(root / "step-00000001", root / name)
    (root / "step-00000013").symlink_to(root / "step-00000001")
    live = prepared("plain")
    assert checkpoints.load_newest(live, root).checkpoint.manifest.step == 3


@pytest.mark.fault_row(21)
def test_damaged_random_state_is_an_error(ranks, copy):
    root = copy()
    victim = root / "step-00000003/state/rank-00001.json"
    value = json.loads(victim.read_text())
    value["rng"]["torch"] = value["rng"]["torch"][:-40]
    victim.write_bytes(disk.to_json(value))
    told = ranks.run(2, load_damaged_state, root)
    assert told[0] == told[1] and "rank-00001.json" in told[0]


def load_damaged_state(root):
    try:
        checkpoints.load(prepared("fsdp"), root / "step-00000003")
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.fault_row(40)
def test_a_copy_loads_and_half_a_copy_is_refused(copy, tmp_path):
    path = copy() / "step-00000003"
    names = files_of(path)
    shutil.copytree(path, tmp_path / "whole" / "renamed")
    live = prepared("plain")
    assert checkpoints.load(live, tmp_path / "whole" / "renamed").checkpoint.manifest.step == 3
    for stopped in range(len(names)):
        half = tmp_path / f"half-{stopped}"
        for item in names[:stopped]:
            target = half / item.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item, target)
        half.mkdir(exist_ok=True)
        refused(half)


def hold_lock(root, ready, leave):
    root.mkdir(exist_ok=True)
    held = lock.acquire(root, "first")
    ready.set()
    leave.wait(120)
    held.release()


@pytest.mark.fault_row(35)
def test_a_second_run_in_one_folder_is_refused_by_name(tmp_path, caplog):
    ready, leave = forked.context.Event(), forked.context.Event()
    process = forked.context.Process(target=hold_lock, args=(tmp_path / "r", ready, leave))
    process.start()
    try:
        assert ready.wait(120)
        with pytest.raises(CheckpointSaveError, match=rf"another run \(process {process.pid} on .*\) saves into"):
            lock.acquire(tmp_path / "r", "second")
    finally:
        process.kill()
        process.join()
    caplog.set_level("WARNING", "shardkit")
    lock.acquire(tmp_path / "r", "second").release()
    assert f"another run (process {process.pid} on " in caplog.text and "takes it over" in caplog.text
    caplog.clear()
    lock.acquire(tmp_path / "r", "third").release()
    assert caplog.text == ""


@pytest.mark.slow
@pytest.mark.fault_row(35)
def test_a_run_whose_folder_was_deleted_does_not_save_into_that_of_another(tmp_path):
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(config={"use_cpu": True}, project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state()
    root = tmp_path / "checkpoints"
    shutil.rmtree(root)
    assert manifest.exists(accelerator.save_state())  # nobody else uses it
    shutil.rmtree(root)
    ready, leave = forked.context.Event(), forked.context.Event()
    process = forked.context.Process(target=hold_lock, args=(root, ready, leave))
    process.start()
    try:
        assert ready.wait(120)
        with pytest.raises(CheckpointSaveError, match=rf"another run \(process {process.pid} on .*\) saves into"):
            accelerator.save_state()
    finally:
        process.kill()
        process.join()
    assert manifest.exists(accelerator.save_state())
    accelerator.end_training()


def load_killed(root, fault):
    live = prepared("fsdp")
    fill(live, 77)
    forked.arm(fault)
    try:
        checkpoints.load(live, root / "step-00000003")
    except CheckpointError as error:
        import torch

        return str(error), bool(torch.all(next(live.models[0].parameters()).to_local() == 77))
    return "loaded", False


@pytest.mark.slow
@pytest.mark.fault_row(26)
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("verify:1:raise=EIO", "Input/output error"),
        ("read:0:kill", "a rank died"),
        ("apply:1:raise=EIO", "Input/output"),
    ],
)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(saved, fault, text):
    outcomes = forked.run(2, load_killed, saved["sharded"], fault)
    assert outcomes[0].marks == {".".join(fault.split(":")[:2])}
    survivors = [outcome for outcome in outcomes if outcome.exit_code == 0]
    assert survivors and all(text in outcome.value[0] and outcome.value[1] for outcome in survivors), outcomes


def a_run_in(folder, resume):
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
    settings = {"use_cpu": True, "distributed_type": "NO", "shardkit": {"checkpoint": {"resume": resume}}}
    accelerator = Accelerator(config=settings, project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 2))
    return accelerator


@pytest.mark.slow
@pytest.mark.fault_row(35)
@pytest.mark.parametrize("resume", ["never", "auto"])
@pytest.mark.parametrize("is_in_store", [False, True])
def test_what_another_run_has_saved_since_this_one_began_is_not_replaced(tmp_path, resume, is_in_store):
    place = stores.made(tmp_path) if is_in_store else tmp_path / "mine"
    root = tmp_path / (stores.BUCKET if is_in_store else "mine") / "checkpoints"
    other = a_run_in(tmp_path / "other", "never")
    other.save_state()
    other.end_training()
    run = a_run_in(place, resume)
    assert not run.resume()
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000000", root / "step-00000007")
    with pytest.raises(CheckpointSaveError, match=r"another run \(\w+\) has saved step 0 here .* since this run began"):
        run.save_state()
    run.end_training()
    again = a_run_in(place, resume)
    assert again.resume() == (resume == "auto")
    again.save_state()
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000000", root / "step-00000008")
    again.load_state()  # from here on it knows them
    again.save_state()
    again.end_training()


@pytest.mark.slow
@pytest.mark.fault_row(35)
@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_run_that_begins_where_another_saves_is_told_before_it_trains(tmp_path, resume, capsys):
    ready, leave = forked.context.Event(), forked.context.Event()
    process = forked.context.Process(target=hold_lock, args=(tmp_path / "checkpoints", ready, leave))
    process.start()
    try:
        assert ready.wait(120)
        run = a_run_in(tmp_path, resume)
        run.resume()
        assert f"another run (process {process.pid} on " in (told := capsys.readouterr().err)
        assert "saves into this folder, and saves of this run fail as long as it does; use another folder" in told
    finally:
        leave.set()
        process.join()
    run.save_state()
    run.end_training()
    again = a_run_in(tmp_path, resume)
    again.resume()
    assert "another run" not in capsys.readouterr().err
    again.end_training()
