"""Checks before ranks are started, without torch. All problems are reported at once."""

import errno
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from shardkit.config import host_port, tasks, xla
from shardkit.config.hardware import Hardware
from shardkit.config.scheduler import Scheduler
from shardkit.config.schema import Config
from shardkit.digits import number_in
from shardkit.errors import EXIT_CONFIG, EXIT_MACHINE, ConfigError, MachineError, ShardkitError
from shardkit.launch import addresses, pod, ports, preloaded
from shardkit.launch.spec import device_of, rendezvous_of, shown_ranks, world_size_of
from shardkit.sizes import in_words
from shardkit.storage import objects
from shardkit.storage.url import Url, is_url, place_of
from shardkit.wording import counted

# Host memory of a process that has imported torch and shardkit (torch 2.13 on Linux: 0.2 to 0.3 GiB).
RANK_BYTES = 2**28
SOCKET_FOLDER_BYTES = 107 - len("/pymp-12345678/listener-12345678")
"""The longest path of a folder in which Python's multiprocessing can make a socket (unix(7): 107 bytes)."""
_STREAMS = {"-", "/dev/stdin", "/dev/null"}
_SHELL = re.compile(rb"#!\s*(?:\S*/env\s+)?(?:\S*/)?(?:ba|da|z|k|fi)?sh\b")
_EXECS_PYTHON = (b"'''exec", b'"""exec', b'"exec"')
"""The second line of a Python script that starts its own interpreter through a shell, as pip writes for long paths."""


@dataclass(frozen=True)
class Problem:
    """A reason not to start, with its exit code."""

    text: str
    exit_code: int = EXIT_CONFIG


@dataclass(frozen=True)
class Machine:
    """The facts about this machine that a launch needs."""

    devices: tuple[str, ...]
    cores: int
    memory_bytes: int | None = None
    installed: int = 0
    """GPUs of the machine, with those that variables hide."""
    kind: str = "cuda"
    """The devices' kind, for torch; that of AMD's GPUs is cuda, too."""
    driver_problem: str = ""
    """What nvidia-smi says where it fails and no device is found; empty else."""

    @classmethod
    def of(cls, hardware: Hardware) -> "Machine":
        """This one, as its hardware was detected."""
        names = tuple(device.name for device in hardware.devices)
        kind = next((device.kind for device in hardware.devices if device.kind != "rocm"), "cuda")
        return cls(names, hardware.cores, hardware.memory_bytes, hardware.installed, kind, hardware.driver_problem)

    @property
    def noun(self) -> str:
        """What one of its devices is called."""
        return "GPU" if self.kind == "cuda" else f"{self.kind} device"


def raise_all(problems: list[Problem]) -> None:
    """Raise one error with all problems: MachineError if all are of the machine, else ConfigError."""
    if not problems:
        return
    text = [problem.text for problem in problems]
    text.append(f"{counted(len(problems), 'error')}. Nothing was started.")
    only_machine = all(problem.exit_code == EXIT_MACHINE for problem in problems)
    error: ShardkitError = MachineError("\n".join(text)) if only_machine else ConfigError(text)
    raise error


def script_problems(script: str, is_module: bool) -> list[Problem]:
    """Whether the script or module exists, and can be run by every rank."""
    if is_module:
        return [] if _module_exists(script) else [Problem(_unknown_module(script))]
    path = Path(script)
    if script in _STREAMS or script.startswith(("/dev/fd/", "/proc/self/fd/")) or path.is_fifo():
        return [Problem(f"launch: script {script} is a stream, which only one rank could read; save it to a file.")]
    if path.is_file():
        return [Problem(f"launch: script {script} {text}") for text in [_problem_of_content(path)] if text]
    if path.is_dir() and (path / "__main__.py").is_file():
        return []
    if re.fullmatch(r"python[\d.]*", script) and not path.exists():
        return [Problem(f"launch: give the script alone, without {script}; the ranks run this Python.")]
    what = "is a folder without __main__.py" if path.is_dir() else "does not exist"
    return [Problem(f"launch: script {script} {what} (in {Path.cwd().name}/); {_near(path)}")]


