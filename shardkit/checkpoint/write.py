"""Saving: a checkpoint exists entirely or not at all, and all ranks succeed or all raise the same error.

    agree       same step and same state on all ranks; then rank 0 looks for room and makes a temporary folder
    write       every rank its own bytes, hashed in the same pass, on disk before it tells so, with its digests
    commit      rank 0: manifest, folders to disk, rename, parent folder to disk; every rank learns the outcome
    after       LATEST and retention, which can fail without harm

Two agreements in all; two more where ranks hold something differently (`apart`), one more where a state that was saved
a moment ago is asked for again. Nothing here is ever written in place: the folder is temporary until it is whole.
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
from shardkit.checkpoint import apart, disk, faults, folder, layout, manifest, retention, tensors
from shardkit.checkpoint import digest as digests
from shardkit.checkpoint.layout import Box, Chunk, Index, Kind
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


@dataclass(frozen=True)
class Request:
    """Where and as what a state is saved."""

    final: Path
    """Where it lies: no link, as this rank sees it."""
    step: int
    run_id: str
    name: str = ""
    """As the script calls the folder: what ranks compare; by default the path."""
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
    unless_equal: bool = False
    """Whether nothing is written where the checkpoint that is there holds the same bytes. Equal on all ranks."""
    compare_buffers: bool = False
    """Whether to look for buffers that ranks hold differently. Equal on all ranks."""
    claim: Callable[[], None] = lambda: None
    """What rank 0 does before it writes anything; what it raises, all ranks raise as a CheckpointSaveError."""
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
    drifted: list[str] = field(default_factory=list)
    """Buffers that ranks hold differently, where that was looked for; rank 0's are saved."""
    trouble: Exception | None = None
    """What went wrong on this rank since; the write raises it."""
    record: Manifest | None = None
    """On rank 0, once it is committed."""


def save(live: Live, kind: Kind, request: Request, control: ControlGroup) -> Path:
    """The committed checkpoint. Collective. CheckpointSaveError on every rank where it failed on one."""
    prepared = prepare(live, kind, request, control)
    return request.final if prepared is None else finish(prepared, control)


def prepare(live: Live, kind: Kind, request: Request, control: ControlGroup) -> Prepared | None:
    """A save ready to be written: everything checked, the temporary folder made. Collective.

    None where `request.unless_equal` and the checkpoint that is there holds this very state.
    """
    return ready(lambda: capture(live, kind, control.rank, control.world_size), request, control)


def ready(take: Callable[[], Captured], request: Request, control: ControlGroup) -> Prepared | None:
    """As `prepare`, of the state that `take` captures. Collective."""
    opening = _Opening(request, control)
    try:
        opening.capture(take)
        if not opening.is_alike:
            opening.keep_apart()
        if not opening.is_begun:
            opening.begin_unless_saved()
    except CheckpointSaveError:
        opening.discard()
        raise
    return opening.prepared() if opening.is_begun else None


def finish(prepared: Prepared, control: ControlGroup) -> Path:
    """Write, agree, commit. Collective. The state itself is not touched: this may run beside training."""
    request, started = prepared.request, time.monotonic()
    try:
        _together(
            control,
            request,
            "write",
            lambda: _write(prepared, control),
            tell=lambda written: written,
            judge=lambda told: _commit(prepared, told),
        )
        if control.rank != 0:
            faults.reach("agree-2", control.rank)
    finally:
        _let_go(prepared.hold)
        if prepared.record is not None:
            _after_commit(prepared, prepared.record, started)
        elif control.rank == 0:
            shutil.rmtree(prepared.temporary, ignore_errors=True)
    return request.final


