"""What `shardkit launch` and its ranks call things: the variables besides torch elastic's, and the logs."""

from pathlib import Path

FULL_WORLD_SIZE = "SHARDKIT_FULL_WORLD_SIZE"
"""The world of an elastic run with all its machines, for which batch and accumulation are configured."""

RESOLVED_CONFIG = "SHARDKIT_RESOLVED_CONFIG"
"""Path of the resolved configuration."""

CONFIG_DIGEST = "SHARDKIT_CONFIG_DIGEST"
"""Its digest, equal on all machines (machine_rank left out); ranks compare it when they meet."""

NUM_PROCESSES = "SHARDKIT_NUM_PROCESSES"
"""The world that was asked for."""

PROGRESS_DIR = "SHARDKIT_PROGRESS_DIR"
"""Folder, local to the machine, where ranks say where they are."""

LOG_DIR = "SHARDKIT_LOG_DIR"
"""Folder of the ranks' logs."""

LAUNCHER_PID = "SHARDKIT_LAUNCHER_PID"
"""The launcher's process; ranks die with it."""

MEASURE = "SHARDKIT_MEASURE"
"""Set to 1 by --measure: the runtime records the real peak of memory."""

STOP_TIMEOUT_S = "SHARDKIT_STOP_TIMEOUT_S"
"""How long ranks have to save and leave."""

AROUND_SCRIPT = "SHARDKIT_AROUND_SCRIPT"
"""A module whose `around_script(log_dir)` every rank enters before the script, and leaves after it."""

SECRET = "SHARDKIT_SECRET"
"""The same on all machines of a run: what their launchers tell one another is signed with it."""


def stack_path(log_dir: Path, rank: int) -> Path:
    """The file with the stacks of a rank's threads, written when the run hangs."""
    return log_dir / f"rank{rank}.stack"


def log_path(log_dir: Path, rank: int) -> Path:
    """The file with everything that a rank wrote."""
    return log_dir / f"rank{rank}.log"
