"""The end of a save, on rank 0: manifest, fsync of the folders, rename, fsync of the parent folder; then LATEST and
retention."""

import os
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import torch

import shardkit
from shardkit import sizes, values
from shardkit.checkpoint import faults
from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk, folder, manifest
from shardkit.checkpoint.files.layout import Index, is_model
from shardkit.checkpoint.files.manifest import File, Manifest
from shardkit.checkpoint.saving import in_store, nan, retention
from shardkit.checkpoint.saving.additions import PROBE
from shardkit.checkpoint.saving.save_request import PreparedSave, SaveRequest
from shardkit.errors import CheckpointError
from shardkit.log import get_logger
from shardkit.storage.url import Place, Url
from shardkit.wording import words

log = get_logger(__name__)


def commit(prepared: PreparedSave, written: list[tuple[dict[str, list[Any]], list[str]]]) -> None:
    """On rank 0: write the manifest, then rename the folder. In a store, writing the manifest is the commit.

    `written`: of each rank the files, as {name: [bytes, digest]}, and the names of weights that are NaN.
    """
    temporary, final = prepared.temporary, prepared.request.final
    record = _manifest(prepared, written)
    if isinstance(temporary, Path):
        assert isinstance(final, Path)
        _commit_on_disk(temporary, final, record)
    else:
        _refuse_wrong_sizes(final, record)
        faults.reach("manifest", 0)
        in_store.commit(prepared.attempt, record)
    prepared.record = record
    if isinstance(final, Path):
        faults.reach("sync-root", 0)
        disk.sync_folder(final.parent)
    faults.reach("agree-2", 0)


def _refuse_wrong_sizes(folder: Place, record: Manifest) -> None:
    problems = manifest.check_sizes(folder, record)
    if problems:
        raise CheckpointError("; ".join(problems[:3]))


def _commit_on_disk(temporary: Path, final: Path, record: Manifest) -> None:
    (temporary / PROBE).unlink()
    _refuse_wrong_sizes(temporary, record)
    faults.reach("manifest", 0)
    disk.write_new(temporary / manifest.NAME, manifest.to_bytes(record))
    faults.reach("sync", 0)
    for folder_name in sorted({str(above) for name in record.every_file for above in PurePosixPath(name).parents}):
        disk.sync_folder(temporary / folder_name)
    faults.reach("rename", 0)
    if final.is_symlink():  # it replaces a link; the target of the link stays unchanged
        disk.exchange(temporary, final)
    elif is_taken(final):
        with suppress(OSError):  # without links they are moved after the exchange
            _link_others(final, temporary)
        disk.exchange(temporary, final)
    else:
        disk.publish(temporary, final)


def after_commit(prepared: PreparedSave, record: Manifest, started: float) -> None:
    """On rank 0: LATEST and retention. The checkpoint is already committed, so errors here are warnings: raised on
    rank 0 alone, they would leave the others in the next collective."""
    request = prepared.request
    try:
        if isinstance(prepared.temporary, Path) and os.path.lexists(prepared.temporary):
            assert isinstance(request.final, Path)
            _remove_replaced(prepared.temporary, request.final, request.save_id)
        if request.in_series:
            _update_series(request, record)
        nan.warn(request.final, record, "saved")
        if prepared.attempt is not None:
            in_store.tidy(prepared.attempt)
    except (CheckpointError, OSError) as error:
        log.warning("checkpoint: step %d is saved, but cleaning up failed: %s.", request.step, words(error).rstrip("."))
    seconds = time.monotonic() - started
    size = sizes.in_words(record.bytes)
    log.info("checkpoint: step %d saved in %s (%s, %.1f s)", request.step, request.where, size, seconds)


def _update_series(request: SaveRequest, record: Manifest) -> None:
    """LATEST and retention. Where the disk is too full for LATEST, retention frees the space for it."""
    root = request.final.parent
    faults.reach("latest", 0)
    try:
        folder.write_latest(root, request.final, record)
        is_written = True
    except OSError:
        is_written = False
    faults.reach("retention", 0)
    if request.keep_last:
        kept = {request.save_id, *([request.parent] if request.parent else [])}
        retention.apply(root, request.keep_last, request.keep_every, kept)
    if not is_written:
        folder.write_latest(root, request.final, record)


def _link_others(old: Path, new: Path) -> None:
    """Give the new checkpoint the files in the replaced one that are not its own, so that a crash right after the
    exchange does not lose them. OSError where the file system refuses a link."""
    for name in manifest.strangers(old):
        if _may_take(new, name):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(old / name, new / name, follow_symlinks=False)
            disk.sync_folder((new / name).parent)


