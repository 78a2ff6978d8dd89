"""How the machines of a run agree: a store on machine 0, and a thread on each machine that talks to it.

    machine 0   hosts the store for all attempts, collects what each machine says, and publishes it
    the others  say, and read what was published

What is said is JSON, and is never executed; with $SHARDKIT_SECRET it is signed. The ranks meet in another store, a new
one for each attempt. One machine alone has that one only, on its loopback address.
"""

import contextlib
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import Store, TCPStore

from shardkit import env
from shardkit.errors import ConfigError, MachineError
from shardkit.launch import addresses, names
from shardkit.launch.spec import LaunchSpec

POLL_S = 0.1
BEAT_S = 1.0
LOST_S = 30.0
"""So long without a sign of life, and a machine counts as gone."""
ANNOUNCE_S = 5.0
CONNECT_S = 2.0
GREETING_S = 15.0
"""How long machine 0's store may take to answer, once it is reached."""
STORE_TIMEOUT = timedelta(seconds=300)
SIGNATURE_BYTES = 64
GOODBYE_S = 5.0
"""How long machine 0 keeps the store for others that have not yet read the end."""

Say = Callable[[str], None]


class Lost(Exception):
    """Machines that give no sign of life any more: `machines`, by number."""

    def __init__(self, machines: list[int]) -> None:
        super().__init__(f"lost machines {machines}")
        self.machines = machines


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


def refuse_differences(line: "Line", found: dict[int, Any]) -> None:
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


# ---- the line to the store ----


