"""Accumulation windows in loops that catch errors, start again, or nest `accumulate()`: each step equals that of one
batch of the window's micro-batches."""

import copy
from collections import deque
from itertools import islice

import pytest
import torch
from torch import nn

from shardkit import Accelerator
from shardkit.errors import UsageError
from shardkit.runtime import summary

pytestmark = pytest.mark.usefixtures("alone")

PLAIN = {"distributed_type": "NO", "use_cpu": True}


def parts(accelerator, lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr))


def loss_of(model, batch):
    return model(batch).pow(2).mean()


def by_hand(windows, lr=0.1):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    for window in windows:
        model.zero_grad()
        loss_of(model, torch.cat(window)).backward()
        for parameter in model.parameters():
            parameter.data -= lr * parameter.grad
    return model.weight.detach()


def batches(count):
    return list(torch.randn(count, 2, 4, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("zeroes_first", [True, False])
@pytest.mark.parametrize(("steps", "failing"), [(1, 2), (2, 2), (2, 3)])
def test_a_micro_batch_that_raises_does_not_count(steps, failing, zeroes_first):
    accelerator = Accelerator(config=PLAIN, gradient_accumulation_steps=steps)
    model, optimizer = parts(accelerator)
    data = batches(5)
    for number, batch in enumerate(data):
        try:
            with accelerator.accumulate(model):
                if zeroes_first:
                    optimizer.zero_grad()
                loss = loss_of(model, batch)
                if number == failing:
                    raise ArithmeticError("a batch that the script drops")
                accelerator.backward(loss)
                optimizer.step()
                if not zeroes_first:
                    optimizer.zero_grad()
        except ArithmeticError:
            continue
    kept = data[:failing] + data[failing + 1 :]
    expected = by_hand([kept[start : start + steps] for start in range(0, len(kept), steps)])
    torch.testing.assert_close(model.weight.detach(), expected)
    assert accelerator.counters.step == len(kept) // steps


@pytest.mark.parametrize("is_set", [True, False])
def test_a_script_may_say_that_a_last_batch_ends_no_window(is_set):
    """Micro-batches are a batch at several timesteps: without it, each of the last batch steps alone."""
    accelerator = Accelerator(config=PLAIN, gradient_accumulation_steps=2)
    model, optimizer = parts(accelerator)
    data = batches(2)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=None))
    for number, batch in enumerate(loader):
        assert loader.end_of_dataloader == (number == 1)
        if is_set:
            loader.end_of_dataloader = False
        for timestep in range(1, 5):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, timestep * batch))
                optimizer.step()
                optimizer.zero_grad()
    one, two = ([timestep * batch for timestep in range(1, 5)] for batch in data)
    expected = by_hand([one[:2], one[2:], *([two[:2], two[2:]] if is_set else [[each] for each in two])])
    torch.testing.assert_close(model.weight.detach(), expected)


def cycle(loader):
    while True:
        yield from loader


@pytest.mark.parametrize("ends_with_data", [True, False])
def test_steps_that_a_loop_counts_itself_end_windows_or_are_refused(ends_with_data):
    """Windows of four, the last one of two where the loader ends: the third step would be in the middle of one."""
    config = {**PLAIN, "shardkit": {"end_window_with_data": ends_with_data}}
    accelerator = Accelerator(config=config, gradient_accumulation_steps=4)
    model, optimizer = parts(accelerator)
    data = batches(10)
    loader = cycle(accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=None)))

    def train(steps):
        for _ in range(steps):
            for _ in range(4):
                batch = next(loader)
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()

    train(2)
    if ends_with_data:
        found = "a step after 4 micro-batches, with micro-batch 2 of 4 of a window"
        with pytest.raises(UsageError, match=rf"^optimizer step: .* \(got {found}\); .*end_window_with_data: false"):
            train(1)
    else:
        train(3)
        expected = by_hand([(2 * data)[start : start + 4] for start in range(0, 20, 4)])
        torch.testing.assert_close(model.weight.detach(), expected)


