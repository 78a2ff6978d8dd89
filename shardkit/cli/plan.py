"""`shardkit plan`: memory and traffic of every rank, for any number of GPUs, without a GPU."""

import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from shardkit.cli import HELP, options

if TYPE_CHECKING:
    from shardkit.config.schema import Config
    from shardkit.plan.answer import Answer, Finding, PlanRequest, Row
    from shardkit.plan.devices import Device
    from shardkit.plan.measured import Measured

Choice = TypeVar("Choice", bound=Enum)

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=HELP)


@app.command()
def plan(
    model: Annotated[
        str | None,
        typer.Option(help="module:function, config.json, .safetensors, gpt-175b, gpt-1t, gpt:layers=..,hidden=.."),
    ] = None,
    world: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Total number of ranks; by default from the file.")
    ] = None,
    per_machine: Annotated[int | None, typer.Option(min=1, help="Ranks per machine; by default 8.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="a100-40, a100-80, h100-80, h100-96, h200, b200, gb200, l4, 4090, tpu-v5p, ..., cpu, or 80GiB."
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory of one device if it differs from the table: 94GiB.")
    ] = None,
    network: Annotated[
        float | None, typer.Option(min=0.1, help="Total Gb/s of one machine's network adapters.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per micro-batch and rank.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence; by default the model's maximum.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, sgd, momentum, adafactor, ...")] = "adamw",
    strategy: Annotated[
        str | None, typer.Option(help="1 to 5 or a name; by default from the file. With --simulate also: all.")
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate one training step on fake tensors; needs no GPU.")
    ] = False,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Simulate every layer, and report the memory that CUDA's allocator reserves."),
    ] = False,
    batch: Annotated[
        str | None, typer.Option(help="For --simulate: module:function that returns one micro-batch.")
    ] = None,
    closed_form: Annotated[bool, typer.Option("--closed-form", help="By formula only (default).")] = False,
    loss: Annotated[
        str,
        typer.Option(help="Logits at the loss: held by the script, dropped before backward, or fused (chunked) loss."),
    ] = "held",
    ema: Annotated[
        str, typer.Option(help="Weight averages (EMA) in the script: no, trained (parameters, fp32), model (a copy).")
    ] = "no",
    find: Annotated[str | None, typer.Option(help="max-batch, min-gpus or strategy.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a chart: FILE.svg, .html or .png.", **options.PATH)] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="Log folder of a run with launch --measure: compare plan and measurement.", **options.PATH),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Configuration file; by default found from the current folder.", **options.PATH)
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, as in the file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Estimate memory and traffic of training for every strategy, what fits, and what to change."""
    from dataclasses import replace

    from shardkit.errors import UsageError
    from shardkit.plan import measured as measured_memory
    from shardkit.plan import picture
    from shardkit.plan.activations import Loss
    from shardkit.plan.averages import Ema
    from shardkit.plan.report import render

    path = _config_path(config)
    everything = (strategy or "").strip().lower() == "all"
    _check_simulation(simulate, exact, batch, closed_form, optimizer, everything)
    if plot is not None:
        picture.check(plot)
    found = None if measured is None else measured_memory.read(measured)
    given = _settings(path, settings or [], None if everything else strategy)
    resolved = _configuration(path, given, world, per_machine)
    if simulate and resolved.mode == "xla" and resolved.downcast_bf16:
        raise UsageError("--simulate: downcast_bf16 is not simulated (got true); leave --simulate out.")
    request = _request(
        resolved, _model(model, path), per_machine, device, memory, _known(optimizer), batch_size, seq_len
    )
    request = replace(request, loss=_member("--loss", loss, Loss), ema=_member("--ema", ema, Ema))
    if ":" in optimizer:
        request = replace(request, own_optimizer=optimizer.strip())
    if network is not None:
        request = _with_network(request, network)
    answer = _answer(request, find, Simulated(everything, exact, batch, optimizer.strip()) if simulate else None)
    if plot is not None:
        picture.save(answer, plot)
        typer.echo(f"wrote {plot}", err=True)
    typer.echo(_json(answer, found) if as_json else render(answer))
    if found is not None and not as_json:
        typer.echo(f"\n{_comparison(answer, found)}")


def _member(flag: str, name: str, kind: "type[Choice]") -> "Choice":
    """The member of the enumeration that the flag names."""
    from shardkit.errors import UsageError

    try:
        return kind(name.strip().lower())
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise UsageError(f"{flag}: unknown (got {name!r}); use one of {known}.") from None


def _check_simulation(
    simulate: bool, exact: bool, batch: str | None, closed_form: bool, optimizer: str, everything: bool
) -> None:
    from shardkit.errors import UsageError

    flags = {"--exact": exact, "--batch": bool(batch), f"--optimizer {optimizer}": ":" in optimizer}
    flags["--strategy all"] = everything
    given = [name for name, is_given in flags.items() if is_given and not simulate]
    problems = [f"{name}: only used in simulations (got no --simulate); add --simulate." for name in given]
    if simulate and closed_form:
        problems.append("--closed-form: excludes --simulate (got both); use one of them.")
    if problems:
        raise UsageError("\n".join(problems))


def _known(optimizer: str) -> str:
    """The optimizer that the closed form uses; AdamW in place of a module:function."""
    return "adamw" if ":" in optimizer else optimizer


@dataclass(frozen=True)
class Simulated:
    """Options of a simulation: all strategies or the configured one, all layers or a few, batch, optimizer."""

    everything: bool
    is_exact: bool
    batch: str | None
    optimizer: str


def _refined(request: "PlanRequest", rows: "list[Row]", how: Simulated) -> "tuple[list[Row], tuple[str, ...]]":
    """The rows, the configured one (or all) with simulated memory, and notes about the simulation."""
    from shardkit.plan.answer import configured_strategy
    from shardkit.plan.simulation import refine
    from shardkit.spinner import waiting

    chosen = configured_strategy(request.config)
    strategies = [row.strategy for row in rows if how.everything or row.strategy is chosen]
    with waiting(
        "simulating one training step" if len(strategies) == 1 else "simulating one training step per strategy"
    ):
        refined, notes = refine(
            request, tuple(rows), strategies, is_exact=how.is_exact, batch=how.batch, optimizer=how.optimizer
        )
    if ":" in how.optimizer:
        notes += (f"The closed form uses AdamW in place of {how.optimizer}.",)
    return list(refined), notes


def _found(question: str, request: "PlanRequest", how: Simulated | None) -> "Finding":
    """The answer to --find, by simulation if requested."""
    from functools import partial

    from shardkit.errors import UsageError
    from shardkit.plan import search
    from shardkit.plan.simulation import simulated_row
    from shardkit.spinner import waiting

    if how is None:
        return search.find(question, request)
    if how.batch is not None and question == "max-batch":
        raise UsageError("--find max-batch: --batch fixes the batch size (got both); leave --batch out.")
    if request.batch_size is None and how.batch is None and question != "max-batch":
        raise UsageError(f"--find {question}: needs the micro-batch size (got no --batch-size); add --batch-size.")
    simulated = partial(simulated_row, is_exact=how.is_exact, batch=how.batch, optimizer=how.optimizer)
    with waiting("simulating training steps"):
        return search.find(question, request, simulated)


def _comparison(answer: "Answer", found: "Measured") -> str:
    from shardkit.plan import measured

    text = measured.table(answer.chosen_row, found)
    if not measured.is_of_the_same(answer.chosen_row, found):
        text += "\n  The parameters differ: the run had another model, other settings or another number of ranks."
    if found.ranks != answer.request.world_size:
        text += f"\n  The plan is for {answer.request.world_size} ranks: add --world {found.ranks}."
    return text


def beside_the_plan(config: "Config", path: Path | None, folder: Path) -> str:
    """Measurements that a run left in `folder`, compared with the plan for the model named in the file.

    The file has neither batch nor optimizer: the plan is for AdamW without activations, and a line says how to
    include them.
    """
    from shardkit.model import comment
    from shardkit.plan import measured

    named = comment.read(path.read_text(encoding="utf-8")) if path else None
    if not any(folder.glob("rank*.memory.json")):
        return f"--measure: the script left nothing in {folder}; end it with accelerator.end_training()."
    model, where = shlex.quote(named or "MODULE:FUNCTION"), shlex.quote(str(folder))
    more = "--batch-size counts activations too, --simulate --batch a step"
    hint = f"{more}: shardkit plan --model {model} --measured {where}"
    if named is None:
        found = measured.read(folder)
        return (
            f"measured: peak {found.peak_bytes / measured.MIB:,.1f} MiB on rank {found.rank}\nbeside the plan; {hint}"
        )
    request = _request(config, named, None, None, None, "adamw", None, None)
    return f"{_comparison(_answer(request, None), measured.read(folder))}\n{hint}"


def _config_path(config: Path | None) -> Path | None:
    from shardkit.config.files import find

    return config or find(Path.cwd())


def _settings(path: Path | None, pairs: list[str], strategy: str | None) -> dict[str, str]:
    """Settings from --set and --strategy, by key. A strategy implies FSDP, or PyTorch/XLA if that is configured."""
    from shardkit.config.command import settings_from
    from shardkit.config.files import resolve

    given = settings_from(pairs)
    if strategy is None:
        return given
    is_on_tpu = resolve(path, given, defaults_for_hardware=False).config.mode == "xla"
    kind = {"distributed_type": "XLA", "xla": "true"} if is_on_tpu else {"distributed_type": "FSDP"}
    return given | kind | {"fsdp_config.fsdp_sharding_strategy": strategy}


def _configuration(path: Path | None, given: dict[str, str], world: int | None, per_machine: int | None) -> "Config":
    """The file's configuration, or the defaults, for the requested ranks; without a file bf16 is assumed."""
    from shardkit.config.files import resolve

    if path is None:
        given = {"mixed_precision": "bf16", **given}
    if world is not None:
        ranks = min(per_machine or 8, world)
        machines = world // ranks if world % ranks == 0 else 1
        given = {"num_processes": str(world), "num_machines": str(machines), **given}
        if machines > 1:
            given = {"main_process_ip": "machine-0", **given}
    return resolve(path, given, defaults_for_hardware=False).config


