"""The units of a live model: the result of `shardkit.model.cut` with modules and parameters instead of names."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from shardkit.config.schema import Dtype, FsdpConfig
from shardkit.model.cut import Cut, block_names, cut, whole
from shardkit.model.live import tree_of


@dataclass(frozen=True)
class LiveUnit:
    """As `shardkit.model.cut.Unit`, with the module and its parameters."""

    fqn: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    keeps_dtype: bool = False


@dataclass(frozen=True)
class Units:
    """The units of a model, children first and the root last, and modules and parameters that are in none of them.

    `ignored` modules are not sharded. `replicated` parameters are whole on every rank. `cut`: the result by name.
    """

    cut: Cut
    units: list[LiveUnit]
    ignored: dict[str, nn.Module] = field(default_factory=dict)
    replicated: dict[str, nn.Parameter] = field(default_factory=dict)


def units_of(model: nn.Module, config: FsdpConfig, compute: Dtype | None = None) -> Units:
    """The units for a configuration. Raises ModelError that lists everything that cannot be sharded."""
    return _bound(model, cut(tree_of(model), config, compute))


def one_unit(model: nn.Module) -> Units:
    """The model as one unit, if it is not sharded."""
    return _bound(model, whole(tree_of(model)))


def blocks_of(model: nn.Module, config: FsdpConfig) -> list[nn.Module]:
    """The blocks that activation checkpointing and compilation work on (see `block_names`)."""
    return [model.get_submodule(fqn) for fqn in block_names(tree_of(model), config)]


def _bound(model: nn.Module, decided: Cut) -> Units:
    parameters = dict(nn.Module.named_parameters(model))
    return Units(
        decided,
        [
            LiveUnit(
                unit.fqn,
                model.get_submodule(unit.fqn) if unit.fqn else model,  # TorchScript has no get_submodule
                {n: parameters[n] for n in unit.parameters},
                unit.keeps_dtype,
            )
            for unit in decided.units
        ],
        {fqn: model.get_submodule(fqn) for fqn in decided.ignored},
        {name: parameters[name] for name in decided.replicated},
    )
