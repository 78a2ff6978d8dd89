"""What one GPU says of shardkit: speed beside hand-written FSDP2 and accelerate, waits, memory, saving, and the plan.

    python -m benchmarks.gpu [--only steps] [--rounds 3] [--output gpu.json] [--table gpu.md] [--small] [--device cpu]

steps        seconds a step, tokens a second and MFU of a model of 1.2 billion parameters in bf16, eager and compiled
eight_bits   seconds a step in fp8 and mxfp8 beside bf16, where the device and torchao have them
waits        how often a step makes the host wait for the device; goal: no more often than by hand
largest      the most layers that train, with parameters on the device and in host memory
checkpoint   seconds to save and to load several GB, and what the loop waits for a save beside it
plan         planned and measured memory and step time of eight configurations

Each measurement is a process of its own, and contestants take turns. `--small` and `--device cpu` are for trying the
benchmark itself: their figures mean nothing.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import interleaved
from shardkit.plan.devices import DEVICES

GIB = 2**30
BILLION = {"layers": 22, "hidden": 2048, "heads": 16, "vocab": 32000, "seq": 2048, "batch": 4, "steps": 10}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "batch": 2, "steps": 2}
# What the project promises of the step: elapsed time of hand-written FSDP2.
STEP_GOAL = 1.02
# Of one measurement: the largest model that trains takes a minute or two, a process that hangs takes for ever.
LONGEST_S = 400
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "Cannot allocate memory")
# Of the plan: what stands in `shardkit plan --set` and in the order of the run that is measured.
PLANNED: list[dict[str, Any]] = [
    {"strategy": 1},
    {"strategy": 2},
    {"strategy": 3},
    {"strategy": 1, "precision": "no", "batch": 1},
    {"strategy": 1, "checkpointing": True},
    {"strategy": 1, "checkpointing": True, "batch": 16},
    {"strategy": 1, "layers": 11, "batch": 8},
    {"strategy": 1, "optimizer": "SGD"},
    {"strategy": 1, "seq": 8192, "batch": 1, "checkpointing": True},
]


class Failed(Exception):
    """A measurement that did not end; what its process said last."""


def main() -> None:
    """Measure what is asked for, print it, write JSON and a table."""
    options = _options()
    result: dict[str, Any] = {**interleaved.surroundings(), "device": options.device}
    for name in options.only or SECTIONS:
        print(f"{name.upper()}", flush=True)
        try:
            result[name] = SECTIONS[name](options)
        except Failed as error:  # the other sections may still be measured
            result[name] = {"failed": str(error)}
        for line in _lines(name, result[name]):
            print(f"  {line}", flush=True)
        if options.output:
            interleaved.write(options.output, result)
    if options.table:
        done = [(name, line) for name in SECTIONS if name in result for line in _lines(name, result[name])]
        text = "\n".join(f"| {name} | {line} |" for name, line in done)
        options.table.write_text(f"| measured | result |\n|---|---|\n{text}\n")
    if any("failed" in result[name] for name in SECTIONS if name in result):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="repeatable; by default all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", type=Path)
    return parser.parse_args()


# ---- one measurement ----


def measured(options: argparse.Namespace, task: str, contestant: str, **changes: Any) -> dict[str, Any]:
    """The result of one process. Failed, with its last lines, where it does not end well."""
    shape = SMALL if options.small else BILLION
    order = {"task": task, "contestant": contestant, "device": options.device, **shape, **changes}
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder, "order.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(order))
        command = [sys.executable, "-m", "benchmarks.gpu_rank", str(asked), str(answer)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"no result after {LONGEST_S} s") from None
        if not answer.exists():
            killed = "SIGKILL " if done.returncode == -signal.SIGKILL else ""
            raise Failed(f"{killed}{done.stderr.strip()[-2000:]} (exit code {done.returncode})")
        return json.loads(answer.read_text())


def contestants(options: argparse.Namespace) -> Iterator[str]:
    """Who takes part; accelerate has no FSDP on a CPU."""
    yield from ("shardkit", "by hand")
    if options.device == "cuda" and "accelerate" in interleaved.surroundings()["versions"]:
        yield "accelerate"


# ---- sections ----


def steps(options: argparse.Namespace) -> dict[str, Any]:
    """Eager and compiled steps, by turns."""
    return {mode: _steps(options, compiled=mode == "compiled") for mode in ("eager", "compiled")}


def _steps(options: argparse.Namespace, compiled: bool) -> dict[str, Any]:
    last: dict[str, dict[str, Any]] = {}

    def once(name: str) -> float:
        last[name] = measured(options, "steps", name, compiled=compiled)
        return float(last[name]["step_s"])

    names = list(contestants(options))
    wall_s = interleaved.measure({name: partial(once, name) for name in names}, options.rounds)
    found = interleaved.summary(wall_s, [interleaved.ratio(wall_s, "shardkit", other) for other in names[1:]])
    speeds = {name: _speed(last[name], statistics.median(wall_s[name])) for name in names}
    return {**found, "goal": STEP_GOAL, "speed": speeds}


def _speed(result: dict[str, Any], step_s: float) -> dict[str, Any]:
    """Tokens a second, and the part of the device's peak in bf16 (6 operations a parameter and token, and attention's
    12 x layers x hidden x sequence: Chowdhery et al. 2022, appendix B)."""
    order = result["order"]
    tokens_a_s = order["batch"] * order["seq"] / step_s
    operations = 6 * result["parameters"] + 12 * order["layers"] * order["hidden"] * order["seq"]
    peak = _peak(result.get("device_name", ""))
    return {"tokens_a_s": tokens_a_s, "mfu": tokens_a_s * operations / peak if peak else None}


def _peak(name: str) -> float | None:
    """The device's peak in bf16, where the plan's table has it."""
    for device in DEVICES.values():
        if device.name.split()[0] in name.replace("-", " ").split():
            return device.flops.get("bf16")
    return None


def eight_bits(options: argparse.Namespace) -> dict[str, Any]:
    """Compiled steps in fp8 and mxfp8 beside bf16; of what the device or torchao lacks the reason."""
    found: dict[str, Any] = {}
    for precision in ("bf16", "fp8", "mxfp8"):
        try:
            result = measured(options, "steps", "shardkit", precision=precision, compiled=not options.small)
            found[precision] = _speed(result, result["step_s"]) | {"step_s": result["step_s"]}
        except Failed as error:
            found[precision] = {"reason": str(error).strip().splitlines()[-1]}
    return found


def waits(options: argparse.Namespace) -> dict[str, Any]:
    """Waits a step, of shardkit and by hand."""
    return {name: measured(options, "waits", name)["waits"] for name in ("shardkit", "by hand")}


def largest(options: argparse.Namespace) -> dict[str, Any]:
    """The most layers that train one step, found by doubling and halving."""
    return {
        name: _most_layers(options, offloaded=offloaded, most=8 if options.small else _fit_the_host())
        for name, offloaded in (("on the device", False), ("in host memory", True))
    }


def _fit_the_host() -> int:
    """As many layers as host memory holds with room to spare: a process that takes more may end the whole machine.
    12 x hidden^2 parameters a layer, 16 bytes each: fp32 with gradients and Adam's state."""
    bytes_of_layer = 16 * 12 * BILLION["hidden"] ** 2
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(1024, int(0.7 * available / bytes_of_layer)))


