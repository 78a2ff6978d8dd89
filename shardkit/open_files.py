"""The limit of open files of this process, raised to what it needs."""

from contextlib import suppress

from shardkit.errors import MachineError

# Requested where the system allows it; macOS may refuse more than its OPEN_MAX (setrlimit(2) there).
MANY = 65536
MANY_ON_MACOS = 10240


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
    for wanted in (MANY_ON_MACOS, highest):
        if soft != resource.RLIM_INFINITY and soft < wanted <= highest:
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise MachineError(
            f"this machine: {who} about {needed} open files (got a limit of {allowed}); raise it: ulimit -n {needed}, "
            "or LimitNOFILE in the service that starts the ranks."
        )
