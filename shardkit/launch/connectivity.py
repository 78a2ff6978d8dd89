"""Whether the machines of a run reach one another on any port, as the ranks' store, gloo and NCCL require.

During the rendezvous each machine listens on a free port, and connects to machine 0 and to the next machine. Without
this check, a firewall that only allows the port of `--main` would make ranks hang without a message.
"""

import contextlib
from collections.abc import Iterator

from shardkit.config.host_port import joined
from shardkit.launch import addresses

CONNECT_S = 3.0


@contextlib.contextmanager
def open_to_others(main: str) -> Iterator[tuple[str, int] | None]:
    """A context in which this machine listens; yields address and port, or None without a route to machine 0.

    The address is `main` itself where only this machine takes that name for loopback: others know a better address.
    """
    resolved = addresses.resolve(main)
    ours = addresses.towards(resolved) if resolved else None
    is_misnamed = ours is not None and addresses.is_loopback(ours) and not addresses.means_loopback(main)
    try:
        listener = addresses.listen(addresses.EVERYWHERE if is_misnamed else ours, 0) if ours else None
    except OSError:
        listener = None
    if listener is None or ours is None:
        yield None
        return
    with listener:
        yield main if is_misnamed else ours, listener.getsockname()[1]


def problem_here(machine: int, endpoints: dict[int, tuple[str, int] | None], names: dict[int, str]) -> str | None:
    """The error if this machine does not reach machine 0 or the next machine; None if it reaches both."""
    others = {0, (machine + 1) % len(endpoints)} - {machine}
    for other in sorted(others):
        endpoint = endpoints[other]
        problem = addresses.answers(*endpoint, CONNECT_S) if endpoint else None
        if endpoint and problem:
            return (
                f"{names[machine]} does not reach {names[other]} at {joined(*endpoint)} ({problem}); the ranks, gloo "
                "and NCCL use arbitrary free ports: open all ports between the machines of the run"
            )
    return None
