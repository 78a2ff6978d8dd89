"""A job's machines from the scheduler's environment variables, for a launch on each of them."""

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardkit import env
from shardkit.config import host_port
from shardkit.config.starters import SRUN, STARTERS
from shardkit.digits import number_in
from shardkit.errors import ConfigError

FIRST_PORT, PORTS = 20000, 10000
"""Ports for jobs: below ephemeral ports (from 32768 on Linux), above those of services."""
VERTEX_POOLS = ("workerpool0", "workerpool1")


@dataclass(frozen=True)
class Scheduler:
    """The job's facts from the scheduler that started this process; None where unknown."""

    name: str
    machines: int = 1
    machine_rank: int | None = None
    main_address: str | None = None
    job: str | None = None
    main_port: int | None = None
    ranks_per_machine: int | None = None
    min_machines: int | None = None
    """With how many of the machines an elastic job goes on; None: with all."""


def scheduler(variables: Mapping[str, str] | None = None) -> Scheduler | None:
    """The job that this process belongs to, from the environment; None if no scheduler started it.

    The most specific scheduler first: SkyPilot may run on Kubernetes, and torchrun's variables under any. Raises
    ConfigError where the number of machines is invalid.
    """
    variables = env.copy() if variables is None else variables
    first = (_skypilot, _sagemaker, _vertex, _aws_batch, _torchrun, _mpirun, *AROUND_MPIRUN)
    for read in (*first, _leader_worker_set, _kubernetes):
        found = read(variables)
        if found is not None:
            return found
    return None


def _skypilot(variables: Mapping[str, str]) -> Scheduler | None:
    if "SKYPILOT_NODE_RANK" not in variables:
        return None
    addresses = variables.get("SKYPILOT_NODE_IPS", "").split()
    job = variables.get("SKYPILOT_TASK_ID")
    return Scheduler(
        "SkyPilot",
        number(variables, "SKYPILOT_NUM_NODES") or len(addresses) or 1,
        number(variables, "SKYPILOT_NODE_RANK"),
        addresses[0] if addresses else None,
        job,
        port_of(job) if job else None,
        ranks_per_machine=number(variables, "SKYPILOT_NUM_GPUS_PER_NODE") or None,
    )


def _sagemaker(variables: Mapping[str, str]) -> Scheduler | None:
    """SageMaker lists its hosts as JSON, and says which of them this is."""
    if "SM_HOSTS" not in variables:
        return None
    hosts, here = _listed(variables["SM_HOSTS"]), variables.get("SM_CURRENT_HOST")
    if here not in hosts:
        raise ConfigError(
            "SM_HOSTS: is not a list of hosts with SM_CURRENT_HOST among them (got "
            f"SM_HOSTS={variables['SM_HOSTS']!r}, SM_CURRENT_HOST={here!r}); "
            "unset both where this is no job of SageMaker."
        )
    gpus = number(variables, "SM_NUM_GPUS") or None
    return Scheduler(
        "SageMaker", len(hosts), hosts.index(here), hosts[0], variables.get("TRAINING_JOB_NAME"), ranks_per_machine=gpus
    )


