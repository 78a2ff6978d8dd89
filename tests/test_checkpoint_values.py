"""Plain values in a checkpoint, names in its folder, and replacing a folder where the system cannot swap."""

import gc
import json
import math
import os
import re
import struct
import subprocess
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from typing import NamedTuple

import pytest
import torch

from shardkit import values
from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.states import tensors
from shardkit.errors import CheckpointCorrupted, CheckpointError
from shardkit.values import NotStorable, decode, encode
from tests import checkpoints


class Best(NamedTuple):
    step: int
    weights: torch.Tensor


class Mode(Enum):
    FAST = "fast"


def there_and_back(value):
    text = json.dumps(encode(value, "x", lambda path, item: None), allow_nan=False)
    return decode(json.loads(text), lambda name: name)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 0.1, "é", {"a": []}],
        (1, (2, "three")),
        float("inf"),
        -float("inf"),
        b"\x00\xff",
        {1: "a", (2, 3): "b", None: "c"},
        {"$tensor": "not one", "$tuple": 1},
        Counter({30: 2, 80: 1}),
        {1, 2, 3},
        {frozenset({1, 2}), (3, frozenset({4, 5}))},
        {frozenset({1}): [{2}], ("a", (frozenset({3}),)): None},
        Counter({frozenset({30, 80}): 2}),
        deque([1, 2]),
        deque([(1, 2)], maxlen=3),
        OrderedDict(a=1, b=OrderedDict(c=2)),
        10**40,
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value):
    again = there_and_back(value)
    assert again == value
    if not isinstance(value, OrderedDict):
        assert type(again) is type(value)


def test_a_deque_keeps_its_bound():
    assert there_and_back({"buffer": deque([1], maxlen=2)})["buffer"].maxlen == 2


def test_members_of_sets_have_one_order_in_all_processes():
    """Else ranks, whose strings have other hashes, would save different states."""
    code = "from shardkit import values; print(values.encode({frozenset('abcdefgh'), (1, frozenset('xyz'))}, '', None))"
    told = [
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "12"
    ]
    assert told[0] == told[1] != b""


def test_numpys_scalars_become_pythons():
    import numpy

    value = [numpy.float32(1.5), numpy.float64(0.1), numpy.int64(3), numpy.bool_(True), numpy.str_("a")]
    assert there_and_back(value) == [1.5, 0.1, 3, True, "a"]


@pytest.mark.parametrize(
    ("value", "is_new"),
    [(deque([1]), False), ({"$bounded_deque": 1}, False), (["$module_state"], False), ([{"a": deque([1], 2)}], True)],
    ids=str,
)
def test_what_older_readers_do_not_know_is_seen(value, is_new):
    assert values.has_new_tags(encode(value, "x", lambda path, item: None)) is is_new


def test_not_a_number_comes_back():
    again = there_and_back(float("nan"))
    assert again != again


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, object()]}, r"x\.a\[1\]: a value of type builtins\.object"),
        ([{"b": lambda: 1}], r"x\[0\]\.b: a value of type builtins\.function"),
        ({"c": Mode.FAST}, r"x\.c: a value of type tests\.test_checkpoint_values\.Mode"),
        ((1, 1j), r"x\[1\]: a value of type builtins\.complex"),
        ({object(): 1}, r"x \(key\): a value of type builtins\.object"),
    ],
    ids=["list", "function", "enum", "complex", "key"],
)
def test_what_has_no_place_is_named_by_its_path(value, path):
    with pytest.raises(NotStorable, match=f"^{path} cannot be saved; return numbers, strings"):
        encode(value, "x", lambda where, item: None)


def test_tensors_are_left_to_the_caller():
    stored = {}

    def store(path, item):
        stored[path] = item
        return path

    marker = object()
    encoded = encode({"w": [marker]}, "x", store)
    assert encoded == {"w": [{"$tensor": "x.w[0]"}]} and stored == {"x.w[0]": marker}
    assert decode(encoded, stored.__getitem__) == {"w": [marker]}


def test_an_unknown_tag_is_refused():
    with pytest.raises(values.CheckpointCorrupted, match="unknown tag"):
        decode({"$pickle": "x"}, str)


def test_a_path_that_is_not_utf_8_is_stored_as_any_other():
    path = os.fsdecode(b"/data/caf\xe9 \xc3\xbc")
    for written in (disk.to_json([path]), disk.to_json_in_order([path])):
        assert disk.from_json(written, "here") == [path]


