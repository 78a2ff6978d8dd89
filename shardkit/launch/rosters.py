"""The roster of an elastic run: machines join through machine 0's store, send heartbeats, and leave. Machine 0 admits
them and publishes its decisions: which machines train together in each generation, and the end of the run.

    RosterServer   machine 0: admits machines, notices lost ones, publishes decisions
    RosterClient   another machine: joins, reads decisions

Each has a thread that uses the store, so that nothing else waits for the network. Messages are signed JSON.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from shardkit.config.host_port import joined
from shardkit.errors import ConfigError, MachineError
from shardkit.launch import addresses, connectivity
from shardkit.launch.meeting import differences, remarks
from shardkit.launch.membership import Member
from shardkit.launch.store_client import BEAT_S, GOODBYE_S, POLL_S, sealed, unsealed
from shardkit.launch.stores import Say

Decision = dict[str, Any]
"""A generation (`membership.Generation.as_json`), or the end of the run: {"over": text, "code": exit code}."""

TAKEN_AFTER_BEATS = 3
"""Heartbeats of a number's holder after which another machine with this number is refused. Until then the holder may
have died, and the other machine may be its replacement."""
SILENT_S = 2 * BEAT_S
"""A machine without a heartbeat for so long may have died. Shorter than generations.SETTLE_S."""


class PollingThread:
    """A thread that calls a function repeatedly until it raises or the thread is closed, and then `at_end`."""

    def __init__(self, function: Callable[[], None], at_end: Callable[[], None] = lambda: None) -> None:
        self._function, self._at_end = function, at_end
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkit-roster", daemon=True)
        self.error: Exception | None = None
        self.count = 0
        self._turn_s: float | None = None
        """Since when the function runs; None while the thread rests."""
        self._thread.start()

    def busy_s(self) -> float:
        """How long the function has run; 0 while the thread rests, as when this process was suspended."""
        since_s = self._turn_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def close(self) -> None:
        self._closing.set()
        self._thread.join(GOODBYE_S)  # no longer: the network may be down

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn_s = time.monotonic()
                self._function()
                self._turn_s = None
                self.count += 1
                self._closing.wait(POLL_S)
            self._at_end()
        except Exception as error:
            self.error = error


@dataclass
class Arrival:
    """What machine 0 knows of a machine that has joined."""

    wanted: int | None
    greeting: dict[str, Any]
    number: int | None = None
    """Its number, once admitted."""
    is_gone: bool = False
    beat: bytes = b""
    beat_s: float = field(default_factory=time.monotonic)
    beats: int = 0
    holder_beats: dict[int, int] = field(default_factory=dict)
    """Heartbeats counted for each machine at the time when this one joined."""
    note: str = ""


class RosterServer:
    """Machine 0's side; machine 0 itself is arrival 0."""

    def __init__(self, store: TCPStore, greeting: dict[str, Any], machines: int, lost_s: float, say: Say) -> None:
        self.store = store
        self._keys = PrefixStore("roster", store)
        self._machines, self._lost_s, self._say = machines, lost_s, say
        self._arrivals: dict[int, Arrival] = {0: Arrival(0, greeting, number=0)}
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._published = 0
        self._keys.add("arrivals", 0)
        self._thread = PollingThread(self._poll)

    def members(self) -> list[Member]:
        """The admitted machines, by number. Raises MachineError if the thread has failed."""
        if self._thread.error is not None:
            raise MachineError(
                f"launch: the store of the machines failed: {self._thread.error}"
            ) from self._thread.error
        with self._lock:
            here = [
                Member(arrival, known.number, known.greeting["host"], (known.greeting.get("endpoint") or [None])[0])
                for arrival, known in self._arrivals.items()
                if known.number is not None and not known.is_gone
            ]
        return sorted(here, key=lambda member: member.number)

    def is_gone(self, arrival: int) -> bool:
        """Whether the machine has left or is lost."""
        with self._lock:
            return self._arrivals[arrival].is_gone

    def is_silent(self, arrival: int) -> bool:
        """Whether the machine's last heartbeat is older than those of machines that are well."""
        with self._lock:
            return bool(arrival) and time.monotonic() - self._arrivals[arrival].beat_s > SILENT_S

    def drop(self, arrivals: Collection[int]) -> None:
        """Remove machines; those still alive read the reason. Returns when their numbers are free."""
        for arrival in arrivals:
            self._leave_out(arrival)
        seen = self._thread.count
        while self._thread.count < seen + 2 and self._thread.error is None:
            time.sleep(POLL_S / 2)

    def publish(self, decision: Decision) -> None:
        """Publish the next decision."""
        self._keys.set(f"decision/{self._published}", sealed(decision))
        self._published += 1

    def close(self) -> None:
        """Close after the other machines have read the last decision and left, or after a few seconds."""
        until = time.monotonic() + GOODBYE_S
        while len(self._members_unless_failed()) > 1 and time.monotonic() < until:
            time.sleep(POLL_S)
        self._thread.close()

    def _members_unless_failed(self) -> list[Member]:
        """As `members`; empty if the thread has failed."""
        with contextlib.suppress(MachineError):
            return self.members()
        return []

    # ---- in the thread ----

    def _poll(self) -> None:
        for arrival in range(1, self._keys.add("arrivals", 0) + 1):
            if arrival not in self._seen and self._keys.check([f"arrival/{arrival}"]):
                self._seen.add(arrival)
                self._check_arrival(arrival)
        for arrival, known in list(self._arrivals.items()):
            if arrival and not known.is_gone:
                self._check_life(arrival, known)

    def _check_arrival(self, arrival: int) -> None:
        """Refuse a new machine that has another configuration, or cannot be reached."""
        try:
            said = unsealed(self._keys.get(f"arrival/{arrival}"))
            known = Arrival(said["wanted"], said["greeting"])
            endpoint = known.greeting["endpoint"]
            texts = differences(self._arrivals[0].greeting, known.greeting, said["wanted"] or arrival)
            problem = (
                addresses.answers(endpoint[0], endpoint[1], connectivity.CONNECT_S) if endpoint and not texts else None
            )
        except (MachineError, KeyError, TypeError, ValueError) as error:
            self._refuse(arrival, str(error), is_config=False)
            return
        if texts:
            advice = "launch: the machines of a run must start the same; the run goes on without this one."
            self._refuse(arrival, "\n".join([*texts, advice]), is_config=True)
        elif problem:
            text = (
                f"launch: machine 0 does not reach this machine at {joined(*endpoint)} ({problem}); the ranks meet "
                "on any free port: let the machines of the run reach one another on all of them."
            )
            self._refuse(arrival, text, is_config=False)
        else:
            for remark in remarks({0: self._arrivals[0].greeting, said["wanted"] or arrival: known.greeting}):
                self._say(remark)
            with self._lock:
                known.holder_beats = {other: one.beats for other, one in self._arrivals.items()}
                self._arrivals[arrival] = known

    def _check_life(self, arrival: int, known: Arrival) -> None:
        now = time.monotonic()
        if self._keys.check([f"beat/{arrival}"]):
            beat = self._keys.get(f"beat/{arrival}")
            if beat != known.beat:
                known.beat, known.beat_s, known.beats = beat, now, known.beats + 1
        has_left = self._keys.check([f"left/{arrival}"])
        if has_left:
            with self._lock:
                known.is_gone = True
        elif now - known.beat_s > self._lost_s:
            self._leave_out(arrival)
        elif known.number is None:
            self._admit(arrival, known)

    def _leave_out(self, arrival: int) -> None:
        with self._lock:
            self._arrivals[arrival].is_gone = True
        text = (
            "launch: this machine was left out, and any ranks here were ended: machine 0 had no sign of life from it "
            f"for {self._lost_s:g} s; start it again to join."
        )
        self._keys.set(f"out/{arrival}", sealed(text))

    def _admit(self, arrival: int, known: Arrival) -> None:
        """Give the machine the number it asked for, or a free one. If there is none it waits, or is refused."""
        holders = {one.number: other for other, one in self._arrivals.items() if not one.is_gone}
        free = [number for number in range(1, self._machines) if number not in holders]
        if known.wanted is None and not free:
            self._note(arrival, known, f"all {self._machines} are there; this one replaces the first that is lost")
            return
        number = free[0] if known.wanted is None else known.wanted
        if number not in holders:
            with self._lock:
                known.number = number
            self._keys.set(f"answer/{arrival}", sealed({"number": number}))
            return
        holder = self._arrivals[holders[number]]
        who = f"{holder.greeting['host']} (pid {holder.greeting['pid']})"
        if not number or holder.beats - known.holder_beats.get(holders[number], 0) >= TAKEN_AFTER_BEATS:
            text = f"launch: machine_rank {number} is taken by {who}; give each machine a number of its own"
            self._refuse(arrival, f"{text} with --machine-rank, or none.", is_config=True)
            with self._lock:
                known.is_gone = True
        else:
            self._note(arrival, known, f"number {number} is that of {who}, until that one is lost or leaves")

    def _note(self, arrival: int, known: Arrival, text: str) -> None:
        if text != known.note:
            known.note = text
            self._keys.set(f"note/{arrival}", sealed(text))

    def _refuse(self, arrival: int, text: str, is_config: bool) -> None:
        self._keys.set(f"answer/{arrival}", sealed({"refused": text, "is_config": is_config}))


