"""--find: the largest batch, the fewest GPUs, the strategy. Each asks the closed form again and again."""

from collections.abc import Callable
from dataclasses import replace

from shardkit.errors import ShardkitError, UsageError
from shardkit.plan.answer import Finding, Request, possible_strategies, row
from shardkit.plan.suggest import suggest_from

LARGEST_BATCH = 2**16
LARGEST_WORLD = 2**16


def find(question: str, request: Request) -> Finding:
    """The answer to max-batch, min-gpus or strategy. UsageError for any other question, or one without its facts."""
    questions: dict[str, Callable[[Request], Finding]] = {
        "max-batch": max_batch,
        "min-gpus": min_gpus,
        "strategy": strategy,
    }
    if question not in questions:
        raise UsageError(f"--find: unknown (got {question!r}); use one of {', '.join(questions)}.")
    if question != "strategy" and request.device.memory_bytes is None:
        raise UsageError(f"--find {question}: the device's memory is not known; add --memory, for example 64GiB.")
    return questions[question](request)


def max_batch(request: Request) -> Finding:
    """The largest micro-batch a rank that fits, for the configuration's strategy."""
    if row(replace(request, batch_size=1)).memory.activations_known is False:
        raise UsageError(
            "--find max-batch: the activations of this model are not known in closed form; "
            "use a Transformers config.json or gpt:..., add --seq-len, or use --simulate."
        )
    largest = _largest(lambda size: bool(row(replace(request, batch_size=size)).fits), LARGEST_BATCH)
    where = f"{request.config.fsdp.sharding_strategy.value} on {request.world_size} x {request.device.name}"
    if largest == 0:
        return Finding("max-batch", None, f"Not even one sequence a rank fits: {where}.")
    return Finding("max-batch", largest, f"Largest micro-batch: {largest} sequences a rank ({where}).")


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that fits, 0 for none; fitting must not come back after it has ended."""
    if not fits(1):
        return 0
    high = 1
    while high < limit and fits(high * 2):
        high *= 2
    low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def min_gpus(request: Request) -> Finding:
    """The fewest ranks on which the configuration's strategy fits; beyond one machine, whole machines only."""
    name = request.config.fsdp.sharding_strategy.value
    found = _fewest(lambda size: _fits_on(request, size), request.ranks_per_machine)
    if found is None:
        least = row(replace(request, world_size=LARGEST_WORLD)).memory.peak.total / 2**30
        text = f"{name} does not fit on any number up to {LARGEST_WORLD:,}: {least:,.1f} GiB a rank remain."
        return Finding("min-gpus", None, f"{text} Use smaller units, activation checkpointing or larger devices.")
    machines = -(-found // request.ranks_per_machine)
    plural = "s" if machines > 1 else ""
    return Finding("min-gpus", found, f"Fewest: {found} x {request.device.name} ({machines} machine{plural}), {name}.")


def _fits_on(request: Request, world_size: int) -> bool:
    try:
        return bool(row(replace(request, world_size=world_size)).fits)
    except ShardkitError:
        return False


def _fewest(fits: Callable[[int], bool], ranks_per_machine: int) -> int | None:
    """Every number on one machine, then whole machines by doubling and halving the gap."""
    for size in range(1, ranks_per_machine + 1):
        if fits(size):
            return size
    machines = 2
    while not fits(machines * ranks_per_machine):
        machines *= 2
        if machines * ranks_per_machine > LARGEST_WORLD:
            return None
    low = machines // 2
    while machines - low > 1:
        middle = (low + machines) // 2
        low, machines = (low, middle) if fits(middle * ranks_per_machine) else (middle, machines)
    return machines * ranks_per_machine


def strategy(request: Request) -> Finding:
    """The strategy that is suggested here."""
    rows = [row(request, each) for each in possible_strategies(request)]
    found, reason = suggest_from(rows, request.device)
    return Finding("strategy", found.value, f"Strategy: {found.number} {found.value} ({reason}).")
