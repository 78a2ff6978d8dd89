"""Background agreement of ranks, without a collective in any step: when to stop, and that all run the same modules
with the same learning rates, at the same batch.

A thread of each rank polls the process group's store about once a second. At a step boundary the training loop only
counts and reads the thread's results.

Stopping: one rank gets a stop signal and writes that to the store. Every thread answers with the number of boundaries
that its rank has passed. From then on that rank waits at its next boundary for the result, so no rank is past its
answer plus one. Rank 0 publishes the largest answer plus one, and all ranks stop at that boundary.

Comparing: every ten seconds rank 0 selects a past boundary, and every thread reports its rank's trace, rate and place
in the data at it. Where two traces differ at one place, the ranks stop as above; where two rates or places differ, rank
0 warns once.
"""

from __future__ import annotations

import atexit
import json
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.distributed as dist

from shardkit.errors import ShardkitError
from shardkit.log import get_logger

POLL_S = 1.0
POLL_SOON_S = 0.05
COMPARE_EVERY_S = 10.0
# How long the exit of the process waits for a thread inside the store, whose host may be lost.
GOODBYE_S = 2.0
# Number of past boundaries whose report a rank keeps: ranks are seldom more than one step apart.
REMEMBERED = 4096

log = get_logger(__name__)

# Epoch, and batch in it.
Place: TypeAlias = tuple[int, int]
# What a rank tells of a boundary: its trace, its rate, and its place in the data.
Report: TypeAlias = tuple[int, float, Place]


