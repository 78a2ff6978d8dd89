"""Saving: a checkpoint exists entirely or not at all, and all ranks succeed or all raise the same error.

    preflight   same step and same state on all ranks, room on disk, one storage for all; a temporary folder
    write       every rank its own bytes, hashed in the same pass, on disk before it returns
    agree       every rank tells its outcome and its digests
    commit      rank 0: manifest, folders to disk, rename, parent folder to disk
    agree       every rank learns the outcome
    after       LATEST and retention, which can fail without harm

Nothing here is ever written in place: the folder is temporary until it is whole.
"""

import os
import platform
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import shardkit
from shardkit.checkpoint import digest as digests
from shardkit.checkpoint import disk, faults, folder, layout, manifest, retention, tensors
from shardkit.checkpoint.layout import Chunk, Index, Kind
from shardkit.checkpoint.manifest import File, Manifest
from shardkit.checkpoint.state import Captured, Live, capture
from shardkit.distributed.control import Attempt, ControlGroup, LostRank, Result, words
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.log import get_logger

logger = get_logger(__name__)

# How long a freshly made folder may take to be seen by other machines: the attribute cache of NFS (nfs(5), acdirmax).
SHARED_STORAGE_WAIT_S = 30.0
# Room beyond the data that a save asks for: headers, JSON, and what the file system needs itself.
MARGIN_BYTES = 1 << 20
Pieces = dict[str, list[tuple[Chunk, torch.Tensor]]]
"""What a rank writes, by section, in file order: views of its memory."""
_AGREEMENTS = {"write": "agree-1", "commit": "agree-2"}


@dataclass(frozen=True)
class Request:
    """Where and as what a state is saved."""

    final: Path
    step: int
    run_id: str
    epoch: int = 0
    samples_seen: int = 0
    parent: str | None = None
    replace: bool = False
    digest: str = "xxh3"
    config_text: str | None = None
    mesh: dict[str, Any] = field(default_factory=dict)
    in_series: bool = False
    """Whether this is one of a folder of step checkpoints, which has a LATEST and a retention."""
    keep_last: int = 0
    """How many of the newest stay; 0: all."""
    keep_every: int = 0
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class Prepared:
    """A save that all ranks have agreed to begin: `pieces` are this rank's, by section, in file order."""

    request: Request
    index: Index
    common: dict[str, Any]
    own: dict[str, Any]
    pieces: Pieces
    temporary: Path
    hold: int | None
    trouble: Exception | None = None
    """What went wrong on this rank since; the write raises it."""


def save(live: Live, kind: Kind, request: Request, control: ControlGroup) -> Path:
    """The committed checkpoint. Collective. CheckpointSaveError on every rank where it failed on one."""
    return finish(prepare(live, kind, request, control), control)


def prepare(live: Live, kind: Kind, request: Request, control: ControlGroup) -> Prepared:
    """A save ready to be written: everything checked, the temporary folder made. Collective."""
    return ready(lambda: capture(live, kind, control.rank, control.world_size), request, control)


def ready(take: Callable[[], Captured], request: Request, control: ControlGroup) -> Prepared:
    """As `prepare`, of the state that `take` captures. Collective."""
    captured, pieces, request, needed = _taken(take, request, control)
    temporary = folder.temporary_folder(request.final, request.save_id)
    prepared = Prepared(request, captured.index, captured.common, captured.own, pieces, temporary, None)
    try:
        _together(control, request, "temporary", lambda: _make_temporary(prepared, needed, control))
        _together(control, request, "probe", lambda: wait_until_seen(temporary))
    except CheckpointSaveError:
        _discard(prepared, control)
        raise
    return prepared


def finish(prepared: Prepared, control: ControlGroup) -> Path:
    """Write, agree, commit. Collective. The state itself is not touched: this may run beside training."""
    request = prepared.request
    started = time.monotonic()
    try:
        written = _together(control, request, "write", lambda: _write(prepared, control), tell=lambda found: found).told
        record = _together(control, request, "commit", lambda: _commit(prepared, written, control)).own
    except CheckpointSaveError:
        _discard(prepared, control)
        raise
    finally:
        _let_go(prepared)
    if control.rank == 0:
        _after_commit(prepared, started, record)
    return request.final


