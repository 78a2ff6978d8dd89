"""Whether the machines of a run reach one another on any port, as the ranks' store, gloo and NCCL need it.

Each listens on a free port while they meet, and calls machine 0 and the next machine: a firewall that lets only the
port of `--main` through would else end in ranks that wait for one another without a word.
"""

import contextlib
from collections.abc import Iterator

from shardkit.launch import addresses

CONNECT_S = 3.0


@contextlib.contextmanager
def open_to_others(main: str) -> Iterator[tuple[str, int] | None]:
    """The address and port at which this machine listens inside; None where it has none towards machine 0."""
    resolved = addresses.resolve(main)
    ours = addresses.towards(resolved) if resolved else None
    try:
        listener = addresses.listen(ours, 0) if ours else None
    except OSError:
        listener = None
    if listener is None or ours is None:
        yield None
        return
    with listener:
        yield ours, listener.getsockname()[1]


def problem_here(machine: int, places: dict[int, tuple[str, int] | None], names: dict[int, str]) -> str | None:
    """What this machine does not reach of machine 0 and the next one, in words; None where it reaches both."""
    others = {0, (machine + 1) % len(places)} - {machine}
    for other in sorted(others):
        place = places[other]
        problem = addresses.answers(*place, CONNECT_S) if place else None
        if place and problem:
            return (
                f"{names[machine]} does not reach {names[other]} at {place[0]}:{place[1]} ({problem}); the ranks, gloo "
                "and NCCL meet on any free port: let the machines of the run reach one another on all of them"
            )
    return None
