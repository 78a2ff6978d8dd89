"""What `shardkit checkpoint convert` makes of files that belong together, and of values in another form."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from shardkit.checkpoint.commands import convert, dcp, foreign_files
from shardkit.errors import CheckpointCorrupted, CheckpointError
from shardkit.model.prepared import Prepared
from tests.test_convert_checkpoint import one_step, save_alone

PARTS = {"model-00001-of-00002": {"a": torch.ones(2)}, "model-00002-of-00002": {"b": torch.zeros(3)}}


def put(folder, files, index=None):
    for name, weights in files.items():
        save_file(weights, folder / f"{name}.safetensors")
    if index is not None:
        index = {name: f"{file}.safetensors" for name, file in index.items()}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def converted(folder):
    return convert._models(folder)[0]


def test_a_model_in_several_files_is_one(tmp_path):
    put(tmp_path, PARTS)
    assert {*converted(tmp_path)} == {"a", "b"}


def test_numbers_of_parts_need_no_leading_zeros(tmp_path):
    put(tmp_path, {f"model-{number}-of-11": {f"w{number}": torch.ones(1)} for number in range(1, 12)})
    assert len(converted(tmp_path)) == 11


def test_an_index_decides_which_files_belong_to_the_model(tmp_path):
    stale = {"model-00001-of-00003": {"a": torch.full((2,), 9.0), "c": torch.ones(1)}}
    put(tmp_path, PARTS | stale, {"a": "model-00001-of-00002", "b": "model-00002-of-00002"})
    found = converted(tmp_path)
    assert {*found} == {"a", "b"} and torch.equal(found["a"].to("cpu"), torch.ones(2))


def test_one_whole_file_comes_before_parts_of_an_earlier_export(tmp_path):
    put(tmp_path, PARTS | {"model": {"c": torch.ones(1)}})
    assert {*converted(tmp_path)} == {"c"}


@pytest.mark.parametrize(
    ("files", "index", "text"),
    [
        ({"model-00001-of-00002": {"a": torch.ones(2)}}, None, "the numbered files are not those of one model"),
        (PARTS | {"model-00001-of-00001": {"c": torch.ones(1)}}, None, "the numbered files are not those of one model"),
        (
            {"model-00001-of-00002": {"a": torch.ones(2)}},
            {"a": "model-00001-of-00002", "b": "model-00002-of-00002"},
            "model-00002-of-00002.safetensors: missing, and the index names it",
        ),
        (PARTS, {"q": "model-00001-of-00002"}, "does not hold q, which the index names"),
        (PARTS, {"a": "../model-00001-of-00002"}, "its weight_map does not name files of this folder"),
        (
            PARTS | {"model-00002-of-00002": {"a": torch.ones(2)}},
            None,
            "a is in another file, too; give a folder with one export",
        ),
    ],
)
def test_files_of_no_whole_model_are_refused(tmp_path, files, index, text):
    put(tmp_path, files, index)
    with pytest.raises(CheckpointError, match=text):
        convert.convert(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_numbered_files_of_torch_hold_dicts(tmp_path):
    torch.save([1], tmp_path / "pytorch_model-00001-of-00001.bin")
    with pytest.raises(CheckpointError, match=r"of-00001.bin: not a dict of tensors \(got list\)"):
        foreign_files.weights_of(tmp_path, "pytorch_model")


@pytest.mark.parametrize("value", ["x", [1, 2], {"a": 1}, None])
def test_a_value_of_another_form_is_a_damaged_checkpoint(tmp_path, value):
    model, optimizer = one_step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = value
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "optimizer.bin")
    alone = Prepared([{name: True for name, _ in model.named_parameters()}], [])
    with pytest.raises(CheckpointCorrupted, match=r"a value has another form .* \((Type|Value|Runtime)Error: "):
        convert.convert(tmp_path, tmp_path / "out", prepared=alone)


@pytest.mark.parametrize("step", [-3.0, 1e30])
def test_a_step_that_is_none_is_unknown(tmp_path, step):
    model, optimizer = one_step()
    state = optimizer.state_dict()
    state["state"][0]["step"] = step
    state["state"] = {0: state["state"][0]}
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    torch.save(state, tmp_path / "optimizer.bin")
    alone = Prepared([{name: True for name, _ in model.named_parameters()}], [])
    done = convert.convert(tmp_path, tmp_path / "out", prepared=alone)
    assert done.step == 0 and "its step is unknown; saved as step 0: set it with --step" in done.notes


def test_pieces_that_overlap_leave_no_hole_unseen(tmp_path):
    save_alone({"weight": torch.arange(4.0)}, tmp_path)
    index = tmp_path / dcp.METADATA
    metadata = pickle.loads(index.read_bytes())
    entry, (key, place) = metadata.state_dict_metadata["weight"], next(iter(metadata.storage_data.items()))
    torch.save(torch.arange(2.0), tmp_path / "half")
    place.relative_path, place.offset, place.length = "half", 0, (tmp_path / "half").stat().st_size
    half = type(entry.chunks[0])(torch.Size([0]), torch.Size([2]))
    entry.chunks[:] = [half, half]
    index.write_bytes(pickle.dumps(metadata))
    assert key.fqn == "weight"
    with pytest.raises(CheckpointCorrupted, match="weight: its pieces overlap; the checkpoint is damaged"):
        dcp.read(tmp_path)["weight"].to("cpu")


def test_a_step_that_no_resume_would_find_is_refused(tmp_path):
    put(tmp_path, PARTS)
    with pytest.raises(CheckpointError, match=r"--step: no such step can be resumed \(got 1000000000000000000\)"):
        convert.convert(tmp_path, tmp_path / "out", step=10**18)
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_read_are_named(tmp_path):
    """Those of save hooks, and the Trainer's own: without a word, its scheduler would seem to be converted."""
    source = tmp_path / "source"
    (source / "unet_ema").mkdir(parents=True)
    put(source, PARTS)
    others = ("scheduler.pt", "trainer_state.json")
    for name in ("random_states_0.pkl", "sampler.bin", "config.json", ".DS_Store", *others):
        (source / name).write_bytes(b"")
    torch.save({"last_epoch": 3}, source / "scheduler.bin")
    notes = convert.convert(source, tmp_path / "out").notes
    assert [note for note in notes if "not converted" in note] == [
        "not converted: scheduler.pt, trainer_state.json, unet_ema"
    ]
