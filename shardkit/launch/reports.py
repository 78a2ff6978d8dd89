"""The result of running the ranks once: each machine's report on its ranks, what all reports say together, and the
error where ranks have failed."""

import signal
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardkit import errors
from shardkit.errors import EXIT_PREEMPTED, HangError, Preempted, RankFailure, ShardkitError
from shardkit.launch import diagnosis, hang_texts, names, rank_files
from shardkit.launch.diagnosis import RankOutcome
from shardkit.launch.failure import tells_of_timeout
from shardkit.launch.hang_texts import HangRow
from shardkit.launch.monitor import Monitor
from shardkit.launch.output import Output
from shardkit.launch.spec import LaunchSpec

if TYPE_CHECKING:  # they load torch
    from shardkit.launch.meeting import Meeting
    from shardkit.launch.ranks import EndedRanks

# What these say is all there is to know; their tracebacks are in the logs.
_SHOWN_WITHOUT_TRACEBACK = {"SystemExit", "KeyboardInterrupt"} | {
    name for name, value in vars(errors).items() if isinstance(value, type)
}


@dataclass(frozen=True)
class LaunchAttempt:
    """The result of running the ranks once, on all machines."""

    outcomes: tuple[RankOutcome, ...]
    started_s: float
    committed_step: int
    """The newest step of which some rank saw a complete checkpoint; -1: none."""
    logs: dict[int, str]
    """Where each rank's log is."""
    hang: tuple[HangRow, ...] = ()
    """What each rank did when it was found that they hang; none where they did not."""
    stops: dict[int, int] = field(default_factory=dict)
    """The signal with which somebody ended it, by machine."""

    @property
    def stop(self) -> int | None:
        """The signal that ended it; None where nobody did."""
        return next(iter(self.stops.values()), None)

    @property
    def has_failed(self) -> bool:
        return any(outcome.exit_code != 0 for outcome in self.outcomes)


def report_of(monitor: Monitor, outcomes: tuple[RankOutcome, ...], started_s: float, logs: str) -> dict[str, Any]:
    """This machine's report on its ranks. Times are seconds since the common start."""
    return {
        "outcomes": [asdict(outcome.shifted(-started_s)) for outcome in outcomes],
        "committed_step": newest_step(monitor),
        "is_hung": monitor.is_hung,
        "rows": [asdict(row.shifted(-started_s)) for row in monitor.rows or ()],
        "stop": stop_of(monitor),
        "logs": logs,
    }


def outcomes_of(
    monitor: Monitor, ended: "EndedRanks", rank_errors: dict[int, rank_files.RankError], memory_kills: int
) -> tuple[RankOutcome, ...]:
    """The outcome of each rank of this machine, from its exit code, the monitor and its own error report."""
    outcomes = []
    for rank, code in sorted(ended.codes.items()):
        known = monitor.ranks.get(rank)
        last = known.progress if known else rank_files.RankProgress(rank, local_rank=0, pid=0, phase="")
        was_stopped = rank in ended.stopped and code in (-signal.SIGTERM, -signal.SIGKILL)
        outcomes.append(
            RankOutcome(
                rank=rank,
                pid=last.pid,
                exit_code=code,
                ended_s=known.ended_s if known else None,
                error=rank_errors.get(rank),
                was_killed=last.pid in monitor.killed or was_stopped,
                phase=last.phase,
                step=last.step,
                since_s=last.since_s,
                is_timed_out=code == -signal.SIGABRT and tells_of_timeout(names.log_path(monitor.log_dir, rank)),
                memory_kills=memory_kills,
            )
        )
    return tuple(outcomes)


def stop_of(monitor: Monitor) -> int | None:
    """The signal with which somebody ended the ranks here; None where nobody did."""
    return monitor.stop.number if monitor.stop is not None and monitor.stop.is_asked_here else None


def newest_step(monitor: Monitor) -> int:
    """The newest step of which a rank here saw a complete checkpoint; -1: none."""
    return max((rank.progress.committed_step for rank in monitor.ranks.values()), default=-1)


def together(reports: dict[int, dict[str, Any]], machines: "Meeting", started_s: float) -> LaunchAttempt:
    """The attempt, from the reports of all machines."""
    outcomes: list[RankOutcome] = []
    logs: dict[int, str] = {}
    reports = dict(sorted(reports.items()))
    for machine, report in reports.items():
        where = report["logs"] if machine == machines.machine else f"{machines.name_of(machine)}: {report['logs']}"
        for fields in report["outcomes"]:
            error = rank_files.RankError(**fields["error"]) if fields["error"] else None
            outcomes.append(RankOutcome(**{**fields, "error": error}).shifted(started_s))
            logs[fields["rank"]] = where
    is_hung = any(report["is_hung"] for report in reports.values())
    rows = [HangRow(**row) for report in reports.values() for row in report["rows"] if is_hung]
    return LaunchAttempt(
        tuple(outcomes),
        started_s,
        committed_step=max(report["committed_step"] for report in reports.values()),
        logs=logs,
        hang=tuple(row.shifted(started_s) for row in rows),
        stops={machine: report["stop"] for machine, report in reports.items() if report["stop"]},
    )


def error_of(attempt: LaunchAttempt, spec: LaunchSpec, output: Output) -> ShardkitError:
    """The error of a failed attempt. Shows the traceback of the rank that failed first only."""
    if attempt.hang:
        first = min(attempt.hang, key=lambda row: row.order).rank
        folders_of_all = dict.fromkeys([attempt.logs[first], *attempt.logs.values()])
        text = hang_texts.render(attempt.hang, spec.launch.hang_timeout_s, *folders_of_all)
        return HangError(text + diagnosis.saved(attempt.committed_step))
    found = diagnosis.diagnose(attempt.outcomes)
    stop, root, logs = attempt.stop, found.outcome, attempt.logs[found.rank]
    if root.error is not None and root.error.exit_code == EXIT_PREEMPTED:
        return Preempted(root.error.message)
    if stop is not None and (root.was_killed or root.exit_code == -stop or found.exit_code == 128 + stop):
        lost = f"launch: {diagnosis.signal_name(stop)} ended the ranks; nothing was saved for it. logs {logs}"
        return RankFailure(lost + diagnosis.saved(attempt.committed_step), 128 + stop)
    if root.error is not None and root.error.kind not in _SHOWN_WITHOUT_TRACEBACK:
        output.show(found.rank, root.error.traceback.rstrip("\n"))
    return RankFailure(diagnosis.render(found, attempt.started_s, logs, attempt.committed_step), found.exit_code)
