"""Who is there in an elastic run. Machines arrive at machine 0's store, give signs of life, and go; machine 0 admits
them and says, one after another, who trains together: the words of the run.

    Keeper   machine 0: admits, notices who has gone, says the words
    Guest    another machine: arrives, hears the words

Each has a thread that talks to the store, so that nothing else waits for the network. What is said is signed JSON.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from shardkit.errors import ConfigError, MachineError
from shardkit.launch import addresses, connectivity
from shardkit.launch.meeting import differences
from shardkit.launch.membership import Member
from shardkit.launch.store_client import BEAT_S, GOODBYE_S, POLL_S, sealed, unsealed

Word = dict[str, Any]
"""A generation (`membership.Generation.as_json`), or the end of the run: {"over": text, "code": exit code}."""

TAKEN_AFTER_BEATS = 3
"""Signs of life of a number's holder after which another machine with the number is refused; before, it may be the
successor of one that has just died."""


class Turns:
    """A thread that calls a function again and again, until it raises or is closed; then `at_end`."""

    def __init__(self, turn: Callable[[], None], at_end: Callable[[], None] = lambda: None) -> None:
        self._turn, self._at_end = turn, at_end
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkit-roster", daemon=True)
        self.error: Exception | None = None
        self.count = 0
        self.last_s = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(GOODBYE_S)  # no longer: the network may be down

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._turn()
                self.last_s = time.monotonic()
                self.count += 1
                self._closing.wait(POLL_S)
            self._at_end()
        except Exception as error:
            self.error = error


@dataclass
class Arrival:
    """What machine 0 knows of a machine that has come."""

    wanted: int | None
    greeting: dict[str, Any]
    number: int | None = None
    """Its number, once admitted."""
    is_gone: bool = False
    beat: bytes = b""
    beat_s: float = field(default_factory=time.monotonic)
    beats: int = 0
    holder_beats: dict[int, int] = field(default_factory=dict)
    """Signs of life that the holders of the wanted number had given when this machine came."""
    note: str = ""


class Keeper:
    """Machine 0's side: arrival 0 is itself."""

    def __init__(self, store: TCPStore, greeting: dict[str, Any], machines: int, lost_s: float) -> None:
        self.store = store
        self._roster = PrefixStore("roster", store)
        self._machines, self._lost_s = machines, lost_s
        self._arrivals: dict[int, Arrival] = {0: Arrival(0, greeting, number=0)}
        self._lock = threading.Lock()
        self._heard: set[int] = set()
        self._said = 0
        self._roster.add("arrivals", 0)
        self._turns = Turns(self._turn)

    def members(self) -> list[Member]:
        """The machines that are here, by number. Raises what ended the thread."""
        if self._turns.error is not None:
            raise MachineError(f"launch: the store of the machines failed: {self._turns.error}") from self._turns.error
        with self._lock:
            here = [
                Member(arrival, known.number, known.greeting["host"])
                for arrival, known in self._arrivals.items()
                if known.number is not None and not known.is_gone
            ]
        return sorted(here, key=lambda member: member.number)

    def is_gone(self, arrival: int) -> bool:
        """Whether the machine has left, or gives no sign of life any more."""
        with self._lock:
            return self._arrivals[arrival].is_gone

    def drop(self, arrivals: Collection[int], why: str) -> None:
        """Count machines as gone; one that still lives is told why. Returns when their numbers are free."""
        for arrival in arrivals:
            with self._lock:
                self._arrivals[arrival].is_gone = True
            self._roster.set(f"out/{arrival}", sealed(why))
        seen = self._turns.count
        while self._turns.count < seen + 2 and self._turns.error is None:
            time.sleep(POLL_S / 2)

    def say(self, word: Word) -> None:
        """The next word of the run."""
        self._roster.set(f"word/{self._said}", sealed(word))
        self._said += 1

    def close(self) -> None:
        """End, once those that are here have read the last word and left, or after a few seconds."""
        until = time.monotonic() + GOODBYE_S
        while len(self.members_or_none()) > 1 and time.monotonic() < until:
            time.sleep(POLL_S)
        self._turns.close()

    def members_or_none(self) -> list[Member]:
        """The machines that are here, as far as they are still known."""
        with contextlib.suppress(MachineError):
            return self.members()
        return []

    # ---- in the thread ----

    def _turn(self) -> None:
        for arrival in range(1, self._roster.add("arrivals", 0) + 1):
            if arrival not in self._heard and self._roster.check([f"arrival/{arrival}"]):
                self._heard.add(arrival)
                self._hear(arrival)
        for arrival, known in list(self._arrivals.items()):
            if arrival and not known.is_gone:
                self._look_at(arrival, known)

    def _hear(self, arrival: int) -> None:
        """A new machine: refused where it starts otherwise than this one, or is not reached."""
        try:
            said = unsealed(self._roster.get(f"arrival/{arrival}"))
            known = Arrival(said["wanted"], said["greeting"])
            place = known.greeting["place"]
            texts = differences(self._arrivals[0].greeting, known.greeting, said["wanted"] or arrival)
            problem = addresses.answers(place[0], place[1], connectivity.CONNECT_S) if place and not texts else None
        except (MachineError, KeyError, TypeError, ValueError) as error:
            self._refuse(arrival, str(error), is_config=False)
            return
        if texts:
            advice = "launch: the machines of a run must start the same; the run goes on without this one."
            self._refuse(arrival, "\n".join([*texts, advice]), is_config=True)
        elif problem:
            text = (
                f"launch: machine 0 does not reach this machine at {place[0]}:{place[1]} ({problem}); the ranks meet "
                "on any free port: let the machines of the run reach one another on all of them."
            )
            self._refuse(arrival, text, is_config=False)
        else:
            with self._lock:
                known.holder_beats = {other: one.beats for other, one in self._arrivals.items()}
                self._arrivals[arrival] = known

    def _look_at(self, arrival: int, known: Arrival) -> None:
        now = time.monotonic()
        if self._roster.check([f"beat/{arrival}"]):
            beat = self._roster.get(f"beat/{arrival}")
            if beat != known.beat:
                known.beat, known.beat_s, known.beats = beat, now, known.beats + 1
        has_left = self._roster.check([f"left/{arrival}"])
        if has_left or now - known.beat_s > self._lost_s:
            with self._lock:
                known.is_gone = True
        elif known.number is None:
            self._admit(arrival, known)

    def _admit(self, arrival: int, known: Arrival) -> None:
        """Give the machine the number that it wants, or a free one; else it waits, or is refused."""
        holders = {one.number: other for other, one in self._arrivals.items() if not one.is_gone}
        free = [number for number in range(1, self._machines) if number not in holders]
        if known.wanted is None and not free:
            self._note(arrival, known, f"all {self._machines} are there; this one replaces the first that is lost")
            return
        number = free[0] if known.wanted is None else known.wanted
        if number not in holders:
            with self._lock:
                known.number = number
            self._roster.set(f"answer/{arrival}", sealed({"number": number}))
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
            self._roster.set(f"note/{arrival}", sealed(text))

    def _refuse(self, arrival: int, text: str, is_config: bool) -> None:
        self._roster.set(f"answer/{arrival}", sealed({"refused": text, "is_config": is_config}))


