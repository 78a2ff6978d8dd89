"""The user's save and load hooks: `register_save_state_pre_hook` and `register_load_state_pre_hook`.

A save hook, `hook(models, weights, output_dir)`, runs on every rank before the state is captured. `models` are the
prepared models without the wrappers of DDP and torch.compile; `weights` has a mapping of names to tensors for each of
them (sharing memory, sharded under FSDP). Files written into `output_dir` are committed with the checkpoint, or not at
all. If the hook removes a model's weights (`weights.pop()`), it has saved that model itself, and the checkpoint
contains no copy; rank 0's list counts. With `StateHooks.keep_models` it contains one nevertheless.

A load hook, `hook(models, input_dir)`, runs on every rank after the whole checkpoint has been verified and before
anything is loaded. If it removes a model (`models.pop()`), it has loaded that model itself; all ranks must remove the
same ones.
"""

from pathlib import Path
from typing import Any

from shardkit.checkpoint.saving import additions, put
from shardkit.checkpoint.saving.additions import Staging
from shardkit.checkpoint.saving.attempt import together
from shardkit.checkpoint.saving.save_request import SaveRequest
from shardkit.checkpoint.states import state
from shardkit.distributed.control import ControlGroup
from shardkit.distributed.modules import unwrapped
from shardkit.errors import UsageError
from shardkit.runtime.checkpoints.hooks import StateHooks


def save(
    hooks: StateHooks, models: list[Any], request: SaveRequest, control: ControlGroup
) -> tuple[Staging, frozenset[int]]:
    """Runs the save hooks; returns the folder they wrote into and the numbers of the models that they saved.

    Collective; CheckpointSaveError on all ranks where a hook fails on one.
    """
    final = request.final
    assert isinstance(final, Path), "save hooks write files: refused before"
    begun: list[Staging] = []

    def begin(_: list[Any]) -> str:
        begun.append(additions.begin(final, request.save_id))
        return str(begun[0].path.name)

    try:
        made = together(control, request, "hooks", lambda: None, judge=begin).verdict
        staging = begun[0] if begun else Staging(final.with_name(made))
        attempt = together(
            control,
            request,
            "hooks",
            lambda: _run_at_save(hooks, models, staging.path),
            answer=sorted,
            judge=lambda answers: answers[0],
        )
    except BaseException:
        for one in begun:
            one.discard()
        raise
    return staging, frozenset() if hooks.keep_models else frozenset(attempt.verdict)


def _run_at_save(hooks: StateHooks, models: list[Any], folder: Path) -> set[int]:
    """Runs the hooks; returns the numbers of the models whose weights they removed."""
    put.wait_until_seen(folder)
    given = [state.model_tensors(model) for model in models]
    names = [list(one) for one in given]
    weights = list(given)
    for hook in list(hooks.at_save.values()):
        hook([unwrapped(model) for model in models], weights, str(folder))
    left = {id(one) for one in weights}
    if not left <= {id(one) for one in given} or [list(one) for one in given] != names:
        raise UsageError(
            "a save hook changed what `weights` holds; it may remove whole models from the list (weights.pop()), and "
            "nothing else: to save a model differently, write it into output_dir and remove its entry"
        )
    return {number for number, one in enumerate(given) if id(one) not in left}


def load(hooks: StateHooks, models: list[Any], folder: Path) -> set[int]:
    """Runs the load hooks on this rank; returns the numbers of the models that they loaded."""
    models = [unwrapped(model) for model in models]
    left = list(models)
    for hook in list(hooks.at_load.values()):
        hook(left, str(folder))
    return {number for number, model in enumerate(models) if not any(model is one for one in left)}
