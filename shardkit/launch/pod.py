"""Launches on all machines of a TPU pod from another machine: one `gcloud ... ssh` per machine, in parallel.

    commands(config, ...)     the command lines, one per machine
    run(lines)                runs them until all have ended; if one fails, the others are ended

Every machine runs `shardkit launch` with its number, in a folder with the same path, which must contain script and
configuration. `main_process_ip` is the address of machine 0 inside the pod.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from shardkit.config.schema import Config
from shardkit.errors import MachineError, RankFailure
from shardkit.launch import signals
from shardkit.wording import counted

POLL_S = 0.2
STOP_S = 30.0
"""How long the commands of the other machines have to end after one has failed."""


def problems(config: Config) -> list[str]:
    """Missing or invalid settings for a launch on a pod."""
    found = []
    if not config.tpu_name and not config.tpu_vm:
        found.append("launch: tpu_use_cluster needs the name of the TPU (got none); write tpu_name.")
    if config.tpu_vm and len(config.tpu_vm) != config.num_machines:
        found.append(
            f"launch: tpu_vm has {counted(len(config.tpu_vm), 'machine')} (got num_machines {config.num_machines}); "
            "list each one."
        )
    if config.command_file and not _command_file(config.command_file).is_file():
        found.append(f"launch: command_file: does not exist (got {config.command_file}); correct the path.")
    return found


def problem_of_number(config: Config, is_given: bool) -> list[str]:
    """`is_given`: whether a flag gives this machine's number; the commands give each machine its own."""
    if not (is_given or config.machine_rank):
        return []
    return [
        f"launch: machine_rank: with tpu_use_cluster each machine of the pod gets its number (got {config.machine_rank}"
        "); leave it out, or start this machine alone with tpu_use_cluster=false."
    ]


def _command_file(text: str) -> Path:
    return Path(os.path.expanduser(text))


def commands(config: Config, launch: Sequence[str], folder: Path) -> list[list[str]]:
    """A command line for each machine, in order. `launch`: the shared arguments of `shardkit launch`, the script last;
    `folder`: the folder in which they are run."""
    return [_command(config, number, _there(config, number, launch, folder)) for number in range(config.num_machines)]


def _command(config: Config, number: int, there: str) -> list[str]:
    target = config.tpu_vm[number] if config.tpu_vm else str(config.tpu_name)
    line = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", target]
    line += [] if config.tpu_zone is None else ["--zone", config.tpu_zone]
    line += [] if config.tpu_vm else ["--worker", str(number)]
    return [*line, "--command", there]


def _there(config: Config, number: int, launch: Sequence[str], folder: Path) -> str:
    """The shell command of one machine: variables and commands of the configuration, then its `shardkit launch`."""
    from_file = _command_file(config.command_file).read_text().splitlines() if config.command_file else []
    before = [line.strip() for line in [*from_file, *config.commands] if line.strip()]
    own = ["--set", "tpu_use_cluster=false", "--machine-rank", str(number)]
    training = shlex.join(["python3", "-m", "shardkit", "launch", *own, *launch])
    sudo = ["sudo -E " + training] if config.tpu_use_sudo else [training]
    exports = [f"export {shlex.quote(line)}" for line in config.tpu_env]
    return " && ".join([f"cd {shlex.quote(str(folder))}", *exports, *before, *sudo])


def end(running: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ends those that still run: by SIGTERM, and by SIGKILL after STOP_S or where another signal interrupts it."""
    until = time.monotonic() + STOP_S
    try:
        for one in running:
            if one.poll() is None:
                one.terminate()
        while any(one.poll() is None for one in running) and time.monotonic() < until:
            time.sleep(POLL_S)
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
                one.wait()


def run(lines: Sequence[Sequence[str]]) -> None:
    """Runs all commands, and returns when all have succeeded. Raises MachineError if gcloud is missing, RankFailure if
    a command failed or this process got a signal, after ending the others."""
    if shutil.which(lines[0][0]) is None:
        raise MachineError(
            f"launch: tpu_use_cluster needs {lines[0][0]}, which is not installed; install it, or run "
            "`shardkit launch` with tpu_use_cluster: false on each machine of the pod (--dry-run shows the commands)."
        )
    running: list[subprocess.Popen[bytes]] = []
    with signals.end_it_with_an_error("ended the commands of all machines", (signal.SIGTERM, signal.SIGHUP)):
        try:
            for line in lines:
                with signals.held():
                    running.append(subprocess.Popen(line))
            while any(one.poll() is None for one in running) and not any(one.poll() for one in running):
                time.sleep(POLL_S)
            failed = [(number, one.returncode) for number, one in enumerate(running) if one.returncode]
        finally:
            end(running)
    if failed:
        number, code = failed[0]
        code = code if code > 0 else 128 - code  # by a signal
        raise RankFailure(
            f"launch: the command of machine {number} failed (got exit code {code}); see its output.", code
        )