class Guest:
    """The side of a machine that arrives."""

    def __init__(self, store: TCPStore, greeting: dict[str, Any], wanted: int | None, lost_s: float) -> None:
        self.store = store
        self._roster = PrefixStore("roster", store)
        self._lost_s = lost_s
        self.number: int | None = None
        self.note: str = ""
        self._words: list[Word] = []
        self._refusal: Exception | None = None
        self._beat_s = 0.0
        self.arrival = self._roster.add("arrivals", 1)
        self._roster.set(f"arrival/{self.arrival}", sealed({"wanted": wanted, "greeting": greeting}))
        self._turns = Turns(self._turn, lambda: self._roster.set(f"left/{self.arrival}", "1"))

    def word(self, index: int) -> Word | None:
        """The run's word with this index; None where it has not been said. Raises ConfigError or MachineError where
        this machine is refused or left out, MachineError where machine 0 is lost."""
        if index < len(self._words):
            return self._words[index]
        if self._refusal is not None:
            raise self._refusal
        silent_s = time.monotonic() - self._turns.last_s
        if self._turns.error is not None or silent_s > self._lost_s:
            raise MachineError(
                "launch: lost machine 0: no sign of life from the launcher there; the run ends, because its machines "
                "meet there. Start it again on all machines with --resume auto."
            )
        return None

    def is_gone(self, arrival: int) -> bool:
        """Only machine 0 knows more of another machine than the ranks' launchers tell one another."""
        return False

    def close(self) -> None:
        """Tell machine 0 that this one leaves."""
        self._turns.close()

    # ---- in the thread ----

    def _turn(self) -> None:
        now = time.monotonic()
        if now - self._beat_s > BEAT_S:
            self._beat_s = now
            self._roster.set(f"beat/{self.arrival}", f"{now:.1f}")
        if self.number is None and self._refusal is None:
            self._read_answer()
        if self._roster.check([f"out/{self.arrival}"]):
            self._refusal = MachineError(unsealed(self._roster.get(f"out/{self.arrival}")))
        while self._roster.check([f"word/{len(self._words)}"]):
            self._words.append(unsealed(self._roster.get(f"word/{len(self._words)}")))

    def _read_answer(self) -> None:
        if self._roster.check([f"answer/{self.arrival}"]):
            answer = unsealed(self._roster.get(f"answer/{self.arrival}"))
            if "refused" in answer:
                self._refusal = (ConfigError if answer["is_config"] else MachineError)(answer["refused"])
            else:
                self.number = answer["number"]
        elif self._roster.check([f"note/{self.arrival}"]):
            self.note = unsealed(self._roster.get(f"note/{self.arrival}"))