class Line:
    """The thread that talks to the store, so that nothing else ever waits for the network."""

    def __init__(self, store: Store, machine: int, machines: int) -> None:
        self._store, self._machine, self._machines = store, machine, machines
        self._said: dict[str, Any] = {}
        self._published: dict[str, dict[int, Any]] = {}
        self._collected: dict[str, dict[int, Any]] = {}
        self._missing: dict[str, list[int]] = {}
        self._alarms_raised: set[str] = set()
        self._alarms_heard: set[str] = set()
        self._watched: set[str] = set()
        self._sent: set[str] = set()
        self._lost: list[int] = []
        self._error: Exception | None = None
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._turn_s = time.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkit-line", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End, after machine 0 has given the others time to read the last that was published."""
        self._closing.set()
        self._thread.join(GOODBYE_S)

    def enter(self, greeting: dict[str, Any]) -> None:
        """Take this machine's number. Raises ConfigError where another one has it."""
        key = f"machine/{self._machine}"
        mine = sealed(greeting)
        holder = self._store.compare_set(key, "", mine)
        if holder != mine.encode():
            other = unsealed(holder)
            raise ConfigError(
                f"launch: machine_rank {self._machine} is taken by {other['host']} (pid {other['pid']}); "
                "give each machine a number of its own with --machine-rank."
            )

    def say(self, name: str, value: Any) -> None:
        """Say something under a name that is used once."""
        self._said[name] = value

    def heard(self, name: str) -> dict[int, Any] | None:
        """What all have said under the name; None while some are missing. Raises Lost, ConfigError, MachineError."""
        if name in self._published:
            return self._published[name]
        if self._error is not None:
            raise self._error
        if lost := self.lost():
            raise Lost(lost)
        return None

    def missing(self, name: str) -> list[int]:
        """Who has not yet said something under the name, as far as known."""
        return self._missing.get(name, [])

    def collected(self, name: str) -> dict[int, Any]:
        """What has been said so far under the name, as far as this machine knows: machine 0 knows it first."""
        return dict(self._collected.get(name, {}))

    def refuse(self, error: Exception) -> NoReturn:
        """Raise it here and on all machines that wait."""
        self._tell_refusal(error)
        raise error

    def _tell_refusal(self, error: Exception) -> None:
        with contextlib.suppress(Exception):
            self._store.set("refused", sealed({"text": str(error), "is_config": isinstance(error, ConfigError)}))

    def raise_alarm(self, name: str) -> None:
        self._alarms_raised.add(name)

    def hears_alarm(self, name: str) -> bool:
        self._watched.add(name)
        return name in self._alarms_heard or self._error is not None or bool(self.lost())

    def lost(self) -> list[int]:
        """Machines that are gone: for the others, machine 0 when the store does not answer."""
        silent = time.monotonic() - self._turn_s > LOST_S
        return [0] if silent and self._machine else self._lost

    # ---- in the thread ----

    def _run(self) -> None:
        beat_s = 0.0
        goodbye_s = 0.0
        try:
            while True:
                now = time.monotonic()
                if self._closing.is_set():
                    goodbye_s = goodbye_s or now
                    if self._may_leave() or now - goodbye_s > GOODBYE_S:
                        return
                self._send()
                self._read()
                if now - beat_s > BEAT_S:
                    beat_s = now
                    self._beat(now)
                self._turn_s = time.monotonic()
                self._closing.wait(POLL_S) if not goodbye_s else time.sleep(POLL_S)
        except (ConfigError, MachineError) as error:
            self._tell_refusal(error)
            self._error = error
        except Exception:  # the store is gone
            self._lost = [0]

    def _may_leave(self) -> bool:
        """Machine 0 is the last: its store is everybody's."""
        if self._machine:
            self._store.set(f"left/{self._machine}", "1")
            return True
        return all(self._store.check([f"left/{machine}"]) for machine in range(1, self._machines))

    def _send(self) -> None:
        for name in [name for name in self._said if name not in self._sent]:
            self._store.set(f"said/{name}/{self._machine}", sealed(self._said[name]))
            self._sent.add(name)
        for name in [name for name in self._alarms_raised if name not in self._alarms_heard]:
            self._store.set(f"alarm/{name}", "1")
            self._alarms_heard.add(name)

    def _read(self) -> None:
        if self._store.check(["refused"]):
            refusal = unsealed(self._store.get("refused"))
            raise (ConfigError if refusal["is_config"] else MachineError)(refusal["text"])
        for name in [name for name in self._watched if name not in self._alarms_heard]:
            if self._store.check([f"alarm/{name}"]):
                self._alarms_heard.add(name)
        for name in [name for name in self._said if name not in self._published]:
            if self._machine == 0:
                self._collect(name)
            if self._store.check([f"all/{name}"]):
                found = unsealed(self._store.get(f"all/{name}"))
                self._published[name] = {int(machine): value for machine, value in found.items()}
            elif self._machine and self._store.check([f"missing/{name}"]):
                self._missing[name] = unsealed(self._store.get(f"missing/{name}"))

    def _collect(self, name: str) -> None:
        """Machine 0: take what has come, and publish it once all have said it."""
        found = self._collected.setdefault(name, {})
        for machine in range(self._machines):
            key = f"said/{name}/{machine}"
            if machine not in found and self._store.check([key]):
                found[machine] = unsealed(self._store.get(key))
        missing = [machine for machine in range(self._machines) if machine not in found]
        if missing != self._missing.get(name):
            self._missing[name] = missing
            self._store.set(f"missing/{name}", sealed(missing))
        if not missing:
            self._store.set(f"all/{name}", sealed(found))

    def _beat(self, now: float) -> None:
        """Give a sign of life; machine 0 looks for those of the others, and tells who has stopped."""
        self._store.set(f"beat/{self._machine}", f"{now:.1f}")
        if self._machine:
            if self._store.check(["lost"]):
                self._lost = unsealed(self._store.get("lost"))
            return
        for machine in range(1, self._machines):
            if self._store.check([f"left/{machine}"]):  # its launcher ended: too early, if something is still awaited
                self._beats[machine] = (b"", -LOST_S)
            elif self._store.check([f"beat/{machine}"]):
                beat = self._store.get(f"beat/{machine}")
                if self._beats.get(machine, (b"", 0.0))[0] != beat:
                    self._beats[machine] = (beat, now)
        lost = [machine for machine, (_, since_s) in self._beats.items() if now - since_s > LOST_S]
        if lost != self._lost:
            self._lost = lost
            self._store.set("lost", sealed(lost))


def sealed(value: Any) -> str:
    """JSON with its signature, or with a check sum where there is no secret."""
    text = json.dumps(value)
    return signature(text.encode()) + text


def unsealed(data: bytes) -> Any:
    """What was sealed. Raises MachineError where it was not signed with this run's secret."""
    text = data[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature(text).encode(), data[:SIGNATURE_BYTES]):
        raise MachineError(
            f"launch: a message in the store was not written by a machine of this run; give all of them the same "
            f"${names.SECRET}, and check who else reaches the port."
        )
    return json.loads(text)


def signature(text: bytes) -> str:
    return hmac.new((env.get(names.SECRET) or "").encode(), text, hashlib.sha256).hexdigest()
