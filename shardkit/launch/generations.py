"""An elastic run: machines come and go, and each change makes a new world that goes on from the newest checkpoint.

    run(spec)     this machine's part, from arrival to the last word
    lead(..)      machine 0: who trains together, one generation after another, until the run is done or given up
    follow(..)    another machine: hears who trains, and takes part where it is named

Machine 0 alone decides, and its ranks commit the checkpoints: a machine that is cut off from it ends its ranks. What
ranks of one generation do is `elastic.attempted`, as in any launch.
"""

import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.errors import MachineError, Preempted, RankFailure, ShardkitError
from shardkit.launch import addresses, connectivity, diagnosis, elastic, membership
from shardkit.launch.elastic import LostMachines, say
from shardkit.launch.membership import Generation, Member
from shardkit.launch.restarts import WITHOUT_CHECKPOINT, Restarts
from shardkit.launch.spec import LaunchSpec
from shardkit.launch.start_methods import Start

if TYPE_CHECKING:  # they load torch
    from torch.distributed import TCPStore

    from shardkit.launch.meeting import Meeting
    from shardkit.launch.rosters import Guest, Keeper, Word

POLL_S = 0.1
SETTLE_S = 3.0
"""How long machines that come one after another are waited for before the ranks make way for them."""
ASKED_CODE = 128 + signal.SIGUSR1
"""What a script without an Accelerator ends with where its ranks were told to make way."""


@dataclass(frozen=True)
class Ended:
    """What came of a generation: the error where it did not end well, the signal with which somebody ended it by the
    place of the machine, the newest checkpoint, and whether ranks were killed as too slow to leave."""

    error: ShardkitError | None
    stops: dict[int, int]
    committed_step: int
    was_killed: bool = False


def run(spec: LaunchSpec) -> Path:
    """The run's folder on this machine, after the run came to a good end.

    Raises what `elastic.run` raises, on all machines that are there; ConfigError or MachineError where this one is
    refused.
    """
    with elastic.around(spec) as (start, log_dir), signals_that_end_it():
        from shardkit.launch.rosters import Keeper

        with arrived(spec) as roster:
            if isinstance(roster, Keeper):
                Leader(spec, roster, start, log_dir).lead()
            else:
                follow(spec, roster, start, log_dir)
    return log_dir


@contextlib.contextmanager
def arrived(spec: LaunchSpec) -> "Iterator[Keeper | Guest]":
    """Machine 0's side of the meeting, or another machine's. Raises MachineError where machine 0 is not reached."""
    from shardkit.launch import stores
    from shardkit.launch.rosters import Guest, Keeper

    host, port, lost_s = spec.rendezvous.host, spec.rendezvous.port, spec.launch.lost_timeout_s
    greeting = elastic.greeting(spec)
    del greeting["config"]["shardkit.checkpoint.resume"]  # a machine that comes later is often started with auto
    with connectivity.open_to_others(host) as place:
        store = hosted_here(spec)
        roster: Keeper | Guest
        if store is not None:
            roster = Keeper(store, greeting, spec.num_machines, lost_s)
        else:
            who = f"machine {spec.machine_rank}" if spec.has_number else "this machine"
            advice = "start the same command there with --machine-rank 0, check --main, and let the port through"
            store = stores.reached(host, port, spec.launch.meet_timeout_s, say, who, "machine 0", advice)
            roster = Guest(store, {**greeting, "place": place}, spec.machine_rank if spec.has_number else None, lost_s)
        try:
            yield roster
        finally:
            roster.close()


def hosted_here(spec: LaunchSpec) -> "TCPStore | None":
    """The store of machine 0, where this is machine 0; else None. Without a number the machine at --main's address is,
    unless another launch there has the port."""
    from shardkit.launch import stores

    host, port = spec.rendezvous.host, spec.rendezvous.port
    if spec.has_number and spec.machine_rank:
        return None
    if not spec.has_number and not addresses.is_here(addresses.resolve(host) or ""):
        return None
    try:
        return stores.hosted(stores.listening_address(host, spec.launch.bind_address, say), port)
    except MachineError:
        if spec.has_number:
            raise
        return None


