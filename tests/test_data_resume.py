"""The position in the data comes back with load_state: on other numbers of ranks, and of a resume."""

import random
from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardkit import Accelerator, ProjectConfiguration, skip_first_batches
from tests.loaders import FlowWithState, flat, prepared, run

LENGTH, GLOBAL_BATCH = 48, 12


class Numbers(Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([float(index)])


def train(folder, steps, way="load"):
    """One run of a user's script until a step is reached; the samples of each global batch that it was given."""
    torch.manual_seed(3)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    config = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}
    accelerator = Accelerator(config=config, project_config=project)
    model = nn.Linear(1, 7)
    loader = DataLoader(Numbers(), batch_size=GLOBAL_BATCH // accelerator.num_processes, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if way == "by hand":
        accelerator.load_state()
        loader = skip_first_batches(loader, accelerator.counters.step % len(loader))
    elif way == "without position":
        accelerator.load_state(data_position=False)
    elif way == "load":
        accelerator.load_state()
    given = []
    while accelerator.counters.step < steps:
        for batch in loader:
            given.append(accelerator.gather(batch).flatten().int().tolist())
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.counters.step == steps:
                accelerator.save_state()
                break
    accelerator.end_training()
    return given


@pytest.mark.fault_row(20)
@pytest.mark.requirement("A5")
def test_a_run_over_2_1_and_3_ranks_reads_what_one_uninterrupted_run_reads(ranks, tmp_path):
    whole = ranks.run(2, train, str(tmp_path / "whole"), 9, "fresh")[0]
    assert sorted(chain(*whole[:4])) == sorted(chain(*whole[4:8])) == list(range(LENGTH))
    folder = str(tmp_path / "parts")
    parts = ranks.run(2, train, folder, 3, "fresh")[0]
    for world, until in ((1, 4), (3, 6), (2, 9)):
        parts += ranks.run(world, train, folder, until)[0]
    assert parts == whole


def test_skipping_by_hand_does_not_skip_twice_and_the_position_can_be_left_out(ranks, tmp_path):
    folder = str(tmp_path)
    whole = ranks.run(2, train, str(tmp_path / "whole"), 8, "fresh")[0]
    ranks.run(2, train, folder, 6, "fresh")
    assert ranks.run(2, train, folder, 7, "by hand")[0] == whole[6:7]
    assert ranks.run(2, train, folder, 8, "without position")[0] == whole[:1]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_datasets_own_state_resumes_with_workers_and_moves_one_epoch_only(persistent):
    before, state = run(2, dataset=FlowWithState(26), stop=1)
    assert (before, state["dataset"]) == (list(range(8)), {"position": 8})
    workers = {"num_workers": 2, "persistent_workers": persistent}
    rest, _ = run(2, state, dataset=FlowWithState(26), epochs=3, **workers)
    assert rest == [*range(8, 26), *range(26), *range(26)]


class EarlyReset(FlowWithState):
    """Is at its beginning again as soon as it has given its last sample."""

    def __iter__(self):
        for _ in range(self.length - self.position):
            found, self.position = self.position, (self.position + 1) % self.length
            yield found


@pytest.mark.parametrize("kind", [FlowWithState, EarlyReset])
@pytest.mark.parametrize(("length", "drop_last", "batches"), [(26, False, 4), (24, False, 3), (26, True, 3)])
def test_an_epoch_saved_at_its_last_batch_is_not_read_again(kind, length, drop_last, batches):
    options = {"dataset": kind(length), "drop_last": drop_last}
    epoch, _ = run(2, **options)
    _, after = run(2, epochs=2, **options)
    first, state = run(2, stop=batches, **options)
    assert (first, state["epoch"]) == (epoch, 0)
    # What is left of the saved epoch is empty, so two iterations end where two whole epochs do.
    assert run(2, state, epochs=2, **options) == (epoch, after)


def test_an_epoch_that_is_over_is_not_skipped_through():
    _, state = run(1, dataset=FlowWithState(26), stop=7)
    loader = prepared(dataset=FlowWithState(26))
    loader.load_state_dict(state)
    assert (flat(loader), loader.dataset.reads, loader.epoch) == ([], 0, 1)
    assert flat(loader) == list(range(26))


class LiveState(FlowWithState):
    """Its state_dict returns the dict that it changes later."""

    def __init__(self, length):
        super().__init__(length)
        self.live = {"position": 0}

    def state_dict(self):
        self.live.update(super().state_dict())
        return self.live

    def __iter__(self):
        for value in super().__iter__():
            self.state_dict()
            yield value


def test_a_state_that_goes_on_changing_is_copied():
    assert run(2, dataset=LiveState(26), stop=1)[1]["dataset"] == {"position": 8}


class DrawnOrder(FlowWithState):
    """Draws its order when an epoch starts, and keeps how far it is in it."""

    def __iter__(self):
        order = random.sample(range(self.length), self.length)
        return (order[number] for number in super().__iter__())


def test_an_order_drawn_at_an_epochs_start_is_drawn_again_for_a_restored_position():
    whole, _ = run(2, dataset=DrawnOrder(26), epochs=2)
    before, state = run(2, dataset=DrawnOrder(26), stop=2)
    rest, _ = run(2, state, dataset=DrawnOrder(26), epochs=2)
    assert (before + rest, state["dataset"]) == (whole, {"position": 16})
