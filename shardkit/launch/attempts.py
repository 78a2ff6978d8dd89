"""One launch, from the log folder to its result, with torch elastic's variables for the ranks.

run(spec)             machines, ranks, restarts; raises the error that the run ended with
around(spec)          log folder, start method and closing line, also for elastic runs (generations.py)
attempted(spec, ..)   runs the ranks once, with their output; returns the result
together(reports, ..) the result from the reports of all machines
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkit import env, errors, open_files
from shardkit.config import files, hardware
from shardkit.errors import EXIT_PREEMPTED, HangError, MachineError, Preempted, RankFailure, ShardkitError
from shardkit.launch import declining, diagnosis, folders, hangs, names, rank_files, signals, start_methods, time_use
from shardkit.launch.diagnosis import RankOutcome
from shardkit.launch.failure import tells_of_timeout
from shardkit.launch.hangs import HangRow
from shardkit.launch.monitor import Monitor
from shardkit.launch.output import Output
from shardkit.launch.restarts import Restarts
from shardkit.launch.spec import LaunchSpec, greeting, headline, settings_without_effect
from shardkit.launch.start_methods import Start
from shardkit.wording import counted

if TYPE_CHECKING:  # they load torch
    from shardkit.launch.meeting import Meeting
    from shardkit.launch.ranks import EndedRanks

FILES_BESIDE = 32
"""Open files of a launcher beside those of the ranks: torch, its own store, the log (20 were measured)."""
FILES_OF_A_RANK = 5
"""Two pipes, each open at both ends, and a log. On machine 0 each rank of the run is a connection of the store, too."""

OF_DEVICES = {"CUDA_VISIBLE_DEVICES"}
"""Variables of a launch that hold for another launch in one of its ranks, too: it has no more devices."""

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


class LostMachines(MachineError):
    """Machines of the attempt, by number, that give no sign of life any more. `stop`: the signal with which somebody
    has ended the ranks of this machine meanwhile; None: nobody has."""

    def __init__(self, text: str, machines: list[int], committed_step: int, stop: int | None) -> None:
        super().__init__(text)
        self.machines, self.committed_step, self.stop = machines, committed_step, stop


def run(spec: LaunchSpec) -> Path:
    """Returns the run's folder after the launch has succeeded.

    Raises RankFailure, HangError, Preempted, MachineError, or KeyboardInterrupt.
    """
    restarts = Restarts(spec.launch.max_restarts)
    with around(spec) as (start, log_dir), signals.end_it_with_an_error():
        from shardkit.launch import meeting

        with meeting.opened(spec, greeting(spec), say) as machines:
            while (error := run_attempt(spec, start, machines, log_dir, restarts)) is not None:
                restarts.count(error)
                say(f"launch: {restarts.announcement(error)}")
    return log_dir


@contextlib.contextmanager
def around(spec: LaunchSpec) -> Iterator[tuple[Start, Path]]:
    """How to start ranks, and the log folder, made; says what runs and, where all went well inside, that it is done."""
    env.remove((env.get(names.SETTINGS) or "").split(","))  # of a launch that has this one in a rank
    with contextlib.ExitStack() as stack:
        with declining.telling_others(spec):
            open_files.allow(
                FILES_BESIDE + FILES_OF_A_RANK * spec.ranks_here + spec.world_size,
                f"the launcher of {counted(spec.world_size, 'rank')} needs",
            )
            log_dir = folders.make_log_dir(spec.launch.log_dir)
            say(headline(spec, folders.short(log_dir)))
            began_s = time.monotonic()
            start = stack.enter_context(start_methods.prepared(spec))  # first: forked ranks do not inherit what is open
            # machines of an elastic run that have no number yet may share a folder
            if spec.launch.min_machines is None or spec.has_number:
                stack.enter_context(folders.held(log_dir, spec.machine_rank))
            stack.enter_context(native_words_in(log_dir, spec))
        with time_use.told(log_dir, began_s, say):
            yield start, log_dir
        world = "" if spec.launch.min_machines else f"{counted(spec.world_size, 'rank')}, "
        say(f"done in {_duration(time.monotonic() - began_s)}, {world}exit 0")


@contextlib.contextmanager
def native_words_in(log_dir: Path, spec: LaunchSpec) -> Iterator[None]:
    """With several machines: redirects what torch's C++ code prints in this process to a file. For a network fault it
    prints a page, where one line of shardkit's names the machine. Raises MachineError."""
    if spec.num_machines == 1:
        yield
        return
    found = sys.stderr
    found.flush()
    with contextlib.ExitStack() as stack:
        with folders.writable(log_dir):
            path = log_dir / f"launcher{spec.machine_rank}.log"
            file = stack.enter_context(open(path, "ab", opener=rank_files.private))
        screen = os.dup(2)
        stream = stack.enter_context(open(screen, "w", buffering=1, errors="backslashreplace"))
        os.dup2(file.fileno(), 2)
        sys.stderr = stream
        try:
            yield
        finally:
            stream.flush()
            sys.stderr = found
            os.dup2(screen, 2)


