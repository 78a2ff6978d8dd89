"""`shardkit doctor`: what it finds on a machine, between ranks, and between machines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardkit.cli import main as command_line
from shardkit.config import files
from shardkit.config.schema import Config
from shardkit.distributed import process
from shardkit.doctor import findings, machine
from shardkit.doctor import ranks as doctor_ranks
from shardkit.doctor.findings import Finding, Level
from shardkit.launch import folders, meeting
from shardkit.launch.preflight import Machine
from tests.launches import Running, free_port
from tests.network import ADDRESSES, folder, two_machines

COMMAND = [sys.executable, "-m", "shardkit", "doctor", "--cpu"]
PORT = 29500


def config(**settings) -> Config:
    return files.overlaid(Config(), {name: str(value) for name, value in settings.items()})


# one machine, without ranks


def test_findings_go_over_the_wire_and_are_read():
    rows = [
        Finding("disk", "full\nreally", Level.ERROR, "free some", 1),
        Finding("cores", "2", Level.WARNING),
        Finding("a", "b"),
    ]
    assert findings.from_json(json.loads(json.dumps(findings.as_json(rows)))) == rows
    assert findings.has_error(rows) and not findings.has_error(rows[1:])
    assert findings.render(rows, 2).splitlines() == [
        "error       1  disk   full",
        "                      really",
        "                      -> free some",
        "warning   all  cores  2",
        "ok        all  a      b",
        "3 checks: 1 error, 1 warning.",
    ]
    assert findings.render(rows[2:], 1).splitlines() == ["ok       a  b", "1 check: nothing to change."]


def test_what_a_machine_lacks_is_found_with_what_to_change(tmp_path):
    (tmp_path / "file").write_text("")
    assert machine.disk(tmp_path, 1 << 20).check == "disk"
    assert not list(tmp_path.glob(".shardkit-doctor*"))
    refused = machine.disk(tmp_path / "file", 1 << 20)
    assert (refused.level, refused.found) == (Level.ERROR, f"{tmp_path / 'file'} is a file")
    small = machine.shared_memory(1 << 30, tmp_path)
    assert small.level is Level.WARNING and "--shm-size" in small.change
    assert machine.cores(config(num_processes=4), Machine((), 2)).level is Level.WARNING
    assert machine.cores(config(num_processes=2), Machine((), 2)).level is Level.OK
    broken = machine.findings(config(use_cpu=True), Machine((), 2, driver_problem="NVML failed"), tmp_path, {})
    assert [(one.level, one.found) for one in broken if one.check == "GPUs"] == [
        (Level.WARNING, "nvidia-smi fails: NVML failed")
    ]
    found = machine.configuration(config(num_processes=2, num_machines=2, use_cpu=True), Machine((), 2), {})
    assert [one.level for one in found] == [Level.ERROR] and "give --main HOST:PORT" in found[0].found


def test_addresses_that_lead_nowhere_are_found(monkeypatch):
    def level_of(host: str, number: int = 1) -> Level:
        return machine.address(config(num_machines=2, num_processes=2, main_process_ip=host, machine_rank=number))[
            0
        ].level

    assert machine.address(Config()) == []
    assert level_of("no-such-name.invalid") is Level.ERROR
    assert level_of("127.0.0.1") is Level.OK
    assert level_of("192.0.2.1", 0) in (Level.WARNING, Level.ERROR)  # RFC 5737: nobody's, and perhaps no way there
    monkeypatch.setattr(machine.addresses, "lookup_s", lambda address: 20.0)
    assert level_of("127.0.0.1") is Level.WARNING


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("0, NVIDIA H100, 4, 81559, 31, 0", Level.OK),
        ("0, NVIDIA H100, 4, 81559, 31, [N/A]", Level.OK),
        ("1, NVIDIA H100, 60000, 81559, 31, 0", Level.WARNING),
        ("2, NVIDIA H100, 4, 81559, 90, 0", Level.WARNING),
        ("3, NVIDIA H100, 4, 81559, 31, 2", Level.ERROR),
        ("Unable to determine the device handle for GPU 0000:3B:00.0: Unknown Error", Level.ERROR),
    ],
)
def test_the_health_of_a_gpu_is_read_from_nvidia_smi(line, level):
    assert machine.gpu(line).level is level


# between ranks


def test_the_difference_of_two_clocks_is_the_least_that_fits():
    assert doctor_ranks.skew([(10.0, 10.1, 10.0, 10.1)]) == 0.0
    assert doctor_ranks.skew([(15.0, 15.1, 10.0, 10.1), (20.0, 20.3, 15.0, 15.2)]) == pytest.approx(4.9)
    assert doctor_ranks.skew([(5.0, 5.1, 10.0, 10.1)]) == pytest.approx(-4.9)


def test_groups_that_are_timed():
    assert doctor_ranks.groups_of([0, 0]) == [("all ranks", None, [0, 1])]
    assert doctor_ranks.groups_of([0, 1]) == [("one rank a machine", None, [0, 1])]
    assert [members for _, _, members in doctor_ranks.groups_of([0, 0, 1, 1])] == [[0, 1, 2, 3], [0, 2], [0, 1], [2, 3]]


def test_a_slow_link_and_a_slow_machine_are_found():
    def row(number: int | None, speed: float) -> dict:
        place = {"among": "x", "machine": number, "ranks": 2, "backend": "gloo"}
        return {"kind": "all-reduce", "size_bytes": 1, "seconds": 1.0, "bytes_per_s": speed, **place}

    rows = [row(0, 1e9), row(1, 4e8), row(2, 1e9), row(None, 1e7)]
    assert [doctor_ranks.judged(one, rows).level for one in rows] == [Level.OK, Level.WARNING, Level.OK, Level.WARNING]


def test_a_run_that_would_not_start_fails_before_any_rank(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meeting, "DECLINE_S", 0.1)
    flags = ["--cpu", "-n", "2", "--num-machines", "2", "--main", "no-such-name.invalid:29500", "--machine-rank", "1"]
    assert command_line.run(["doctor", *flags, "--json"]) == 4
    out, said = capsys.readouterr()
    assert json.loads(out)["ok"] is False
    assert "the ranks are not tested" in said
    assert any("is not known here" in one["found"] for one in json.loads(out)["findings"])
    assert not list(tmp_path.iterdir())


def test_all_wrong_flags_are_told_at_once(capsys):
    wrong = ["--main", "x:99999", "--set", "foo", "--set", "mixed_precision=bf17", "--num-machines", "two"]
    assert command_line.run(["doctor", *wrong]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["--main", "--set", "--set mixed_precision", "--num-machines"]


@pytest.mark.slow
def test_the_logs_of_ranks_that_failed_stay_and_those_of_a_killed_doctor_do_not(tmp_path):
    killed = tmp_path / f"{folders.PREFIX}doctor-killed"
    killed.mkdir()
    (killed / folders.IN_USE).touch()
    variables = os.environ | {"GLOO_SOCKET_IFNAME": "nowhere", "TMPDIR": str(tmp_path)}
    words, here = [*COMMAND, "-n", "2"], folder(tmp_path, 0)
    done = subprocess.run(words, cwd=here, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 4, done.stderr
    [kept] = tmp_path.glob(f"{folders.PREFIX}*")
    assert f"logs     {kept}/rank" in done.stdout
    assert "Unable to find address for: nowhere" in "".join(log.read_text() for log in kept.glob("rank*.log"))
    assert not (kept / folders.IN_USE).exists()  # the next launch would remove it


@pytest.mark.slow
def test_one_machine_with_two_ranks(tmp_path):
    done = subprocess.run(
        [*COMMAND, "-n", "2", "--json", "--folder", "not/there"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    checks = {one["check"] for one in found["findings"]}
    assert {"disk", "shared memory", "open files", "meeting", "all-reduce, all ranks"} <= checks
    assert found["ok"] is True
    assert [row["kind"] for row in found["measured"]] == ["all-reduce", "all-gather"]
    assert all(row["bytes_per_s"] > 0 for row in found["measured"])
    assert "doctor: times all-reduce" in done.stderr
    assert not list(tmp_path.iterdir())


def examined(path: Path, is_blocked: bool) -> list[tuple[int, str]]:
    """Exit code and screen of a doctor on each of two machines."""
    with two_machines() as network:
        if is_blocked:
            network.block(1, PORT)
        flags = ["-n", "2", "--num-machines", "2", "--main", f"{ADDRESSES[0]}:{PORT}", "--machine-rank"]
        both = []
        try:
            for number in (0, 1):
                words = network.command(number, *COMMAND, *flags, str(number))
                both.append(Running(folder(path, number), words=words))
            return [(one.end(), one.text()) for one in both]
        finally:
            for one in both:
                one.close()


@pytest.mark.slow
def test_what_is_wrong_with_one_machine_is_told_on_the_others_at_once(tmp_path):
    (tmp_path / "file").touch()
    flags = ["-n", "2", "--num-machines", "2", "--main", f"127.0.0.1:{free_port()}", "--machine-rank"]
    other = Running(folder(tmp_path, 0), words=[*COMMAND, *flags, "0"])
    try:
        words = [*COMMAND, *flags, "1", "--folder", str(tmp_path / "file" / "in")]
        subprocess.run(words, cwd=folder(tmp_path, 1), capture_output=True, timeout=60, check=False)
        assert other.end() == 4
    finally:
        other.close()
    assert f": disk: {tmp_path / 'file' / 'in'} cannot be written (Not a directory)" in other.text()


@pytest.mark.slow
def test_a_wrong_file_of_one_machine_is_told_on_the_others_at_once(tmp_path):
    flags = ["-n", "2", "--num-machines", "2", "--main", f"127.0.0.1:{free_port()}", "--machine-rank"]
    (folder(tmp_path, 1) / "own.yaml").write_text("mixed_precision: bf17\n")
    other = Running(folder(tmp_path, 0), words=[*COMMAND, *flags, "0"])
    try:
        words = [*COMMAND, *flags, "1", "--config", "own.yaml"]
        one = subprocess.run(words, cwd=folder(tmp_path, 1), capture_output=True, text=True, timeout=60, check=False)
        assert (one.returncode, other.end()) == (2, 4), one.stderr + other.text()
    finally:
        other.close()
    assert "own.yaml:1:18: mixed_precision: " in one.stderr
    assert "): own.yaml:1:18: mixed_precision: " in other.text()


def folder_of(folders):
    place = process.start(Config(num_processes=2, use_cpu=True))
    return doctor_ranks.shared_folder(place, folders[place.rank], [0, 1])


@pytest.mark.parametrize("missing", [0, 1])
def test_a_shared_folder_that_a_machine_cannot_use_is_a_finding(ranks, tmp_path, missing):
    folders = [tmp_path, tmp_path]
    folders[missing] = tmp_path / "nowhere"
    for (found,) in ranks.run(2, folder_of, folders):
        assert (found.level, found.machine) == (Level.WARNING, missing)
        assert ("No such file or directory" if missing == 0 else "is another one there") in found.found
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_machines_print_what_both_have_found(tmp_path):
    for code, said in examined(tmp_path, is_blocked=False):
        assert code == 0, said
        assert f"{ADDRESSES[0]} (va" in said and f"{ADDRESSES[1]} (vb" in said
        assert "within 1 s of one another" in said
        assert "all-reduce, one rank a machine" in said
        assert "checkpoints need a folder that all machines share" in said  # each has its own working folder


@pytest.mark.faults
def test_two_machines_with_a_firewall_between_them_fail_with_address_and_port(tmp_path):
    for code, said in examined(tmp_path, is_blocked=True):
        assert code == 4, said
        assert "does not reach machine 1 (" in said and f"at {ADDRESSES[1]}:" in said
        assert "Traceback" not in said
