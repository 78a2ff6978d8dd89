"""Two launchers on this machine as two machines: what is open to whom, who waits, who is named, who ends."""

import contextlib
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from shardkit.config.schema import Config
from shardkit.errors import ConfigError, MachineError, Preempted
from shardkit.launch import addresses, attempts, meeting, ranks, reports, store_client, stores
from shardkit.launch.monitor import SURVIVOR_GRACE_S
from shardkit.launch.restarts import Restarts
from shardkit.launch.spec import greeting, launch_spec
from tests.launches import free_port, launch, logs, running, script, wait_until_gone

is_slow = pytest.mark.slow


def flags(port: int, machine: int, *others: str) -> list[str]:
    main = f"127.0.0.1:{port}"
    return ["-n", "2", "--num-machines", "2", "--main", main, "--machine-rank", str(machine), *others]


def folder(path: Path, machine: int) -> Path:
    (path / f"machine-{machine}").mkdir(exist_ok=True)
    return path / f"machine-{machine}"


# what is open to whom (line 1)


@is_slow
def test_one_machine_listens_on_loopback_only(tmp_path):
    done = launch(tmp_path, "-n", "2", "--no-prefix", script("listening"))
    assert done.stdout.splitlines() == ["listens on 0100007F"] * 2, done.stdout + done.stderr


