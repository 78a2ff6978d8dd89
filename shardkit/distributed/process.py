"""This process's rank and device, and the process group."""

import atexit
import gc
import multiprocessing
import os
import shlex
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shardkit import env, open_files
from shardkit.config import hardware, meaning, tasks
from shardkit.config.schema import Config, DistributedType
from shardkit.distributed import accelerators, affinity, control, progress, rank_store, same_config, xla
from shardkit.distributed.control import ControlGroup
from shardkit.errors import ConfigError, MachineError, UsageError
from shardkit.launch import failure, names
from shardkit.log import get_logger
from shardkit.wording import counted

log = get_logger(__name__)

# Process groups over all ranks in a run: the default one, one over replicas and shards, one for async saves.
GROUPS_OF_ALL = 3
# Ends of names of variables by which a driver shows a process some devices: ROCR_VISIBLE_DEVICES, ZE_AFFINITY_MASK.
SHOWING = ("VISIBLE_DEVICES", "AFFINITY_MASK", "VISIBLE_MODULES")
# Other open files of a process: data files, workers' pipes, libraries, devices.
FILES_BESIDE = 256


@dataclass(frozen=True)
class Process:
    """This rank. `control` is its control group; `owns_group`: it has started the process group; `num_machines`: those
    of all ranks, which need not have equally many."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    backend: str
    control: ControlGroup = field(default_factory=ControlGroup, compare=False)
    owns_group: bool = False
    num_machines: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def launched() -> env.Ranks:
    """Rank and world size from a running process group or the environment; else those of a single process.

    Variables of srun or mpirun are translated to those of torch elastic. Raises ConfigError where they are
    contradictory.
    """
    if not dist.is_initialized():
        env.update(tasks.world_of(env.copy()) or {})
    found = env.ranks()
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        if found is None or (found.rank, found.world_size) != (rank, size):
            return env.Ranks(rank, rank, size, size)
    return found or env.Ranks(0, 0, 1, 1)


def _script() -> str:
    """The running script, quoted for a shell."""
    name = sys.argv[0] if sys.argv else ""
    return shlex.quote(name) if name.endswith(".py") else "SCRIPT.py"


def check_world(config: Config, chosen: Mapping[str, str]) -> Config:
    """The configuration with the launched number of ranks; on TPUs with the number of devices, which are started.

    `chosen`: the explicitly set keys, and where. Raises ConfigError where one contradicts the launch; only warns where
    the script was started without a launcher, as for debugging.
    """
    ranks = launched()
    if config.mode == "xla":
        return _with_devices(config, chosen, ranks)
    if ranks.world_size == 1 and env.ranks() is None and (text := tasks.left_alone(env.copy())):
        log.warning("%s", text)
    if config.num_processes != ranks.world_size and "num_processes" in chosen:
        text = f"{chosen['num_processes']}: num_processes: {config.num_processes} requested"
        if env.ranks() is not None or dist.is_initialized():
            raise ConfigError(
                f"{text} (got {ranks.world_size} launched); start as many ranks in all, or write "
                f"num_processes: {ranks.world_size} there."
            )
        log.warning(
            "%s, but this script was started without a launcher; start it with: shardkit launch %s", text, _script()
        )
    config = config.changed(num_processes=ranks.world_size)
    if ranks.world_size == 1 and config.mode == "fsdp" and _shards_alone(config):
        config = config.changed(distributed_type=DistributedType.NO)
    if config.mode == "single" and ranks.world_size > 1:
        if "distributed_type" in chosen:
            raise ConfigError(
                f"distributed_type: NO means one process (got {ranks.world_size} launched); "
                "use FSDP, MULTI_GPU or MULTI_CPU, or launch one process."
            )
        config = config.changed(distributed_type=DistributedType.FSDP)
    return config


def _shards_alone(config: Config) -> bool:
    """Whether FSDP was to run on a device for which torch has none: its only process trains without it."""
    kind = None if meaning.runs_on_cpu(config) else accelerators.kind()
    if kind not in accelerators.ALONE:
        return False
    log.info("distributed_type: FSDP is not there on %s; the process trains the whole model there.", kind)
    return True


def _with_devices(config: Config, chosen: Mapping[str, str], ranks: env.Ranks) -> Config:
    """The configuration with as many processes as there are XLA devices: Accelerate's word for those. ConfigError
    where somebody has chosen another number."""
    found = xla.start(config, ranks.world_size).count
    if "num_processes" in chosen and config.num_processes != found:
        raise ConfigError(
            f"{chosen['num_processes']}: num_processes: {config.num_processes} asked for (got {found} XLA devices); "
            "leave it out: on a TPU it is the number of all its devices."
        )
    return config.changed(num_processes=found)


def start(config: Config) -> Process:
    """This rank, after starting its process group and selecting its device. Collective. An existing group is used.

    The backend is gloo on the CPU; on CUDA, NCCL together with gloo for CPU tensors.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "Accelerator: this is a worker process, which imports the script before its work (got a spawned or "
            'forkserver one); put what the script does below if __name__ == "__main__":, or give the DataLoader '
            'multiprocessing_context="fork".'
        )
    ranks = launched()
    problem, device = _device(config, ranks)
    owns_group = _start_group(config, ranks, device)
    _refuse_other(_lasting(config, device))
    everyone = control.start(config.shardkit.launch.process_group_timeout_s)
    devices, places = zip(*everyone.exchange([_identity(ranks, device), ranks.local_rank]), strict=True)
    shared = _shared_device(ranks, devices, everyone.rank)
    everyone.agree(problem or shared, error=MachineError)
    same_config.compare(config, everyone)
    if config.enable_cpu_affinity and device.type not in ("cpu", "xla"):
        affinity.pin(device)
    progress.configured()
    return Process(
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        device=device,
        backend=str(dist.get_backend()) if dist.is_initialized() else "none",
        control=everyone,
        owns_group=owns_group,
        num_machines=max(1, places.count(0)),
    )


