"""What can be tried on one machine without ranks: cores, shared memory, disks, addresses, GPUs. Without torch."""

import contextlib
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardkit import __version__
from shardkit.config.schema import Config
from shardkit.doctor.findings import Finding, Level
from shardkit.launch import addresses, preflight
from shardkit.launch.preflight import Machine
from shardkit.launch.spec import device_of, rendezvous_of, world_size_of
from shardkit.sizes import in_words
from shardkit.wording import counted

SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES_A_RANK = 1 << 28
"""Batches that loader workers have ready lie there; Docker gives 64 MiB to all of a container where it is not told."""
DISK_BYTES = 1 << 26
SLOW_DISK = 50e6
"""Bytes a second: a spinning disk writes twice this."""
FREE_BYTES = 2**30
"""Free space below which a warning is due: less than a small model's checkpoint."""
HOT = 87
"""Degrees at which NVIDIA's data centre GPUs begin to slow down."""
BUSY_SHARE = 0.1
"""Part of a GPU's memory in use from which another process is assumed to run there."""
GPU_FIELDS = (
    "index",
    "name",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total",
)


def findings(config: Config, machine: Machine, folder: Path, variables: dict[str, str]) -> Iterator[Finding]:
    """All that is tried here, one after another, each as soon as it is known."""
    yield from configuration(config, machine, variables)
    yield versions()
    yield cores(config, machine)
    yield shared_memory(_ranks_here(config))
    yield disk(folder)
    yield from address(config)
    if device_of(config) == "cuda":
        yield from gpus()
    elif machine.driver_problem:
        change = "check the driver and dmesg, if this machine has GPUs: without it a run trains on the CPU"
        yield Finding("GPUs", f"nvidia-smi fails: {machine.driver_problem}", Level.WARNING, change)


def facts() -> dict[str, Any]:
    """What the machines compare; the launchers refuse another shardkit or torch before that."""
    return {"python": platform.python_version(), "shardkit": __version__, "system": platform.release()}


def configuration(config: Config, machine: Machine, variables: dict[str, str]) -> list[Finding]:
    """What a launch with this configuration would refuse before it starts a rank."""
    found = [
        Finding("configuration", problem.text.removeprefix("launch: "), Level.ERROR)
        for problem in preflight.run_problems(config, machine, variables)
    ]
    ranks = f"{counted(world_size_of(config), 'rank')} on {counted(config.num_machines, 'machine')}"
    device = device_of(config)
    return found or [Finding("configuration", f"{ranks}, {machine.kind if device == 'cuda' else device}")]


def versions() -> Finding:
    """Whether torch is there at all; what it can do is tried by the ranks."""
    text = f"shardkit {__version__}, python {platform.python_version()}"
    if importlib.util.find_spec("torch") is None:
        return Finding("versions", f"{text}, no torch", Level.ERROR, "install torch: see https://pytorch.org")
    try:
        return Finding("versions", f"{text}, torch {version('torch')}")
    except PackageNotFoundError:
        return Finding("versions", f"{text}, torch of an unknown version")


def _ranks_here(config: Config) -> int:
    """The ranks of one machine."""
    return world_size_of(config) // config.num_machines


def cores(config: Config, machine: Machine) -> Finding:
    """Whether each rank has a core of its own."""
    ranks = _ranks_here(config)
    text = f"{counted(machine.cores, 'core')} for {counted(ranks, 'rank')}"
    if ranks > machine.cores:
        change = "start fewer ranks, or give the job more cores (cgroup, --cpus-per-task): ranks take turns"
        return Finding("cores", text, Level.WARNING, change)
    return Finding("cores", text)


def shared_memory(ranks: int, path: Path = SHARED_MEMORY) -> Finding:
    """Whether the workers of data loaders have room to hand over batches."""
    if not path.is_dir():
        return Finding("shared memory", f"no {path} here")
    free = shutil.disk_usage(path).free
    if free < ranks * SHARED_BYTES_A_RANK:
        change = (
            "loaders with num_workers die with SIGBUS when it is full: docker run --shm-size=16g (or --ipc=host); in "
            "Kubernetes an emptyDir with medium: Memory at /dev/shm"
        )
        return Finding("shared memory", f"{in_words(free)} free in {path}", Level.WARNING, change)
    return Finding("shared memory", f"{in_words(free)} free in {path}")


