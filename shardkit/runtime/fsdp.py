"""One call for one model: `shardkit.fsdp(model)`, without a configuration file and without an Accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardkit.config.schema import Config, FsdpConfig, ShardingStrategy, WrapPolicy
from shardkit.distributed.process import launched, start
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.sharding import precision
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize
from shardkit.wording import near_or

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
STRATEGIES = {"SHARD_GRAD": ShardingStrategy.SHARD_GRAD_OP, **ShardingStrategy.__members__}

log = get_logger(__name__)


def fsdp(
    model: nn.Module,
    auto_wrap: bool = False,
    mp: str = "fp32",
    shard_strat: str = "NO_SHARD",
    TransformerBlock: type[nn.Module] | None = None,
) -> nn.Module:
    """The model, parallelized over all launched ranks, or in this process alone.

    `auto_wrap` makes each `TransformerBlock` (or, with None, each repeated block) a separate unit. `mp` is fp32,
    bf16 or fp16; with fp16 scale the loss yourself: `torch.amp.GradScaler`. `shard_strat` is NO_SHARD (DDP),
    SHARD_GRAD, FULL_SHARD, or a hybrid strategy. Build the optimizer from the parameters of the returned model.
    Collective: every rank must call it.
    """
    config = _config(auto_wrap, mp, shard_strat, TransformerBlock)
    _finish_modules(model)
    process = start(config)
    config = precision.supported(config, process.device)
    precision.autocast_forward(model, config, process.device)
    if auto_wrap and TransformerBlock is not None and not any(isinstance(m, TransformerBlock) for m in model.modules()):
        log.warning("fsdp: the model has no %s; it becomes one unit.", TransformerBlock.__name__)
        config = _config(False, mp, shard_strat, None)
    return parallelize(model, config, build_mesh(config, process), process)


def _config(auto_wrap: bool, mp: str, shard_strat: str, block: type[nn.Module] | None) -> Config:
    """The arguments as a configuration. Raises UsageError with all problems."""
    if problems := [*_unknown("mp", mp, PRECISIONS), *_unknown("shard_strat", shard_strat, STRATEGIES)]:
        raise UsageError("\n".join(problems))
    section = FsdpConfig(
        sharding_strategy=STRATEGIES[shard_strat.upper()],
        auto_wrap_policy=WrapPolicy.TRANSFORMER_BASED_WRAP if auto_wrap else WrapPolicy.NO_WRAP,
        transformer_layer_cls_to_wrap=[block.__name__] if auto_wrap and block is not None else [],
    )
    return Config(mixed_precision=PRECISIONS[mp.lower()], num_processes=launched().world_size, fsdp=section)


def _unknown(name: str, value: Any, known: dict[str, Any]) -> list[str]:
    if isinstance(value, str) and {value.lower(), value.upper()} & set(known):
        return []
    hint = near_or(str(value).upper(), [key.upper() for key in known], f"use one of {', '.join(known)}.")
    return [f"fsdp: {name}: not known (got {value!r}); {hint}"]


def _finish_modules(model: nn.Module) -> None:
    """Initializes modules whose constructor did not call `super().__init__()`: torch could not iterate over them."""
    for module in _walk(model):
        if "_parameters" not in module.__dict__:
            nn.Module.__init__(module)
            log.warning(
                "fsdp: %s.__init__ does not call super().__init__(); it is initialized now, as a module without "
                "parameters.",
                type(module).__name__,
            )


def _walk(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _walk(child)
