"""Machines that were started with different configurations notice it before the first step."""

from collections import Counter
from collections.abc import Sequence

from shardkit import env
from shardkit.distributed.control import ControlGroup
from shardkit.errors import ConfigError
from shardkit.launch import names


def compare(control: ControlGroup) -> None:
    """Raises ConfigError on all ranks where they were launched with different configurations. Collective."""
    problem = control.decide(env.get(names.CONFIG_DIGEST), disagreement)
    if problem:
        raise ConfigError(problem)


def disagreement(digests: Sequence[str | None]) -> str | None:
    """What is wrong with the digests of all ranks, in rank order; None where they are equal."""
    if len(set(digests)) <= 1:
        return None
    usual = Counter(digests).most_common(1)[0][0]
    others = [str(rank) for rank, digest in enumerate(digests) if digest != usual]
    shown = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
    return (
        f"launch: the configuration of rank {shown} differs from that of the others; give every machine the same file "
        "and flags (each machine's config.yaml, beside its logs, shows what it had)."
    )
