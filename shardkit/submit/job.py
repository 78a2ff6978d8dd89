"""One job as a plain value, the same for all engines, and the parts that their files share."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardkit.config import files
from shardkit.config.schema import Config

GRACE_MARGIN_S = 30
"""Between the end of the ranks' own time to save and the engine's kill: launchers tell one another, and leave."""

PEERS_S = 60
"""How long the other machines have to end by themselves once one has: a launcher notices a lost one within 30 s."""

CPUS_PER_GPU = 8
"""Cores for each GPU where nobody says how many: machines with eight GPUs have 12 or more for each."""

_END = "END_OF_CONFIGURATION"


@dataclass(frozen=True)
class Volume:
    """Storage of the engine's, and the folder where the script finds it."""

    source: str
    path: str


@dataclass(frozen=True)
class Job:
    """What runs, on which machines, for how long. `program` are the words that start shardkit on a machine.

    Where a number is None nobody has said it, and the engine's own default holds.
    """

    name: str
    command: tuple[str, ...]
    is_module: bool
    config: Config
    folder: Path
    program: tuple[str, ...] = ("shardkit",)
    cpus_per_machine: int = 1
    memory_bytes: int | None = None
    time_s: int | None = None
    gpu: str | None = None
    image: str | None = None
    volumes: tuple[Volume, ...] = ()
    hosts: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def machines(self) -> int:
        return self.config.num_machines

    @property
    def ranks_per_machine(self) -> int:
        return self.config.processes_per_machine

    @property
    def gpus_per_machine(self) -> int:
        return 0 if self.config.use_cpu else self.ranks_per_machine

    @property
    def grace_s(self) -> int:
        """Seconds between the engine's SIGTERM and its kill: what the ranks have, and the margin."""
        return int(self.config.shardkit.launch.stop_timeout_s) + GRACE_MARGIN_S

    @property
    def configuration(self) -> str:
        """The YAML that the job runs: its machines find one another as the engine says, and it goes on where it was."""
        said: dict[str, object] = {"main_process_ip": None, "main_process_port": None, "machine_rank": 0}
        if self.config.shardkit.checkpoint.resume == "never":
            said["shardkit.checkpoint.resume"] = "auto"
        if not self.config.use_cpu and self.config.gpu_ids:
            said["gpu_ids"] = None  # of the machine that the file was written on
        return files.dump(files.overlaid(self.config, said), comments=False)

    def launch_words(self, config: str, more: Iterable[str] = ()) -> list[str]:
        """`shardkit launch` with this job's script, as words of a shell. `config` and `more` are quoted already."""
        script = ["-m", *self.command] if self.is_module else list(self.command)
        start = [shlex.quote(word) for word in self.program]
        return [*start, "launch", "--config", config, *more, *(shlex.quote(word) for word in script)]


def configuration_file(text: str, path: str) -> str:
    """Lines of a shell that write the configuration into a file. `path` is quoted already."""
    return f"cat > {path} <<'{_END}'\n{text.rstrip()}\n{_END}"


def folded(words: Iterable[str], width: int = 110) -> str:
    """Quoted words as one command of a shell, over several lines where it is long: an option stays with its value."""
    parts: list[str] = []
    for word in words:
        if parts and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 1 > width:
            lines.append(part)
        else:
            lines[-1] += f" {part}"
    return " \\\n    ".join(lines)


def memory_in_gib(memory_bytes: int) -> int:
    """Whole GiB, upwards."""
    return -(-memory_bytes // 2**30)


def head(job: Job, how: str) -> list[str]:
    """What the comments at the top of a file say."""
    each = f"{job.gpus_per_machine} GPUs" if job.gpus_per_machine else f"{job.ranks_per_machine} ranks on the CPU"
    machines = (
        f"{job.machines} machine{'s' if job.machines > 1 else ''} with {each}{' each' if job.machines > 1 else ''}"
    )
    return [f"{job.name}: {machines}. Written by `shardkit submit`.", how]
