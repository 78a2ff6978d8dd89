"""Rank and world size of a process that srun, mpirun or another of `starters` has started, from its variables.

    found = world_of(variables)      torch elastic's variables for this process; None for a single process

Incomplete or contradictory variables are an error: every task would otherwise train alone, and overwrite the others'
files.
"""

import contextlib
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

from shardkit.config.host_port import with_brackets
from shardkit.config.scheduler import Scheduler, first_host, number, port_of, scheduler
from shardkit.config.starters import SRUN, STARTERS, Starter
from shardkit.digits import number_in
from shardkit.errors import ConfigError
from shardkit.wording import counted

LOOPBACK = "127.0.0.1"
ALONE = "or set RANK=0 WORLD_SIZE=1 for a single process"


def world_of(variables: Mapping[str, str]) -> dict[str, str] | None:
    """torch elastic's variables for this process, from those of its starter; None for a single process, or if they are
    already set. Raises ConfigError where it is one of several and its variables are incomplete."""
    if "RANK" in variables or "WORLD_SIZE" in variables:
        _check_ranks(variables)
        _check_pods(variables)
        return None
    found = [one for one in STARTERS if (number(variables, one.size) or 1) > 1 and one.rank in variables]
    if found:
        return _world(next((one for one in found if one.local_rank in variables), found[0]), variables)
    _refuse_one_of_several(variables)
    _refuse_one_a_machine(scheduler(variables))
    return None


def _check_ranks(variables: Mapping[str, str]) -> None:
    """Raises ConfigError where RANK, WORLD_SIZE or the numbers of this machine are invalid."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name in variables and number(variables, name) is None:
            raise ConfigError(
                f"launch: {name} must be a number (got {variables[name]!r}); correct it, or use shardkit launch."
            )
    if (variables.get("WORLD_SIZE"), "RANK" in variables) == ("1", False):
        return
    rank, size = number(variables, "RANK"), number(variables, "WORLD_SIZE")
    if rank is None or size is None or rank >= size:
        raise ConfigError(
            f"launch: RANK must be a number below WORLD_SIZE (got RANK={variables.get('RANK')!r}, WORLD_SIZE="
            f"{variables.get('WORLD_SIZE')!r}); set both for every process, or neither and use shardkit launch."
        )


def _check_pods(variables: Mapping[str, str]) -> None:
    """Raises ConfigError where one process stands for a pod that torchrun would start several in, as in a PyTorchJob
    with `nprocPerNode`: RANK is the pod's there, and WORLD_SIZE counts processes that nobody has started."""
    each = number(variables, "PET_NPROC_PER_NODE") or 1
    if "LOCAL_RANK" not in variables and each > 1 and variables.get("WORLD_SIZE") != "1":
        raise ConfigError(
            f"launch: this pod should have {each} ranks (PET_NPROC_PER_NODE), and this is one process "
            f"(got no LOCAL_RANK, RANK={variables.get('RANK')!r}, WORLD_SIZE={variables.get('WORLD_SIZE')!r}); start "
            "it with `shardkit launch` in each pod."
        )


def _refuse_one_of_several(variables: Mapping[str, str]) -> None:
    """Raises ConfigError where a number says that there are others, and nothing says how many, or where."""
    for name, most in (("LOCAL_RANK", 0), ("NODE_RANK", 0), ("PMIX_RANK", -1)):
        is_sized = name == "PMIX_RANK" and any(number(variables, one.size) == 1 for one in STARTERS)
        found = number(variables, name)
        if found is not None and found > most and not is_sized and scheduler(variables) is None:
            raise ConfigError(
                f"launch: {name} says that this process is one of several, and nothing says of how many (got "
                f"{name}={found}, no WORLD_SIZE); start one `shardkit launch` a machine, {ALONE}."
            )


