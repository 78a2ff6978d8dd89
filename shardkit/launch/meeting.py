"""How the machines of a run agree: a store on machine 0, and a thread on each machine that talks to it.

    machine 0   hosts the store for all attempts, collects what each machine says, and publishes it
    the others  say, and read what was published

What is said is JSON, and is never executed; with $SHARDKIT_SECRET it is signed. The ranks meet in another store, a new
one for each attempt. One machine alone has that one only, on its loopback address.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore

from shardkit.errors import ConfigError, MachineError
from shardkit.launch import addresses
from shardkit.launch.line import POLL_S, Line
from shardkit.launch.spec import LaunchSpec

ANNOUNCE_S = 5.0
CONNECT_S = 2.0
GREETING_S = 15.0
"""How long machine 0's store may take to answer, once it is reached."""
STORE_TIMEOUT = timedelta(seconds=300)

Say = Callable[[str], None]


@dataclass
class Meeting:
    """One machine's side. For a single machine there is no `line`: it agrees with itself.

    `address` and `port`: where the ranks meet; `listens_on`: what machine 0 opens for them.
    """

    machine: int
    machines: int
    address: str
    listens_on: tuple[str, int]
    line: "Line | None" = None
    hosts: list[str] = field(default_factory=list)
    port: int = 0
    _store: Store | None = None

    def begin(self, name: str) -> None:
        """Wait until all machines begin an attempt, with a store of its own for the ranks: none sees older keys."""
        self._store = None  # a configured port is free again
        if self.machine == 0:
            self._store = hosted(*self.listens_on)
            self.port = self._store.port
        self.port = self.gather(f"{name}-start", self.port)[0]

    def gather(self, name: str, value: Any, waits: Callable[[float, list[int]], None] | None = None) -> dict[int, Any]:
        """What every machine says under this name, by machine. `waits(seconds, missing)` is called meanwhile.

        Raises Lost where a machine is gone; ConfigError or MachineError with the words of a machine that refuses.
        """
        if self.line is None:
            return {0: value}
        self.line.say(name, value)
        started_s = time.monotonic()
        while (found := self.line.heard(name)) is None:
            if waits is not None:
                waits(time.monotonic() - started_s, self.line.missing(name))
            time.sleep(POLL_S / 2)
        return found

    def raise_alarm(self, name: str) -> None:
        """Let the other machines know that this attempt has failed."""
        if self.line is not None:
            self.line.raise_alarm(name)

    def hears_alarm(self, name: str) -> bool:
        """Whether some machine has raised it, or is gone."""
        return self.line is not None and self.line.hears_alarm(name)

    def name_of(self, machine: int) -> str:
        """The machine's number and, once known, its name."""
        return f"machine {machine}{f' ({self.hosts[machine]})' if self.hosts else ''}"


@contextlib.contextmanager
def opened(spec: LaunchSpec, greeting: dict[str, Any], say: Say) -> Iterator[Meeting]:
    """The meeting of all machines, from when they all are there. Raises MachineError or ConfigError in words."""
    if spec.num_machines == 1:
        yield Meeting(0, 1, addresses.LOOPBACK, (addresses.LOOPBACK, spec.rendezvous.port))
        return
    until = time.monotonic() + spec.launch.meet_timeout_s
    store = host_for_others(spec, say) if spec.machine_rank == 0 else reached(spec, say, until)
    line = Line(store, spec.machine_rank, spec.num_machines)
    listens_on = (store.host, 0)
    meeting = Meeting(spec.machine_rank, spec.num_machines, spec.rendezvous.host, listens_on, line)
    line.start()
    try:
        greet(meeting, greeting, say, spec.launch.meet_timeout_s)
        yield meeting
    finally:
        line.close()


# ---- the store ----


def hosted(address: str, port: int) -> TCPStore:
    """A store in this process that listens on one address only; port 0: a free one. torch's own listens on all."""
    try:
        listener = addresses.listen(address, port)
    except OSError as error:
        raise MachineError(
            f"launch: cannot listen on {address}:{port} ({error.strerror}); choose another port with --main HOST:PORT."
        ) from None
    with listener:
        return TCPStore(
            address,
            listener.getsockname()[1],
            None,
            True,
            STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=True,
        )


def host_for_others(spec: LaunchSpec, say: Say) -> TCPStore:
    """The store of machine 0, on the configured address, or on that which the others are told to call."""
    host, port = spec.rendezvous.host, spec.rendezvous.port
    address = addresses.resolve(spec.launch.bind_address or host)
    if address is None or not addresses.is_here(address):
        known = f"is {address}, which is no address of this machine" if address else "is not known here"
        say(f"warning: --main {host} {known}; listening on all interfaces (shardkit.launch.bind_address chooses one).")
        address = "0.0.0.0"
    return hosted(address, port)