def _together(
    control: ControlGroup,
    request: Request,
    phase: str,
    action: Callable[[], Result],
    tell: Callable[[Result], Any] = lambda result: None,
    judge: Callable[[list[Any]], Any] = lambda told: None,
) -> Attempt[Result]:
    """What came of the action. Where it failed on one rank, all raise the same CheckpointSaveError."""

    def act() -> Result:
        result = action()
        if phase in _AGREEMENTS:
            faults.reach(_AGREEMENTS[phase], control.rank)
        return result

    try:
        attempt = control.attempt(act, tell, judge)
    except LostRank as error:
        raise CheckpointSaveError(_report(request, f"{phase}: {error}")) from error
    if attempt.failure:
        raise CheckpointSaveError(_report(request, attempt.failure))
    return attempt


def _report(request: Request, said: str) -> str:
    failed = f"checkpoint: save of step {request.step} to {request.final} failed: {said}."
    return f"{failed}\n  {_what_is_left(request)}"


def _what_is_left(request: Request) -> str:
    """What the user still has. Looks at names only: it must not fail, nor wait."""
    with suppress(OSError):
        if request.in_series:
            good = [found for found in folder.steps(request.final.parent) if found.path != request.final]
            if good:
                return f"Nothing half-written is used. Last good checkpoint: step {good[0].step} ({good[0].path})."
        elif (request.final / manifest.NAME).exists():
            return f"Nothing half-written is used. {request.final} holds a whole checkpoint."
    return "Nothing was published, and there is no earlier checkpoint here."


def _taken(
    take: Callable[[], Captured], request: Request, control: ControlGroup
) -> tuple[Captured, Pieces, Request, int | None]:
    """The state, this rank's pieces of it, the request with rank 0's save_id, and on rank 0 the bytes that all write.

    All ranks must save the same step and state to the same place.
    """

    def act() -> tuple[Captured, Pieces]:
        captured = take()
        pieces = {
            section: tensors.pieces_to_write(captured.index, section, captured.tensors[section], control.rank)
            for section in captured.index.sections
        }
        faults.reach("preflight", control.rank)
        return captured, pieces

    def describe(found: tuple[Captured, Pieces]) -> list[Any]:
        captured, pieces = found
        here = {"step": request.step, "folder": str(request.final), "kind": captured.index.kind}
        size = tensors.bytes_to_write(pieces)
        return [here, fingerprints(captured.index), size, request.save_id, socket.gethostname()]

    attempt = _together(control, request, "capture", act, describe, _differences)
    assert attempt.own is not None
    problems, save_id = attempt.verdict
    if problems:
        raise CheckpointSaveError(_report(request, "; ".join(problems)))
    needed = sum(size for _, _, size, *_ in attempt.told) if control.rank == 0 else None
    return *attempt.own, replace(request, save_id=save_id), needed


def _differences(told: list[Any]) -> tuple[list[str], str]:
    """(what ranks do not save alike, rank 0's save_id)."""
    hosts = [f"rank {rank} (host {host})" for rank, (*_, host) in enumerate(told)]
    problems = _different_requests([given for given, *_ in told], hosts)
    problems += _different_tensors([given for _, given, *_ in told], hosts)
    return problems[:3], told[0][3]


def _different_requests(given: list[dict[str, Any]], hosts: list[str]) -> list[str]:
    problems = []
    for key, expected in given[0].items():
        for host, other in zip(hosts, given, strict=True):
            if other[key] != expected:
                both = f"{expected} on {hosts[0]}, {other[key]} on {host}"
                problems.append(f"the ranks do not save the same {key}: {both}; call save_state on all ranks alike")
                break
    return problems


def _different_tensors(given: list[dict[str, str]], hosts: list[str]) -> list[str]:
    problems = []
    for section in dict.fromkeys(section for told in given for section in told):
        for host, other in zip(hosts, given, strict=True):
            if other.get(section) != given[0].get(section):
                problems.append(
                    f"{section}: {host} has other tensors than {hosts[0]} (their names, shapes, dtypes or placements); "
                    "prepare and register on all ranks what is alike on all"
                )
                break
    return problems


