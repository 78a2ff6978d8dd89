"""What a plan says of a run's failures: how many, how often to save, and what both cost."""

import json
import random

import pytest

from shardkit.cli.main import run
from shardkit.plan.failures import COPIES, RESTART_S, USUAL_DEVICE_HOURS, Saves, failures, saves

ASKED = [
    "gpt:layers=32,hidden=4096,heads=32,seq=4096",
    "--device",
    "h100",
    "--batch-size",
    "1",
    "--seq-len",
    "4096",
    "--tokens",
    "1T",
]
ASKED += ["--set", "fsdp_config.fsdp_activation_checkpointing=true"]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run(["plan", *ASKED, *flags]) == 0
    return capsys.readouterr().out


def note(text: str) -> str:
    """The note on failures, as one line."""
    words = " ".join(text.split())
    return words[words.index("Failures: ") :]


def test_a_published_run_has_as_many():
    """Llama 3: 419 in 54 days on 16,384 GPUs, and over 90 % of the time used (https://arxiv.org/abs/2407.21783)."""
    days = 54 * 86400.0
    found = failures((days, days), 16_384, USUAL_DEVICE_HOURS, saves(4_870_000_000_000, 16_384, 2e12, True))
    assert found.expected == pytest.approx((419, 419), rel=0.02)
    assert 0.05 < found.lost < 0.1


def lost_in_a_simulated_run(every_s: float, stall_s: float, between_s: float) -> float:
    """The part of the time in which no step is made that lasts, over a hundred thousand saves' worth of work."""
    draw = random.Random(0)
    done = clock = 0.0
    fails_at = draw.expovariate(1 / between_s)
    while done < 100_000 * every_s:
        ends = clock + every_s + stall_s
        if ends <= fails_at:
            done, clock = done + every_s, ends
        else:
            clock = fails_at + RESTART_S
            fails_at = clock + draw.expovariate(1 / between_s)
    return 1 - done / clock


@pytest.mark.parametrize(("stall_s", "hours"), [(10.0, 40.0), (60.0, 40.0), (5.0, 12.0)])
def test_the_loss_is_that_of_a_simulated_run_and_the_least(stall_s, hours):
    found = failures((1e6, 1e6), 1, hours, Saves(stall_s, stall_s, is_blocking=True))
    assert lost_in_a_simulated_run(found.save_every_s, stall_s, hours * 3600) == pytest.approx(found.lost, rel=0.08)
    for factor in (0.4, 2.5):
        other = lost_in_a_simulated_run(found.save_every_s * factor, stall_s, hours * 3600)
        assert other > lost_in_a_simulated_run(found.save_every_s, stall_s, hours * 3600)


def test_in_the_background_training_waits_for_the_copy_and_a_save_for_the_one_before():
    save = saves(8 * 10**12, 8, 1e9, is_blocking=False)
    assert (save.write_s, save.stall_s) == (8000, 10**12 / COPIES)
    often = failures((1e6, 1e6), 1000, 1000, save)
    assert often.save_every_s == 8000 > (2 * save.stall_s * 3600) ** 0.5
    assert often.lost == often.lost_in_background
    waiting = failures((1e6, 1e6), 1000, 1000, saves(8 * 10**12, 8, 1e9, is_blocking=True))
    assert waiting.lost_in_background == often.lost < waiting.lost


def test_the_report_says_how_often_to_save(capsys):
    found = json.loads(planned(capsys, "--world", "1024", "--storage", "50", "--json"))
    row = next(row for row in found["strategies"] if row["strategy"] == found["chosen"])["run_estimate"]
    seconds, lost = row["seconds"], row["failures"]
    assert lost["between_s"] == pytest.approx(USUAL_DEVICE_HOURS * 3600 / 1024)
    assert lost["expected"] == pytest.approx([second / lost["between_s"] for second in seconds])
    assert lost["stall_s"] == pytest.approx(found["checkpoint_bytes"] / 50e9)
    assert lost["save_every_s"] == pytest.approx((2 * lost["stall_s"] * lost["between_s"]) ** 0.5)
    assert (found["run"]["device_hours"], found["assumptions"]["restart_s"]) == (50_000, 600)
    text = note(planned(capsys, "--world", "1024", "--storage", "50"))
    assert text.startswith("Failures: at one in 50,000 device-hours (as on 16,384 H100s; --mtbf), ")
    assert (
        f"Saving every {lost['save_every_s'] / 60:.2g} minutes then costs least: with 1.6 seconds a save, and " in text
    )
    assert f"10 minutes a restart, {lost['lost']:.1%} of the time." in text


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--world", "1024", "--mtbf", "2000", "--storage", "5"], " (shardkit.checkpoint.blocking: false: "),
        (["--world", "2", "--tokens", "1M"], "<0.01 in this run: a save at the end is enough."),
        (["--world", "8192", "--mtbf", "100"], "seconds: saves and restarts leave no time to train."),
    ],
)
def test_what_else_there_is_to_say(capsys, flags, text):
    assert text in note(planned(capsys, *flags))


def test_storage_that_is_not_given_writes_1_gb_a_second_from_each_machine(capsys):
    told = " ".join(planned(capsys, "--world", "64").split())
    assert "where storage writes 8 GB/s (1 a machine; --storage)." in told
    assert "where storage writes 0.25 GB/s." in " ".join(planned(capsys, "--world", "64", "--storage", "0.25").split())


def test_a_checkpoint_is_no_larger_over_many_ranks(capsys):
    """Shards of a rank are filled up where sizes do not divide; files hold what there is."""
    for world in ("8", "65536"):
        found = json.loads(planned(capsys, "--world", world, "--json"))
        assert found["checkpoint_bytes"] == pytest.approx(12 * found["model"]["parameters"], rel=0.001)


def test_a_script_with_weight_averages_has_no_known_size(capsys):
    assert "Failures" not in planned(capsys, "--world", "8", "--ema", "trained")


def test_slips_are_all_named_at_once(capsys):
    assert run(["plan", "llama-3.1-8b", "--mtbf", "0", "--storage", "fast"]) == 2
    assert capsys.readouterr().err == (
        "--tokens: is not the number of tokens of a run (got no --tokens, but --mtbf); write 300B or 15T.\n"
        "--mtbf: is not a device's hours between failures (got '0'); write 50000.\n"
        "--storage: is not a number of GB/s from 0.001 to 1,000,000 (got 'fast'); write 100.\n"
    )
