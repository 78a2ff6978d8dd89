"""Answers a request: every strategy's row, the suggestion, changes if the configured one does not fit, and --find."""

from dataclasses import dataclass, replace
from functools import partial

from shardkit.errors import UsageError
from shardkit.model.cut import note_on_units
from shardkit.plan import search
from shardkit.plan.answer import (
    Answer,
    PlanRequest,
    Row,
    SearchResult,
    configured_strategy,
    possible_strategies,
    row,
)
from shardkit.plan.notes import (
    check_seq_len,
    frozen_above,
    frozen_in_fp32,
    note_on_shared_sequences,
    note_on_time,
    notes_on,
    outputs_in_16_bits,
    undivided,
)
from shardkit.plan.simulation import refine, simulated_row
from shardkit.plan.suggest import changes, suggest_from
from shardkit.spinner import waiting


@dataclass(frozen=True)
class SimulationOptions:
    """What to simulate: every strategy or the configured one, all layers or a few."""

    every_strategy: bool
    is_exact: bool


def answer(
    request: PlanRequest, question: search.Question | None = None, how: SimulationOptions | None = None
) -> Answer:
    """All possible strategies, the suggestion, and what to change if the configured one does not fit.

    `how`: simulate in addition to the closed form. The largest batch and the fewest ranks, where they are asked for and
    found, are what is planned. Raises UsageError, before anything is simulated, if the question or the simulation does
    not go with the request.
    """
    if how is not None:
        _check_simulation(request, question)
    if question is not None:
        search.check(question, request)
    beyond = check_seq_len(request)
    finding = _found(question, request, how) if question else None
    request = _as_found(request, finding)
    rows = [row(request, strategy) for strategy in possible_strategies(request)]
    notes: tuple[str, ...] = ()
    if how is not None:
        rows, notes = _refined(request, rows, how)
    suggested, reason = suggest_from(rows, request.rank_device)
    chosen = configured_strategy(request.config)
    peak = next(row for row in rows if row.strategy is chosen).memory.peak
    is_too_large = request.device.fits(peak.total) is False
    changed = changes(request) if is_too_large else ()
    remarks = [
        note_on_units(request.description.tree, request.config.fsdp),
        beyond,
        undivided(request),
        None if how else frozen_above(request),
        frozen_in_fp32(request),
        None if how else outputs_in_16_bits(request),
        note_on_time(request),
        note_on_shared_sequences(changed),
    ]
    return Answer(
        request=request,
        rows=tuple(rows),
        chosen=chosen,
        suggested=suggested if request.world_size > 1 else None,
        reason=reason if request.world_size > 1 else "",
        changes=tuple(replace(change, fits=None) for change in changed) if how else changed,
        finding=finding,
        notes=(
            *request.description.notes,
            *(remark for remark in remarks if remark),
            *notes_on(request),
            *notes,
        ),
    )


def _check_simulation(request: PlanRequest, question: search.Question | None) -> None:
    if request.is_on_tpu and request.config.downcast_bf16:
        raise UsageError("--simulate: downcast_bf16 is not simulated (got true); leave --simulate out.")
    if request.adapters and request.adapters.are_packed:
        raise UsageError("--load-in-4bit: bitsandbytes' kernels are not simulated (got both); leave --simulate out.")
    if request.own_batch is not None and request.description.facts is None:
        sizes = {"--batch-size": request.batch_size, "--seq-len": request.seq_len}
        if given := [flag for flag, size in sizes.items() if size is not None]:
            listed = " and ".join(given)
            raise UsageError(f"{listed}: the function of --batch gives the micro-batch (got both); leave {listed} out.")
    if question is search.Question.MAX_BATCH and request.own_batch is not None:
        raise UsageError(
            "--find max-batch: --batch fixes the batch size (got both); leave --batch out, or, for a model whose "
            "inputs only that function knows, plan for one size after the other without --find."
        )
    has_size = request.batch_size is not None or request.own_batch is not None
    if question not in (None, search.Question.MAX_BATCH) and not has_size:
        raise UsageError(
            f"--find {question.value}: needs the micro-batch size (got no --batch-size); add --batch-size."
        )


def _refined(request: PlanRequest, rows: list[Row], how: SimulationOptions) -> tuple[list[Row], tuple[str, ...]]:
    """The rows, the configured one (or all) with simulated memory, and notes about the simulation."""
    chosen = configured_strategy(request.config)
    strategies = [row.strategy for row in rows if how.every_strategy or row.strategy is chosen]
    with waiting(
        "simulating one training step" if len(strategies) == 1 else "simulating one training step per strategy"
    ):
        refined, notes = refine(request, tuple(rows), strategies, is_exact=how.is_exact)
    if request.own_optimizer:
        notes += (f"The closed form uses AdamW in place of {request.own_optimizer}.",)
    return list(refined), notes


def _as_found(request: PlanRequest, finding: SearchResult | None) -> PlanRequest:
    """The request with the largest batch (1 where not even that fits) or the fewest ranks that a search has found."""
    match finding:
        case SearchResult(question=search.Question.MAX_BATCH.value, value=int() | None as size):
            return replace(request, batch_size=size or 1)
        case SearchResult(question=search.Question.MIN_GPUS.value, value=int() as ranks):
            return request.with_world(ranks)
        case _:
            return request


def _found(question: search.Question, request: PlanRequest, how: SimulationOptions | None) -> SearchResult:
    """The answer to --find, by simulation if requested."""
    if how is None:
        return search.find(question, request)
    simulated = partial(simulated_row, is_exact=how.is_exact)
    with waiting("simulating training steps"):
        return search.find(question, request, simulated)