def _look_for_room(final: Path, needed: int) -> None:
    """CheckpointError where there is less room on the disk than is needed."""
    final.parent.mkdir(parents=True, exist_ok=True)
    free = disk.free_bytes(final.parent)
    needed = needed + needed // 20 + MARGIN_BYTES
    if free < needed:
        raise CheckpointError(
            f"No space left on device: need {needed / 1e6:.1f} MB, {free / 1e6:.1f} MB free in {final.parent}"
        )


def fingerprints(index: Index) -> dict[str, str]:
    """By section: the same for two ranks whose tensors in it have equal names, dtypes, shapes and placements."""
    value = layout.index_to_json(index)
    shared = [value["meshes"], value["kind"], value["world_size"]]
    return {
        section: digests.of_bytes("xxh3", disk.to_json([shared, entries, value["aliases"].get(section)]))
        for section, entries in value["sections"].items()
    }


def model_fingerprint(index: Index) -> str:
    """The same for two runs whose models' tensors have equal names, dtypes and shapes, whatever their placement."""
    lines = sorted(
        f"{section}:{name}:{entry.dtype}:{list(entry.shape)}"
        for section, entries in index.sections.items()
        if section.startswith("model")
        for name, entry in entries.items()
    )
    return digests.of_bytes("sha256", "\n".join(lines).encode())


def _make_temporary(prepared: Prepared, needed: int | None, control: ControlGroup) -> None:
    if control.rank != 0:
        return
    assert needed is not None
    _look_for_room(prepared.request.final, needed)
    faults.reach("temporary", 0)
    request = prepared.request
    if _is_taken(request.final) and not request.replace:
        raise FileExistsError(17, "a checkpoint of this name exists, and is never written again", str(request.final))
    if _is_taken(request.final) and not (request.final / manifest.NAME).exists():
        there = "a folder with other things in it" if request.final.is_dir() else "a file"
        raise FileExistsError(17, f"{there}; give another name", str(request.final))
    folder.clean_debris(request.final.parent, None if request.in_series else request.final.name)
    prepared.temporary.mkdir()
    prepared.hold = folder.hold(prepared.temporary)
    for name in _folders(prepared.index):
        (prepared.temporary / name).mkdir()
    if prepared.index.kind == "full":
        for section in prepared.index.sections:
            _begin_full_file(prepared, section)
    (prepared.temporary / ".probe").touch()


def _folders(index: Index) -> list[str]:
    return [*(section for section, entries in index.sections.items() if entries), "state"]


def _is_taken(final: Path) -> bool:
    return final.exists() and (not final.is_dir() or any(final.iterdir()))


def full_header(index: Index, section: str) -> bytes:
    """The header of the one file that all ranks write a section into."""
    return layout.header(((name, e.dtype, e.shape) for name, e in index.sections[section].items()), {"format": "pt"})


def _begin_full_file(prepared: Prepared, section: str) -> None:
    index = prepared.index
    if not index.sections[section]:
        return
    head = full_header(index, section)
    size = len(head) + sum(entry.bytes for entry in index.sections[section].values())
    disk.write_new(prepared.temporary / layout.file_of(index, section, 0), head, size)


def wait_until_seen(temporary: Path) -> None:
    """Until the folder that rank 0 made is seen here; CheckpointError where the storage is not shared."""
    deadline = time.monotonic() + SHARED_STORAGE_WAIT_S
    while True:
        with suppress(OSError):
            if ".probe" in os.listdir(temporary):  # a listing, which a stale cache of names cannot answer
                return
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    raise CheckpointError(
        f"{temporary.parent} is not storage that all ranks share: rank 0 made a folder, not seen here"
    )


def _write(prepared: Prepared, control: ControlGroup) -> dict[str, list[Any]]:
    """{file: [bytes, digest]} of everything this rank wrote; all of it is on disk."""
    if prepared.trouble is not None:
        raise prepared.trouble
    written: dict[str, list[Any]] = {}
    with _Hasher(prepared.request.digest) as hasher:
        for section, pieces in prepared.pieces.items():
            if prepared.index.kind == "full":
                written.update(_write_into_full(prepared, section, pieces, control, hasher))
            elif pieces:
                written.update(_write_own_file(prepared, section, pieces, control, hasher))
    for name, data in _json_files(prepared, control.rank).items():
        disk.write_new(prepared.temporary / name, data)
        written[name] = [len(data), digests.of_bytes(prepared.request.digest, data)]
    return written


