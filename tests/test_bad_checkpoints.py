"""Checkpoints whose digests are right and whose contents are not what shardkit writes: refused before anything is
applied, by every command, in words."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from shardkit import values
from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk, manifest, state_json
from shardkit.cli.main import run
from shardkit.errors import CheckpointCorrupted, CheckpointError
from tests import checkpoints
from tests.checkpoints import fill, prepared, values_in

GOLDEN = Path(__file__).parent / "golden" / "0.1.0" / "full"
PLACE = ["optimizers", 0, "plain", "a", "b"]
COMMON = {"optimizers": [], "objects": {}, "loaders": {}, "seed": 1}
OWN = {"loaders": {}, "rng": {}}


@pytest.fixture
def saved(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "saved")
    return tmp_path / "saved"


def rewrite(path, name, change):
    """Change a JSON file of a checkpoint, and state its new size and digests."""
    value = json.loads((path / name).read_text())
    change(value)
    record = json.loads((path / manifest.NAME).read_text()) if name != manifest.NAME else value
    if name != manifest.NAME:
        data = disk.to_json_in_order(value)
        (path / name).write_bytes(data)
        file = record["files"][name]
        file |= {"bytes": len(data), "digests": dict.fromkeys(file["digests"], digests.of_bytes("xxh3", data))}
    record.pop("self_sha256")
    record["self_sha256"] = hashlib.sha256(disk.to_json(record)).hexdigest()
    (path / manifest.NAME).write_bytes(disk.to_json(record))


@pytest.mark.parametrize(
    "change",
    [{key: None} for key in COMMON if key != "seed"]
    + [{"objects": []}, {"loaders": {"a": 1}}, {"optimizers": [{}]}, {"optimizers": [{"groups": [{"params": [1]}]}]}]
    + [{"optimizers": [{"groups": [], "plain": {"a": 1}}]}, {"optimizers": [{"groups": [], "extra": []}]}]
    + [{"apart": {}}, {"apart": [[]]}, {"apart": [["objects", 1]]}, {"apart": [[*PLACE, 1]]}, {"apart": ["../x"]}],
    ids=str,
)
def test_shared_state_of_another_form_is_damaged(change):
    with pytest.raises(CheckpointCorrupted, match="x: not the state that shardkit writes"):
        state_json.common(COMMON | change, "x")
    assert state_json.common(COMMON | {"apart": [PLACE, ["objects", "a"]]}, "x")


@pytest.mark.parametrize(
    "change",
    [{"loaders": []}, {"rng": None}, {"apart": [{}]}, {"apart": [{"label": "a", "at": [], "value": 1}]}],
    ids=str,
)
def test_state_of_one_rank_of_another_form_is_damaged(change):
    with pytest.raises(CheckpointCorrupted, match="x: not the state that shardkit writes"):
        state_json.of_rank(OWN | change, "x")
    assert state_json.of_rank(OWN | {"apart": [{"label": "a", "at": PLACE, "value": None}]}, "x")


@pytest.mark.parametrize(
    "value",
    [{"$set": [[1]]}, {"$set": 5}, {"$bytes": "!"}, {"$float": "x"}, {"$dict": [1]}, {"$counter": [[[], 1]]}],
    ids=str,
)
def test_values_that_were_not_written_are_damaged(value):
    with pytest.raises(CheckpointCorrupted, match="the file is damaged"):
        values.decode([value], lambda name: None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("created_utc", value) for value in (None, 5, {"a": 1})),
        *(("run_id", 5), ("save_id", []), ("parent", 5), ("versions", []), ("sections", [1]), ("mesh", {"names": 1})),
    ],
)
def test_a_manifest_of_another_form_is_refused_by_every_command(saved, key, value, capsys):
    rewrite(saved, manifest.NAME, lambda record: record.update({key: value}))
    with pytest.raises(CheckpointCorrupted, match=f"{key} has another form"):
        manifest.read(saved)
    for command in ("list", "inspect", "verify"):
        assert run(["checkpoint", command, str(saved)]) == (0 if command == "list" else 3)
        printed = capsys.readouterr()
        assert f"{key} has another form" in printed.out + printed.err


def test_a_bit_that_changes_the_version_is_damage_and_no_newer_format(saved):
    path = saved / manifest.NAME
    path.write_bytes(path.read_bytes().replace(b'"min_reader":1', b'"min_reader":9'))
    with pytest.raises(CheckpointCorrupted, match="was changed or damaged"):
        manifest.read(saved)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("state/common.json", lambda value: value.pop("loaders"), "not the state that shardkit writes"),
        ("state/common.json", lambda value: value["objects"]["registered.0"].update(pair={"$set": 1}), "not as it was"),
        ("state/rank-00000.json", lambda value: value.pop("rng"), "not the state that shardkit writes"),
        ("state/rank-00000.json", lambda value: value["rng"]["numpy"].append(1), "random generators are damaged"),
        ("state/rank-00000.json", lambda value: value["rng"].update(torch="!"), "random generators are damaged"),
    ],
)
def test_a_load_of_such_a_state_changes_nothing(tmp_path, name, change, words):
    live = prepared("plain")
    fill(live, 3)
    checkpoints.save(live, tmp_path / "saved", 3)
    rewrite(tmp_path / "saved", name, change)
    fill(live, 77)
    with pytest.raises(CheckpointError, match=words):
        checkpoints.load(live, tmp_path / "saved")
    assert values_in(live) == {77.0}


def test_a_comparison_of_such_a_state_ends_in_words(saved, capsys):
    rewrite(saved, "state/common.json", lambda value: value.update(objects=".."))
    assert run(["checkpoint", "diff", str(saved), str(GOLDEN)]) == 3
    assert "not the state that shardkit writes" in capsys.readouterr().err
