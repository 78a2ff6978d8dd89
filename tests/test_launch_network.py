"""Launches on two machines of a network that fails: network namespaces stand for machines."""

import contextlib
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launches import Running, command, script
from tests.network import ADDRESSES, Network, folder, two_machines

PORT = 29500


@contextlib.contextmanager
def launched(network: Network, path: Path, what: str, hang_timeout_s: int) -> Iterator[tuple[Running, Running]]:
    """network.py on both machines."""
    flags = ["-n", "2", "--num-machines", "2", "--main", f"{ADDRESSES[0]}:{PORT}"]
    flags += ["--set", f"shardkit.launch.hang_timeout_s={hang_timeout_s}"]
    both = []
    try:
        for machine in (0, 1):
            words = command(*flags, "--machine-rank", str(machine), script("network"), what)
            both.append(Running(folder(path, machine), words=network.command(machine, *words)))
        yield both[0], both[1]
    finally:
        for one in both:
            one.close()


@pytest.fixture
def network():
    with two_machines() as made:
        yield made


@pytest.mark.slow
@pytest.mark.fault_row(45)
def test_a_rank_that_stops_on_another_machine_is_named_on_both(network, tmp_path):
    with launched(network, tmp_path, "stop", 4) as both:
        codes = [one.end() for one in both]
    assert codes == [4, 4], both[0].text() + both[1].text()
    for one in both:
        said = one.text()
        assert re.search(
            r"rank 0  step 5  \w+  for \d+ s  at \S*network.py:\d+ in <module>, waiting for its peers", said
        )
        assert re.search(r"rank 1  step 5  forward  for \d+ s  STOPPED \(SIGSTOP\)\n  First to stop: rank 1", said), (
            said
        )
        assert said.count("/rank*.stack") == 2, "of both machines"
        assert "Traceback" not in said


@pytest.mark.faults
@pytest.mark.fault_row(45)
def test_a_cut_link_is_told_on_both_sides(network, tmp_path):
    with launched(network, tmp_path, "train", 600) as both:
        for one in both:
            one.wait_for("trains")
        began_s = time.monotonic()
        network.cut()
        codes = [one.end() for one in both]
    assert codes == [4, 4]
    assert time.monotonic() - began_s < 200  # of the 600 s that it trains; a launcher notices in 30
    for machine, one in enumerate(both):
        assert f"launch: lost machine {1 - machine} ({socket.gethostname()}): no sign of life" in one.text()
        assert "Traceback" not in one.text() and "frame #" not in one.text()


@pytest.mark.slow
@pytest.mark.fault_row(45)
def test_a_firewall_that_lets_only_the_main_port_through_ends_both_with_address_and_port(network, tmp_path):
    network.block(1, PORT)
    with launched(network, tmp_path, "train", 600) as both:
        codes = [one.end() for one in both]
    assert codes == [4, 4]
    for one in both:
        said = one.text()
        unanswered = rf"machine 0 \S+ does not reach machine 1 \S+ at {ADDRESSES[1]}:\d+ \(no answer in 3 s\); the"
        unreachable = rf"machine 1 \S+ does not reach machine 0 \S+ at {ADDRESSES[0]}:\d+ \(Network is unreachable\)"
        assert re.search(f"launch: {unanswered}", said) and re.search(f"launch: {unreachable}", said), said
        assert "Traceback" not in said and "frame #" not in said


@pytest.mark.faults
@pytest.mark.fault_row(45)
def test_where_the_interface_is_chosen_the_ranks_store_is_still_tried(network, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    network.block(1, PORT)
    with launched(network, tmp_path, "train", 600) as both:
        codes = [one.end() for one in both]
    assert codes == [4, 4]
    for one in both:
        said = one.text()
        assert re.search(r"warning: machine 0 .* or over what GLOO_SOCKET_IFNAME says", said), said
        store = rf"the ranks' store, on machine 0 \S+ at {ADDRESSES[0]}:\d+ \(Network is unreachable\)"
        assert re.search(rf"launch: machine 1 \S+ does not reach {store}", said), said
        assert "Traceback" not in said and "frame #" not in said


@pytest.mark.slow
def test_a_first_machine_whose_own_name_means_loopback_trains_with_the_others(network, tmp_path):
    network.name(0, f"127.0.0.1 localhost\n127.0.1.1 first {socket.gethostname()}\n")  # as Debian writes it
    network.name(1, f"127.0.0.1 localhost\n{ADDRESSES[0]} first\n127.0.1.1 {socket.gethostname()}\n")
    flags = ["-n", "2", "--num-machines", "2", "--main", f"first:{PORT}", "--machine-rank"]
    both: list[Running] = []
    try:
        for machine in (0, 1):
            words = network.command(machine, *command(*flags, str(machine), script("world")))
            both.append(Running(folder(tmp_path, machine), words=words))
        codes = [one.end() for one in both]
    finally:
        for one in both:
            one.close()
    assert codes == [0, 0], both[0].text() + both[1].text()
    assert "first resolves to 127.0.1.1, which other machines cannot reach" in both[0].text()


@pytest.mark.slow
def test_ranks_of_torchrun_meet_where_each_machine_takes_its_own_name_for_loopback(network, tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    words += ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
    both: list[Running] = []
    try:
        for machine in (0, 1):
            network.name(machine, f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")
            here = folder(tmp_path, machine)
            (here / "shardkit.yaml").write_text("distributed_type: FSDP\nuse_cpu: true\n")
            own = [*words, "--node-rank", str(machine), script("elastic"), str(tmp_path / "run"), "1", "0"]
            both.append(Running(here, words=network.command(machine, *own)))
        codes = [one.end() for one in both]
    finally:
        for one in both:
            one.close()
    assert codes == [0, 0], both[0].text() + both[1].text()


@pytest.mark.slow
@pytest.mark.parametrize("machines", [["--num-machines", "2"], ["--nnodes", "1:2"]])
def test_a_second_machine_0_is_refused_where_the_first_one_answers(network, tmp_path, machines):
    flags = ["-n", "2", *machines, "--main", f"{ADDRESSES[0]}:{PORT}", "--machine-rank", "0", script("world")]
    both = [Running(folder(tmp_path, 0), words=network.command(0, *command(*flags)))]
    try:
        both[0].wait_for("waiting for")
        both.append(Running(folder(tmp_path, 1), words=network.command(1, *command(*flags))))
        assert both[1].end() == 4, both[1].text()
    finally:
        for one in both:
            one.close()
    said = rf"launch: machine_rank: 0 is that of another machine, which answers at {ADDRESSES[0]}:{PORT} \(got 0 here"
    assert re.search(said, both[1].text()), both[1].text()


@pytest.mark.slow
def test_a_wrong_machine_0_that_came_first_ends_once_the_right_one_answers(network, tmp_path):
    flags = ["-n", "2", "--num-machines", "2", "--main", f"{ADDRESSES[0]}:{PORT}", "--machine-rank"]
    both = [Running(folder(tmp_path, 1), words=network.command(1, *command(*flags, "0", script("world"))))]
    try:
        both[0].wait_for("waiting for")
        both.append(Running(folder(tmp_path, 0), words=network.command(0, *command(*flags, "0", script("world")))))
        assert both[0].end() == 4, both[0].text()
        assert "launch: machine_rank: 0 is that of another machine, which answers at" in both[0].text()
        again = command(*flags, "1", script("world"))
        both.append(Running(folder(tmp_path, 1), words=network.command(1, *again)))
        assert [one.end() for one in both[1:]] == [0, 0], both[1].text() + both[2].text()
    finally:
        for one in both:
            one.close()
