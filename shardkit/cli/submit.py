"""`shardkit submit --to ENGINE train.py`: the configuration and the script as a job, printed, written, or started."""

import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardkit.cli import HELP
from shardkit.cli.launch import LaunchCommand
from shardkit.errors import ConfigError, ShardkitError, UsageError

if TYPE_CHECKING:
    from shardkit.config.layers import Origin
    from shardkit.config.schema import Config
    from shardkit.submit.engines import Engine
    from shardkit.submit.job import Job

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)


@dataclass(frozen=True)
class Asked:
    """The flags, as they were typed."""

    command: list[str]
    is_module: bool
    config: Path | None
    settings: dict[str, str]
    name: str | None
    time: str | None
    cpus: int | None
    memory: str | None
    device: str | None
    image: str | None
    volumes: list[str]
    hosts: Path | None
    ssh: str | None
    program: str | None
    options: list[str]
    model: str | None
    batch_size: int | None
    seq_len: int | None
    steps: int | None

    @property
    def flags(self) -> set[str]:
        """Those that were given, of those that mean something to some engines only."""
        given = {
            "--time": self.time,
            "--memory": self.memory,
            "--cpus": self.cpus,
            "--image": self.image,
            "--volume": self.volumes,
            "--hosts": self.hosts,
            "--ssh": self.ssh,
        }
        return {name for name, value in given.items() if value}


@dataclass
class Problems:
    """What is wrong so far, so that all of it can be said at once."""

    lines: list[str] = field(default_factory=list)

    def of(self, error: Exception) -> None:
        self.lines += str(error).splitlines()

    def raise_all(self) -> None:
        if self.lines:
            count = len(self.lines)
            end = f"{count} error{'s' if count > 1 else ''}. Nothing was written or submitted."
            raise ConfigError([*dict.fromkeys(self.lines), end])