def _json_files(prepared: Prepared, rank: int) -> dict[str, bytes]:
    files = {f"state/rank-{rank:05d}.json": disk.to_json(prepared.own)}
    if rank == 0:
        files["index.json"] = disk.to_json_in_order(layout.index_to_json(prepared.index))
        files["state/common.json"] = disk.to_json_in_order(prepared.common)
        if prepared.request.config_text is not None:
            files["config.yaml"] = prepared.request.config_text.encode()
    return files


class _Hasher:
    """Digests of what is written, worked out beside the writing where hashing is slow (hashlib frees the GIL)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._beside = ThreadPoolExecutor(1, "shardkit-digest") if name == "sha256" else None

    def __enter__(self) -> "_Hasher":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._beside is not None:
            self._beside.shutdown()

    def write(self, digest: digests.Digest, data: memoryview, file: disk.Durable, offset: int) -> None:
        """Hash and write the same bytes, block by block."""
        for begin in range(0, len(data), disk.BLOCK_BYTES):
            block = data[begin : begin + disk.BLOCK_BYTES]
            hashed: Future[None] | None = self._beside.submit(digest.update, block) if self._beside else None
            try:
                file.put(block, offset + begin)
            finally:
                if hashed is not None:
                    hashed.result()
                else:
                    digest.update(block)


def _write_own_file(
    prepared: Prepared, section: str, pieces: list[tuple[Chunk, torch.Tensor]], control: ControlGroup, hasher: _Hasher
) -> dict[str, list[Any]]:
    name, rank = layout.file_of(prepared.index, section, control.rank), control.rank
    head = layout.header(((chunk.name, chunk.dtype, chunk.box.sizes) for chunk, _ in pieces), {"format": "pt"})
    digest, size = digests.new(hasher.name), len(head)
    with _durable(prepared.temporary / name, disk.NEW, rank) as file:
        hasher.write(digest, memoryview(head), file, 0)
        for number, (chunk, tensor) in enumerate(pieces):
            if number == len(pieces) // 2:
                faults.reach("write", rank)
            control.tick()
            data = tensors.to_cpu(tensor)
            hasher.write(digest, tensors.memory(data), file, size)
            size += chunk.bytes
    return {name: [size, digest.hexdigest()]}


def _write_into_full(
    prepared: Prepared, section: str, pieces: list[tuple[Chunk, torch.Tensor]], control: ControlGroup, hasher: _Hasher
) -> dict[str, list[Any]]:
    index, rank = prepared.index, control.rank
    if not index.sections[section] or not (pieces or rank == 0):
        return {}
    name, head = layout.file_of(index, section, rank), full_header(index, section)
    begins, size = _begins(index, section, len(head))
    digest = digests.new(hasher.name)
    if rank == 0:  # who wrote the header, answers for it
        digest.update(memoryview(head))
    with _durable(prepared.temporary / name, 0, rank) as file:
        for number, (chunk, tensor) in enumerate(pieces):
            if number == len(pieces) // 2:
                faults.reach("write", rank)
            control.tick()
            data, shape = tensors.to_cpu(tensor), index.sections[section][chunk.name].shape
            _write_runs(file, data, chunk, shape, begins[chunk.name], digest, hasher)
    return {name: [size, digest.hexdigest()]}


def _begins(index: Index, section: str, data: int) -> tuple[dict[str, int], int]:
    begins = {}
    for name, entry in index.sections[section].items():
        begins[name] = data
        data += entry.bytes
    return begins, data


def _write_runs(
    file: disk.Durable,
    data: torch.Tensor,
    chunk: Chunk,
    shape: tuple[int, ...],
    begin: int,
    digest: digests.Digest,
    hasher: _Hasher,
) -> None:
    """Put a box where it belongs in the whole tensor: one run where it is split on dim 0, else one a row."""
    bytes_of_chunk, done = tensors.memory(data), 0
    for offset, length in layout.runs(shape, chunk.box, layout.ITEM_BYTES[chunk.dtype]):
        hasher.write(digest, bytes_of_chunk[done : done + length], file, begin + offset)
        done += length


def _durable(path: Path, flags: int, rank: int) -> disk.Durable:
    return disk.Durable(path, flags, lambda point: faults.reach(point, rank))


def _commit(prepared: Prepared, written: list[dict[str, list[Any]]], control: ControlGroup) -> dict[str, Any] | None:
    """Rank 0 gives the folder its manifest and then its name. What it was, for the log; None on other ranks."""
    if control.rank != 0:
        return None
    temporary, request = prepared.temporary, prepared.request
    (temporary / ".probe").unlink()
    record = _manifest(prepared, written, control.world_size)
    problems = manifest.check_sizes(temporary, record)
    if problems:
        raise CheckpointError("; ".join(problems[:3]))
    faults.reach("manifest", 0)
    disk.write_new(temporary / manifest.NAME, manifest.to_bytes(record))
    faults.reach("sync", 0)
    for name in _folders(prepared.index):
        disk.sync_folder(temporary / name)
    disk.sync_folder(temporary)
    faults.reach("rename", 0)
    if _is_taken(request.final):
        disk.exchange(temporary, request.final)
    else:
        disk.publish(temporary, request.final)
    faults.reach("sync-root", 0)
    disk.sync_folder(request.final.parent)
    return {"bytes": record.bytes, "created_utc": record.created_utc}


def _manifest(prepared: Prepared, written: list[dict[str, list[Any]]], world_size: int) -> Manifest:
    request, index = prepared.request, prepared.index
    config = request.config_text
    return Manifest(
        kind=index.kind,
        step=request.step,
        epoch=request.epoch,
        samples_seen=request.samples_seen,
        save_id=request.save_id,
        run_id=request.run_id,
        parent=request.parent,
        created_utc=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        world_size=world_size,
        mesh=request.mesh,
        config_sha256=None if config is None else digests.of_bytes("sha256", config.encode()),
        model_fingerprint=model_fingerprint(index),
        versions={"shardkit": shardkit.__version__, "torch": torch.__version__, "python": platform.python_version()},
        sections=list(index.sections),
        digest=request.digest,
        files=_files(written),
    )


def _files(written: Iterable[dict[str, list[Any]]]) -> dict[str, File]:
    files: dict[str, File] = {}
    for rank, names in enumerate(written):
        for name, (size, text) in names.items():
            file = files.setdefault(name, File(size, {}))
            file.digests[rank] = text
    return files


def _after_commit(prepared: Prepared, started: float, record: dict[str, Any] | None) -> None:
    """LATEST and retention. The checkpoint is safe by now: trouble here is a warning."""
    request = prepared.request
    try:
        if prepared.temporary.exists():
            _remove_replaced(prepared)
        if request.in_series:
            faults.reach("latest", 0)
            hint = {"step": request.step, "dir": request.final.name, "save_id": request.save_id}
            disk.replace_json(request.final.parent / folder.LATEST, hint)
            faults.reach("retention", 0)
            if request.keep_last:
                kept = {request.save_id, *([request.parent] if request.parent else [])}
                retention.apply(request.final.parent, request.keep_last, request.keep_every, kept)
    except OSError as error:
        logger.warning("checkpoint: step %d is saved, but: %s.", request.step, words(error))
    size, seconds = (record or {}).get("bytes", 0), time.monotonic() - started
    logger.info("checkpoint: step %d saved in %s (%.1f MB, %.1f s)", request.step, request.final, size / 1e6, seconds)


def _remove_replaced(prepared: Prepared) -> None:
    """Delete the checkpoint that was replaced; where somebody put other files into it, keep it under another name."""
    old, final = prepared.temporary, prepared.request.final
    try:
        others = manifest.strangers(old, manifest.read(old))
    except CheckpointError:
        others = []
    if not others:
        disk.remove_folder(old)
        return
    kept = final.with_name(f"{final.name}.replaced-{prepared.request.save_id[:8]}")
    os.rename(old, kept)
    logger.warning("checkpoint: the old %s held other files (%s); it is kept as %s.", final, others[0].name, kept)


def _discard(prepared: Prepared, control: ControlGroup) -> None:
    _let_go(prepared)
    if control.rank == 0:
        shutil.rmtree(prepared.temporary, ignore_errors=True)


def _let_go(prepared: Prepared) -> None:
    if prepared.hold is not None:
        os.close(prepared.hold)
        prepared.hold = None
