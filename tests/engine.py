"""Models made parallel by the engine itself, without an Accelerator."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit.config.schema import Config
from shardkit.distributed import process
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize


def config_for(world: int, strategy: int = 1, **settings: Any) -> Config:
    """A configuration on the CPU; `settings` beyond the top level are keys of fsdp_config."""
    top = {key: settings.pop(key) for key in ("mixed_precision", "num_machines", "shardkit") if key in settings}
    return Config(
        num_processes=world, use_cpu=True, fsdp_config={"fsdp_sharding_strategy": strategy, **settings}, **top
    )


def parallel(model: nn.Module, config: Config, weights: Path | None = None) -> nn.Module:
    here = process.start(config)
    return parallelize(model, config, build_mesh(config, here), here, weights)


def tokens(rank: int = 0) -> torch.Tensor:
    """(batch, seq) of the vocabulary of `models.Gpt`."""
    return torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(rank))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
