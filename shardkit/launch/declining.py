"""A machine that fails its checks tells the others of its run, which would wait for it. Loads torch only for that."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardkit.config import files
from shardkit.config.files import LoadedConfig
from shardkit.config.schema import Config
from shardkit.errors import MachineError

if TYPE_CHECKING:
    from shardkit.launch.spec import LaunchSpec


def has_number(loaded: LoadedConfig) -> bool:
    """Whether somebody, or the scheduler, gave this machine its number."""
    origin = loaded.origins.get("machine_rank")
    return origin is not None and origin.kind != "default"


def tell_others(config: Config, reason: str) -> None:
    """Tell the other machines why this one does not come, if their address is known."""
    if config.num_machines == 1 or config.main_process_ip is None:
        return
    try:
        from shardkit.launch import meeting
    except Exception:  # it loads torch, which may be what this machine lacks
        return
    meeting.decline(config, reason)


@contextlib.contextmanager
def telling_others(spec: "LaunchSpec") -> Iterator[None]:
    """A context in which what this machine lacks, before it meets the others, ends those that wait for it with its
    text. Those of an elastic run wait for none in particular."""
    try:
        yield
    except MachineError as error:
        if spec.has_number and spec.launch.min_machines is None:
            tell_others(spec.config, str(error).removeprefix("launch: "))
        raise


def with_address(path: Path | None, settings: dict[str, str]) -> LoadedConfig | None:
    """What can be read of a configuration that has problems, if the others' address is part of it, as that of flags and
    of a scheduler is. None at the default port, where another run may meet."""
    loaded = files.readable_part(path, settings)
    is_known = loaded.config.main_process_ip and loaded.config.main_process_port and has_number(loaded)
    return loaded if is_known else None
