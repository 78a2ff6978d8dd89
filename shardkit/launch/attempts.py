"""One launch, from the log folder to its result, with torch elastic's variables for the ranks.

run(spec)             machines, ranks, restarts; raises the error that the run ended with
around(spec)          log folder, start method and closing line, also for elastic runs (generations.py)
attempted(spec, ..)   runs the ranks once, with their output; returns the result (reports.py)
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit import env, open_files
from shardkit.config import files, hardware
from shardkit.errors import EXIT_PREEMPTED, MachineError, RankFailure, ShardkitError
from shardkit.launch import declining, diagnosis, folders, names, rank_files, reports, signals, start_methods, time_use
from shardkit.launch.monitor import Monitor
from shardkit.launch.output import Output
from shardkit.launch.reports import LaunchAttempt
from shardkit.launch.restarts import Restarts
from shardkit.launch.spec import LaunchSpec, greeting, headline, settings_without_effect
from shardkit.launch.start_methods import Start
from shardkit.wording import counted

if TYPE_CHECKING:  # they load torch
    from shardkit.launch.meeting import Meeting

FILES_BESIDE = 32
"""Open files of a launcher beside those of the ranks: torch, its own store, the log (20 were measured)."""
FILES_OF_A_RANK = 5
"""Two pipes, each open at both ends, and a log. On machine 0 each rank of the run is a connection of the store, too."""

OF_DEVICES = {"CUDA_VISIBLE_DEVICES"}
"""Variables of a launch that hold for another launch in one of its ranks, too: it has no more devices."""


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
            return attempt, reports.error_of(attempt, spec, output)
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
        outcomes = reports.outcomes_of(monitor, ended, rank_files.read_errors(folder), memory_kills)
        report = reports.report_of(monitor, outcomes, started_s, folders.short(log_dir))
        found = machines.gather(f"{ranks.name_of(restart)}-end", report)
    except OSError as error:
        raise MachineError(
            f"launch: the ranks could not be started (got {error}); see the limits and the disk of this machine "
            "(ulimit -u, ulimit -n, df -h), and start again."
        ) from error
    except Lost as lost:
        raise LostMachines(
            text_of_loss(machines, lost.machines), lost.machines, reports.newest_step(monitor), reports.stop_of(monitor)
        ) from None
    return reports.together(found, machines, started_s)


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
