"""`shardkit plan`: memory and traffic of every rank, for any number of GPUs, without a GPU."""

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from shardkit.cli import HELP, options

if TYPE_CHECKING:
    from shardkit.plan.answer import Answer
    from shardkit.plan.answering import SimulationOptions
    from shardkit.plan.measured import Measured

Choice = TypeVar("Choice", bound=Enum)

ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="module:function, config.json, .safetensors, llama-3.1-8b, gpt-175b, gpt:layers=..,hidden=..",
    ),
]
World = Annotated[str | None, typer.Option(metavar="N", help="Total number of ranks; by default from the file.")]
PerMachine = Annotated[
    str | None, typer.Option(metavar="N", help="Ranks per machine; by default those of the file, or the device's.")
]
DeviceName = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="a100-40, a100-80, h100-80, h100-96, h200, b200, gb200, l4, 4090, tpu-v5p, ..., cpu, or 80GiB; "
        "default: this machine's GPU, or h100-80.",
    ),
]
DeviceMemory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Memory of one device if it differs from the table: 94GiB.")
]
Network = Annotated[
    str | None,
    typer.Option(metavar="N", help="Total Gb/s of one machine's network adapters; default: the device's usual."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Host memory of one machine, for what is offloaded: 512GiB; default: the usual."),
]
BatchSize = Annotated[str | None, typer.Option(metavar="N", help="Sequences per micro-batch and rank.")]
SeqLen = Annotated[str | None, typer.Option(metavar="N", help="Tokens per sequence; by default the model's maximum.")]
OptimizerName = Annotated[str, typer.Option(metavar="NAME", help="adamw, adam, sgd, momentum, adafactor, ...")]
Strategy = Annotated[
    str | None,
    typer.Option(metavar="WHICH", help="1 to 5 or a name; by default from the file. With --simulate also: all."),
]
Simulate = Annotated[bool, typer.Option("--simulate", help="Simulate one training step on fake tensors; needs no GPU.")]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Simulate every layer, and report the memory that CUDA's allocator reserves."),
]
BatchFunction = Annotated[
    str | None,
    typer.Option(metavar="FUNCTION", help="For --simulate: module:function that returns one micro-batch."),
]
ClosedForm = Annotated[bool, typer.Option("--closed-form", help="By formula only (default).")]
LogitsAtLoss = Annotated[
    str,
    typer.Option(
        metavar="HOW",
        help="Logits at the loss: held by the script, dropped before backward, or fused (chunked) loss.",
    ),
]
Averages = Annotated[
    str,
    typer.Option(
        metavar="WHICH", help="Weight averages (EMA) in the script: no, trained (parameters, fp32), model (a copy)."
    ),
]
Tokens = Annotated[
    str | None, typer.Option(metavar="N", help="Tokens of the whole run, 300B or 15T: how long it takes.")
]
Price = Annotated[
    str | None,
    typer.Option(metavar="P", help="With --tokens: price of one device for an hour, in any currency: what it costs."),
]
Mtbf = Annotated[
    str | None,
    typer.Option(
        metavar="HOURS",
        help="With --tokens: hours of one device between failures, 50000 by default: how often to save.",
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(metavar="N", help="GB/s that storage writes, from all machines; default: 1 a machine."),
]
Find = Annotated[str | None, typer.Option(metavar="WHAT", help="max-batch, min-gpus or strategy.")]
Plot = Annotated[Path | None, typer.Option(help="Write a chart: FILE.svg, .html or .png.", **options.PATH)]
MeasuredFolder = Annotated[
    Path | None,
    typer.Option(help="Log folder of a run with launch --measure: compare plan and measurement.", **options.PATH),
]

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)


