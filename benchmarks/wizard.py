"""Time to the first question: `shardkit config` and `accelerate config`, in turn, in one run.

    python -m benchmarks.wizard [--repeats 7] [--output wizard.json]

Each starts as a fresh process in a pseudo-terminal; the clock stops when its first question is on the screen. Warm
file caches: one round before is not counted. The ratio of the medians is what is kept; the target is at most 0.2.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import pexpect

COMMANDS = {
    "shardkit": ([sys.executable, "-m", "shardkit", "config"], "Model, for exact numbers"),
    "accelerate": ([sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"], "In which compute"),
}
TARGET = 0.2


def main() -> None:
    """Measure, print a table, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    times = measure(options.repeats)
    result = summary(times)
    for name, values in times.items():
        print(f"{name:<11} {statistics.median(values):6.3f} s   ({min(values):.3f} to {max(values):.3f})")
    print(f"ratio       {result['ratio']:6.3f}     (target: at most {TARGET})")
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def measure(repeats: int) -> dict[str, list[float]]:
    """Seconds to the first question, for each command, in turn."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(repeats + 1):
        for name, (command, question) in COMMANDS.items():
            seconds = first_question_s(command, question)
            if turn:
                times[name].append(seconds)
    return times


def first_question_s(command: list[str], question: str) -> float:
    """Seconds from the start of the process to its first question. The process is ended then."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            **os.environ,
            "HOME": folder,
            "HF_HOME": folder,
            "XDG_STATE_HOME": folder,
            "TERM": "xterm-256color",
        }
        variables.pop("CI", None)
        start = time.perf_counter()
        child = pexpect.spawn(
            command[0], command[1:], cwd=folder, env=variables, timeout=120, dimensions=(24, 80), encoding="utf-8"
        )
        child.expect_exact(question)
        seconds = time.perf_counter() - start
        child.close(force=True)
    return seconds


def summary(times: dict[str, list[float]]) -> dict[str, object]:
    """What the JSON holds."""
    ratio = statistics.median(times["shardkit"]) / statistics.median(times["accelerate"])
    return {"unit": "s", "times": times, "ratio": round(ratio, 4), "target": TARGET}


if __name__ == "__main__":
    main()