def run_attempt(
    spec: LaunchSpec, start: Start, machines: "Meeting", log_dir: Path, restarts: Restarts
) -> ShardkitError | None:
    """Runs the ranks once. Returns None after success and the error if the ranks may be restarted; else raises it."""
    configured = spec.config.shardkit.checkpoint.resume
    resume = restarts.resume(configured)
    if resume != configured:
        spec = replace(spec, config=files.overlaid(spec.config, {"shardkit.checkpoint.resume": resume}))
    attempt, error = attempted(spec, start, machines, log_dir, restarts.number)
    restarts.saw_checkpoint(attempt.committed_step)
    for machine, number in attempt.stops.items():
        if machine != machines.machine:
            say(f"launch: {machines.name_of(machine)}: {diagnosis.signal_name(number)} there has stopped the run")
    if error is not None and not restarts.allows(error):
        raise restarts.final(error)
    return error


def attempted(
    spec: LaunchSpec, start: Start, machines: "Meeting", log_dir: Path, restart: int
) -> tuple[LaunchAttempt, ShardkitError | None]:
    """Runs the ranks once; returns the result, and the error if they failed. Raises MachineError."""
    with contextlib.ExitStack() as stack:
        with machines.telling_what_lacks():
            folder = stack.enter_context(folders.temporary())
            env.update(run_variables(spec, log_dir, folder))
            output = Output(
                folder, log_dir, spec.ranks_here, len(str(spec.world_size - 1)), spec.shown_ranks, spec.has_prefix
            )
            output.start()
        began_s, is_failed = time.monotonic(), True
        try:
            attempt = run_once(spec, start, machines, folder, log_dir, restart)
            is_failed = any(outcome.exit_code not in (0, EXIT_PREEMPTED) for outcome in attempt.outcomes)
        finally:
            output.close()
            ranks = rank_files.read_progress(folder).values()
            time_use.record(log_dir, spec.machine_rank, time_use.attempt(ranks, began_s, restart, is_failed), say)
        if attempt.has_failed:
            return attempt, error_of(attempt, spec, output)
        is_configured = any(rank.is_configured for rank in ranks)
        if spec.machine_rank == 0 and not is_configured and (text := settings_without_effect(spec)):
            say(f"warning: {text}")
        return attempt, None


def run_variables(spec: LaunchSpec, log_dir: Path, folder: Path) -> dict[str, str]:
    """The variables of the ranks, with those that are known only now; writes the resolved configuration.

    Ranks read it in the launch's own folder: another launch may use the same log folder, with other settings.
    """
    name = "config.yaml" if spec.machine_rank == 0 else f"config-{spec.machine_rank}.yaml"
    path, text = folder / name, files.dump(spec.config)
    with folders.writable(log_dir):
        folders.write(log_dir / name, text)
    folders.write(path, text)
    folders.write(path.with_suffix(".chosen.json"), json.dumps(spec.chosen))  # for the table at the start
    return {
        **spec.environment,
        names.SETTINGS: ",".join(sorted(spec.environment.keys() - OF_DEVICES)),
        env.RESOLVED: str(path.resolve()),
        names.CONFIG_DIGEST: files.digest(spec.config),
        names.PROGRESS_DIR: str(folder),
        names.LOG_DIR: str(log_dir.resolve()),
        names.LAUNCHER_PID: str(os.getpid()),
    }