def _start_group(config: Config, ranks: env.Ranks, device: torch.device) -> bool:
    """Starts the process group of all ranks, unless there is one, or one rank needs none; returns whether it has."""
    if not dist.is_initialized():
        _refuse_child_of_rank(ranks)
        env.remove([names.LAUNCHED])
    owns_group = not dist.is_initialized() and (ranks.world_size > 1 or config.mode == "fsdp")
    if owns_group:
        _join(config, ranks, device)
        if ranks.world_size > 1:
            env.mark(_JOINED, MEETING_PLACE)
        _started[:] = [(dist.group.WORLD, _lasting(config, device))]
    if dist.is_initialized() and hasattr(os, "register_at_fork"):  # not on Windows
        _spare_groups_in_forked_processes()
    return owns_group


_JOINED = "SHARDKIT_JOINED"
"""The mark of a rank that is in its process group (`env.mark`)."""

MEETING_PLACE = ("MASTER_ADDR", "MASTER_PORT")


def _refuse_child_of_rank(ranks: env.Ranks) -> None:
    """UsageError in a process that a rank has started, with the rank's own variables: it would wait for the others.

    A rank that makes no Accelerator may run the script as a program, which takes its place. Of processes that it starts
    with multiprocessing there may be several, each of which would take itself for that rank.
    """
    if parent := env.marked_parent(_JOINED, MEETING_PLACE):
        raise UsageError(
            f"Accelerator: this process was started by rank {ranks.rank} of a run (process {parent}), and has its "
            f"variables (got RANK {ranks.rank}, WORLD_SIZE {ranks.world_size}), with which it would wait for the run's "
            f"other ranks; start it by: shardkit launch -n 1 {_script()}, or without these variables."
        )
    parent = env.marked_parent(names.LAUNCHED, names.BY_LAUNCHER)
    if parent and multiprocessing.parent_process() is not None:
        alone = f", or, if each is a run of its own: python {_script()}" if ranks.world_size == 1 else ""
        raise UsageError(
            f"Accelerator: a rank of shardkit launch has started this process with multiprocessing (got a child of "
            f"process {parent}), as mp.spawn does; call its function directly, since launch starts the ranks: "
            f"shardkit launch -n {max(ranks.world_size, 2)} {_script()}{alone}."
        )