def _listed(text: str) -> list[str]:
    """The strings of a JSON list; empty for any other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(host, str) for host in found) else []


def _vertex(variables: Mapping[str, str]) -> Scheduler | None:
    """Vertex AI lists its worker pools as JSON: the first has machine 0 alone, the second the other machines; further
    ones, and other programs' values of this variable, are of no launch.

    https://cloud.google.com/vertex-ai/docs/training/distributed-training
    """
    try:
        spec = json.loads(variables.get("CLUSTER_SPEC", ""))
        pools = [list(map(str, spec["cluster"].get(name, ()))) for name in VERTEX_POOLS]
        pool, index = VERTEX_POOLS.index(spec["task"]["type"]), int(spec["task"]["index"])
        host, port = host_port.split(pools[0][0])
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None
    rank = sum(map(len, pools[:pool])) + index
    job = variables.get("CLOUD_ML_JOB_ID")
    return Scheduler("Vertex AI", sum(map(len, pools)), rank, host or None, job, number_in(port))


def _aws_batch(variables: Mapping[str, str]) -> Scheduler | None:
    """A multi-node parallel job: all nodes but the main one have its address.

    https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
    """
    machines, index = number(variables, "AWS_BATCH_JOB_NUM_NODES"), number(variables, "AWS_BATCH_JOB_NODE_INDEX")
    if not machines or index is None:
        return None
    rank = (index - (number(variables, "AWS_BATCH_JOB_MAIN_NODE_INDEX") or 0)) % machines
    main = variables.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS") or (socket.gethostname() if not rank else None)
    job = variables.get("AWS_BATCH_JOB_ID", "").partition("#")[0]  # then comes the node's index
    return Scheduler("AWS Batch", machines, rank, main, job or None, port_of(job) if job else None)


def _leader_worker_set(variables: Mapping[str, str]) -> Scheduler | None:
    """A group of pods, each with its number in the group. A job controller's own variables come before these.

    https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables
    """
    if "LWS_GROUP_SIZE" not in variables:
        return None
    machines, rank = number(variables, "LWS_GROUP_SIZE") or 1, number(variables, "LWS_WORKER_INDEX")
    port = number(variables, "MASTER_PORT")
    return Scheduler("LeaderWorkerSet", machines, rank, variables.get("LWS_LEADER_ADDRESS"), None, port)


def _torchrun(variables: Mapping[str, str]) -> Scheduler | None:
    """torchrun's flags as PET_* variables, as set by a Kubeflow TrainJob; an elastic PyTorchJob sets the rendezvous'
    endpoint in place of an address."""
    if "PET_NNODES" not in variables:
        return None
    least, most = machine_range(variables["PET_NNODES"]) or (0, 0)
    if not 0 < least <= most:
        raise ConfigError(
            f"PET_NNODES: is not a number of machines, nor MIN:MAX (got {variables['PET_NNODES']!r}); set it so."
        )
    is_other = variables.get("PET_RDZV_BACKEND", "c10d") not in ("c10d", "static")  # etcd's server is no machine
    host, port = host_port.split("" if is_other else variables.get("PET_RDZV_ENDPOINT", ""))
    return Scheduler(
        "Kubernetes" if "KUBERNETES_SERVICE_HOST" in variables else "torchrun's PET_*",
        most,
        number(variables, "PET_NODE_RANK", "JOB_COMPLETION_INDEX"),
        variables.get("PET_MASTER_ADDR") or variables.get("MASTER_ADDR") or host or None,
        variables.get("HOSTNAME"),
        number(variables, "PET_MASTER_PORT", "MASTER_PORT") or number_in(port),
        number(variables, "PET_NPROC_PER_NODE"),
        least if least < most else None,
    )


def _mpirun(variables: Mapping[str, str]) -> Scheduler | None:
    """Where mpirun starts one task per machine (`mpirun -npernode 1 shardkit launch`). A scheduler around it may know
    the address of the first machine; its own numbers may be those of mpirun's daemons."""
    for starter in STARTERS:
        size, rank = number(variables, starter.size) or 1, number(variables, starter.rank)
        if starter is SRUN or size == 1 or rank is None or number(variables, starter.local_size) != 1:
            continue
        around = next((found for read in AROUND_MPIRUN if (found := read(variables))), Scheduler(""))
        first = around.main_address if around.machines == size else first_host(variables.get("SLURM_JOB_NODELIST", ""))
        port = number(variables, "MASTER_PORT") or around.main_port
        return Scheduler(starter.name, size, rank, variables.get("MASTER_ADDR") or first, around.job, port)
    return None