class _Opening:
    """A save before it is written: what all ranks agree on. Every method is collective."""

    def __init__(self, request: Request, control: ControlGroup) -> None:
        self.request, self.control = request, control
        self.is_alike = self.is_begun = False
        self._hold: int | None = None
        self._drifted: list[str] = []
        self._captured: Captured
        self._pieces: Pieces
        self._mine: dict[str, Any]

    def capture(self, take: Callable[[], Captured]) -> None:
        """Capture, and begin where all ranks hold the same, and nothing else is to be looked at."""

        def act() -> None:
            self._captured = take()
            self._pieces = _pieces_of(self._captured, self.control.rank)
            self._mine = self._details()
            faults.reach("preflight", self.control.rank)

        def tell(_: None) -> list[Any]:
            digest = digests.of_bytes("xxh3", disk.to_json(self._mine))
            return [digest, tensors.bytes_to_write(self._pieces), self.request.save_id]

        def judge(told: list[Any]) -> list[Any]:
            is_alike = len({digest for digest, *_ in told}) == 1
            is_begun = is_alike and not self.request.unless_equal
            if is_begun:
                self._begin(sum(size for _, size, _ in told))
            return [is_alike, is_begun, self.request.save_id]

        verdict = _together(self.control, self.request, "capture", act, tell, judge).verdict
        self.is_alike, self.is_begun, save_id = verdict
        self.request = replace(self.request, save_id=save_id)

    def keep_apart(self) -> None:
        """Tell one another what it is that differs. What may, is kept by each rank; anything else is an error."""
        mine = [self._mine, socket.gethostname()]
        found = _together(self.control, self.request, "compare", lambda: mine, tell=list, judge=_compared).verdict
        if found["problems"]:
            raise CheckpointSaveError(_report(self.request, "; ".join(found["problems"])))
        self._drifted = found["drifted"]
        apart.keep(self._captured, found["apart"])
        self._pieces = _pieces_of(self._captured, self.control.rank)

    def begin_unless_saved(self) -> None:
        """Begin, unless all that would be written is there already."""

        def act() -> bool:
            return self.request.unless_equal and _is_there(self.prepared(), self.control)

        def judge(told: list[Any]) -> bool:
            if all(is_there for is_there, _ in told):
                return False
            self._begin(sum(size for _, size in told))
            return True

        size = tensors.bytes_to_write(self._pieces)
        found = _together(self.control, self.request, "begin", act, lambda is_there: [is_there, size], judge)
        self.is_begun = found.verdict

    def prepared(self) -> Prepared:
        """What `finish` takes."""
        captured, temporary = self._captured, folder.temporary_folder(self.request.final, self.request.save_id)
        plain = captured.index, captured.common, captured.own
        return Prepared(self.request, *plain, self._pieces, temporary, self._hold, self._drifted)

    def discard(self) -> None:
        """Remove what was begun."""
        if self._hold is not None:
            _let_go(self._hold)
            shutil.rmtree(folder.temporary_folder(self.request.final, self.request.save_id), ignore_errors=True)

    def _details(self) -> dict[str, Any]:
        """What must be, or may not be, the same on all ranks: of everything a digest."""
        request, captured = self.request, self._captured
        several = self.control.world_size > 1
        return {
            "request": {
                "step": request.step,
                "folder": request.name or str(request.final),
                "kind": captured.index.kind,
            },
            "sections": fingerprints(captured),
            "items": apart.of_items(captured) if several else {},
            "buffers": apart.of_tensors(captured.buffers) if several and request.compare_buffers else {},
        }

    def _begin(self, needed: int) -> None:
        """On rank 0: make the temporary folder, with what all ranks write into."""
        request, index = self.request, self._captured.index
        request.claim()
        _look_for_room(request.final, needed)
        faults.reach("temporary", 0)
        _refuse_taken(request)
        folder.clean_debris(request.final.parent, None if request.in_series else request.final.name)
        temporary = folder.temporary_folder(request.final, request.save_id)
        temporary.mkdir()
        self._hold = folder.hold(temporary)
        for name in (*(section for section, entries in index.sections.items() if entries), "state"):
            (temporary / name).mkdir()
        if index.kind == "full":
            for section in index.sections:
                _begin_full_file(index, temporary, section)
        (temporary / ".probe").touch()


def _pieces_of(captured: Captured, rank: int) -> Pieces:
    """What this rank writes."""
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


def _together(
    control: ControlGroup,
    request: Request,
    phase: str,
    action: Callable[[], Result],
    tell: Callable[[Result], Any] = lambda result: None,
    judge: Callable[[list[Any]], Any] = lambda told: None,
) -> Attempt[Result]:
    """What came of the action. Where it failed on one rank, all raise the same CheckpointSaveError.

    `judge` may act as well: it runs on rank 0 once the action has succeeded on all ranks.
    """

    def judge_as_rank_0(told: list[Any]) -> Any:
        try:
            return judge(told)
        except Exception as error:
            who = f"rank 0 (host {socket.gethostname()}): " if control.world_size > 1 else ""
            raise CheckpointError(who + words(error).removeprefix("checkpoint: ").rstrip(".")) from error

    try:
        attempt = control.attempt(action, tell, judge_as_rank_0)
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


def _compared(told: list[Any]) -> dict[str, Any]:
    """What ranks must have alike and have not; what each is to keep for itself; which buffers differ."""
    hosts = [f"rank {rank} (host {host})" for rank, (_, host) in enumerate(told)]
    given = [details for details, _ in told]
    problems = _different_requests([one["request"] for one in given], hosts)
    problems += _different_tensors([one["sections"] for one in given], hosts)
    return {
        "problems": problems[:3],
        "apart": apart.differing([one["items"] for one in given]),
        "drifted": apart.differing([one["buffers"] for one in given]),
    }


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


