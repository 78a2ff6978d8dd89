"""Checkpoints that released versions wrote load for good, on the ranks that wrote them and on others."""

import json
import random
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardkit.checkpoint.files import manifest
from tests import checkpoints
from tests.checkpoints import prepared, values_in

GOLDEN = Path(__file__).parent / "golden"
SAVED = sorted(path.parent.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob(manifest.NAME))


def load(path, strategy):
    live = prepared(strategy)
    checkpoints.load(live, path)
    return random.random(), torch.rand(()).item(), checkpoints.digest_of(live)


@pytest.mark.fault_row(39)
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_every_release_loads(ranks, name):
    live = prepared("plain")
    loaded = checkpoints.load(live, GOLDEN / name)
    assert values_in(live) == {3.0}
    record = loaded.checkpoint.manifest
    assert (record.step, record.epoch, record.samples_seen, record.world_size) == (3, 1, 36, 2)
    digest = checkpoints.digest_of(live)
    random.seed(5)
    torch.manual_seed(5)
    assert ranks.run(2, load, GOLDEN / name, "fsdp") == [(random.random(), torch.rand(()).item(), digest)] * 2


def test_there_are_golden_checkpoints_and_they_are_small():
    assert {"0.1.0/sharded", "0.1.0/full"} <= set(SAVED)
    for name in SAVED:
        assert sum(path.stat().st_size for path in (GOLDEN / name).rglob("*") if path.is_file()) < 60_000


def load_and_save(path, target):
    live = prepared("fsdp")
    loaded = checkpoints.load(live, path)
    record = loaded.checkpoint.manifest
    same = {"epoch": record.epoch, "samples_seen": record.samples_seen, "config_text": "mixed_precision: 'no'\n"}
    with mock.patch.object(checkpoints.state.Live, "classes", return_value={}):  # 0.1.0 did not save these names
        checkpoints.save(live, target, record.step, record.kind, **same)


@pytest.mark.fault_row(39)
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_state_with_nothing_new_in_it_is_written_as_ever_to_the_byte(ranks, tmp_path, kind):
    golden = GOLDEN / "0.1.0" / kind
    ranks.run(2, load_and_save, golden, tmp_path / "c")
    names = {path.relative_to(golden) for path in golden.rglob("*") if path.is_file()}
    assert {path.relative_to(tmp_path / "c") for path in (tmp_path / "c").rglob("*") if path.is_file()} == names
    for name in names - {Path(manifest.NAME)}:
        assert (tmp_path / "c" / name).read_bytes() == (golden / name).read_bytes(), name
    written, before = (json.loads((path / manifest.NAME).read_text()) for path in (tmp_path / "c", golden))
    own = {"save_id", "created_utc", "self_sha256", "versions"}
    assert {key: value for key, value in written.items() if key not in own} == {
        key: value for key, value in before.items() if key not in own
    }
