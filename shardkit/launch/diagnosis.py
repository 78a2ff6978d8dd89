"""Which rank failed first, and of what. Pure: from what is known of every rank to the words for it.

When one rank dies, the others lose it: gloo and NCCL raise in them, or the launcher ends them. Those are consequences;
the cause is the earliest end that is not one.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardkit.errors import EXIT_CHECK_FAILED
from shardkit.launch.rank_files import RankError


@dataclass(frozen=True)
class RankOutcome:
    """The end of one rank. `exit_code` is negative for a signal, None where the rank never ended by itself."""

    rank: int
    pid: int = 0
    exit_code: int | None = None
    ended_s: float | None = None
    error: RankError | None = None
    was_killed: bool = False
    """The launcher ended it, after another rank had failed."""
    phase: str = ""
    step: int = 0

    @property
    def time_s(self) -> float:
        """When it failed, as near as known."""
        if self.error is not None:
            return self.error.time_s
        return float("inf") if self.ended_s is None else self.ended_s


@dataclass(frozen=True)
class Diagnosis:
    """The rank that failed first, what to say of it, and the exit code of the run."""

    rank: int
    cause: str
    where: str
    others: tuple[str, ...]
    exit_code: int
    outcome: RankOutcome


def diagnose(outcomes: Sequence[RankOutcome]) -> Diagnosis:
    """The root cause among ranks of which at least one failed."""
    root = root_of(outcomes)
    others = tuple(_consequence(outcome) for outcome in outcomes if outcome is not root and _failed(outcome))
    where = root.error.where if root.error is not None else ""
    return Diagnosis(root.rank, cause_of(root), where, others, exit_code_of(root), root)


def root_of(outcomes: Sequence[RankOutcome]) -> RankOutcome:
    """The outcome that all others follow from."""
    own = [outcome for outcome in outcomes if _is_own_failure(outcome)]
    if own:
        # NCCL's and gloo's threads abort a process that lost a peer: an abort is the cause only if it stands alone.
        return min(own, key=lambda outcome: (outcome.exit_code == -signal.SIGABRT, outcome.time_s))
    left = [outcome for outcome in outcomes if outcome.exit_code == 0]
    if left:
        return min(left, key=lambda outcome: outcome.time_s)
    # A rank that lost no peer is the one that the others lost.
    failed = [outcome for outcome in outcomes if _failed(outcome)] or list(outcomes)
    return min(failed, key=lambda outcome: (_lost_a_peer(outcome), outcome.time_s))


def cause_of(outcome: RankOutcome) -> str:
    """What happened to a rank, in one or a few lines."""
    error, code = outcome.error, outcome.exit_code
    if error is not None:
        return f"{error.kind}: {error.message}" if error.message else error.kind
    if code == 0:
        return "left with exit code 0 while the other ranks still waited for it"
    if outcome.was_killed and code != -signal.SIGTERM:
        return "did not arrive: the other ranks timed out waiting for it, and the launcher ended it"
    if code is not None and code < 0:
        return f"killed by {signal_name(-code)}{_SIGNAL_HINTS.get(-code, '')}"
    return f"ended with exit code {code} and without a Python error"


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_of(outcome: RankOutcome) -> int:
    """The exit code of a run that failed of this: the rank's own, 128 + the signal, never 0."""
    if outcome.error is not None:
        return outcome.error.exit_code
    code = outcome.exit_code
    if code is None or code == 0:
        return EXIT_CHECK_FAILED
    return code if code > 0 else 128 - code


def render(diagnosis: Diagnosis, started_s: float, log_dir: str, saved_step: int = -1) -> str:
    """The lines that end a failed run on the screen: the cause first. `saved_step`: the newest checkpoint; -1: none."""
    outcome = diagnosis.outcome
    where = f" ({diagnosis.where})" if diagnosis.where else ""
    after = f", after {outcome.time_s - started_s:.1f} s" if outcome.time_s < float("inf") else ""
    step = f", at step {outcome.step} in {outcome.phase}" if outcome.phase not in {"", "starting"} else ""
    first, *more = diagnosis.cause.split("\n")
    next_step = _next_step(outcome.error)
    lines = [f"launch: rank {diagnosis.rank} failed first: {first}{where}{after}{step}."]
    lines += [f"    {line}" for line in more]
    if diagnosis.others:
        lines.append(f"  then     {'; '.join(diagnosis.others[:4])}{_and_more(len(diagnosis.others) - 4)}")
    if saved_step >= 0:
        lines.append(f"  saved    step {saved_step}; --resume auto goes on from it")
    if next_step:
        lines.append(f"  next     {next_step}")
    lines.append(f"  logs     {log_dir}/rank{diagnosis.rank}.log, and those of the others beside it")
    lines.append(f"  exit     {diagnosis.exit_code}")
    return "\n".join(lines)


def _next_step(error: RankError | None) -> str:
    """What to do about an error of torch that does not say so itself; empty where nothing is known."""
    if error is None:
        return ""
    if error.kind == "OutOfMemoryError":
        return (
            "what takes the memory, and what each change would give back, for the function that builds the model: "
            "shardkit plan --model MODULE:FUNCTION"
        )
    if "got mixed torch.Tensor and DTensor" in error.message:
        return (
            "a sharded parameter met a plain tensor: call the model by its forward, or name the method that uses its "
            "parameters in accelerator.register_forward_method(model, name); p.full_tensor() gives a whole copy"
        )
    return ""


def saved(step: int) -> str:
    """A line on the newest checkpoint; empty where there is none (-1)."""
    return f"\n  Last good checkpoint: step {step}; --resume auto goes on from it." if step >= 0 else ""


def _is_own_failure(outcome: RankOutcome) -> bool:
    """Whether a rank failed by itself: not for a lost peer, and not because the launcher ended it."""
    if outcome.error is not None:
        return not _lost_a_peer(outcome)
    return _failed(outcome) and not outcome.was_killed


def _lost_a_peer(outcome: RankOutcome) -> bool:
    return outcome.error is not None and outcome.error.is_lost_peer


def _failed(outcome: RankOutcome) -> bool:
    return outcome.error is not None or outcome.exit_code != 0


def _consequence(outcome: RankOutcome) -> str:
    if _lost_a_peer(outcome):
        return f"rank {outcome.rank} ended because its peer was gone"
    if outcome.was_killed and outcome.error is None:
        return f"rank {outcome.rank} was ended by the launcher"
    where = f" ({outcome.error.where})" if outcome.error is not None and outcome.error.where else ""
    return f"rank {outcome.rank}: {cause_of(outcome).splitlines()[0]}{where}"


def _and_more(count: int) -> str:
    return f"; and {count} more" if count > 0 else ""


_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: " (by hand, by the scheduler, or by the kernel when memory ran out: see dmesg)",
    signal.SIGSEGV: " (a crash in native code; its stack is in the log)",
    signal.SIGABRT: " (an abort in native code; its stack is in the log)",
    signal.SIGBUS: " (often: /dev/shm is full)",
}
