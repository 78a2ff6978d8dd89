"""The request of a plan, from a configuration file, the flags of `shardkit plan` and this machine's hardware."""

from dataclasses import replace
from pathlib import Path

from shardkit.config.command import settings_from
from shardkit.config.files import resolve
from shardkit.config.hardware import detect
from shardkit.config.layers import FlagValue, clashes
from shardkit.config.meaning import dtypes, eight_bits, runs_on_cpu, without_bf16
from shardkit.config.schema import Config
from shardkit.digits import decimal_in
from shardkit.errors import ConfigError, ShardkitError, UsageError
from shardkit.model import comment
from shardkit.model.adapters import Adapters
from shardkit.model.sources import FORMS, describe, folder_for
from shardkit.plan import devices, optimizers, tpu
from shardkit.plan.answer import PlanRequest, evenly
from shardkit.plan.devices import Device
from shardkit.problems import Problems
from shardkit.sizes import read_bytes
from shardkit.spinner import waiting

_STRATEGY = "fsdp_config.fsdp_sharding_strategy"
_LARGEST_HOST_BYTES = 2**50
"""More than this is no machine's memory."""
_XLA = {"distributed_type": "XLA", "xla": "true"}


def configuration(
    path: Path | None,
    pairs: list[str],
    strategy: str | None,
    world: int | None,
    per_machine: int | None,
    device: str | None,
) -> Config:
    """The file's configuration, or the defaults, with KEY=VALUE pairs, strategy and number of ranks as requested;
    without a file bf16, or fp16 where the device lacks bf16, is assumed on all devices but CPUs, and PyTorch/XLA on
    TPUs. Raises UsageError and ConfigError, with all problems."""
    given = settings_from(pairs)
    if world is not None:
        _check_per_machine(world, per_machine)
    of_world = {} if world is None else _of_world(world, per_machine or _usual(_resolved(path, given), device))
    chosen = {
        name: of_world[name] for name in ("num_processes", *(["num_machines"] if per_machine else [])) if of_world
    }
    chosen |= {_STRATEGY: FlagValue(strategy, "--strategy")} if strategy is not None else {}
    if problems := clashes(chosen, given):
        raise UsageError("\n".join(problems))
    given = of_world | given
    if strategy is not None or path is None:
        given = _with_implied(path, given, strategy, device)
    found = resolve(path, given, defaults_for_hardware=False).config
    _check_per_machine(found.num_processes, per_machine)
    return found


def _check_per_machine(world: int, per_machine: int | None) -> None:
    if per_machine is not None and world > per_machine and world % per_machine:
        raise UsageError(
            f"--per-machine: does not divide the number of ranks (got {per_machine} of {world}), and machines have "
            "equal numbers of them; give a divisor."
        )


def _resolved(path: Path | None, given: dict[str, str]) -> Config:
    """The configuration; the defaults where it has a problem, which the caller's own resolution reports."""
    try:
        return resolve(path, given, defaults_for_hardware=False).config
    except ConfigError:
        return Config()


def usual_per_machine(path: Path | None, pairs: list[str], device: str | None) -> int:
    """The ranks per machine where no number of ranks is given: those of the file's machines, or the device's."""
    return _usual(_resolved(path, settings_from(pairs)), device)


def _usual(config: Config, device: str | None) -> int:
    """The ranks per machine of the configuration on the device; 8 for a device that `device_of` refuses."""
    planned = _planned(config, device)
    return 8 if planned is None else _ranks_per_machine(config, planned)


def _ranks_per_machine(config: Config, device: Device) -> int:
    """Those of the configuration's machines, or the device's where it has one machine."""
    return config.processes_per_machine if config.num_machines > 1 else device.ranks_per_machine


def _of_world(world: int, per_machine: int) -> dict[str, str]:
    """The settings for so many ranks, on machines of so many, or of the next fewer that divide them evenly."""
    ranks = evenly(world, per_machine)
    machines = world // ranks
    counted = FlagValue(str(machines), f"--world {world}, in machines of {ranks}")
    found = {"num_processes": FlagValue(str(world), "--world"), "num_machines": counted}
    return found | ({"main_process_ip": "machine-0"} if machines > 1 else {})


def _with_implied(path: Path | None, given: dict[str, str], strategy: str | None, device: str | None) -> dict[str, str]:
    """The settings, with what follows from them and the flags: --strategy means FSDP, or PyTorch/XLA if that is
    configured; no file means 16 bits, on all devices but CPUs, as in `hardware_defaults.for_hardware`, and PyTorch/XLA
    on TPUs."""
    found = _resolved(path, given)
    planned = _planned(found, device) if path is None else None
    if planned is not None:
        half = {} if runs_on_cpu(found) or planned == devices.find("cpu") else {"mixed_precision": _half_of(planned)}
        given = {**(_XLA if planned.is_tpu and "distributed_type" not in given else {}), **half, **given}
    if strategy is None:
        return given
    kind = _XLA if _resolved(path, given).mode == "xla" else {"distributed_type": "FSDP"}
    return given | kind | {_STRATEGY: FlagValue(strategy, "--strategy")}


