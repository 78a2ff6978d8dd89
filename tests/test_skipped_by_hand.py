"""Loops that drop their first batches by hand after load_state, which has already moved the loader past them."""

import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader

from shardkit import Accelerator
from shardkit.compat import Accelerator as InPlaceOfAccelerate
from shardkit.compat.differences import VARIABLE
from shardkit.compat.scan import SKIPS_AGAIN, scan_text
from shardkit.errors import UsageError
from tests.ranks import log_lines

SCRIPT = """
accelerator.load_state(folder)
for step, batch in enumerate(loader):
    if resume and epoch == first and step < resume_step:
        progress.update(1)
        continue
    if step < 3:
        continue
"""


def trained(kind, folder, stop=None, skipped=0, read_ahead=1):
    """The batches that an epoch of 6 trains on, of one sample each. `stop`: save after so many, and end."""
    accelerator = kind(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(torch.arange(6.0).reshape(6, 1), batch_size=1)
    )
    if not stop:
        accelerator.load_state(folder)
    found, waiting = [], []
    for step, batch in enumerate(loader):
        if step < skipped:
            continue
        waiting.append(batch)
        if len(waiting) < read_ahead:
            continue
        found += [int(one) for one in waiting]
        accelerator.backward(model(torch.stack(waiting)).mean())
        waiting.clear()
        optimizer.step()
        if len(found) == stop:
            accelerator.save_state(folder)
            break
    accelerator.free_memory()
    return found


def refused(folder):
    trained(Accelerator, folder, stop=2)
    with pytest.raises(UsageError, match=r"dropped its first batches after load_state \(got 2\)"):
        trained(Accelerator, folder, skipped=2)


def resumed_with_accelerates_meaning(folder):
    trained(InPlaceOfAccelerate, folder, stop=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "position")
        return trained(InPlaceOfAccelerate, folder, skipped=4)


def loaded_inside_the_loop(folder):
    """The weight, and the batches, of an epoch that returns to the weights of its second step after its fourth."""
    accelerator = InPlaceOfAccelerate(config={"use_cpu": True, "distributed_type": "MULTI_CPU"})
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    data = DataLoader(torch.arange(12.0).reshape(12, 1), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "position")
        for step, batch in enumerate(loader, 1):
            accelerator.backward(0 * model(batch).mean() + accelerator.unwrap_model(model).weight.sum())
            optimizer.step()
            optimizer.zero_grad()
            found.append(int(batch))
            if step == 2:
                accelerator.save_state(folder)
            if step == 4:
                accelerator.load_state(folder)
    weight = accelerator.unwrap_model(model).weight.item()
    accelerator.free_memory()
    return round(weight, 4), found


def test_with_accelerates_meaning_a_loop_goes_on_after_a_load_inside_it(ranks, tmp_path):
    """Such as of the last checkpoint, where a loss is no number."""
    assert ranks.run(2, loaded_inside_the_loop, tmp_path / "checkpoint") == [
        (0.6, [0, 2, 4, 6, 8, 10]),
        (0.6, [1, 3, 5, 7, 9, 11]),
    ]


def read_ahead(folder):
    """As many batches as were skipped, and one more, but all are used."""
    trained(Accelerator, folder, stop=2)
    return trained(Accelerator, folder, read_ahead=3)


def messages_of_an_unused_rest(folder):
    trained(Accelerator, folder, stop=4)
    with log_lines("shardkit.data.loader") as lines:
        assert trained(Accelerator, folder, skipped=4) == []
    return lines


def trained_on_two(folder, start, stop, lengths=(6, 8), window=1):
    """What is told of loops over two loaders that are read in turns, of so many batches."""
    config = {"use_cpu": True, "distributed_type": "MULTI_CPU"}
    accelerator = Accelerator(config=config, gradient_accumulation_steps=window)
    model = torch.nn.Linear(1, 1)
    loaders = [DataLoader(torch.ones(length, 1), batch_size=1) for length in lengths]
    model, optimizer, *loaders = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), *loaders)
    with log_lines("shardkit.data") as lines:
        if start:
            accelerator.load_state(folder)
        for number, batches in enumerate(zip(*loaders, strict=False), start + 1):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.cat(batches)).mean())
                optimizer.step()
            if number == stop:
                accelerator.save_state(folder)
                break
    accelerator.free_memory()
    return lines, number


def test_dropping_as_many_batches_again_is_refused(ranks, tmp_path):
    ranks.run(1, refused, tmp_path / "one")


def test_a_rest_of_the_epoch_that_is_not_trained_on_is_told(ranks, tmp_path):
    (told,) = ranks.run(1, messages_of_an_unused_rest, tmp_path / "one")
    assert any("no batch of the loop after load_state was trained on (got 2" in message for message in told)


def test_the_rest_of_loops_that_are_read_in_turns_was_trained_on(ranks, tmp_path):
    assert ranks.run(1, trained_on_two, tmp_path / "two", 0, 4) == [([], 4)]
    assert ranks.run(1, trained_on_two, tmp_path / "two", 4, None) == [([], 6)]


def test_a_rest_in_an_open_window_was_trained_on(ranks, tmp_path):
    """Of the loader that is read first: the window ends with the epoch of the other one."""
    assert ranks.run(1, trained_on_two, tmp_path / "two", 0, 4, (5, 9), 2) == [([], 4)]
    assert ranks.run(1, trained_on_two, tmp_path / "two", 4, None, (5, 9), 2) == [([], 5)]


def test_with_accelerates_meaning_the_loop_starts_its_epoch_again(ranks, tmp_path):
    assert ranks.run(1, resumed_with_accelerates_meaning, tmp_path / "one") == [[4, 5]]


def test_batches_that_are_read_ahead_are_not_taken_for_dropped_ones(ranks, tmp_path):
    assert ranks.run(1, read_ahead, tmp_path / "one") == [[2, 3, 4]]


def test_the_scan_finds_a_skip_by_hand_to_a_resumed_step():
    assert [one.line for one in scan_text(SCRIPT, "a.py").remarks if one.text == SKIPS_AGAIN] == [6]
    assert not scan_text(SCRIPT.replace("load_state", "load"), "a.py").remarks


@pytest.mark.slow
def test_a_launch_notes_the_line_also_for_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "shardkit", "launch", "--cpu", "-n", "1", "--dry-run", "--as-accelerate"]
    noted = subprocess.run([*command, "a.py"], capture_output=True, text=True, check=True).stderr
    assert "note: a.py:6: continue: the loop drops the batches before a resumed step" in noted
    silent = subprocess.run([*command, "--accelerates-meaning", "position", "a.py"], capture_output=True, text=True)
    assert "note: a.py" not in silent.stderr