def _world(starter: Starter, variables: Mapping[str, str]) -> dict[str, str]:
    said = {
        "RANK": number(variables, starter.rank),
        "WORLD_SIZE": number(variables, starter.size),
        "LOCAL_RANK": number(variables, starter.local_rank),
        "LOCAL_WORLD_SIZE": _local_size(starter, variables),
    }
    rank, size, local_rank, local_size = said.values()
    if None in said.values() or rank >= size or local_rank >= local_size or local_size > size:  # type: ignore[operator]
        given = ", ".join(
            f"{name}={variables.get(name)!r}"
            for name in (starter.rank, starter.size, starter.local_rank, starter.local_size)
        )
        raise ConfigError(
            f"launch: {starter.name} started this process as one of several, but its variables are incomplete or "
            f"contradictory (got {given}); start one `shardkit launch` per machine, {ALONE}."
        )
    address, port = _meeting_place(starter, variables, local_size == size)
    return {**{name: str(value) for name, value in said.items()}, "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def _local_size(starter: Starter, variables: Mapping[str, str]) -> int | None:
    """Tasks on this machine. SLURM lists them for all machines: `4(x2),3`."""
    if starter is not SRUN:
        return number(variables, starter.local_size)
    here, left = None, number(variables, "SLURM_NODEID") or 0
    for part in filter(None, variables.get(starter.local_size, "").split(",")):
        text, _, repeated = part.rstrip(")").partition("(x")
        count, times = number_in(text), number_in(repeated or "1")
        if count is None or times is None:
            return None
        if here is None and left < times:
            here = count
        left -= times
    return here


def _meeting_place(starter: Starter, variables: Mapping[str, str], is_one_machine: bool) -> tuple[str, int]:
    """The address of rank 0: MASTER_ADDR and MASTER_PORT, else derived from values that all tasks know."""
    port = number(variables, "MASTER_PORT")
    if starter is SRUN:
        job = variables.get("SLURM_JOB_ID", "0") + variables.get("SLURM_STEP_ID", "")
        hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
        address: str | None = first_host(hosts)
    else:  # equal for all tasks of one mpirun
        job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or str(_pid_of(starter))
        job, address = str(zlib.crc32(job.encode())), None
    address = variables.get("MASTER_ADDR") or (LOOPBACK if is_one_machine else address)
    if address is None:
        raise ConfigError(
            f"launch: {starter.name} does not provide the machine of rank 0 (got {variables[starter.size]} ranks on "
            "several machines); set MASTER_ADDR to its address for all of them: mpirun -x MASTER_ADDR=..., or start "
            "one `shardkit launch` per machine."
        )
    return address, port or port_of(job)


def _pid_of(starter: Starter) -> int:
    """The process that started this machine's tasks: the nearest ancestor that is not itself a task."""
    pid = os.getppid()
    with contextlib.suppress(OSError, IndexError, ValueError):
        while f"{starter.rank}=".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return pid


def _refuse_one_a_machine(job: Scheduler | None) -> None:
    """Raises ConfigError where a job starts one process per machine, each of which would train alone."""
    if job is None or job.name == "SLURM":
        return
    if job.name in {"LSF", "PBS"} and not job.machine_rank:  # the job's script runs on the first machine: `left_alone`
        return
    ranks = job.ranks_per_machine or 1
    if job.machines > 1 or ranks > 1:
        each = f" with {ranks} ranks each" if ranks > 1 else ""
        raise ConfigError(
            f"launch: this is a single process, but {job.name} reports a job of "
            f"{counted(job.machines, 'machine')}{each}; start it with `shardkit launch` on each, {ALONE}."
        )


def left_alone(variables: Mapping[str, str]) -> str | None:
    """A warning where a job has several tasks, but its script started one process; else None."""
    each = variables.get("PET_NPROC_PER_NODE", "")
    if each in {"auto", "gpu", "cpu"}:
        return f"PET_NPROC_PER_NODE is {each}, and this is one process; shardkit launch starts one for each device."
    job = scheduler(variables)
    if job is not None and job.name in {"LSF", "PBS"} and job.machines > 1:
        return (
            f"the {job.name} job has {job.machines} machines, and this is one process; start shardkit launch on each."
        )
    if job is None and (name := next((name for name in ("PBS_JOBID", "LSB_JOBID") if name in variables), None)):
        return f"the hosts of the job ({name}) are not listed here, and this is one process; is it meant to be alone?"
    tasks = number(variables, "SLURM_NTASKS") or 1
    if "SLURM_JOB_ID" not in variables or "SLURM_STEP_ID" in variables or tasks == 1:
        return None
    return f"the SLURM job has {tasks} tasks, and this is one process outside of srun; use srun, or shardkit launch."


def launch_left_alone(variables: Mapping[str, str]) -> str | None:
    """A warning where a launch on one machine is one of several that are started, as far as variables tell that no
    scheduler's job was read from; else None. In a rank of another launch, `preflight.rank_warning` says more."""
    if scheduler(variables) is not None or "TORCHELASTIC_RUN_ID" in variables:
        return None
    for job, hosts in (("PBS_JOBID", "PBS_NODEFILE"), ("LSB_JOBID", "LSB_DJOB_HOSTFILE")):
        if job in variables:
            return (
                f"the hosts of the job ({job}) are not listed here (got {hosts}={variables.get(hosts)!r}); if it has "
                f"several, each on which this is started trains separately: copy that file to a folder that all share, "
                f"and set {hosts} to the copy, or add --num-machines, --machine-rank and --main."
            )
    for size, rank in (("WORLD_SIZE", "RANK"), ("NNODES", "NODE_RANK"), ("NUM_NODES", "NODE_RANK")):
        count, place = number(variables, size), number(variables, rank)
        if count is not None and place is not None and count > 1:
            address, port = variables.get("MASTER_ADDR", "HOST"), variables.get("MASTER_PORT", "PORT")
            return (
                f"{size}={count} and {rank}={place} say that this is one of {count} processes, and num_machines is 1: "
                f"each that starts this trains separately; where each is a machine of one run, add --num-machines "
                f"{count} --machine-rank {place} --main {with_brackets(address)}:{port}, else unset these variables."
            )
    return None


def is_step_of(machines: int, variables: Mapping[str, str]) -> bool:
    """Whether this is a step of SLURM on one machine, in a job of that many: each of them may have its own step."""
    steps = number(variables, "SLURM_STEP_NUM_NODES")
    return steps == 1 < machines and number(variables, "SLURM_JOB_NUM_NODES") == machines


def launch_outside_srun(job: Scheduler, variables: Mapping[str, str]) -> str | None:
    """A warning where the script of a SLURM job starts a launch by itself, thus on the first machine only."""
    if job.name != "SLURM" or job.machines == 1 or "SLURM_STEP_ID" in variables:
        return None
    return (
        f"the SLURM job has {job.machines} machines, and srun did not start this launch: it waits for those on the "
        "others; start one on each with: srun --ntasks-per-node=1 shardkit launch ..."
    )


def launch_problem(variables: Mapping[str, str]) -> str | None:
    """Why a launch must not start here (several tasks on a machine would each start all ranks); None where it may."""
    for starter in STARTERS:
        tasks = _local_size(starter, variables) or 1
        if tasks > 1:
            return (
                f"launch: {starter.name} starts {tasks} tasks on this machine, and each would start all ranks; start "
                f"one task per machine (srun --ntasks-per-node=1), or the script itself: {starter.name.split()[0]} "
                "... python SCRIPT.py."
            )
    return None
