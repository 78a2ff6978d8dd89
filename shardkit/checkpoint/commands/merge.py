"""Exports the models of a checkpoint: its files are read once, sequentially, hashed, and copied to their places.

Extra memory is one tensor piece. If the dtype does not change, bytes are copied and torch is not imported.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shardkit.checkpoint.exporting import export
from shardkit.checkpoint.exporting.export import ExportFile, Opened
from shardkit.checkpoint.files import disk, layout, state_json
from shardkit.checkpoint.files.layout import ITEM_BYTES, Stored
from shardkit.checkpoint.files.verify import Checkpoint, Files, Span, hash_file
from shardkit.errors import CheckpointError
from shardkit.wording import first_few

_MODEL = re.compile(r"model_\d+")
_FLOATS = ("F64", "F32", "F16", "BF16")

OnBytes = Callable[[int], None]


def merge(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
    on_bytes: OnBytes = lambda count: None,
) -> dict[Path, list[ExportFile]]:
    """Write every model of a checkpoint as safetensors, and return the files by folder. If any digest differs, nothing
    is published. `dtype`: of `export.dtype_named`, for floating-point tensors; None: as saved.

    The first model is written to `folder`, further ones to `folder/model_1`, ... `on_bytes` is called with the number
    of bytes just read.
    """
    folders = _folders(checkpoint, folder)
    if not any(checkpoint.index.sections[name] for name in folders):
        added = _of_hooks(checkpoint)
        reason = f"its models are in files of the script's save hook (got {added})" if added else "contains no model"
        raise CheckpointError(f"checkpoint: {checkpoint.path}: {reason}; there is nothing to merge.")
    written = {}
    with ExitStack() as stack:
        for section, where in folders.items():
            written[where] = _begin(checkpoint, section, where, dtype, max_shard_bytes)
            stack.callback(export.discard, written[where])
            _copy(checkpoint, section, written[where], on_bytes)
        for opened in written.values():  # only after the digests of all models have been checked
            export.publish(opened)
    return {where: opened.files for where, opened in written.items()}


def _folders(checkpoint: Checkpoint, folder: Path) -> dict[str, Path]:
    """{section: the folder for the files of this model}."""
    models = [name for name in checkpoint.index.sections if layout.is_model(name)]
    return {name: folder if name == "model" else folder / name for name in models}


def notes(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """What an export leaves out, and what it leaves in the folder. Reads the checkpoint."""
    found = []
    if before := _models_before(checkpoint, folder):
        found.append(
            f"models of an earlier export stay, since this checkpoint has no such models (got {before}); delete what "
            "you do not need."
        )
    if left_out := _values_left_out(checkpoint):
        found.append(f"extra state that is no tensor was not exported (got {left_out}).")
    if added := _of_hooks(checkpoint):
        found.append(
            f"files of the script's save hook were not exported (got {added} in {checkpoint.path}); if the hook saves "
            "a model, it is in these files."
        )
    return found


def _models_before(checkpoint: Checkpoint, folder: Path) -> str:
    """Names of the folders with a further model of an earlier export, which this one does not have; empty without
    any. They stay: somebody else may have exported into them."""
    written = _folders(checkpoint, folder).values()
    found = [path for path in sorted(folder.glob("model_*")) if _MODEL.fullmatch(path.name) and path not in written]
    return first_few([path for path in found if export.stale(export.names_in(path), "model", set())], 4)


def _of_hooks(checkpoint: Checkpoint) -> str:
    """Names of the files that save hooks added, shortened; empty without any. A model that a hook saved is in these
    files, and is not merged."""
    return first_few(sorted(checkpoint.manifest.additions), 4)


def _values_left_out(checkpoint: Checkpoint) -> str:
    """Names of the values in the models' state dicts that are no tensors, shortened; empty without any. An export holds
    tensors only."""
    objects = checkpoint.common()["objects"]
    names = []
    for section in _folders(checkpoint, Path()):
        kept = state_json.extra_state(section)
        names += [f"{section}: {name}" for name in objects.get(kept, [kept] if kept in checkpoint.apart else [])]
    return first_few(names, 4)


def model_bytes(checkpoint: Checkpoint) -> int:
    """The number of bytes that `merge` reads."""
    return sum(file.bytes for name, file in checkpoint.manifest.files.items() if name.startswith("model"))


def _begin(checkpoint: Checkpoint, section: str, folder: Path, target: str | None, limit: int) -> Opened:
    entries, ties = checkpoint.index.sections[section], checkpoint.index.aliases.get(section, {})
    kinds = {name: target if target and entry.dtype in _FLOATS else entry.dtype for name, entry in entries.items()}
    shapes = {name: (kinds[name], entry.shape) for name, entry in entries.items()}
    return export.begin(folder, export.plan(shapes, ties, limit))


def _copy(checkpoint: Checkpoint, section: str, opened: Opened, on_bytes: OnBytes) -> None:
    dtypes = {name: entry.dtype for name, entry in checkpoint.index.sections[section].items()}
    with _Output(opened, dtypes, on_bytes) as output, Files(checkpoint) as files:
        for name, file in checkpoint.manifest.files.items():
            if name.split("/")[0] != section:
                continue
            for writer in sorted(file.digests):
                hash_file(files, name, writer, output.take)
                output.flush()


class _Output:
    """The files that are written. `take` returns memory for a piece; its contents are written at the next `take` or
    `flush`."""

    def __init__(self, opened: Opened, dtypes: Mapping[str, str], on_bytes: OnBytes) -> None:
        """`dtypes`: of the saved tensors, by name."""
        self._dtypes, self._on_bytes = dtypes, on_bytes
        self._where = {name: (file.name, place) for file in opened.files for name, place in file.places.items()}
        self._files = {file.name: disk.Durable(opened.temporary / file.name) for file in opened.files}
        self._stack = ExitStack()
        self._memory = bytearray()
        self._waiting: Span | None = None

    def __enter__(self) -> "_Output":
        with ExitStack() as stack:
            for file in self._files.values():
                stack.enter_context(file)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def take(self, span: Span) -> memoryview | None:
        """Memory for a piece of a tensor; None for a header."""
        self.flush()
        self._on_bytes(span.bytes)
        if span.name is None or not span.bytes:
            return None
        if len(self._memory) < span.bytes:
            self._memory = bytearray(span.bytes)
        self._waiting = span
        return memoryview(self._memory)[: span.bytes]

    def flush(self) -> None:
        """Write the piece whose memory `take` returned last."""
        if self._waiting is None:
            return
        span, self._waiting = self._waiting, None
        assert span.name is not None and span.box is not None
        (file, place), dtype = self._where[span.name], self._dtypes[span.name]
        data, done = memoryview(self._memory)[: span.bytes], 0
        for offset, length in layout.runs(place.shape, span.box, ITEM_BYTES[dtype]):
            _put(self._files[file], data[done : done + length], place, offset // ITEM_BYTES[dtype], dtype)
            done += length


def _put(file: disk.Durable, data: memoryview, place: Stored, first: int, dtype: str) -> None:
    """Write elements of a tensor, from element number `first` on, cast to the dtype of the file."""
    begin, item = place.begin + first * ITEM_BYTES[place.dtype], ITEM_BYTES[dtype]
    if place.dtype == dtype:
        file.put(data, begin)
        return
    at_once = disk.BLOCK_BYTES // item * item
    for low in range(0, len(data), at_once):
        cast = _cast(data[low : low + at_once], dtype, place.dtype)
        file.put(cast, begin + low // item * ITEM_BYTES[place.dtype])


def _cast(data: memoryview, source: str, target: str) -> memoryview:
    import torch

    from shardkit.checkpoint.states import tensors

    block = torch.frombuffer(data, dtype=tensors.TORCH_DTYPES[source]).to(tensors.TORCH_DTYPES[target])
    return tensors.memory(block)
