"""The only reader and writer of os.environ.

Every environment variable that processes pass to each other, or that a scheduler or user sets, is read here.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONFIG = "SHARDKIT_CONFIG"
RESOLVED = "SHARDKIT_RESOLVED_CONFIG"


@dataclass(frozen=True)
class Ranks:
    """This process's rank numbers, as torch elastic sets them. `one_a_machine`: LOCAL_RANK is unset, and ranks count
    pods."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    one_a_machine: bool = False


def get(name: str, default: str | None = None) -> str | None:
    """One variable; None if it is unset."""
    return os.environ.get(name, default)


def copy() -> dict[str, str]:
    """All variables, to start a child process with."""
    return dict(os.environ)


def update(variables: Mapping[str, str]) -> None:
    """Sets variables for this process and later children."""
    os.environ.update(variables)


def remove(names: Iterable[str]) -> None:
    """Removes variables of this process, where they are set."""
    for name in names:
        os.environ.pop(name, None)


def replace(variables: Mapping[str, str]) -> None:
    """Replaces all variables of this process."""
    os.environ.clear()
    os.environ.update(variables)


def users_folder(name: str, default: str) -> Path | None:
    """The folder that the variable names; else `default` in the home folder; None where there is no home folder."""
    if chosen := os.environ.get(name):
        return Path(chosen)
    try:
        return Path.home() / default
    except RuntimeError:
        return None


def is_true(name: str) -> bool:
    """Whether the variable is set to 1, true, yes or on."""
    return os.environ.get(name, "").lower() in {"1", "true", "yes", "on"}


def ranks() -> Ranks | None:
    """This process's rank numbers; None if no launcher started it.

    Without LOCAL_RANK, all ranks are on this machine if MASTER_ADDR is a loopback address or unset; else each is alone
    on its machine, as in a PyTorchJob.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "LOCAL_RANK" not in os.environ and _counts_machines():
        return Ranks(rank, 0, size, 1, one_a_machine=True)
    return Ranks(
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        world_size=size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )


def _counts_machines() -> bool:
    address = os.environ.get("MASTER_ADDR", "localhost")
    is_loopback = address in {"localhost", "::1"} or address.startswith("127.")
    return "KUBERNETES_SERVICE_HOST" in os.environ or not is_loopback


def mark(name: str, variables: Iterable[str]) -> None:
    """Sets a variable from which `marked_parent` tells a process that this one starts."""
    os.environ[name] = f"{os.getpid()} {_values(variables)}"


def marked_parent(name: str, variables: Iterable[str]) -> int | None:
    """The process that has marked itself and then started this one as a rank of its own run: the variables, of which
    another launcher sets others, are the same. None in the marked process itself, and where there is none."""
    process_id, _, values = os.environ.get(name, "").partition(" ")
    is_child = process_id not in ("", str(os.getpid()))
    return int(process_id) if is_child and "RANK" in os.environ and values == _values(variables) else None


def _values(variables: Iterable[str]) -> str:
    return " ".join(os.environ.get(name) or "-" for name in variables)


def config_path() -> Path | None:
    """The configuration file in $SHARDKIT_CONFIG, with `~` expanded, as no shell does for a service."""
    value = os.environ.get(CONFIG)
    return Path(os.path.expanduser(value)) if value else None


def resolved_config_path() -> Path | None:
    """The resolved configuration that `shardkit launch` wrote for its ranks."""
    value = os.environ.get(RESOLVED)
    return Path(value) if value else None


def settings(prefix: str = "SHARDKIT_SET_") -> dict[str, str]:
    """Settings in the environment, such as SHARDKIT_SET_MIXED_PRECISION=bf16, with `__` between levels."""
    return {
        name[len(prefix) :].lower().replace("__", "."): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }
