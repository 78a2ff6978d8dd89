"""How the machines of a run agree: a store on machine 0, and a thread on each machine that uses it.

    machine 0        hosts the store for all attempts, collects each machine's messages, and publishes them
    other machines   send messages, and read what was published

Messages are JSON and never executed; with $SHARDKIT_SECRET they are signed. The ranks use another store, a new one for
each attempt. A single machine has only that one, on its loopback address.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store

from shardkit import env
from shardkit.config.host_port import joined
from shardkit.config.schema import Config
from shardkit.errors import ConfigError, MachineError, ShardkitError
from shardkit.launch import addresses, connectivity, stores
from shardkit.launch.spec import LaunchSpec, Rendezvous, rendezvous_of
from shardkit.launch.store_client import POLL_S, Alarm, Lost, StoreClient, unsealed
from shardkit.launch.stores import Announcement, Say
from shardkit.wording import first_few

LOOK_S = 5.0
"""How often a machine 0 that waits looks whether another one answers at its address."""
DECLINE_S = 5.0
"""How long a machine that has failed its checks tries to tell the others: they are usually started within seconds."""


@dataclass
class Meeting:
    """One machine's side. With a single machine `client` is None.

    `address` and `port`: where the ranks meet; `listens_on`: what machine 0 opens for them.
    """

    machine: int
    machines: int
    address: str
    listens_on: tuple[str, int]
    client: StoreClient | None = None
    hosts: list[str] = field(default_factory=list)
    endpoints: dict[int, Any] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    """Addresses of the other machines, as far as they are known."""
    numbers: list[int] = field(default_factory=list)
    """The machines' own numbers, where some of a run's machines are not here."""
    port: int = 0
    wants_new_world: Callable[[], bool] | None = None
    """Asked now and then while ranks train: whether to tell them now to save and make way for another world. None:
    there is no other."""
    _store: Store | None = None

    def begin(self, name: str) -> None:
        """Wait until all machines begin an attempt. The ranks get a new store, without keys of an earlier one."""
        self._store = None  # a configured port is free again
        if self.machine == 0:
            self._store = stores.hosted(*self.listens_on)
            self.port = self._store.port
        self.port = self.gather(f"{name}-start", self.port)[0]
        if self.client is not None:
            self._reach_store(name)

    def _reach_store(self, name: str) -> None:
        """Raises MachineError, on all machines, if one cannot reach the ranks' store: its ranks would wait forever."""
        address = addresses.resolve(self.address) or self.address
        problem = addresses.answers(address, self.port, connectivity.CONNECT_S) if self.machine else None
        problems = self.gather(f"{name}-store", problem)
        texts = [
            f"launch: {self.name_of(machine)} does not reach the ranks' store, on {self.name_of(0)} at "
            f"{joined(address, self.port)} ({problem}); it listens on a free port, another one for each start of the "
            "ranks: let the machines of the run reach one another on all ports."
            for machine, problem in sorted(problems.items())
            if problem
        ]
        if texts:
            raise MachineError("\n".join(texts))

    def gather(self, name: str, value: Any, waits: Callable[[float, list[int]], None] | None = None) -> dict[int, Any]:
        """Each machine's value under this name. `waits(seconds, missing)` is called while machines are missing.

        Raises Lost if a machine is lost; ConfigError or MachineError with the text of a machine that refuses.
        """
        if self.client is None:
            return {0: value}
        self.client.say(name, value)
        started_s = time.monotonic()
        while (found := self.client.heard(name)) is None:
            if waits is not None:
                waits(time.monotonic() - started_s, self.client.missing(name))
            time.sleep(POLL_S / 2)
        return found

    def raise_alarm(self, name: str, alarm: Alarm) -> None:
        """Tell the other machines that this attempt has failed."""
        if self.client is not None:
            self.client.raise_alarm(name, alarm)

    def hears_alarm(self, name: str) -> Alarm | None:
        """The first alarm of any machine, or None."""
        return self.client.hears_alarm(name) if self.client is not None else None

    @contextlib.contextmanager
    def telling_what_lacks(self) -> Iterator[None]:
        """A context in which what this machine lacks (space, processes) ends the others with its text: they would only
        find that it is gone. Not in an elastic run, which goes on without it."""
        try:
            yield
        except (MachineError, OSError) as error:
            if self.client is not None and not self.numbers:
                text = str(error).removeprefix("launch: ")
                self.client.tell_refusal(MachineError(f"launch: {self.name_of(self.machine)}: {text}"))
            raise

    def name_of(self, machine: int) -> str:
        """The machine's number and, once known, its name."""
        number = self.numbers[machine] if self.numbers else machine
        return f"machine {number}{f' ({self.hosts[machine]})' if self.hosts else ''}"

    def names_of(self, machines: list[int]) -> str:
        """The names of several machines."""
        return " and ".join(map(self.name_of, machines))


