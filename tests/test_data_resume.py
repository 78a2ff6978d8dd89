"""The position in the data comes back with load_state: on other numbers of ranks, and of a resume."""

from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from shardkit import Accelerator, ProjectConfiguration, skip_first_batches

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
