"""Memory of one rank by simulation: one training step with the runtime's own `parallelize` on fake tensors, for any
number of ranks. Only a child process loads torch.

Nothing is allocated or computed, so 175 billion parameters on 128 ranks take seconds on a laptop. Of many equal blocks
a few are simulated and the result is extrapolated (`repeats.py`), unless an exact simulation is requested.
"""

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardkit.config.schema import Config, ShardingStrategy
from shardkit.errors import ModelError, ShardkitError, UsageError
from shardkit.model import child
from shardkit.model.sources import kind_of
from shardkit.plan import repeats
from shardkit.plan.answer import PlanRequest, Row, fits, row
from shardkit.plan.closed_form import keeps_shards_on_host, offloaded
from shardkit.plan.rank_memory import Memory, Moment, RankMemory
from shardkit.plan.unit_sizes import layout

# Up to this many blocks, simulating all of them takes about as long as starting the child process. All are run then,
# and the allocator is replayed. The shortened step is for larger models and for searches.
WHOLE_BLOCKS = 40
TIMEOUT_S = 1800.0
CLOSED_FORM_HINT = "or leave --simulate out: the closed form runs no model code"


@dataclass(frozen=True)
class Job:
    """What the child process simulates, for each configuration. `kind`: what `spec` names (gpt, transformers, factory).
    `here`: the command's folder, in which batch and optimizer are found too. `adapters`: the fields of `Adapters`."""

    kind: str
    spec: str
    configs: list[dict[str, Any]]
    world_size: int
    ranks_per_machine: int
    optimizer: str
    batch: str | None
    batch_size: int
    seq_len: int | None
    is_exact: bool
    loss: str = "held"
    ema: str = "no"
    here: str = ""
    adapters: dict[str, Any] | None = None


@dataclass(frozen=True)
class Simulation:
    """One simulated step: memory, bytes of its collectives (as in `traffic.Collective`), and notes."""

    memory: RankMemory
    payload_bytes: dict[str, int]
    notes: tuple[str, ...]


