"""TCPStore over the network: one process hosts it on one address, the others connect or report why they cannot."""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

from shardkit.config.host_port import joined
from shardkit.errors import MachineError
from shardkit.launch import addresses

ANNOUNCE_S = 5.0
CONNECT_S = 2.0
GREETING_S = 15.0
"""How long a store may take to answer after the connection, beside the lookups of names."""
STORE_TIMEOUT = timedelta(seconds=300)
NO_MACHINE_0 = "start the same command there with --machine-rank 0, check --main, and let the port through"
"""What to do where machine 0 does not answer."""

Say = Callable[[str], None]


def hosted(address: str, port: int, timeout: timedelta = STORE_TIMEOUT) -> TCPStore:
    """A store in this process that listens on one address only; port 0: any free port. By default torch's TCPStore
    listens on all addresses."""
    try:
        listener = addresses.listen(address, port)
    except OSError as error:
        raise MachineError(
            f"launch: cannot listen on {joined(address, port)} ({error.strerror}); choose another port with "
            "--main HOST:PORT, or, if that is machine 0 of this run, give this one its own --machine-rank."
        ) from None
    with listener:
        return TCPStore(
            address,
            listener.getsockname()[1],
            None,
            True,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )


def hosted_by_machine_0(host: str, port: int, bind_address: str | None, say: Say) -> TCPStore:
    """Machine 0's store, which other machines reach at this host and port. Raises MachineError where another machine
    has hosted one there: two would be machine 0, each of a run of its own."""
    listens_on = listening_address(host, bind_address, say)
    if elsewhere(host, port) is not None:
        raise second_machine_0(host, port)
    return hosted(listens_on, port)


def elsewhere(host: str, port: int) -> TCPStore | None:
    """The store that answers there, where that is not an address of this machine. A proxy accepts connections also
    where nothing is behind it."""
    address = addresses.resolve(host)
    if address is None or addresses.is_here(address) or addresses.answers(address, port, CONNECT_S) is not None:
        return None
    with contextlib.suppress(MachineError):
        return connected(address, port, lambda text: None)
    return None


def second_machine_0(host: str, port: int) -> MachineError:
    """The error of a machine 0 where another machine answers at the host and port of machine 0."""
    return MachineError(
        f"launch: machine_rank: 0 is that of another machine, which answers at {joined(host, port)} (got 0 here, too: "
        f"{joined(addresses.resolve(host) or host, port)} is not this machine); give this one its own number with "
        "--machine-rank."
    )


def listening_address(host: str, bind_address: str | None, say: Say, given_by: str = "--main") -> str:
    """The address to listen on: the configured one, else that of `host`, by which others reach this machine.
    `given_by`: the flag or variable with the host. Raises MachineError if the configured one is not of this machine.

    All addresses if `host` cannot be used here: it is unknown, of a proxy, or loopback.
    """
    address, advice = addresses.resolve(bind_address or host), ""
    if bind_address and (address is None or not addresses.is_here(address)):
        raise MachineError(
            f"launch: shardkit.launch.bind_address is not an address of this machine (got {bind_address}); give one "
            "that is, or leave it out to listen on that of --main."
        )
    if address is None:
        problem = "cannot be resolved"
    elif not addresses.is_here(address):
        problem = f"is {'' if address == host else f'{address}, which is '}not an address of this machine"
        advice = " If this is not machine 0, give it its own number with --machine-rank."
    elif addresses.is_loopback(address) and not bind_address and not addresses.means_loopback(host):
        problem = f"resolves to {address}, which other machines cannot reach (see /etc/hosts)"
    else:
        return address
    text = f"warning: {given_by} {host} {problem}; listening on all interfaces"
    is_launch = given_by == "--main"
    say(f"{text} (to select one: shardkit.launch.bind_address).{advice}" if is_launch else f"{text}.")
    return addresses.EVERYWHERE


def reached(host: str, port: int, timeout_s: float, say: Say, who: str, whom: str, advice: str) -> TCPStore:
    """A client of the store of `whom`, when it answers. Raises MachineError after `timeout_s`."""
    announcement = Announcement(say)
    until = time.monotonic() + timeout_s
    while True:
        problems = []
        for address in addresses.all_of(host):
            found = addresses.answers(address, port, CONNECT_S)
            if found is None:
                return connected(address, port, say)
            where = "" if address == host else f"{address}: "
            own = ", on this machine itself" if addresses.is_here(address) else ""
            problems.append(f"{where}{found}{own}")
        problem = "; ".join(problems) or "its name cannot be resolved"
        if time.monotonic() > until:
            raise MachineError(
                f"launch: {who} did not reach {whom} at {joined(host, port)} within {timeout_s:g} s ({problem}); "
                f"{advice}."
            )
        announcement.make(f"waiting for {whom} at {joined(host, port)} ({problem})")
        time.sleep(0.5)


def connected(address: str, port: int, say: Say) -> TCPStore:
    """A client of the store at an address. Raises MachineError if another program listens there."""
    lookup_s = addresses.lookup_s(address)
    if lookup_s > addresses.SLOW_LOOKUP_S:
        say(
            f"warning: this machine takes {lookup_s:.0f} s to look up the name of {address}, as torch does for each "
            "connection, so the start will be slow; add it to /etc/hosts, or correct the DNS servers in "
            "/etc/resolv.conf."
        )
    patience_s = GREETING_S + 2 * lookup_s
    found: list[TCPStore] = []
    problems = [f"no answer in {patience_s:.0f} s"]

    def connect() -> None:
        try:
            found.append(TCPStore(address, port, None, False, STORE_TIMEOUT, wait_for_workers=False))
        except Exception as error:
            problems.insert(0, str(error).splitlines()[0])

    thread = threading.Thread(target=connect, daemon=True)  # torch waits forever for a server that does not answer
    thread.start()
    thread.join(patience_s)
    if not found:
        raise MachineError(
            f"launch: the program on {joined(address, port)} is not shardkit launch ({problems[0]}); check --main."
        )
    return found[0]


class Announcement:
    """A message that is repeated every few seconds while waiting."""

    def __init__(self, say: Say) -> None:
        self._say, self._started_s, self._next_s = say, time.monotonic(), ANNOUNCE_S / 2

    def make(self, text: str) -> None:
        waited_s = time.monotonic() - self._started_s
        if waited_s >= self._next_s:
            self._next_s += ANNOUNCE_S
            self._say(f"launch: {text}, {waited_s:.0f} s")
