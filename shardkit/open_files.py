"""The limit of open files of this process, raised to what it needs."""

from contextlib import suppress

from shardkit.errors import MachineError

# Requested where the system allows it.
MANY = 65536


def allow(needed: int, who: str) -> None:
    """Raises the limit as far as the system lets this process. Processes that it starts inherit it.

    Raises MachineError where that is less than `needed`: gloo would end the process without a message, and torch's
    store would not answer.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = MANY if hard == resource.RLIM_INFINITY else min(hard, max(needed, MANY))
    if soft != resource.RLIM_INFINITY and soft < highest:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise MachineError(
            f"this machine: {who} about {needed} open files (got a limit of {allowed}); raise it: ulimit -n {needed}, "
            "or LimitNOFILE in the service that starts the ranks."
        )