def run_problems(
    config: Config, machine: Machine, variables: Mapping[str, str], has_number: bool = True
) -> list[Problem]:
    """Whether this machine can run a valid configuration; or, for a launch on a TPU pod, start it. `has_number`:
    whether somebody gave this machine its number."""
    if is_on_pod(config):
        texts = [*pod.problems(config), *(f"launch: {text}" for text in xla.problems(config))]
        return [*(Problem(text) for text in texts), *machines_problems(config)]
    return [
        *(Problem(text) for text in [tasks.launch_problem(variables)] if text),
        *machines_problems(config),
        *(Problem(f"launch: {text}") for text in xla.problems(config)),
        *device_problems(config, machine, variables),
        *memory_problems(config, machine),
        *loopback_problems(config),
        *(port_problems(config) if has_number or config.shardkit.launch.min_machines is None else ()),
        *show_problems(config),
        *store_problems(config),
    ]


def is_on_pod(config: Config) -> bool:
    """Whether to launch on all machines of a TPU pod, instead of on this machine."""
    return device_of(config) == "xla" and config.tpu_use_cluster


def machines_problems(config: Config) -> list[Problem]:
    """Whether the address of machine 0 is known, if there are several."""
    if config.num_machines == 1 or config.main_process_ip:
        return []
    return [Problem(f"launch: {config.num_machines} machines need the address of machine 0; give --main HOST:PORT.")]


def number_problems(config: Config, job: Scheduler | None = None) -> list[Problem]:
    """Whether this machine, to which nobody gave a number, may be machine 0, which is the default: else several would
    take themselves for it, and wait. An elastic run gives out the numbers itself. `job`: the scheduler's."""
    host = config.main_process_ip
    if config.num_machines == 1 or host is None or config.shardkit.launch.min_machines is not None:
        return []
    if _is_here(host):
        return []
    if job is not None and job.machines == config.num_machines:
        text = (
            f"launch: machine_rank is missing: the {job.name} job has {job.machines} machines, from {host} on, and "
            f"nothing says which one this is (got the host name {socket.gethostname()}); start it with the scheduler's "
            "own program on each machine, or give each its number with --machine-rank N, from 0 on."
        )
        return [Problem(text)]
    if addresses.resolve(host) is None:
        return []
    text = (
        f"launch: machine_rank is missing, and {host} is not an address of this machine, as it would be of machine 0 "
        "(got no number); give each machine its own with --machine-rank N, from 0 on."
    )
    return [Problem(text)]


def device_problems(config: Config, machine: Machine, variables: Mapping[str, str]) -> list[Problem]:
    """Whether this machine has enough devices for its ranks."""
    device, wanted = device_of(config), config.num_processes // config.num_machines
    if device == "xla":
        text = xla.installed_problem()
        return [Problem(f"launch: {text}", EXIT_MACHINE)] if text else []
    if device == "cpu":
        return []
    if wanted <= len(machine.devices):
        return _of_gpu_ids(config, machine)
    fails = f" (nvidia-smi fails: {machine.driver_problem})" if machine.driver_problem else ""
    have = counted(len(machine.devices), machine.noun) if machine.devices else f"no GPU{fails}"
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    check = f' or check CUDA_VISIBLE_DEVICES (now "{visible}")' if visible is not None else ""
    fewer = f"set it to {len(machine.devices) * config.num_machines}, or " if machine.devices else ""
    scope = "" if config.num_machines == 1 else f", {wanted} of them on each machine,"
    text = (
        f"launch: num_processes is {config.num_processes}{scope} but this machine has {have}; "
        f"{fewer}pass --cpu to run on the CPU{check}."
    )
    return [Problem(text, EXIT_MACHINE)]


def _of_gpu_ids(config: Config, machine: Machine) -> list[Problem]:
    """Whether the chosen GPUs exist. Their numbers are those of the machine, whatever CUDA_VISIBLE_DEVICES is."""
    if machine.kind != "cuda" and config.gpu_ids and config.gpu_ids.strip().lower() != "all":
        text = (
            f"launch: gpu_ids: chooses among GPUs of NVIDIA and AMD (got {config.gpu_ids}; this machine has "
            f"{counted(len(machine.devices), machine.noun)}); leave it out, and set the variable that the devices' own "
            "driver reads."
        )
        return [Problem(text, EXIT_MACHINE)]
    numbers = [int(number) for number in (config.gpu_ids or "").split(",") if number.strip().isdigit()]
    beyond = [number for number in numbers if number >= machine.installed]
    if not beyond or not machine.installed:
        return []
    text = (
        f"launch: gpu_ids: there is no GPU {beyond[0]} (got {config.gpu_ids}; this machine has "
        f"{counted(machine.installed, 'GPU')}, numbered from 0); name those that are there."
    )
    return [Problem(text, EXIT_MACHINE)]