def _slurm(variables: Mapping[str, str]) -> Scheduler | None:
    """For a step started by srun, the step's machines, which may be fewer than the job's."""
    if "SLURM_JOB_ID" not in variables:
        return None
    hosts = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return Scheduler(
        "SLURM",
        number(variables, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1,
        number(variables, "SLURM_NODEID"),
        first_host(next((variables[name] for name in hosts if variables.get(name)), "")),
        variables["SLURM_JOB_ID"],
        port_of(variables["SLURM_JOB_ID"]),
    )


def _lsf(variables: Mapping[str, str]) -> Scheduler | None:
    if "LSB_JOBID" not in variables:
        return None
    listed = variables.get("LSB_MCPU_HOSTS", "").split()[::2]  # `first 2 second 2`
    hosts = _hosts_in(variables.get("LSB_DJOB_HOSTFILE", "")) or listed
    return _by_hosts("LSF", hosts, variables["LSB_JOBID"]) if hosts else None


def _pbs(variables: Mapping[str, str]) -> Scheduler | None:
    hosts = _hosts_in(variables.get("PBS_NODEFILE", "")) if "PBS_JOBID" in variables else []
    return _by_hosts("PBS", hosts, variables["PBS_JOBID"]) if hosts else None


def _kubernetes(variables: Mapping[str, str]) -> Scheduler | None:
    """In a PyTorchJob (Kubeflow's first version, Alibaba PAI) WORLD_SIZE and RANK count pods, and LOCAL_RANK is
    unset."""
    if "KUBERNETES_SERVICE_HOST" not in variables:
        return None
    address, port = variables.get("MASTER_ADDR"), number(variables, "MASTER_PORT")
    if "LOCAL_RANK" not in variables and {"RANK", "WORLD_SIZE"} <= variables.keys():
        machines, rank = number(variables, "WORLD_SIZE"), number(variables, "RANK")
    else:
        machines, rank = number(variables, "NNODES"), number(variables, "JOB_COMPLETION_INDEX", "NODE_RANK")
        if machines is None and rank is not None and address is not None:
            raise ConfigError(
                f"NNODES: how many pods has the job? (got MASTER_ADDR={address}, number {rank}, and no NNODES); set it "
                "to their number, or unset MASTER_ADDR where each pod is alone."
            )
    return Scheduler("Kubernetes", machines or 1, rank, address, variables.get("HOSTNAME"), port)


def _by_hosts(name: str, hosts: list[str], job: str) -> Scheduler:
    """A job whose hosts are listed in a file; this machine is found by its host name."""
    here = socket.gethostname().split(".")[0]
    ranks = [rank for rank, host in enumerate(hosts) if host.split(".")[0] == here]
    return Scheduler(name, len(hosts), ranks[0] if ranks else None, hosts[0], job, port_of(job))


def _hosts_in(path: str) -> list[str]:
    """The hosts in a file with one line per slot, without duplicates."""
    if not os.path.isfile(path):  # a device or a pipe might never end
        return []
    try:
        return list(dict.fromkeys(Path(path).read_text(errors="replace").split()))
    except OSError:
        return []


AROUND_MPIRUN = (_slurm, _lsf, _pbs)
"""Those in whose jobs mpirun is used."""


def port_of(job: str) -> int:
    """A port that all machines can derive from the job id, and that another job is unlikely to use."""
    digits = re.sub(r"[^0-9]", "", job)[-18:] or "0"
    return FIRST_PORT + int(digits) % PORTS


def machine_range(text: str) -> tuple[int, int] | None:
    """The least and the most machines in `N` or `MIN:MAX`; None where it is neither."""
    least, _, most = text.partition(":")
    numbers = number_in(least), number_in(most if ":" in text else least)
    return None if numbers[0] is None or numbers[1] is None else (numbers[0], numbers[1])


def number(variables: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is a whole number."""
    found = (number_in(variables.get(name, "")) for name in names)
    return next((value for value in found if value is not None), None)


def first_host(hosts: str) -> str | None:
    """The first of SLURM's hosts: `node[03-05,9],other` -> `node03`, `rack[0-1]node[03-05]` -> `rack0node03`."""
    found = re.match(r"(?:[^\[,]|\[[^\]]*\])+", hosts.strip())
    return re.sub(r"\[(\d*)[^\]]*\]", r"\1", found[0]) if found else None
