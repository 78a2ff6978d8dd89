"""Time and price of a whole run of so many tokens, from the estimated time of a step (`roofline.py`).

Evaluation, saves, waits for data, and what is lost at a failure are not counted.
"""

from dataclasses import dataclass

from shardkit.digits import UNITS, count_in, decimal_in
from shardkit.errors import UsageError
from shardkit.plan.roofline import StepTime
from shardkit.problems import Problems
from shardkit.wording import count_text, counted

_UNITS = {**UNITS, "t": 10**12}
_MOST_TOKENS = 10**16  # a slip: no corpus has as many
_TIMES = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


@dataclass(frozen=True)
class WholeRun:
    """What is asked for: tokens over all ranks; the price of one device for an hour, in any currency, if known."""

    tokens: int
    price: float | None = None


@dataclass(frozen=True)
class RunEstimate:
    """Seconds, device-hours and, if the price is known, the price of a run, each from fastest to slowest."""

    steps: int
    step_tokens: int
    seconds: tuple[float, float]
    device_hours: tuple[float, float]
    price: tuple[float, float] | None


def asked(tokens: str | None, price: str | None) -> WholeRun | None:
    """From --tokens and --price; None where neither is given. UsageError, with all problems."""
    if tokens is None and price is None:
        return None
    problems = Problems()
    number = problems.of(_tokens_in, tokens)
    of_device_hour = None if price is None else problems.of(_price_in, price)
    problems.raise_all()
    assert number is not None
    return WholeRun(number, of_device_hour)


def _tokens_in(text: str | None) -> int:
    number = None if text is None else count_in(text, _UNITS)
    if number is None or not 1 <= number <= _MOST_TOKENS:
        got = "no --tokens, but a --price" if text is None else repr(text)
        raise UsageError(f"--tokens: is not the number of tokens of a run (got {got}); write 300B or 15T.")
    return number


def _price_in(text: str) -> float:
    price = decimal_in(text)
    if price is None or not 0 < price <= 1e6:
        raise UsageError(f"--price: is not the price of one device for an hour (got {text!r}); write 2.50.")
    return price


def run_estimate(run: WholeRun, time: StepTime, world_size: int) -> RunEstimate:
    """What the run takes on so many ranks, each of which has a device of its own."""
    step_tokens = time.tokens * world_size
    steps = -(-run.tokens // step_tokens)
    seconds = steps * time.fastest_s, steps * time.slowest_s
    hours = seconds[0] * world_size / 3600, seconds[1] * world_size / 3600
    price = None if run.price is None else (hours[0] * run.price, hours[1] * run.price)
    return RunEstimate(steps, step_tokens, seconds, hours, price)


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
    unit, seconds = next(one for one in _TIMES if slowest >= 2 * one[1] or one is _TIMES[-1])
    values = [found.device_hours, *([found.price] if found.price else [])]
    return [f"{_pair(fastest / seconds, slowest / seconds)} {unit}", *(_pair(*value) for value in values)]


def _pair(low: float, high: float) -> str:
    return f"{_rounded(low)} - {_rounded(high)}"


def _rounded(value: float) -> str:
    """Three digits: 0.12, 9.87, 551,000, 1.38 M; below 0.01 none."""
    if 0 < value < 0.01:
        return "<0.01"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.3g}" if rounded < 1000 else count_text(int(rounded))
