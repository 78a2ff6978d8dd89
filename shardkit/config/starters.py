"""Programs that start one task per rank, or one per machine, and their environment variables."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Starter:
    """A program that starts one task per rank, and its environment variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


def _mpi(name: str, prefix: str) -> Starter:
    return Starter(name, *(f"{prefix}_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")))


SRUN = Starter("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
STARTERS = (
    _mpi("mpirun (Open MPI)", "OMPI_COMM_WORLD"),
    _mpi("mpirun (MVAPICH)", "MV2_COMM_WORLD"),
    _mpi("jsrun", "JSM_NAMESPACE"),
    Starter("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _mpi("mpiexec", "PMI"),
    Starter("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_TASK_LOCAL_SIZE"),
    SRUN,
)
"""Inner starters first: mpirun's processes may be srun's tasks. srun itself may set the first two PMI variables."""
