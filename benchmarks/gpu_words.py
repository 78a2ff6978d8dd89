"""What `benchmarks.gpu` says of its results: lines for the terminal, and the table for the page."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardkit.sizes import GIB

ENDS = {"failed": "failed", "ended_early": "ended early"}
# A line that begins with the name of an exception, as the end of a traceback does, maybe after the number of its rank.
NAMES_AN_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]*(Error|Exception|Failed|Exit|Interrupt)\b")


def lines(name: str, found: dict[str, Any]) -> Iterator[str]:
    """A section's results in words; of one that was cut short what there is, and why it ended."""
    yield from WORDS[name](found)
    for how, words in ENDS.items():
        if how in found:
            yield f"{words}: {last_line(found[how])}"


def table(result: Mapping[str, Any]) -> str:
    """Markdown, a row for each line; the first is what it was measured on."""
    done = [("on", _surroundings(result))] if "device_name" in result else []
    done += [(name, line.replace("|", "/")) for name in WORDS if name in result for line in lines(name, result[name])]
    return "| measured | result |\n|---|---|\n" + "".join(f"| {name} | {line} |\n" for name, line in done)


def _surroundings(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    device = f"{result['device_name'] or result['device']}, {result['cores']} cores, CUDA {result['cuda']}"
    return f"{device}, {versions}; a GPT of {_model(result['model'])}"


def _model(of: Mapping[str, Any]) -> str:
    precision = "fp32" if of["precision"] == "no" else of["precision"]
    return f"{of['layers']} layers, width {of['hidden']:,}, {of['batch']} x {of['seq']:,} tokens, {precision}"


def last_line(text: str) -> str:
    """Of a report of an error the line that names it; else the last one. After it there may be advice, as torch.compile
    gives it, and warnings of libraries at the end of the process, as NCCL has of a group that was not destroyed."""
    lines = [line for line in text.splitlines() if line.strip()]
    return next(filter(NAMES_AN_ERROR.match, reversed(lines)), lines[-1] if lines else "no output")


def _of_tests(found: dict[str, Any]) -> Iterator[str]:
    if "passed" in found:
        yield f"{found['passed']} passed, {len(found['not_passed'])} failed, {len(found['skipped'])} skipped"
        yield from (f"failed: {name}: {_error_of(report)}" for name, report in found["not_passed"].items())
        yield from (f"skipped: {name}: {reason}" for name, reason in found["skipped"].items())


def _error_of(report: str) -> str:
    """The first line of pytest's report that tells the error, which begins with E; a loop may name many numbers."""
    told = (line[1:].strip() for line in report.splitlines() if line.startswith("E "))
    return next(told, last_line(report))[:300]


def _of_steps(found: dict[str, Any]) -> Iterator[str]:
    for mode in ("eager", "compiled"):
        one = found.get(mode, {"speed": {}, "ratios": []})
        for name, speed in one["speed"].items():
            mfu = "" if speed["mfu"] is None else f", {100 * speed['mfu']:.1f} % of the peak"
            step_ms = 1000 * one["spread"][name]["median"]
            yield f"{mode}, {name}: {step_ms:.1f} ms a step, {speed['tokens_a_s']:,.0f} tokens/s{mfu}"
        for ratio in one["ratios"]:
            bounds = f"{ratio['low']:.3f} to {ratio['high']:.3f}; goal {one['goal']} of by hand"
            yield f"{mode}, shardkit / {ratio['theirs']}: {ratio['median']:.3f} ({bounds})"
    for name, reason in found.get("left_out", {}).items():
        yield f"{name}: left out ({last_line(reason)})"


def _of_eight_bits(found: dict[str, Any]) -> Iterator[str]:
    base = found.get("bf16", {}).get("step_s")
    for precision, one in found.items():
        if precision in ENDS:
            continue
        if "reason" in one:
            yield f"{precision}: not measured ({one['reason']})"
            continue
        ratio = f", {base / one['step_s']:.2f} x bf16" if base else ""
        yield f"{precision}: {1000 * one['step_s']:.1f} ms a step, {one['tokens_a_s']:,.0f} tokens/s{ratio}"


def _of_waits(found: dict[str, Any]) -> Iterator[str]:
    if not {"shardkit", "by hand"} <= found.keys():
        return
    ours, theirs = found["shardkit"], found["by hand"]
    for kind in ours:
        yield f"{kind}: {ours[kind]:.2f} a step, by hand {theirs[kind]:.2f}"
    more = [kind for kind in ours if ours[kind] > theirs[kind]]
    yield f"more often than by hand: {', '.join(more)}" if more else "within the goal: no more often than by hand"


def _of_largest(found: dict[str, Any]) -> Iterator[str]:
    for place, one in found.items():
        if place not in ENDS:
            limit = "" if one["is_limit"] else " and more"
            yield f"{place}: {one['parameters'] / 1e9:.2f} billion parameters ({one['layers']} layers){limit}"


def _of_checkpoint(found: dict[str, Any]) -> Iterator[str]:
    if "bytes" in found:
        size = found["bytes"] / GIB
        yield f"save: {found['save_s']:.2f} s for {size:.1f} GiB, load {found['load_s']:.2f} s"
        step_s = found["step_beside_s"]
        yield f"beside training: the loop waits {found['async_wait_s']:.2f} s; a step then: {step_s:.2f} s"


def _of_plan(found: dict[str, Any]) -> Iterator[str]:
    for row in found.get("rows", []):
        what = ", ".join(f"{name} {value}" for name, value in row["changes"].items())
        if "failed" in row:
            yield f"{what}: not measured ({last_line(row['failed'])})"
            continue
        planned = f"planned {row['planned_bytes'] / GIB:.2f} GiB"
        if row["allocated_bytes"] is not None:
            ratio = row["planned_bytes"] / row["allocated_bytes"]
            planned += f", allocated {row['allocated_bytes'] / GIB:.2f} ({ratio:.3f})"
            replayed = row["planned_reserved_bytes"]
            planned += "" if replayed is None else f"; replayed {replayed / GIB:.2f} GiB"
            planned += f", reserved {row['reserved_bytes'] / GIB:.2f}"
        yield f"{what}: {planned}; {_of_time(row)}"


def _of_time(row: dict[str, Any]) -> str:
    measured = f"{1000 * row['step_s']:.1f} ms a step"
    if row["planned_s"] is None:
        return measured
    low, high = row["planned_s"]
    return f"{measured}, planned {1000 * low:.1f} to {1000 * high:.1f}"


WORDS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "tests": _of_tests,
    "steps": _of_steps,
    "waits": _of_waits,
    "plan": _of_plan,
    "checkpoint": _of_checkpoint,
    "eight_bits": _of_eight_bits,
    "largest": _of_largest,
}
