"""A part of a save that all ranks do together: where it fails on one, all raise the same error."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardkit.checkpoint import folder, manifest
from shardkit.checkpoint.save_request import SaveRequest
from shardkit.distributed.control import Attempt, ControlGroup, LostRank, Result, words
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.storage.url import Url


def together(
    control: ControlGroup,
    request: SaveRequest,
    phase: str,
    action: Callable[[], Result],
    answer: Callable[[Result], Any] = lambda result: None,
    judge: Callable[[list[Any]], Any] = lambda answers: None,
) -> Attempt[Result]:
    """What came of the action. Where it failed on one rank, all raise the same CheckpointSaveError.

    `judge` may act as well: it runs on rank 0 once the action has succeeded on all ranks.
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
        raise CheckpointSaveError(report(request, attempt.failure))
    return attempt


def report(request: SaveRequest, said: str) -> str:
    failed = f"checkpoint: save of step {request.step} to {request.final} failed: {said}."
    return f"{failed}\n  {_what_is_left(request)}"


def _what_is_left(request: SaveRequest) -> str:
    """What the user still has. Looks at names only: it must not fail, nor wait."""
    if isinstance(request.final, Url):  # looking there takes as long as the store likes
        return "Nothing half-written is used: what has no manifest is no checkpoint."
    with suppress(OSError):
        if request.in_series:
            good = [found for found in folder.steps(request.final.parent) if found.path != request.final]
            if good:
                return f"Nothing half-written is used. Last good checkpoint: step {good[0].step} ({good[0].path})."
        elif (request.final / manifest.NAME).exists():
            return f"Nothing half-written is used. {request.final} holds a whole checkpoint."
    return "Nothing was published, and there is no earlier checkpoint here."