def _refuse_taken(request: Request) -> None:
    """FileExistsError where something has the name that may not be replaced."""
    final = request.final
    if not _is_taken(final):
        return
    if not request.replace:
        raise FileExistsError(17, "a checkpoint of this name exists, and is never written again", str(final))
    if not (final / manifest.NAME).exists():
        there = "a folder with other things in it" if final.is_dir() else "a file"
        raise FileExistsError(17, f"{there}; give another name", str(final))


def fingerprints(captured: Captured) -> dict[str, str]:
    """By section: the same for two ranks whose tensors in it have equal names, dtypes, shapes and placements.

    Without those that ranks may have differently.
    """
    value = layout.index_to_json(captured.index)
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


def model_fingerprint(index: Index) -> str:
    """The same for two runs whose models' tensors have equal names, dtypes and shapes, whatever their placement."""
    lines = sorted(
        f"{section}:{name}:{entry.dtype}:{list(entry.shape)}"
        for section, entries in index.sections.items()
        if section.startswith("model")
        for name, entry in entries.items()
    )
    return digests.of_bytes("sha256", "\n".join(lines).encode())


def _is_taken(final: Path) -> bool:
    return final.exists() and (not final.is_dir() or any(final.iterdir()))


def full_header(index: Index, section: str) -> bytes:
    """The header of the one file that all ranks write a section into."""
    return layout.header(((name, e.dtype, e.shape) for name, e in index.sections[section].items()), {"format": "pt"})


def _begin_full_file(index: Index, temporary: Path, section: str) -> None:
    if not index.sections[section]:
        return
    head = full_header(index, section)
    size = len(head) + sum(entry.bytes for entry in index.sections[section].values())
    disk.write_new(temporary / layout.file_of(index, section, 0), head, size)


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
    wait_until_seen(prepared.temporary)
    if prepared.pieces[layout.OWN]:
        (prepared.temporary / layout.OWN).mkdir(exist_ok=True)
    written = _put_all(prepared, control, _Disk(control.rank))
    faults.reach("agree-1", control.rank)
    return written


def _is_there(prepared: Prepared, control: ControlGroup) -> bool:
    """Whether the checkpoint that has the name holds, of this rank, just what would be written."""
    request = prepared.request
    try:
        found = folder.inspect(request.final) if control.rank == 0 else manifest.read(request.final)
    except (CheckpointError, OSError):
        return False
    if (found.world_size, found.digest) != (control.world_size, request.digest):
        return False
    there = {
        name: [file.bytes, file.digests[control.rank]]
        for name, file in found.files.items()
        if control.rank in file.digests
    }
    return there == _put_all(prepared, control, _Nowhere())


