"""What of a run cannot be saved into a store of objects, or loaded from one: said before anything is done."""

from shardkit.errors import UsageError
from shardkit.runtime.run import Run
from shardkit.storage.url import Place, Url


def refuse_save(run: Run, final: Place, kind: str) -> None:
    """UsageError where this run's state cannot be saved there."""
    if not isinstance(final, Url):
        return
    if run.hooks.at_save:
        raise UsageError(
            f"save_state: {final}: save hooks write files into a folder, which a store of objects has not; save into a "
            "folder on a disk, or remove the hooks."
        )
    if kind == "full":
        raise UsageError(
            f"save_state: {final}: a full state is one file that all ranks write into, which a store of objects has "
            "not; use SHARDED_STATE_DICT, and for whole files save_model or `shardkit checkpoint merge URL -o FOLDER`."
        )


def refuse_load(run: Run, place: Place) -> None:
    """UsageError where this run's hooks could not load from there."""
    if isinstance(place, Url) and run.hooks.at_load:
        raise UsageError(
            f"load_state: {place}: load hooks read files from a folder, which a store of objects has not; copy the "
            "checkpoint to a disk and load that, or remove the hooks."
        )
