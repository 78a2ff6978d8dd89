"""Refuses saves into an object store, and loads from one, that are not supported, before anything is done."""

from shardkit.errors import UsageError
from shardkit.runtime.run import Run
from shardkit.storage.url import Place, Url


def refuse_save(run: Run, final: Place, kind: str) -> None:
    """Raises UsageError if this run's state cannot be saved there."""
    if not isinstance(final, Url):
        return
    if run.hooks.at_save:
        raise UsageError(
            f"save_state: {final}: save hooks write files into a folder, which an object store does not have; save to "
            "a folder on a disk, or remove the hooks."
        )
    if kind == "full":
        raise UsageError(
            f"save_state: {final}: with FULL_STATE_DICT all ranks write one file, which object stores do not support; "
            "use SHARDED_STATE_DICT, and for whole files save_model or `shardkit checkpoint merge URL -o FOLDER`."
        )


def refuse_load(run: Run, place: Place) -> None:
    """Raises UsageError if this run has load hooks, which cannot load from there."""
    if isinstance(place, Url) and run.hooks.at_load:
        raise UsageError(
            f"load_state: {place}: load hooks read files from a folder, which an object store does not have; copy the "
            "checkpoint to a disk and load that, or remove the hooks."
        )
