"""Start-up: whole-process time of shardkit's commands beside those of torchrun and accelerate, in turn, in one run.

    python -m benchmarks.startup [--rounds 5] [--group launch] [--output startup.json]

Each is a fresh process with warm file caches (the run that checks it comes before), in a folder and a home directory
of its own. "launch" starts a script that does nothing on 2 CPU ranks; "meet on N" one whose ranks import torch, make a
gloo group, pass one barrier and leave, beside a plain Python that only imports torch; "missing script" is the time to
the error. For "validate" accelerate's nearest is `config update`, which reads the file, checks its keys and writes it
again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import interleaved

SHARDKIT = (sys.executable, "-m", "shardkit")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.accelerate_cli")


def launchers(ranks: int, script: str) -> dict[str, tuple[str, ...]]:
    """Who starts a script on so many CPU ranks."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    # With --cpu it would start one process only; with --use_fsdp it starts 2 on a CPU too.
    accelerate = (*ACCELERATE, "launch", "--use_fsdp", "--num_processes", str(ranks), "--num_machines", "1")
    accelerate += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
    return {
        "shardkit launch": (*SHARDKIT, "launch", "--cpu", "-n", str(ranks), script),
        "torchrun": (*torchrun, script),
        "accelerate launch": (*accelerate, script),
    }


# By group: who runs what. The first is ours. Commands run in a folder that holds noop.py and two configuration files.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "launch": launchers(2, "noop.py"),
    **{
        f"meet on {ranks}": {**launchers(ranks, "meet.py"), "python": (sys.executable, "-c", "import torch")}
        for ranks in (1, 2, 8, 64)
    },
    "help": {
        "shardkit --help": (*SHARDKIT, "--help"),
        "accelerate --help": (*ACCELERATE, "--help"),
    },
    "defaults": {
        "shardkit config --defaults": (*SHARDKIT, "config", "--defaults", "--force", "-o", "written.yaml"),
        "accelerate config default": (*ACCELERATE, "config", "default", "--config_file", "default.yaml"),
    },
    "validate": {
        "shardkit config validate": (*SHARDKIT, "config", "validate", "config.yaml"),
        "accelerate config update": (*ACCELERATE, "config", "update", "--config_file", "update.yaml"),
    },
    "missing script": launchers(2, "missing.py"),
}
FAILING = ("missing script",)
NOOP = """import os, pathlib
pathlib.Path("rank" + os.environ["RANK"] + "of" + os.environ["WORLD_SIZE"]).touch()
"""
MEET = f"""import torch
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
{NOOP}"""
CONFIGURATION = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


def main() -> None:
    """Measure, print tables, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--group", action="append", choices=list(GROUPS), help="repeatable; by default all")
    parser.add_argument("--output", type=interleaved.writable)
    options = parser.parse_args()
    result = interleaved.surroundings()
    for group in options.group or GROUPS:
        with tempfile.TemporaryDirectory() as name:
            rounds, left_out = measure(group, Path(name), options.rounds)
        ratios = interleaved.ratios(rounds, next(iter(rounds)))
        result[group] = {**interleaved.summary(rounds, ratios), "left_out": left_out}
        print(f"{group}\n{interleaved.table(rounds, ratios, 's')}")
        for name, reason in left_out.items():
            print(f"  {name}: left out; {reason}")
    if options.output:
        interleaved.write(options.output, result)


def measure(group: str, folder: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds by command and round, and why a command was left out."""
    actions: dict[str, Callable[[], float]] = {}
    left_out: dict[str, str] = {}
    for name, command in GROUPS[group].items():
        place = folder / name.replace(" ", "_")
        _furnish(place)
        problem = check(command, place, group)
        if problem:
            left_out[name] = problem
        else:
            actions[name] = partial(seconds, command, place)
    ours = next(iter(GROUPS[group]))
    if ours in left_out:
        raise SystemExit(f"startup: {ours}: {left_out[ours]}")
    return interleaved.measure(actions, rounds), left_out


def _furnish(place: Path) -> None:
    place.mkdir()
    (place / "noop.py").write_text(NOOP)
    (place / "meet.py").write_text(MEET)
    for name in ("config.yaml", "update.yaml"):
        (place / name).write_text(CONFIGURATION)


def check(command: tuple[str, ...], place: Path, group: str) -> str | None:
    """Runs the command once: why it cannot be compared here, or None where it does what the group is about."""
    done = _run(command, place)
    if bool(done.returncode) != (group in FAILING):
        return f"exit code {done.returncode}: {(done.stderr or done.stdout).strip()[-300:]}"
    ranks = 2 if group == "launch" else int(group.partition("meet on ")[2] or 0)
    if "-c" not in command and not all((place / f"rank{rank}of{ranks}").exists() for rank in range(ranks)):
        return f"it did not start {ranks} ranks"
    if group in FAILING and "missing.py" not in done.stdout + done.stderr:
        return f"it failed for another reason: {(done.stderr or done.stdout).strip()[-300:]}"
    return None


def seconds(command: tuple[str, ...], place: Path) -> float:
    """From the start of the process to its end. `accelerate config default` writes only where there is no file."""
    (place / "default.yaml").unlink(missing_ok=True)
    started = time.perf_counter()
    _run(command, place)
    return time.perf_counter() - started


def _run(command: tuple[str, ...], place: Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "HOME": str(place), "HF_HOME": str(place), "XDG_STATE_HOME": str(place)}
    return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, timeout=300)


if __name__ == "__main__":
    main()
