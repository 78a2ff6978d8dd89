"""`shardkit submit --to ENGINE train.py`: makes a job from configuration and script; prints, writes or starts it."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardkit.cli import HELP, options
from shardkit.cli.launch import LaunchCommand
from shardkit.errors import ShardkitError

if TYPE_CHECKING:
    from shardkit.submit.engines import Engine

EngineName = Annotated[
    str, typer.Option("--to", metavar="ENGINE", help="slurm, kubeflow, jobset, skypilot, ray or ssh.")
]
JobName = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job; default: that of the script.")]
TimeLimit = Annotated[str | None, typer.Option(metavar="DURATION", help="Time limit: 4h, 90m, 1d12h or 1-12:00:00.")]
Cores = Annotated[
    str | None, typer.Option(metavar="N", help="Cores per machine; default: 8 per GPU, or 1 per rank on the CPU.")
]
HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory of each machine, e.g. 500GiB.")]
DeviceName = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="GPU type, by its name in shardkit plan: h100-80.")
]
Image = Annotated[str | None, typer.Option(metavar="NAME:TAG", help="Container image with the script and shardkit.")]
Volumes = Annotated[
    list[str] | None,
    typer.Option(metavar="SOURCE:FOLDER", help="Storage for checkpoints: CLAIM:/data, or s3://bucket:/data."),
]
Variables = Annotated[
    list[str] | None,
    typer.Option("--env", metavar="NAME=VALUE", help="An environment variable of the script, in the job's file."),
]
Hosts = Annotated[Path | None, typer.Option(help="For ssh: a file with one host per line.", **options.PATH)]
SshProgram = Annotated[
    str | None,
    typer.Option(metavar="COMMAND", help="For ssh: the ssh program with its options; default: `ssh -tt ...`."),
]
Program = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Command that starts shardkit on a machine; default: shardkit, or this Python with its shardkit.",
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="An option of the engine: partition=gpu, namespace=team..."),
]
PlannedModel = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="Model to plan for, as in shardkit plan; default: the one in the file."),
]
BatchSize = Annotated[str | None, typer.Option(metavar="N", help="For the plan: sequences in a micro-batch.")]
SeqLen = Annotated[str | None, typer.Option(metavar="N", help="For the plan: tokens in a sequence.")]
Steps = Annotated[
    str | None,
    typer.Option(metavar="N", help="Optimizer steps of the run; sets the time limit from the plan."),
]
JobFile = Annotated[Path | None, typer.Option("-o", "--output", help="Write the job to this file.", **options.PATH)]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file.")]
Check = Annotated[bool, typer.Option("--check", help="Validate the job for the engine; start nothing.")]
Start = Annotated[bool, typer.Option("--submit", help="Start the job with the engine's program.")]

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)


@app.command(cls=LaunchCommand, context_settings={"allow_interspersed_args": False, **HELP})
def submit(
    script: options.Script = None,
    to: EngineName = "",
    module: options.Module = None,
    config: options.ConfigFile = None,
    processes: options.Processes = None,
    machines: options.Machines = None,
    cpu: options.Cpu = False,
    mixed_precision: options.MixedPrecision = None,
    fsdp: options.Fsdp = None,
    fsdp_config: options.FsdpConfig = None,
    settings: options.Settings = None,
    resume: options.ResumeOfJob = None,
    restarts: options.Restarts = None,
    show: options.Show = None,
    no_prefix: options.NoPrefix = False,
    measure: options.Measure = False,
    as_accelerate: options.AsAccelerate = False,
    accelerates_meaning: options.AcceleratesMeaning = None,
    name: JobName = None,
    time: TimeLimit = None,
    cpus: Cores = None,
    memory: HostMemory = None,
    device: DeviceName = None,
    image: Image = None,
    volume: Volumes = None,
    variables: Variables = None,
    hosts: Hosts = None,
    ssh: SshProgram = None,
    program: Program = None,
    option: EngineOptions = None,
    model: PlannedModel = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    steps: Steps = None,
    output: JobFile = None,
    force: Force = False,
    check: Check = False,
    start: Start = False,
) -> int:
    """Make a job for a scheduler that runs SCRIPT. Arguments after the script are passed to it; options before it
    override the file."""
    from shardkit.cli.configuring import target_problem, write_target
    from shardkit.cli.launching import problems_of_compat
    from shardkit.launch import flags
    from shardkit.submit.making import Asked, job_for

    given = {
        **options.plain_settings(processes, cpu, mixed_precision, resume, restarts, show),
        "num_machines": options.by("--num-machines", machines),
    }
    chosen, problems = flags.read_all(
        given,
        (flags.fsdp_settings, fsdp),
        (flags.fsdp_file_settings, fsdp_config),
        settings=settings,
    )
    switches = flags.Switches(no_prefix, measure, False, as_accelerate, flags.words_in(accelerates_meaning))
    asked = Asked(
        command=[*([module] if module else []), *(script or [])],
        is_module=bool(module),
        config=config,
        settings=chosen,
        switches=switches,
        name=name,
        time=time,
        cpus=cpus,
        memory=memory,
        device=device,
        image=image,
        volumes=volume or [],
        hosts=hosts,
        ssh=ssh,
        program=program,
        options=option or [],
        variables=variables or [],
        model=model,
        batch_size=batch_size,
        seq_len=seq_len,
        steps=steps,
    )
    problems.lines += problems_of_compat("submit", switches)
    if output is not None:
        problems.add(target_problem(output, force))
    engine, job, notes = job_for(to, asked, problems)
    if engine is not None and engine.needs_file and start and output is None:
        problems.add(
            f"--submit: {engine.name} uploads the folder, and the job must be a file in it; add --output FILE."
        )
    problems.raise_all("Nothing was written or submitted.")
    assert engine is not None and job is not None
    text = engine.render(job)
    for note in notes:
        typer.echo(note, err=True)
    if check:
        _check(engine, text)
    if output is not None:
        write_target(text, output, force)
        print(output)
    elif not start and not check:
        print(text, end="")
    if start:
        from shardkit.submit import sending

        sending.submit(engine, text, output)
    return 0


def _check(engine: "Engine", text: str) -> None:
    from shardkit.submit import sending

    wrong, by = sending.check(engine, text)
    if wrong:
        raise ShardkitError("\n".join([*wrong, "Nothing was written or submitted."]))
    print(f"valid: checked by {by}", file=sys.stderr)