def port_problems(config: Config) -> list[Problem]:
    """Whether this machine can listen on the port of the rendezvous, if it has to."""
    meeting = rendezvous_of(config)
    if meeting.port == 0 or config.machine_rank != 0 or not _is_here(meeting.host):
        return []
    obstacle = ports.obstacle(meeting.port)
    if obstacle is None:
        return []
    if config.num_machines == 1:
        advice = f"choose another with --main {meeting.host}:PORT, or omit the port to use a free one."
    else:
        advice = (
            "if that is machine 0 of this run, give this one its own number with --machine-rank, else choose another "
            f"port with --main {host_port.with_brackets(meeting.host)}:PORT."
        )
    text = f"launch: port {meeting.port} {obstacle}; {advice}"
    return [Problem(text, EXIT_MACHINE)]


def loopback_problems(config: Config) -> list[Problem]:
    """Whether the ranks of a single machine can reach each other. Else they would try for minutes. Sends nothing: to
    connect a datagram socket only looks up the route."""
    if config.num_machines > 1:
        return []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("127.0.0.1", 9))
    except OSError as error:
        if error.errno == errno.ENETUNREACH:
            text = "launch: 127.0.0.1 cannot be reached (the loopback interface is down); run: ip link set lo up"
            return [Problem(text, EXIT_MACHINE)]
    return []


def show_problems(config: Config) -> list[Problem]:
    """Whether the ranks in --show exist."""
    beyond = sorted(rank for rank in shown_ranks(config.shardkit.launch.show) or () if rank >= world_size_of(config))
    if not beyond:
        return []
    ranks = world_size_of(config)
    got = f"got {counted(ranks, 'rank')}, from 0 on"
    return [Problem(f"launch: show: there is no rank {beyond[0]} ({got}); give existing ranks.")]


def store_problems(config: Config) -> list[Problem]:
    """Whether the checkpoint to resume from exists, and log_dir is a folder."""
    problems, log_dir, resume = [], config.shardkit.launch.log_dir, config.shardkit.checkpoint.resume
    if log_dir is not None and is_url(log_dir):
        problems.append(Problem(f"launch: log_dir: object stores are not supported (got {log_dir}); give a folder."))
    place = place_of(resume)
    if isinstance(place, Url):
        if missing := objects.nothing_there(place):
            problems.append(Problem(f"launch: resume: {missing}"))
    elif resume not in ("never", "auto") and not os.path.exists(place):
        text = f"launch: resume: {resume}: no such folder; give the folder of a checkpoint, or auto for the newest one."
        problems.append(Problem(text))
    return problems


def memory_problems(config: Config, machine: Machine) -> list[Problem]:
    """Whether the ranks fit into this machine's memory, without their models."""
    ranks_here = world_size_of(config) // config.num_machines
    needed = ranks_here * RANK_BYTES
    if machine.memory_bytes is None or needed <= machine.memory_bytes:
        return []
    text = (
        f"launch: {ranks_here} ranks need about {in_words(needed)} for Python and torch alone (got "
        f"{in_words(machine.memory_bytes)} on this machine); start fewer, or add --force."
    )
    return [Problem(text, EXIT_MACHINE)]


def core_warning(config: Config, machine: Machine) -> str | None:
    """A warning if there are more ranks than cores, as where a scheduler gives this task one core; else None."""
    ranks_here = config.num_processes // config.num_machines
    if device_of(config) == "xla" or ranks_here <= machine.cores:
        return None
    return (
        f"warning: {ranks_here} ranks share {counted(machine.cores, 'CPU core')}; the run will be slow "
        "(in a SLURM job: srun --cpus-per-task=N gives it more)."
    )


def driver_warning(machine: Machine) -> str | None:
    """A warning where ranks train on the CPU because the driver of the GPUs does not work; else None."""
    if not machine.driver_problem:
        return None
    return (
        f"warning: the ranks train on the CPU, since no GPU was found, and nvidia-smi fails here (got "
        f"{machine.driver_problem!r}); if this machine has GPUs, check their driver, else choose the CPU with --cpu."
    )


