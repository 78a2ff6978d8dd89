"""save_model: every rank writes its parts of a model directly into safetensors files.

Nothing is gathered: all ranks compute the same plan (`export.plan` is a pure function), rank 0 makes the files, each
rank casts and writes block by block, and rank 0 renames the files. The extra memory is one block, and one tensor piece
if a piece is not contiguous.
"""

import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit import sizes
from shardkit.checkpoint import faults
from shardkit.checkpoint.exporting import export
from shardkit.checkpoint.exporting import export_to_store as into_store
from shardkit.checkpoint.exporting.export import ExportFile, Opened
from shardkit.checkpoint.exporting.exported_parts import Part, parts_of
from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk, layout
from shardkit.checkpoint.files.layout import Chunk, Index, Mesh, Stored
from shardkit.checkpoint.saving import put
from shardkit.checkpoint.states import per_rank, replicas, state, tensors
from shardkit.checkpoint.states.replicas import Drift
from shardkit.distributed.control import Attempt, ControlGroup, LostRank, Result
from shardkit.distributed.tensors import outside_inference_mode
from shardkit.errors import CheckpointError, CheckpointSaveError
from shardkit.log import get_logger
from shardkit.storage.url import Place, Url
from shardkit.wording import counted

log = get_logger(__name__)

# Without `dtype`, 16-bit floats are saved in fp32. fp64, integers and 8-bit floats keep their dtype.
_WIDENED = {torch.float16, torch.bfloat16, torch.float32}
_CAST = {*_WIDENED, torch.float64}


@outside_inference_mode()
def save(
    model: nn.Module,
    folder: Place,
    control: ControlGroup,
    max_shard_size: str | int = "5GB",
    dtype: str | torch.dtype | None = None,
    compare_buffers: bool = False,
) -> Drift:
    """Write the whole model as safetensors files that torch, Transformers and peft can load. Collective.

    In fp32 unless `dtype` is given; tied weights once; of a peft model only its adapters. If one rank fails, all raise
    CheckpointSaveError, and an earlier export in the folder stays complete.

    Returns the names of tensors that differ between ranks (buffers only with `compare_buffers`). Rank 0's are saved.
    """
    limit = export.size_in_bytes(max_shard_size)
    wanted = None if dtype is None else tensors.TORCH_DTYPES[export.dtype_named(dtype, "save_model")]
    drift = Drift()
    for part in _together(control, folder, lambda: parts_of(model, folder)).own or []:
        buffers = part.buffers if compare_buffers and not state.gets_buffers_of_rank_0(model) else set()
        found = _save_files(part, buffers, control, limit, wanted)
        drift.buffers += found.buffers
        drift.weights += found.weights
    return drift


def _save_files(
    part: Part, compared_buffers: set[str], control: ControlGroup, limit: int, wanted: torch.dtype | None
) -> Drift:
    """Writes one folder. Returns the weights, and those of `compared_buffers`, that differ between ranks."""
    index = _together(control, part.folder, lambda: _index(part, control.world_size)).own
    assert index is not None
    targets = {name: _target(tensor.dtype, wanted) for name, tensor in part.tensors.items()}
    shapes = {name: (tensors.DTYPES[targets[name]], entry.shape) for name, entry in index.sections["model"].items()}
    limit = max(limit, 1 << 62) if part.one_file else limit
    files = export.plan(shapes, part.ties, limit, part.stem)
    _refuse_different(part, files, control)
    drift = _drift(part, compared_buffers, control)
    replicas.leave_to_first(index, {"model": drift.weights})
    write_configs = partial(part.write_configs, dtype=_only_float(targets.values()))
    one = _Export(part, index, files, write_configs, control)
    if isinstance(part.folder, Url):
        one.upload(part.folder)
    else:
        one.write(part.folder)
    size = sizes.in_words(export.total_bytes(files))
    log.info("model saved in %s (%s, %s)", part.folder, size, counted(len(files), "file"))
    return drift