class Attack:
    """Unpickled, it runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.requirement("U4")
@is_slow
def test_what_others_write_into_the_store_is_not_executed(tmp_path):
    port, ran = free_port(), tmp_path / "ran"
    with running(folder(tmp_path, 0), *flags(port, 0, script("world"))) as first:
        first.wait_for("waiting for machines")
        attacker = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        for key in ("machine/1", "said/greeting/1", "all/greeting", "lost"):
            attacker.set(key, pickle.dumps(Attack(ran)))
        assert first.end() == 4, first.text()
    assert "has an invalid signature" in first.text()
    assert "Traceback" not in first.text()
    assert not ran.exists()


@pytest.mark.parametrize("forged", [b"", b"x", pickle.dumps(Attack(Path("never"))), b"0" * 64 + b"[1]"])
def test_only_what_is_signed_is_read(monkeypatch, forged):
    monkeypatch.setenv("SHARDKIT_SECRET", "ours")
    assert store_client.unsealed(store_client.sealed({"a": [1, None]}).encode()) == {"a": [1, None]}
    with pytest.raises(MachineError, match="has an invalid signature"):
        store_client.unsealed(forged)
    signed = store_client.sealed(1).encode()
    monkeypatch.setenv("SHARDKIT_SECRET", "theirs")
    with pytest.raises(MachineError, match="same \\$SHARDKIT_SECRET"):
        store_client.unsealed(signed)


def test_addresses_and_their_interfaces():
    assert addresses.resolve("localhost") == "127.0.0.1"
    for name in ("no-such-name.invalid", "node..a", ".node", 64 * "a"):
        assert addresses.resolve(name) is None
    assert addresses.is_here("127.0.0.1")
    assert not addresses.is_here("192.0.2.1")  # RFC 5737: nobody's
    assert addresses.interface_of("127.0.0.1") in {"lo", None}
    assert addresses.interface_of("192.0.2.1") is None
    with addresses.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert addresses.answers("127.0.0.1", port, 1) is None
    assert addresses.answers("127.0.0.1", port, 1) == "Connection refused"


def known_as(monkeypatch, *known: str) -> None:
    """The name `head` has these addresses, in this order."""
    real = socket.getaddrinfo
    found = [(addresses.family_of(one), socket.SOCK_STREAM, 6, "", (one, 0)) for one in known]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *of, **more: found if host == "head" else real(host, *of))


def test_of_several_addresses_of_a_name_the_one_that_answers_is_used(monkeypatch):
    with addresses.listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    store = stores.hosted("127.0.0.1", port)
    known_as(monkeypatch, "192.0.2.1", "127.0.0.1")  # RFC 5737: nobody's
    monkeypatch.setattr(stores, "CONNECT_S", 0.2)
    found = stores.reached("head", port, 5, print, "machine 1", "machine 0", "")
    assert (found.host, addresses.resolve("head")) == ("127.0.0.1", "192.0.2.1")
    with pytest.raises(
        MachineError,
        match=r"at head:1 within 0 s \(192.0.2.1: [^;]+; 127.0.0.1: Connection refused, on this machine itself\)",
    ):
        stores.reached("head", 1, 0, print, "machine 1", "machine 0", "")
    del store


def test_a_slow_lookup_of_names_is_told_and_waited_for(monkeypatch, capsys):
    store = stores.hosted("127.0.0.1", 0)
    monkeypatch.setattr(addresses, "SLOW_LOOKUP_S", 0.1)
    monkeypatch.setattr(socket, "getnameinfo", lambda *_: time.sleep(0.5))
    monkeypatch.setattr(stores, "GREETING_S", 0)  # so that only the lookups' time is left
    assert stores.reached("127.0.0.1", store.port, 5, print, "machine 1", "machine 0", "").port == store.port
    assert "s to look up the name of 127.0.0.1, as torch does for each connection" in capsys.readouterr().out


def test_of_several_addresses_of_a_name_those_of_this_machine_are_first_and_loopback_is_last(monkeypatch):
    known_as(monkeypatch, "::1", "127.0.1.1", "2001:db8::1", "192.0.2.1")
    monkeypatch.setattr(addresses, "towards", lambda address: None if address == "192.0.2.1" else address)
    assert addresses.all_of("head") == ["2001:db8::1", "192.0.2.1", "127.0.1.1", "::1"]
    monkeypatch.setattr(addresses, "is_here", lambda address: address == "192.0.2.1")
    assert addresses.all_of("head")[:2] == ["192.0.2.1", "2001:db8::1"]
    assert addresses.reached_by("head", "192.0.2.1") == "192.0.2.1"
    assert addresses.reached_by("head", "127.0.1.1") == "head"


# restarts, and who is named (lines 2 and 6)


@pytest.mark.requirement("U4")
@is_slow
def test_a_failure_on_another_machine_is_restarted_on_both(tmp_path):
    port = free_port()
    with running(folder(tmp_path, 1), *flags(port, 1, "--restarts", "1", script("at_fault"))) as second:
        first = launch(folder(tmp_path, 0), *flags(port, 0, "--restarts", "1", script("at_fault")))
        assert second.end() == 0, second.text() + first.stderr
    assert first.returncode == 0, first.stderr
    assert "[0] attempt 1 went well" in first.stdout
    assert "[1] attempt 1 went well" in second.text()
    assert "rank 1 failed first: ValueError: rank 1 is at fault" in first.stderr


@is_slow
def test_both_machines_name_the_rank_that_failed_first_and_end_alike(tmp_path):
    port = free_port()
    with running(folder(tmp_path, 1), *flags(port, 1, script("at_fault"))) as second:
        first = launch(folder(tmp_path, 0), *flags(port, 0, script("at_fault")))
        assert second.end() == first.returncode == 1, second.text() + first.stderr
    for text in (first.stderr, second.text()):
        assert re.search(r"launch: rank 1 failed first: ValueError: rank 1 is at fault \(.*at_fault.py:\d+\)", text)
        assert "then     rank 0 lost its peer" in text
        assert text.count("Traceback") == 1
    assert f"logs     machine 1 ({socket.gethostname()}): runs/" in first.stderr


@is_slow
def test_a_machine_that_dies_is_named_and_the_others_end(tmp_path):
    port = free_port()
    with (
        running(folder(tmp_path, 0), *flags(port, 0, script("stubborn"))) as first,
        running(folder(tmp_path, 1), *flags(port, 1, script("stubborn"))) as second,
    ):
        pids = [int(one.wait_for(r"pid (\d+)")[0]) for one in (first, second)]
        first.process.kill()
        assert second.end() == 4, second.text()
    assert f"launch: lost machine 0 ({socket.gethostname()}): no sign of life" in second.text()
    assert "Traceback" not in second.text()
    wait_until_gone(pids)


class Deaf:
    """A rank that does not end by SIGTERM while it waits for another machine: its process, meeting and monitor."""

    pid, code, wants_new_world, is_hung = 0, None, None, False

    def __init__(self, alarm: store_client.Alarm) -> None:
        self.hears_alarm = lambda attempt: alarm
        self.telling_what_lacks = contextlib.nullcontext

    def poll(self) -> int | None:
        return self.code

    def hear_of(self, alarm: store_client.Alarm) -> None:
        """As of the monitor."""


@pytest.mark.parametrize("alarm", store_client.Alarm)
def test_ranks_that_wait_for_those_of_another_machine_are_ended_soon(monkeypatch, alarm):
    deaf, waits = Deaf(alarm), []
    monkeypatch.setattr(ranks, "wait_for", lambda processes, seconds: waits.append(seconds))
    monkeypatch.setattr(ranks, "tell", lambda processes, number: setattr(deaf, "code", -number))
    monkeypatch.setattr(ranks, "variables_of", lambda *given: {})
    spec = launch_spec(Config(use_cpu=True, num_processes=1), "train.py", [])
    ended = ranks.run(spec, lambda variables: [deaf], deaf, Path(), 0, deaf)
    assert (ended.codes, ended.stopped) == ({0: -signal.SIGKILL}, {0})
    assert waits == [SURVIVOR_GRACE_S, ranks.PEERLESS_TERM_S, float("inf")] and sum(waits[:2]) < ranks.TERM_S


def test_a_machine_that_was_suspended_reads_that_it_is_the_lost_one():
    here = meeting.Meeting(1, 2, "127.0.0.1", ("127.0.0.1", 0), hosts=["a", "b"])
    assert attempts.text_of_loss(here, [1]).startswith("launch: this machine counts as lost: machine 0 had no sign of")
    assert attempts.text_of_loss(here, [0]).startswith("launch: lost machine 0 (a): no sign of life from the launcher")


def test_a_machine_that_counted_as_lost_does_not_come_back_into_the_attempt():
    """Else what its loss did to the ranks, which were ended for it, would be told as the cause."""
    store = stores.hosted("127.0.0.1", 0)
    client = store_client.StoreClient(store, 0, 2, lost_s=30)
    for now, beat in ((0.0, "first"), (31.0, "first"), (32.0, "after it was suspended")):
        store.set("beat/1", beat)
        client._beat(now)
    assert client.lost() == store_client.unsealed(store.get("lost")) == [1]


def test_machines_that_all_stood_still_are_not_lost():
    """As by `scontrol suspend`: the first one to go on must not count the time in which it stood still, too."""
    store = stores.hosted("127.0.0.1", 0)
    client = store_client.StoreClient(store, 0, 2, lost_s=30)
    store.set("beat/1", "before")
    client._beat(0.0)
    client._rested(3600.0)
    client._beat(3601.0)
    assert client.lost() == []
    client._beat(3632.0)
    assert client.lost() == [1]


class Gone:
    """A store whose machine has ended."""

    def check(self, names: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize(("rested_s", "lost"), [(0.1, [0]), (31.0, [1])])
def test_where_machine_0_has_ended_a_machine_that_stood_still_is_the_lost_one(rested_s, lost):
    client = store_client.StoreClient(Gone(), 1, 2, lost_s=30)
    client._rested(rested_s)
    client._run()
    assert client.lost() == lost


# while machines gather (lines 4 and 5)

SOON = ("--set", "shardkit.launch.meet_timeout_s=4")


@is_slow
@pytest.mark.parametrize(
    ("machine", "waits", "ends"),
    [
        (
            0,
            "waiting for machines, 1 of 2 are here (missing: 1), ",
            "launch: 1 of 2 machines came within 4 s (missing: 1)",
        ),
        (
            1,
            "waiting for machine 0 at 127.0.0.1:{port} (Connection refused, on this machine itself), ",
            "launch: machine 1 of 2 did not reach",
        ),
    ],
)
def test_a_machine_alone_says_whom_it_waits_for_and_gives_up(tmp_path, machine, waits, ends):
    port = free_port()
    done = launch(tmp_path, *flags(port, machine, *SOON, script("world")))
    assert done.returncode == 4, done.stderr
    assert waits.format(port=port) in done.stderr
    assert ends in done.stderr
    assert "Traceback" not in done.stderr


@is_slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_machine_that_is_stopped_while_another_is_missing_is_named(tmp_path, number, code):
    port = free_port()
    words = ["-n", "3", "--num-machines", "3", "--main", f"127.0.0.1:{port}"]
    with (
        running(folder(tmp_path, 0), *words, "--machine-rank", "0", script("world")) as first,
        running(folder(tmp_path, 1), *words, "--machine-rank", "1", script("world")) as second,
    ):
        first.wait_for(r"waiting for machines, 2 of 3 are here \(missing: 2\)")
        second.process.send_signal(number)
        assert (first.end(), second.end()) == (4, code), first.text() + second.text()
    assert "launch: lost machine 1 before the ranks started: the launcher there has ended" in first.text()
    assert "Traceback" not in first.text()


def test_the_machine_that_got_a_signal_is_named_on_the_others(monkeypatch, capsys, tmp_path):
    saved = Preempted("launch: stopped by a signal after step 3; saved in c, --resume auto continues from it.")
    attempt = reports.LaunchAttempt((), 0.0, 3, {}, stops={1: signal.SIGTERM})
    monkeypatch.setattr(attempts, "attempted", lambda *of: (attempt, saved))
    spec = launch_spec(config_of(0, 1), "train.py")
    for machine, says in ((0, "launch: machine 1 (b): SIGTERM there has stopped the run\n"), (1, "")):
        machines = meeting.Meeting(machine, 2, "a", ("a", 1), hosts=["a", "b"])
        with pytest.raises(Preempted):
            attempts.run_attempt(spec, None, machines, tmp_path, Restarts(0))
        assert capsys.readouterr().err == says


@is_slow
def test_machines_that_start_differently_all_end_and_name_what_differs(tmp_path):
    port = free_port()
    with running(folder(tmp_path, 0), *flags(port, 0, script("world"))) as first:
        other = launch(folder(tmp_path, 1), *flags(port, 1, "--mixed-precision", "bf16", script("world")))
        assert other.returncode == first.end() == 2, other.stderr + first.text()
    for text in (first.text(), other.stderr):
        assert "launch: mixed_precision: no on machine 0, bf16 on machine 1." in text
    assert not list(logs(folder(tmp_path, 0)).glob("rank*"))


def config_of(machine: int, port: int, **others: int) -> Config:
    given = {"num_processes": 2, "num_machines": 2, "use_cpu": True, "main_process_ip": "127.0.0.1", **others}
    return Config(**given, main_process_port=port, machine_rank=machine)


@pytest.mark.parametrize("failing", [pytest.param(0, marks=is_slow), 1])
def test_a_machine_that_fails_its_checks_ends_the_others_at_once(monkeypatch, failing):
    monkeypatch.setattr(store_client, "GOODBYE_S", 0.1)
    port = free_port()
    waiting = launch_spec(config_of(1 - failing, port), "train.py")
    text = "launch: script train.py does not exist; check the path."
    says = rf"machine {failing} \(.+\): {text}\nlaunch: that machine does not come; nothing was started here either\."
    with ThreadPoolExecutor(1) as beside:
        told = beside.submit(meeting.decline, config_of(failing, port), text)
        with (
            pytest.raises(ConfigError, match=says),
            meeting.opened(waiting, greeting(waiting), lambda text: None),
        ):
            pass
        told.result(60)


@is_slow
@pytest.mark.parametrize("content", ["- what is this", "shardkit:\n  launch:\n    hang_timeout_s: soon"])
def test_a_machine_whose_file_is_wrong_ends_the_others_at_once(tmp_path, content):
    """Where it knows their address all the same: from flags, a scheduler, or another line of the file."""
    port, (first, second) = free_port(), (folder(tmp_path, number) for number in (0, 1))
    known = f"num_machines: 2\nmain_process_ip: 127.0.0.1\nmain_process_port: {port}\n"
    (second / "own.yaml").write_text(content if content.startswith("-") else known + content)
    given = flags(port, 1) if content.startswith("-") else ["--machine-rank", "1"]
    with running(first, *flags(port, 0, script("world"))) as other:
        one = launch(second, "--config", "own.yaml", *given, script("world"))
        assert one.returncode == other.end() == 2, one.stderr + other.text()
    [problem, _] = one.stderr.splitlines()
    assert f"launch: machine 1 ({socket.gethostname()}): {problem}\n" in other.text()


WITHOUT_SPACE = """
import sys
from shardkit.cli.main import main
from shardkit.launch import folders
folders.SPACE_BYTES = 1 << 60
sys.argv[0] = "shardkit"
main()
"""


@is_slow
@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_machine_lacks_for_its_ranks_is_told_on_the_others(tmp_path, failing):
    port = free_port()
    lacks = [sys.executable, "-c", WITHOUT_SPACE, "launch", "--cpu", *flags(port, failing, script("world"))]
    with running(folder(tmp_path, 1 - failing), *flags(port, 1 - failing, script("world"))) as other:
        one = subprocess.run(lacks, cwd=folder(tmp_path, failing), capture_output=True, text=True, timeout=120)
        assert one.returncode == other.end() == 4, one.stderr + other.text()
    text = f"the temporary folder {tempfile.gettempdir()} cannot be used ("
    assert f"launch: {text}" in one.stderr
    assert f"launch: machine {failing} ({socket.gethostname()}): {text}" in other.text()


@is_slow
def test_a_log_folder_that_one_machine_cannot_write_is_told_on_the_others(tmp_path):
    port, (first, second) = free_port(), (folder(tmp_path, number) for number in (0, 1))
    (second / "taken").write_text("")
    with running(first, *flags(port, 0, script("world"))) as other:
        one = launch(second, *flags(port, 1, "--logs", "taken", script("world")))
        assert (one.returncode, other.end()) == (4, 2), one.stderr + other.text()
    text = "log folder taken is a file; give another one with --logs DIR.\n"
    assert f"launch: {text}" in one.stderr
    assert f"launch: machine 1 ({socket.gethostname()}): {text}" in other.text()


def test_a_machine_whose_number_is_taken_ends_nothing():
    port = free_port()
    store = stores.hosted("127.0.0.1", port)
    store.set("machine/1", store_client.sealed({"host": "here", "pid": 1}))
    meeting.decline(config_of(1, port), "launch: script train.py does not exist; check the path.")
    assert not store.check(["said/greeting/1"]) and not store.check(["refused"])


def test_a_machine_that_is_started_again_takes_no_part_in_a_run_that_has_begun():
    port = free_port()
    store = stores.hosted("127.0.0.1", port)
    store.set("machine/1", store_client.sealed({"host": "here", "pid": 1}))
    again = launch_spec(config_of(1, port), "train.py")
    with (
        pytest.raises(ConfigError, match=r"machine_rank 1 is already used by here \(pid 1\); give each"),
        meeting.opened(again, greeting(again), print),
    ):
        pass
    # signs of life and a farewell in the name of the first one would end that run
    assert not any(store.check([key]) for key in ("beat/1", "left/1", "said/greeting/1", "refused"))


def test_a_machine_of_a_larger_run_is_told_that_a_smaller_one_trains():
    port = free_port()
    store = stores.hosted("127.0.0.1", port)
    two = {number: greeting(launch_spec(config_of(number, port), "train.py")) for number in (0, 1)}
    store.set("all/greeting", store_client.sealed(two))
    third = launch_spec(config_of(2, port, num_machines=3, num_processes=3), "train.py")
    says = r"launch: num_machines: 2 on machine 0 \(.+\), 3 on machine 2 \(.+\)\.\n(.+\n)*.* run goes on without this"
    with pytest.raises(ConfigError, match=says), meeting.opened(third, greeting(third), print):
        pass
    assert not store.check(["refused"])


def test_every_version_and_setting_that_differs_is_named():
    first = {"host": "a", "shardkit": "0.1.0", "torch": "2.13.0", "config": {"fsdp.offload_params": False, "seed": 1}}
    other = {"host": "b", "shardkit": "0.2.0", "torch": "2.13.0", "config": {"fsdp.offload_params": True, "seed": 1}}
    assert meeting.differences(first, first, 1) == []
    assert meeting.differences(first, other, 1) == [
        "launch: shardkit: 0.1.0 on machine 0 (a), 0.2.0 on machine 1 (b).",
        "launch: fsdp.offload_params: False on machine 0, True on machine 1.",
    ]


def test_another_script_or_other_arguments_on_a_machine_are_told(tmp_path):
    said = {}
    for number, (text, argument) in enumerate([("a", "1"), ("a", "1"), ("b", "1"), ("a", "2"), ("b", "1")]):
        (tmp_path / "train.py").write_text(text)
        made = launch_spec(Config(), str(tmp_path / "train.py"), [argument])
        said[number] = {**greeting(made), "host": f"n{number}"}
    assert not meeting.remarks({0: said[0], 1: said[1]})
    said[1]["python"] = "3.10.1"
    script, arguments, python = meeting.remarks(said)
    assert python.startswith("warning: Python: another on machine 1 (n1) than on machine 0 (n0); ")
    assert script.startswith(
        "warning: the script: another on machine 2 (n2), 4 (n4) than on machine 0 (n0); ranks that"
    )
    assert arguments.startswith("warning: the script's arguments: another on machine 3 (n3) than on machine 0 (n0); ")


@is_slow
def test_a_number_of_machines_that_differs_ends_all_before_the_timeout(tmp_path):
    port = free_port()
    three = ["-n", "3", "--num-machines", "3", "--main", f"127.0.0.1:{port}", "--machine-rank", "0"]
    with running(folder(tmp_path, 0), *three, script("world")) as first:
        other = launch(folder(tmp_path, 1), *flags(port, 1, script("world")))
        assert other.returncode == first.end() == 2, other.stderr + first.text()
    assert "launch: num_machines: 3 on machine 0" in other.stderr


@is_slow
def test_a_number_that_is_taken_is_refused_by_name(tmp_path):
    port = free_port()
    with running(folder(tmp_path, 0), *flags(port, 0, script("world"))) as first:
        first.wait_for("waiting for machines")
        # a second one with the number 0 on another machine: here it can only find the port taken
        again = launch(folder(tmp_path, 2), *flags(port, 0, script("world")))
        assert (again.returncode, "in use by" in again.stderr) == (4, True), again.stderr
        store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        store.set("machine/1", store_client.sealed({"host": "elsewhere", "pid": 7}))
        other = launch(folder(tmp_path, 1), *flags(port, 1, script("world")))
        first.process.kill()
    assert other.returncode == 2, other.stderr
    assert "launch: machine_rank 1 is already used by elsewhere (pid 7); give each machine a different" in other.stderr


@pytest.mark.faults
def test_what_listens_there_and_is_no_launcher_is_told(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port()))
        other.listen()
        began_s = time.monotonic()
        done = launch(tmp_path, *flags(other.getsockname()[1], 1, script("world")))
    assert done.returncode == 4, done.stderr
    assert "is not shardkit launch" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began_s < 60