def _planned(config: Config, device: str | None) -> Device | None:
    """The device to plan for; None for one that `device_of` refuses."""
    try:
        return device_of(config, device, None)
    except ShardkitError:
        return None


def _half_of(device: Device) -> str:
    return "fp16" if device.lacks_bf16 else "bf16"


def model_name(model: str | None, path: Path | None) -> str:
    """The model as given, else the one that the file names. UsageError if there is none."""
    if model:
        return model
    named = comment.in_file(path) if path is not None and path.is_file() else None
    if named is None:
        place = f"{path} names none" if path else "no configuration here names one"
        raise UsageError(f"--model: no model ({place}); give {FORMS}, or gpt:layers=..,hidden=..,heads=..")
    return named


def optimizer_name(given: str) -> str:
    """The optimizer that the closed form uses: AdamW in place of a module:function. UsageError if it is unknown."""
    return optimizers.check("adamw" if ":" in given else given)


def network_speed(text: str | None) -> float | None:
    """The Gb/s of --network; None: not given. UsageError if it is no speed of adapters."""
    if text is None:
        return None
    speed = decimal_in(text)
    if speed is None or not 0.1 <= speed <= 1e6:
        raise UsageError(f"--network: is not a number of Gb/s from 0.1 to 1,000,000 (got {text!r}); write 400.")
    return speed


def host_memory(text: str | None) -> int | None:
    """The bytes of --host-memory; None: not given. UsageError if it is no size."""
    size = None if text is None else read_bytes(text)
    if text is not None and (size is None or size > _LARGEST_HOST_BYTES):
        raise UsageError(f"--host-memory: not the memory of a machine (got {text!r}); write 512GiB.")
    return size


def build(
    config: Config,
    model: str,
    device: Device,
    *,
    per_machine: int | None = None,
    full_machine: int | None = None,
    network: float | None = None,
    file: Path | None = None,
    adapters: Adapters | None = None,
) -> PlanRequest:
    """The request for the configuration's ranks, with defaults for what the script does. Reads the model, which may
    take seconds; with adapters, these alone are trained.

    `per_machine`: by default `_ranks_per_machine`'s. `full_machine`: `usual_per_machine`'s. `network`: Gb/s of one
    machine's adapters together; by default the device's. `file`: the configuration file, where it names the model.

    Raises the errors of `describe`, and UsageError where the model cannot have the adapters.
    """
    # The file may be for this CPU and the plan for GPUs elsewhere, or the other way round.
    config = config.changed(use_cpu=device == devices.find("cpu", device.memory_bytes))
    with waiting(f"reading the model {model}"):
        folder = folder_for(model, file)
        description = describe(model, folder=folder)
    request = PlanRequest(
        description=description,
        config=config if description.has_class_names else _without_class_names(config),
        world_size=config.num_processes,
        ranks_per_machine=per_machine or _ranks_per_machine(config, device),
        full_machine=full_machine,
        device=device,
        folder=folder,
    )
    request = tpu.as_planned(request if network is None else _with_network(request, network))
    request = _in_supported_dtypes(request)
    return request if adapters is None else request.with_adapters(adapters)


def _in_supported_dtypes(request: PlanRequest) -> PlanRequest:
    """The request in fp32, with a note, if it is in bf16 and the device does not support that, as in a run
    (`precision.supported`)."""
    config, device, description = request.config, request.device, request.description
    if dtypes(config).param != "bf16" or eight_bits(config) or not device.lacks_bf16:
        return request
    note = (
        f"{device.name} does not support bf16, so a run there trains in fp32, with a warning, and this plan is in "
        "fp32; plan with --set mixed_precision=fp16."
    )
    description = replace(description, notes=(*description.notes, note))
    return replace(request, config=without_bf16(config), description=description)


def _without_class_names(config: Config) -> Config:
    """Without the file's class names: weights have none, so units are the repeated blocks."""
    return config.changed(fsdp={"transformer_layer_cls_to_wrap": []})


def device_of(config: Config, name: str | None, memory: str | None) -> Device:
    """The device of this name, else this machine's: a rank's share of the host where the configuration trains on the
    CPU, its GPU, or an H100 where it has none; a TPU v6e where it trains with PyTorch/XLA. With this memory."""
    problems = Problems()
    size = devices.memory_in(memory) if memory else None
    if memory and size is None:
        problems.add(f"--memory: not the memory of a device (got {memory!r}); write 80GiB.")
    named = None if name is None else problems.of(devices.find, name, size)
    problems.raise_all()
    if named is not None:
        return named
    hardware = detect()
    if runs_on_cpu(config):
        return devices.find("cpu", size or hardware.memory_bytes // config.processes_per_machine)
    if config.mode == "xla":
        return devices.find("tpu-v6e", size)
    if not (here := hardware.devices):
        return devices.find("h100-80", size)
    found = devices.of_hardware(here[0].name, size or here[0].memory_bytes)
    return replace(found, host_bytes=hardware.memory_bytes // len(here))


def _with_network(request: PlanRequest, gigabits_per_s: float) -> PlanRequest:
    bytes_per_s = gigabits_per_s * 1e9 / 8 / request.ranks_per_machine
    return replace(request, device=replace(request.device, network_bytes_per_s=bytes_per_s))