class RosterClient:
    """The side of a machine that joins."""

    def __init__(self, store: TCPStore, greeting: dict[str, Any], wanted: int | None, lost_s: float) -> None:
        self.store = store
        self._keys = PrefixStore("roster", store)
        self._lost_s = lost_s
        self.number: int | None = None
        self.note: str = ""
        self._decisions: list[Decision] = []
        self._refusal: Exception | None = None
        self._beat_s = 0.0
        self.arrival = self._keys.add("arrivals", 1)
        self._keys.set(f"arrival/{self.arrival}", sealed({"wanted": wanted, "greeting": greeting}))
        self._thread = PollingThread(self._poll, lambda: self._keys.set(f"left/{self.arrival}", "1"))

    def decision(self, index: int) -> Decision | None:
        """The decision with this index, or None if it is not published yet. Raises ConfigError or MachineError if this
        machine is refused or was left out, MachineError if machine 0 is lost or has another secret."""
        if index < len(self._decisions):
            return self._decisions[index]
        if self._refusal is not None:
            raise self._refusal
        if isinstance(self._thread.error, MachineError):  # a message that is signed with another secret
            raise self._thread.error
        if self._thread.error is not None or self._thread.busy_s() > self._lost_s:
            raise MachineError(
                "launch: lost machine 0: no sign of life from the launcher there; the run ends, because its machines "
                "meet there. Start it again on all machines with --resume auto."
            )
        return None

    def is_gone(self, arrival: int) -> bool:
        """Always False: only machine 0 watches the heartbeats of the roster."""
        return False

    def close(self) -> None:
        """Leave the roster."""
        self._thread.close()

    # ---- in the thread ----

    def _poll(self) -> None:
        now = time.monotonic()
        if now - self._beat_s > BEAT_S:
            self._beat_s = now
            self._keys.set(f"beat/{self.arrival}", f"{now:.1f}")
        if self.number is None and self._refusal is None:
            self._read_answer()
        if self._keys.check([f"out/{self.arrival}"]):
            self._refusal = MachineError(unsealed(self._keys.get(f"out/{self.arrival}")))
        while self._keys.check([f"decision/{len(self._decisions)}"]):
            self._decisions.append(unsealed(self._keys.get(f"decision/{len(self._decisions)}")))

    def _read_answer(self) -> None:
        if self._keys.check([f"answer/{self.arrival}"]):
            answer = unsealed(self._keys.get(f"answer/{self.arrival}"))
            if "refused" in answer:
                self._refusal = (ConfigError if answer["is_config"] else MachineError)(answer["refused"])
            else:
                self.number = answer["number"]
        elif self._keys.check([f"note/{self.arrival}"]):
            self.note = unsealed(self._keys.get(f"note/{self.arrival}"))
