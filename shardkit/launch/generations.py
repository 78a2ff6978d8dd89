"""An elastic run: machines join and leave. Each change starts a new generation, a world of ranks that continues from
the newest checkpoint.

    run(spec)     this machine's part of the run
    Leader.lead   machine 0: decides who trains, generation by generation, until the run is done or given up
    follow(..)    another machine: reads the decisions and trains in the generations that include it

Only machine 0 decides, and only its ranks commit checkpoints: a machine that is cut off from it ends its ranks. The
ranks of a generation are run by `attempts.attempted`, as in any launch.
"""

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import EXIT_BUG, EXIT_INTERRUPTED, MachineError, Preempted, RankFailure, ShardkitError
from shardkit.launch import addresses, attempts, connectivity, diagnosis, membership, signals
from shardkit.launch.attempts import LostMachines, say
from shardkit.launch.membership import Generation, Member
from shardkit.launch.restarts import WITHOUT_CHECKPOINT, Restarts
from shardkit.launch.spec import LaunchSpec, greeting
from shardkit.launch.start_methods import Start
from shardkit.wording import first_few

if TYPE_CHECKING:  # they load torch
    from torch.distributed import TCPStore

    from shardkit.launch.meeting import Meeting
    from shardkit.launch.rosters import Decision, RosterClient, RosterServer

POLL_S = 0.1
SETTLE_S = 3.0
"""After a machine joins, wait this long for further ones before the ranks are stopped for a larger world."""
ASKED_CODE = 128 + signal.SIGUSR1
"""Exit code of a script without an Accelerator whose ranks were stopped for another generation."""


@dataclass(frozen=True)
class EndedGeneration:
    """How a generation ended: its error if any, the signals that users sent by the place of the machine, the newest
    checkpoint, and whether ranks were killed because they took too long to stop."""

    error: ShardkitError | None
    stops: dict[int, int]
    committed_step: int
    was_killed: bool = False


def run(spec: LaunchSpec) -> Path:
    """Returns the run's folder on this machine after the run has succeeded.

    Raises what `attempts.run` raises, on all machines; ConfigError or MachineError if this machine is refused.
    """
    with attempts.around(spec) as (start, log_dir), signals.end_it_with_an_error():
        from shardkit.launch.rosters import RosterServer

        with joined(spec) as roster:
            if isinstance(roster, RosterServer):
                Leader(spec, roster, start, log_dir).lead()
            else:
                follow(spec, roster, start, log_dir)
    return log_dir


@contextlib.contextmanager
def joined(spec: LaunchSpec) -> "Iterator[RosterServer | RosterClient]":
    """This machine's side of the roster. Raises MachineError if machine 0 cannot be reached."""
    from shardkit.launch import stores
    from shardkit.launch.rosters import RosterClient, RosterServer

    host, port, lost_s = spec.rendezvous.host, spec.rendezvous.port, spec.launch.lost_timeout_s
    mine = greeting(spec)
    del mine["config"]["shardkit.checkpoint.resume"]  # a machine that comes later is often started with auto
    roster: RosterServer | RosterClient
    store = hosted_here(spec)
    is_first = store is not None
    if store is None:
        who = f"machine {spec.machine_rank}" if spec.has_number else "this machine"
        store = stores.reached(host, port, spec.launch.meet_timeout_s, say, who, "machine 0", stores.NO_MACHINE_0)
        host = addresses.reached_by(host, store.host)
    with connectivity.open_to_others(host) as endpoint:
        if is_first:
            roster = RosterServer(store, mine, spec.num_machines, lost_s, say)
        else:
            roster = RosterClient(
                store, {**mine, "endpoint": endpoint}, spec.machine_rank if spec.has_number else None, lost_s
            )
        try:
            yield roster
        finally:
            roster.close()


def hosted_here(spec: LaunchSpec) -> "TCPStore | None":
    """Machine 0's store if this is machine 0, else None. Without --machine-rank the machine with --main's address is
    machine 0, unless another launch there uses the port already."""
    from shardkit.launch import stores

    host, port = spec.rendezvous.host, spec.rendezvous.port
    if spec.has_number and spec.machine_rank:
        return None
    if not spec.has_number and not addresses.is_here(addresses.resolve(host)):
        return None
    try:
        return stores.hosted_by_machine_0(host, port, spec.launch.bind_address, say)
    except MachineError:
        if spec.has_number:
            raise
        return None


