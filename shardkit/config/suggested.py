"""Defaults that depend on the machine: what `shardkit launch` runs without a file, and `config --defaults` writes."""

from collections.abc import Mapping
from typing import Any

from shardkit.config.hardware import Hardware, detect
from shardkit.config.keys import Path
from shardkit.config.layers import Entry, Layer, Origin
from shardkit.config.schema import read_bool, read_count, read_distributed_type

_COUNT = ("num_processes",)


def hardware_layer(given: Mapping[Path, Entry], has_file: bool) -> Layer:
    """What the hardware suggests for settings that nobody gave. A file that is silent about precision or the kind of
    device means the default; only the number of processes and of machines is always the machine's own."""
    if _COUNT in given and has_file:
        return Layer()
    hardware = detect()
    values = for_machines(hardware, given) if has_file else for_hardware(hardware, given)
    origin = Origin("hardware", f"found here: {hardware.in_words}")
    return Layer({path: Entry(value, origin, path[-1]) for path, value in values.items()})


def for_hardware(hardware: Hardware, given: Mapping[Path, Entry] | None = None) -> dict[Path, Any]:
    """Settings that suit a machine, next to those that are given: all GPUs, or two processes on the CPU."""
    given = given or {}
    on_cpu = not hardware.devices or _says(given, ("use_cpu",), read_bool) is True
    values = for_machines(hardware, given)
    processes = _says(given, _COUNT, read_count) or values[_COUNT]
    shards = any(path[0] == "fsdp" for path in given)
    values[("use_cpu",)] = on_cpu
    values[("distributed_type",)] = "FSDP" if shards or processes != 1 else "NO"
    has_bf16 = not on_cpu and all(device.has_bf16 for device in hardware.devices)
    values[("mixed_precision",)] = "bf16" if has_bf16 else "no" if on_cpu else "fp16"
    return values


def for_machines(hardware: Hardware, given: Mapping[Path, Entry]) -> dict[Path, Any]:
    """How many machines and processes, as the scheduler and the devices say."""
    values: dict[Path, Any] = {}
    scheduler = hardware.scheduler
    if scheduler and scheduler.machines > 1 and ("num_machines",) not in given:
        values[("num_machines",)] = scheduler.machines
        values[("main_process_ip",)] = scheduler.main_address
        values[("machine_rank",)] = scheduler.machine_rank or 0
    machines = _says(given, ("num_machines",), read_count) or values.get(("num_machines",), 1)
    single = _says(given, ("distributed_type",), read_distributed_type) == "NO"
    on_cpu = _says(given, ("use_cpu",), read_bool) is True
    here = 0 if on_cpu else len(hardware.devices)
    values[_COUNT] = 1 if single else (here or min(2, hardware.cores)) * (machines if isinstance(machines, int) else 1)
    return values


def _says(given: Mapping[Path, Entry], path: Path, reading: Any) -> Any:
    return reading(given[path].value) if path in given else None
