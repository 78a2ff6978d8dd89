"""Gathering, turns, flags, and what `save` and `save_model` say."""

import json
import socket
from collections import deque
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from shardkit import Accelerator
from shardkit.distributed import control
from shardkit.errors import CheckpointSaveError, UsageError
from shardkit.runtime import process_control
from shardkit.runtime.checkpoints import objects
from tests.training import DDP, FULL, Points, parts


def evaluated(length: int) -> list[int]:
    accelerator = Accelerator(config=FULL)
    loader = accelerator.prepare(DataLoader(Points(length), batch_size=2))
    found: list[int] = []
    for _ in accelerator.prepare(DataLoader(Points(4), batch_size=2)):  # an evaluation inside of a training loop
        for batch in loader:
            indices, values = accelerator.gather_for_metrics((batch["index"], batch["x"]))
            assert len(indices) == len(values)
            found += indices.tolist()
        assert accelerator.gather_for_metrics(torch.ones(2)).tolist() == [1, 1, 1, 1]
    return found


@pytest.mark.parametrize("length", [7, 8, 9])
def test_gather_for_metrics_has_every_sample_once(ranks, length):
    assert ranks.run(2, evaluated, length) == [list(range(length))] * 2


@pytest.mark.parametrize(
    ("items", "last"),
    [
        (numpy.arange(5), [3, 4, 4]),
        (numpy.array(list("abcde")), ["d", "e", "e"]),
        (numpy.arange(10).reshape(5, 2), [[6, 7], [8, 9], [8, 9]]),
        (range(5), [3, 4, 4]),
        (torch.arange(5), [3, 4, 4]),
        ((0, 1, 2, 3, 4), [3, 4, 4]),
        ("abcde", ["d", "e", "e"]),
    ],
)
def test_a_short_part_repeats_the_last_item(items, last):
    part = process_control.part_of(items, 1, 2, apply_padding=True)
    assert (part.tolist() if hasattr(part, "tolist") else list(part)) == last


def test_a_data_set_is_split_into_subsets():
    pairs = TensorDataset(torch.arange(5), torch.arange(5) * 2)
    for dataset in (pairs, Subset(pairs, range(5)), ConcatDataset([pairs])):
        parts = [process_control.part_of(dataset, rank, 2, apply_padding=True) for rank in (0, 1)]
        assert [[int(first) for first, _ in part] for part in parts] == [[0, 1, 2], [3, 4, 4]]
        assert len(process_control.part_of(dataset, 1, 2)) == 2


@pytest.mark.parametrize("items", [{1, 2}, iter([1]), deque([1, 2]), {"a": 1}.keys(), 3, None, torch.tensor(1)])
def test_what_cannot_be_split_is_said(items):
    text = rf"split_between_processes: takes a list, .* \(got {type(items).__name__}\); make it a list"
    with pytest.raises(UsageError, match=text):
        process_control.part_of(items, 0, 2)


def turns_and_flags(folder: str) -> dict[str, Any]:
    accelerator = Accelerator(config=DDP)
    path = Path(folder) / "made"
    with accelerator.main_process_first():
        seen = path.exists()
        path.touch()
    flags = [accelerator.check_trigger()]
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    flags += [accelerator.check_trigger(), accelerator.check_trigger()]
    with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as part:
        pass
    with accelerator.split_between_processes({"a": torch.arange(3), "b": "xyz"}) as parts_of_dict:
        pass
    return {
        "seen": seen,
        "flags": flags,
        "part": part,
        "dict": (parts_of_dict["a"].tolist(), parts_of_dict["b"]),
        "main": accelerator.on_main_process(lambda: "main")(),
        "second": accelerator.on_process(process_index=1)(lambda: "second")(),
        "rank 0": accelerator.on_process(lambda: "rank 0")(),
        "last": accelerator.on_last_process(lambda: "last")(),
        "sum": accelerator.reduce(torch.tensor([1.0])).tolist(),
        "who": (accelerator.process_index, accelerator.num_processes, accelerator.is_main_process),
    }


