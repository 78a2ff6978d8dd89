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
from collections.abc import Callable
from functools import partial

import pexpect

from benchmarks import interleaved
from shardkit.wizard.questions import QUESTIONS

COMMANDS = {
    "shardkit": ([sys.executable, "-m", "shardkit", "config"], QUESTIONS[0].title.partition("?")[0]),
    "accelerate": ([sys.executable, "-m", "accelerate.commands.accelerate_cli", "config"], "In which compute"),
}
# The longest that a command may take to its first question.
LIMIT_S = 60
# What the project promises, by the median of ratios within a round.
TARGET = 0.2


def main() -> None:
    """Measure, print a table, write JSON where it is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=interleaved.writable)
    options = parser.parse_args()
    actions = {name: partial(first_question_s, *command) for name, command in COMMANDS.items()}
    left_out = {name: reason for name, action in actions.items() if (reason := _problem(action))}
    if "shardkit" in left_out:
        raise SystemExit(f"wizard: shardkit: {left_out['shardkit']}")
    times = interleaved.measure({name: actions[name] for name in actions if name not in left_out}, options.rounds)
    ratios = interleaved.ratios(times, "shardkit")
    print(f"{interleaved.table(times, ratios, 's')}\n  target: at most {TARGET}")
    for name, reason in left_out.items():
        print(f"  {name}: left out; {reason}")
    if options.output:
        found = {**interleaved.summary(times, ratios), "target": TARGET, "left_out": left_out}
        interleaved.write(options.output, {**interleaved.surroundings(), **found})


def _problem(action: Callable[[], float]) -> str | None:
    """Why a command cannot be measured here; it has run once then, so that file caches are warm."""
    try:
        action()
    except NoQuestion as reason:
        return str(reason)
    return None


class NoQuestion(Exception):
    """What was on the screen instead."""


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
            command[0], command[1:], cwd=folder, env=variables, timeout=LIMIT_S, dimensions=(24, 80), encoding="utf-8"
        )
        try:
            child.expect_exact(question)
            return time.perf_counter() - start
        except (pexpect.EOF, pexpect.TIMEOUT):
            screen = str(child.before).strip()
            raise NoQuestion(f"its first question did not come (got {screen[-300:]!r})") from None
        finally:
            child.close(force=True)


if __name__ == "__main__":
    main()
