"""What is told of ranks that hang, are slow or do not stop: a row for each, and which one the others wait for."""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardkit.launch.diagnosis import OF_UNLIKE_CALLS
from shardkit.launch.hangs import NOTICE_S, PATIENCE, Rank, Seen
from shardkit.wording import first_few, ranks_text


@dataclass(frozen=True)
class HangRow:
    """A rank's line in the table of a hang. The others wait for the rank of the smallest `order`: one that exited, one
    that is stopped, one that is not in a collective; among equals the one that is furthest behind."""

    rank: int
    text: str
    waits: bool
    order: tuple[bool, bool, int, float]
    at: str = ""
    """Its line in the script; "" if unknown."""

    def shifted(self, seconds: float) -> "HangRow":
        """With its time shifted by `seconds`."""
        *rest, since_s = self.order
        return replace(self, order=(*rest, since_s + seconds))  # type: ignore[arg-type]


def rows_of(ranks: Mapping[int, Rank], seen: Mapping[int, Seen], now: float) -> list[HangRow]:
    """One row per rank: step, phase, seconds since its last progress, and its current line in the script."""
    rows = []
    for number in sorted(ranks):
        rank, waits = ranks[number], _waits(seen, number)
        order = (rank.runs and not rank.stopped_since_s, waits, rank.progress.step, rank.progress.since_s)
        rows.append(HangRow(number, _row(number, rank, seen, now), waits, order, where(seen, number)))
    return rows


def render(rows: Iterable[HangRow], timeout_s: float, *logs: str) -> str:
    """The report on a hang: the table of all ranks, and the rank that the others wait for. `logs`: the log folders of
    all machines."""
    rows = sorted(rows, key=lambda row: row.rank)
    first = min(rows, key=lambda row: row.order).rank
    lines = [f"launch: HANG, no progress for {timeout_s:g} s", *(row.text for row in rows)]
    stacks = first_few([f"{folder}/rank*.stack" for folder in logs], 4)
    lines.append(f"  First to stop: rank {first}. The stacks of all ranks are in {stacks}.")
    lines += _on_unlike_calls(rows)
    return "\n".join(lines)


def _on_unlike_calls(rows: Sequence[HangRow]) -> list[str]:
    """Lines on the cause, where every rank waits for its peers."""
    if not all(row.waits for row in rows):
        return []
    lines = [
        "  Every rank waits for its peers: their collectives do not match, or the network is blocked.",
        "  Under FSDP all ranks must run the same units, as often: no loop over a layer, no generation may be",
        "  longer on one rank. With --set debug=true an error names the collectives that differ.",
    ]
    if len({row.at.rpartition("/")[2] for row in rows if row.at}) > 1:  # machines may have the script in other folders
        text = f"  They wait at different lines: {OF_UNLIKE_CALLS}."
        lines += textwrap.wrap(text, 110, subsequent_indent="  ")
    return lines


def notice_of_standstill(rows: Sequence[HangRow], timeout_s: float) -> str:
    """What is told of ranks that stand still, long before the run is ended."""
    lines = [f"launch: for {NOTICE_S:g} s no rank has made progress or used CPU time", *(row.text for row in rows)]
    lines += _on_unlike_calls(rows)
    limit = f"The run is ended after {timeout_s:g} s without progress (shardkit.launch.hang_timeout_s)"
    lines.append(f"  {limit}, also where a rank has said that it waits longer.")
    lines.append("  Wrap slow work in `with accelerator.pause():`.")
    return "\n".join(lines)


def text_of_no_stop(rows: Sequence[HangRow]) -> str:
    """What is told where ranks are ended that were told to stop, but cannot."""
    lines = ["launch: the ranks are ended: they wait for one another, so that none can save and stop"]
    return "\n".join([*lines, *(row.text for row in rows), *_on_unlike_calls(rows)])


def text_of_late_stop(rows: Sequence[HangRow], timeout_s: float) -> str:
    """What is told where ranks are ended that were told to stop, and have not within the time for it."""
    lines = [f"launch: the ranks are ended: {timeout_s:g} s to save and stop are over", *(row.text for row in rows)]
    return "\n".join(lines)


def _row(number: int, rank: Rank, seen: Mapping[int, Seen], now: float) -> str:
    if not rank.runs:
        return f"  rank {number}  exited with code {rank.exit_code or 0}"
    progress = rank.progress
    at = where(seen, number)
    text = f"  at {at}" if at else ""
    if rank.stopped_since_s:
        text = "  STOPPED (SIGSTOP)"
    elif _waits(seen, number):
        text += f", waiting for its {'peers' if seen[number].waits else 'device'}"
    if not rank.has_posted:
        return f"  rank {number}{text}"
    return f"  rank {number}  step {progress.step}  {progress.phase}  for {now - progress.since_s:.0f} s{text}"


def warning_of_slow(ranks: Mapping[int, Rank], seen: Mapping[int, Seen], timeout_s: float) -> str:
    """The warning about ranks that make no progress but are not ended."""
    has_posted = any(rank.has_posted for rank in ranks.values())
    limit = f"; the run is ended after {PATIENCE * timeout_s:g} s without progress" if has_posted else ""
    lines = [f"launch: no progress for {timeout_s:g} s, but {_who_may_work(ranks, seen)}. The run continues."]
    lines += [f"  {text}{limit}." for text in _who_waits(seen)]
    if has_posted:
        lines.append("  In long work call accelerator.progress() regularly, or wrap it in `with accelerator.pause():`.")
    return "\n".join(lines)


def _who_may_work(ranks: Mapping[int, Rank], seen: Mapping[int, Seen]) -> str:
    at_work = {number: where(seen, number) for number, one in sorted(seen.items()) if one.works and not one.may_wait}
    if at_work:
        return first_few((f"rank {number} is at work{f' at {at}' if at else ''}" for number, at in at_work.items()), 4)
    if len(seen) == len(ranks) and all(one.may_wait for one in seen.values()):
        return "ranks of another machine may be at work"
    return "no rank uses any CPU time"


def _who_waits(seen: Mapping[int, Seen]) -> Iterator[str]:
    """A sentence on the ranks that wait for their peers, and one on those that wait for their devices."""
    for_peers = [number for number, one in sorted(seen.items()) if one.waits]
    for_device = [number for number, one in sorted(seen.items()) if one.may_wait and not one.waits]
    if for_peers:
        waits = "waits for its peers" if len(for_peers) == 1 else "wait for their peers"
        yield f"{ranks_text(for_peers).capitalize()} {waits} in a collective"
    if for_device:
        waits = "waits for its device" if len(for_device) == 1 else "wait for their devices"
        yield f"{ranks_text(for_device).capitalize()} {waits}"


def where(seen: Mapping[int, Seen], number: int) -> str:
    """The rank's line in the script; "" if unknown."""
    stack = seen[number].stack if number in seen else None
    return stack.where if stack is not None else ""


def _waits(seen: Mapping[int, Seen], number: int) -> bool:
    return number in seen and seen[number].may_wait
