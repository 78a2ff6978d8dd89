"""Checkpoints in a store of objects: what holds in folders holds there, without folders, renames and locks."""

import shutil
import signal
import time
from importlib.util import find_spec

import pytest
import torch.distributed as dist

from shardkit.checkpoint.files import folder, manifest, verify
from shardkit.checkpoint.loading import locate
from shardkit.checkpoint.saving import claim, in_store, retention
from shardkit.cli.main import run
from shardkit.errors import (
    EXIT_CHECKPOINT,
    EXIT_MACHINE,
    CheckpointError,
    CheckpointSaveError,
    CheckpointUnreachable,
    UsageError,
)
from shardkit.runtime.checkpoints import saving
from shardkit.runtime.checkpoints.objects import save as save_file
from shardkit.storage import objects, waiting
from shardkit.storage.url import Url, place_of
from tests import checkpoints, forked, stores
from tests.checkpoints import fill, prepared, resumed_step, values_in
from tests.numbered_runs import in_parts, run_of, train, uninterrupted
from tests.ranks import RankError


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(objects, "PAUSE_S", 0.0)


@pytest.fixture
def root(tmp_path):
    return place_of(stores.made(tmp_path) + "/run/checkpoints")


def save_step(live, root, step, **request):
    fill(live, step)
    checkpoints.save(live, folder.step_folder(place_of(root), step), step, in_series=True, keep_last=2, **request)


def names_in(root):
    return sorted(objects.below(root))


def test_a_store_that_ranks_do_not_share_is_told_with_what_to_do(root):
    with pytest.raises(CheckpointError, match=r"not shared by all ranks: .*; give all machines the same endpoint and"):
        in_store.wait_until_marked(root / "step-00000001", "0" * 32, wait_s=0.0)


# ---- several ranks ----


def save_and_load(root):
    """Whether the state comes back to the bit: on the same ranks, under other strategies, on one rank."""
    objects.PAUSE_S = 0.0
    root = place_of(root)
    live = checkpoints.build("fsdp")
    checkpoints.train(live, 2)
    checkpoints.dropout_off(live)
    for step in (1, 2, 3):
        checkpoints.save(live, folder.step_folder(root, step), step, in_series=True, keep_last=2)
    digest, losses = checkpoints.digest_of(live), checkpoints.train(live, 2, first=2)
    found = {}
    for strategy in ("fsdp", "ddp"):
        again = checkpoints.build(strategy, seed=1)
        loaded = checkpoints.load_newest(again, root)
        assert loaded.checkpoint.manifest.step == 3
        found[strategy] = checkpoints.digest_of(again)
        checkpoints.dropout_off(again)
        if strategy == "fsdp":
            assert checkpoints.train(again, 2, first=2) == losses
    assert set(found.values()) == {digest}
    dist.barrier()
    return digest


@pytest.mark.slow
def test_two_ranks_save_and_load_what_one_rank_reads(tmp_path, root, ranks):
    digest = ranks.run(2, save_and_load, str(root))[0]
    alone = checkpoints.build("plain", seed=1)
    checkpoints.load(alone, root / "step-00000003")
    assert checkpoints.digest_of(alone) == digest
    assert [found.step for found in folder.steps(root)] == [3, 2], "two stay"
    assert not [name for name in names_in(root) if ".tmp-" in name or "step-00000001" in name]
    assert not (tmp_path / "objects:").exists()
    assert verify.damages(locate.checkpoint(root.parent)) == []


def facade(url, disk):
    """A run whose project is a URL: to the bit as one on a disk; what cannot be is refused; beside training, too."""
    objects.PAUSE_S = 0.0
    seen = in_parts(url, (2, 3), 0)
    run = run_of(url)
    accelerator = run[0]
    assert accelerator.logging_dir is None
    accelerator.load_state(f"{url}/checkpoints/step-00000002")
    again = train(run, 3)
    final = accelerator.save_state(f"{url}/best", blocking=False)
    saving.wait(accelerator._run)
    assert accelerator.load_state(final) == final == place_of(f"{url}/best")
    with pytest.raises(CheckpointError, match="a folder of checkpoints; name one of them"):
        accelerator.load_state(url)
    for name, size, dtype in (("one", "5GB", "bf16"), ("one", "5GB", "bf16"), ("several", "100B", None)):
        for place in (f"{url}/{name}", disk / name):
            accelerator.save_model(run[1], place, size, dtype)
    hook = accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="save hooks write files"):
        accelerator.save_state()
    hook.remove()
    accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    with pytest.raises(UsageError, match="use SHARDED_STATE_DICT"):
        accelerator.save_state()
    accelerator.end_training()
    return seen, again


