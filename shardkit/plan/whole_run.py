"""Time and price of a whole run of so many tokens, from the estimated time of a step (`roofline.py`).

Evaluation and waits for data are not counted; saves and failures stand beside it (`failures.py`).
"""

from dataclasses import dataclass

from shardkit.digits import UNITS, count_in, decimal_in
from shardkit.errors import UsageError
from shardkit.plan.failures import (
    RESTART_S,
    USUAL_DEVICE_HOURS,
    Failures,
    Saves,
    device_hours_in,
    failures,
)
from shardkit.plan.roofline import StepTime
from shardkit.problems import Problems
from shardkit.wording import count_text, counted

_UNITS = {**UNITS, "t": 10**12}
_MOST_TOKENS = 10**16  # a slip: no corpus has as many
_TIMES = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


@dataclass(frozen=True)
class WholeRun:
    """What is asked for: tokens over all ranks; the price of one device for an hour, in any currency, if known; hours
    of a device between two failures."""

    tokens: int
    price: float | None = None
    device_hours: float = USUAL_DEVICE_HOURS


@dataclass(frozen=True)
class RunEstimate:
    """Seconds, device-hours and, if the price is known, the price of a run, each from fastest to slowest."""

    steps: int
    step_tokens: int
    seconds: tuple[float, float]
    device_hours: tuple[float, float]
    price: tuple[float, float] | None
    failures: Failures | None = None
    """None where it is not known what a save writes."""


def asked(tokens: str | None, price: str | None, mtbf: str | None) -> WholeRun | None:
    """From --tokens, --price and --mtbf; None where none is given. UsageError, with all problems."""
    given = [flag for flag, text in (("--price", price), ("--mtbf", mtbf)) if text is not None]
    if tokens is None and not given:
        return None
    problems = Problems()
    number = problems.of(_tokens_in, tokens, given)
    of_device_hour = None if price is None else problems.of(_price_in, price)
    device_hours = problems.of(device_hours_in, mtbf)
    problems.raise_all()
    assert number is not None
    return WholeRun(number, of_device_hour, device_hours or USUAL_DEVICE_HOURS)


def _tokens_in(text: str | None, given: list[str]) -> int:
    number = None if text is None else count_in(text, _UNITS)
    if number is None or not 1 <= number <= _MOST_TOKENS:
        got = f"no --tokens, but {' and '.join(given)}" if text is None else repr(text)
        raise UsageError(f"--tokens: is not the number of tokens of a run (got {got}); write 300B or 15T.")
    return number


def _price_in(text: str) -> float:
    price = decimal_in(text)
    if price is None or not 0 < price <= 1e6:
        raise UsageError(f"--price: is not the price of one device for an hour (got {text!r}); write 2.50.")
    return price


def run_estimate(run: WholeRun, time: StepTime, world_size: int, save: Saves | None) -> RunEstimate:
    """What the run takes on so many ranks, each of which has a device of its own. `save`: what one takes, if known."""
    step_tokens = time.tokens * world_size
    steps = -(-run.tokens // step_tokens)
    seconds = steps * time.fastest_s, steps * time.slowest_s
    hours = seconds[0] * world_size / 3600, seconds[1] * world_size / 3600
    price = None if run.price is None else (hours[0] * run.price, hours[1] * run.price)
    lost = None if save is None else failures(seconds, world_size, run.device_hours, save)
    return RunEstimate(steps, step_tokens, seconds, hours, price, lost)


def title(run: WholeRun, found: RunEstimate) -> str:
    """What the estimate is of."""
    steps, tokens = counted(found.steps, "step"), counted(found.step_tokens, "token")
    return f"A run of {tokens_text(run)}, an estimate: {steps} of {tokens}"


def tokens_text(run: WholeRun) -> str:
    """`300 B tokens`, `1 token`."""
    return f"{count_text(run.tokens)} token{'' if run.tokens == 1 else 's'}"


def cells(found: RunEstimate) -> list[str]:
    """Time, device-hours and, if known, price, as text."""
    fastest, slowest = found.seconds
    unit, seconds = _unit_of(slowest)
    values = [found.device_hours, *([found.price] if found.price else [])]
    return [f"{_pair(fastest / seconds, slowest / seconds)} {unit}", *(_pair(*value) for value in values)]


def _unit_of(seconds: float) -> tuple[str, int]:
    return next(one for one in _TIMES if seconds >= 2 * one[1] or one is _TIMES[-1])


def failures_text(run: WholeRun, found: RunEstimate, lost: Failures) -> str:
    """How many failures to expect, how often to save, and what both cost."""
    source = " (as on 16,384 H100s; --mtbf)" if run.device_hours == USUAL_DEVICE_HOURS else ""
    low, high = (_rounded(number, 2) for number in lost.expected)
    expected = low if low == high else f"{low} - {high}"
    text = f"Failures: at one in {run.device_hours:,.0f} device-hours{source}, {expected} in this run"
    if lost.lost >= 1:
        return f"{text}, one every {span_text(lost.between_s)}: saves and restarts leave no time to train."
    if lost.save_every_s >= found.seconds[1]:
        return f"{text}: a save at the end is enough."
    hint = ""
    if lost.lost - lost.lost_in_background >= 0.005:
        hint = f" (shardkit.checkpoint.blocking: false: {lost.lost_in_background:.1%})"
    interval, stall = span_text(lost.save_every_s), span_text(lost.stall_s)
    return (
        f"{text}. Saving every {interval} then costs least: with {stall} a save, and {RESTART_S / 60:.0f} minutes a "
        f"restart, {lost.lost:.1%} of the time{hint}."
    )


def span_text(seconds: float) -> str:
    """Two digits: `4.1 minutes`."""
    unit, length = _unit_of(seconds)
    return f"{_rounded(seconds / length, 2)} {unit}"


def _pair(low: float, high: float) -> str:
    return f"{_rounded(low)} - {_rounded(high)}"


def _rounded(value: float, digits: int = 3) -> str:
    """Three digits: 0.12, 9.87, 551,000, 1.38 M; below 0.01 none."""
    if 0 < value < 0.01:
        return "<0.01"
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.3g}" if rounded < 1000 else count_text(int(rounded))