def test_turns_flags_and_parts(ranks, tmp_path):
    first, second = ranks.run(2, turns_and_flags, str(tmp_path))
    assert (first["seen"], second["seen"]) == (False, True)
    assert first["flags"] == second["flags"] == [False, True, False]
    assert (first["part"], second["part"]) == ([1, 2], [3, 3])
    assert (first["dict"], second["dict"]) == (([0, 1], "xy"), ([2], "z"))
    assert (first["main"], second["main"]) == ("main", None)
    assert (first["rank 0"], second["rank 0"]) == ("rank 0", None)
    assert (first["second"], second["second"]) == (None, "second")
    assert (first["last"], second["last"]) == (None, "last")
    assert first["sum"] == [2.0]
    assert (first["who"], second["who"]) == ((0, 2, True), (1, 2, False))


def saved(folder: str) -> None:
    accelerator = Accelerator(config=FULL)
    model = accelerator.prepare(parts(8, 4)[0])
    accelerator.save(dict(model.named_parameters()), f"{folder}/weights.safetensors")
    accelerator.save({"step": 3}, f"{folder}/step.json")
    with pytest.raises(UsageError, match=r"safetensors and JSON only \(got safe_serialization=False\)"):
        accelerator.save({}, f"{folder}/x", safe_serialization=False)
    if accelerator.is_main_process:
        with pytest.raises(UsageError, match=r"only a dict of tensors .* can be saved \(got set"):
            accelerator.save({1}, f"{folder}/set.json")


def test_save_writes_safetensors_or_json(ranks, tmp_path):
    ranks.run(2, saved, str(tmp_path))
    torch.testing.assert_close(
        list(load_file(tmp_path / "weights.safetensors").values()), weights_of_new(), rtol=0, atol=0
    )
    assert json.loads((tmp_path / "step.json").read_text()) == {"step": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step.json", "weights.safetensors"]


def weights_of_new() -> list[torch.Tensor]:
    named = dict(parts(8, 4)[0].named_parameters())
    return [named[name].detach() for name in sorted(named)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": torch.ones(2, dtype=torch.complex128)}, "a: safetensors does not support this dtype (got torch.complex"),
        ({"a": torch.eye(2).to_sparse()}, "a: only dense tensors can be saved (got torch.sparse_coo); change these"),
        ({"a": torch.ones(2, device="meta")}, "a: has no values (got a tensor on the meta device); change these"),
        ({0: torch.ones(2), "0": torch.zeros(2)}, "two names are '0' as text; change these first."),
        ({"a": {0: 1, "0": 2}}, "two keys are '0' as text); split the object"),
    ],
)
def test_what_save_cannot_write_is_said_and_nothing_is_left(tmp_path, value, text):
    with pytest.raises(UsageError) as raised:
        objects.save(value, tmp_path / "file")
    assert str(raised.value).startswith(f"save: {tmp_path}/file: ") and text in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_save_names_the_place_that_cannot_be_written(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(UsageError, match=r"taken: a folder has this name; give the name of a file\."):
        objects.save({"a": torch.ones(2)}, tmp_path / "taken")
    (tmp_path / "plain").touch()
    with pytest.raises(CheckpointSaveError, match=r"plain/x: cannot be written \(.*\); fix that, or give"):
        objects.save({"a": 1}, tmp_path / "plain" / "x")
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["plain", "taken"]


def refused_exports(folder: str) -> list[str]:
    accelerator = Accelerator(config=DDP)
    of_all = nn.Linear(2, 2).to(torch.complex128)
    of_one = of_all if accelerator.process_index else nn.Linear(2, 2)
    told = []
    for model in (of_all, of_one):
        with pytest.raises(CheckpointSaveError) as raised:
            accelerator.save_model(model, folder)
        told.append(str(raised.value))
    return told


def test_save_model_says_once_what_all_ranks_say(ranks, tmp_path):
    text = "weight: safetensors does not support this dtype (got torch.complex128); convert it first."
    text += " The previous contents of the folder are unchanged."
    where = f"save_model: {tmp_path}: "
    for told in ranks.run(2, refused_exports, str(tmp_path)):
        assert told == [where + text, f"{where}rank 1 (host {socket.gethostname()}): {text}"]


def test_problems_of_ranks_are_told_shortly():
    answers = [["a", f"{text}."] for text in "xxyzw"]
    expected = "rank 0 (host a) and 1 more: x; rank 2 (host a): y; rank 3 (host a): z (and 1 more)"
    assert control._failure(answers) == expected
    assert control._failure([["a", "x."], ["b", "x"]]) == "x"
    assert control._failure([["a", None], ["b", "x"]]) == "rank 1 (host b): x"
    assert control._failure([["a", None]]) == ""
