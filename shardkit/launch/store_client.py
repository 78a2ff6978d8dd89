"""The thread on each machine that exchanges signed JSON messages through the store of machine 0."""

import contextlib
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

from shardkit import env
from shardkit.errors import ConfigError, MachineError
from shardkit.launch import names

if TYPE_CHECKING:  # it loads torch
    from torch.distributed import Store

POLL_S = 0.1
BEAT_S = 1.0
LOST_S = 30.0
"""A machine counts as lost after so long without a heartbeat."""
GOODBYE_S = 5.0
"""How long machine 0 keeps the store alive for others that have not read the last messages."""
SIGNATURE_BYTES = 64


class Alarm(str, Enum):
    """Why the ranks of all machines must end."""

    FAILURE = "a rank has failed"
    HANG = "the ranks hang"
    LOST = "a machine is lost"


class Lost(Exception):
    """Machines without heartbeat: `machines`, by number."""

    def __init__(self, machines: list[int]) -> None:
        super().__init__(f"lost machines {machines}")
        self.machines = machines


class StoreClient:
    """The thread that accesses the store, so that no other thread waits for the network."""

    def __init__(
        self,
        store: "Store",
        machine: int,
        machines: int,
        lost_s: float = LOST_S,
        is_gone: Callable[[int], bool] = lambda machine: False,
    ) -> None:
        """`is_gone`: whether machine 0 knows by other means that a machine has gone."""
        self._store, self._machine, self._machines, self._lost_s = store, machine, machines, lost_s
        self._is_gone = is_gone
        self._said: dict[str, Any] = {}
        """By name, this machine's values."""
        self._sent: set[str] = set()
        """Names of those that are in the store."""
        self._collected: dict[str, dict[int, Any]] = {}
        """On machine 0: by name, the values of machines so far."""
        self._missing: dict[str, list[int]] = {}
        """By name, the machines without a value so far."""
        self._published: dict[str, dict[int, Any]] = {}
        """By name, the values of all machines."""
        self._alarms_raised: dict[str, Alarm] = {}
        """By attempt, this machine's alarm."""
        self._watched: set[str] = set()
        """Attempts of which it asks for alarms."""
        self._alarms_heard: dict[str, Alarm] = {}
        """By attempt, the first alarm of any machine."""
        self._lost: list[int] = []
        self._beats: dict[int, tuple[bytes, float]] = {}
        """On machine 0: of each other machine, the last heartbeat and since when."""
        self._error: Exception | None = None
        self._turn_s: float | None = None
        """Since when the thread has talked to the store; None while it rests."""
        self._was_suspended = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardkit-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Machine 0 first gives the others time to read the last messages."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(GOODBYE_S)

    def enter(self, greeting: dict[str, Any]) -> None:
        """Register this machine's number. Raises ConfigError if another machine has registered it."""
        key = f"machine/{self._machine}"
        mine = sealed(greeting)
        holder = self._store.compare_set(key, "", mine)
        if holder != mine.encode():
            other = unsealed(holder)
            raise ConfigError(
                f"launch: machine_rank {self._machine} is already used by {other['host']} (pid {other['pid']}); "
                "give each machine a different number with --machine-rank; where that one was killed, start again once "
                "the others have ended for it."
            )

    def say(self, name: str, value: Any) -> None:
        """Send a value under a name, which must be used only once."""
        self._said[name] = value

    def heard(self, name: str) -> dict[int, Any] | None:
        """{machine: value} under a name; None while some are missing. Raises Lost, ConfigError, MachineError."""
        if name in self._published:
            return self._published[name]
        if self._error is not None:
            raise self._error
        if lost := self.lost():
            raise Lost(lost)
        return None

    def missing(self, name: str) -> list[int]:
        """The machines that have not yet sent a value under a name, as far as known."""
        return self._missing.get(name, [])

    def collected(self, name: str) -> dict[int, Any]:
        """The values received so far under a name. Only machine 0 has them before all have arrived."""
        return dict(self._collected.get(name, {}))

    def refuse(self, error: Exception) -> NoReturn:
        """Raise an error here and on all machines that wait."""
        self.tell_refusal(error)
        raise error

    def tell_refusal(self, error: Exception) -> None:
        """Let an error be raised on all machines that wait."""
        with contextlib.suppress(Exception):
            self._store.set("refused", sealed({"text": str(error), "is_config": isinstance(error, ConfigError)}))

    def raise_alarm(self, name: str, alarm: Alarm) -> None:
        self._alarms_raised[name] = alarm

    def hears_alarm(self, name: str) -> Alarm | None:
        self._watched.add(name)
        if self._error is not None or self.lost():
            return Alarm.LOST
        return self._alarms_heard.get(name)

    def lost(self) -> list[int]:
        """The lost machines. If the store does not answer, other machines count machine 0 as lost."""
        since_s = self._turn_s
        silent = since_s is not None and time.monotonic() - since_s > self._lost_s
        return [0] if silent and self._machine else self._lost

    # ---- in the thread ----

    def _run(self) -> None:
        beat_s = 0.0
        goodbye_s = 0.0
        try:
            while True:
                now = self._turn_s = time.monotonic()
                if self._closing.is_set():
                    goodbye_s = goodbye_s or now
                    if self._may_leave() or now - goodbye_s > GOODBYE_S:
                        return
                self._send()
                self._read()
                if now - beat_s > BEAT_S:
                    beat_s = now
                    self._beat(now)
                self._turn_s, rested_s = None, time.monotonic()
                self._closing.wait(POLL_S) if not goodbye_s else time.sleep(POLL_S)
                self._rested(time.monotonic() - rested_s)
        except (ConfigError, MachineError) as error:
            self.tell_refusal(error)
            self._error = error
            self._let_others_read()
        except Exception:  # the store is gone; where this machine stood still, because machine 0 has given it up
            self._lost = [self._machine if self._was_suspended else 0]
        finally:
            self._turn_s = None

    def _rested(self, seconds: float) -> None:
        """After a rest between two turns. A long one means that this process was suspended, perhaps with those of all
        machines (`scontrol suspend`): so long no other one is silent."""
        self._was_suspended = self._was_suspended or seconds > self._lost_s
        if seconds > BEAT_S:
            self._beats = {machine: (beat, since_s + seconds) for machine, (beat, since_s) in self._beats.items()}

    def _may_leave(self) -> bool:
        """Whether the thread may end. Machine 0 waits for the others that came, since it hosts the store."""
        if self._machine:
            self._store.set(f"left/{self._machine}", "1")
            return True
        others = [machine for machine in range(1, self._machines) if machine not in self._lost]
        here = [machine for machine in others if self._store.check([f"beat/{machine}"])]
        return all(self._store.check([f"left/{machine}"]) for machine in here)

    def _let_others_read(self) -> None:
        """Wait, on machine 0, until the others have read a refusal, or for GOODBYE_S."""
        until = time.monotonic() + GOODBYE_S
        with contextlib.suppress(Exception):  # the store is gone
            while not self._may_leave() and time.monotonic() < until:
                time.sleep(POLL_S)

    def _send(self) -> None:
        for name in [name for name in self._said if name not in self._sent]:
            self._store.set(f"said/{name}/{self._machine}", sealed(self._said[name]))
            self._sent.add(name)
        for name in [name for name in self._alarms_raised if name not in self._alarms_heard]:
            first = self._store.compare_set(f"alarm/{name}", "", sealed(self._alarms_raised[name]))
            self._alarms_heard[name] = Alarm(unsealed(first))

    def _read(self) -> None:
        if self._store.check(["refused"]):
            refusal = unsealed(self._store.get("refused"))
            raise (ConfigError if refusal["is_config"] else MachineError)(refusal["text"])
        for name in [name for name in self._watched if name not in self._alarms_heard]:
            if self._store.check([f"alarm/{name}"]):
                self._alarms_heard[name] = Alarm(unsealed(self._store.get(f"alarm/{name}")))
        for name in [name for name in self._said if name not in self._published]:
            if self._machine == 0:
                self._collect(name)
            if self._store.check([f"all/{name}"]):
                found = unsealed(self._store.get(f"all/{name}"))
                self._published[name] = {int(machine): value for machine, value in found.items()}
            elif self._machine and self._store.check([f"missing/{name}"]):
                self._missing[name] = unsealed(self._store.get(f"missing/{name}"))

    def _collect(self, name: str) -> None:
        """On machine 0: collect the values under a name, and publish them when all have arrived."""
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
        """Write a heartbeat. Machine 0 checks those of the others, and publishes the lost ones."""
        self._store.set(f"beat/{self._machine}", f"{now:.1f}")
        if self._machine:
            if self._store.check(["lost"]):
                self._lost = unsealed(self._store.get("lost"))
            return
        for machine in range(1, self._machines):
            # its launcher has ended; lost, if a message is still expected
            if self._is_gone(machine) or self._store.check([f"left/{machine}"]):
                self._beats[machine] = (b"", -self._lost_s)
            elif self._store.check([f"beat/{machine}"]):
                beat = self._store.get(f"beat/{machine}")
                if self._beats.get(machine, (b"", 0.0))[0] != beat:
                    self._beats[machine] = (beat, now)
        silent = {machine for machine, (_, since_s) in self._beats.items() if now - since_s > self._lost_s}
        lost = sorted(silent.union(self._lost))  # for good: the ranks of the others are ended for it already
        if lost != self._lost:
            self._lost = lost
            self._store.set("lost", sealed(lost))


def sealed(value: Any) -> str:
    """JSON with its signature; without a secret the signature is only a checksum."""
    text = json.dumps(value)
    return signature(text.encode()) + text


def unsealed(data: bytes) -> Any:
    """The inverse of `sealed`. Raises MachineError if it was not signed with this run's secret."""
    text = data[SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature(text).encode(), data[:SIGNATURE_BYTES]):
        raise MachineError(
            f"launch: a message in the store has an invalid signature; give all machines of the run the same "
            f"${names.SECRET}, and check which other programs use the port."
        )
    return json.loads(text)


def signature(text: bytes) -> str:
    return hmac.new((env.get(names.SECRET) or "").encode(), text, hashlib.sha256).hexdigest()