def _most_layers(options: argparse.Namespace, offloaded: bool, most: int) -> dict[str, Any]:
    def trains(layers: int) -> dict[str, Any] | None:
        try:
            return measured(
                options, "steps", "shardkit", layers=layers, steps=1, batch=1, offloaded=offloaded, checkpointing=True
            )
        except Failed as error:
            if any(text in str(error) for text in OUT_OF_MEMORY) or "SIGKILL" in str(error):
                return None
            raise

    best, low, high = None, 0, 0
    layers = 2 if options.small else 64
    while layers <= most and (found := trains(layers)) is not None:
        best, low, layers = found, layers, layers * 2
    high = min(layers, most + 1)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        found = trains(middle)
        best, low, high = (found, middle, high) if found is not None else (best, low, middle)
    return {"layers": low, "parameters": best["parameters"] if best else 0, "is_limit": high <= most}


def checkpoint(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of saving and loading."""
    return measured(options, "checkpoint", "shardkit")


def plan(options: argparse.Namespace) -> dict[str, Any]:
    """Planned beside measured, a row for each configuration."""
    rows = []
    for changes in PLANNED:
        if options.small:
            changes = {name: value for name, value in changes.items() if name not in ("layers", "seq", "batch")}
        found = measured(options, "steps", "shardkit", **changes)
        rows.append({"changes": changes, **_planned(options, found["order"]), **_took(found)})
    return {"rows": rows}


def _took(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found.get(name) for name in ("allocated_bytes", "reserved_bytes", "step_s")}


def _planned(options: argparse.Namespace, order: dict[str, Any]) -> dict[str, Any]:
    """What `shardkit plan --simulate` says of the run."""
    model = f"gpt:layers={order['layers']},hidden={order['hidden']},heads={order['heads']},vocab={order['vocab']}"
    settings = {
        "mixed_precision": order["precision"],
        "fsdp_config.fsdp_activation_checkpointing": str(order["checkpointing"]).lower(),
    }
    command = [sys.executable, "-m", "shardkit", "plan", "--model", f"{model},seq={order['seq']}", "--world", "1"]
    command += ["--batch-size", str(order["batch"]), "--optimizer", order["optimizer"].lower(), "--simulate", "--json"]
    command += ["--strategy", str(order["strategy"]), "--device", "cpu" if options.device == "cpu" else "h100-80"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):  # 1: it does not fit
        raise Failed(done.stderr[-2000:] + done.stdout[-2000:])
    rows = json.loads(done.stdout)["strategies"]
    (row,) = [one for one in rows if one["number"] == order["strategy"]]
    return {"planned_bytes": row["peak_bytes"]}


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "steps": steps,
    "eight_bits": eight_bits,
    "waits": waits,
    "largest": largest,
    "checkpoint": checkpoint,
    "plan": plan,
}


# ---- words ----


def _lines(name: str, found: dict[str, Any]) -> Iterator[str]:
    if "failed" in found:
        yield f"failed: {found['failed'].strip().splitlines()[-1]}"
        return
    yield from WORDS[name](found)


def _words_of_steps(found: dict[str, Any]) -> Iterator[str]:
    for mode, one in found.items():
        for name, speed in one["speed"].items():
            mfu = "" if speed["mfu"] is None else f", {100 * speed['mfu']:.1f} % of the peak"
            step_ms = 1000 * one["spread"][name]["median"]
            yield f"{mode}, {name}: {step_ms:.1f} ms a step, {speed['tokens_a_s']:,.0f} tokens/s{mfu}"
        for ratio in one["ratios"]:
            bounds = f"{ratio['low']:.3f} to {ratio['high']:.3f}; goal {one['goal']} of by hand"
            yield f"{mode}, shardkit / {ratio['theirs']}: {ratio['median']:.3f} ({bounds})"


def _words_of_eight_bits(found: dict[str, Any]) -> Iterator[str]:
    base = found["bf16"].get("step_s")
    for precision, one in found.items():
        if "reason" in one:
            yield f"{precision}: not measured ({one['reason']})"
            continue
        ratio = f", {base / one['step_s']:.2f} x bf16" if base else ""
        yield f"{precision}: {1000 * one['step_s']:.1f} ms a step, {one['tokens_a_s']:,.0f} tokens/s{ratio}"


def _words_of_waits(found: dict[str, Any]) -> Iterator[str]:
    ours, theirs = found["shardkit"], found["by hand"]
    for kind in ours:
        yield f"{kind}: {ours[kind]:.2f} a step, by hand {theirs[kind]:.2f}"
    more = [kind for kind in ours if ours[kind] > theirs[kind]]
    yield f"more often than by hand: {', '.join(more)}" if more else "within the goal: no more often than by hand"


def _words_of_largest(found: dict[str, Any]) -> Iterator[str]:
    for place, one in found.items():
        limit = "" if one["is_limit"] else " and more"
        yield f"{place}: {one['parameters'] / 1e9:.2f} billion parameters ({one['layers']} layers){limit}"


def _words_of_checkpoint(found: dict[str, Any]) -> Iterator[str]:
    size = found["bytes"] / GIB
    yield f"save: {found['save_s']:.2f} s for {size:.1f} GiB, load {found['load_s']:.2f} s"
    yield f"beside training: the loop waits {found['async_wait_s']:.2f} s; a step then: {found['step_beside_s']:.2f} s"


def _words_of_plan(found: dict[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        what = ", ".join(f"{name} {value}" for name, value in row["changes"].items())
        planned = f"planned {row['planned_bytes'] / GIB:.2f} GiB"
        if row["allocated_bytes"] is None:
            yield f"{what}: {planned}, {1000 * row['step_s']:.1f} ms a step"
            continue
        taken, reserved = row["allocated_bytes"], row["reserved_bytes"]
        ratio = row["planned_bytes"] / taken
        yield f"{what}: {planned}, allocated {taken / GIB:.2f} ({ratio:.3f}), reserved {reserved / GIB:.2f} GiB"


WORDS: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "steps": _words_of_steps,
    "eight_bits": _words_of_eight_bits,
    "waits": _words_of_waits,
    "largest": _words_of_largest,
    "checkpoint": _words_of_checkpoint,
    "plan": _words_of_plan,
}

if __name__ == "__main__":
    main()