def run_once(
    spec: LaunchSpec, start: Start, machines: "Meeting", folder: Path, log_dir: Path, restart: int
) -> LaunchAttempt:
    """Starts the ranks and waits for the last one, on all machines. Raises LostMachines where some are lost."""
    from shardkit.launch import ranks
    from shardkit.launch.store_client import Lost

    limits, killed_before = spec.launch, hardware.memory_kills()
    has_others, has_device = spec.num_machines > 1, spec.device != "cpu"
    monitor = Monitor(folder, log_dir, limits.hang_timeout_s, limits.stop_timeout_s, say, has_others, has_device)
    try:
        with signals_to(monitor):
            machines.begin(ranks.name_of(restart))
            started_s = time.monotonic()
            monitor.start()
            try:
                ended = ranks.run(spec, start, machines, folder, restart, monitor)
            finally:
                monitor.close()
        memory_kills = hardware.memory_kills() - killed_before
        outcomes = outcomes_of(monitor, ended, rank_files.read_errors(folder), memory_kills)
        report = report_of(monitor, outcomes, started_s, folders.short(log_dir))
        reports = machines.gather(f"{ranks.name_of(restart)}-end", report)
    except OSError as error:
        raise MachineError(
            f"launch: the ranks could not be started (got {error}); see the limits and the disk of this machine "
            "(ulimit -u, ulimit -n, df -h), and start again."
        ) from error
    except Lost as lost:
        raise LostMachines(
            text_of_loss(machines, lost.machines), lost.machines, newest_step(monitor), stop_of(monitor)
        ) from None
    return together(reports, machines, started_s)


def text_of_loss(machines: "Meeting", lost: list[int]) -> str:
    """The error on this machine where the machines with these numbers are lost, which may include this one."""
    if machines.machine in lost:
        return (
            "launch: this machine counts as lost: machine 0 had no sign of life from its launcher (it was suspended or "
            "its network cut); the ranks here were ended. Start it again with --resume auto."
        )
    return (
        f"launch: lost {machines.names_of(lost)}: no sign of life from the launcher there; the ranks here were ended. "
        "Look at that machine and at the network, and start again with --resume auto."
    )


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


@contextlib.contextmanager
def signals_to(monitor: Monitor) -> Iterator[None]:
    """Passes SIGTERM, SIGUSR1 and Ctrl-C to the ranks; before the ranks have started, these signals end the launch.

    SIGHUP (a closed terminal) is passed on as SIGTERM, unless it is ignored (nohup).
    """

    def tell(number: int, frame: object) -> None:
        if not monitor.ranks and not rank_files.read_progress(monitor.folder):
            raise (
                KeyboardInterrupt
                if number == signal.SIGINT
                else RankFailure(f"launch: {diagnosis.signal_name(number)} before the ranks had started.", 128 + number)
            )
        if monitor.stop is None or not monitor.stop.is_asked_here:
            limit_s = monitor.stop_timeout_of(number)
            say(
                f"launch: {diagnosis.signal_name(number)}: telling the ranks to stop within {limit_s:g} s; once more "
                "ends them now"
            )
        monitor.tell_to_stop(signal.SIGTERM if number == signal.SIGHUP else number)

    with signals.handled(signals.ENDING, tell):
        yield


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


def error_of(attempt: LaunchAttempt, spec: LaunchSpec, output: Output) -> ShardkitError:
    """The error of a failed attempt. Shows the traceback of the rank that failed first only."""
    if attempt.hang:
        first = min(attempt.hang, key=lambda row: row.order).rank
        folders_of_all = dict.fromkeys([attempt.logs[first], *attempt.logs.values()])
        text = hangs.render(attempt.hang, spec.launch.hang_timeout_s, *folders_of_all)
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


def say(text: str) -> None:
    """Prints a line of the launcher to stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} m"
    return f"{minutes} m {rest:02d} s" if minutes else f"{seconds:.1f} s"
