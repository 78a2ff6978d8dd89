"""Configure, plan, launch and checkpoint sharded PyTorch training.

The names below are the public interface. They are resolved on first use, so that `import shardkit` does not load torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "Accelerator": "shardkit.runtime.accelerator",
    "ProjectConfiguration": "shardkit.runtime.project",
    "debug_launcher": "shardkit.runtime.notebook",
    "notebook_launcher": "shardkit.runtime.notebook",
    "find_executable_batch_size": "shardkit.runtime.batch_size",
    "get_logger": "shardkit.runtime.logger",
    "tqdm": "shardkit.bars",
    "Tracker": "shardkit.tracking.tracker",
    "fsdp": "shardkit.runtime.fsdp",
    "set_seed": "shardkit.distributed.seed",
    "skip_first_batches": "shardkit.data.skipping",
    "init_empty_weights": "shardkit.sharding.init",
    "load_config": "shardkit.config.files",
    "Config": "shardkit.config.schema",
    "ShardkitError": "shardkit.errors",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        import_module("shardkit.systems").check()
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'shardkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
