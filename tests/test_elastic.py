"""Elastic runs: machines come and go, and the loss curve is that of an uninterrupted run."""

import re
import signal
import socket
import threading
import time
from dataclasses import replace
from itertools import groupby

import pytest

from shardkit.config import files, scheduler
from shardkit.errors import ConfigError, MachineError, UsageError
from shardkit.launch import flags, generations, membership, other_launchers, rosters, store_client, stores
from shardkit.launch.membership import Generation, Member
from shardkit.launch.spec import launch_spec
from shardkit.runtime import settings
from tests.elastic_runs import ElasticRun, check_losses
from tests.launches import Running, command, script
from tests.network import ADDRESSES, folder, two_machines

HOST = socket.gethostname()


def config(text: str = "", machines: int = 4, least: int = 1, ranks: int = 2):
    return files.read_text(
        f"num_machines: {machines}\nnum_processes: {machines * ranks}\nuse_cpu: true\nmain_process_ip: localhost\n"
        f"shardkit:\n  launch:\n    min_machines: {least}\n{text}"
    ).config


# which worlds there are, and what keeps the global batch


def test_the_range_is_read_as_torchrun_writes_it():
    assert other_launchers.in_our_words(["--nnodes", "1:4", "train.py"], {"--num-machines"})[:2] == [
        "--num-machines",
        "1:4",
    ]
    assert flags.machines_settings("1:4") == {"num_machines": "4", "shardkit.launch.min_machines": "1"}
    assert flags.machines_settings("4") == {"num_machines": "4"}
    for text in ("1:x", "1:", ":4", "1:2:3"):
        with pytest.raises(UsageError, match=rf"--num-machines: is not a number, nor MIN:MAX \(got '{text}'\)"):
            flags.machines_settings(text)
    job = scheduler.scheduler({"PET_NNODES": "2:4", "PET_NODE_RANK": "1", "MASTER_ADDR": "a"})
    assert (job.machines, job.min_machines, job.machine_rank) == (4, 2, 1)
    assert scheduler.scheduler({"PET_NNODES": "4:4", "PET_NODE_RANK": "1"}).min_machines is None


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (KeyboardInterrupt(), {"over": "Ctrl-C", "code": 130}),
        (UsageError("launch: wrong"), {"over": "launch: wrong", "code": 2}),
        (KeyError("a mistake"), {"over": "KeyError('a mistake')", "code": 70}),
    ],
)
def test_the_other_machines_learn_how_the_run_ended_on_machine_0(error, end):
    assert generations._end_by(error) == end


@pytest.mark.parametrize(
    ("text", "machines", "sizes"),
    [
        ("", 4, [1, 2, 4]),
        ("", 6, [1, 2, 3, 6]),
        ("  gradient_accumulation_steps: 2\n", 3, [1, 2, 3]),
        ("  gradient_accumulation_steps: 2\n  data:\n    split_batches: true\n", 3, [1, 3]),
        ("  mesh:\n    shard_size: 4\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n", 4, [2, 4]),
        ("  mesh:\n    replicate_size: 8\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n", 4, [4]),
        ("fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n", 4, [1, 2, 4]),
    ],
)
def test_only_worlds_that_keep_the_global_batch_and_fit_the_mesh_are_used(text, machines, sizes):
    found = membership.usable_sizes(config(text, machines))
    assert [size for size, problem in found.items() if problem is None] == sizes
    assert [membership.best_size(found, here) for here in (0, 1, machines)] == [0, 1 if 1 in sizes else 0, machines]


def test_the_worlds_that_are_not_used_are_said_with_the_reason():
    assert membership.summary(config("  gradient_accumulation_steps: 1\n", 3)) == (
        "elastic: worlds of 1 or 3 machines (not 2: 1 x 3 micro-batches a step cannot be divided among 2 machines)"
    )
    text = "  mesh:\n    shard_size: 4\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"
    assert "not 1: " in membership.summary(config(text, 4)) and "shard_size" in membership.summary(config(text, 4))
    shared = membership.summary(config("  mesh:\n    context_size: 4\n", 4))
    assert shared.startswith("elastic: worlds of 2 or 4 machines (not 1: ") and "context_size" in shared