class Leader:
    """Machine 0's decisions during the run."""

    def __init__(self, spec: LaunchSpec, roster: "RosterServer", start: Start, log_dir: Path) -> None:
        self._spec, self._roster, self._start, self._log_dir = spec, roster, start, log_dir
        self._sizes = membership.usable_sizes(spec.config)
        self._restarts = Restarts(spec.launch.max_restarts)
        self._number = 0
        self._why = ""

    def lead(self) -> None:
        """Run generations until the run ends; publishes its end in any case."""
        try:
            while self._goes_on(self._generation()):
                self._number += 1
        except BaseException as error:
            self._roster.publish(_end_by(error))
            raise
        self._roster.publish({"over": "", "code": 0})

    def _generation(self) -> Generation:
        """Publish the next generation. Raises MachineError if too few machines join in time."""
        members = self._gathered()
        size = membership.best_size(self._sizes, len(members))
        resume = self._restarts.resume(self._spec.config.shardkit.checkpoint.resume)
        generation = Generation(self._number, tuple(members[:size]), tuple(members[size:]), resume, self._why)
        self._roster.publish(generation.as_json())
        say(membership.announcement(self._spec, generation, self._sizes))
        return generation

    def _gathered(self) -> list[Member]:
        """The machines for the next generation, once they are enough. The first one also waits for all machines, for
        `join_timeout_s`."""
        from shardkit.launch.stores import Announcement

        limits, announcement = self._spec.launch, Announcement(say)
        began_s, enough_s = time.monotonic(), None
        why = f"{self._why}; " if self._why else ""
        while True:
            members, now = self._roster.members(), time.monotonic()
            if membership.best_size(self._sizes, len(members)):
                enough_s = enough_s or now
                wait_s = 0.0 if self._number else limits.join_timeout_s
                if len(members) == self._spec.num_machines or now - enough_s >= wait_s:
                    return members
                here = f"{len(members)} of {self._spec.num_machines} are here ({named(members)})"
                announcement.make(f"waiting for more machines, {here}; starting with them after {wait_s:g} s")
            else:
                enough_s = None
                needed = min(size for size, problem in self._sizes.items() if problem is None)
                if now - began_s > limits.meet_timeout_s:
                    raise MachineError(
                        f"launch: {why}{len(members)} of {needed} machines that a world needs came within "
                        f"{limits.meet_timeout_s:g} s ({named(members)}); start the same command on others."
                    )
                here = f"{len(members)} {'is' if len(members) == 1 else 'are'} here ({named(members)})"
                announcement.make(f"{why}waiting for machines, {here}, a world needs {needed}")
            time.sleep(POLL_S)

    def _goes_on(self, generation: Generation) -> bool:
        """Run one generation; returns whether another one follows. Raises the error that ends the run."""
        newcomers = Newcomers(self._roster, self._sizes, generation, self._restarts.in_vain < WITHOUT_CHECKPOINT)
        ended = run_generation(
            self._spec, generation, 0, self._roster, self._start, self._log_dir, newcomers.want_a_world
        )
        error = ended.error
        self._restarts.saw_checkpoint(ended.committed_step)
        if error is None:
            return False
        if 0 in ended.stops:
            raise error
        if isinstance(error, LostMachines):
            self._without([generation.members[place] for place in error.machines], "lost", error)
        elif ended.stops:
            self._without([generation.members[place] for place in ended.stops], "stopped by a signal", error)
        elif newcomers.why and makes_way(ended):
            self._change(newcomers.why, error)
        elif self._restarts.allows(error):
            self._restarts.count(error)
            self._why = self._restarts.announcement(error)
        else:
            raise self._restarts.final(error)
        return True

    def _without(self, gone: list[Member], how: str, error: ShardkitError) -> None:
        """Prepare a generation without these machines."""
        self._roster.drop([member.arrival for member in gone])
        self._change(f"{' and '.join(map(str, gone))}: {how}", error)

    def _change(self, why: str, error: ShardkitError) -> None:
        """Prepare another generation. Raises RankFailure after too many without a new checkpoint."""
        if self._restarts.in_vain >= WITHOUT_CHECKPOINT:
            raise RankFailure(
                f"launch: {why}; given up after {self._restarts.in_vain + 1} worlds in a row without a new checkpoint; "
                "save more often (accelerator.save_state()).",
                error.exit_code,
            )
        self._restarts.in_vain += 1
        newest = self._restarts.newest_step
        self._why = f"{why}; {f'going on from step {newest}' if newest >= 0 else 'no checkpoint yet'}"


def named(members: list[Member]) -> str:
    """These machines; of many the first ones."""
    return first_few(map(str, members), 4)


class Newcomers:
    """Machines that join while a generation trains; decides whether its ranks stop for a larger world."""

    def __init__(
        self, roster: "RosterServer", sizes: dict[int, str | None], generation: Generation, may_interrupt: bool
    ) -> None:
        self._roster, self._sizes, self._generation, self._may_interrupt = roster, sizes, generation, may_interrupt
        self._known = {member.arrival for member in (*generation.members, *generation.spares)}
        self._last_s = time.monotonic()
        self.why = ""
        """Why the ranks were stopped for another generation; "" if they were not."""

    def want_a_world(self) -> bool:
        """Whether to stop the ranks now: a larger world is possible, and no further machine has joined for a while."""
        members, now = self._roster.members(), time.monotonic()
        for member in members:
            if member.arrival not in self._known:
                self._known.add(member.arrival)
                self._last_s = now
                say(f"launch: {member} has come")
        # one that died after it came would keep the ranks of a larger world waiting until it counts as lost
        members = [member for member in members if not self._roster.is_silent(member.arrival)]
        is_larger = membership.best_size(self._sizes, len(members)) > len(self._generation.members)
        if self.why or not (is_larger and self._may_interrupt) or now - self._last_s < SETTLE_S:
            return False
        who = [str(member) for member in members if self._generation.index_of(member.arrival) is None]
        self.why = f"{' and '.join(who)} came"
        say(f"launch: {self.why}; telling the ranks to save and make way for a larger world")
        return True


