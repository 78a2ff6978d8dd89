"""Simulates a few of many equal blocks: which blocks to omit, and the whole step extrapolated from two short ones.

Each additional block in a run of equal blocks adds the same number of bytes to every moment, if moments are matched by
their distance from the nearer end of the run: "backward of the second block from the end" gathers, reduces and saves
the same as in a longer model, plus a constant per block in between. So a step with 4 blocks and one with 5 determine
every moment of a step with any number of blocks, and the peak among them, in any phase. Code may treat equal blocks
differently by their number, which no short step shows: `worker._is_computed_alike` compares forward of all blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardkit.digits import number_in
from shardkit.model.tree import ModuleNode
from shardkit.plan.rank_memory import CATEGORIES, Memory, Moment

KEPT, MORE = 4, 5  # the two blocks at each end differ from those between
_MOST_RUNS = 4


@dataclass(frozen=True)
class RepeatedBlocks:
    """Equal blocks one after another: `length` children of the module `container`, from index `start` on. A shortened
    model has the first two of them, and the last: `kept` in all."""

    container: str
    start: int
    length: int
    kept: int


def runs_of(tree: ModuleNode) -> list[RepeatedBlocks]:
    """Runs long enough to omit blocks; empty if there are none or too many."""
    shared = {p.tied_to for node in tree.walk() for p in node.parameters if p.tied_to}
    found: list[RepeatedBlocks] = []

    def visit(node: ModuleNode) -> None:
        mine = list(_runs_in(node, shared)) if node.is_container or node.class_name == "Sequential" else []
        found.extend(mine)
        inside = {index for run in mine for index in range(run.start, run.start + run.length)}
        for index, child in enumerate(node.children):
            if index not in inside:
                visit(child)

    visit(tree)
    return found if len(found) <= _MOST_RUNS else []


def _runs_in(node: ModuleNode, shared: set[str]) -> Iterator[RepeatedBlocks]:
    kinds = [_kind(child, shared) for child in node.children]
    start = 0
    for index in range(1, len(kinds) + 1):
        if index == len(kinds) or kinds[index] is None or kinds[index] != kinds[start]:
            length = index - start
            if length > MORE and kinds[start] is not None:
                yield RepeatedBlocks(node.fqn, start, length, length)
            start = index


def _kind(block: ModuleNode, shared: set[str]) -> Hashable:
    """Equal for equal blocks; None for modules that are no block or share a parameter with another module."""
    parts: list[Hashable] = []
    for node in block.walk():
        name = node.fqn[len(block.fqn) :]
        for parameter in node.parameters:
            if parameter.tied_to or f"{node.fqn}.{parameter.name}" in shared:
                return None
        parts.append((name, node.class_name, node.parameters, node.buffers))
    return tuple(parts) if block.children and block.numel else None


def shortened(runs: Sequence[RepeatedBlocks]) -> tuple[list[RepeatedBlocks], list[list[RepeatedBlocks]]]:
    """The runs with KEPT blocks in all, and for each of them those with MORE in that one."""
    short = [replace(run, kept=KEPT) for run in runs]
    longer = [[*short[:index], replace(run, kept=MORE), *short[index + 1 :]] for index, run in enumerate(short)]
    return short, longer


def shorten(model: Any, runs: Sequence[RepeatedBlocks]) -> None:
    """Keeps the `kept` blocks of each run in the torch model, in place; later indices shift down."""
    for run in sorted(runs, key=lambda run: -run.start):
        container = model.get_submodule(run.container)
        del container[run.start + 2 : run.start + 2 + run.length - run.kept]


def original_name(fqn: str, runs: Sequence[RepeatedBlocks]) -> tuple[str, int | None, int]:
    """(name in the whole model, number of its run, index of its block in the shortened run).

    A block is named after the block at the same distance from the nearer end.
    """
    for container in sorted({run.container for run in runs}, key=len, reverse=True):
        prefix = f"{container}." if container else ""
        head, dot, rest = fqn[len(prefix) :].partition(".")
        index = number_in(head)
        if fqn.startswith(prefix) and index is not None:
            moved = 0
            for number, run in enumerate(runs):
                if run.container != container:
                    continue
                local = index - (run.start - moved)
                if 0 <= local < run.kept:
                    there = local if local < 2 else run.length - run.kept + local
                    return f"{prefix}{run.start + there}{dot}{rest}", number, local
                if local >= run.kept:
                    moved += run.length - run.kept
            return f"{prefix}{index + moved}{dot}{rest}", None, 0
    return fqn, None, 0


def whole_step(
    runs: Sequence[RepeatedBlocks], short: Sequence[Moment], longer: Sequence[Sequence[Moment]]
) -> list[Moment] | None:
    """The moments of a step with all blocks. `short`: a step with KEPT blocks in every run; `longer[i]`: one with MORE
    in run i. None if their moments do not correspond."""
    fewest, more = shortened(runs)
    base = list(_keyed(short, fewest))
    growth: list[Mapping[Hashable, Memory]] = [
        {step.key: step.moment.memory for step in _keyed(moments, those)}
        for moments, those in zip(longer, more, strict=True)
    ]
    if any(step.key not in found for step in base for found in growth):
        return None
    whole = [_grown(step, runs, growth) for step in base]
    return list(_filled(whole, runs))


@dataclass(frozen=True)
class _Step:
    """A moment and its position: `key` is the same in steps with more or fewer blocks."""

    key: Hashable
    moment: Moment
    run: int | None
    index: int


def _keyed(moments: Sequence[Moment], runs: Sequence[RepeatedBlocks]) -> Iterator[_Step]:
    counts: Counter[Hashable] = Counter()
    for moment in moments:
        name, run, index = original_name(moment.unit, runs)
        is_between = run is not None and 2 <= index < runs[run].kept - 2
        key = (moment.phase, name, is_between and index)
        counts[key] += 1
        yield _Step((key, counts[key]), Moment(moment.phase, name, moment.memory), run, index)


def _grown(step: _Step, runs: Sequence[RepeatedBlocks], growth: Sequence[Mapping[Hashable, Memory]]) -> _Step:
    memory = step.moment.memory
    for run, found in zip(runs, growth, strict=True):
        memory = _add(memory, found[step.key], step.moment.memory, run.length - KEPT)
    return _Step(step.key, Moment(step.moment.phase, step.moment.unit, memory), step.run, step.index)


def _add(memory: Memory, more: Memory, less: Memory, times: int) -> Memory:
    def one(name: str) -> int:
        return max(0, getattr(memory, name) + (getattr(more, name) - getattr(less, name)) * times)

    return Memory(**{name: one(name) for name in CATEGORIES})


def _filled(steps: Sequence[_Step], runs: Sequence[RepeatedBlocks]) -> Iterator[Moment]:
    """All moments in order; those of omitted blocks are interpolated linearly."""
    position = 0
    while position < len(steps):
        step = steps[position]
        if step.run is None or step.index not in (1, 2):
            yield step.moment
            position += 1
            continue
        first = _group(steps, position)
        second = _group(steps, position + len(first))
        if len(second) == len(first) and second[0].run == step.run and second[0].index == 3 - step.index:
            yield from _between(first, second, runs[step.run])
            position += len(first) + len(second)
        else:
            yield from (one.moment for one in first)
            position += len(first)


def _group(steps: Sequence[_Step], position: int) -> list[_Step]:
    """The moments from `position` on of one block in one phase."""
    if position >= len(steps):
        return []
    first = steps[position]
    found = []
    for step in steps[position:]:
        if (step.run, step.index, step.moment.phase) != (first.run, first.index, first.moment.phase):
            break
        found.append(step)
    return found


def _between(first: Sequence[_Step], second: Sequence[_Step], run: RepeatedBlocks) -> Iterator[Moment]:
    """Moments of blocks 1 to length - 2, in the order of the two known groups."""
    last = run.length - 3
    forward = first[0].index == 1
    for number in range(last + 1):
        index = run.start + (1 + number if forward else run.length - 2 - number)
        for one, other in zip(first, second, strict=True):
            name = _renumbered(one.moment.unit, run, index)
            yield Moment(one.moment.phase, name, _mean(one.moment.memory, other.moment.memory, number, last))


def _renumbered(fqn: str, run: RepeatedBlocks, index: int) -> str:
    prefix = f"{run.container}." if run.container else ""
    _, dot, rest = fqn[len(prefix) :].partition(".")
    return f"{prefix}{index}{dot}{rest}"


def _mean(start: Memory, stop: Memory, number: int, last: int) -> Memory:
    def one(name: str) -> int:
        a, b = getattr(start, name), getattr(stop, name)
        return a + (b - a) * number // last

    return Memory(**{name: one(name) for name in CATEGORIES})