@cache
def _spare_groups_in_forked_processes() -> None:
    """Makes garbage collections of forked processes pass over what they inherit. The objects of a run that is over may
    be garbage that holds its process group, and a group's destructor joins threads, which a forked process does not
    have: a DataLoader's worker died of a segmentation fault. None runs before this has taken effect there."""
    os.register_at_fork(before=_hold_collections, after_in_parent=_release_collections, after_in_child=_pass_over)


def _hold_collections() -> None:
    _collections.were_on = gc.isenabled()
    gc.disable()


def _release_collections() -> None:
    if _collections.were_on:
        gc.enable()


def _pass_over() -> None:
    gc.freeze()
    _release_collections()


_collections = threading.local()

_started: list[tuple[Any, dict[str, Any]]] = []
"""The process group that was started here, and its settings, which cannot change while it exists."""


def has_started_group() -> bool:
    """Whether there is a process group, and shardkit has started it in this process."""
    return bool(_started) and dist.is_initialized() and _started[0][0] is dist.group.WORLD


def _lasting(config: Config, device: torch.device) -> dict[str, Any]:
    timeout_s = config.shardkit.launch.process_group_timeout_s
    return {"shardkit.launch.process_group_timeout_s": timeout_s, "debug": config.debug, "device": device.type}


def _refuse_other(wanted: dict[str, Any]) -> None:
    """ConfigError where the existing process group was started with other settings."""
    if not has_started_group():
        return
    problems = [
        f"Accelerator: {name}: {wanted[name]} here, but {value} for the existing process group; use the same value, "
        "or call end_training() of the other Accelerator first."
        for name, value in _started[0][1].items()
        if wanted[name] != value
    ]
    if problems:
        raise ConfigError(problems)


def leave() -> None:
    """Destroys the process group, if there is one. Every rank should call it, after its last collective."""
    env.remove([_JOINED])
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.set_debug_level_from_env()  # `debug: true` has set another one, for all groups of the process
    if "torch.distributed.tensor" in sys.modules:
        _forget_meshes()


def _forget_meshes() -> None:
    """Clears what DTensor has cached by mesh. The meshes of a later process group are equal to those of this one, but
    not their groups, which torch finds by name: there may be none of that name, or another one."""
    from torch.distributed.tensor import _redistribute

    try:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    except ImportError:  # a torch that is too old for FSDP, so that no mesh of a run has been used
        return
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()  # it keeps the meshes, and so the threads of their groups


def _device(config: Config, ranks: env.Ranks) -> tuple[str | None, torch.device]:
    """(the problem or None, the device of this rank)."""
    if config.mode == "xla":
        return None, xla.devices().device
    cpu, kind = torch.device("cpu"), accelerators.kind()
    if meaning.runs_on_cpu(config):
        return None, cpu
    if kind is None:
        return _unusable_gpus(), cpu
    count = 1 if kind in accelerators.ALONE else accelerators.count()
    if count == 1 and kind not in accelerators.ALONE:  # maybe one of its own: `_shared_device`
        return None, accelerators.take(0)
    if ranks.local_rank >= count:
        return _no_device(kind, ranks, count), cpu
    if ranks.one_a_machine and count > 1:
        return (
            f"this machine: WORLD_SIZE counts machines, each with one process (LOCAL_RANK is not set), but this one "
            f"has {count} devices; start `shardkit launch` once on each, or set LOCAL_RANK and LOCAL_WORLD_SIZE too."
        ), cpu
    return None, accelerators.take(ranks.local_rank)