@pytest.mark.slow
def test_a_run_whose_project_is_a_url(tmp_path, ranks):
    url = stores.made(tmp_path) + "/run"
    (seen, again), _ = ranks.run(2, facade, url, tmp_path / "export")
    expected = ranks.run(2, uninterrupted, tmp_path / "disk", 5)[0]
    assert seen == expected and again == expected[2:]
    for name in ("one", "several"):
        there = place_of(f"{url}/{name}")
        found = {file: objects.read(there / file, 1 << 20) for file in objects.names(there)}
        assert found == {path.name: path.read_bytes() for path in (tmp_path / "export" / name).iterdir()}
        assert (len(found) == 1) == (name == "one")
    with pytest.raises(RankError, match="unknown kind of store"):
        ranks.run(1, run_of, "nosuch://bucket/run")
    stores.misbehave(tmp_path, "refused", ".probe", 1)
    with pytest.raises(RankError, match=r"cannot be written: writing was denied .* check the credentials"):
        ranks.run(1, run_of, url)


# ---- one rank ----


def test_names_of_places(tmp_path):
    assert str(place_of("S3://bucket//run/")) == "s3://bucket/run"
    assert place_of("s3:/bucket/run") == place_of("s3://bucket/run"), "what pathlib makes of it"
    assert place_of("file:///runs/a") == place_of("/runs/a") and not isinstance(place_of("runs/a"), Url)
    assert str(place_of("a:b/c")) == "a:b/c" and not isinstance(place_of("C:/runs"), Url)
    for wrong in ("s3://", "s3://bucket/../other", "simplecache::s3://bucket/run"):
        with pytest.raises(UsageError):
            place_of(wrong)


@pytest.fixture
def live():
    return prepared("plain")


@pytest.mark.slow
def test_a_save_that_is_cut_off_leaves_the_one_before_and_is_cleaned_up_when_it_is_dead(
    tmp_path, root, live, monkeypatch
):
    save_step(live, root, 1)
    stores.misbehave(tmp_path, "unwritten", "/model/", 99)
    with pytest.raises(CheckpointSaveError, match="the store is down"):
        save_step(live, root, 2)
    stores.misbehave(tmp_path)
    assert not [name for name in names_in(root) if "step-00000002" in name], "a save that fails cleans up by itself"
    outcomes = forked.run(1, save_and_die, str(root), "write:0:kill")
    assert outcomes[0].exit_code == -signal.SIGKILL
    assert [name for name in names_in(root) if ".tmp-step-00000002" in name]
    assert [found.step for found in folder.steps(root)] == [1] and resumed_step(root) == 1
    save_step(live, root, 3)
    assert [name for name in names_in(root) if ".tmp-step-00000002" in name], "it may be alive"
    monkeypatch.setattr(in_store, "DEAD_AFTER_S", -1.0)
    save_step(live, root, 4)
    assert not [name for name in names_in(root) if "step-00000002" in name or ".tmp-" in name]
    assert resumed_step(root) == 4


def save_and_die(root, fault):
    live = prepared("plain")
    forked.arm(fault)
    save_step(live, root, 2)


def test_lost_answers_are_found_out(tmp_path, root, live, caplog):
    stores.misbehave(tmp_path, "unanswered", manifest.NAME, 1)
    save_step(live, root, 1)
    assert "a write had no answer" in caplog.text and resumed_step(root) == 1
    stores.misbehave(tmp_path, "unanswered", manifest.NAME, 1)
    save_step(live, root, 1, replace=True)
    stores.misbehave(tmp_path, "unwritten", manifest.NAME, 2)
    save_step(live, root, 2)
    assert resumed_step(root) == 2
    stores.misbehave(tmp_path, "unwritten", manifest.NAME, 99)
    with pytest.raises(CheckpointSaveError, match="it is unknown whether it was written"):
        save_step(live, root, 3)
    stores.misbehave(tmp_path)
    assert names_in(root / "step-00000003"), "the manifest may yet appear: its files stay"
    assert resumed_step(root) == 2


def test_of_two_writers_of_one_step_one_wins_and_the_other_is_told(root, live, monkeypatch):
    commit = in_store.commit

    def after_another(attempt, record):
        monkeypatch.setattr(in_store, "commit", commit)
        save_step(prepared("plain"), root, 5)
        commit(attempt, record)

    monkeypatch.setattr(in_store, "commit", after_another)
    with pytest.raises(CheckpointSaveError, match=r"another run \(test, at .* has saved .*step-00000005 meanwhile"):
        save_step(live, root, 5)
    monkeypatch.setattr(in_store, "commit", after_another)
    with pytest.raises(CheckpointSaveError, match="a checkpoint with this name exists"):
        save_step(live, root, 5)
    assert verify.damages(locate.checkpoint(root)) == [] and resumed_step(root) == 5
    assert len({name.split("/")[1] for name in names_in(root) if "/" in name}) == 2, "the loser's files are gone"