def refine(
    request: PlanRequest,
    rows: tuple[Row, ...],
    strategies: list[ShardingStrategy],
    *,
    is_exact: bool,
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """The rows, with simulated memory for the given strategies, and notes about the simulation."""
    wanted = [each for each in rows if each.strategy in strategies]
    configs = [each.estimate.config for each in wanted]
    is_exact = is_exact or (request.device.has_caching_allocator and len(wanted) == 1 and _has_few_blocks(request))
    found = simulate(request, configs, is_exact=is_exact)
    by_strategy = dict(zip([each.strategy for each in wanted], found, strict=True))

    def refined(each: Row) -> Row:
        simulation = by_strategy.get(each.strategy)
        return each if simulation is None else _with_memory(each, request, simulation)

    notes = dict.fromkeys(note for simulation in found for note in simulation.notes)
    return tuple(refined(each) for each in rows), tuple(notes)


def _with_memory(each: Row, request: PlanRequest, found: Simulation) -> Row:
    return replace(each, simulated=found.memory, fits=fits(request.rank_device, found.memory))


def _has_few_blocks(request: PlanRequest) -> bool:
    return sum(run.length for run in repeats.runs_of(request.description.tree)) <= WHOLE_BLOCKS


def simulated_row(request: PlanRequest, *, is_exact: bool = False) -> Row:
    """The row of the configured strategy, with simulated memory."""
    own = row(request)
    (found,) = simulate(request, [own.estimate.config], is_exact=is_exact)
    return _with_memory(own, request, found)


def simulate(request: PlanRequest, configs: list[Config] | None = None, *, is_exact: bool = False) -> list[Simulation]:
    """One simulated step for each configuration (default: the request's), in one child process.

    Raises ModelError, with the line, if the model cannot run on fake tensors.
    """
    configs = [request.config] if configs is None else configs
    folder = request.folder or Path.cwd()
    job = Job(
        kind=_kind(request, folder),
        spec=request.description.spec,
        configs=[config.model_dump(mode="json") for config in configs],
        world_size=request.world_size,
        ranks_per_machine=request.ranks_of_a_machine,
        optimizer=request.own_optimizer or request.optimizer,
        batch=request.own_batch,
        batch_size=request.batch_size or 1,
        seq_len=request.sequence_tokens,
        is_exact=is_exact,
        loss=request.loss.value,
        ema=request.ema.value,
        here=str(Path.cwd()),
        adapters=asdict(request.adapters) if request.adapters else None,
    )
    steps = _in_child(job, folder)
    return [_simulation(request, config, step) for config, step in zip(configs, steps, strict=True)]


def _kind(request: PlanRequest, folder: Path) -> str:
    spec = request.description.spec
    kind = kind_of(spec, folder)
    if kind == "weights":
        raise UsageError(
            f"--simulate: weights alone cannot run (got {spec}); give the model as module:function or config.json, "
            f"{CLOSED_FORM_HINT}."
        )
    return kind or "factory"


def _in_child(job: Job, folder: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="shardkit-simulation-") as scratch:
        order, result = Path(scratch) / "job.json", Path(scratch) / "result.json"
        order.write_text(json.dumps(asdict(job)))
        # Without a visible GPU the simulation runs on the CPU on every machine.
        no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
        ended = child.run("shardkit.plan.worker", [str(order), str(result)], folder, TIMEOUT_S, no_gpu)
        if ended is None:
            raise ModelError(f"--simulate {job.spec}: did not finish within {TIMEOUT_S:g} s; {CLOSED_FORM_HINT}.")
        if not result.is_file():
            raise ModelError(f"--simulate {job.spec}: the simulation {ended.how}; report it, {CLOSED_FORM_HINT}.")
        answer = json.loads(result.read_text())
    if "refused" in answer:
        raise ShardkitError(answer["refused"])
    if "error" in answer:
        raise ModelError(_not_trained(job.spec, answer, folder))
    return answer["steps"]


def _not_trained(spec: str, answer: dict[str, Any], folder: Path) -> str:
    place, library = child.relative_place(answer["where"], folder), answer["in_library"]
    what, advice = f"cannot train on fake tensors ({answer['error']})", "change that line (fake tensors have no values)"
    if place is None and library is not None:
        what = f"cannot train on fake tensors ({library}: {answer['error']})"
        advice = f"take another version of {library.partition('/')[0]}, or another batch by --batch"
    return f"{place or f'--simulate {spec}'}: the model {spec} {what}; {advice}, {CLOSED_FORM_HINT}."


def _simulation(request: PlanRequest, config: Config, step: dict[str, Any]) -> Simulation:
    moments = tuple(Moment(phase, unit, Memory(*numbers)) for phase, unit, numbers in step["moments"])
    world = request.world_size, request.ranks_per_machine
    sizes = layout(request.description.tree, config, *world, request.optimizer, request.ema)
    timeline, host = offloaded(moments, sizes, config)
    if keeps_shards_on_host(config) and not sizes.in_step.made:
        timeline = tuple(moment for moment in timeline if moment.phase != "optimizer")  # it runs on the host
    host = replace(host, activations=step["host_bytes"])
    top = max(timeline, key=lambda moment: moment.memory.total)
    reserved = {} if host.parameters or host.optimizer_state else step["reserved"] or {}
    memory = RankMemory(
        top.memory,
        top.text,
        timeline,
        host,
        activations_known=True,
        reserved_bytes=reserved.get("segments"),
        expandable_bytes=reserved.get("expandable"),
    )
    return Simulation(memory, step["payload_bytes"], tuple(_notes(request, config, step["remarks"])))


def _notes(request: PlanRequest, config: Config, remarks: list[str]) -> list[str]:
    notes = ["Simulated: one steady training step on fake tensors, with torch's operators for the CPU.", *remarks]
    if request.batch_size is None and request.own_batch is None:
        notes.append("The simulated micro-batch is one sample; --batch-size changes it.")
    if config.shardkit.compile:
        notes.append("compile: not simulated; compiled units save fewer activations.")
    if config.mode == "ddp":
        notes.append("DDP's buckets are added by formula: its reducer does not run on fake tensors.")
    return notes
