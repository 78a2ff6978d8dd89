"""Faults: what each launcher reports of a rank that raises, is killed, leaves or stops, and of a killed launcher.

    python -m benchmarks.faults [--fault raises ...] [--machines 1 2] [--rounds 3] [--limit 60] [--output faults.json]

The same script of plain torch runs under shardkit launch, torchrun and accelerate launch, in turn: 2 CPU ranks a
machine that all-reduce every 50 ms, and the last rank fails at its 20th step ("launcher": the last machine's launcher
is killed then). Two launchers on loopback addresses stand for two machines. Seconds are from the fault to the end of
the last launcher; "named": how many screens name the rank and how it failed, or the lost machine; "orphans": ranks that
are still alive a second later. shardkit's hang timeout is 5 s (600 s by default); the others have none but that of the
collective (30 minutes with gloo).
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import interleaved
from benchmarks.startup import ACCELERATE, SHARDKIT

SHARDKIT_RUN, TORCHRUN, ACCELERATE_RUN = "shardkit launch", "torchrun", "accelerate launch"
FAULTS = {
    "raises": "raise ValueError('at fault')",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "leaves": "os._exit(0)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "launcher": "pass",
}
"""What the script of the last rank does; the launcher is killed from outside."""
SAYS = {"raises": "at fault", "killed": "SIGKILL|-9", "leaves": "exited with code 0", "stopped": "STOPPED"}
RANKS_HERE = 2
START_S = 120.0
SCRIPT = """import os, pathlib, signal, sys, time, torch, torch.distributed as dist
here, last = pathlib.Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]) - 1
(here / ("pid-" + os.environ["RANK"])).write_text(str(os.getpid()))
dist.init_process_group("gloo")
for step in range(1200):
    if step == 20 and int(os.environ["RANK"]) == last:
        (here / "fault").write_text(str(time.time()))
        {fault}
    dist.all_reduce(torch.ones(4))
    time.sleep(0.05)
