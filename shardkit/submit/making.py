"""From the flags of `shardkit submit` to a job for an engine; collects all problems."""

import os
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardkit.config import files
from shardkit.config.hardware_defaults import cores_of_job
from shardkit.config.layers import Origin
from shardkit.config.meaning import runs_on_cpu
from shardkit.config.schema import Config
from shardkit.digits import number_of_flag
from shardkit.errors import ShardkitError, UsageError
from shardkit.launch import preflight
from shardkit.launch.flags import Switches
from shardkit.model import comment
from shardkit.plan import devices
from shardkit.problems import Problems
from shardkit.submit import engines, kubernetes, reading, sizing
from shardkit.submit.engines import Engine
from shardkit.submit.job import Job

MAIN = Path(__file__).parent.parent / "__main__.py"
"""The program `shardkit`, as a file: a job starts in the project's folder, from which `python -m` would import."""


@dataclass(frozen=True)
class Asked:
    """The values of the flags, as given."""

    command: list[str]
    is_module: bool
    config: Path | None
    settings: dict[str, str]
    switches: Switches
    name: str | None
    time: str | None
    cpus: str | None
    memory: str | None
    device: str | None
    image: str | None
    volumes: list[str]
    hosts: Path | None
    ssh: str | None
    program: str | None
    options: list[str]
    variables: list[str]
    model: str | None
    batch_size: str | None
    seq_len: str | None
    steps: str | None

    @property
    def flags(self) -> set[str]:
        """The given flags, of those that not all engines support."""
        given = {
            "--time": self.time,
            "--memory": self.memory,
            "--cpus": self.cpus,
            "--image": self.image,
            "--volume": self.volumes,
            "--env": self.variables,
            "--hosts": self.hosts,
            "--ssh": self.ssh,
        }
        return {name for name, value in given.items() if value} | {*self.switches.given}


def job_for(to: str, asked: Asked, problems: Problems) -> tuple[Engine | None, Job | None, list[str]]:
    """(engine, job, notes on the job). Errors are added to `problems`; engine and job may then be None."""
    engine = problems.of(engines.find, to)
    _check_script(asked, engine, problems)
    loaded = problems.of(_resolved, asked.config, asked.settings)
    if loaded:
        problems.lines += _missing(loaded.config, loaded.origins, loaded.path) + _problem_of_resume(loaded)
    fields = _fields(asked, engine, loaded.config if loaded else None, problems)
    load = _load(asked, loaded.config if loaded else None, problems)
    if engine is not None:
        problems.lines += engines.problems(engine, asked.name, asked.flags, fields.get("options", {}))
    if engine is None or loaded is None or not asked.command:
        return engine, None, []
    job = _job(asked, engine, loaded, fields, load)
    problems.lines += engine.problems(job)
    if problems.lines:
        return engine, job, []
    return engine, *_planned(asked.model, job, engine, loaded.path, load)


def _fields(asked: Asked, engine: Engine | None, config: Config | None, problems: Problems) -> dict[str, Any]:
    """The fields of the job that flags set."""
    takes_hosts = engine is not None and "--hosts" in engine.flags
    ranks_of_each = config and config.processes_per_machine
    found = {
        "ssh": problems.of(_words, "--ssh", asked.ssh),
        "program": problems.of(_words, "--program", asked.program),
        "time_s": None if asked.time is None else problems.of(reading.seconds, asked.time),
        "memory_bytes": None if asked.memory is None else problems.of(reading.size, asked.memory),
        "cpus_per_machine": problems.of(number_of_flag, "--cpus", asked.cpus),
        "image": asked.image,
        "options": problems.of(reading.options, asked.options),
        "variables": problems.of(reading.variables, asked.variables),
        "volumes": problems.of(reading.volumes, asked.volumes, engine is None or engine.name != "skypilot"),
        "hosts": problems.of(reading.hosts, asked.hosts, ranks_of_each) if takes_hosts else None,
    }
    return {name: value for name, value in found.items() if value}


def _load(asked: Asked, config: Config | None, problems: Problems) -> sizing.Load:
    """What a plan is made for."""
    return sizing.Load(
        device=problems.of(_device, asked.device, config),
        batch_size=problems.of(number_of_flag, "--batch-size", asked.batch_size),
        seq_len=problems.of(number_of_flag, "--seq-len", asked.seq_len),
        steps=problems.of(number_of_flag, "--steps", asked.steps),
    )


def _job(asked: Asked, engine: Engine, loaded: files.LoadedConfig, fields: dict[str, Any], load: sizing.Load) -> Job:
    """The job as the flags and the configuration have it."""
    config = loaded.config
    usual: dict[str, Any] = {
        "program": _program(engine),
        "cpus_per_machine": cores_of_job(config.processes_per_machine, runs_on_cpu(config)),
    }
    return Job(
        name=asked.name or _name(asked.command[0], asked.is_module),
        command=tuple(asked.command),
        is_module=asked.is_module,
        config=config,
        folder=Path.cwd(),
        chosen=frozenset(loaded.chosen),
        switches=tuple(asked.switches.words),
        gpu=_gpu(load.device) if asked.device and load.device else None,
        **usual | fields,
    )


def _resolved(path: Path | None, settings: dict[str, str]) -> files.LoadedConfig:
    """The configuration without defaults for this machine's hardware, since the job runs on other machines."""
    return files.resolve(path, settings, defaults_for_hardware=False)


