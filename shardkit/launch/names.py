"""Environment variables between `shardkit launch` and its ranks, in addition to torch elastic's, and names of logs."""

from pathlib import Path

FULL_WORLD_SIZE = "SHARDKIT_FULL_WORLD_SIZE"
"""The world of an elastic run with all its machines, for which batch and accumulation are configured. Not set where all
worlds have all machines."""

CONFIG_DIGEST = "SHARDKIT_CONFIG_DIGEST"
"""The digest of the resolved configuration without machine_rank, equal on all machines; ranks compare it at their
start."""

NUM_PROCESSES = "SHARDKIT_NUM_PROCESSES"
"""The configured world size."""

SETTINGS = "SHARDKIT_LAUNCH_VARIABLES"
"""Names, with commas, of the variables in which a launch passes its settings and flags on."""

PROGRESS_DIR = "SHARDKIT_PROGRESS_DIR"
"""Folder, local to the machine, where ranks report their progress."""

LOG_DIR = "SHARDKIT_LOG_DIR"
"""Folder of the ranks' logs."""

LAUNCHER_PID = "SHARDKIT_LAUNCHER_PID"
"""The launcher's pid; ranks are killed when it dies."""

LAUNCHED = "SHARDKIT_LAUNCHED"
"""The mark of a rank, until it makes its Accelerator (`env.mark`)."""

BY_LAUNCHER = ("TORCHELASTIC_RUN_ID",)
"""Variables of every launcher, which a script that starts processes by itself does not set."""

MEASURE = "SHARDKIT_MEASURE"
"""Set to 1 by --measure: the runtime records the peak memory."""

STOP_TIMEOUT_S = "SHARDKIT_STOP_TIMEOUT_S"
"""How long ranks have to save and exit."""

AROUND_SCRIPT = "SHARDKIT_AROUND_SCRIPT"
"""A module with a context manager `around_script(log_dir)`, in which every rank runs the script."""

SECRET = "SHARDKIT_SECRET"
"""A secret shared by all machines of a run, with which launchers sign their messages."""


def stack_path(log_dir: Path, rank: int) -> Path:
    """The file with the stacks of a rank's threads, written when the run hangs."""
    return log_dir / f"rank{rank}.stack"


def log_path(log_dir: Path, rank: int) -> Path:
    """The file with the output of a rank."""
    return log_dir / f"rank{rank}.log"