@dataclass(frozen=True)
class _Export:
    """What all ranks write into one folder."""

    part: Part
    index: Index
    files: list[ExportFile]
    write_configs: Callable[[Path], None]
    control: ControlGroup

    def write(self, folder: Path) -> None:
        """Every rank writes its parts into files that rank 0 has made and renames at the end."""
        on_rank_0 = partial(_on_rank_0, self.control, folder)
        opened: list[Opened] = []
        try:
            tag, temporary = on_rank_0(lambda: _begin(folder, self.part.stem, self.files, opened))
            on_rank_0(lambda: self.write_configs(opened[0].temporary))
            files = export.tagged(self.files, tag)
            _together(self.control, folder, lambda: self._write_pieces(files, Path(temporary)))
            on_rank_0(lambda: export.publish(opened[0]))
        except CheckpointSaveError:
            for mine in opened:
                export.discard(mine)
            raise

    def upload(self, url: Url) -> None:
        """Every rank uploads its pieces; then each rank builds some of the files from the pieces of all."""
        index, control = self.index, self.control
        together, on_rank_0 = partial(_together, control, url), partial(_on_rank_0, control, url)
        tag, export_id = on_rank_0(lambda: [into_store.begin(url, self.files), uuid.uuid4().hex])
        files = export.tagged(self.files, tag)
        unlisted = files if len(files) > 1 else []
        """Files in no index, which are deleted if this fails."""
        places = {name: place for file in files for name, place in file.places.items()}
        pieces = self._pieces()
        mine = into_store.pieces_of(url, export_id, control.rank)
        size, built_here = control.world_size, files[control.rank :: control.world_size]
        try:
            together(lambda: into_store.put_pieces(mine, pieces, places, control.work))
            on_rank_0(lambda: into_store.put_files(url, self.write_configs))
            together(lambda: into_store.assemble(url, export_id, index, size, files, built_here))
            on_rank_0(lambda: into_store.publish(url, self.part.stem, files))
            unlisted = []
            on_rank_0(lambda: into_store.discard(url, export_id))
        except CheckpointSaveError:
            if control.rank == 0:
                with suppress(OSError):
                    into_store.discard(url, export_id, unlisted)
            raise

    def _pieces(self) -> list[tuple[Chunk, torch.Tensor]]:
        """Those of this rank, which the progress counts from now on."""
        pieces = tensors.pieces_to_write(self.index, "model", self.part.tensors, self.control.rank)
        self.control.work.expect(tensors.bytes_to_write({"model": pieces}))
        return pieces

    def _write_pieces(self, files: list[ExportFile], temporary: Path) -> None:
        """Write the pieces of this rank durably."""
        put.wait_until_seen(temporary)
        where = {name: (file.name, place) for file in files for name, place in file.places.items()}
        opened: dict[str, disk.Durable] = {}
        pieces = self._pieces()
        with ExitStack() as stack:
            for chunk, piece in pieces:
                self.control.work()
                faults.reach("export-write", self.control.rank)
                name, place = where[chunk.name]
                if name not in opened:
                    opened[name] = stack.enter_context(disk.Durable(temporary / name))
                _write_piece(opened[name], chunk, piece, place)
                self.control.work(chunk.bytes)


def _begin(folder: Path, stem: str, files: list[ExportFile], opened: list[Opened]) -> list[str]:
    """Makes the files; returns the suffix of their names, and their temporary folder."""
    opened.append(export.begin(folder, files, stem))
    return [opened[0].tag, str(opened[0].temporary)]


def _index(part: Part, world_size: int) -> Index:
    """The index of a part's tensors, from which `layout` computes the pieces of each rank."""
    index = Index("full", world_size)
    everyone = Mesh((world_size,))
    entries = index.sections.setdefault("model", {})
    for name, tensor in part.tensors.items():
        if tensor.is_meta:
            raise CheckpointError(f"{name}: has no values yet (meta device); prepare() the model first")
        # Replicas of a buffer may differ (batch norm): rank 0 writes it alone, so that the result is not a mix.
        holders = replicas.RANK_0 if name in part.buffers else everyone
        entries[name] = tensors.entry_of(tensor, index, holders, name)
    index.sort()
    return index


