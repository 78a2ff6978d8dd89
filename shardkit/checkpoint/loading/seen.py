"""The checkpoints that the ranks of a load see: those to try, and that each is the same one on all ranks."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.files.verify import Checkpoint, open_checkpoint
from shardkit.distributed.control import ControlGroup
from shardkit.errors import CheckpointError, CheckpointMissing, CheckpointUnreachable
from shardkit.storage.url import Place, Url
from shardkit.wording import words

Listed = list[tuple[int, str]]
"""(step, name) of checkpoints, in the order to try them."""


def candidates(root: Place, control: ControlGroup) -> Listed:
    """The checkpoints that rank 0 finds. Collective."""

    def look() -> Listed:
        return [(found.step, found.path.name) for found in folder.candidates(root)] if control.rank == 0 else []

    attempt = control.attempt(look, answer=list, judge=lambda answers: answers[0])
    if attempt.failure:
        raise CheckpointError(f"{attempt.failure}.")
    if not attempt.verdict and not isinstance(root, Url):
        _refuse_storage_of_one_machine(root, control)
    return [(step, name) for step, name in attempt.verdict]  # JSON has made lists of the pairs


def without_deleted(path: Place, listed: Listed, left: Listed, control: ControlGroup) -> tuple[Listed, Listed]:
    """What is listed, and what of it is left to try: as before, or, where this checkpoint is gone by now, what is there
    now. Collective."""
    if not control.share(_is_deleted(path) if control.rank == 0 else None):
        return listed, left
    now = candidates(path.parent, control)
    return now, [one for one in now if one in left or one not in listed]


def _is_deleted(path: Place) -> bool:
    with suppress(CheckpointError, OSError):
        return not (manifest.exists(path) if isinstance(path, Url) else os.path.lexists(path))
    return False


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


class _Seen(NamedTuple):
    """What one rank has found at its path: the digest of the manifest, or a problem and its kind."""

    folder: str
    digest: str | None = None
    problem: str | None = None
    kind: str | None = None


def open_together(path: Place, control: ControlGroup) -> Checkpoint:
    """As `open_checkpoint`, on all ranks. Collective. Raises if the ranks do not read the same manifest;
    CheckpointMissing if there is nothing at the path on any rank."""
    found, mine = None, _Seen(str(path))
    try:
        found = open_checkpoint(path) if control.rank == 0 else Checkpoint(path, manifest.read(path))
        mine = mine._replace(digest=manifest.self_digest(path))
    except (CheckpointError, OSError) as error:
        mine = mine._replace(problem=words(error), kind=_kind_of(error, path))
    trouble, kind = control.decide([*mine], lambda answers: _not_seen_alike([_Seen(*one) for one in answers]))
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


def _not_seen_alike(seen: list[_Seen]) -> tuple[str | None, str | None]:
    """(the error or None, its kind), from what each rank has seen."""
    first, path = seen[0], seen[0].folder
    kinds = {one.kind for one in seen}
    kind = _UNREACHABLE if _UNREACHABLE in kinds else _MISSING if kinds == {_MISSING} else None
    other = next((rank for rank, one in enumerate(seen) if one.folder != path), None)
    if other is not None and (seen[other].problem, seen[other].digest) != (first.problem, first.digest):
        those = f"{path} on rank 0, {seen[other].folder} on rank {other}"
        return f"checkpoint: the ranks do not load the same folder: {those}; give all ranks the same.", kind
    if first.problem is not None:
        return f"checkpoint: {first.problem}", kind
    problems = [f"rank {rank}: {one.problem}" for rank, one in enumerate(seen) if one.problem is not None]
    if problems:
        text = f"checkpoint: {path}: rank 0 can read it, others cannot; use storage that all ranks share, and can read"
        return f"{text}: {'; '.join(problems[:3])}", kind
    if len({one.digest for one in seen}) > 1:
        return f"checkpoint: {path}: ranks see different checkpoints; use storage that all ranks share.", kind
    return None, None
