"""When ranks are started again after a failure, and when that is given up."""

from dataclasses import dataclass, field
from itertools import takewhile

from shardkit.errors import EXIT_CONFIG, EXIT_INTERRUPTED, HangError, Preempted, RankFailure, ShardkitError
from shardkit.launch.diagnosis import OF_THE_CAUSE
from shardkit.wording import counted

WITHOUT_CHECKPOINT = 3
"""Restarts in a row without a new checkpoint after which a run is given up: it would fail at the same step for ever."""


@dataclass
class Restarts:
    """The restarts of one run: how many are allowed, their causes, and whether checkpoints are made between them."""

    allowed: int
    number: int = 0
    causes: list[str] = field(default_factory=list)
    newest_step: int = -1
    in_vain: int = 0

    def saw_checkpoint(self, step: int) -> None:
        """The newest complete checkpoint after an attempt; -1: none."""
        if step > self.newest_step:
            self.newest_step, self.in_vain = step, 0

    def resume(self, configured: str) -> str:
        """`shardkit.checkpoint.resume` of the next attempt: the newest checkpoint if this run has saved one. Else as
        configured: a checkpoint in the project's folder is that of an earlier run."""
        return "auto" if self.newest_step >= 0 else configured

    def allows(self, error: ShardkitError) -> bool:
        """Whether the ranks may be started again after this error."""
        return is_worth_repeating(error) and self.number < self.allowed and self.in_vain < WITHOUT_CHECKPOINT

    def count(self, error: ShardkitError) -> None:
        """One more restart, because of this error."""
        self.number += 1
        self.in_vain += 1
        self.causes.append(first_line(error))

    def announcement(self, error: ShardkitError) -> str:
        """What is said before the ranks are started again, after this error."""
        resumed = f"from step {self.newest_step}" if self.newest_step >= 0 else "no checkpoint yet"
        return f"{cause_of(error)}\nlaunch: restart {self.number} of {self.allowed}, {resumed}"

    def final(self, error: ShardkitError) -> ShardkitError:
        """The error that the run ends with, after the causes of all restarts."""
        if not self.causes or not is_worth_repeating(error):
            return error
        reason = (
            f"{self.in_vain} in a row without a new checkpoint" if self.in_vain >= WITHOUT_CHECKPOINT else "all used"
        )
        earlier = [f"  restart {number}: {cause}" for number, cause in enumerate(self.causes, 1)]
        lines = [
            str(error),
            f"launch: given up after {counted(self.number, 'restart')} ({reason}); their causes:",
            *earlier,
        ]
        return RankFailure("\n".join(lines), error.exit_code)


def is_worth_repeating(error: ShardkitError) -> bool:
    """Whether a restart could help: not after a wrong configuration, nor after a requested stop."""
    if isinstance(error, Preempted):
        return False
    return isinstance(error, (RankFailure, HangError)) and error.exit_code not in (EXIT_CONFIG, EXIT_INTERRUPTED)


def first_line(error: ShardkitError) -> str:
    """The cause in one line."""
    return str(error).splitlines()[0].removeprefix("launch: ")


def cause_of(error: ShardkitError) -> str:
    """The cause as a report has it, without what it says after that; of a hang all, with the table of the ranks."""
    first, *more = str(error).splitlines()
    is_told = isinstance(error, HangError)
    return "\n".join(
        [first.removeprefix("launch: "), *takewhile(lambda line: is_told or line.startswith(OF_THE_CAUSE), more)]
    )