def _remove_replaced(old: Path, final: Path, save_id: str) -> None:
    """Delete the checkpoint, or the link to one, that was replaced. Files in it that are not its own stay in the folder
    of that name; where the new one cannot have such a file, the old folder is renamed instead."""
    if old.is_symlink():
        old.unlink()
        return
    others = [name for name in manifest.strangers(old) if not _moved(old, final, name)]
    if not others:
        folder.remove(old)
        return
    kept = final.with_name(f"{final.name}.replaced-{save_id[:8]}")
    os.rename(old, kept)
    log.warning(
        "checkpoint: the replaced checkpoint %s contained other files whose names the new one has, or could have (%s); "
        "it was renamed to %s.",
        final,
        others[0],
        kept,
    )


def _moved(old: Path, final: Path, name: str) -> bool:
    """Moves a file of the script to the checkpoint that has replaced its own, where that may take it, and has not."""
    if os.path.lexists(final / name) and os.path.samestat(os.lstat(old / name), os.lstat(final / name)):
        return True
    if not _may_take(final, name):
        return False
    (final / name).parent.mkdir(parents=True, exist_ok=True)
    os.rename(old / name, final / name)
    return True


def _may_take(new: Path, name: str) -> bool:
    """Whether a checkpoint may get a file of this name from the one that it replaces: it has none, and would not be
    taken for a mix of two."""
    target = new / name
    nearest = next(parent for parent in target.parents if os.path.lexists(parent))
    return not manifest.FILE_NAME.fullmatch(name) and not os.path.lexists(target) and nearest.is_dir()


def is_taken(final: Path) -> bool:
    return final.exists() and (not final.is_dir() or any(final.iterdir()))


def _manifest(prepared: PreparedSave, written: list[tuple[dict[str, list[Any]], list[str]]]) -> Manifest:
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
        created_utc=_time_of_commit(request).isoformat(timespec="microseconds"),
        world_size=len(written),
        mesh=request.mesh,
        config_sha256=None if config is None else digests.of_bytes("sha256", config.encode()),
        model_fingerprint=model_fingerprint(index),
        versions={"shardkit": shardkit.__version__, "torch": torch.__version__, "python": platform.python_version()},
        sections=list(index.sections),
        digest=request.digest,
        files=_files([files for files, _ in written]),
        version=_version(prepared.common, prepared.own, prepared.added, isinstance(request.final, Url)),
        additions=prepared.added,
        data=request.save_id if isinstance(request.final, Url) else None,
        nan=list(dict.fromkeys(name for _, names in written for name in names))[: nan.MOST],
    )


def _time_of_commit(request: SaveRequest) -> datetime:
    """Now; but later than all checkpoints of the series, also if the clock was set back: a resume and retention order
    checkpoints by these times. Not in stores, which refuse requests from machines with a wrong clock."""
    now, root = datetime.now(timezone.utc), request.final.parent
    if not request.in_series or not isinstance(root, Path):
        return now
    last, times = now, list[str]()
    with suppress(CheckpointError):  # a folder that cannot be listed fails no save
        times = retention.times(root)
    for text in times:
        with suppress(ValueError, OverflowError, TypeError):  # not one of ours
            last = max(last, datetime.fromisoformat(text) + timedelta(microseconds=1))
    return last


def model_fingerprint(index: Index) -> str:
    """A digest of the names, dtypes and shapes of the models' tensors. It does not depend on their placements."""
    lines = sorted(
        f"{section}:{name}:{entry.dtype}:{list(entry.shape)}"
        for section, entries in index.sections.items()
        if is_model(section)
        for name, entry in entries.items()
    )
    return digests.of_bytes("sha256", "\n".join(lines).encode())


def _version(common: dict[str, Any], own: dict[str, Any], added: dict[str, File], is_in_store: bool) -> int:
    """The oldest format version that supports everything in this checkpoint."""
    of_script = [common, own.get("apart")]
    if values.has_new_tags(of_script, values.ARRAY_TAGS):
        return manifest.ARRAYS_VERSION
    if values.has_new_tags(of_script):
        return manifest.TAGS_VERSION
    if is_in_store:
        return manifest.STORE_VERSION
    if added:
        return manifest.ADDITIONS_VERSION
    grown = any({"globals", "extra", "is_whole"} & {*optimizer} for optimizer in common["optimizers"])
    return manifest.APART_VERSION if grown or "apart" in common else manifest.PLAIN_VERSION


def _files(written: Iterable[dict[str, list[Any]]]) -> dict[str, File]:
    files: dict[str, File] = {}
    for rank, names in enumerate(written):
        for name, (size, text) in names.items():
            file = files.setdefault(name, File(size, {}))
            file.digests[rank] = text
    return files