def test_steps_after_each_micro_batch_are_left_to_the_windows():
    """Also where the script has skipped some: those of the last one of a window."""
    accelerator = Accelerator(config=PLAIN, gradient_accumulation_steps=3)
    model, optimizer = parts(accelerator)
    for number, batch in enumerate(batches(12)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
        if number not in (5, 6):
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.counters.step == 3


def in_blocks(loader, size):
    """As scripts read that count the tokens of a step before its first micro-batch."""
    iterator = iter(loader)
    while block := [*islice(iterator, size)]:
        yield from block


def held_ahead(loader, number):
    """As prefetchers read: so many batches ahead."""
    waiting = deque()
    for batch in loader:
        waiting.append(batch)
        if len(waiting) > number:
            yield waiting.popleft()
    yield from waiting


def every_second(loader, _):
    for number, batch in enumerate(loader):
        if number % 2:
            yield batch


@pytest.mark.parametrize(
    ("read", "ahead", "size", "windows"),
    [
        (in_blocks, 2, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (in_blocks, 3, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (in_blocks, 4, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (held_ahead, 1, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (held_ahead, 2, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (every_second, 0, 3, [[1, 3, 5], [7]]),
    ],
)
def test_the_end_of_a_loader_that_is_read_ahead_ends_the_window_of_its_last_batch(read, ahead, size, windows):
    accelerator = Accelerator(config=PLAIN, gradient_accumulation_steps=size)
    model, optimizer = parts(accelerator)
    data = batches(8)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.cat(data), batch_size=2))
    for batch in read(loader, ahead):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    expected = by_hand([[data[number] for number in window] for window in windows])
    assert accelerator.counters.step == len(windows)
    torch.testing.assert_close(model.weight.detach(), expected)


@pytest.mark.parametrize(
    ("skipped", "kept"),
    [([0], None), ([2], None), ([2], 2), ([1, 4], None), ([6], 2), ([7], 2)],  # [0], 2: as a loop that reads one ahead
)
def test_batches_that_were_skipped_and_are_kept_are_not_read_ahead(skipped, kept):
    accelerator = Accelerator(config=PLAIN, gradient_accumulation_steps=3)
    model, optimizer = parts(accelerator)
    data = batches(8)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.cat(data), batch_size=2))
    last = deque(maxlen=kept)
    for number, batch in enumerate(loader):
        last.append(batch)
        if number in skipped:
            continue
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    trained = [one for number, one in enumerate(data) if number not in skipped]
    windows = [trained[begin : begin + 3] for begin in range(0, len(trained), 3)]
    if 7 in skipped:  # the loader's last batch ends a window, and has no micro-batch
        windows = [window for window in windows if len(window) == 3]
    torch.testing.assert_close(model.weight.detach(), by_hand(windows))


@pytest.mark.parametrize("zero", ["model", "optimizer"])
def test_gradients_of_a_batch_that_raised_after_its_backward_may_be_dropped(zero):
    accelerator = Accelerator(config=PLAIN)
    model, optimizer = parts(accelerator)
    data = batches(3)
    for number, batch in enumerate(data):
        try:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if number == 1:
                    raise ArithmeticError("a batch that the script drops")
                optimizer.step()
                optimizer.zero_grad()
        except ArithmeticError:
            (model if zero == "model" else optimizer).zero_grad()
    torch.testing.assert_close(model.weight.detach(), by_hand([data[:1], data[2:]]))


def test_zero_grad_at_the_start_drops_the_gradients_of_a_batch_that_raised_after_its_backward():
    accelerator = Accelerator(config=PLAIN)
    model, optimizer = parts(accelerator)
    data = batches(3)
    for number, batch in enumerate(data):
        try:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(loss_of(model, batch))
                if number == 1:
                    raise ArithmeticError("a batch that the script drops")
                optimizer.step()
        except ArithmeticError:
            continue
    torch.testing.assert_close(model.weight.detach(), by_hand([data[:1], data[2:]]))


def test_after_free_memory_in_the_middle_of_a_window_the_next_one_is_whole():
    accelerator = Accelerator(config=PLAIN, gradient_accumulation_steps=2)
    model, optimizer = parts(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, batches(1)[0]))
    model, optimizer = accelerator.free_memory(model, optimizer)
    model, optimizer = parts(accelerator)
    for batch in batches(2):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.weight.detach(), by_hand([batches(2)]))


def test_micro_batches_set_in_the_script_outlast_free_memory_and_are_those_of_the_table():
    accelerator = Accelerator(config=PLAIN)
    accelerator.gradient_accumulation_steps = 4
    accelerator.free_memory()
    parts(accelerator)
    assert accelerator.gradient_accumulation_steps == 4
    assert "4 micro-batches a step" in summary.text(accelerator._run)


def test_accumulate_inside_accumulate_is_one_micro_batch_of_both_models():
    accelerator = Accelerator(config=PLAIN, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    inner, outer = nn.Linear(4, 4), nn.Linear(4, 1)
    whole = nn.Sequential(copy.deepcopy(inner), copy.deepcopy(outer))
    before = inner.weight.detach().clone()
    optimizer = torch.optim.SGD([*inner.parameters(), *outer.parameters()], 1.0)
    inner, outer, optimizer = accelerator.prepare(inner, outer, optimizer)
    for batch in batches(2):
        with accelerator.accumulate(inner), accelerator.accumulate(outer):
            accelerator.backward(loss_of(outer, inner(batch)))
            optimizer.step()
            optimizer.zero_grad()
    loss_of(whole, torch.cat(batches(2))).backward()
    torch.testing.assert_close(inner.weight.detach(), before - whole[0].weight.grad)
    assert accelerator.counters.step == 1


def test_accumulate_takes_models_in_a_list_and_names_what_is_none():
    accelerator = Accelerator(config=PLAIN, gradient_accumulation_steps=2)
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], 1.0)
    *models, optimizer = accelerator.prepare(*models, optimizer)
    for batch in batches(2):
        with accelerator.accumulate(models):
            accelerator.backward(loss_of(models[1], models[0](batch)))
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.counters.step == 1
    says = r"accumulate: expected models \(got SGD, str\); give those of this micro-batch, or none for all\."
    with pytest.raises(UsageError, match=says), accelerator.accumulate(optimizer.optimizer, "model"):
        pass


def test_optimizers_made_anew_for_each_round_count_their_steps():
    """They are not prepared; one may lie where an earlier one did."""
    accelerator = Accelerator(config=PLAIN)
    model = accelerator.prepare(nn.Linear(4, 1))
    for batch in batches(6):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.counters.step == 6