class Leader:
    """Machine 0's decisions over the life of the run."""

    def __init__(self, spec: LaunchSpec, keeper: "Keeper", start: Start, log_dir: Path) -> None:
        self._spec, self._keeper, self._start, self._log_dir = spec, keeper, start, log_dir
        self._sizes = membership.usable_sizes(spec.config)
        self._restarts = Restarts(spec.launch.max_restarts)
        self._number = 0
        self._why = ""

    def lead(self) -> None:
        """Until the run is done; tells the others its end, good or bad."""
        try:
            while self._goes_on(self._generation()):
                self._number += 1
        except BaseException as error:
            code = error.exit_code if isinstance(error, ShardkitError) else 130
            self._keeper.say({"over": str(error) or "Ctrl-C", "code": code})
            raise
        self._keeper.say({"over": "", "code": 0})

    def _generation(self) -> Generation:
        """The next world, of the machines that are here or come in time. Raises MachineError where too few do."""
        members = self._gathered()
        size = membership.best_size(self._sizes, len(members))
        generation = Generation(self._number, tuple(members[:size]), tuple(members[size:]), self._resume(), self._why)
        self._keeper.say(generation.as_json())
        say(membership.announcement(self._spec, generation, self._sizes))
        return generation

    def _resume(self) -> str:
        """From the newest checkpoint if this run has saved one, else as configured."""
        return "auto" if self._restarts.newest_step >= 0 else self._spec.config.shardkit.checkpoint.resume

    def _gathered(self) -> list[Member]:
        """Who is here, once they are enough for a world; at the start of the run, once all are, or had time to come."""
        from shardkit.launch.stores import Announcement

        limits, announcement = self._spec.launch, Announcement(say)
        began_s, enough_s = time.monotonic(), None
        while True:
            members, now = self._keeper.members(), time.monotonic()
            if membership.best_size(self._sizes, len(members)):
                enough_s = enough_s or now
                wait_s = 0.0 if self._number else limits.join_timeout_s
                if len(members) == self._spec.num_machines or now - enough_s >= wait_s:
                    return members
                announcement.make(
                    f"waiting for more machines, {len(members)} of {self._spec.num_machines} are here; starting with "
                    f"them after {wait_s:g} s"
                )
            else:
                enough_s = None
                needed = min(size for size, problem in self._sizes.items() if problem is None)
                if now - began_s > limits.meet_timeout_s:
                    raise MachineError(
                        f"launch: {len(members)} of {needed} machines that a world needs came within "
                        f"{limits.meet_timeout_s:g} s; start the same command there."
                    )
                announcement.make(f"waiting for machines, {len(members)} are here, a world needs {needed}")
            time.sleep(POLL_S)

    def _goes_on(self, generation: Generation) -> bool:
        """Trains one generation; whether another one follows. Raises what the run ends with."""
        comers = Comers(self._keeper, self._sizes, generation, self._restarts.in_vain < WITHOUT_CHECKPOINT)
        ended = trained(self._spec, generation, 0, self._keeper, self._start, self._log_dir, comers.want_a_world)
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
        elif comers.why and makes_way(ended):
            self._change(comers.why, error)
        elif self._restarts.allows(error):
            self._restarts.count(error)
            self._why = self._restarts.announcement()
        else:
            raise self._restarts.final(error)
        return True

    def _without(self, gone: list[Member], how: str, error: ShardkitError) -> None:
        """Another world follows, without these machines."""
        self._keeper.drop(
            [member.arrival for member in gone],
            "launch: this machine was left out and its ranks were ended: machine 0 had no sign of life from it for "
            f"{self._spec.launch.lost_timeout_s:g} s; start it again to join.",
        )
        self._change(f"{' and '.join(map(str, gone))}: {how}", error)

    def _change(self, why: str, error: ShardkitError) -> None:
        """Another world follows. Raises RankFailure where none has got anywhere for long."""
        if self._restarts.in_vain >= WITHOUT_CHECKPOINT:
            raise RankFailure(
                f"launch: {why}; given up after {self._restarts.in_vain + 1} worlds in a row without a new checkpoint; "
                "save more often (accelerator.save_state()).",
                error.exit_code,
            )
        self._restarts.in_vain += 1
        newest = self._restarts.newest_step
        self._why = f"{why}; {f'going on from step {newest}' if newest >= 0 else 'no checkpoint yet'}"


class Comers:
    """The machines that come while a generation trains, as machine 0 sees them: whether its ranks are to make way."""

    def __init__(
        self, keeper: "Keeper", sizes: dict[int, str | None], generation: Generation, may_interrupt: bool
    ) -> None:
        self._keeper, self._sizes, self._generation, self._may_interrupt = keeper, sizes, generation, may_interrupt
        self._known = {member.arrival for member in (*generation.members, *generation.spares)}
        self._last_s = time.monotonic()
        self.why = ""
        """Why the ranks were told to make way; "" where they were not."""

    def want_a_world(self) -> bool:
        """Whether the ranks are to be told now: a larger world is possible, and nobody has come for a few seconds."""
        members, now = self._keeper.members(), time.monotonic()
        for member in members:
            if member.arrival not in self._known:
                self._known.add(member.arrival)
                self._last_s = now
                say(f"launch: {member} has come")
        is_larger = membership.best_size(self._sizes, len(members)) > len(self._generation.members)
        if self.why or not (is_larger and self._may_interrupt) or now - self._last_s < SETTLE_S:
            return False
        who = [str(member) for member in members if self._generation.index_of(member.arrival) is None]
        self.why = f"{' and '.join(who)} came"
        say(f"launch: {self.why}; telling the ranks to save and make way for a larger world")
        return True