@app.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False, **HELP})
def submit(
    script: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT ARGUMENTS", show_default=False)] = None,
    to: Annotated[
        str, typer.Option("--to", metavar="ENGINE", help="slurm, kubeflow, jobset, skypilot, ray or ssh.")
    ] = "",
    module: Annotated[str | None, typer.Option("-m", "--module", help="Run a module instead of a script.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="The YAML; else it is looked for.")] = None,
    processes: Annotated[
        str | None, typer.Option("-n", "--num-processes", metavar="N", help="Number of ranks, over all machines.")
    ] = None,
    machines: Annotated[str | None, typer.Option("--num-machines", metavar="N", help="Number of machines.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting; may be given several times.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; by default the script's.")] = None,
    time: Annotated[str | None, typer.Option(help="Longest run: 4h, 90m, 1d12h or 1-12:00:00.")] = None,
    cpus: Annotated[
        int | None, typer.Option(min=1, help="Cores of each machine; by default 8 for a GPU, 1 for a rank on the CPU.")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Host memory of each machine, e.g. 500GiB.")] = None,
    device: Annotated[str | None, typer.Option(help="Which GPUs, in the names of shardkit plan: h100-80.")] = None,
    image: Annotated[str | None, typer.Option(help="Container image with the script and shardkit.")] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE:FOLDER", help="Storage for checkpoints: CLAIM:/data, or s3://bucket:/data."),
    ] = None,
    hosts: Annotated[Path | None, typer.Option(help="For ssh: a file with a host on each line.")] = None,
    ssh: Annotated[
        str | None, typer.Option(help="For ssh: the program and its options, where it is not `ssh -tt ...`.")
    ] = None,
    program: Annotated[
        str | None, typer.Option(help="What starts shardkit on a machine; by default shardkit, or this Python.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="The engine's own: partition=gpu, namespace=team, ..."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to plan for, as in shardkit plan; by default the file's.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="For the plan: sequences in a micro-batch.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="For the plan: tokens in a sequence.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps of the run: its time comes from the plan.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the job into this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Check the job against the engine's rules; start nothing.")
    ] = False,
    start: Annotated[bool, typer.Option("--submit", help="Start it with the engine's own program.")] = False,
) -> int:
    """Make a job of SCRIPT for a scheduler. All that follows the script belongs to the script."""
    said = {"num_processes": processes, "num_machines": machines}
    problems = Problems()
    chosen = {name: value for name, value in said.items() if value is not None}
    try:
        from shardkit.config.command import settings_from

        chosen |= settings_from(settings or [])
    except UsageError as error:
        problems.of(error)
    asked = Asked(
        [*([module] if module else []), *(script or [])],
        bool(module),
        config,
        chosen,
        name,
        time,
        cpus,
        memory,
        device,
        image,
        volume or [],
        hosts,
        ssh,
        program,
        option or [],
        model,
        batch_size,
        seq_len,
        steps,
    )
    engine = _engine(to, problems)
    _check_target(output, force, start, engine, problems)
    job, notes = _job(asked, engine, problems)
    problems.raise_all()
    assert engine is not None and job is not None
    text = engine.render(job)
    for note in notes:
        typer.echo(note, err=True)
    if check:
        _check(engine, text)
    if output is not None:
        from shardkit.cli.config import write_target

        write_target(text, output, force)
        print(output)
    elif not start and not check:
        print(text, end="")
    if start:
        from shardkit.submit import sending

        sending.submit(engine, text, output)
    return 0


def _engine(name: str, problems: Problems) -> "Engine | None":
    from shardkit.submit import engines

    try:
        if not name:
            raise UsageError(
                f"--to: which engine? (got none); add --to {next(iter(engines.ENGINES))}, or another of "
                f"{', '.join(engines.ENGINES)}."
            )
        return engines.find(name)
    except UsageError as error:
        problems.of(error)
        return None


def _check_target(output: Path | None, force: bool, start: bool, engine: "Engine | None", problems: Problems) -> None:
    from shardkit.cli.config import target_problem

    problem = target_problem(output, force) if output is not None else None
    if problem is not None:
        problems.lines.append(problem)
    if start and output is None and engine is not None and engine.needs_file:
        problems.lines.append(
            f"--submit: {engine.name} takes the folder along, and the file must be in it; add --output FILE."
        )


def _job(asked: Asked, engine: "Engine | None", problems: Problems) -> "tuple[Job | None, list[str]]":
    """The job that the flags describe, and what is worth knowing of it; what is wrong goes to the problems."""
    from shardkit.config import files
    from shardkit.submit import engines, reading
    from shardkit.submit.job import CPUS_PER_GPU, Job

    _check_script(asked, engine, problems)
    config: Config | None = None
    try:
        loaded = files.resolve(asked.config, asked.settings, defaults_for_hardware=False)
        config = loaded.config
        problems.lines += _unsaid(config, loaded.origins, loaded.path)
    except ConfigError as error:
        problems.of(error)

    def read(reader, *arguments):
        try:
            return reader(*arguments)
        except (UsageError, ConfigError) as error:
            problems.of(error)
            return None

    engine_name = engine.name if engine else ""
    time_s = read(reading.seconds, asked.time) if asked.time else None
    memory = read(_size, asked.memory) if asked.memory else None
    volumes = read(reading.volumes, asked.volumes, engine_name != "skypilot") or ()
    ranks = config.processes_per_machine if config else None
    hosts = read(reading.hosts, asked.hosts, ranks) if asked.hosts and engine_name == "ssh" else ()
    options = read(reading.options, asked.options) or {}
    device = read(_device, asked.device, config)
    if engine_name == "ssh" and asked.hosts is None:
        problems.lines.append("--hosts: on which hosts? (got none); add --hosts FILE with a host on each line.")
    if config is None or engine is None or not asked.command:
        return None, []
    cores = config.processes_per_machine * (1 if config.use_cpu else CPUS_PER_GPU)
    job = Job(
        name=asked.name or _name(asked.command[0], asked.is_module),
        command=tuple(asked.command),
        is_module=asked.is_module,
        config=config,
        folder=Path.cwd(),
        program=_program(asked.program, engine),
        cpus_per_machine=asked.cpus or cores,
        memory_bytes=memory,
        time_s=time_s,
        gpu=asked.device,
        image=asked.image,
        volumes=volumes,
        hosts=hosts or (),
        ssh=tuple(shlex.split(asked.ssh or "")),
        options=options,
    )
    if re.search(r"[^A-Za-z0-9_.-]", job.name):
        problems.lines.append(
            f"--name: is made of letters, digits, dots and dashes (got {job.name!r}); give another --name."
        )
    problems.lines += engines.problems(engine, job, asked.flags)
    planned = read(_planned, asked, job, engine, loaded.path, device) if not problems.lines else None
    return planned or (job, [])


def _check_script(asked: Asked, engine: "Engine | None", problems: Problems) -> None:
    """Whether the script is there: in an image it is not here."""
    from shardkit.launch import preflight

    if not asked.command:
        problems.lines.append("submit: no script is named; write: shardkit submit --to ENGINE SCRIPT.py")
        return
    is_in_image = engine is not None and "--image" in engine.flags and asked.image is not None
    if is_in_image:
        return
    problems.lines += [
        problem.text.replace("launch: ", "submit: ", 1)
        for problem in preflight.script_problems(asked.command[0], asked.is_module)
    ]
    if engine is not None and engine.name in ("skypilot", "ray") and Path(asked.command[0]).is_absolute():
        problems.lines.append(
            f"submit: {engine.name} takes this folder along, where the script has another path "
            f"(got {asked.command[0]}); name it from here."
        )


def _unsaid(config: "Config", origins: "dict[str, Origin]", path: Path | None) -> list[str]:
    """What a job must know and this machine, which is another one, cannot say."""
    found = []
    if origins["num_processes"].kind == "default" and config.distributed_type.value != "NO":
        where = f"{path} does not say it" if path else "no shardkit.yaml is found"
        found.append(f"num_processes: how many ranks, over all machines? ({where}); write it there, or add -n N.")
    if config.mode == "xla":
        where = origins["distributed_type"].where
        found.append(
            f"{where}: distributed_type: the engines' jobs are for GPUs and CPUs (got XLA); use your TPU's own tool."
        )
    return found


def _name(script: str, is_module: bool) -> str:
    stem = script.rpartition(".")[2] if is_module else Path(script).stem
    return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "train"


def _program(text: str | None, engine: "Engine") -> tuple[str, ...]:
    """On machines that share this one's folders, this Python; elsewhere what an installed shardkit is called."""
    if text is not None:
        return tuple(shlex.split(text))
    return (sys.executable, "-m", "shardkit") if engine.name in ("slurm", "ssh") else ("shardkit",)


def _size(text: str) -> int:
    from shardkit.plan.devices import read_bytes

    found = read_bytes(text)
    if found is None:
        raise UsageError(f"--memory: not a size (got {text!r}); write 500GiB.")
    return found


def _device(name: str | None, config: "Config | None"):
    """The device to plan for; UsageError where none has the name."""
    from shardkit.plan import devices

    if name is not None:
        return devices.find(name)
    return devices.find("cpu" if config is not None and config.use_cpu else "h100-80")


def _planned(asked: Asked, job: "Job", engine: "Engine", path: Path | None, device):
    """The job with the plan's numbers where the flags say none, and the plan's notes; without a model as it is."""
    from dataclasses import replace

    from shardkit.model import comment

    model = asked.model or (comment.read(path.read_text(encoding="utf-8")) if path is not None else None)
    if model is None:
        wanted = [flag for flag, value in (("--batch-size", asked.batch_size), ("--steps", asked.steps)) if value]
        if wanted:
            raise UsageError(f"{wanted[0]}: it is for the plan, which needs a model (got none); add --model.")
        return job, []
    from shardkit.submit import sizing

    sizes = sizing.sized(job.config, model, device, asked.batch_size, asked.seq_len, asked.steps)
    notes = list(sizes.notes)
    if job.memory_bytes is None and "--memory" in engine.flags:
        job = replace(job, memory_bytes=sizes.memory_bytes)
    if asked.steps is not None and sizes.steps_s is None:
        notes.append(
            "note: the plan cannot tell the time of a step without --batch-size, or on this device; add --time."
        )
    elif job.time_s is None and "--time" in engine.flags:
        job = replace(job, time_s=sizes.steps_s)
    return job, notes


def _check(engine: "Engine", text: str) -> None:
    from shardkit.submit import sending

    wrong, by = sending.check(engine, text)
    if wrong:
        raise ShardkitError("\n".join([*wrong, "Nothing was written or submitted."]))
    print(f"valid: checked by {by}", file=sys.stderr)
