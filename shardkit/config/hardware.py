"""The hardware of this machine: devices, cores, memory, and the scheduler's job. This process does not load torch."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from shardkit import env
from shardkit.config import other_devices
from shardkit.config.scheduler import Scheduler, scheduler
from shardkit.digits import number_in
from shardkit.wording import counted

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# bf16 needs an NVIDIA GPU of compute capability 8.0 or newer (CUDA C++ Programming Guide, arithmetic instructions).
_BF16_CAPABILITY = 8.0
EIGHT_BITS = {"fp8": 8.9, "mxfp8": 10.0}
"""The same for products of matrices in fp8, and in fp8 with a scale for each 32 numbers (PTX ISA, mma and tcgen05)."""

TOOL_S = 20
"""How long a tool may take."""
_NO_GPU = "No devices were found"
"""What nvidia-smi says where the driver works, and the machine, or this job, has no GPU."""


def multiplies_in(capability: float | None, dtype: str) -> bool | None:
    """Whether a GPU of this capability multiplies matrices in fp8 or mxfp8; None where that is not known."""
    return None if capability is None else capability >= EIGHT_BITS[dtype]


@dataclass(frozen=True)
class Device:
    """One accelerator that this process may use."""

    name: str
    memory_bytes: int
    kind: str
    capability: float | None = None

    @property
    def has_bf16(self) -> bool:
        return self.capability is None or self.capability >= _BF16_CAPABILITY

    def multiplies_in(self, dtype: str) -> bool | None:
        """Whether it multiplies matrices in fp8 or mxfp8; None where that is not known."""
        return multiplies_in(self.capability, dtype)


@dataclass(frozen=True)
class Hardware:
    """One machine. `memory_bytes` and `cores`: usable by this process, within its cgroup and affinity."""

    devices: tuple[Device, ...]
    cores: int
    memory_bytes: int
    scheduler: Scheduler | None = None
    installed: int = 0
    """Devices of the machine, with those that CUDA_VISIBLE_DEVICES hides; those that it shows may be parts of them."""
    driver_problem: str = ""
    """What nvidia-smi says where it fails and no device is found; empty else."""

    @property
    def in_words(self) -> str:
        if not self.devices:
            fails = " (nvidia-smi fails)" if self.driver_problem else ""
            return f"no GPU{fails}, {counted(self.cores, 'core')}"
        return f"{len(self.devices)} x {self.devices[0].name}"


def detect() -> Hardware:
    """The hardware that this process may use."""
    listed, problem = _nvidia()
    found = listed or _nvidia_without_tool() or _rocm()
    visible = _visible(found) if found else [Device(*one) for one in other_devices.found()]
    installed = len(found or visible)
    return Hardware(
        tuple(visible), _cores(), _memory_bytes(), scheduler(), installed, driver_problem="" if installed else problem
    )


def _run(command: list[str]) -> tuple[str, str]:
    """(a tool's output, why there is none): the first line of what it prints where it fails. Both are empty where it is
    not installed."""
    if shutil.which(command[0]) is None:
        return "", ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {TOOL_S} s"
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout, ""
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return "", said[0].strip() if said else f"exit code {done.returncode}"


def _nvidia() -> tuple[list[Device], str]:
    """(the devices, why nvidia-smi does not tell them)."""
    text, problem = _run(["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader"])
    return parse_nvidia_smi(text), "" if problem == _NO_GPU else problem


def parse_nvidia_smi(text: str) -> list[Device]:
    """Devices from lines such as `NVIDIA H200, 143771 MiB, 9.0`; other lines are ignored. A GPU that shares the host's
    memory has none of its own: `NVIDIA GB10, [N/A], 12.1`."""
    unknown = r"\[[^\]]*\]|N/A"
    memory, version = rf"(?:(?P<memory>\d+)\s*MiB|{unknown})", rf"(?P<capability>[\d.]+|{unknown})"
    pattern = rf"\s*(?P<name>[^,]+?)\s*,\s*{memory}\s*(?:,\s*{version})?\s*"
    devices = []
    for match in filter(None, (re.fullmatch(pattern, line) for line in text.splitlines())):
        capability = match["capability"]
        number = float(capability) if capability and capability[0].isdigit() else None
        devices.append(Device(match["name"], int(match["memory"] or 0) * 2**20, "cuda", number))
    return devices


def _nvidia_without_tool() -> list[Device]:
    """From the driver's files, for containers without nvidia-smi; they do not contain the memory size."""
    texts = [_text(path) for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    names = [re.search(r"Model:\s*(.+)", text) for text in texts]
    return [Device(match[1].strip() if match else "NVIDIA GPU", 0, "cuda") for match in names]


def _rocm() -> list[Device]:
    """AMD GPUs from the kernel's topology: a node with SIMD units is a GPU."""
    nodes = sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"))
    gpus = [path.parent for path in nodes if re.search(r"^simd_count [1-9]", _text(path), re.MULTILINE)]
    return [Device("AMD GPU", _rocm_memory(folder), "rocm") for folder in gpus]


def _rocm_memory(folder: Path) -> int:
    sizes = re.findall(r"size_in_bytes (\d+)", "".join(_text(path) for path in folder.glob("mem_banks/*/properties")))
    return sum(map(int, sizes))


def _visible(devices: list[Device]) -> list[Device]:
    """The devices in $CUDA_VISIBLE_DEVICES (or AMD's two variables); an unknown name hides those after it."""
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    chosen = next((value for value in map(env.get, names) if value is not None), None)
    if chosen is None:
        return devices
    listed, _ = _run(["nvidia-smi", "-L"]) if "MIG-" in chosen else ("", "")
    visible = []
    for name in chosen.split(","):
        name, number = name.strip(), number_in(name)
        if number is not None and number < len(devices):
            visible.append(devices[number])
        elif name.startswith("MIG-") and devices:
            visible.append(_instance(devices[0], name, listed))
        elif name.startswith("GPU-") and devices:
            visible.append(devices[0])
        else:
            break
    return visible


def _instance(gpu: Device, uuid: str, listed: str) -> Device:
    """A part of a GPU (MIG), from the lines of `nvidia-smi -L`, such as `  MIG 1g.10gb  Device 0: (UUID: MIG-...)`; of
    unknown memory where they do not list it. Its profile names GB."""
    found = re.search(rf"MIG\s+(?P<profile>\S+?\.(?P<size>\d+)gb\S*)\s.*\(UUID:\s*{re.escape(uuid)}", listed)
    if found is None:
        return replace(gpu, memory_bytes=0)
    return replace(gpu, name=f"{gpu.name} MIG {found['profile']}", memory_bytes=int(found["size"]) * 10**9)


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    for folder in _control_groups("cpu"):
        new, old = _text(folder / "cpu.max"), [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        quota = new.split() or [text.strip() for text in old]
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
            count = min(count, max(1, round(int(quota[0]) / int(quota[1]))))
    return count


def _memory_bytes() -> int:
    total = re.search(r"MemTotal:\s+(\d+) kB", _text(Path("/proc/meminfo")))
    limits = [int(total[1]) * 1024] if total else []
    if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _control_groups("memory"):
        texts = [_text(folder / name).strip() for name in ("memory.max", "memory.limit_in_bytes")]
        limits += [int(text) for text in texts if text.isdigit()]
    return min(limits, default=0)


def memory_kills() -> int:
    """How many processes of this control group the kernel has ended for lack of memory; 0 where it does not tell."""
    for folder in _control_groups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            if found := re.search(r"^oom_kill (\d+)$", _text(folder / name), re.MULTILINE):
                return int(found[1])
    return 0


def _control_groups(controller: str) -> list[Path]:
    """The folders of this process's control group and of those above it: a limit of any of them applies.

    Schedulers (SLURM, systemd) set limits on groups below the root. In a container the path in /proc may be that of
    the host, of which only the root is visible. Version 2 has one tree, version 1 one for each controller.
    """
    folders = []
    for line in _text(_OWN_GROUPS).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or controller in controllers.split(","):
            top = _CGROUP if number == "0" else _CGROUP / controller
            group = PurePosixPath("/", path)
            folders += [top / place.relative_to("/") for place in (group, *group.parents)]
    return folders or [_CGROUP]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