def makes_way(ended: Ended) -> bool:
    """Whether the ranks ended because they were told to make way: saved, or ended by the signal, or too slow for it."""
    error = ended.error
    return isinstance(error, Preempted) or ended.was_killed or (error is not None and error.exit_code == ASKED_CODE)


def follow(spec: LaunchSpec, guest: "Guest", start: Start, log_dir: Path) -> None:
    """The part of a machine other than 0: trains in the generations that name it, until the run is over."""
    sizes = membership.usable_sizes(spec.config)
    error: ShardkitError | None = None
    training = 0
    for index in itertools.count():
        word = heard(guest, index, training)
        if "over" in word:
            end(word, error)
            return
        generation = membership.generation_from(word)
        place = generation.index_of(guest.arrival)
        if place is None:
            training = len(generation.members)
            continue
        say(membership.announcement(spec, generation, sizes))
        ended = trained(spec, generation, place, guest, start, log_dir)
        error, training = ended.error, 0
        if error is None:
            return
        if place in ended.stops or (isinstance(error, LostMachines) and {0, place} & {*error.machines}):
            raise error


def heard(guest: "Guest", index: int, training: int) -> "Word":
    """The run's next word, once it is said; says what is waited for. `training`: how many machines train meanwhile
    without this one; such a wait may be as long as the run, and is said once."""
    from shardkit.launch.stores import Announcement

    announcement, note = Announcement(say), ""
    while (word := guest.word(index)) is None:
        now = guest.note
        if guest.number is None:
            announcement.make(f"waiting to be admitted by machine 0{f' ({now})' if now else ''}")
        elif not training:
            announcement.make("waiting for machine 0 to start the ranks")
        else:
            now = f"{training} machines train; this one takes part once they make way for more, or one is lost"
        if now and now != note:
            note = now
            say(f"launch: {now}")
        time.sleep(POLL_S)
    return word


def end(word: "Word", error: ShardkitError | None) -> None:
    """Raises what the run ended with; nothing after a good end."""
    text, code = word["over"], word["code"]
    if not code:
        return
    if error is not None and error.exit_code == code:
        raise error
    raise RankFailure(f"launch: the run ended on machine 0: {text.removeprefix('launch: ')}", code)


def trained(
    spec: LaunchSpec,
    generation: Generation,
    place: int,
    roster: "Keeper | Guest",
    start: Start,
    log_dir: Path,
    wants_new_world: Callable[[], bool] = lambda: False,
) -> Ended:
    """What came of a generation, as this machine knows it. Raises MachineError where its ranks cannot be started."""
    own = membership.spec_for(spec, generation, place)
    with met(own, generation, place, roster, wants_new_world) as machines:
        try:
            attempt, error = elastic.attempted(own, start, machines, log_dir, generation.number, has_checkpoint=False)
        except LostMachines as lost:
            return Ended(lost, {place: lost.stop} if lost.stop else {}, lost.committed_step)
    was_killed = error is not None and diagnosis.diagnose(attempt.outcomes).outcome.was_killed
    return Ended(error, attempt.stops, attempt.committed_step, was_killed)


@contextlib.contextmanager
def met(
    own: LaunchSpec, generation: Generation, place: int, roster: "Keeper | Guest", wants_new_world: Callable[[], bool]
) -> "Iterator[Meeting]":
    """The meeting of a generation's machines, in a part of the store of its own."""
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
    line = StoreClient(store, place, len(members), lost_s, lambda other: roster.is_gone(members[other].arrival))
    line.start()
    try:
        yield Meeting(
            place,
            len(members),
            own.rendezvous.host,
            (roster.store.host, 0),
            line,
            [member.host for member in members],
            numbers=[member.number for member in members],
            wants_new_world=wants_new_world,
        )
    finally:
        line.close()


@contextlib.contextmanager
def signals_that_end_it() -> Iterator[None]:
    """SIGTERM, SIGUSR1 and SIGHUP end this launch in words while it has no ranks. With ranks `elastic` takes them."""

    def end_it(number: int, frame: object) -> None:
        raise RankFailure(f"launch: {diagnosis.signal_name(number)} while no ranks ran here.", 128 + number)

    with elastic.handled((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP), end_it):
        yield
