"""Two network namespaces of this machine as two machines of a network, as far as the system lets us make them."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
HOSTS = Path("/etc/netns")
"""`ip netns exec` shows the files in the folder of a namespace as those of /etc (ip-netns(8))."""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class Network:
    """Two machines, by number: the names of their namespaces and of their interfaces."""

    names: tuple[str, str]
    links: tuple[str, str]

    def command(self, machine: int, *words: str) -> list[str]:
        """A command as that machine runs it."""
        return ["ip", "netns", "exec", self.names[machine], *words]

    def cut(self) -> None:
        """Take the link between them down."""
        run("ip", "-n", self.names[0], "link", "set", self.links[0], "down")

    def name(self, machine: int, hosts: str) -> None:
        """Give the machine an /etc/hosts of its own."""
        (HOSTS / self.names[machine]).mkdir(parents=True, exist_ok=True)
        (HOSTS / self.names[machine] / "hosts").write_text(hosts)

    def block(self, machine: int, port: int) -> None:
        """A firewall on a machine, made of routes: TCP leaves it by this port, or towards it, and by no other."""
        rule = ["ip", "-n", self.names[machine], "rule", "add", "ipproto", "tcp"]
        run(*rule, "pref", "1", "sport", str(port), "lookup", "main")
        run(*rule, "pref", "2", "dport", str(port), "lookup", "main")
        run(*rule, "pref", "3", "to", f"{ADDRESSES[0]}/24", "unreachable")


@contextlib.contextmanager
def two_machines() -> Iterator[Network]:
    """Made here, and gone afterwards; skips the test where they cannot be made."""
    number = os.getpid()
    network = Network((f"sk{number}a", f"sk{number}b"), (f"va{number % 10**8}", f"vb{number % 10**8}"))
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux and root")
    try:
        try:
            _make(network)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces cannot be made here ({error})")
        yield network
    finally:
        for name in network.names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=20)
            shutil.rmtree(HOSTS / name, ignore_errors=True)


def _make(network: Network) -> None:
    for name in network.names:
        run("ip", "netns", "add", name)
    (a, b), (at_a, at_b) = network.names, network.links
    run("ip", "link", "add", at_a, "netns", a, "type", "veth", "peer", "name", at_b, "netns", b)
    for name, link, address in zip(network.names, network.links, ADDRESSES, strict=True):
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
        run("ip", "-n", name, "link", "set", link, "up")
        run("ip", "-n", name, "link", "set", "lo", "up")


def folder(path: Path, machine: int) -> Path:
    """A machine's own working folder."""
    (path / f"machine-{machine}").mkdir(exist_ok=True)
    return path / f"machine-{machine}"
