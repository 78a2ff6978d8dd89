"""What the ranks of `shardkit doctor` try together: they meet as those of a run, compare machines, time collectives.

It is the script that `shardkit launch`'s machinery runs on every rank: a file, no module, since Python imports from the
folder of a script, and for a module from the working folder.
"""

import contextlib
import json
import os
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardkit import env
from shardkit.config import files
from shardkit.config.schema import Config
from shardkit.distributed import process, xla
from shardkit.distributed.control import ControlGroup
from shardkit.distributed.process import Process
from shardkit.doctor import findings, machine
from shardkit.doctor.findings import Finding, Level, as_json, from_json
from shardkit.launch import names
from shardkit.sizes import in_words
from shardkit.wording import counted

ROUNDS = 5
SKEW_S = 1.0
"""Clocks that differ by more mix up the times in logs and the order of files."""
SIZE_BYTES = {"gloo": 1 << 24}
GPU_SIZE_BYTES = 1 << 28
SLOW = {"gloo": 50e6}
"""Bytes a second, per rank, below which something is in the way: gloo at half of a 1 Gbit/s network, ..."""
GPU_SLOW = 1e9
"""... and NCCL at a 10 Gbit/s network, which an accelerator never waits for in less than its own time."""
ADVICE = {"gloo": "GLOO_SOCKET_IFNAME chooses the interface, and the cores may be busy"}
NCCL_ADVICE = "NCCL_DEBUG=INFO says over what it goes; NCCL_SOCKET_IFNAME and NCCL_IB_HCA choose"
OTHER_ADVICE = "the documentation of this backend says how to see over what it goes, and how to choose"


def main() -> None:
    """Collective: on every rank. Leaves what was found beside the logs of each machine."""
    log_dir = Path(env.get(names.LOG_DIR) or ".")
    say("the ranks meet")
    here = process.start(with_devices(files.read(env.resolved_config_path() or "")))
    number = int(env.get("GROUP_RANK") or 0)
    own = []
    if here.local_rank == 0:
        own = [*from_json(json.loads((log_dir / findings.OWN_FILE).read_text())), *limits(here, number)]
    mine = {"machine": number, "host": socket.gethostname(), "facts": machine.facts(), "findings": as_json(own)}
    everyone = here.control.exchange(mine)
    machines = [rank["machine"] for rank in everyone]
    found = [finding for rank in everyone for finding in from_json(rank["findings"])]
    found += [Finding("meeting", f"{counted(here.world_size, 'rank')} through {here.backend}"), *versions(everyone)]
    found += xla_devices()
    say("compares the clocks and the folder")
    found += clocks(here.control, machines)
    found += shared_folder(here, Path(env.get(findings.FOLDER) or "."), machines)
    measured = bandwidths(here, machines) if here.world_size > 1 else []
    found += [judged(row, measured) for row in measured]
    if here.local_rank == 0:
        hosts = {rank["machine"]: rank["host"] for rank in everyone}
        result = {"machines": hosts, "findings": as_json(found), "measured": measured}
        (log_dir / findings.RESULT_FILE).write_text(json.dumps(result))
    process.leave()


def with_devices(found: files.LoadedConfig) -> Config:
    """The configuration; for PyTorch/XLA with its devices, which are started."""
    return process.check_world(found.config, found.chosen) if found.config.mode == "xla" else found.config


def xla_devices() -> list[Finding]:
    """The devices that PyTorch/XLA has started, of all machines."""
    if not xla.is_started():
        return []
    return [Finding("devices", f"{counted(xla.devices().count, 'XLA device')} ({xla.name_of_hardware()})")]


def say(text: str) -> None:
    """How far it has come, from rank 0."""
    if not int(env.get("RANK") or 0):
        print(f"doctor: {text}", file=sys.stderr, flush=True)


def limits(here: Process, number: int) -> list[Finding]:
    """The limit of open files of a rank. The start of the ranks has raised it, and refuses one that is too low."""
    try:
        import resource
    except ImportError:  # Windows
        return []
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    text = "any number" if allowed == resource.RLIM_INFINITY else str(allowed)
    needed = process.FILES_BESIDE + process.GROUPS_OF_ALL * here.world_size
    return [Finding("open files", f"{text} allowed for each rank, about {needed} needed", machine=number)]


def versions(everyone: list[dict[str, Any]]) -> list[Finding]:
    """What differs between the machines, of which a run says nothing."""
    found = []
    for name in everyone[0]["facts"]:
        values = {rank["machine"]: rank["facts"][name] for rank in everyone}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{value} on machine {number}" for number, value in sorted(values.items()))
            found.append(Finding(f"{name} differs", text, Level.WARNING, "start all machines from one image"))
    has_others = any(rank["machine"] for rank in everyone)
    return found or [Finding("versions alike", "the same on all machines")] if has_others else []


def clocks(control: ControlGroup, machines: list[int]) -> list[Finding]:
    """How far the machines' clocks are apart. Collective."""
    rounds = []
    for _ in range(ROUNDS):
        before = time.time()
        control.exchange(None)  # at some moment, all have come and none has left
        rounds.append((before, time.time()))
    offsets = {
        number: skew(times) for number, times in zip(machines, with_first(control.exchange(rounds)), strict=True)
    }
    found = []
    for number, offset in sorted(offsets.items()):
        if abs(offset) > SKEW_S:
            change = "set it by NTP (chrony): logs and files are told by time"
            found.append(Finding("clock", f"{offset:+.1f} s from machine 0's", Level.WARNING, change, number))
    return found or [Finding("clocks", f"within {SKEW_S:g} s of one another")] if len(offsets) > 1 else []