def socket_warning(temporary: str) -> str | None:
    """A warning if sockets in the folder for temporary files would have too long a path; else None."""
    size = len(os.fsencode(temporary))
    if size <= SOCKET_FOLDER_BYTES:
        return None
    return (
        f"warning: TMPDIR is a path of {size} bytes; sockets need at most {SOCKET_FOLDER_BYTES}, and data loaders with "
        "num_workers, which use them, would wait for ever; set TMPDIR to a shorter path, such as /tmp."
    )


def rank_warning(variables: Mapping[str, str]) -> str | None:
    """A warning if this is started by a rank of a launch, of ours or torchrun's, which has others on this machine; else
    None."""
    ranks = number_in(variables.get("LOCAL_WORLD_SIZE", "")) or 1
    if not variables.get("TORCHELASTIC_RUN_ID") or ranks == 1:
        return None
    return (
        f"warning: rank {variables.get('RANK')} of another launch starts this one; if all its {ranks} ranks here do, "
        "each starts all ranks: start it on one rank, or give the outer launch the script itself."
    )


def job_warning(config: Config, job: Scheduler | None, variables: Mapping[str, str]) -> str | None:
    """A warning if the scheduler's job, or what else variables tell, has another number of machines than the
    configuration, or if this launch may be the only one of the job; else None."""
    if job is None and config.num_machines == 1 and (text := tasks.launch_left_alone(variables)):
        return f"warning: {text}"
    if job is None or tasks.is_step_of(config.num_machines, variables):
        return None
    if job.machines == config.num_machines:
        text = tasks.launch_outside_srun(job, variables)
        return f"warning: {text}" if text else None
    alone = "; each machine on which this is started trains separately" if config.num_machines == 1 else ""
    advice = f"add --num-machines {job.machines} for one run on all of them"
    if job.machines == 1:
        advice = "start the others as well, or add --num-machines 1 for a run on this one alone"
    return (
        f"warning: the {job.name} job has {counted(job.machines, 'machine')}, but num_machines is "
        f"{config.num_machines}{alone}; {advice}."
    )


def _problem_of_content(path: Path) -> str | None:
    """Why a file cannot be a Python script, and what to do; None if it can."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        return f"cannot be read ({error.strerror}); check its permissions."
    first, _, rest = head.partition(b"\n")
    if _SHELL.match(first) and not rest.startswith(_EXECS_PYTHON):
        words = first.decode(errors="backslashreplace").strip()
        return f"is not a Python script (its first line is {words}); give the Python script that it starts."
    if path.suffix == ".ipynb" and first.lstrip().startswith(b"{"):
        return "is a notebook; call notebook_launcher in it, or convert it: jupyter nbconvert --to script FILE."
    if path.suffix in (".yaml", ".yml"):
        given = f"--config {shlex.quote(str(path))} SCRIPT.py"
        return f"is no Python script, but YAML; if it is the configuration, give it so: {given}."
    if b"\0" in head and path.suffix != ".pyc" and not preloaded.is_container(str(path)):
        return "is not a Python script (it is a binary file); give a .py file, or -m MODULE for an installed program."
    return None


def _unknown_module(name: str) -> str:
    if Path(name).is_file():
        return f"launch: -m needs the name of a module (got the file {name}); leave out -m, or name it with dots."
    return f"launch: module {name} was not found; check its name, or install it."


def _module_exists(name: str) -> bool:
    """Whether a module can be found, without running code of its package."""
    top, *rest = name.split(".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = find_spec(top)
    except (ImportError, ValueError, AttributeError):
        found = None
    finally:
        sys.path.pop(0)
    if found is None or not rest:
        return found is not None
    places = [Path(place).joinpath(*rest) for place in found.submodule_search_locations or ()]
    return any(place.is_dir() or list(place.parent.glob(f"{place.name}.*")) for place in places)


def _near(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else None
    if folder is None:
        return f"the folder {path.parent} does not exist either."
    names = [entry.name for entry in folder.glob("*.py")]
    near = [name for name in names if name == f"{path.name}.py"] or get_close_matches(path.name, names, 1, cutoff=0.8)
    return f"did you mean {folder / near[0]}?" if near else "check the path."


def _is_here(host: str) -> bool:
    return host == socket.gethostname() or addresses.is_here(addresses.resolve(host))