def test_only_full_names_are_steps(tmp_path):
    for name in ("step-00000005", "step-00000012", "step-5", "xstep-00000006", "step-00000007.tmp", "step-000000008"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000099").touch()
    assert [found.step for found in folder.steps(tmp_path)] == [12, 8, 5]
    assert folder.steps(tmp_path / "nowhere") == []
    assert folder.step_folder(tmp_path, 123456789).name == "step-123456789"


def test_a_folder_is_replaced_without_the_systems_swap(tmp_path, monkeypatch):
    new, old = tmp_path / ".tmp-a-1", tmp_path / "a"
    for path, text in ((new, "new"), (old, "old")):
        path.mkdir()
        (path / "file").write_text(text)
    monkeypatch.setattr(disk, "_exchange_at_once", lambda first, second: False)
    disk.exchange(new, old)
    assert (old / "file").read_text() == "new" and (new / "file").read_text() == "old"


def test_a_replacement_that_stopped_halfway_is_put_back(tmp_path):
    (tmp_path / ".old-a").mkdir()
    (tmp_path / ".old-a" / manifest.NAME).write_text("{}")
    folder.heal(tmp_path / "a")
    assert (tmp_path / "a" / manifest.NAME).exists() and not (tmp_path / ".old-a").exists()


def test_debris_goes_and_what_is_being_written_stays(tmp_path):
    for name in (".tmp-step-00000001-a", ".tmp-step-00000002-b", ".trash-1", "step-00000003"):
        (tmp_path / name).mkdir()
    held = folder.hold(tmp_path / ".tmp-step-00000002-b")
    assert len(folder.clean_debris(tmp_path)) == 2
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-step-00000002-b", "step-00000003"}
    import os

    os.close(held)
    assert len(folder.clean_debris(tmp_path)) == 1


def test_a_bound_that_no_deque_has_is_damage():
    with pytest.raises(CheckpointCorrupted, match="a value is not as it was saved"):
        decode({"$bounded_deque": [10**30, []]}, str)


def test_memory_that_is_reused_takes_tensors_of_every_dtype_and_size():
    host, seen = tensors.HostMemory(), set()
    for dtype in tensors.DTYPES:
        for sizes in ((3, 5), (), (0, 4), (2, 2)):
            values = torch.arange(math.prod(sizes)).reshape(sizes).to(dtype)
            room = host.room(dtype, sizes).copy_(values)
            assert (room.dtype, room.shape, room.is_contiguous()) == (dtype, values.shape, True)
            assert bytes(tensors.memory(room)) == bytes(tensors.memory(values))
            seen.add(room.untyped_storage().data_ptr())
    assert len(seen) < 4
    row = torch.arange(12.0).reshape(3, 4)[:, 1]
    assert host.of(row).is_contiguous() and torch.equal(host.of(row), row)


def test_types_of_a_registered_object_come_back_as_it_has_them(tmp_path):
    """JSON has one type for a dict and a defaultdict; the object's own state tells which it is."""
    saved, fresh = checkpoints.build("plain"), checkpoints.build("plain")
    saved.objects["registered.0"].value = {
        "seen": defaultdict(list, a=[1]),
        "cache": OrderedDict(b=2, a=1),
        "best": Best(3, torch.ones(2)),
        "names": [frozenset("ab"), bytearray(b"x")],
        "plain": {1: (1, {2})},
    }
    fresh.objects["registered.0"].value = {
        "seen": defaultdict(list),
        "cache": OrderedDict(),
        "best": Best(0, torch.zeros(2)),
        "names": [frozenset(), bytearray()],
    }
    checkpoints.save(saved, tmp_path / "c")
    checkpoints.load(fresh, tmp_path / "c")
    found = fresh.objects["registered.0"].value
    found["seen"]["new"].append(1)
    found["cache"].move_to_end("a", last=False)
    assert list(found["cache"]) == ["a", "b"] and found["seen"] == {"a": [1], "new": [1]}
    assert found["best"].step == 3 and found["best"].weights.tolist() == [1.0, 1.0]
    assert found["names"] == [{"a", "b"}, b"x"] and [type(one) for one in found["names"]] == [frozenset, bytearray]
    assert found["plain"] == {1: (1, {2})}


def test_a_state_above_the_limit_of_unknown_files_loads(tmp_path, monkeypatch):
    """An object's own state may have any size; the manifest states it."""
    saved, fresh = checkpoints.build("plain"), checkpoints.build("plain")
    saved.objects["registered.0"].value = {"tokens": bytes(200_000)}
    checkpoints.save(saved, tmp_path / "c")
    monkeypatch.setattr(disk, "JSON_LIMIT_BYTES", 100_000)
    checkpoints.load(fresh, tmp_path / "c")
    assert fresh.objects["registered.0"].value == {"tokens": bytes(200_000)}


def test_arrays_of_numpy_come_back_as_arrays(tmp_path):
    """As in a table of learning rates, a running histogram, or the state of a generator."""
    import numpy

    frozen = numpy.arange(3)
    frozen.flags.writeable = False
    given = {
        "turned": numpy.arange(6.0).reshape(2, 3)[:, ::-1],
        "state": numpy.random.Philox(3).state,
        "parts": (numpy.array(0.5), [numpy.empty((0, 2), numpy.float32)], numpy.array([True])),
        "frozen": frozen,
    }
    saved, fresh = checkpoints.build("plain"), checkpoints.build("plain")
    saved.objects["registered.0"].value = given
    checkpoints.save(saved, tmp_path / "c")
    checkpoints.load(fresh, tmp_path / "c")
    found = fresh.objects["registered.0"].value
    assert repr(found) == repr(given)
    found["frozen"] += 1
    assert manifest.read(tmp_path / "c").version == manifest.ARRAYS_VERSION
    for wrong in (numpy.array(["a"]), numpy.array([object()])):
        saved.objects["registered.0"].value = wrong
        with pytest.raises(CheckpointError, match=r"registered\.0: a value of type numpy\.ndarray cannot be saved"):
            checkpoints.save(saved, tmp_path / "d")


def test_a_checkpoint_that_may_not_be_read_is_told_in_words(tmp_path, monkeypatch):
    live = checkpoints.build("plain")
    checkpoints.save(live, tmp_path / "step-00000000")

    def refuse(path, record):
        raise PermissionError(13, "Permission denied", str(path / "model"))

    monkeypatch.setattr(manifest, "check_sizes", refuse)
    where = f"Permission denied: {tmp_path / 'step-00000000' / 'model'}"
    assert [one.reason for one in folder.newest_valid(tmp_path)[1]] == [where]
    with pytest.raises(CheckpointError, match=f"^checkpoint: {re.escape(where)}$"):
        checkpoints.load(live, tmp_path / "step-00000000")


@pytest.mark.slow
def test_the_bytes_of_a_tensor_keep_it_alive():
    tensor = torch.tensor([1.0, 2.0])
    part = tensors.memory(tensor)[4:]
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert bytes(part) == struct.pack("<f", 2.0)
    del part
    gc.collect()
    assert alive() is None
