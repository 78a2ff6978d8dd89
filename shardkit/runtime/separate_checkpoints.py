"""Checkpoints of one model, or of one optimizer, by themselves: for loops that keep the rest in files of their own.

They are checkpoints as any other: committed whole or not at all, verified when they are read, loadable on any number of
ranks. Random generators, counters and the position in the data are left as they are.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardkit.checkpoint import paths, read, state, write
from shardkit.checkpoint.save_request import SaveRequest
from shardkit.checkpoint.state import Live
from shardkit.distributed import random_state
from shardkit.runtime.run import Run
from shardkit.runtime.saving import mesh_of, met, state_kind


def save_model_alone(run: Run, model: nn.Module, folder: str | Path, only_trained: bool = False) -> Path:
    """Writes the model's parameters and buffers, or only the parameters that train; the folder. Collective."""
    return _save(run, Live([_Trained(model) if only_trained else model]), folder, "save_model_alone")


def load_model_alone(run: Run, model: nn.Module, folder: str | Path, only_trained: bool = False) -> None:
    """Restores what `save_model_alone` wrote, with the same `only_trained`. Collective; CheckpointError on all ranks,
    and nothing changed, where it does not fit."""
    _load(run, Live([_Trained(model) if only_trained else model]), folder, "load_model_alone")


def save_optimizer_alone(run: Run, optimizer: Optimizer, model: nn.Module, folder: str | Path) -> Path:
    """Writes the optimizer's state, by the names of the model's parameters; the folder. Collective."""
    live = Live([model], [_plain(optimizer)], elsewhere=frozenset({0}))
    return _save(run, live, folder, "save_optimizer_alone")


def load_optimizer_alone(run: Run, optimizer: Optimizer, model: nn.Module, folder: str | Path) -> None:
    """Restores what `save_optimizer_alone` wrote. Collective; as `load_model_alone`."""
    _load(run, Live([model], [_plain(optimizer)], take=lambda _: {0}), folder, "load_optimizer_alone")


class _Trained(nn.Module):
    """A model of which only what trains is saved and loaded, as of one with frozen weights that lie elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.__dict__["of"] = model  # not as a module inside: names stay the model's

    of: nn.Module

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        trained = {id(parameter) for parameter in self.of.parameters() if parameter.requires_grad}
        names = {name for name, parameter in self.named_parameters(remove_duplicate=False) if id(parameter) in trained}
        return {name: value for name, value in state.model_tensors(self.of).items() if name in names}

    def named_parameters(self, *args: Any, **arguments: Any) -> Iterator[tuple[str, nn.Parameter]]:
        found = state.unwrapped(self.of).named_parameters(*args, **arguments)
        return ((state.clean_name(name), parameter) for name, parameter in found)


def _plain(optimizer: Any) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _save(run: Run, live: Live, folder: str | Path, call: str) -> Path:
    final = paths.named(folder, call)
    session = met(run, call, "save")
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
    session = met(run, call, "load")
    how: Mapping[str, Any] = {"verify": run.config.shardkit.checkpoint.verify, "unfinished": session.unfinished}
    with _same_random_state(run.process.rank):
        read.load(live, path, session.control, data_position=False, **how)


@contextmanager
def _same_random_state(rank: int) -> Iterator[None]:
    """Random generators are afterwards what they were before."""
    found = random_state.capture(rank)
    try:
        yield
    finally:
        random_state.restore(found)
