"""A run that is resumed from a save within an accumulation window draws the same numbers as one that was not
interrupted: dropout, and the augmentation of samples without workers."""

import random
from itertools import product

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardkit import Accelerator, set_seed

STEPS, WINDOW = 6, 3
STRATEGIES = {
    "DDP": {"distributed_type": "MULTI_CPU"},
    "FULL_SHARD": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}},
}


class Augmented(Dataset):
    """Each sample with noise from all generators."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        noise = [torch.rand(()).item(), random.random(), numpy.random.rand()]
        return torch.tensor([float(index), *noise])


class Train:
    """A user's script: windows of three micro-batches, with one save."""

    def __init__(self, strategy, loop, folder, save_at=None, moment=None):
        set_seed(5)
        self.save_at, self.moment, self.folder, self.loop = save_at, moment, folder, loop
        steps = 1 if loop == "by hand" else WINDOW
        self.accelerator = Accelerator(
            config={"use_cpu": True, **STRATEGIES[strategy]}, gradient_accumulation_steps=steps
        )
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        lengths = (48, 28 if loop == "uneven zip" else 48)  # its third window begins in one epoch and ends in the next
        loaders = [DataLoader(Augmented(length), batch_size=2, shuffle=True) for length in lengths]
        self.model, self.optimizer, *self.loaders = self.accelerator.prepare(model, optimizer, *loaders)
        self.given, self.micro_batches, self.is_cut = [], 0, False

    def resume(self):
        self.accelerator.load_state(self.folder)
        self.micro_batches = self.accelerator.counters.step * WINDOW
        return self

    def run(self):
        """The samples that it was given, and its weights. It is cut where it has saved."""
        while self.accelerator.counters.step < STEPS and not self.is_cut:
            is_zip = self.loop.endswith("zip")
            for batch in zip(*self.loaders, strict=False) if is_zip else self.loaders[0]:
                self._micro_batch(batch[0] + batch[1] if is_zip else batch)
                if self.accelerator.counters.step == STEPS or self.is_cut:
                    break
            if self.moment == "after the loop":
                self._save()
        weights = [p.tolist() for p in self.accelerator.get_state_dict(self.model).values()]
        self.accelerator.end_training()
        return self.given, weights

    def _micro_batch(self, batch):
        self.given.append(batch.tolist())
        self.micro_batches += 1
        if self.loop == "look":
            next(iter(self.loaders[0]))
        self._at("before forward")
        if self.loop == "by hand":
            (self.model(batch).mean() / WINDOW).backward()
            self._at("after backward")
            if self.micro_batches % WINDOW == 0:
                self._step()
            return
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.model(batch).mean())
            self._at("after backward")
            self._step()

    def _step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _at(self, moment):
        if self.micro_batches == self.save_at:
            if moment == self.moment:
                self._save()
            self.is_cut |= self.moment == "after the loop"

    def _save(self):
        self.accelerator.save_state(self.folder)
        self.is_cut = True


def uninterrupted(strategy, loop, folder):
    return Train(strategy, loop, folder).run()


def cut(strategy, loop, folder, save_at, moment):
    return Train(strategy, loop, folder, save_at, moment).run()


def resumed(strategy, loop, folder):
    script = Train(strategy, loop, folder).resume()
    return script.accelerator.counters.step, script.run()


LOOPS = [*product(STRATEGIES, ["accumulate", "by hand", "zip"]), ("DDP", "look"), ("DDP", "uneven zip")]
QUICK = ("FULL_SHARD", "accumulate")


@pytest.mark.parametrize(("save_at", "moment"), [
    (1, "after backward"), (2, "before forward"), (3, "before forward"),
    (4, "before forward"), (5, "after backward"), (8, "before forward"), (8, "after the loop"), (14, "after backward"),
])  # fmt: skip
@pytest.mark.parametrize(
    ("strategy", "loop"), [pytest.param(*each, marks=() if each == QUICK else pytest.mark.slow) for each in LOOPS]
)
def test_equals_a_run_that_was_not_interrupted(ranks, tmp_path, strategy, loop, save_at, moment):
    expected = ranks.run(2, uninterrupted, strategy, loop, tmp_path)
    ranks.run(2, cut, strategy, loop, tmp_path / "saved", save_at, moment)
    found = ranks.run(2, resumed, strategy, loop, tmp_path / "saved")
    for (given, weights), (steps, (given_again, weights_again)) in zip(expected, found, strict=True):
        assert given_again == given[steps * WINDOW :]
        assert weights_again == weights