@pytest.mark.parametrize(
    ("machines", "least", "words"),
    [
        (1, 1, r"min_machines: is for several machines \(got num_machines 1\)"),
        (2, 3, r"min_machines: is more than num_machines \(got 3 of 2\)"),
    ],
)
def test_a_range_that_is_none_is_refused(machines, least, words):
    with pytest.raises(ConfigError, match=words):
        config(machines=machines, least=least)


def test_a_launch_in_a_smaller_world_knows_the_full_one_and_keeps_the_batch(monkeypatch):
    chosen = {"num_machines": "shardkit.yaml:3:1", "use_cpu": "shardkit.yaml:1:1"}
    spec = replace(launch_spec(config("  gradient_accumulation_steps: 3\n"), "train.py"), chosen=chosen)
    members = (Member(0, 0, "a"), Member(7, 3, "b"))
    generation = Generation(2, members, (Member(4, 2, "c"),), "auto", "machine 1 (d): lost")
    assert membership.generation_from(generation.as_json()) == generation
    own = membership.spec_for(spec, generation, 1)
    assert (own.world_size, own.num_machines, own.machine_rank, own.first_rank) == (4, 2, 1, 2)
    assert own.config.shardkit.checkpoint.resume == "auto"
    here = "shardkit launch (2 of 4 machines)"  # the table of the ranks shows 2, and not that the file says so
    assert own.chosen == {"num_machines": here, "num_processes": here, "use_cpu": "shardkit.yaml:1:1"}
    assert own.environment["SHARDKIT_FULL_WORLD_SIZE"] == "8"
    always_full = membership.spec_for(launch_spec(config(machines=2, least=2), "train.py"), generation, 1)
    assert "SHARDKIT_FULL_WORLD_SIZE" not in always_full.environment
    assert own.environment["SHARDKIT_NUM_PROCESSES"] == "4"
    assert own.environment["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "6"  # for scripts on Accelerate
    assert membership.announcement(spec, generation, membership.usable_sizes(spec.config)).splitlines() == [
        "launch: machine 1 (d): lost",
        "launch: world 2: 2 of 4 machines, 4 ranks: machine 0 (a), machine 3 (b)",
        "launch: the global batch stays that of 4 machines: 2 times the samples of each rank",
        "launch: machine 2 (c): a spare; worlds that keep the global batch have 1, 2, 3 or 4 machines",
    ]


@pytest.mark.parametrize(("full", "steps", "kept"), [(None, 2, 2), ("1", 2, 2), ("4", 1, 4), ("4", 3, 12)])
def test_micro_batches_make_up_for_missing_ranks(monkeypatch, full, steps, kept):
    if full:
        monkeypatch.setenv("SHARDKIT_FULL_WORLD_SIZE", full)
    assert settings.kept_accumulation(steps, False) == kept
    found = settings.with_kept_batch(settings.settings({}, gradient_accumulation_steps=steps))
    assert found.config.shardkit.gradient_accumulation_steps == kept
    split = settings.with_kept_batch(settings.settings({}, gradient_accumulation_steps=steps, split_batches=True))
    assert split.config.shardkit.gradient_accumulation_steps == steps  # fewer ranks share each batch


def test_a_machine_without_a_number_is_not_machine_0_by_a_name_that_nobody_knows():
    """As long as DNS has no entry for machine 0, no other takes its place."""
    text = "use_cpu: true\nnum_machines: 2\nnum_processes: 2\nmain_process_ip: no-such-name.invalid\n"
    spec = replace(launch_spec(files.read_text(text).config, "train.py"), has_number=False)
    assert generations.hosted_here(spec) is None


def test_a_machine_with_another_secret_is_told_that_and_not_that_machine_0_is_lost(monkeypatch):
    store = stores.hosted("127.0.0.1", 0)
    monkeypatch.setenv("SHARDKIT_SECRET", "of machine 0")
    refusal = store_client.sealed({"refused": "launch: machine 1 does not fit", "is_config": False})
    monkeypatch.setenv("SHARDKIT_SECRET", "another")
    joins = rosters.RosterClient(store, {}, wanted=None, lost_s=30)
    try:
        store.set("roster/answer/1", refusal)
        with pytest.raises(MachineError, match=r"give all machines of the run the same \$SHARDKIT_SECRET"):
            generations.next_decision(joins, 0, training=0)
    finally:
        joins.close()


@pytest.mark.slow
def test_a_machine_that_waits_and_was_silent_too_long_is_told_that_it_was_left_out():
    store, greeting = stores.hosted("127.0.0.1", 0), {"host": HOST, "pid": 1}
    first = rosters.RosterServer(store, greeting, machines=3, lost_s=2, say=print)
    spare = rosters.RosterClient(store, {**greeting, "endpoint": None}, wanted=None, lost_s=30)
    try:
        while len(first.members()) < 2:
            time.sleep(0.01)
        spare._beat_s = float("inf")  # as if its signs of life were lost on their way
        with pytest.raises(MachineError, match=r"machine was left out.* no sign of life from it for 2 s; start it"):
            generations.next_decision(spare, 0, training=1)
        assert [member.number for member in first.members()] == [0]
    finally:
        spare.close()
        first.close()


def test_a_machine_that_stood_still_does_not_take_machine_0_for_lost():
    thread = rosters.PollingThread(lambda: None)
    try:
        while thread.count < 2:
            time.sleep(0.01)
        assert min(thread.busy_s() for _ in range(100)) == 0, "while it rests, nobody is waited for"
    finally:
        thread.close()
    blocked = threading.Event()
    thread = rosters.PollingThread(lambda: blocked.wait() and None)
    try:
        while thread.busy_s() < 0.2:
            time.sleep(0.01)
    finally:
        blocked.set()
        thread.close()


def test_a_number_of_micro_batches_that_does_not_fit_is_refused(monkeypatch):
    for name, value in {"SHARDKIT_FULL_WORLD_SIZE": "3", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"1 micro-batches on 3 ranks are not a whole number on 2 \(got 1.50\)"):
        settings.kept_accumulation(1, False)


# runs


@pytest.mark.slow
def test_a_machine_leaves_and_the_other_goes_on_with_the_losses_of_one_process(tmp_path):
    with ElasticRun(tmp_path, steps=12) as run:
        second = run.start_both()
        run.wait_for_steps(1)
        second.process.send_signal(signal.SIGTERM)
        assert (run.end("second"), run.end("first")) == (75, 0), run.text()
        lines, first = run.lines(), run.machines["first"].text()
    assert f"launch: machine 1 ({HOST}): stopped by a signal; going on from step" in first
    assert "launch: world 1: 1 of 2 machines, 1 rank:" in first
    assert "the global batch stays that of 2 machines: 2 times the samples of each rank" in first
    assert "4 x 1 rank x 4 micro-batches = 16 samples a step" in first
    check_losses(lines, 12)
    assert len(lines) == 12  # it was saved: no step was trained twice
    assert {world for *_, world in lines} == {1, 2}
    assert "Traceback" not in run.text()


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_a_run_goes_from_two_machines_to_one_and_back_with_the_losses_of_one_process(tmp_path):
    with ElasticRun(tmp_path, steps=24) as run:
        second = run.start_both()
        run.wait_for_steps(3)
        second.process.send_signal(signal.SIGTERM)
        assert run.end("second") == 75, run.text()
        run.wait_for_steps(1, world=1)
        run.hold()
        run.start("third")
        run.wait_for("first", rf"launch: machine 1 \({HOST}\) came; telling the ranks to save and make way")
        run.go_on()
        assert (run.end("first"), run.end("third")) == (0, 0), run.text()
        lines = run.lines()
    for name in ("first", "third"):
        assert "launch: world 2: 2 of 2 machines, 2 ranks" in run.machines[name].text()
    check_losses(lines, 24)
    assert len(lines) == 24
    assert [world for world, _ in groupby(world for *_, world in lines)] == [2, 1, 2]
    assert "Traceback" not in run.text()


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_machines_that_are_killed_in_a_step_and_in_a_save_are_named_and_replaced(tmp_path):
    with ElasticRun(tmp_path, steps=24) as run:
        run.start_both(lost_timeout_s=15)
        run.wait_for_steps(3)
        run.kill("second")
        run.start("third", "--machine-rank", "1", lost_timeout_s=15)  # before the other one counts as lost
        run.wait_for("first", "world 1: 2 of 2 machines|world 2: 2 of 2 machines")
        before = run.lines()[-1][0]
        run.wait_for_steps(before + 1, world=2)
        run.wait_for_save()
        run.kill("third")
        run.wait_for(
            "first", rf"launch: machine 1 \({HOST}\): lost; going on from step \d+\n(.*\n)?.*: 1 of 2 machines"
        )
        run.start("fourth", lost_timeout_s=15)
        assert (run.end("first"), run.end("fourth")) == (0, 0), run.text()
        lines, first = run.lines(), run.machines["first"].text()
    assert first.count(f"launch: machine 1 ({HOST}): lost; going on from step") == 2
    check_losses(lines, 24)
    assert "Traceback" not in first
    assert not list((run.folder / "checkpoints").glob("*.tmp*"))


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_a_machine_that_stands_still_is_replaced_without_waiting_for_ranks_that_wait_for_it(tmp_path):
    with ElasticRun(tmp_path, steps=18) as run:
        run.start_both(lost_timeout_s=8)
        run.wait_for_steps(3)
        run.suspend("second")
        began_s = time.monotonic()
        run.wait_for("first", "world 1: 1 of 2 machines")
        assert time.monotonic() - began_s < 8 + 20  # the ranks would have 30 s after SIGTERM if nothing were lost
        assert run.end("first") == 0, run.text()
        check_losses(run.lines(), 18)


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_a_machine_that_dies_while_they_meet_is_left_out(tmp_path):
    with ElasticRun(tmp_path, steps=6, machines="1:3", most=3) as run:
        run.start_both(join_timeout_s=30, lost_timeout_s=10)
        run.wait_for(
            "first", r"2 of 3 are here \(machine 0 \(\S+\), machine \d \(\S+\)\); starting with them after 30 s"
        )
        run.kill("second")
        assert run.end("first") == 0, run.text()
        assert "launch: world 0: 1 of 3 machines, 1 rank:" in run.machines["first"].text()


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_a_machine_that_dies_as_soon_as_it_has_come_does_not_interrupt_the_others(tmp_path):
    with ElasticRun(tmp_path, steps=6) as run:
        run.start("first", "--machine-rank", "0", join_timeout_s=1)
        run.wait_for_steps(1)
        run.hold()
        run.start("second", join_timeout_s=1)
        run.wait_for("first", rf"launch: machine 1 \({HOST}\) has come")
        run.kill("second")
        time.sleep(generations.SETTLE_S + 2)
        run.go_on()
        assert run.end("first") == 0, run.text()
        check_losses(run.lines(), 6)
    assert "telling the ranks to save and make way" not in run.machines["first"].text()


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_who_starts_otherwise_or_with_a_number_in_use_is_refused_and_the_run_goes_on(tmp_path):
    with ElasticRun(tmp_path, steps=18) as run:
        run.start_both()
        run.wait_for_steps(1)
        run.hold()
        run.start("another", "--mixed-precision", "bf16")
        run.start("again", "--machine-rank", "1")
        assert run.end("another") == 2, run.text()
        assert "launch: mixed_precision: no on machine 0, bf16 on machine" in run.machines["another"].text()
        assert "the run goes on without this one" in run.machines["another"].text()
        assert run.end("again") == 2, run.text()
        assert f"launch: machine_rank 1 is taken by {HOST} (pid " in run.machines["again"].text()
        run.go_on()
        assert (run.end("first"), run.end("second")) == (0, 0), run.text()
        check_losses(run.lines(), 18)
    assert {world for *_, world in run.lines()} == {2}
    assert "world 1" not in run.machines["first"].text()


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_a_spare_waits_and_replaces_a_machine_that_leaves_by_ctrl_c(tmp_path):
    with ElasticRun(tmp_path, steps=18) as run:
        second = run.start_both()
        run.wait_for_steps(1)
        run.hold()
        run.start("spare")
        run.wait_for("spare", "launch: 2 machines train|all 2 are there; this one replaces the first that is lost")
        second.process.send_signal(signal.SIGINT)
        run.go_on()
        assert run.end("second") == 75, run.text()
        assert (run.end("first"), run.end("spare")) == (0, 0), run.text()
        check_losses(run.lines(), 18)
    assert re.search("world [12]: 2 of 2 machines", run.machines["spare"].text())


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_the_loss_of_machine_0_ends_the_run_in_words(tmp_path):
    with ElasticRun(tmp_path, steps=60) as run:
        run.start_both(lost_timeout_s=10)
        run.wait_for_steps(3)
        run.kill("first")
        assert run.end("second") == 4, run.text()
        said = run.machines["second"].text()
        assert f"launch: lost machine 0 ({HOST}): no sign of life" in said
        assert "start again with --resume auto" in said and "Traceback" not in said
        run.wait_until_gone("second")


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_too_few_machines_are_said_and_the_run_is_given_up(tmp_path):
    with ElasticRun(tmp_path, steps=60, machines="2:2") as run:
        run.start("first", "--machine-rank", "0", "--set", "shardkit.launch.meet_timeout_s=20")
        run.wait_for("first", r"launch: waiting for machines, 1 is here \(machine 0 \(\S+\)\), a world needs 2, ")
        assert run.end("first") == 4, run.text()
        words = "launch: 1 of 2 machines that a world needs came within 20 s (machine 0 ("
        assert words in run.machines["first"].text()


class AlwaysLost(rosters.RosterServer):
    """A roster of one machine, after another one was lost."""

    def __init__(self) -> None:
        self.said: list[dict] = []

    def members(self) -> list[Member]:
        return [Member(0, 0, "a", None)]

    def publish(self, decision: dict) -> None:
        self.said.append(decision)


def test_why_there_are_too_few_machines_is_said_where_the_run_ends(tmp_path, monkeypatch):
    spec = launch_spec(config("    meet_timeout_s: 0.2\n", machines=2, least=2), "train.py")
    roster = AlwaysLost()
    leader = generations.Leader(spec, roster, lambda own: [], tmp_path)
    leader._why = "machine 1 (b): lost; going on from step 5"
    says = r"launch: machine 1 \(b\): lost; going on from step 5; 1 of 2 machines that a world needs came"
    with pytest.raises(MachineError, match=says):
        leader.lead()
    assert "machine 1 (b): lost" in roster.said[0]["over"]


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_a_signal_on_machine_0_saves_and_ends_the_run_on_all(tmp_path):
    with ElasticRun(tmp_path, steps=60) as run:
        first = run.start("first", "--machine-rank", "0")
        run.start("second", "--machine-rank", "1")
        run.wait_for_steps(3)
        first.process.send_signal(signal.SIGTERM)
        assert (run.end("first"), run.end("second")) == (75, 75), run.text()
        assert "--resume auto continues from it" in run.machines["second"].text()


@pytest.mark.faults
@pytest.mark.fault_row(46)
def test_a_machine_that_is_cut_off_ends_its_ranks_and_the_others_go_on(tmp_path):
    with two_machines() as network:
        words = ["-n", "2", "--num-machines", "1:2", "--main", f"{ADDRESSES[0]}:29500"]
        words += ["--set", "shardkit.launch.lost_timeout_s=15", script("elastic"), str(tmp_path / "run"), "18", "0.2"]
        both = [
            Running(
                folder(tmp_path, machine),
                words=network.command(machine, *command("--machine-rank", str(machine), *words)),
            )
            for machine in (0, 1)
        ]
        run = ElasticRun(tmp_path, steps=18)
        run.machines |= {"first": both[0], "second": both[1]}
        with run:
            run.wait_for_steps(3, world=2)
            network.cut()
            assert run.end("second") == 4, run.text()
            assert f"launch: lost machine 0 ({HOST})" in run.machines["second"].text()
            assert run.end("first") == 0, run.text()
            run.wait_until_gone("second")
            check_losses(run.lines(), 18)
