"""What the comparisons here share: turns in a fair order, medians and quartiles, ratios with an interval, JSON, ports.

Contestants take turns in one run, so that a machine that slows down slows all of them. A ratio is the median of the
ratios within each round; its interval comes from drawing rounds again (bootstrap, percentiles 2.5 and 97.5).
"""

import argparse
import json
import os
import platform
import random
import socket
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

DRAWS = 2000
PACKAGES = ("shardkit", "torch", "accelerate", "lightning-fabric", "torchao")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Ratio:
    """How much one contestant needs of what another needs; below 1 is less."""

    ours: str
    theirs: str
    median: float
    low: float
    high: float


def turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name), each name once a round. Every other round goes backwards, and every second one begins with the
    next name, so that nobody always follows the same one. The same on all ranks."""
    for number in range(rounds):
        start = number // 2 % len(names)
        order = [*names[start:], *names[:start]]
        yield from ((number, name) for name in (reversed(order) if number % 2 else order))


def measure(actions: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each action says it took, in every round. The caller has warmed up."""
    measured: dict[str, list[float]] = {name: [] for name in actions}
    for _, name in turns(list(actions), rounds):
        measured[name].append(actions[name]())
    return measured


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def ratio(measured: Mapping[str, Sequence[float]], ours: str, theirs: str) -> Ratio:
    """Ours to theirs, round by round."""
    pairs = [mine / other for mine, other in zip(measured[ours], measured[theirs], strict=True)]
    drawn = random.Random(0)
    medians = sorted(statistics.median(drawn.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    low, high = medians[int(0.025 * DRAWS)], medians[int(0.975 * DRAWS) - 1]
    return Ratio(ours, theirs, statistics.median(pairs), low, high)


def ratios(measured: Mapping[str, Sequence[float]], ours: str) -> list[Ratio]:
    """Ours to everybody else's."""
    return [ratio(measured, ours, name) for name in measured if name != ours]


def surroundings() -> dict[str, Any]:
    """Where and with what: the machine, its load over the last minute before, versions."""
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def table(measured: Mapping[str, Sequence[float]], compared: Iterable[Ratio], unit: str = "ms") -> str:
    """Medians with their quartiles, then ratios with their intervals; `unit` is us, ms or s, of values in seconds."""
    factor = {"us": 1e6, "ms": 1000.0, "s": 1.0}[unit]
    lines = []
    for name, values in measured.items():
        own = spread(values)
        lines.append(
            f"  {name:<38}{own.median * factor:9.2f} {unit}   {_range(own.lower * factor, own.upper * factor)}"
        )
    for one in compared:
        lines.append(f"  {one.ours} / {one.theirs}: {one.median:.3f}   {_range(one.low, one.high, 3)}")
    return "\n".join(lines)


def _range(low: float, high: float, digits: int = 2) -> str:
    return f"({low:.{digits}f} to {high:.{digits}f})"


def summary(measured: Mapping[str, Sequence[float]], compared: Iterable[Ratio]) -> dict[str, Any]:
    """What the JSON holds of one comparison: every round in seconds, spreads, ratios."""
    return {
        "unit": "s",
        "rounds": {name: list(values) for name, values in measured.items()},
        "spread": {name: asdict(spread(values)) for name, values in measured.items()},
        "ratios": [asdict(one) for one in compared],
    }


def writable(text: str) -> Path:
    """For argparse: the path of a file that `write` can write, in a folder that is made. An error here and not after
    hours of measurement."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _begun(path).touch()
        _begun(path).unlink()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be written ({error.strerror}); name another file") from None
    return path


def _begun(path: Path) -> Path:
    return path.with_name(f"{path.name}.begun")


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Leaves the result as JSON: the whole of it or, where this process is killed, what was there."""
    begun = _begun(path)
    begun.write_text(json.dumps(result, indent=2) + "\n")
    begun.replace(path)