class _Disk:
    """Where a save is written."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def open(self, path: Path, flags: int = 0) -> disk.Durable:
        return disk.Durable(path, flags, self.reach)

    def reach(self, point: str) -> None:
        faults.reach(point, self.rank)


class _Nowhere:
    """Takes what would be written, for its digests."""

    def open(self, path: Path, flags: int = 0) -> "_Nowhere":
        return self

    def reach(self, point: str) -> None: ...

    def put(self, data: memoryview, offset: int) -> None: ...

    def __enter__(self) -> "_Nowhere":
        return self

    def __exit__(self, *exception: object) -> None: ...


def _put_all(prepared: Prepared, control: ControlGroup, sink: _Disk | _Nowhere) -> dict[str, list[Any]]:
    """Put everything of this rank there; {file: [bytes, digest]}."""
    written: dict[str, list[Any]] = {}
    with _Hasher(prepared.request.digest) as hasher:
        for section, pieces in prepared.pieces.items():
            if prepared.index.kind == "full" and section != layout.OWN:
                written.update(_put_into_full(prepared, section, pieces, control, hasher, sink))
            elif pieces:
                written.update(_put_own_file(prepared, section, pieces, control, hasher, sink))
    for name, data in _json_files(prepared, control.rank).items():
        with sink.open(prepared.temporary / name, disk.NEW) as file:
            file.put(memoryview(data), 0)
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

    def write(self, digest: digests.Digest, data: memoryview, file: disk.Durable | _Nowhere, offset: int) -> None:
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


def _put_own_file(
    prepared: Prepared,
    section: str,
    pieces: list[tuple[Chunk, torch.Tensor]],
    control: ControlGroup,
    hasher: _Hasher,
    sink: _Disk | _Nowhere,
) -> dict[str, list[Any]]:
    rank, size_of_world = control.rank, control.world_size
    is_own = section == layout.OWN
    name = layout.own_file(rank, size_of_world) if is_own else layout.file_of(prepared.index, section, rank)
    head = layout.header(((chunk.name, chunk.dtype, chunk.box.sizes) for chunk, _ in pieces), {"format": "pt"})
    digest, size = digests.new(hasher.name), len(head)
    with sink.open(prepared.temporary / name, disk.NEW) as file:
        hasher.write(digest, memoryview(head), file, 0)
        for number, (chunk, tensor) in enumerate(pieces):
            if number == len(pieces) // 2:
                sink.reach("write")
            control.tick()
            data = tensors.to_cpu(tensor)
            hasher.write(digest, tensors.memory(data), file, size)
            size += chunk.bytes
    return {name: [size, digest.hexdigest()]}


def _put_into_full(
    prepared: Prepared,
    section: str,
    pieces: list[tuple[Chunk, torch.Tensor]],
    control: ControlGroup,
    hasher: _Hasher,
    sink: _Disk | _Nowhere,
) -> dict[str, list[Any]]:
    index, rank = prepared.index, control.rank
    if not index.sections[section] or not (pieces or rank == 0):
        return {}
    name, head = layout.file_of(index, section, rank), full_header(index, section)
    begins, size = _begins(index, section, len(head))
    digest = digests.new(hasher.name)
    if rank == 0:  # who wrote the header, answers for it
        digest.update(memoryview(head))
    with sink.open(prepared.temporary / name) as file:
        for number, (chunk, tensor) in enumerate(pieces):
            if number == len(pieces) // 2:
                sink.reach("write")
            control.tick()
            data, shape = tensors.to_cpu(tensor), index.sections[section][chunk.name].shape
            _put_runs(file, data, chunk, shape, begins[chunk.name], digest, hasher)
    return {name: [size, digest.hexdigest()]}


def _begins(index: Index, section: str, data: int) -> tuple[dict[str, int], int]:
    begins = {}
    for name, entry in index.sections[section].items():
        begins[name] = data
        data += entry.bytes
    return begins, data


def _put_runs(
    file: disk.Durable | _Nowhere,
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


def _commit(prepared: Prepared, written: list[dict[str, list[Any]]]) -> None:
    """On rank 0: give the folder its manifest and then its name."""
    temporary, request = prepared.temporary, prepared.request
    (temporary / ".probe").unlink()
    record = _manifest(prepared, written)
    problems = manifest.check_sizes(temporary, record)
    if problems:
        raise CheckpointError("; ".join(problems[:3]))
    faults.reach("manifest", 0)
    disk.write_new(temporary / manifest.NAME, manifest.to_bytes(record))
    faults.reach("sync", 0)
    for name in sorted({name.rpartition("/")[0] for name in record.files}):
        disk.sync_folder(temporary / name)
    faults.reach("rename", 0)
    if request.final.is_symlink():  # a step's name belongs to the series; what a link leads to stays where it is
        request.final.unlink()
    if _is_taken(request.final):
        disk.exchange(temporary, request.final)
    else:
        disk.publish(temporary, request.final)
    prepared.record = record
    faults.reach("sync-root", 0)
    disk.sync_folder(request.final.parent)
    faults.reach("agree-2", 0)


def _manifest(prepared: Prepared, written: list[dict[str, list[Any]]]) -> Manifest:
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
        world_size=len(written),
        mesh=request.mesh,
        config_sha256=None if config is None else digests.of_bytes("sha256", config.encode()),
        model_fingerprint=model_fingerprint(index),
        versions={"shardkit": shardkit.__version__, "torch": torch.__version__, "python": platform.python_version()},
        sections=list(index.sections),
        digest=request.digest,
        files=_files(written),
        version=_version(prepared.common),
    )


def _version(common: dict[str, Any]) -> int:
    """The oldest format version whose readers take everything that is there."""
    grown = any({"globals", "extra", "is_whole"} & {*optimizer} for optimizer in common["optimizers"])
    return manifest.VERSION if grown or "apart" in common else manifest.PLAIN_VERSION


def _files(written: Iterable[dict[str, list[Any]]]) -> dict[str, File]:
    files: dict[str, File] = {}
    for rank, names in enumerate(written):
        for name, (size, text) in names.items():
            file = files.setdefault(name, File(size, {}))
            file.digests[rank] = text
    return files


def _after_commit(prepared: Prepared, record: Manifest, started: float) -> None:
    """On rank 0: LATEST and retention. The checkpoint is safe by now: trouble here is a warning."""
    request = prepared.request
    try:
        if prepared.temporary.exists():
            _remove_replaced(prepared)
        if request.in_series:
            faults.reach("latest", 0)
            folder.write_latest(request.final.parent, request.final, record)
            faults.reach("retention", 0)
            if request.keep_last:
                kept = {request.save_id, *([request.parent] if request.parent else [])}
                retention.apply(request.final.parent, request.keep_last, request.keep_every, kept)
    except OSError as error:
        logger.warning("checkpoint: step %d is saved, but: %s.", request.step, words(error))
    seconds = time.monotonic() - started
    where, size = request.final, record.bytes / 1e6
    logger.info("checkpoint: step %d saved in %s (%.1f MB, %.1f s)", request.step, where, size, seconds)


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


def _let_go(hold: int | None) -> None:
    if hold is not None:
        os.close(hold)