def _drift(part: Part, compared_buffers: set[str], control: ControlGroup) -> Drift:
    """The tensors that differ between ranks. One digest of all is compared first, and each only if it differs."""
    if control.world_size == 1:
        return Drift()
    buffers = replicas.of_whole({name: part.tensors[name] for name in sorted(compared_buffers & {*part.tensors})})
    weights = {name: tensor for name, tensor in part.tensors.items() if name not in part.buffers}
    copies = replicas.copies_of({"model": weights})
    if control.decide([per_rank.together(buffers), copies.by_first_rank()], _are_alike):
        return Drift()
    parted = control.decide(copies.of, replicas.differing)
    return Drift(control.decide(buffers, per_rank.differing), parted.get("model", []))


def _are_alike(answers: list[list[Any]]) -> bool:
    return len({buffers for buffers, _ in answers}) == 1 and replicas.are_alike(copies for _, copies in answers)


def _target(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    if wanted is not None:
        return wanted if dtype in _CAST else dtype
    return torch.float32 if dtype in _WIDENED else dtype


def _refuse_different(part: Part, files: list[ExportFile], control: ControlGroup) -> None:
    plan = disk.to_json([[file.name, file.header.hex()] for file in files])
    mine = [str(part.folder), digests.of_bytes("xxh3", plan)]
    problem = _together(
        control, part.folder, lambda: mine, answer=list, judge=partial(_difference, part.folder)
    ).verdict
    if problem:
        raise CheckpointSaveError(problem)


def _difference(folder: Place, answers: list[list[str]]) -> str | None:
    if any(other != answers[0][0] for other, _ in answers):
        return f"save_model: the ranks give different folders (got {[other for other, _ in answers]}); give the same."
    if any(other != answers[0] for other in answers):
        return f"save_model: {folder}: the models differ between ranks; call it on all ranks with the same model."
    return None


def _only_float(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The floating-point dtype among these if it is only one; else None."""
    floats = {dtype for dtype in dtypes if dtype.is_floating_point}
    return floats.pop() if len(floats) == 1 else None


def _write_piece(file: disk.Durable, chunk: Chunk, piece: torch.Tensor, place: Stored) -> None:
    """Cast a piece to the dtype of its file and write it to its place in the file, a block at a time."""
    flat, target = piece.detach().contiguous().view(-1), tensors.TORCH_DTYPES[place.dtype]
    item, done = layout.ITEM_BYTES[place.dtype], 0
    at_once = disk.BLOCK_BYTES // max(item, flat.element_size())
    for offset, length in layout.runs(place.shape, chunk.box, item):
        count = length // item
        for low in range(0, count, at_once):
            block = flat[done + low : done + min(low + at_once, count)].to("cpu", target)
            file.put(tensors.memory(block), place.begin + offset + low * item)
        done += count


def _together(
    control: ControlGroup,
    folder: Place,
    action: Callable[[], Result],
    answer: Callable[[Result], Any] = lambda result: None,
    judge: Callable[[list[Any]], Any] = lambda answers: None,
) -> Attempt[Result]:
    """The result of the action. Collective. If it failed on one rank, all raise the same error."""
    try:
        attempt = control.attempt(action, answer, judge)
    except LostRank as error:
        raise CheckpointSaveError(_report(folder, str(error))) from error
    if attempt.failure:
        raise CheckpointSaveError(_report(folder, attempt.failure)) from attempt.error
    return attempt


def _on_rank_0(control: ControlGroup, folder: Place, action: Callable[[], Any]) -> Any:
    """What the action returns on rank 0, a JSON value, on all ranks. Collective; as `_together` if it fails."""
    mine = action if control.rank == 0 else lambda: None
    return _together(control, folder, mine, answer=lambda found: found, judge=lambda answers: answers[0]).verdict


def _report(folder: Place, reason: str) -> str:
    return f"save_model: {folder}: {reason}. The previous contents of the folder are unchanged."
