"""The first phase of a save: all ranks check that they save the same step and state; then rank 0 checks the free space
and makes a folder."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkit.checkpoint import faults
from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk, folder, index_json, layout, manifest
from shardkit.checkpoint.files.layout import Box, Chunk, Index
from shardkit.checkpoint.saving import additions, in_store
from shardkit.checkpoint.saving.attempt import report, together
from shardkit.checkpoint.saving.commit import is_taken
from shardkit.checkpoint.saving.put import begin_full_file, is_written
from shardkit.checkpoint.saving.save_request import Pieces, PreparedSave, SaveRequest
from shardkit.checkpoint.states import per_rank, replicas, tensors
from shardkit.checkpoint.states.state import Captured
from shardkit.distributed.control import ControlGroup
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.storage.url import Place, Url

# Free space that a save requires beyond its data: headers, JSON, and metadata of the file system.
MARGIN_BYTES = 1 << 20


class Opening:
    """A save before it is written. Every method is collective."""

    def __init__(self, request: SaveRequest, control: ControlGroup) -> None:
        self.request, self.control = request, control
        self.is_alike = self.is_begun = False
        self._hold: int | None = None
        self._attempt: in_store.StoreSave | None = None
        self._drift = replicas.Drift()
        self._captured: Captured
        self._pieces: Pieces
        self._mine: dict[str, Any]
        self._copies: replicas.Copies

    def capture(self, take: Callable[[], Captured]) -> None:
        """Capture the state. If it is equal on all ranks, and `unless_equal` is not set, begin the save."""

        def act() -> None:
            self._captured = take()
            self._pieces = _pieces_of(self._captured, self.control.rank)
            self._copies = replicas.copies_in(self._captured) if self.control.world_size > 1 else replicas.Copies({})
            self._mine = self._details()
            faults.reach("preflight", self.control.rank)

        def answer(_: None) -> list[Any]:
            digest = digests.of_bytes("xxh3", disk.to_json(self._mine))
            copies = self._copies.by_first_rank()
            return [digest, copies, tensors.bytes_to_write(self._pieces), self.request.save_id]

        def judge(answers: list[Any]) -> list[Any]:
            is_alike = len({digest for digest, *_ in answers}) == 1
            is_alike = is_alike and replicas.are_alike(copies for _, copies, *_ in answers)
            is_begun = is_alike and not self.request.unless_equal
            if is_begun:
                self._begin(sum(size for *_, size, _ in answers))
            return [is_alike, is_begun, self.request.save_id]

        verdict = together(self.control, self.request, "capture", act, answer, judge).verdict
        self.is_alike, self.is_begun, save_id = verdict
        self.request = replace(self.request, save_id=save_id)

    def keep_apart(self) -> None:
        """Exchange the details of the states. Differences that are allowed are saved as per-rank state; others raise
        CheckpointSaveError."""
        mine = [self._mine, self._copies.by_first_rank(), socket.gethostname()]
        found = together(self.control, self.request, "compare", lambda: mine, answer=list, judge=_compared).verdict
        if found["problems"]:
            raise CheckpointSaveError(report(self.request, "; ".join(found["problems"])))
        self._drift.buffers = found["buffers"]
        self._drift.settings = per_rank.groups_among(found["apart"])
        if not found["are_copies_alike"]:
            self._leave_copies_to_first()
        per_rank.keep(self._captured, found["apart"])
        self._pieces = _pieces_of(self._captured, self.control.rank)

    def _leave_copies_to_first(self) -> None:
        """Exchange the digest of each tensor, and let the first replica write those that differ."""
        mine, judge = self._copies.of, replicas.differing
        found = together(self.control, self.request, "compare", lambda: mine, answer=dict, judge=judge).verdict
        self._drift.weights = replicas.names_of(found)
        replicas.leave_to_first(self._captured.index, found)

    def begin_unless_saved(self) -> None:
        """Begin the save, unless the existing checkpoint already has the same contents."""

        def act() -> bool:
            return self.request.unless_equal and is_written(self.prepared(), self.control)

        def judge(answers: list[Any]) -> bool:
            if all(is_equal for is_equal, _ in answers):
                return False
            self._begin(sum(size for _, size in answers))
            return True

        size = tensors.bytes_to_write(self._pieces)
        found = together(self.control, self.request, "begin", act, lambda is_equal: [is_equal, size], judge)
        self.is_begun = found.verdict

    def prepared(self) -> PreparedSave:
        """The argument for `finish`."""
        captured = self._captured
        return PreparedSave(
            self.request,
            captured.index,
            captured.common,
            captured.own,
            self._pieces,
            files_of(self.request),
            self._hold,
            self._drift,
            packed=captured.packed,
            attempt=self._attempt,
        )

    def discard(self) -> None:
        """Remove everything that the save has created."""
        if self._hold is not None:
            os.close(self._hold)
            shutil.rmtree(str(files_of(self.request)), ignore_errors=True)
        if self._attempt is not None:
            in_store.abandon(self._attempt, is_everybody_done=True)
        if self.request.staging is not None:
            self.request.staging.discard()

    def _details(self) -> dict[str, Any]:
        """Digests of everything that must be, or may be, equal on all ranks."""
        request, captured = self.request, self._captured
        several = self.control.world_size > 1
        return {
            "request": {"step": request.step, "folder": request.where, "kind": captured.index.kind},
            "sections": fingerprints(captured),
            "items": per_rank.of_items(captured) if several else {},
            "buffers": per_rank.of_tensors(captured.buffers) if several and request.compare_buffers else {},
        }

    def _begin(self, needed: int) -> None:
        """On rank 0: make the temporary folder, and the folders and files in it that several ranks write into."""
        request, index = self.request, self._captured.index
        request.claim()
        if isinstance(request.final, Url):
            _refuse_full(index)
            faults.reach("temporary", 0)
            self._attempt = in_store.begin(request)
            return
        _refuse_taken(request, request.final)
        folder.make(request.final.parent)
        folder.clean_debris(request.final.parent, None if request.in_series else request.final.name)
        _check_free_space(request.final, needed)
        faults.reach("temporary", 0)
        temporary = folder.temporary_folder(request.final, request.save_id)
        temporary.mkdir()
        self._hold = folder.hold(temporary)
        for name in (*(section for section, entries in index.sections.items() if entries), "state"):
            (temporary / name).mkdir()
        if index.kind == "full":
            for section in index.sections:
                begin_full_file(index, temporary, section)
        (temporary / additions.PROBE).touch()


def _pieces_of(captured: Captured, rank: int) -> Pieces:
    """The pieces that this rank writes."""
    index = captured.index
    pieces: Pieces = {
        section: tensors.pieces_to_write(index, section, captured.tensors[section], rank) for section in index.sections
    }
    own = [
        (Chunk(name, tensors.DTYPES[tensor.dtype], Box((0,) * tensor.ndim, tuple(tensor.shape))), tensor)
        for name, tensor in captured.own_tensors.items()
    ]
    pieces[layout.OWN] = sorted(own, key=lambda item: (-layout.ITEM_BYTES[item[0].dtype], item[0].name))
    return pieces


def _compared(answers: list[Any]) -> dict[str, Any]:
    """Forbidden differences of ranks ("problems"), per-rank items ("apart"), buffers that differ, and whether what
    several ranks hold is alike."""
    hosts = [f"rank {rank} (host {host})" for rank, (*_, host) in enumerate(answers)]
    given = [details for details, *_ in answers]
    problems = _different_requests([one["request"] for one in given], hosts)
    problems += _different_tensors([one["sections"] for one in given], hosts)
    return {
        "problems": problems[:3],
        "apart": per_rank.differing([one["items"] for one in given]),
        "buffers": per_rank.differing([one["buffers"] for one in given]),
        "are_copies_alike": replicas.are_alike(copies for _, copies, _ in answers),
    }


def _different_requests(given: list[dict[str, Any]], hosts: list[str]) -> list[str]:
    return [
        f"the ranks do not save the same {key}: {given[0][key]} on {hosts[0]}, {other} on {host}; give save_state the "
        "same arguments on all ranks"
        for key, other, host in _first_different(given, hosts)
    ]


def _different_tensors(given: list[dict[str, str]], hosts: list[str]) -> list[str]:
    return [
        f"{section}: the tensors on {host} differ from those on {hosts[0]} in names, shapes, dtypes or placements; "
        "prepare and register the same objects on all ranks"
        for section, _, host in _first_different(given, hosts)
    ]


def _first_different(given: list[dict[str, Any]], hosts: list[str]) -> Iterator[tuple[str, Any, str]]:
    """Of each key whose values differ: the key, the first value that is not rank 0's, and whose it is."""
    for key in dict.fromkeys(key for one in given for key in one):
        for one, host in zip(given, hosts, strict=True):
            if one.get(key) != given[0].get(key):
                yield key, one.get(key), host
                break


