"""The units of a live model: what `shardkit.model.cut` decided by name, with its modules and parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from shardkit.config.schema import Dtype, FsdpConfig
from shardkit.model.cut import Cut, block_names, cut, whole
from shardkit.model.live import tree_of


@dataclass(frozen=True)
class LiveUnit:
    """As `shardkit.model.cut.Unit`, with the module and the parameters themselves."""

    fqn: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    keeps_dtype: bool = False


@dataclass(frozen=True)
class Units:
    """The units of a model, children first and the root last, and what is in none of them.

    `ignored` modules are not sharded; every rank holds `replicated` parameters whole. `cut` is the decision behind.
    """

    cut: Cut
    units: list[LiveUnit]
    ignored: dict[str, nn.Module] = field(default_factory=dict)
    replicated: dict[str, nn.Parameter] = field(default_factory=dict)


def units_of(model: nn.Module, config: FsdpConfig, compute: Dtype | None = None) -> Units:
    """The units that the configuration asks for. ModelError with everything that cannot be sharded."""
    return _bound(model, cut(tree_of(model), config, compute))


def one_unit(model: nn.Module) -> Units:
    """The model as one unit, where it is not sharded."""
    return _bound(model, whole(tree_of(model)))


def blocks_of(model: nn.Module, config: FsdpConfig) -> list[nn.Module]:
    """The blocks that activation checkpointing and compilation work on (see `block_names`)."""
    return [model.get_submodule(fqn) for fqn in block_names(tree_of(model), config)]


def _bound(model: nn.Module, decided: Cut) -> Units:
    parameters = dict(model.named_parameters())
    return Units(
        decided,
        [
            LiveUnit(
                unit.fqn, model.get_submodule(unit.fqn), {n: parameters[n] for n in unit.parameters}, unit.keeps_dtype
            )
            for unit in decided.units
        ],
        {fqn: model.get_submodule(fqn) for fqn in decided.ignored},
        {name: parameters[name] for name in decided.replicated},
    )