@app.command()
def plan(
    of: ModelArgument = None,
    model: Model = None,
    world: World = None,
    per_machine: PerMachine = None,
    device: DeviceName = None,
    memory: DeviceMemory = None,
    network: Network = None,
    host_memory: HostMemory = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    optimizer: OptimizerName = "adamw",
    strategy: Strategy = None,
    simulate: Simulate = False,
    exact: Exact = False,
    batch: BatchFunction = None,
    closed_form: ClosedForm = False,
    loss: LogitsAtLoss = "held",
    ema: Averages = "no",
    lora: options.Lora = None,
    lora_targets: options.LoraTargets = None,
    load_in_4bit: options.LoadIn4Bit = False,
    tokens: Tokens = None,
    price: Price = None,
    mtbf: Mtbf = None,
    storage: Storage = None,
    find: Find = None,
    plot: Plot = None,
    measured: MeasuredFolder = None,
    config: options.ConfigFile = None,
    settings: options.Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Estimate memory and traffic of training for every strategy, what fits, and what to change."""
    from shardkit.config.files import find as find_file
    from shardkit.config.schema import Config
    from shardkit.digits import number_of_flag
    from shardkit.model.adapters import adapters_of
    from shardkit.plan import failures, picture, request, whole_run
    from shardkit.plan import measured as measurements
    from shardkit.plan.activations import Loss
    from shardkit.plan.answering import answer
    from shardkit.plan.averages import Ema
    from shardkit.plan.search import Question
    from shardkit.problems import Problems

    path = config or find_file(Path.cwd())
    problems = Problems()
    if of is not None and model is not None:
        problems.add(f"plan: two models (got {of} and --model {model}); give one.")
    simulation = problems.of(_simulation, simulate, exact, batch, closed_form, optimizer, strategy)
    question = None if find is None else problems.of(_member, "--find", find, Question)
    logits, averages = problems.of(_member, "--loss", loss, Loss), problems.of(_member, "--ema", ema, Ema)
    optimizer_name = problems.of(request.optimizer_name, optimizer)
    measurement = None if measured is None else problems.of(measurements.read, measured)
    if plot is not None:
        problems.of(picture.check, plot)
    model_name = problems.of(request.model_name, of or model, path)
    ranks = problems.of(number_of_flag, "--world", world, 1, 1_000_000)
    ranks_of_each = problems.of(number_of_flag, "--per-machine", per_machine, 1, 4096)
    sequences = problems.of(number_of_flag, "--batch-size", batch_size)
    sequence_tokens = problems.of(number_of_flag, "--seq-len", seq_len)
    run = problems.of(whole_run.asked, tokens, price, mtbf)
    storage_speed = problems.of(failures.storage_speed, storage)
    adapters = problems.of(adapters_of, lora, lora_targets, load_in_4bit)
    gigabits = problems.of(request.network_speed, network)
    host_bytes = problems.of(request.host_memory, host_memory)
    one_strategy = None if _is_every(strategy) else strategy
    resolved = problems.of(request.configuration, path, settings or [], one_strategy, ranks, ranks_of_each, device)
    planned_device = problems.of(request.device_of, resolved or Config(), device, memory)
    problems.raise_all()
    assert model_name and resolved and planned_device and optimizer_name and logits and averages
    asked = replace(
        request.build(
            resolved,
            model_name,
            planned_device,
            per_machine=ranks_of_each,
            full_machine=ranks_of_each or request.usual_per_machine(path, settings or [], device),
            network=gigabits,
            file=None if of or model else path,
            adapters=adapters,
        ),
        optimizer=optimizer_name,
        batch_size=sequences,
        seq_len=sequence_tokens,
        loss=logits,
        ema=averages,
        host_bytes=host_bytes,
        own_optimizer=optimizer.strip() if ":" in optimizer else None,
        own_batch=batch,
        run=run,
        storage_bytes_per_s=storage_speed,
    )
    if path is not None and config is None:
        typer.echo(f"plan: settings of {path}", err=True)
    result = answer(asked, question, simulation)
    if plot is not None:
        picture.save(result, plot)
        typer.echo(f"wrote {plot}", err=True)
    typer.echo(_json(result, measurement) if as_json else _text(result, measurement))


def _member(flag: str, name: str, kind: "type[Choice]") -> "Choice":
    """The member of the enumeration that the flag names."""
    from shardkit.errors import UsageError

    try:
        return kind(name.strip().lower().replace("_", "-"))
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise UsageError(f"{flag}: unknown (got {name!r}); use one of {known}.") from None


def _is_every(strategy: str | None) -> bool:
    return (strategy or "").strip().lower() == "all"


def _simulation(
    simulate: bool, exact: bool, batch: str | None, closed_form: bool, optimizer: str, strategy: str | None
) -> "SimulationOptions | None":
    """What the flags say about a simulation; None: without one. UsageError, with all problems, if they disagree."""
    from shardkit.errors import UsageError
    from shardkit.plan.answering import SimulationOptions

    flags = {
        "--exact": exact,
        "--batch": bool(batch),
        f"--optimizer {optimizer}": ":" in optimizer,
        "--strategy all": _is_every(strategy),
    }
    given = [name for name, is_given in flags.items() if is_given and not simulate]
    problems = [f"{name}: only used in simulations (got no --simulate); add --simulate." for name in given]
    if simulate and closed_form:
        problems.append("--closed-form: excludes --simulate (got both); use one of them.")
    if problems:
        raise UsageError("\n".join(problems))
    return SimulationOptions(_is_every(strategy), exact) if simulate else None


def _text(answer: "Answer", measurement: "Measured | None") -> str:
    from shardkit.plan import measured
    from shardkit.plan.report import render

    report = render(answer)
    return report if measurement is None else f"{report}\n\n{measured.comparison(answer, measurement)}"


def _json(answer: "Answer", measurement: "Measured | None") -> str:
    import json
    from dataclasses import asdict

    from shardkit.plan.json_answer import to_json

    measured = {} if measurement is None else {"measured": asdict(measurement)}
    return json.dumps(to_json(answer) | measured, indent=2)
