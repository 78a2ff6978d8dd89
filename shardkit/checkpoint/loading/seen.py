"""The checkpoints that the ranks of a load see: those to try, and that each is the same one on all ranks."""

import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.files.verify import Checkpoint, open_checkpoint
from shardkit.distributed.control import ControlGroup
from shardkit.errors import CheckpointError, CheckpointMissing, CheckpointUnreachable
from shardkit.storage.url import Place, Url
from shardkit.wording import words


def candidates(root: Place, control: ControlGroup) -> list[tuple[int, str]]:
    """(step, name) of the checkpoints that rank 0 finds, in the order to try them. Collective."""

    def look() -> list[tuple[int, str]]:
        return [(found.step, found.path.name) for found in folder.candidates(root)] if control.rank == 0 else []

    attempt = control.attempt(look, answer=list, judge=lambda answers: answers[0])
    if attempt.failure:
        raise CheckpointError(f"{attempt.failure}.")
    if not attempt.verdict and not isinstance(root, Url):
        _refuse_storage_of_one_machine(root, control)
    return attempt.verdict


def _refuse_storage_of_one_machine(root: Path, control: ControlGroup) -> None:
    """Raises CheckpointError, on all ranks, where others find checkpoints and rank 0 none: it would start from step 0,
    and the first save would fail. Collective."""

    def look() -> list[Any]:
        return [socket.gethostname(), next((found.step for found in folder.steps(root)), None)]

    def judge(answers: list[list[Any]]) -> str:
        those = [(rank, host, step) for rank, (host, step) in enumerate(answers) if step is not None]
        seen = ", ".join(f"rank {rank} (host {host}) finds step {step}" for rank, host, step in those[:3])
        here = f"rank 0 (host {answers[0][0]}) finds no checkpoint here"
        return f"checkpoint: {root}: {here}, {seen}; use storage that all ranks share" if seen else ""

    attempt = control.attempt(look, answer=list, judge=judge)
    if problem := attempt.failure or attempt.verdict:
        raise CheckpointError(f"{problem}.")


def open_together(path: Place, control: ControlGroup) -> Checkpoint:
    """As `open_checkpoint`, on all ranks. Collective. Raises if the ranks do not read the same manifest;
    CheckpointMissing if there is nothing at the path on any rank."""
    found, problem, seen, kind = None, None, None, None
    try:
        found = open_checkpoint(path) if control.rank == 0 else Checkpoint(path, manifest.read(path))
        seen = manifest.self_digest(path)
    except (CheckpointError, OSError) as error:
        problem, kind = words(error), _kind_of(error, path)
    trouble, kind = control.decide([problem, seen, kind, str(path)], lambda answers: _not_seen_alike(path, answers))
    if trouble is not None:
        raise _ERRORS.get(kind, CheckpointError)(trouble)
    assert found is not None
    return found


# The error of all ranks for each kind of problem that one has; CheckpointError for any other.
_UNREACHABLE, _MISSING = "unreachable", "missing"
_ERRORS = {_UNREACHABLE: CheckpointUnreachable, _MISSING: CheckpointMissing}


def _kind_of(error: Exception, path: Place) -> str | None:
    if isinstance(error, OSError):
        return _UNREACHABLE if isinstance(path, Url) else None
    with suppress(OSError):
        return None if disk.is_there(path) else _MISSING
    return None


def _not_seen_alike(path: Place, answers: list[list[Any]]) -> tuple[str | None, str | None]:
    """(the error or None, its kind), from each rank's [problem, digest of the manifest, kind, folder]."""
    kinds = {answer[2] for answer in answers}
    kind = _UNREACHABLE if _UNREACHABLE in kinds else _MISSING if kinds == {_MISSING} else None
    other = next((rank for rank, answer in enumerate(answers) if answer[3] != answers[0][3]), None)
    if other is not None and answers[other][:2] != answers[0][:2]:
        those = f"{path} on rank 0, {answers[other][3]} on rank {other}"
        return f"checkpoint: the ranks do not load the same folder: {those}; give all ranks the same.", kind
    if answers[0][0] is not None:
        return f"checkpoint: {answers[0][0]}", kind
    problems = [f"rank {rank}: {text}" for rank, (text, *_) in enumerate(answers) if text is not None]
    if problems:
        text = f"checkpoint: {path}: rank 0 can read it, others cannot; use storage that all ranks share, and can read"
        return f"{text}: {'; '.join(problems[:3])}", kind
    if len({answer[1] for answer in answers}) > 1:
        return f"checkpoint: {path}: ranks see different checkpoints; use storage that all ranks share.", kind
    return None, None