def reached(spec: LaunchSpec, say: Say, until: float) -> TCPStore:
    """The store of machine 0, as soon as it answers. Raises MachineError where it does not in time."""
    host, port = spec.rendezvous.host, spec.rendezvous.port
    announcement = Announcement(say)
    while True:
        address = addresses.resolve(host)
        problem = addresses.answers(address, port, CONNECT_S) if address else "its name is not known"
        if problem is None and address is not None:
            return connected(address, port)
        if time.monotonic() > until:
            raise MachineError(
                f"launch: machine {spec.machine_rank} of {spec.num_machines} did not reach machine 0 at {host}:{port} "
                f"within {spec.launch.meet_timeout_s:g} s ({problem}); start the same command there with "
                "--machine-rank 0, check --main, and let the port through."
            )
        announcement.make(f"waiting for machine 0 at {host}:{port} ({problem})")
        time.sleep(0.5)


def connected(address: str, port: int) -> TCPStore:
    """A client of the store there. Raises MachineError where something else listens."""
    found: list[TCPStore] = []
    problems = [f"no answer in {GREETING_S:g} s"]

    def connect() -> None:
        try:
            found.append(TCPStore(address, port, None, False, STORE_TIMEOUT, wait_for_workers=False))
        except Exception as error:
            problems.insert(0, str(error).splitlines()[0])

    thread = threading.Thread(target=connect, daemon=True)  # torch waits for ever for one that accepts and is silent
    thread.start()
    thread.join(GREETING_S)
    if not found:
        raise MachineError(
            f"launch: what listens on {address}:{port} is no shardkit launch ({problems[0]}); check --main."
        )
    return found[0]


class Announcement:
    """A line that is said again every few seconds, for as long as there is something to wait for."""

    def __init__(self, say: Say) -> None:
        self._say, self._started_s, self._next_s = say, time.monotonic(), ANNOUNCE_S / 2

    def make(self, text: str) -> None:
        waited_s = time.monotonic() - self._started_s
        if waited_s >= self._next_s:
            self._next_s += ANNOUNCE_S
            self._say(f"launch: {text}, {waited_s:.0f} s")


def greet(meeting: Meeting, greeting: dict[str, Any], say: Say, timeout_s: float) -> None:
    """Wait until all machines are there, and agree that they start the same."""
    line = meeting.line
    assert line is not None
    announcement = Announcement(say)

    def waits(seconds: float, missing: list[int]) -> None:
        refuse_differences(line, line.collected("greeting"))
        here, who = meeting.machines - len(missing), ", ".join(map(str, missing))
        if seconds > timeout_s:
            text = f"launch: {here} of {meeting.machines} machines came within {timeout_s:g} s (missing: {who}); "
            line.refuse(MachineError(text + "start the same command there, each with its --machine-rank."))
        announcement.make(f"waiting for machines, {here} of {meeting.machines} are here (missing: {who})")

    line.enter(greeting)
    found = meeting.gather("greeting", greeting, waits)
    refuse_differences(line, found)
    meeting.hosts = [found[machine]["host"] for machine in sorted(found)]


def refuse_differences(line: Line, found: dict[int, Any]) -> None:
    """End the meeting where one of the machines that have come starts otherwise than machine 0."""
    known = sorted(found) if 0 in found else []
    problems = [text for machine in known for text in differences(found[0], found[machine], machine)]
    if problems:
        line.refuse(ConfigError([*problems, "launch: the machines of a run must start the same; nothing was started."]))


def differences(first: dict[str, Any], other: dict[str, Any], machine: int) -> list[str]:
    """What a machine starts otherwise than machine 0, in words."""
    texts = [
        f"launch: {what}: {first.get(what)} on machine 0 ({first['host']}), {other.get(what)} on machine {machine} "
        f"({other['host']})."
        for what in ("shardkit", "torch", "num_machines", "num_processes")
        if first.get(what) != other.get(what)
    ]
    ours, theirs = first.get("config", {}), other.get("config", {})
    for key in sorted({*ours, *theirs}):
        if ours.get(key) != theirs.get(key) and key not in {"num_machines", "num_processes"}:
            texts.append(f"launch: {key}: {ours.get(key)} on machine 0, {theirs.get(key)} on machine {machine}.")
    return texts
