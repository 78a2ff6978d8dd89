"""All errors that a user can cause, with the exit code of the command for each.

    ShardkitError                 1   a check failed
    +-- UsageError                2   wrong flags, missing answers
    +-- ConfigError               2   the configuration cannot be read or contradicts itself
    +-- MachineError              4   this machine cannot run it: too few devices, port busy, package missing
    |   +-- HangError             4   ranks stopped making progress
    +-- CheckpointError           3   a checkpoint cannot be read, or is not what the run needs
    |   +-- CheckpointMissing     3   no rank finds what is to be loaded; also a FileNotFoundError
    |   +-- CheckpointSaveError   3   a save failed; nothing was published
    |   +-- CheckpointCorrupted   3   bytes differ from what was saved
    |   +-- CheckpointUnreachable 3   the store of checkpoints does not answer, which tells nothing about them
    |   +-- StateIncomplete       3   a load failed half-way: the live state is inconsistent until another load succeeds
    +-- ModelError                1   the model cannot be sharded, loaded or described as asked
    |   +-- ModelUnknown          2   no model has this name or these sizes; also a UsageError
    +-- RankFailure               the exit code of the rank that failed first
    +-- Preempted                75   the run was stopped by a signal, and saved

A message has the form `where: what is wrong (got ...); what to do.`, one problem a line, all problems at once.
"""

from collections.abc import Iterable

EXIT_CHECK_FAILED = 1
EXIT_CONFIG = 2
EXIT_CHECKPOINT = 3
EXIT_MACHINE = 4
EXIT_BUG = 70
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class ShardkitError(Exception):
    """A problem that the user can solve. `exit_code`: the exit code of the command."""

    exit_code = EXIT_CHECK_FAILED


class UsageError(ShardkitError):
    """Wrong flags or arguments, or missing answers without a terminal."""

    exit_code = EXIT_CONFIG


class ConfigError(ShardkitError):
    """All problems of a configuration: `problems` has one line each, the message all of them."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class MachineError(ShardkitError):
    """This machine cannot run the requested configuration."""

    exit_code = EXIT_MACHINE


class HangError(MachineError):
    """Ranks stopped making progress; the message names who stopped first, and in which phase."""


class CheckpointError(ShardkitError):
    """A checkpoint cannot be read, or is not what the run needs."""

    exit_code = EXIT_CHECKPOINT


class CheckpointMissing(CheckpointError, FileNotFoundError):
    """No rank finds the checkpoint to load; a script that loads one where there is one catches FileNotFoundError."""


class CheckpointSaveError(CheckpointError):
    """A save failed. Nothing was published; the checkpoint before it is untouched."""


class CheckpointCorrupted(CheckpointError):
    """The bytes of a checkpoint differ from what was saved; the message names the file."""


class CheckpointUnreachable(CheckpointError):
    """The store that checkpoints lie in does not answer; what lies there may be as good as ever."""


class StateIncomplete(CheckpointError):
    """A load failed after it began to write into the live state, which is inconsistent until another load succeeds."""


class ModelError(ShardkitError):
    """The model cannot be sharded, loaded or described as asked."""


class ModelUnknown(ModelError, UsageError):
    """No model has this name or these sizes."""


class RankFailure(ShardkitError):
    """A rank of a launched run failed. `exit_code` is that rank's own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Preempted(ShardkitError):
    """The run was stopped by a signal, saved its state and ended."""

    exit_code = EXIT_PREEMPTED
