"""One launch as a plain value: script, ranks, variables. `--dry-run` prints it."""

import contextlib
import hashlib
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardkit import __version__
from shardkit.config import files, host_port, xla
from shardkit.config.meaning import runs_on_cpu
from shardkit.config.schema import Config, DistributedType, LaunchConfig
from shardkit.launch.environment import rank_variables
from shardkit.launch.folders import short
from shardkit.wording import counted

DEFAULT_PORT = 29500  # torch's own default for several machines


@dataclass(frozen=True)
class Rendezvous:
    """Where the machines of a run meet. Port 0: a free one, chosen at the start."""

    backend: str
    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return host_port.joined(self.host, self.port)


@dataclass(frozen=True)
class LaunchSpec:
    """Everything that `attempts.run` needs to know."""

    script: str
    is_module: bool
    arguments: tuple[str, ...]
    world_size: int
    ranks_here: int
    num_machines: int
    machine_rank: int
    device: str
    backend: str
    rendezvous: Rendezvous
    config_name: str
    strategy: str
    mixed_precision: str
    launch: LaunchConfig
    environment: dict[str, str]
    config: Config
    has_prefix: bool = True
    chosen: dict[str, str] = field(default_factory=dict)
    """The sources of the settings that the user chose."""
    has_number: bool = True
    """Whether somebody gave this machine its number; else an elastic run gives it one that is free."""

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of every rank."""
        return tuple(rank_command(self.rank_arguments))

    @property
    def rank_arguments(self) -> tuple[str, ...]:
        """The arguments of every rank's bootstrap."""
        script = ("-m", self.script) if self.is_module else (self.script,)
        return (*script, *self.arguments)

    @property
    def shown_ranks(self) -> frozenset[int] | None:
        """The ranks whose output reaches the screen; None: all."""
        return shown_ranks(self.launch.show)

    @property
    def first_rank(self) -> int:
        """The rank with local rank 0 on this machine."""
        return self.machine_rank * self.ranks_here


def launch_spec(
    config: Config,
    script: str,
    arguments: Sequence[str] = (),
    *,
    is_module: bool = False,
    config_name: str = "defaults",
    cores: int = 1,
    variables: dict[str, str] | None = None,
    more_variables: Mapping[str, str] | None = None,
    kind: str = "cuda",
) -> LaunchSpec:
    """The launch of a valid configuration. `variables`: those that the ranks would inherit; `more_variables`: those
    that the command sets for the ranks; `kind`: that of this machine's accelerators."""
    device = device_of(config)
    world_size = world_size_of(config)
    ranks_here = world_size // config.num_machines
    return LaunchSpec(
        script=script,
        is_module=is_module,
        arguments=tuple(arguments),
        world_size=world_size,
        ranks_here=ranks_here,
        num_machines=config.num_machines,
        machine_rank=config.machine_rank,
        device=device,
        backend=_backend(kind if device == "cuda" else device),
        rendezvous=rendezvous_of(config),
        config_name=config_name,
        strategy=strategy_of(config),
        mixed_precision=config.mixed_precision,
        launch=config.shardkit.launch,
        environment={
            **rank_variables(config, device, ranks_here, cores, variables or {}),
            **(more_variables or {}),
        },
        config=config,
        has_prefix=world_size > 1,
    )


def _backend(kind: str) -> str:
    """The backend's name for this kind of device, or the kind itself, for which torch finds one in the ranks."""
    return {"cpu": "gloo", "cuda": "nccl"}.get(kind, kind)