def _check_script(asked: Asked, engine: Engine | None, problems: Problems) -> None:
    """Check that the script exists, unless it is in a container image."""
    if not asked.command:
        problems.lines.append("submit: no script is given; write: shardkit submit --to ENGINE SCRIPT.py")
        return
    is_in_image = engine is not None and "--image" in engine.flags and bool(asked.image)
    if is_in_image:
        return
    problems.lines += [
        problem.text.replace("launch: ", "submit: ", 1)
        for problem in preflight.script_problems(asked.command[0], asked.is_module)
    ]
    if engine is not None and engine.name in ("skypilot", "ray") and not asked.is_module:
        problems.lines += _problem_of_upload(asked.command[0], engine.name)


def _problem_of_upload(script: str, engine: str) -> list[str]:
    """Why a script would not be found in the uploaded folder, which is the working folder."""
    path = Path(os.path.normpath(script))
    if not path.is_absolute() and ".." not in path.parts:
        return []
    text = f"submit: {engine} uploads this folder, so the script needs a relative path in it (got {script}); give its "
    return [text + "path relative to this folder, or run the command in the folder of the script."]


def _missing(config: Config, origins: dict[str, Origin], path: Path | None) -> list[str]:
    """Settings that a job needs, and that cannot be taken from this machine's hardware."""
    found = []
    if origins["num_processes"].kind == "default" and config.distributed_type.value != "NO":
        where = f"not set in {path}" if path else "no shardkit.yaml was found"
        found.append(f"num_processes: the total number of ranks is missing ({where}); set it there, or add -n N.")
    if config.shardkit.launch.min_machines is not None:
        found.append(
            "shardkit.launch.min_machines: the engines' jobs have a fixed number of machines, and end with the first "
            f"that fails (got {config.shardkit.launch.min_machines}); leave it out, or start the launches yourself."
        )
    if config.mode == "xla":
        where = origins["distributed_type"].where
        found.append(
            f"{where}: distributed_type: jobs are only supported for GPUs and CPUs (got XLA); use the TPU's tools."
        )
    return found


def _problem_of_resume(loaded: files.LoadedConfig) -> list[str]:
    """Why a job can neither begin afresh every time, where a flag or variable asks for that, nor at one checkpoint: the
    engine starts it again, and what it has saved meanwhile would be lost."""
    name = "shardkit.checkpoint.resume"
    origin, wanted = loaded.origins[name], loaded.config.shardkit.checkpoint.resume
    if wanted == "auto" or (wanted == "never" and origin.kind not in ("flag", "environment")):
        return []
    instead = "and save to a new folder to train from the beginning"
    if wanted != "never":
        begin = f"`accelerator.resume() or accelerator.load_state({wanted!r})`"
        instead = f"write {begin} in the script, and save to a new folder"
    return [
        f"{origin.of(name)}: a job resumes from the newest checkpoint, since its engine starts it again after a "
        f"preemption (got {wanted}); leave it out, {instead}."
    ]


def _name(script: str, is_module: bool) -> str:
    """That of the script, as Kubernetes' objects need it."""
    stem = script.rpartition(".")[2] if is_module else Path(script).stem
    words = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "train"
    return f"{'job-' if words[0].isdigit() else ''}{words}"[: kubernetes.LONGEST_NAME].rstrip("-")


def _program(engine: Engine) -> tuple[str, ...]:
    """The command for shardkit: this Python and its shardkit on machines that share this machine's folders, else
    `shardkit`."""
    return (sys.executable, str(MAIN)) if engine.name in ("slurm", "ssh") else ("shardkit",)


def _words(flag: str, text: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text or ""))
    except ValueError as error:
        raise UsageError(f"{flag}: not valid shell syntax ({error}, got {text!r}); close the quotes.") from None


def _device(name: str | None, config: Config | None) -> devices.Device:
    """The device to plan for. Raises UsageError for an unknown name, and for a GPU of ranks that train on the CPU."""
    on_cpu = config is not None and runs_on_cpu(config)
    found = devices.find(name or ("cpu" if on_cpu else "h100-80"))
    if on_cpu and found != devices.DEVICES["cpu"]:
        raise UsageError(
            f"--device: the configuration trains on the CPU (got {name}); add --set use_cpu=false, with a "
            "distributed_type for GPUs, or leave out --device."
        )
    return found


def _gpu(device: devices.Device) -> str | None:
    """The GPU's name in the plan's table, whatever was typed for it (a100, NVIDIA A100-SXM4-80GB: a100-80); None for
    the CPU, and for a device that was given by its memory."""
    return next((name for name, known in devices.DEVICES.items() if known == device and name != "cpu"), None)


def _planned(
    given: str | None, job: Job, engine: Engine, path: Path | None, load: sizing.Load
) -> tuple[Job, list[str]]:
    """(the job, with memory and time from the plan if no flags set them; notes). Unchanged without a model: the
    given one, or the one that the configuration file `path` names.

    A model that only the file names may be missing on this machine: that is a note, not an error."""
    model = given or comment.in_file(path)
    if model is None:
        flags = {"--batch-size": load.batch_size, "--seq-len": load.seq_len, "--steps": load.steps}
        if wanted := [flag for flag, value in flags.items() if value]:
            raise UsageError(f"{', '.join(wanted)}: for the plan, which needs a model (got none); add --model.")
        return job, []
    try:
        sizes = sizing.sized(job.config, model, load, None if given else path)
    except ShardkitError as error:
        if given is not None:
            raise
        return job, [f"note: memory and time are not planned: {error}"]
    notes = list(sizes.notes)
    if job.memory_bytes is None and "--memory" in engine.flags:
        job = replace(job, memory_bytes=sizes.memory_bytes)
    if load.steps is not None and sizes.steps_s is None:
        notes.append("note: the time of a step is unknown without --batch-size, or for this device; add --time.")
    elif job.time_s is None and "--time" in engine.flags:
        job = replace(job, time_s=sizes.steps_s)
    return job, notes
