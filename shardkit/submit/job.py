"""One job as a plain value, the same for all engines, and the parts that their files share."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardkit.config import files
from shardkit.config.meaning import runs_on_cpu
from shardkit.config.schema import Config
from shardkit.wording import counted

GRACE_MARGIN_S = 30
"""Time between the ranks' stop timeout and the engine's SIGKILL, in which the launchers inform one another and exit."""

PEERS_S = 60
"""How long the other machines may take to end after one has ended: a launcher detects a lost one within 30 s."""

_END = "END_OF_CONFIGURATION"


@dataclass(frozen=True)
class Volume:
    """Storage of the engine, and the folder at which it is mounted."""

    source: str
    path: str


@dataclass(frozen=True)
class Job:
    """What runs, on which machines, for how long. `program`: the command that starts shardkit on a machine; `switches`:
    flags for its `launch` that are not settings.

    A number that is None is not set: the engine's default applies.
    """

    name: str
    command: tuple[str, ...]
    is_module: bool
    config: Config
    folder: Path
    chosen: frozenset[str] = frozenset()
    """The settings that somebody has set, by their names in Python."""
    switches: tuple[str, ...] = ()
    program: tuple[str, ...] = ("shardkit",)
    cpus_per_machine: int = 1
    memory_bytes: int | None = None
    time_s: int | None = None
    gpu: str | None = None
    """Its name in the plan's table of devices."""
    image: str | None = None
    volumes: tuple[Volume, ...] = ()
    hosts: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the script."""

    @property
    def machines(self) -> int:
        return self.config.num_machines

    @property
    def ranks_per_machine(self) -> int:
        return self.config.processes_per_machine

    @property
    def gpus_per_machine(self) -> int:
        return 0 if runs_on_cpu(self.config) else self.ranks_per_machine

    @property
    def grace_s(self) -> int:
        """Seconds between the engine's SIGTERM and its SIGKILL: the ranks' stop timeout plus the margin."""
        return int(self.config.shardkit.launch.stop_timeout_s) + GRACE_MARGIN_S

    @property
    def configuration(self) -> str:
        """The YAML that the job runs with: without addresses, which come from the engine, and with resume enabled.

        It has the numbers of machines and ranks, which the job's machines do not change; and what was chosen, as for a
        launch with the same file."""
        changed: dict[str, object] = {"main_process_ip": None, "main_process_port": None, "machine_rank": 0}
        changed["shardkit.launch.bind_address"] = None
        if self.config.shardkit.checkpoint.resume == "never":
            changed["shardkit.checkpoint.resume"] = "auto"
        if not runs_on_cpu(self.config) and self.config.gpu_ids:
            changed["gpu_ids"] = None  # they are of the machine on which the file was written
        written = {*self.chosen, "num_machines", "num_processes"} - changed.keys()
        return files.dump_chosen(files.overlaid(self.config, changed), written)

    @property
    def configuration_for_restarts(self) -> str:
        """As `configuration`, for an engine that itself starts the job again `max_restarts` times: each start of the
        launch would have as many restarts of its own."""
        return replace(self, config=files.overlaid(self.config, {"shardkit.launch.max_restarts": 0})).configuration

    def launch_words(self, config: str, more: Iterable[str]) -> list[str]:
        """The `shardkit launch` command with this job's script, as shell words. `config` and `more` must be quoted."""
        script = ["-m", *self.command] if self.is_module else list(self.command)
        start = [shlex.quote(word) for word in self.program]
        return [*start, "launch", "--config", config, *more, *self.switches, *(shlex.quote(word) for word in script)]


def configuration_file(text: str, path: str) -> str:
    """Shell lines that write the configuration to a file. `path` must be quoted."""
    return f"cat > {path} <<'{_END}'\n{text.rstrip()}\n{_END}"


WIDTH = 110


def folded(words: Iterable[str]) -> str:
    """Quoted words as one shell command, on several lines if it is long. An option and its value stay on one line."""
    parts: list[str] = []
    for word in words:
        if parts and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 1 > WIDTH:
            lines.append(part)
        else:
            lines[-1] += f" {part}"
    return " \\\n    ".join(lines)


def memory_in_gib(memory_bytes: int) -> int:
    """Whole GiB, rounded up."""
    return -(-memory_bytes // 2**30)


def head(job: Job, how: str) -> str:
    """The comments at the top of a job's file: what it is, and how it is started."""
    count, kind = (job.gpus_per_machine, "GPU") if job.gpus_per_machine else (job.ranks_per_machine, "rank")
    each = counted(count, kind) + ("" if job.gpus_per_machine else " on the CPU")
    machines = f"{counted(job.machines, 'machine')} with {each}{' each' if job.machines > 1 else ''}"
    return f"# {job.name}: {machines}. Written by `shardkit submit`.\n# {how}"