def _check_free_space(final: Path, needed: int) -> None:
    """Raises CheckpointError if the disk has less free space than needed."""
    if lack := disk.lack_of_space(final.parent, needed + needed // 20 + MARGIN_BYTES):
        raise CheckpointError(f"{lack} in {final.parent}; free some space, or save to another disk")


def files_of(request: SaveRequest) -> Place:
    """The folder or prefix into which the files of a save are written."""
    if isinstance(request.final, Url):
        return in_store.files_of(request.final, request.save_id)
    return folder.temporary_folder(request.final, request.save_id)


def _refuse_full(index: Index) -> None:
    if index.kind == "full":
        raise CheckpointError(
            "in a FULL_STATE_DICT checkpoint all ranks write one file, which object stores do not support; save as "
            "SHARDED_STATE_DICT, and export whole files with `shardkit checkpoint merge URL -o FOLDER`"
        )


def _refuse_taken(request: SaveRequest, final: Path) -> None:
    """Raises FileExistsError if the name is taken and may not be replaced, CheckpointError if it is in a checkpoint."""
    if (around := folder.checkpoint_around(final)) is not None:
        raise CheckpointError(f"{final} is inside the checkpoint {around}, and would damage it; give another folder")
    if not is_taken(final):
        return
    if not request.replace:
        raise folder.taken(final, "a checkpoint with this name exists, and checkpoints are not overwritten")
    if not manifest.is_checkpoint(final):
        if final.is_dir():
            advice = "use another name, or write those files after the save"
            raise folder.taken(final, f"a folder with other files in it; {advice}")
        raise folder.taken(final, "a file; use another name")


def fingerprints(captured: Captured) -> dict[str, str]:
    """{section: digest of the names, dtypes, shapes and placements of its tensors}, without those in `captured.items`,
    which may differ between ranks."""
    value = index_json.to_json(captured.index)
    meshes = [digests.of_bytes("xxh3", disk.to_json(mesh)) for mesh in value["meshes"]]
    for item in captured.items.values():
        for name in item.tensors:
            del value["sections"][item.section][name]
    found = {}
    for section, entries in value["sections"].items():
        for entry in entries.values():
            entry["mesh"] = meshes[entry["mesh"]]  # ranks may number them differently
        shared = [value["kind"], value["world_size"], entries, value["aliases"].get(section)]
        found[section] = digests.of_bytes("xxh3", disk.to_json(shared))
    return found
