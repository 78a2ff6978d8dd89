"""How far a save, a load and an export have come is said in a run's log, where they take longer than two seconds."""

import logging
import re

import pytest
import torch
from torch import nn

from shardkit import Accelerator
from shardkit.distributed import long_work
from shardkit.distributed.long_work import LongWork
from tests.ranks import log_lines

CONFIG = {"distributed_type": "FSDP", "num_processes": 2, "use_cpu": True}


def test_nothing_is_said_of_short_work_and_a_line_every_ten_seconds_of_long_work():
    now, said, moved = [0.0], [], []
    work = LongWork("saving", lambda: moved.append(now[0]), said.append, lambda: now[0])
    work.expect(4 << 20)
    for second in range(0, 24):
        now[0] = float(second)
        work(128 << 10)
        work()
    assert said == [
        "saving: 384.0 KiB of 4.0 MiB (9 %), 2 s",
        "saving: 1.6 MiB of 4.0 MiB (40 %), 12 s",
        "saving: 2.9 MiB of 4.0 MiB (71 %), 22 s",
    ]
    assert len(moved) == 24  # once for the two at the same moment


def test_more_than_expected_is_never_more_than_all():
    said = []
    work = LongWork("loading", say=said.append, clock=iter([0.0, 3.0]).__next__)
    work.expect(1 << 10)
    work(1 << 20)
    assert said == ["loading: 1.0 MiB of 1.0 MiB (100 %), 3 s"]


def said_in_a_run(folder, kind):
    kept = long_work.SILENT_S, long_work.EVERY_S
    long_work.SILENT_S = long_work.EVERY_S = 0.0
    try:
        with log_lines("shardkit.runtime.checkpoints.beginning", logging.INFO) as lines:
            accelerator = Accelerator(config={**CONFIG, "fsdp_config": {"fsdp_state_dict_type": kind}})
            model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
            model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
            accelerator.backward(model(torch.ones(2, 64)).sum())
            optimizer.step()
            accelerator.save_state(folder / "state")
            accelerator.load_state(folder / "state")
            accelerator.save_model(model, folder / "model")
    finally:
        long_work.SILENT_S, long_work.EVERY_S = kept
    return lines


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_run_says_how_far_saves_loads_and_exports_have_come(ranks, tmp_path, kind):
    mine, other = ranks.run(2, said_in_a_run, tmp_path, kind)
    assert not [line for line in other if "%" in line]
    for call in ("save_state", "load_state", "save_model"):
        shares = [int(found[1]) for line in mine if (found := re.search(rf"^checkpoint: {call}: .* \((\d+) %\)", line))]
        assert shares == sorted(shares) and len(shares) > 2 and shares[-1] in (99, 100), (call, shares)