def _model(model: str | None, path: Path | None) -> str:
    from shardkit.errors import UsageError
    from shardkit.model import comment
    from shardkit.model.sources import FORMS

    if model:
        return model
    named = comment.read(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else None
    if named is None:
        place = f"{path} names none" if path else "no configuration here names one"
        raise UsageError(f"--model: no model ({place}); give {FORMS}, or gpt:layers=..,hidden=..,heads=..")
    return named


def _request(
    config: "Config",
    model: str,
    per_machine: int | None,
    device: str | None,
    memory: str | None,
    optimizer: str,
    batch_size: int | None,
    seq_len: int | None,
) -> "PlanRequest":
    from shardkit.model.sources import describe
    from shardkit.plan import devices, optimizers, tpu
    from shardkit.plan.answer import PlanRequest
    from shardkit.spinner import waiting

    found = _device(config, device, memory)
    if device is not None and found != devices.find("cpu", found.memory_bytes):
        config = config.model_copy(update={"use_cpu": False})  # a file for this CPU, a plan for GPUs elsewhere
    optimizer = optimizers.check(optimizer)
    ranks = per_machine or (config.processes_per_machine if config.num_machines > 1 else 8)
    with waiting(f"reading the model {model}"):
        description = describe(model)
    request = PlanRequest(
        description=description,
        config=config if description.has_class_names else _without_class_names(config),
        world_size=config.num_processes,
        ranks_per_machine=min(ranks, config.num_processes),
        device=found,
        optimizer=optimizer,
        batch_size=batch_size,
        seq_len=seq_len,
    )
    return tpu.as_planned(request)


def _with_network(request: "PlanRequest", gigabits_per_s: float) -> "PlanRequest":
    """The request with the machine's bandwidth divided evenly among its ranks."""
    from dataclasses import replace

    bytes_per_s = gigabits_per_s * 1e9 / 8 / request.ranks_per_machine
    return replace(request, device=replace(request.device, network_bytes_per_s=bytes_per_s))


def _without_class_names(config: "Config") -> "Config":
    """Without the file's class names: weights have none, so units are the repeated blocks."""
    fsdp = config.fsdp.model_copy(update={"transformer_layer_cls_to_wrap": []})
    return config.model_copy(update={"fsdp": fsdp})


def _device(config: "Config", device: str | None, memory: str | None) -> "Device":
    """The named device, else this machine's, else an H100."""
    from shardkit.config.hardware import detect
    from shardkit.config.schema import DistributedType
    from shardkit.errors import UsageError
    from shardkit.plan import devices

    size = devices.read_bytes(memory) if memory else None
    if memory and size is None:
        raise UsageError(f"--memory: not a size (got {memory!r}); write 80GiB.")
    if device is not None:
        return devices.find(device, size)
    if config.use_cpu or config.distributed_type is DistributedType.MULTI_CPU:
        return devices.find("cpu", size)
    here = detect().devices
    return devices.of_hardware(here[0].name, size or here[0].memory_bytes) if here else devices.find("h100-80", size)


def _answer(request: "PlanRequest", question: str | None, how: Simulated | None = None) -> "Answer":
    """All possible strategies, the suggestion, and what to change if the configured one does not fit."""
    from dataclasses import replace

    from shardkit.model.cut import missing_blocks
    from shardkit.plan.answer import (
        Answer,
        check_seq_len,
        configured_strategy,
        notes_on,
        possible_strategies,
        row,
        undivided,
    )
    from shardkit.plan.suggest import changes, suggest_from

    beyond = check_seq_len(request)
    rows = [row(request, strategy) for strategy in possible_strategies(request)]
    notes: tuple[str, ...] = ()
    if how is not None:
        rows, notes = _refined(request, rows, how)
    suggested, reason = suggest_from(rows, request.device)
    chosen = configured_strategy(request.config)
    is_too_large = next(row for row in rows if row.strategy is chosen).fits is False
    changed = changes(request) if is_too_large else ()
    remarks = [missing_blocks(request.description.tree, request.config.fsdp), beyond, undivided(request)]
    return Answer(
        request=request,
        rows=tuple(rows),
        chosen=chosen,
        suggested=suggested if request.world_size > 1 else None,
        reason=reason if request.world_size > 1 else "",
        changes=tuple(replace(change, fits=None) for change in changed) if how else changed,
        finding=_found(question, request, how) if question else None,
        notes=(
            *request.description.notes,
            *(remark for remark in remarks if remark),
            *notes_on(request.config),
            *notes,
        ),
    )


def _json(answer: "Answer", found: "Measured | None") -> str:
    import json
    from dataclasses import asdict

    from shardkit.plan.answer import to_json

    measured = {} if found is None else {"measured": asdict(found)}
    return json.dumps(to_json(answer) | measured, indent=2)
