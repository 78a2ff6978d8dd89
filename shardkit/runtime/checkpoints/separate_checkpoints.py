"""Checkpoints of a single model or optimizer: for loops that save the rest in their own files.

They are ordinary checkpoints: committed atomically, verified on load, loadable on any number of ranks. Random
generators, counters and the position in the data are not touched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardkit.checkpoint.files import paths
from shardkit.checkpoint.loading import read
from shardkit.checkpoint.loading.load_plan import LoadOptions
from shardkit.checkpoint.saving import write
from shardkit.checkpoint.saving.save_request import SaveRequest
from shardkit.checkpoint.states import state
from shardkit.checkpoint.states.state import Live
from shardkit.distributed import random_state
from shardkit.distributed.modules import clean_name, every_parameter, unwrapped
from shardkit.runtime.checkpoints.beginning import begin_save
from shardkit.runtime.checkpoints.loading import begin_load
from shardkit.runtime.checkpoints.saving import mesh_of, state_kind
from shardkit.runtime.run import Run
from shardkit.storage.url import Place


def save_only_model(run: Run, model: nn.Module, folder: str | Path, only_trained: bool = False) -> Place:
    """Saves the model's parameters and buffers, or only its trained parameters; returns the folder. Collective."""
    return _save(run, Live([_Trained(model) if only_trained else model]), folder, "save_only_model")


def load_only_model(run: Run, model: nn.Module, folder: str | Path, only_trained: bool = False) -> None:
    """Loads what `save_only_model` wrote, with the same `only_trained`. Collective; CheckpointError on all ranks, with
    the model unchanged, where it does not fit."""
    _load(run, Live([_Trained(model) if only_trained else model]), folder, "load_only_model")


def save_only_optimizer(run: Run, optimizer: Optimizer, model: nn.Module, folder: str | Path) -> Place:
    """Saves the optimizer's state by parameter names of the model; returns the folder. Collective."""
    live = Live([model], [_plain(optimizer)], elsewhere=frozenset({0}))
    return _save(run, live, folder, "save_only_optimizer")


def load_only_optimizer(run: Run, optimizer: Optimizer, model: nn.Module, folder: str | Path) -> None:
    """Loads what `save_only_optimizer` wrote. Collective; errors as in `load_only_model`."""
    _load(run, Live([model], [_plain(optimizer)], take=lambda _: {0}), folder, "load_only_optimizer")


class _Trained(nn.Module):
    """A view of a model that saves and loads only its trained parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["of"] = model  # not a submodule, so that names stay the model's

    of: nn.Module

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        trained = {id(parameter) for parameter in every_parameter(self.of) if parameter.requires_grad}
        names = {name for name, parameter in self.named_parameters(remove_duplicate=False) if id(parameter) in trained}
        return {name: value for name, value in state.model_tensors(self.of).items() if name in names}

    def named_parameters(self, *args: Any, **arguments: Any) -> Iterator[tuple[str, nn.Parameter]]:
        found = unwrapped(self.of).named_parameters(*args, **arguments)
        return ((clean_name(name), parameter) for name, parameter in found)


def _plain(optimizer: Any) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _save(run: Run, live: Live, folder: str | Path, call: str) -> Place:
    final = paths.named(folder, call)
    session = begin_save(run, call)
    request = SaveRequest(
        final=final,
        step=run.counters.step,
        run_id=session.run_id,
        name=str(final),
        replace=True,
        digest=run.config.shardkit.checkpoint.digest,
        mesh=mesh_of(run),
    )
    return write.save(live, state_kind(run), request, session.control)


def _load(run: Run, live: Live, folder: str | Path, call: str) -> None:
    path = paths.named(folder, call)
    session = begin_load(run, call)
    verify = run.config.shardkit.checkpoint.verify
    options = LoadOptions(verify, data_position=False, unfinished=session.unfinished)
    with _same_random_state(run.process.rank):
        read.load(live, path, session.control, options)


@contextmanager
def _same_random_state(rank: int) -> Iterator[None]:
    """Restores the random generators afterwards."""
    found = random_state.capture(rank)
    try:
        yield
    finally:
        random_state.restore(found)