def makes_way(ended: EndedGeneration) -> bool:
    """Whether the ranks ended because they were stopped for another generation: they saved, or were ended or killed."""
    error = ended.error
    return isinstance(error, Preempted) or ended.was_killed or (error is not None and error.exit_code == ASKED_CODE)


def follow(spec: LaunchSpec, roster: "RosterClient", start: Start, log_dir: Path) -> None:
    """The part of a machine other than 0: trains in the generations that include it, until the run ends."""
    sizes = membership.usable_sizes(spec.config)
    error: ShardkitError | None = None
    training = 0
    for index in itertools.count():
        decision = next_decision(roster, index, training)
        if "over" in decision:
            end(decision, error)
            return
        generation = membership.generation_from(decision)
        place = generation.index_of(roster.arrival)
        if place is None:
            training = len(generation.members)
            continue
        say(membership.announcement(spec, generation, sizes))
        ended = run_generation(spec, generation, place, roster, start, log_dir)
        error, training = ended.error, 0
        if error is None:
            return
        if place in ended.stops or (isinstance(error, LostMachines) and {0, place} & {*error.machines}):
            raise error


def next_decision(roster: "RosterClient", index: int, training: int) -> "Decision":
    """Waits for the next decision and logs what it waits for. `training`: how many machines train without this one
    meanwhile; that wait may last as long as the run, so it is logged once."""
    from shardkit.launch.stores import Announcement

    announcement, note = Announcement(say), ""
    while (decision := roster.decision(index)) is None:
        now = roster.note
        if roster.number is None:
            announcement.make(f"waiting to be admitted by machine 0{f' ({now})' if now else ''}")
        elif not training:
            announcement.make("waiting for machine 0 to start the ranks")
        else:
            who = "1 machine trains" if training == 1 else f"{training} machines train"
            now = f"{who}; this one takes part once they make way for more, or one is lost"
        if now and now != note:
            note = now
            say(f"launch: {now}")
        time.sleep(POLL_S)
    return decision


def _end_by(error: BaseException) -> "Decision":
    """The end of the run by this error of machine 0."""
    if isinstance(error, ShardkitError):
        return {"over": str(error), "code": error.exit_code}
    if isinstance(error, KeyboardInterrupt):
        return {"over": "Ctrl-C", "code": EXIT_INTERRUPTED}
    return {"over": repr(error), "code": EXIT_BUG}


def end(decision: "Decision", error: ShardkitError | None) -> None:
    """Raises the error that the run ended with, if any."""
    text, code = decision["over"], decision["code"]
    if not code:
        return
    if error is not None and error.exit_code == code:
        raise error
    raise RankFailure(f"launch: the run ended on machine 0: {text.removeprefix('launch: ')}", code)


def run_generation(
    spec: LaunchSpec,
    generation: Generation,
    place: int,
    roster: "RosterServer | RosterClient",
    start: Start,
    log_dir: Path,
    wants_new_world: Callable[[], bool] | None = None,
) -> EndedGeneration:
    """Runs this machine's ranks of a generation. Raises MachineError if they cannot be started."""
    own = membership.spec_for(spec, generation, place)
    with generation_meeting(own, generation, place, roster, wants_new_world) as machines:
        try:
            attempt, error = attempts.attempted(own, start, machines, log_dir, generation.number)
        except LostMachines as lost:
            return EndedGeneration(lost, {place: lost.stop} if lost.stop else {}, lost.committed_step)
    was_killed = error is not None and diagnosis.diagnose(attempt.outcomes).outcome.was_killed
    return EndedGeneration(error, attempt.stops, attempt.committed_step, was_killed)


@contextlib.contextmanager
def generation_meeting(
    own: LaunchSpec,
    generation: Generation,
    place: int,
    roster: "RosterServer | RosterClient",
    wants_new_world: Callable[[], bool] | None,
) -> "Iterator[Meeting]":
    """The meeting of a generation's machines, under a key prefix of its own in the store."""
    from torch.distributed import PrefixStore

    from shardkit.launch.meeting import Meeting
    from shardkit.launch.store_client import StoreClient

    members = generation.members
    if len(members) == 1:
        loopback = addresses.LOOPBACK
        yield Meeting(0, 1, loopback, (loopback, 0), wants_new_world=wants_new_world)
        return
    store = PrefixStore(f"generation-{generation.number}", roster.store)
    lost_s = own.launch.lost_timeout_s
    client = StoreClient(store, place, len(members), lost_s, lambda other: roster.is_gone(members[other].arrival))
    client.start()
    try:
        yield Meeting(
            place,
            len(members),
            addresses.reached_by(own.rendezvous.host, roster.store.host) if place else own.rendezvous.host,
            (roster.store.host, 0),
            client,
            [member.host for member in members],
            others=[member.address for member in members if member.address and member is not members[place]],
            numbers=[member.number for member in members],
            wants_new_world=wants_new_world,
        )
    finally:
        client.close()