@contextlib.contextmanager
def opened(spec: LaunchSpec, greeting: dict[str, Any], say: Say) -> Iterator[Meeting]:
    """The meeting, after all machines have joined. Raises MachineError or ConfigError."""
    if spec.num_machines == 1:
        yield Meeting(0, 1, addresses.LOOPBACK, (addresses.LOOPBACK, spec.rendezvous.port))
        return
    host, port = spec.rendezvous.host, spec.rendezvous.port
    if spec.machine_rank == 0:
        store = stores.hosted_by_machine_0(host, port, spec.launch.bind_address, say)
    else:
        who = f"machine {spec.machine_rank} of {spec.num_machines}"
        store = stores.reached(host, port, spec.launch.meet_timeout_s, say, who, "machine 0", stores.NO_MACHINE_0)
    client = StoreClient(store, spec.machine_rank, spec.num_machines)
    address = addresses.reached_by(host, store.host) if spec.machine_rank else host
    meeting = Meeting(spec.machine_rank, spec.num_machines, address, (store.host, 0), client)
    try:
        assemble(meeting, greeting, say, spec.launch.meet_timeout_s, spec.rendezvous)
        yield meeting
    finally:
        client.close()


def decline(config: Config, reason: str) -> None:
    """Tell the other machines of a run that this one has failed its own checks, so that they end instead of waiting
    for it. For those that wait already, or come within DECLINE_S.

    Does nothing where the rendezvous cannot be reached, or where another launch has this machine's number.
    """
    greeting = {"host": socket.gethostname(), "pid": os.getpid(), "problem": reason}
    with contextlib.suppress(ShardkitError, Lost, RuntimeError):  # RuntimeError: of torch, where the store goes away
        if config.machine_rank == 0:
            _decline_to_all(config, greeting)
        else:
            _decline_to_machine_0(config, greeting)


def _decline_to_all(config: Config, greeting: dict[str, Any]) -> None:
    rendezvous = rendezvous_of(config)
    address = stores.listening_address(rendezvous.host, config.shardkit.launch.bind_address, _unsaid)
    client = StoreClient(stores.hosted(address, rendezvous.port), 0, config.num_machines)
    with contextlib.suppress(ConfigError):
        refuse_differences(client, {0: greeting})
    time.sleep(DECLINE_S)  # who comes meanwhile reads it in the store


def _decline_to_machine_0(config: Config, greeting: dict[str, Any]) -> None:
    rendezvous, until = rendezvous_of(config), time.monotonic() + DECLINE_S
    store = stores.reached(rendezvous.host, rendezvous.port, DECLINE_S, _unsaid, "this machine", "machine 0", "")
    client = StoreClient(store, config.machine_rank, config.num_machines)
    client.enter(greeting)
    client.say("greeting", greeting)
    client.start()
    try:
        while client.heard("greeting") is None and time.monotonic() < until:  # raises once machine 0 has read it
            time.sleep(POLL_S)
    finally:
        client.close()


def _unsaid(text: str) -> None:
    """The machine's own problems are told, not those of telling them."""


def assemble(meeting: Meeting, greeting: dict[str, Any], say: Say, timeout_s: float, rendezvous: Rendezvous) -> None:
    """Wait for all machines, and check that they fit together. Raises MachineError or ConfigError."""
    try:
        with connectivity.open_to_others(meeting.address) as endpoint:
            greet(meeting, {**greeting, "endpoint": endpoint}, say, timeout_s, rendezvous)
            refuse_who_is_not_reached(meeting, say)
    except Lost as lost:
        raise MachineError(
            f"launch: lost {meeting.names_of(lost.machines)} before the ranks started: the launcher there has ended, "
            "or gives no sign of life; start the same command again on all machines."
        ) from None