"""


@dataclass(frozen=True)
class Found:
    """What one launch on `len(codes)` machines came to. `seconds` None: it had not ended within the limit."""

    seconds: float | None
    codes: tuple[int | None, ...]
    named: int
    orphans: int


def main() -> None:
    """Measure, print a table for each number of machines, write JSON where it is asked for."""
    options = _options()
    result: dict[str, Any] = interleaved.surroundings()
    for machines in options.machines:
        print(f"{machines} machine{'s' if machines > 1 else ''} with {RANKS_HERE} ranks", flush=True)
        for fault in options.fault:
            found, left_out = compare(fault, machines, options.rounds, options.limit)
            rounds = {name: [asdict(one) for one in of] for name, of in found.items()}
            result[f"{fault} on {machines}"] = {**rounds, "left_out": left_out}
            for name, of in found.items():
                print(f"  {fault:<8} {name:<18} {in_words(of, machines)}", flush=True)
            for name, reason in left_out.items():
                print(f"  {fault:<8} {name:<18} left out; {reason}", flush=True)
            if options.output:
                interleaved.write(options.output, result)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--machines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after the fault")
    parser.add_argument("--output", type=interleaved.writable)
    return parser.parse_args()


def compare(fault: str, machines: int, rounds: int, limit_s: float) -> tuple[dict[str, list[Found]], dict[str, str]]:
    """What launchers came to in each round, and why others take no part: they do not come as far as the fault."""
    found: dict[str, list[Found]] = {name: [] for name in (SHARDKIT_RUN, TORCHRUN, ACCELERATE_RUN)}
    left_out: dict[str, str] = {}
    for _, name in interleaved.turns(list(found), rounds):
        if name in left_out:
            continue
        try:
            found[name].append(tried(name, fault, machines, limit_s))
        except NoFault as reason:
            left_out[name] = str(reason)
            del found[name]
    if SHARDKIT_RUN in left_out:
        raise SystemExit(f"faults: {SHARDKIT_RUN}: {left_out[SHARDKIT_RUN]}")
    return found, left_out


class NoFault(Exception):
    """Why a launch did not come as far as the fault."""


def tried(name: str, fault: str, machines: int, limit_s: float) -> Found:
    """One launch in a folder of its own, until all launchers have ended or the limit has passed."""
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        (folder / "script.py").write_text(SCRIPT.format(fault=FAULTS[fault]))
        port = interleaved.free_port()
        screens = [folder / f"screen-{machine}" for machine in range(machines)]
        launchers = [
            started(command(name, machine, machines, port, folder), folder, screen)
            for machine, screen in enumerate(screens)
        ]
        try:
            at_s = moment_of(folder / "fault", launchers, screens[-1])
            if fault == "launcher":
                launchers[-1].kill()
            ended_s = wait(launchers, at_s + limit_s)
            codes = tuple(launcher.poll() for launcher in launchers)
            time.sleep(1)
            pids = [int(one.read_text()) for one in folder.glob("pid-*")]
            orphans = sum(map(is_alive, pids)) if ended_s is not None else 0
        finally:
            clean_up(launchers, folder)
        last = machines * RANKS_HERE - 1
        named = sum(names_it(screen.read_text(errors="replace"), last, machines - 1, fault) for screen in screens)
    return Found(None if ended_s is None else ended_s - at_s, codes, named, orphans)


def command(name: str, machine: int, machines: int, port: int, folder: Path) -> list[str]:
    """How this launcher is started on a machine."""
    ranks, script = machines * RANKS_HERE, [str(folder / "script.py"), str(folder)]
    if name == SHARDKIT_RUN:
        several = ["--num-machines", str(machines), "--main", f"127.0.0.1:{port}", "--machine-rank", str(machine)]
        own = ["--logs", str(folder / f"logs-{machine}"), "--set", "shardkit.launch.hang_timeout_s=5"]
        return [*SHARDKIT, "launch", "--cpu", "-n", str(ranks), *(several if machines > 1 else []), *own, *script]
    if name == TORCHRUN:
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS_HERE)]
        where = ["--nnodes", str(machines), "--node-rank", str(machine), "--master-addr", "127.0.0.1"]
        return [*words, *where, "--master-port", str(port), *script]
    words = [*ACCELERATE, "launch", "--use_fsdp", "--num_processes", str(ranks), "--num_machines", str(machines)]
    words += ["--mixed_precision", "no", "--dynamo_backend", "no", "--machine_rank", str(machine)]
    return [*words, "--main_process_ip", "127.0.0.1", "--main_process_port", str(port), *script]


def started(words: list[str], folder: Path, screen: Path) -> subprocess.Popen:
    with screen.open("w") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.Popen(words, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True)


def moment_of(path: Path, launchers: list[subprocess.Popen], screen: Path) -> float:
    """When the fault happened, in seconds since the epoch. NoFault, with what the screen says, where it does not."""
    until_s = time.monotonic() + START_S
    while not path.exists() or not path.read_text():
        if time.monotonic() > until_s or all(launcher.poll() is not None for launcher in launchers):
            raise NoFault(f"it did not come as far as the fault: {screen.read_text(errors='replace').strip()[-300:]}")
        time.sleep(0.02)
    return float(path.read_text())


def wait(launchers: list[subprocess.Popen], until_s: float) -> float | None:
    """When the last one ended; None where one still runs at that time."""
    while any(launcher.poll() is None for launcher in launchers):
        if time.time() > until_s:
            return None
        time.sleep(0.02)
    return time.time()


def names_it(screen: str, rank: int, machine: int, fault: str) -> bool:
    """Whether a screen says of this rank, and of no other first, how it failed; or that this machine is lost."""
    if fault == "launcher":
        return re.search(rf"lost machine {machine}|failed to send a keep-alive heartbeat", screen) is not None
    ours = re.search(r"rank (\d+) failed first: (.*)|First to stop: rank (\d+)", screen)
    theirs = re.search(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(.*)", screen, re.DOTALL)
    if ours:
        return int(ours[1] or ours[3]) == rank and re.search(SAYS[fault], screen) is not None
    return theirs is not None and int(theirs[1]) == rank and re.search(SAYS[fault], screen) is not None


def in_words(found: list[Found], machines: int) -> str:
    """`1.2 s, exit 1 and 1, named on 2 of 2, 0 orphans`: the median, and the worst of the rounds."""
    seconds = [one.seconds for one in found if one.seconds is not None]
    ended = f"{statistics.median(seconds):.1f} s" if len(seconds) == len(found) else "not within the limit"
    codes = " and ".join(str(code) for code in found[-1].codes)
    named, orphans = min(one.named for one in found), max(one.orphans for one in found)
    return f"{ended}, exit {codes}, named on {named} of {machines}, {orphans} orphans"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def clean_up(launchers: list[subprocess.Popen], folder: Path) -> None:
    """End what is left of a round."""
    for launcher in launchers:
        launcher.kill()
        launcher.wait()
    for path in folder.glob("pid-*"):
        if is_alive(pid := int(path.read_text())):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
