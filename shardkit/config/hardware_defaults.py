"""Defaults from the hardware: used by `shardkit launch` without a file, and written by `config --defaults`."""

from collections.abc import Mapping
from typing import Any

from shardkit.config.hardware import Hardware, detect
from shardkit.config.keys import Path
from shardkit.config.layers import Layer, Origin, SettingEntry
from shardkit.config.scheduler import Scheduler, scheduler
from shardkit.config.schema import read_bool, read_count, read_distributed_type
from shardkit.wording import counted

_COUNT = ("num_processes",)
_CORES_PER_GPU = 8
"""What a job asks for: machines with eight GPUs have 12 or more per GPU."""


def cores_of_job(ranks: int, on_cpu: bool) -> int:
    """The cores that a scheduler's job asks for on a machine with so many ranks, where nobody says how many."""
    return ranks * (1 if on_cpu else _CORES_PER_GPU)


def hardware_layer(given: Mapping[Path, SettingEntry], has_file: bool, ranks: int | None = None) -> Layer:
    """Hardware defaults for unset settings. With a file, unset precision and device have the schema's default; only the
    numbers of processes and machines come from the hardware. `ranks`: how many run already."""
    job = scheduler()
    values = for_job(job, given)
    words = f"found here: {job.name}" if job else ""
    if has_file and ranks and _COUNT not in given:  # no hardware is asked for: that takes a second on a GPU machine
        values[_COUNT] = ranks
        words = f"found here: {counted(ranks, 'rank')} running"
    elif _COUNT not in given or not has_file:
        hardware = detect()
        values = for_machines(hardware, given, ranks) if has_file else for_hardware(hardware, given, ranks)
        words = f"found here: {hardware.in_words}"
    return Layer({path: SettingEntry(value, Origin("hardware", words), path[-1]) for path, value in values.items()})


def for_hardware(
    hardware: Hardware, given: Mapping[Path, SettingEntry] | None = None, ranks: int | None = None
) -> dict[Path, Any]:
    """Settings for this hardware, in addition to the given ones: all GPUs, or two processes on the CPU; for as many
    `ranks` as run already."""
    given = given or {}
    said = _says(given, ("use_cpu",), read_bool)
    on_cpu = said if isinstance(said, bool) else not hardware.devices
    values = for_machines(hardware, given, ranks)
    processes = _says(given, _COUNT, read_count) or values[_COUNT]
    shards = any(path[0] == "fsdp" for path in given)
    values[("use_cpu",)] = on_cpu
    values[("distributed_type",)] = "FSDP" if shards or processes != 1 else "NO"
    has_bf16 = not on_cpu and all(device.has_bf16 for device in hardware.devices)
    values[("mixed_precision",)] = "bf16" if has_bf16 else "no" if on_cpu else "fp16"
    return values


def for_machines(hardware: Hardware, given: Mapping[Path, SettingEntry], ranks: int | None = None) -> dict[Path, Any]:
    """The numbers of machines and processes, from the scheduler and the devices, or the `ranks` that run already."""
    values = for_job(hardware.scheduler, given)
    machines = _says(given, ("num_machines",), read_count) or values.get(("num_machines",), 1)
    single = _says(given, ("distributed_type",), read_distributed_type) == "NO"
    on_cpu = _says(given, ("use_cpu",), read_bool) is True
    job = hardware.scheduler
    here = 0 if on_cpu else (job and job.ranks_per_machine) or len(hardware.devices)
    found = 1 if single else (here or min(2, hardware.cores)) * (machines if isinstance(machines, int) else 1)
    values[_COUNT] = ranks or found
    return values


def for_job(job: Scheduler | None, given: Mapping[Path, SettingEntry]) -> dict[Path, Any]:
    """The scheduler's settings for a job on several machines, where the given ones do not contradict."""
    machines = _says(given, ("num_machines",), read_count)
    if job is None or job.machines < 2 or machines not in (None, job.machines):
        return {}
    values = {
        ("num_machines",): job.machines,
        ("machine_rank",): job.machine_rank,
        ("main_process_ip",): job.main_address,
        ("main_process_port",): job.main_port,
        ("shardkit", "launch", "min_machines"): job.min_machines,
    }
    return {path: value for path, value in values.items() if value is not None and path not in given}


def _says(given: Mapping[Path, SettingEntry], path: Path, reading: Any) -> Any:
    return reading(given[path].value) if path in given else None