def greet(meeting: Meeting, greeting: dict[str, Any], say: Say, timeout_s: float, rendezvous: Rendezvous) -> None:
    """Wait for all machines, and check that their versions and configurations are equal."""
    client = meeting.client
    assert client is not None
    announcement, looked_s = Announcement(say), 0.0

    def waits(seconds: float, missing: list[int]) -> None:
        nonlocal looked_s
        refuse_differences(client, client.collected("greeting"))
        if meeting.machine == 0 and seconds - looked_s > LOOK_S:
            refuse_second_machine_0(rendezvous, greeting)
            looked_s = seconds
        here, who = meeting.machines - len(missing), ", ".join(map(str, missing))
        if seconds > timeout_s:
            text = f"launch: {here} of {meeting.machines} machines came within {timeout_s:g} s (missing: {who}); "
            client.refuse(MachineError(text + "start the same command there, each with its --machine-rank."))
        announcement.make(f"waiting for machines, {here} of {meeting.machines} are here (missing: {who})")

    client.enter(greeting)
    client.start()  # not before: it would give signs of life, and leave, in the name of a machine with the same number
    found = meeting.gather("greeting", greeting, waits)
    if meeting.machine not in found:  # they are fewer, and have begun
        texts = differences(found[0], greeting, meeting.machine)
        raise ConfigError([*texts, "launch: the run goes on without this one."])
    refuse_differences(client, found)
    for remark in remarks(found):
        say(remark)
    meeting.hosts = [found[machine]["host"] for machine in sorted(found)]
    meeting.endpoints = {machine: found[machine]["endpoint"] for machine in found}
    endpoints = [endpoint for machine, endpoint in meeting.endpoints.items() if machine != meeting.machine]
    meeting.others = [endpoint[0] for endpoint in endpoints if endpoint]


def refuse_second_machine_0(rendezvous: Rendezvous, greeting: dict[str, Any]) -> None:
    """On machine 0, while it waits: raises MachineError where another machine has come by now that is machine 0, at the
    address by which all reach it. A proxy at that address may lead to this machine itself."""
    store = stores.elsewhere(rendezvous.host, rendezvous.port)
    if store is not None and store.check(["machine/0"]):
        there = unsealed(store.get("machine/0"))
        if any(there[key] != greeting[key] for key in ("host", "pid")):
            raise stores.second_machine_0(rendezvous.host, rendezvous.port)


def refuse_who_is_not_reached(meeting: Meeting, say: Say) -> None:
    """Raises MachineError, on all machines, if one cannot reach another. Only warns if the user chose the network
    interface of the ranks, which is not tried here."""
    known = {machine: meeting.name_of(machine) for machine in meeting.endpoints}
    chosen = [name for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if env.get(name)]
    found = meeting.gather("reach", [connectivity.problem_here(meeting.machine, meeting.endpoints, known), chosen])
    problems = [problem for _, (problem, _) in sorted(found.items()) if problem]
    if not problems:
        return
    chosen = sorted({name for _, names in found.values() for name in names})
    if not chosen:
        raise MachineError("\n".join(f"launch: {problem}." for problem in problems))
    for problem in problems:
        say(f"warning: {problem}, or over what {' and '.join(chosen)} says.")


def refuse_differences(client: StoreClient, found: dict[int, Any]) -> None:
    """End the meeting if a machine's versions or configuration differ from machine 0's."""
    known = sorted(found) if 0 in found else []
    declined = [
        f"launch: machine {machine} ({found[machine]['host']}): {text}"
        for machine in known
        for text in found[machine].get("problem", "").splitlines()
    ]
    if declined:
        client.refuse(ConfigError([*declined, "launch: that machine does not come; nothing was started here either."]))
    texts = [text for machine in known for text in differences(found[0], found[machine], machine)]
    if texts:
        client.refuse(ConfigError([*texts, "launch: the machines of a run must start the same; nothing was started."]))


def remarks(found: dict[int, Any]) -> list[str]:
    """Warnings of what usually is the same on all machines of a run, from their greetings."""
    texts = []
    for key, what in (("script", "the script"), ("arguments", "the script's arguments"), ("python", "Python")):
        others = [machine for machine in sorted(found) if found[machine].get(key) != found[0].get(key)]
        if others:
            names = first_few([f"{machine} ({found[machine]['host']})" for machine in others], 4)
            texts.append(
                f"warning: {what}: another on machine {names} than on machine 0 ({found[0]['host']}); ranks that run "
                "different code may wait for one another, or train something else. Start the same on all machines."
            )
    return texts


def differences(first: dict[str, Any], other: dict[str, Any], machine: int) -> list[str]:
    """How a machine's versions and configuration differ from machine 0's, one text each."""
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