def _unusable_gpus() -> str | None:
    """The problem of a launched rank on a machine with GPUs that torch cannot use; only a warning where the script was
    started without the launcher, which has counted them."""
    found, visible = hardware.detect(), env.get("CUDA_VISIBLE_DEVICES")
    if found.devices:
        text = (
            f"this machine: torch cannot use its GPUs (got {found.in_words}, torch {torch.__version__}); install a "
            "build of torch for them, update their driver, or set use_cpu: true."
        )
    elif found.installed and visible and visible != "-1":
        text = (
            f"this machine: CUDA_VISIBLE_DEVICES names none of its GPUs (got {visible}; it has "
            f"{counted(found.installed, 'GPU')}, numbered from 0); name those that are there, or set use_cpu: true."
        )
    else:
        return None
    if env.get(names.NUM_PROCESSES):
        return text
    log.warning("%s", text)
    return None


def _no_device(kind: str, ranks: env.Ranks, count: int) -> str:
    device = "GPU" if kind == "cuda" else f"{kind} device"
    return (
        f"this machine: no {device} for local rank {ranks.local_rank} (got {count} available); launch at most one rank "
        "per device, or set use_cpu: true."
    )


def _identity(ranks: env.Ranks, device: torch.device) -> str | None:
    """The only device that this rank of several on its machine sees; None where it needs no comparison."""
    if device.type in ("cpu", "xla") or ranks.local_world_size == 1 or accelerators.count() != 1:
        return None
    shown = {name: value for name, value in sorted(env.copy().items()) if name.endswith(SHOWING)}
    return f"{socket.gethostname()} {shown} {accelerators.identity(device)}"


def _shared_device(ranks: env.Ranks, identities: Sequence[str | None], rank: int) -> str | None:
    """The problem if this rank sees one device, which another one has taken; `identities` are those of all ranks. Each
    sees its own where a scheduler binds them: `srun --gpus-per-task=1`."""
    mine = identities[rank]
    if mine is None or mine not in identities[:rank]:
        return None
    return _no_device(accelerators.kind() or "cpu", ranks, 1)


def allow_connections(world_size: int) -> None:
    """Raises the limit of open files to what gloo needs: one per rank and process group. Raises MachineError where the
    system's limit is too low."""
    open_files.allow(FILES_BESIDE + GROUPS_OF_ALL * world_size, f"each of {counted(world_size, 'rank')} needs")


def unchecked_group() -> dist.ProcessGroup | None:
    """The group for torch's DDP: of its own where collectives are checked (`debug: true`), None otherwise.

    torch's DDP takes any group of gloo for one that is not checked: it reads beside the object, and the process dies
    (seen in torch 2.13). Collective.
    """
    level = dist.get_debug_level()
    if level != dist.DebugLevel.DETAIL or dist.get_backend() != "gloo":
        return None
    dist.set_debug_level(dist.DebugLevel.INFO)
    try:
        return dist.new_group()
    finally:
        dist.set_debug_level(level)


def _join(config: Config, ranks: env.Ranks, device: torch.device) -> None:
    allow_connections(ranks.world_size)
    if config.debug:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    backend = accelerators.backend_for(device)
    timeout = timedelta(seconds=config.shardkit.launch.process_group_timeout_s)
    store: dist.Store = dist.HashStore()
    if env.ranks() is not None and (ranks.world_size > 1 or env.get("MASTER_ADDR")):
        store = rank_store.of_next_group(ranks.rank, config.shardkit.launch.meet_timeout_s, timeout)
    sys.excepthook = failure.own_excepthook()  # else tracebacks name the rank once for each group that was started
    dist.init_process_group(backend, timeout=timeout, store=store, rank=ranks.rank, world_size=ranks.world_size)
    if backend == "gloo" or ranks.world_size == 1:
        # Gloo's threads must end before the interpreter shuts down. Beside another backend only where no peer may be
        # lost: the end of a group of NCCL waits for its ranks.
        atexit.register(leave)
