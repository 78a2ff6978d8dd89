"""Starts the ranks through torch elastic, in this process, and stays until the last one has ended.

run(spec)           log folder, torch, ranks, restarts; returns after success, raises what the run ended with
run_once(spec, ..)  the ranks, once
start_ranks(..)     torch elastic itself: rendezvous, processes, who failed
"""

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardkit import env
from shardkit.config import files
from shardkit.errors import EXIT_PREEMPTED, HangError, MachineError, Preempted, RankFailure, ShardkitError
from shardkit.launch import diagnosis, names, records, ways
from shardkit.launch.diagnosis import Outcome
from shardkit.launch.output import Output
from shardkit.launch.restarts import Restarts
from shardkit.launch.spec import LaunchSpec, headline
from shardkit.launch.watch import Hang, Watch
from shardkit.launch.ways import Start


@dataclass(frozen=True)
class Attempt:
    """What came of starting the ranks once."""

    outcomes: tuple[Outcome, ...]
    watch: Watch
    started_s: float
    has_failed: bool

    @property
    def committed_step(self) -> int:
        """The newest step of which some rank saw a complete checkpoint; -1: none."""
        return max((rank.place.committed_step for rank in self.watch.ranks.values()), default=-1)


def run(spec: LaunchSpec) -> Path:
    """The run's folder, after the launch came to a good end.

    Raises RankFailure, HangError, Preempted, MachineError, or KeyboardInterrupt.
    """
    log_dir = make_log_dir(spec)
    say(headline(spec, _short(log_dir)))
    began_s = time.monotonic()
    restarts = Restarts(spec.launch.max_restarts)
    with ways.prepared(spec) as start:
        keep_in_file(logging.getLogger("torch.distributed.elastic"), log_dir / "launcher.log")
        while True:
            error = run_attempt(spec, start, log_dir, restarts)
            if error is None:
                say(f"done in {_duration(time.monotonic() - began_s)}, {_ranks(spec.world_size)}, exit 0")
                return log_dir
            restarts.count(error)
            say(restarts.announcement())


