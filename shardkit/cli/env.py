"""`shardkit env`: facts about this machine and its software, for bug reports."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shardkit.cli import HELP, options
from shardkit.sizes import in_words
from shardkit.wording import counted

if TYPE_CHECKING:
    from shardkit.config.hardware import Hardware

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)

_PACKAGES = ["torch", "torch_xla", "pydantic", "pyyaml", "safetensors", "transformers", "accelerate", "peft"]


@app.command()
def environment(as_json: options.AsJson = False) -> int:
    """Show devices, memory, cores, backends, versions, scheduler and the configuration found."""
    facts = _facts()
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {_in_words(value)}")
    return 0


def _facts() -> dict[str, Any]:
    from shardkit import __version__
    from shardkit.config.hardware import detect

    hardware = detect()
    return {
        "shardkit": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "devices": _devices(hardware),
        **({"driver": f"nvidia-smi fails: {hardware.driver_problem}"} if hardware.driver_problem else {}),
        "cores": hardware.cores,
        "memory": in_words(hardware.memory_bytes),
        "backends": _backends(),
        "versions": _versions(),
        "scheduler": _scheduler(hardware),
        "configuration": _configuration(),
    }


def _devices(hardware: "Hardware") -> list[str]:
    return [
        f"{device.name} ({in_words(device.memory_bytes)})" if device.memory_bytes else device.name
        for device in hardware.devices
    ]


def _scheduler(hardware: "Hardware") -> str | None:
    found = hardware.scheduler
    if found is None:
        return None
    rank = "?" if found.machine_rank is None else found.machine_rank
    return (
        f"{found.name}, job {found.job or '?'}: machine {rank} of {found.machines}, machine 0 is {found.main_address}"
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _backends() -> dict[str, Any]:
    """The backends of torch, which is imported here only, because that takes seconds."""
    try:
        import torch
        import torch.distributed
    except Exception as error:  # a broken installation is a fact to report, not a reason to stop
        return {"torch": f"cannot be imported ({error})"}
    return {
        "gloo": torch.distributed.is_gloo_available(),
        "nccl": torch.distributed.is_nccl_available(),
        "mpi": torch.distributed.is_mpi_available(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else False,
        **_own_backend(),
    }


def _own_backend() -> dict[str, Any]:
    """The backend of an accelerator that is neither NVIDIA's nor AMD's."""
    from shardkit.distributed import accelerators

    kind = accelerators.kind()
    return {} if kind in (None, "cuda") else {kind: accelerators.own_backend(kind) or False}


def _configuration() -> str | None:
    from shardkit.config.files import find, read
    from shardkit.errors import ConfigError

    path = find(Path.cwd())
    if path is None:
        return None
    try:
        read(path)
    except ConfigError as error:
        return f"{path} (has {counted(len(error.problems), 'problem')})"
    return f"{path} (valid)"


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(inner)}" for name, inner in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