class BackgroundAgreement:
    """The background agreement of one run. `stop_requested`: whether this rank got a stop signal; called from any
    thread. `on_rates`, `on_places`: called once each, in the thread of rank 0, with the ranks whose rate or place
    differs from its own.

    Every rank must create it at the same place in the program, pass the same boundaries, and give its trace, rate and
    place there.
    """

    def __init__(
        self,
        stop_requested: Callable[[], bool],
        on_difference: Callable[[list[int]], ShardkitError],
        on_rates: Callable[[list[int]], None] = lambda different: None,
        on_places: Callable[[list[int]], None] = lambda different: None,
    ) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._stop_requested, self._on_difference = stop_requested, on_difference
        self._warnings = [(_is_other_rate, on_rates), (_is_other_place, on_places)]
        self._changed = threading.Condition()
        self._passed = 0
        self._reports: OrderedDict[int, Report] = OrderedDict()
        self._answered = False
        self._stop_at: int | None = None
        self._different: list[int] = []
        self._closed = threading.Event()
        self._lost: str | None = None
        if self.world_size > 1:
            shared = dist.PrefixStore("shardkit/agreement", dist.distributed_c10d._get_default_store())
            number = shared.add(f"of rank {self.rank}", 1)
            start = (weakref.ref(self), dist.PrefixStore(str(number), shared), self._closed)
            thread = threading.Thread(target=_poll, args=start, name="shardkit-agreement", daemon=True)
            _threads[thread] = self._closed
            thread.start()

    def pass_boundary(self, trace: int = 0, rate: float = 0.0, place: Place = (0, 0)) -> bool:
        """Counts a boundary; returns whether all ranks stop here. Where traces differed, all ranks raise the error that
        `on_difference` makes for the ranks that differ from rank 0."""
        if self.world_size == 1:
            return self._stop_requested()
        with self._changed:
            self._passed += 1
            self._reports[self._passed] = (trace, rate, place)
            if len(self._reports) > REMEMBERED:
                self._reports.popitem(last=False)
            while self._answered and self._stop_at is None and self._lost is None:
                self._changed.wait(1.0)
            if self._stop_at is None or self._passed < self._stop_at:
                return False
        if self._different:
            raise self._on_difference(self._different)
        return True

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()

    # ---- the thread ----

    def _answer(self) -> int:
        """Boundaries passed so far. From now on the loop waits at the next one."""
        with self._changed:
            self._answered = True
            return self._passed

    def _stop(self, at: int, different: list[int]) -> None:
        """The loop stops at that boundary."""
        with self._changed:
            self._stop_at, self._different = at, different
            self._changed.notify_all()

    def _lose(self, reason: str) -> None:
        """The loop waits no longer for an answer."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    def _report_at(self, boundary: int) -> Report | None:
        """The report of that boundary; None where this rank has not reached it or no longer keeps it."""
        with self._changed:
            return self._reports.get(boundary)


_threads: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()
"""The running threads, and what closes each."""


@atexit.register
def _end_threads() -> None:
    """Ends all threads: torch aborts a process whose interpreter exits while a thread is inside its store."""
    running = dict(_threads)
    for closed in running.values():
        closed.set()
    until = time.monotonic() + GOODBYE_S
    for thread in running:
        thread.join(max(0.0, until - time.monotonic()))


def _poll(reference: Callable[[], BackgroundAgreement | None], store: Any, closed: threading.Event) -> None:
    """The thread's function: runs until the run is over or its agreement is unreferenced, which it holds only while it
    polls."""
    poller = _Poller(store)
    pause = POLL_S
    while not closed.wait(pause):
        agreement = reference()
        if agreement is None:
            return
        try:
            pause = poller.poll(agreement)
        except Exception as error:  # the rank that hosts the store has ended: the loop notices that by other means
            agreement._lose(str(error))
            return
        del agreement


class _Poller:
    """What one thread knows of the store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._is_stopping = False
        self._round = 0
        self._asked_at = time.monotonic()
        self._boundary: int | None = None
        self._has_reported = False
        self._different: list[int] = []

    def poll(self, agreement: BackgroundAgreement) -> float:
        """Polls once; returns the seconds until the next poll."""
        if agreement._stop_at is not None:
            return POLL_S
        if self._is_stopping:
            self._find_target(agreement)
            return POLL_SOON_S
        if agreement._stop_requested():
            self._store.set("stop/told", str(agreement.rank))
        if self._store.check(["stop/told"]):
            self._is_stopping = True
            self._store.set(f"stop/passed/{agreement.rank}", str(agreement._answer()))
            return POLL_SOON_S
        self._compare(agreement)
        return POLL_S

    def _find_target(self, agreement: BackgroundAgreement) -> None:
        if agreement.rank == 0:
            answers = self._of_all("stop/passed", agreement)
            if answers is not None:
                self._store.set("stop/at", json.dumps([max(map(int, answers)) + 1, self._different]))
        if self._store.check(["stop/at"]):
            stop_at, different = json.loads(self._store.get("stop/at"))
            agreement._stop(stop_at, different)

    def _of_all(self, name: str, agreement: BackgroundAgreement) -> list[bytes] | None:
        """Every rank's value under this name; None where one is missing."""
        keys = [f"{name}/{rank}" for rank in range(agreement.world_size)]
        return [self._store.get(key) for key in keys] if self._store.check(keys) else None

    def _compare(self, agreement: BackgroundAgreement) -> None:
        key = f"trace/{self._round}"
        if self._boundary is None:
            self._find_boundary(key, agreement)
        if self._boundary is None or not self._is_reported(key, self._boundary, agreement):
            return
        if agreement.rank == 0:
            self._judge(key, agreement)
        if self._store.check([f"{key}/done"]):
            self._forget(key, agreement)
            self._round, self._boundary = self._round + 1, None

    def _find_boundary(self, key: str, agreement: BackgroundAgreement) -> None:
        """Reads the boundary of this round from the store, where rank 0 puts one, if its time has come."""
        if agreement.rank == 0 and time.monotonic() - self._asked_at >= COMPARE_EVERY_S:
            self._asked_at = time.monotonic()
            if agreement._passed:
                self._store.set(f"{key}/at", str(agreement._passed))
        if self._store.check([f"{key}/at"]):
            self._boundary, self._has_reported = int(self._store.get(f"{key}/at")), False

    def _is_reported(self, key: str, boundary: int, agreement: BackgroundAgreement) -> bool:
        """Whether this rank's report is in the store: now, unless the rank is yet to pass the boundary."""
        report = None if self._has_reported else agreement._report_at(boundary)
        if not self._has_reported and (report is not None or agreement._passed >= boundary):
            self._store.set(f"{key}/{agreement.rank}", json.dumps(report))
            self._has_reported = True
        return self._has_reported

    def _judge(self, key: str, agreement: BackgroundAgreement) -> None:
        """On rank 0, compares the reports once all are in the store."""
        if (answers := self._of_all(key, agreement)) is None:
            return
        reports = [json.loads(text) for text in answers]
        self._different = _different(reports, _is_other_trace)
        if self._different:
            self._store.set("stop/told", "0")
        for warning in [*agreement._warnings]:
            is_other, warn = warning
            if ranks := _different(reports, is_other):
                agreement._warnings.remove(warning)
                warn(ranks)
        self._store.set(f"{key}/done", "1")

    def _forget(self, key: str, agreement: BackgroundAgreement) -> None:
        """Deletes keys of finished rounds, which would otherwise stay in the store."""
        self._store.delete_key(f"{key}/{agreement.rank}")
        if agreement.rank == 0 and self._round:
            for name in ("at", "done"):
                self._store.delete_key(f"trace/{self._round - 1}/{name}")


def _different(reports: list[Report | None], is_other: Callable[[Report, Report], bool]) -> list[int]:
    """Ranks whose report differs from rank 0's; a rank that no longer keeps it is not counted."""
    first = reports[0]
    if first is None:
        return []
    return [rank for rank, report in enumerate(reports) if report is not None and is_other(report, first)]


def _is_other_trace(report: Report, first: Report) -> bool:
    """At another place in the data, the boundary is that of another step."""
    return report[0] != first[0] and not _is_other_place(report, first)


def _is_other_rate(report: Report, first: Report) -> bool:
    """CPUs of different types may round a schedule's cosine differently."""
    return not math.isclose(report[1], first[1], rel_tol=1e-6, abs_tol=1e-12)


def _is_other_place(report: Report, first: Report) -> bool:
    return report[2] != first[2]