def test_a_checkpoint_is_replaced_as_a_whole(root, live):
    final = root.parent / "best"
    for value in (1, 2):
        fill(live, value)
        checkpoints.save(live, final, value, replace=True)
        again = prepared("plain")
        checkpoints.load(again, final)
        assert values_in(again) == {float(value)}
    assert len({name.split("/")[0] for name in names_in(final)}) == 2, "a manifest, and one folder of files"
    objects.put(root.parent / "other" / "notes.txt", b"mine")
    with pytest.raises(CheckpointSaveError, match=r"contains other objects \(notes.txt\); use another name, or write"):
        checkpoints.save(live, root.parent / "other", 1, replace=True)


def test_the_manifest_of_another_program_is_not_replaced(root, live):
    theirs = root / "web" / manifest.NAME
    objects.put(theirs, b'{"name": "a web page"}')
    with pytest.raises(CheckpointSaveError, match=r"MANIFEST.json of another program is there; use another name"):
        checkpoints.save(live, root / "web", 1, replace=True)
    assert objects.read(theirs, 99) == b'{"name": "a web page"}'


def test_old_listings_do_not_hide_the_newest(tmp_path, root, live):
    save_step(live, root, 1)
    save_step(live, root, 2)
    stores.misbehave(tmp_path, "unlisted", "step-00000002/", 999)
    assert folder.read_latest(root) == "step-00000002"
    assert resumed_step(root) == 2
    stores.misbehave(tmp_path)
    objects.remove(root / "step-00000002" / manifest.NAME)
    assert resumed_step(root) == 1, "no manifest: no checkpoint, whatever LATEST and listings say"


def test_what_is_damaged_is_found_and_what_is_not_reached_is_no_damage(tmp_path, root, live):
    save_step(live, root, 1)
    save_step(live, root, 2)
    name = next(name for name in names_in(root) if name.startswith("step-00000002") and "/optim/" in name)
    data = bytearray(objects.read(root / name, 1 << 20))
    data[-1] ^= 1
    objects.put(root / name, bytes(data))
    assert len(verify.damages(locate.checkpoint(root / "step-00000002"))) == 1
    assert resumed_step(root) == 1
    objects.remove(root / name)
    with pytest.raises(CheckpointError, match="missing"):
        locate.checkpoint(root / "step-00000002")
    stores.misbehave(tmp_path, "unread", manifest.NAME, 999)
    with pytest.raises((CheckpointUnreachable, CheckpointError), match="the store is down"):
        checkpoints.load_newest(prepared("plain"), root)
    stores.misbehave(tmp_path)


def test_an_expired_token_is_told_in_the_words_of_the_store(tmp_path, root, live, capsys):
    """The answer to HEAD has no words."""
    save_step(live, root, 1)
    stores.misbehave(tmp_path, "expired", "run/checkpoints", 999)
    told = "denied (The provided token has expired); renew the credentials, and start again."
    assert objects.nothing_there(root).endswith(told)
    with pytest.raises(CheckpointError, match="The provided token has expired") as caught:
        checkpoints.load_newest(prepared("plain"), root)
    assert "permissions" not in str(caught.value)
    assert run(["checkpoint", "verify", str(root)]) == EXIT_CHECKPOINT
    assert capsys.readouterr().err.strip().endswith(told)


def test_a_store_that_does_not_answer_is_told_with_what_to_check(root, monkeypatch):
    def down(store, path, **kwargs):
        raise OSError(5, "the store is down")

    for request in ("info", "find"):
        monkeypatch.setattr(stores.Objects, request, down)
    assert objects.nothing_there(root).endswith("(the store is down)); check the URL and the credentials.")
    with pytest.raises(CheckpointError, match=r"\(the store is down\)\); check the URL and the credentials\.$"):
        folder.steps(root)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError("Access Denied"), "looking was denied (Access Denied); check the credentials"),
        (PermissionError("The difference between the request time and ours is too large."), "set the clock"),
        (type("CredentialRetrievalError", (Exception,), {})("no role"), "(no role); check the credentials"),
        (type("UnauthorizedSSOTokenError", (Exception,), {})("It has expired"), "expired); renew the credentials"),
    ],
)
def test_what_a_store_denies_is_not_asked_again(root, error, told, monkeypatch):
    asked = []

    def info(store, name):
        asked.append(name)
        raise error

    monkeypatch.setattr(stores.Objects, "info", info)
    with pytest.raises(PermissionError) as caught:
        objects.look(root)
    assert told in str(caught.value) and len(asked) == 1