def disk(folder: Path, size_bytes: int = DISK_BYTES) -> Finding:
    """How fast checkpoints and logs get to the disk under the folder, fsync included, and how much room there is."""
    path = folder / f".shardkit-doctor-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        block, began_s = os.urandom(1 << 20), time.perf_counter()
        with path.open("wb") as file:
            for _ in range(size_bytes // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        speed = size_bytes / (time.perf_counter() - began_s)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        change = "name another folder with --folder, or free some of it"
        what = "is a file" if isinstance(error, FileExistsError) else f"cannot be written ({error.strerror})"
        return Finding("disk", f"{folder} {what}", Level.ERROR, change)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    text = f"{in_words(int(speed))}/s into {folder}, {in_words(free)} free"
    if free < FREE_BYTES:
        return Finding("disk", text, Level.WARNING, "free some, or name another folder: a full disk ends a save")
    if speed < SLOW_DISK:
        change = "saves will hold up training: shardkit.checkpoint.blocking: false, or a faster disk"
        return Finding("disk", text, Level.WARNING, change)
    return Finding("disk", text)


def address(config: Config) -> list[Finding]:
    """Over which address and interface this machine takes part; nothing for one machine, which stays on loopback."""
    host = rendezvous_of(config).host
    if config.num_machines == 1 or config.main_process_ip is None:
        return []
    resolved = addresses.resolve(host)
    if resolved is None:
        change = "use the address, or add the name to DNS or /etc/hosts on every machine"
        return [Finding("address", f"--main {host} is not known here", Level.ERROR, change)]
    ours = addresses.towards(resolved)
    if ours is None:
        change = "check this machine's routes and its interface"
        return [Finding("address", f"no way from here to {host} ({resolved})", Level.ERROR, change)]
    text = f"{ours} ({addresses.interface_of(ours) or 'interface unknown'}) towards {host}"
    if config.machine_rank == 0 and not addresses.is_here(resolved):
        change = "give the address of machine 0 itself; or, behind a proxy, shardkit.launch.bind_address"
        return [Finding("address", f"{host} is {resolved}, no address of this machine", Level.WARNING, change)]
    if addresses.is_loopback(resolved) and not addresses.means_loopback(host):
        change = "take the line with this name and 127.* out of /etc/hosts, or give the address itself"
        level = Level.ERROR if config.machine_rank else Level.WARNING  # machine 0 then listens on all its interfaces
        return [Finding("address", f"{host} is {resolved} here, which no other reaches", level, change)]
    if (lookup_s := addresses.lookup_s(resolved)) > addresses.SLOW_LOOKUP_S:
        change = "torch looks up the name for each connection: add it to /etc/hosts, or correct /etc/resolv.conf"
        return [Finding("address", f"{text}, whose name takes {lookup_s:.0f} s to look up", Level.WARNING, change)]
    return [Finding("address", text)]


def gpus() -> list[Finding]:
    """The health of NVIDIA's GPUs, in the words of nvidia-smi; nothing where it is not there."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        text = f"nvidia-smi does not answer ({error})"
        return [Finding("GPUs", text, Level.ERROR, "look at dmesg; restart the machine")]
    if done.returncode != 0:
        last = (done.stdout + done.stderr).strip().rpartition("\n")[2] or "nvidia-smi failed"
        return [Finding("GPUs", last, Level.ERROR, "look at dmesg; check the driver")]
    return [gpu(line) for line in done.stdout.splitlines() if line.strip()]


def gpu(line: str) -> Finding:
    """One GPU, from nvidia-smi's line with `GPU_FIELDS`; what it cannot tell is `[N/A]` there."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(GPU_FIELDS):  # a GPU that is lost has a sentence there
        return Finding("GPUs", line.strip(), Level.ERROR, "look at dmesg; check the driver")
    index, name, used, total, degrees, errors = fields
    text = f"{name}, {used} of {total} MiB used, {degrees} C, uncorrected memory errors {errors}"
    if errors.isdigit() and int(errors):
        return Finding(
            f"GPU {index}", text, Level.ERROR, "its memory is failing: reset or replace it; leave it out now"
        )
    if used.isdigit() and total.isdigit() and int(used) > BUSY_SHARE * int(total):
        return Finding(f"GPU {index}", text, Level.WARNING, "something else uses it: nvidia-smi names the process")
    if degrees.isdigit() and int(degrees) >= HOT:
        return Finding(f"GPU {index}", text, Level.WARNING, "it slows down when so hot: check its cooling")
    return Finding(f"GPU {index}", text)