def with_first(rounds: list[Any]) -> list[list[tuple[float, float, float, float]]]:
    """Each rank's times beside rank 0's: (before, after, rank 0's before, its after), round by round."""
    return [[(*own, *first) for own, first in zip(of_rank, rounds[0], strict=True)] for of_rank in rounds]


def skew(times: list[tuple[float, float, float, float]]) -> float:
    """The least difference of two clocks, in seconds, that fits all rounds: in each they shared one moment."""
    least = max(before - first_after for before, _, _, first_after in times)
    most = min(after - first_before for _, after, first_before, _ in times)
    return least if least > 0 else most if most < 0 else 0.0


def shared_folder(here: Process, folder: Path, machines: list[int]) -> list[Finding]:
    """Whether all machines see the same folder: checkpoints need that. Collective."""
    if len(set(machines)) == 1:
        return []
    mark = folder / f".shardkit-doctor-{here.control.share(secrets.token_hex(8))}"
    try:
        problems = here.control.exchange(_problem_of(mark.touch) if here.rank == 0 else None)
        if problems[0] is not None:
            return [Finding("shared folder", problems[0], Level.WARNING, "name another one with --folder", machines[0])]
        seen = here.control.exchange(_sees(mark))
    finally:
        if here.rank == 0:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)
    blind = sorted({number for number, sees in zip(machines, seen, strict=True) if not sees})
    if not blind:
        return [Finding("shared folder", f"all machines see {folder}")]
    change = "checkpoints need a folder that all machines share: name it with --folder"
    return [Finding("shared folder", f"{folder} is another one there", Level.WARNING, change, m) for m in blind]


def _problem_of(action: Callable[[], None]) -> str | None:
    """What the system says against it."""
    try:
        action()
    except OSError as error:
        return str(error)
    return None


def _sees(mark: Path) -> bool:
    """Whether the folder lists it: a listing asks the file server anew."""
    try:
        return mark.name in os.listdir(mark.parent)
    except OSError:
        return False


def bandwidths(here: Process, machines: list[int]) -> list[dict[str, Any]]:
    """Bytes a second of all-reduce and all-gather: among all ranks, between machines, inside each. Collective."""
    rows, device = [], torch.device("cpu") if here.backend == "gloo" else here.device  # XLA's are joined by gloo, too
    for name, number, members in groups_of(machines):
        group = dist.new_group(members)
        size = SIZE_BYTES.get(here.backend, GPU_SIZE_BYTES)
        say(f"times all-reduce and all-gather of {in_words(size)}, {name}")
        seconds = timed(group, len(members), size, device) if here.rank in members else None
        slowest = [max(times) for times in zip(*filter(None, here.control.exchange(seconds)), strict=True)]
        for kind, taken_s, trips in zip(("all-reduce", "all-gather"), slowest, (2, 1), strict=True):
            speed = trips * (len(members) - 1) / len(members) * size / taken_s
            rows.append({"kind": kind, "among": name, "machine": number, "ranks": len(members), "size_bytes": size})
            rows[-1] |= {"seconds": taken_s, "bytes_per_s": speed, "backend": here.backend}
    return rows


def groups_of(machines: list[int]) -> list[tuple[str, int | None, list[int]]]:
    """(name, its machine or None, ranks) of the groups that are timed, from each rank's machine."""
    numbers = sorted(set(machines))
    everyone = list(range(len(machines)))
    if len(numbers) == 1:
        return [("all ranks", None, everyone)]
    inside = [(f"inside machine {m}", m, [rank for rank in everyone if machines[rank] == m]) for m in numbers]
    across = ("one rank a machine", None, [machines.index(m) for m in numbers])
    found: list[tuple[str, int | None, list[int]]] = [across]
    if len(numbers) < len(machines):
        found = [("all ranks", None, everyone), across, *(group for group in inside if len(group[2]) > 1)]
    return found


def timed(group: Any, count: int, size_bytes: int, device: torch.device) -> list[float]:
    """Seconds of an all-reduce of so many bytes, and of an all-gather that ends with as many. In the group only."""
    whole = torch.ones(size_bytes // 4 // count * count, device=device)
    parts = list(whole.chunk(count))
    part = torch.ones_like(parts[0])
    return [
        median_s(lambda: dist.all_reduce(whole, group=group), device),
        median_s(lambda: dist.all_gather(parts, part, group=group), device),
    ]


def median_s(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that the work takes, after a first time that does not count."""
    taken = []
    for _ in range(ROUNDS + 1):
        began_s = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken[1:])


def judged(row: dict[str, Any], rows: list[dict[str, Any]]) -> Finding:
    """A bandwidth as a finding: slow in itself, or half as fast as the same inside other machines."""
    backend, check = row["backend"], f"{row['kind']}, {row['among']}"
    speed, number = row["bytes_per_s"], row["machine"]
    size, taken_ms = in_words(row["size_bytes"]), row["seconds"] * 1e3
    text = f"{in_words(int(speed))}/s ({size} in {taken_ms:.1f} ms, {row['ranks']} ranks)"
    advice = ADVICE.get(backend, NCCL_ADVICE if "nccl" in backend else OTHER_ADVICE)
    if speed < SLOW.get(backend, GPU_SLOW):
        return Finding(check, text, Level.WARNING, f"slow: {advice}", number)
    others = [o["bytes_per_s"] for o in rows if o["kind"] == row["kind"] and o["machine"] not in (None, number)]
    if number is not None and others and speed < statistics.median(others) / 2:
        return Finding(check, text, Level.WARNING, f"half as fast as on the other machines: {advice}", number)
    return Finding(check, text, machine=number)


if __name__ == "__main__":
    main()