def rank_command(arguments: Sequence[str]) -> list[str]:
    """The command line of a rank, with the options (-X, -W, ...) that this Python was started with."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *flags, str(Path(__file__).with_name("bootstrap.py")), *arguments]


def device_of(config: Config) -> str:
    """The kind of device that the ranks run on: cpu, xla, or cuda for any accelerator that torch knows."""
    if config.distributed_type is DistributedType.XLA or config.xla:
        return "xla"
    return "cpu" if runs_on_cpu(config) else "cuda"


def world_size_of(config: Config) -> int:
    """Ranks in total: one a device; with PyTorch/XLA one a machine, which drives all its devices."""
    return config.num_machines if device_of(config) == "xla" else config.num_processes


def rendezvous_of(config: Config) -> Rendezvous:
    """On one machine a free port; on several machines as configured."""
    if config.num_machines == 1 and not config.main_process_port:
        return Rendezvous("c10d", "localhost", 0)
    host = config.main_process_ip or "localhost"
    return Rendezvous(config.rdzv_backend, host, config.main_process_port or DEFAULT_PORT)


def strategy_of(config: Config) -> str:
    """The strategy, as named in the configuration."""
    if config.distributed_type is DistributedType.XLA:
        return f"XLA {config.fsdp.sharding_strategy.value if xla.shards(config) else 'NO_SHARD'}"
    if config.distributed_type is not DistributedType.FSDP:
        return config.distributed_type.value
    fsdp = config.fsdp
    classes = ", ".join(fsdp.transformer_layer_cls_to_wrap)
    wrap = f", wrap {classes}" if classes else ""
    return f"FSDP {fsdp.sharding_strategy.value}{', CPU offload' if fsdp.offload_params else ''}{wrap}"


def shown_ranks(show: str) -> frozenset[int] | None:
    """`all` or `0,2` as a set of ranks; None: all."""
    if show.strip().lower() == "all":
        return None
    return frozenset(int(word) for word in show.split(",") if word.strip())


def headline(spec: LaunchSpec, log_dir: str) -> str:
    """The one line that every launch prints."""
    least = f"{spec.launch.min_machines} to " if spec.launch.min_machines else ""
    machines = f"{least}{counted(spec.num_machines, 'machine')} x {spec.ranks_here}"
    port = spec.rendezvous.endpoint if spec.num_machines > 1 else spec.rendezvous.port or "any free"
    return " | ".join(
        [
            f"shardkit {__version__}",
            short(Path(spec.config_name)) if os.path.isabs(spec.config_name) else spec.config_name,
            f"{spec.strategy}, {'fp32' if spec.mixed_precision == 'no' else spec.mixed_precision}",
            machines,
            f"torch {_version('torch')} {spec.backend}",
            f"port {port}",
            f"logs {log_dir}",
        ]
    )


def settings_without_effect(spec: LaunchSpec) -> str | None:
    """What is said at the end of a run whose script has made no Accelerator; None where settings would do nothing,
    and where the script was asked for its help."""
    if {"--help", "-h"} & set(spec.arguments):
        return None
    of_models = [spec.strategy] if spec.world_size > 1 else []
    if spec.mixed_precision != "no":
        of_models.append(spec.mixed_precision)
    if not of_models:
        return None
    alone = ", and each rank's model is its own unless the script reduces gradients" if spec.world_size > 1 else ""
    return (
        f"the script made no Accelerator, so {' and '.join(of_models)} had no effect{alone}; prepare models with "
        "shardkit's Accelerator, or start a script that was written for Accelerate with --as-accelerate."
    )


def greeting(spec: LaunchSpec) -> dict[str, Any]:
    """What the machines of a run compare before the ranks start."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "shardkit": __version__,
        "torch": _version("torch"),
        "python": platform.python_version(),
        "num_machines": spec.num_machines,
        "num_processes": spec.world_size,
        "config": files.shared_values(spec.config),
        "script": script_digest(spec),
        "arguments": _digest(json.dumps(spec.arguments).encode()),  # not themselves: they may hold secrets
    }


def script_digest(spec: LaunchSpec) -> str | None:
    """A digest of the script; None where it is no file (a module, a folder), or cannot be read."""
    with contextlib.suppress(OSError):
        return None if spec.is_module else _digest(Path(spec.script).read_bytes())
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def as_json(spec: LaunchSpec) -> dict[str, Any]:
    """The launch in JSON's types."""
    fields = {name: value for name, value in vars(spec).items() if name not in {"config", "launch", "rendezvous"}}
    fields["arguments"] = list(spec.arguments)
    return {
        **fields,
        "command": list(spec.command),
        "rendezvous": asdict(spec.rendezvous),
        "launch": spec.launch.model_dump(mode="json"),
        "config": spec.config.model_dump(mode="json", by_alias=True),
    }


def as_text(spec: LaunchSpec, notes: Sequence[str]) -> str:
    """The launch as text: the headline, the command of a rank, its variables, and notes."""
    variables = [f"  {name}={shlex.quote(value)}" for name, value in sorted(spec.environment.items())]
    command = shlex.join(spec.command).replace(sys.executable, Path(sys.executable).name, 1)
    lines = [headline(spec, spec.launch.log_dir or "runs/<time>"), f"every rank runs  {command}", "with"]
    return "\n".join([*lines, *variables, *notes, "Nothing was started (--dry-run)."])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