def run_attempt(spec: LaunchSpec, start: Start, log_dir: Path, restarts: Restarts) -> ShardkitError | None:
    """None after success; the error where the ranks may be started again; raises it where they may not."""
    with tempfile.TemporaryDirectory(prefix="shardkit-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        env.update(run_variables(spec, log_dir, folder, restarts.number, restarts.newest_step >= 0))
        output = Output(
            folder, log_dir, spec.ranks_here, len(str(spec.world_size - 1)), spec.shown_ranks, spec.has_prefix
        )
        output.start()
        try:
            attempt = run_once(spec, start, folder, log_dir, restarts.number)
        finally:
            output.close()
        restarts.saw_checkpoint(attempt.committed_step)
        error = error_of(attempt, spec, log_dir, output) if attempt.has_failed else None
    if error is not None and not restarts.allows(error):
        raise restarts.final(error)
    return error


def run_variables(spec: LaunchSpec, log_dir: Path, folder: Path, restart: int, has_checkpoint: bool) -> dict[str, str]:
    """The variables of the ranks, with those that are known only now; writes the resolved configuration."""
    config = spec.config
    if restart and (config.shardkit.checkpoint.resume == "never" or has_checkpoint):
        config = files.overlaid(config, {"shardkit.checkpoint.resume": "auto"})
    path = log_dir / ("config.yaml" if spec.machine_rank == 0 else f"config-{spec.machine_rank}.yaml")
    files.write(config, path)
    path.with_suffix(".origins.json").write_text(json.dumps(spec.origins, indent=1))  # for the table at the start
    return {
        **spec.environment,
        names.RESOLVED_CONFIG: str(path.resolve()),
        names.CONFIG_DIGEST: files.digest(config.model_copy(update={"main_process_ip": None})),
        names.PROGRESS_DIR: str(folder),
        names.LOG_DIR: str(log_dir.resolve()),
        names.LAUNCHER_PID: str(os.getpid()),
    }


def run_once(spec: LaunchSpec, start: Start, folder: Path, log_dir: Path, restart: int) -> Attempt:
    """Starts the ranks and waits for the last one."""
    watch = Watch(folder, log_dir, spec.launch.hang_timeout_s, spec.launch.stop_timeout_s)
    started_s = time.monotonic()
    watch.start()
    try:
        with signals_to(watch):
            codes = start_ranks(spec, start, folder, restart)
    finally:
        watch.close()
    outcomes = outcomes_of(watch, codes, records.read_errors(folder))
    return Attempt(outcomes, watch, started_s, any(codes.values()))


@contextlib.contextmanager
def signals_to(watch: Watch) -> Iterator[None]:
    """SIGTERM, SIGUSR1 and Ctrl-C go to the ranks; while there are none yet, they end the launch."""

    def tell(number: int, frame: object) -> None:
        if not watch.ranks and not records.read_places(watch.folder):
            raise (
                KeyboardInterrupt
                if number == signal.SIGINT
                else RankFailure(f"launch: {diagnosis.signal_name(number)} before the ranks had started.", 128 + number)
            )
        if watch.stop is None:
            say(f"launch: {diagnosis.signal_name(number)}: telling the ranks to stop; once more ends them at once")
        watch.tell_to_stop(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    found = {number: signal.signal(number, tell) for number in numbers}
    try:
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


def start_ranks(spec: LaunchSpec, start: Start, folder: Path, restart: int) -> dict[int, int]:
    """Exit codes of this machine's ranks, by rank, negative for signals: 0 for all after success."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from shardkit.launch import rendezvous
    from shardkit.launch.agent import Agent

    meeting = rendezvous.handler(spec, restart)
    worker = WorkerSpec(
        role="default",
        local_world_size=spec.ranks_here,
        entrypoint=spec.script,
        rdzv_handler=meeting,
        max_restarts=0,
        monitor_interval=0.02,
    )
    agent = Agent(worker, start, folder, restart, spec.launch.max_restarts)
    try:
        agent.run()
    except (RuntimeError, OSError, TimeoutError) as error:
        raise MachineError(_no_meeting(spec, error)) from error
    finally:
        meeting.shutdown()
    return agent.exit_codes()


def outcomes_of(watch: Watch, codes: dict[int, int], errors: dict[int, records.RankError]) -> tuple[Outcome, ...]:
    """What their parent, the watch and the ranks themselves know of each rank, put together."""
    outcomes = []
    others_failed = any(code not in (0, -signal.SIGTERM) for code in codes.values())
    for rank in sorted({*codes, *watch.ranks, *errors}):
        known = watch.ranks.get(rank)
        code = codes.get(rank)
        outcomes.append(
            Outcome(
                rank=rank,
                pid=known.place.pid if known else 0,
                exit_code=code,
                ended_s=known.ended_s if known else None,
                error=errors.get(rank),
                was_killed=(known is not None and known.place.pid in watch.killed)
                or (code == -signal.SIGTERM and others_failed),
                phase=known.place.phase if known else "",
                step=known.place.step if known else 0,
            )
        )
    return tuple(outcomes)


def error_of(attempt: Attempt, spec: LaunchSpec, log_dir: Path, output: Output) -> ShardkitError:
    """The error that a failed attempt ends with; shows the traceback of the rank that failed first, and no other."""
    watch, logs = attempt.watch, _short(log_dir)
    if watch.hang is not None:
        return HangError(_hang(watch.hang, spec.launch.hang_timeout_s, logs, attempt.committed_step))
    found = diagnosis.diagnose(attempt.outcomes, spec.num_machines > 1)
    stop, root = watch.stop, found.outcome
    if root.error is not None and root.error.exit_code == EXIT_PREEMPTED:
        return Preempted(root.error.message)
    if stop is not None and (root.was_killed or root.exit_code == -stop.number or found.exit_code == 128 + stop.number):
        if stop.number == signal.SIGINT:
            raise KeyboardInterrupt
        name = diagnosis.signal_name(stop.number)
        return RankFailure(f"launch: {name} ended the ranks; nothing was saved for it. logs {logs}", 128 + stop.number)
    if root.error is not None and root.error.kind not in _SHOWN_WITHOUT_TRACEBACK:
        output.show(found.rank, root.error.traceback.rstrip("\n"))
    return RankFailure(diagnosis.render(found, attempt.started_s, logs, attempt.committed_step), found.exit_code)


def make_log_dir(spec: LaunchSpec) -> Path:
    """The folder for the logs, made; a name of its own where none is configured."""
    if spec.launch.log_dir:
        path = Path(spec.launch.log_dir)
        with _writable(path):
            path.mkdir(parents=True, exist_ok=True)
        return path
    stem = time.strftime("runs/%Y%m%d-%H%M%S")
    for number in range(1, 1000):
        path = Path(stem if number == 1 else f"{stem}-{number}")
        with _writable(path):
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            return path
    raise MachineError(f"launch: {stem}: no free name for the logs; give --logs DIR.")


def keep_in_file(logger: logging.Logger, path: Path) -> None:
    """What torch elastic says goes into a file: what matters of it, shardkit says in its own words."""
    for handler in logger.handlers:
        handler.close()
    logger.handlers = [logging.FileHandler(path, delay=True)]
    logger.propagate = False


def say(text: str) -> None:
    """A line of the launcher's own, to stderr."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise MachineError(f"launch: log folder {path} is a file; give another one with --logs DIR.") from None
    except OSError as error:
        raise MachineError(
            f"launch: log folder {path} cannot be made ({error.strerror}); give another one with --logs DIR."
        ) from None


def _hang(hang: Hang, timeout_s: float, logs: str, saved_step: int) -> str:
    lines = [f"launch: HANG, no progress for {timeout_s:g} s", hang.table]
    lines.append(f"  First to stop: rank {hang.first}. The stacks of all ranks are in {logs}/rank*.stack.")
    if hang.all_wait:
        lines.append("  Every rank waits for its peers: their collectives do not match, or the network is in the way.")
    if saved_step >= 0:
        lines.append(f"  Last good checkpoint: step {saved_step}; --resume auto goes on from it.")
    return "\n".join(lines)


def _no_meeting(spec: LaunchSpec, error: Exception) -> str:
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if spec.num_machines == 1:
        return f"launch: the ranks could not be started: {first}"
    return (
        f"launch: machine {spec.machine_rank} of {spec.num_machines} did not meet the others at "
        f"{spec.rendezvous.endpoint} ({spec.rendezvous.backend}): {first}\n"
        "  Start the same command on every machine, each with its own --machine-rank, and let the port through."
    )


def _short(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} m"
    return f"{minutes} m {rest:02d} s" if minutes else f"{seconds:.1f} s"


# What these say is all there is to know; their tracebacks are in the logs.
_SHOWN_WITHOUT_TRACEBACK = {"SystemExit", "KeyboardInterrupt"} | {
    name for name, value in vars(sys.modules["shardkit.errors"]).items() if isinstance(value, type)
}
