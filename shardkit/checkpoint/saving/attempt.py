"""One phase of a save, run by all ranks: if it fails on one rank, all ranks raise the same error."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardkit.checkpoint.files import folder, manifest
from shardkit.checkpoint.saving.save_request import SaveRequest
from shardkit.distributed.control import Attempt, ControlGroup, LostRank, Result
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.storage.url import Url
from shardkit.wording import words


def together(
    control: ControlGroup,
    request: SaveRequest,
    phase: str,
    action: Callable[[], Result],
    answer: Callable[[Result], Any] = lambda result: None,
    judge: Callable[[list[Any]], Any] = lambda answers: None,
) -> Attempt[Result]:
    """The result of the action. Collective. If it failed on one rank, all raise the same CheckpointSaveError.

    `judge` runs on rank 0 after the action has succeeded on all ranks; it may have side effects.
    """

    def judge_as_rank_0(answers: list[Any]) -> Any:
        try:
            return judge(answers)
        except Exception as error:
            who = f"rank 0 (host {socket.gethostname()}): " if control.world_size > 1 else ""
            raise CheckpointError(who + words(error).removeprefix("checkpoint: ").rstrip(".")) from error

    try:
        attempt = control.attempt(action, answer, judge_as_rank_0)
    except LostRank as error:
        raise CheckpointSaveError(report(request, f"{phase}: {error}")) from error
    if attempt.failure:
        raise CheckpointSaveError(report(request, attempt.failure)) from attempt.error
    return attempt


def report(request: SaveRequest, reason: str) -> str:
    failed = f"checkpoint: save of step {request.step} to {request.where} failed: {reason}."
    return f"{failed}\n  {_earlier_checkpoint(request)}"


def _earlier_checkpoint(request: SaveRequest) -> str:
    """Which checkpoint is still available. Looks at names only, so that it cannot fail or wait."""
    if isinstance(request.final, Url):  # a request to a store may take long
        return "The incomplete save has no manifest, so it is not a checkpoint."
    with suppress(CheckpointError, OSError):
        good = [found for found in folder.steps(request.final.parent) if found.path != request.final]
        if request.in_series and good:
            return f"The incomplete save is not used. Last checkpoint: step {good[0].step} ({good[0].path})."
        if (request.final / manifest.NAME).exists():
            return f"The incomplete save is not used. {request.final} holds a complete checkpoint."
    return "No checkpoint was written, and there is no earlier one in this folder."