def test_a_checkpoint_may_be_copied_to_a_disk_and_from_one(tmp_path, root, live):
    save_step(live, root, 1)
    record = locate.checkpoint(root).manifest
    assert (record.version, record.data) == (4, record.save_id)
    there, here = "/" + str(root).removeprefix("objects://"), tmp_path / "copies"
    shutil.copytree(there, here)
    assert verify.damages(locate.checkpoint(here)) == [] and resumed_step(here) == 1
    checkpoints.save(live, here / "step-00000007", 7)
    shutil.copytree(here / "step-00000007", f"{there}/step-00000007")
    assert verify.damages(locate.checkpoint(root / "step-00000007")) == []


def test_retention_pins_and_marks(root, live):
    for step in range(1, 5):
        save_step(live, root, step)
        if step == 1:
            retention.pin(root / "step-00000001")
    assert [found.step for found in folder.steps(root)] == [4, 3, 1]
    retention.unpin(root / "step-00000001")
    assert [str(path) for path in retention.apply(root, 2)] == [str(root / "step-00000001")]
    assert not [name for name in names_in(root) if "step-00000001" in name]


@pytest.mark.parametrize("sign", ["[1]", "?", "*"])
def test_a_name_with_the_signs_of_patterns_is_a_name(sign, live, tmp_path):
    """fsspec's rm() deletes what a pattern matches: retention took the manifest of the run beside this one."""
    here, beside = (place_of(f"memory:/{tmp_path}/{name}/checkpoints") for name in (f"run{sign}", "run1"))
    save_step(live, beside, 1)
    for step in range(1, 5):
        save_step(live, here, step)
    assert [found.step for found in folder.steps(here)] == [4, 3]
    assert not [name for name in names_in(here) if "step-00000001" in name or ".tmp-" in name]
    assert verify.damages(locate.checkpoint(beside)) == []


def test_what_is_below_an_object_is_not_there(root, live, caplog):
    """Stores with folders, such as sftp://, answer a request for it with an error of their own."""
    save_step(live, root, 1)
    assert locate.checkpoints(root) == [root / "step-00000001"]
    assert objects.look(root / "LATEST" / "x") is None and not objects.is_there(root / "LATEST" / "x")
    assert "try 2 of" not in caplog.text


def test_a_request_without_an_answer_is_told_while_it_lasts(root, monkeypatch, caplog):
    objects.put(root / "a", b"1")
    assert objects.is_there(root / "a") and "has taken" not in caplog.text
    monkeypatch.setattr(waiting, "QUIET_S", 0.01)
    monkeypatch.setattr(stores.Objects, "info", lambda store, path, **kwargs: time.sleep(0.1) or {"size": 1})
    assert objects.is_there(root / "a")
    assert f"storage: {root}/a: looking has taken 0 s so far; the store cannot be reached, or is slow." in caplog.text


def test_another_run_in_the_same_place_is_noticed(root, live):
    mine = claim.begin(root)
    save_step(live, root, 1)
    with pytest.raises(CheckpointSaveError, match=r"another run \(test\) has saved step 1 here .* since this run"):
        claim.refuse_others(mine, "mine")
    claim.refuse_others(mine, "test")
    claim.refuse_others(claim.begin(root), "mine")  # what was there before is no reason


def test_a_full_state_is_refused_in_words(root, live):
    with pytest.raises(CheckpointSaveError, match="SHARDED_STATE_DICT"):
        checkpoints.save(live, root / "step-00000001", 1, "full")
    assert names_in(root) == []


def test_a_bucket_is_no_folder_of_a_checkpoint(live):
    with pytest.raises(CheckpointSaveError, match="memory://bucket is a whole bucket; give a folder in it"):
        checkpoints.save(live, place_of("memory://bucket"), 1)
    assert not objects.below(place_of("memory://bucket"))


def test_a_file_of_a_script_is_refused_in_words(tmp_path):
    with pytest.raises(UsageError, match="give a file on a disk"):
        save_file({"a": 1}, "s3://bucket/a.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(find_spec("smbprotocol") is not None, reason="the package is there")
def test_a_store_whose_package_is_missing_is_told_in_fsspecs_words(capsys):
    assert run(["checkpoint", "inspect", "smb://host/folder"]) == EXIT_MACHINE
    told = capsys.readouterr().err
    assert ": smb:// needs a package that is missing (SMB requires " in told and told.endswith("; install it.\n")
