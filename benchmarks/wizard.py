"""Time to the first question: `shardkit config` and `accelerate config`, in turn, in one run.

    python -m benchmarks.wizard [--rounds 7] [--output wizard.json]

Each starts as a fresh process in a pseudo-terminal; the clock stops when its first question is on the screen. Warm
file caches: one round before is not counted.
"""

import argparse
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pexpect

from benchmarks import interleaved

COMMANDS = {
    "shardkit": ([sys.executable, "-m", "shardkit", "config"], "Model, for exact numbers"),
    "accelerate": ([sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"], "In which compute"),
}
# What the project promises, by the median of ratios within a round.
TARGET = 0.2


def main() -> None:
    """Measure, print a table, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    actions = {name: partial(first_question_s, *command) for name, command in COMMANDS.items()}
    for action in actions.values():  # once before: file caches
        action()
    times = interleaved.measure(actions, options.rounds)
    ratios = [interleaved.ratio(times, "shardkit", "accelerate")]
    print(f"{interleaved.table(times, ratios, 's')}\n  target: at most {TARGET}")
    if options.output:
        result = {**interleaved.surroundings(), **interleaved.summary(times, ratios), "target": TARGET}
        interleaved.write(options.output, result)


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


if __name__ == "__main__":
    main()
