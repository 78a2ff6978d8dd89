"""Configure, plan, launch and checkpoint sharded PyTorch training.

The names below are the public interface. They are resolved on first use, so that `import shardkit` does not load torch.

The packages, each of which imports from those above it (the exact table: `tests/test_imports.py`):

settings         config; convert, other tools' files; storage, of checkpoints in object stores
before a run     model, its description; launch, of the ranks; plan, what they will need (its simulation uses sharding)
on the ranks     distributed, their agreement and collectives
of a training    sharding, optim, data, checkpoint, tracking; none of these imports another
a run            runtime: the Accelerator, and what it does with all of these
other ways in    wizard, submit, doctor; compat, for scripts of Accelerate; ray
the commands     cli; __main__

Beside them, for all: errors; env, the variables; log; values (JSON for plain values), systems, templates.
  text           wording, digits, sizes, problems (several at once)
  processes      new_process, fast_exit, open_files
  the terminal   spinner; bars, tqdm's
  calculated     dims, how ranks divide one; signatures
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
