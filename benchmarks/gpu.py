"""What one GPU says of shardkit: its tests, speed beside hand-written FSDP2 and accelerate, waits, memory, the plan.

    python -m benchmarks.gpu [--only steps] [--minutes 19] [--rounds 3] [--output gpu.json] [--table gpu.md]
                             [--small] [--device cpu]

tests        the tests that need a GPU: tests/test_gpu.py
steps        seconds a step, tokens a second and MFU of a model of 1.2 billion parameters in bf16, eager and compiled
waits        how often a step makes the host wait for the device; goal: no more often than by hand
plan         planned and measured memory and step time of nine configurations
checkpoint   seconds to save and to load up to 6 GB, and what the loop waits for a save beside it
eight_bits   seconds a step in fp8 and mxfp8 of a wider model beside bf16, where the device and torchao have them
largest      the most layers that train, with parameters on the device and in host memory

Each measurement is a process of its own, and contestants take turns. Every section has its share of the minutes, and
those that end early leave theirs to the next; one that is cut short, or fails, keeps what it has, and the others go on.
The JSON is written after each measurement, and keeps the sections of an earlier run of the same versions on such a
device, so that `--only` measures in parts. `--small` and `--device cpu` are for trying the benchmark itself: their
figures mean nothing.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import gpu_words, interleaved
from benchmarks.gpu_measured import (
    BILLION,
    OVER,
    SMALL,
    Failed,
    Options,
    TimeIsUp,
    fitted,
    measured,
    order_of,
    run,
    running,
)
from benchmarks.gpu_rank import Order
from shardkit.config import hardware
from shardkit.launch.diagnosis import OUT_OF_MEMORY_SIGNS
from shardkit.plan import devices

# What the project promises of the step: elapsed time of hand-written FSDP2.
STEP_GOAL = 1.02
OUT_OF_MEMORY = (*OUT_OF_MEMORY_SIGNS, "OutOfMemoryError", "Cannot allocate memory", "SIGKILL")
# Processes of a test have contexts of the device, half a GiB each, and small models.
MEMORY_OF_A_TEST = 4 * 2**30
MOST_TESTS_AT_ONCE = 8
# Of the plan: what stands in `shardkit plan --set` and in the order of the run that is measured.
PLANNED: list[dict[str, Any]] = [
    {"strategy": 1},
    {"strategy": 2},
    {"strategy": 3},
    {"strategy": 1, "precision": "no", "batch": 1},
    {"strategy": 1, "checkpointing": True},
    {"strategy": 1, "checkpointing": True, "offloads_state": True},
    {"strategy": 1, "checkpointing": True, "batch": 16},
    {"strategy": 1, "layers": 11, "batch": 8},
    {"strategy": 1, "optimizer": "SGD"},
    {"strategy": 1, "seq": 8192, "batch": 1, "checkpointing": True},
]
# About as many parameters as the other model has. At its width the host takes longer for a step in fp8 than an H200.
WIDE = {"layers": 6, "hidden": 4096, "heads": 32}
# Where two are compared: of ten steps right after the first ones, the same process took 139 ms each, and 154.
LONGER = {"warm_up": 8, "steps": 20}
Found = Iterator[dict[str, Any]]


def main() -> None:
    """Measure what is asked for, print it, write JSON and a table."""
    options = _options()
    surroundings = {**interleaved.surroundings(), **described(options), "small": options.small}
    surroundings["model"] = {name: getattr(order_of(options, "", ""), name) for name in (*BILLION, "precision")}
    result: dict[str, Any] = {**surroundings, **_measured_before(options, surroundings)}
    names = options.only or list(SECTIONS)
    for name, until in zip(names, _ends(names, options.minutes), strict=True):
        print(f"{name.upper()}", flush=True)
        options.until = until
        for found in measured_section(name, options):
            result[name] = found
            _write(options, result)
        for line in gpu_words.lines(name, result[name]):
            print(f"  {line}", flush=True)
    if any("failed" in result[name] for name in names):
        sys.exit(1)


def _options() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(SECTIONS), default=[], help="repeatable")
    parser.add_argument("--device", default=Options.device)
    parser.add_argument("--rounds", type=int, default=Options.rounds)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--minutes", type=float, default=Options.minutes, help="for all sections together")
    parser.add_argument("--output", type=interleaved.writable)
    parser.add_argument("--table", type=interleaved.writable)
    return Options(**vars(parser.parse_args()))


def _ends(names: list[str], minutes: float) -> Iterator[float]:
    """When each section must have ended: they share the minutes by their weights."""
    began, weights = time.monotonic(), [SECTIONS[name][1] for name in names]
    for number in range(len(names)):
        yield began + 60 * minutes * sum(weights[: number + 1]) / sum(weights)


def described(options: Options) -> dict[str, Any]:
    """The device, its name and CUDA's version; its memory, and a precision that it has, into the options. Ends the
    program where torch cannot use it."""
    device = options.device
    code = f"import json, torch; torch.zeros(1, device={device!r}); module = torch.get_device_module({device!r}); "
    code += "name = getattr(module, 'get_device_name', lambda: None)(); "
    code += "memory = getattr(module, 'mem_get_info', lambda: [None])()[-1]; "
    code += "computes = getattr(module, 'is_bf16_supported', lambda **given: True)(including_emulation=False); "
    code += "print(json.dumps([name, torch.version.cuda, memory, 'bf16' if computes else 'no']))"
    done = run(options, [sys.executable, "-c", code])
    if done.returncode:
        sys.exit(
            f"benchmarks.gpu: torch cannot use the device {device} (got {gpu_words.last_line(done.stderr)}); run it "
            "where there is one, or try it with --small --device cpu."
        )
    name, cuda, options.memory_bytes, options.precision = json.loads(done.stdout.splitlines()[-1])
    return {"device": device, "device_name": name, "cuda": cuda}


def _measured_before(options: Options, surroundings: dict[str, Any]) -> dict[str, Any]:
    """The sections that an earlier run in the same surroundings has left in the output."""
    if options.output is None or not options.output.exists():
        return {}
    try:
        before = dict(json.loads(options.output.read_text()))
    except (ValueError, TypeError):
        sys.exit(
            f"benchmarks.gpu: {options.output} is not of this benchmark, or damaged; delete it, or name another file."
        )
    is_same = all(before.get(name) == surroundings[name] for name in surroundings.keys() - {"load"})
    return {name: before[name] for name in SECTIONS if is_same and name in before}


def measured_section(name: str, options: Options) -> Found:
    """What the section has found so far, after each measurement; at last why it failed or ended early, if it did."""
    found: dict[str, Any] = {}
    try:
        for found in SECTIONS[name][0](options):
            yield {**found, "ended_early": "the benchmark was stopped"}  # until there is more
        yield found
    except Failed as error:
        is_early = isinstance(error, TimeIsUp) and found
        yield {**found, "ended_early" if is_early else "failed": str(error)}
    except Exception:  # the other sections are measured all the same
        yield {**found, "failed": traceback.format_exc()}


def _write(options: Options, result: dict[str, Any]) -> None:
    try:
        if options.output:
            interleaved.write(options.output, result)
        if options.table:
            options.table.write_text(gpu_words.table(result))
    except OSError as error:  # such as a full disk: the next time there may be room
        print(f"benchmarks.gpu: {error.filename}: not written ({error.strerror})", file=sys.stderr)


# ---- sections ----


def contestants(options: Options) -> tuple[list[str], dict[str, str]]:
    """Who takes part, and why others do not."""
    if options.device != "cuda":
        return ["shardkit", "by hand"], {"accelerate": f"its FSDP is not measured on the device {options.device}"}
    if "accelerate" not in interleaved.surroundings()["versions"]:
        return ["shardkit", "by hand"], {"accelerate": "it is not installed"}
    return ["shardkit", "by hand", "accelerate"], {}


def tests(options: Options) -> Found:
    """The tests that need a GPU; none of them is to be skipped."""
    command = [sys.executable, "-m", "pytest", "--tb=short", "-p", "no:cacheprovider", "-p", "pytest_timeout"]
    # Warnings come from the packages and variables of this machine here: what shardkit does runs in other processes.
    command += ["-W", "default", "-m", "gpu", *_side_by_side(options)]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = Path(folder, "outcomes")
        try:
            command += ["-p", "benchmarks.gpu_outcomes", "--outcomes", str(outcomes), "tests/test_gpu.py"]
            done = run(options, command)
        except TimeIsUp:
            yield _counted(outcomes)
            raise Failed(OVER) from None
        found = _counted(outcomes)
    yield found
    if done.returncode != 0 or found["not_passed"]:
        raise Failed(f"{(done.stdout + done.stderr)[-20000:]}\npytest ended with exit code {done.returncode}")


def _side_by_side(options: Options) -> list[str]:
    """Options of pytest for as many tests at once as CPUs and the device's memory have room for."""
    found = hardware.detect()
    room = found.devices[0].memory_bytes // MEMORY_OF_A_TEST if found.devices and options.device != "cpu" else 1
    workers = min(MOST_TESTS_AT_ONCE, found.cores // 2, room)
    return ["-p", "xdist", "-n", str(workers)] if workers > 1 and find_spec("xdist") else []


def _counted(outcomes: Path) -> dict[str, Any]:
    """How many passed, which did not or were skipped, and why. The last line of a test counts."""
    lines = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
    last = {line["name"]: line for line in lines}
    return {
        "passed": sum(line["outcome"] == "passed" for line in last.values()),
        "not_passed": {name: line["reason"] for name, line in last.items() if line["outcome"] == "failed"},
        "skipped": {name: line["reason"] for name, line in last.items() if line["outcome"] == "skipped"},
    }


def steps(options: Options) -> Found:
    """Eager and compiled steps, by turns. One that fails is left out of the rounds to come."""
    taking_part, left_out = contestants(options)
    lengths = {} if options.small else LONGER
    names = [(mode, name) for mode in ("eager", "compiled") for name in taking_part]
    wall_s: dict[tuple[str, str], list[float]] = {one: [] for one in names}
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for _, mode_and_name in interleaved.turns([*map(" ".join, names)], options.rounds):
        mode, _, name = mode_and_name.partition(" ")
        if mode_and_name in left_out:
            continue
        try:
            last[mode, name] = measured(options, "steps", name, compiled=mode == "compiled", **lengths)
            wall_s[mode, name].append(float(last[mode, name]["step_s"]))
        except TimeIsUp:
            raise
        except Failed as error:
            left_out[mode_and_name] = str(error)
            wall_s[mode, name].clear()
        yield {**{mode: _compared(mode, wall_s, last) for mode in ("eager", "compiled")}, "left_out": left_out}
    if any("shardkit" in name for name in left_out):
        raise Failed("shardkit did not train")


def _compared(mode: str, wall_s: dict[tuple[str, str], list[float]], last: dict[Any, Any]) -> dict[str, Any]:
    """Of one mode: spreads, speeds, and ratios over the rounds that both have done."""
    own = {name: values for (its_mode, name), values in wall_s.items() if its_mode == mode and values}
    ratios = []
    for other in own if "shardkit" in own else ():
        both = min(len(own["shardkit"]), len(own[other]))
        if other != "shardkit":
            ratios.append(interleaved.ratio({name: own[name][:both] for name in own}, "shardkit", other))
    speeds = {name: _speed(last[mode, name], statistics.median(values)) for name, values in own.items()}
    return {**interleaved.summary(own, ratios), "goal": STEP_GOAL, "speed": speeds}


def _speed(result: dict[str, Any], step_s: float) -> dict[str, Any]:
    """Tokens a second, and the part of the device's peak in bf16, or fp32 (6 operations a parameter and token, and
    attention's 12 x layers x hidden x sequence: Chowdhery et al. 2022, appendix B)."""
    order = result["order"]
    tokens_a_s = order["batch"] * order["seq"] / step_s
    operations = 6 * result["parameters"] + 12 * order["layers"] * order["hidden"] * order["seq"]
    dtype = "fp32" if order["precision"] == "no" else "bf16"
    peak = devices.of_hardware(result.get("device_name", ""), None).flops.get(dtype)
    return {"tokens_a_s": tokens_a_s, "mfu": tokens_a_s * operations / peak if peak else None}


def waits(options: Options) -> Found:
    """Waits a step, of shardkit and by hand."""
    found: dict[str, Any] = {}
    for name in ("shardkit", "by hand"):
        found[name] = measured(options, "waits", name)["waits"]
        yield found


def plan(options: Options) -> Found:
    """Planned beside measured, a row for each configuration."""
    rows: list[dict[str, Any]] = []
    for changes in PLANNED:
        if options.small:
            changes = {name: value for name, value in changes.items() if name not in ("layers", "seq", "batch")}
        changes = fitted(options, changes)
        rows.append({"changes": changes, **_planned_and_measured(options, changes)})
        yield {"rows": rows}


def _planned_and_measured(options: Options, changes: dict[str, Any]) -> dict[str, Any]:
    """A row. The plan is simulated beside the measurement: it takes a CPU as long as its process needs."""
    order = order_of(options, "steps", "shardkit", **changes)
    try:
        with running(options, _plan_command(options, order)) as planned:
            found = measured(options, "steps", "shardkit", **changes)
            taken = {name: found.get(name) for name in ("allocated_bytes", "reserved_bytes", "step_s")}
            return {**_planned(order, planned()), **taken}
    except TimeIsUp:
        raise
    except Failed as error:
        return {"failed": str(error)}


def _plan_command(options: Options, order: Order) -> list[str]:
    """`shardkit plan --simulate` of the run, on this machine's device."""
    model = f"gpt:layers={order.layers},hidden={order.hidden},heads={order.heads},vocab={order.vocab},seq={order.seq}"
    settings = {
        "mixed_precision": order.precision,
        "use_cpu": str(options.device == "cpu").lower(),
        "fsdp_config.fsdp_activation_checkpointing": str(order.checkpointing).lower(),
        "shardkit.offload_optimizer": str(order.offloads_state).lower(),
    }
    command = [sys.executable, "-m", "shardkit", "plan", "--model", model, "--world", "1", "--simulate", "--json"]
    command += ["--batch-size", str(order.batch), "--optimizer", order.optimizer.lower()]
    command += ["--strategy", str(order.strategy)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    return command


def _planned(order: Order, done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """What the command has said of the order's strategy."""
    if done.returncode not in (0, 1):  # 1: it does not fit
        raise Failed(done.stderr[-2000:] + done.stdout[-2000:])
    rows = json.loads(done.stdout)["strategies"]
    (row,) = [one for one in rows if one["number"] == order.strategy]
    seconds = row["step_time_estimate"]
    return {
        "planned_bytes": row["peak_bytes"],
        "planned_reserved_bytes": row["reserved_bytes"],
        "planned_s": seconds and [seconds["fastest_s"], seconds["slowest_s"]],
    }


def checkpoint(options: Options) -> Found:
    """Seconds of saving and loading, of as many layers as the folder for temporary files holds twice, at most 6 GB: two
    saves end in the section's share of the minutes also on a disk that writes 200 MB a second."""
    room = int(0.35 * shutil.disk_usage(tempfile.gettempdir()).free) - _bytes_around_layers(12)
    layers = room // _bytes_of_layer(12)
    most = SMALL["layers"] if options.small else 8
    yield measured(options, "checkpoint", "shardkit", layers=max(1, min(most, layers)))


def eight_bits(options: Options) -> Found:
    """Compiled steps in fp8 and mxfp8, and beside them bf16 and torchao's fp8 by hand; of what the device or torchao
    lacks the reason."""
    found: dict[str, Any] = {}
    way: dict[str, Any] = {} if options.small else {"compiled": True, **fitted(options, WIDE)}
    for precision, contestant in (("fp8", "shardkit"), ("mxfp8", "shardkit"), ("bf16", "shardkit"), ("fp8", "by hand")):
        name = precision if contestant == "shardkit" else f"{precision} {contestant}"
        if name not in ("fp8", "mxfp8") and not any("step_s" in one for one in found.values()):
            return
        try:
            result = measured(options, "steps", contestant, precision=precision, **way)
            found[name] = _speed(result, result["step_s"]) | {"step_s": result["step_s"]}
        except TimeIsUp:
            raise
        except Failed as error:
            found[name] = {"reason": gpu_words.last_line(str(error))}
        yield found


def largest(options: Options) -> Found:
    """The most layers that train two steps."""
    found: dict[str, Any] = {}
    for name, offloaded in (("on the device", False), ("in host memory", True)):
        for found[name] in _most_layers(options, offloaded, *_layers_that_may_fit(options, offloaded)):
            yield found


def _layers_that_may_fit(options: Options, offloaded: bool) -> tuple[int, int]:
    """Where to begin, and the most to try: more than the host holds would end the whole machine."""
    if options.small:
        return 2, 3
    found = hardware.detect()
    # The second is the limit of a container, too, which the system's free memory does not show.
    available = min(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), found.memory_bytes or 2**63)
    on_host = max(1, int(0.7 * available) // _bytes_of_layer(16))
    if offloaded:
        return min(on_host, 512), min(on_host, 512)
    return max(1, int(0.9 * found.devices[0].memory_bytes if found.devices else 0) // _bytes_of_layer(16)), 1024


def _bytes_of_layer(bytes_of_parameter: int) -> int:
    """12 x hidden^2 parameters a layer; 16 bytes each in training (fp32, gradients, Adam's state), 12 on disk."""
    return bytes_of_parameter * 12 * BILLION["hidden"] ** 2


def _bytes_around_layers(bytes_of_parameter: int) -> int:
    """The same of what is not in a layer: embeddings of tokens and positions, and the head."""
    return bytes_of_parameter * BILLION["hidden"] * (2 * BILLION["vocab"] + BILLION["seq"])


def _most_layers(options: Options, offloaded: bool, start: int, most: int) -> Found:
    """From the start upwards while it trains, or downwards until it does, by eighths of the start."""

    def trains(layers: int) -> dict[str, Any] | None:
        way = {"offloaded": offloaded, "checkpointing": True, "filled": True}
        try:
            return measured(options, "steps", "shardkit", layers=layers, steps=1, warm_up=1, batch=1, **way)
        except Failed as error:
            if any(text in str(error) for text in OUT_OF_MEMORY):
                return None
            raise

    layers, step, best, is_limit = start, max(1, start // 8), trains(start), False
    upwards = best is not None
    if best is not None:
        yield {"layers": start, "parameters": best["parameters"], "is_limit": False}
    while not is_limit and 0 < (layers := layers + (step if upwards else -step)) <= most:
        found = trains(layers)
        is_limit = (found is not None) != upwards
        best = found or best
        if best is not None:
            yield {"layers": best["order"]["layers"], "parameters": best["parameters"], "is_limit": is_limit}
    if best is None:
        raise Failed(f"not even {max(1, layers + step)} layers train")


def _end_what_was_started_with_it() -> None:
    """Where this process is told to end, or its terminal is gone, unless that is not to matter (nohup)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


# What is measured first matters most; a weight is a section's share of the time.
SECTIONS: dict[str, tuple[Callable[[Options], Found], float]] = {
    "tests": (tests, 6.0),
    "steps": (steps, 4.0),
    "waits": (waits, 1.0),
    "plan": (plan, 3.0),
    "checkpoint": (checkpoint, 1.5),
    "eight_bits": (eight_bits, 1.5),
    "largest": (largest, 2.0),
}

if __name__ == "__main__":
    _end_what_was_started_with_it()
    try:
        main()
    except KeyboardInterrupt:
        print("benchmarks.gpu: stopped; the output has what was measured.", file=sys.stderr)
        sys.exit(130)
