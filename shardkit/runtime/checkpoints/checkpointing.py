"""Saving and loading: training states, exported models, small files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardkit.errors import UsageError
from shardkit.runtime import unsupported
from shardkit.runtime.checkpoints import hooks, objects, resuming
from shardkit.runtime.project import ProjectConfiguration
from shardkit.runtime.topology import Topology
from shardkit.storage.url import Url


class Checkpointing(Topology):
    """Methods that save and load. They import what does the work when they are called: a script may never save."""

    def register_for_checkpointing(self, *registered: Any) -> None:
        """Adds objects to save_state and load_state, each once, also where a cell is run again. They need state_dict()
        -> JSON values or tensors, and load_state_dict(state). State that differs between ranks is saved per rank;
        on another number of ranks rank 0's is loaded everywhere, with a warning."""
        bad = [o for o in registered if not (hasattr(o, "state_dict") and hasattr(o, "load_state_dict"))]
        if bad:
            kinds = ", ".join(type(one).__name__ for one in bad)
            raise UsageError(
                f"register_for_checkpointing: no state_dict and load_state_dict (got {kinds}); give the class both, or "
                "register an object that has them."
            )
        for one in registered:
            if not any(one is known for known in self._run.registered):
                self._run.registered.append(one)

    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool | None = None,
    ) -> Path | Url:
        """Saves the training state and returns its folder: `output_dir`, else a new folder in the project, named by
        step.

        With `blocking` False (default: `shardkit.checkpoint.blocking`) training continues while the files are written;
        the next optimizer step may wait until its state is copied. If such a save fails, the next save or
        `end_training` raises. Collective. Raises CheckpointSaveError on all ranks; earlier checkpoints stay intact.
        """
        unsupported.refuse_pickle(safe_serialization)
        from shardkit.runtime.checkpoints import saving

        return saving.save_state(self._run, output_dir, blocking=blocking)

    def register_save_state_pre_hook(self, hook: hooks.SaveHook) -> RemovableHandle:
        """Every save_state calls `hook(models, weights, output_dir)` on every rank before it captures the state. Files
        that the hook writes into `output_dir` are committed with the checkpoint. A model whose entry the hook removes
        from `weights` is not saved again (rank 0's list counts). The handle's `remove()` unregisters it. See
        `runtime/checkpoints/state_hooks.py`."""
        return hooks.register(self._run.hooks.at_save, hook, "register_save_state_pre_hook")

    def register_load_state_pre_hook(self, hook: hooks.LoadHook) -> RemovableHandle:
        """Every load calls `hook(models, input_dir)` on every rank after the checkpoint is verified and before it is
        loaded. A model that the hook removes from `models` is not loaded again. The handle's `remove()` unregisters
        it."""
        return hooks.register(self._run.hooks.at_load, hook, "register_load_state_pre_hook")

    def load_state(
        self, input_dir: str | Path | None = None, *, data_position: bool = True, strict: bool = True
    ) -> Path | Url:
        """Restores a training state and returns its folder: `input_dir`, else the project's newest valid one.
        Collective.

        Raises CheckpointError on all ranks with the state unchanged, which is also a FileNotFoundError if there is no
        such checkpoint, or StateIncomplete if reading failed half-way."""
        from shardkit.runtime.checkpoints import loading

        return loading.load_state(self._run, input_dir, data_position=data_position, strict=strict)

    def resume(self, *, data_position: bool = True, strict: bool = True) -> bool:
        """Restores the checkpoint that the launch's `--resume` selects; returns whether it did. Collective.

        Call it after `prepare`. never (the default): nothing is loaded; auto: the project's newest valid checkpoint, if
        there is one; a path: that checkpoint. Without this call nothing is resumed. `data_position`, `strict`: as for
        `load_state`.
        """
        return resuming.resume(self._run, data_position, strict)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int | None = None,
        dtype: str | torch.dtype | None = None,
        safe_serialization: bool = True,
    ) -> None:
        """Writes the full model as safetensors files that plain torch and Transformers can open: of at most
        `max_shard_size` ("2GB"; default: shardkit.checkpoint.max_shard_size), in `dtype` (default: that of the
        parameters, which is fp32 under mixed precision). Collective."""
        unsupported.refuse_pickle(safe_serialization)
        from shardkit.runtime.checkpoints import saving

        size = self._run.config.shardkit.checkpoint.max_shard_size if max_shard_size is None else max_shard_size
        saving.save_model(self._run, model, save_directory, size, dtype)

    def get_state_dict(self, model: nn.Module, *_: Any, **__: Any) -> dict[str, Any]:
        """The model's full state dict in host memory, on every rank; of a sharded model on rank 0, and an empty one
        elsewhere. Collective."""
        from shardkit.checkpoint.states import state

        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise UsageError(f"get_state_dict: expected a model (got {kind}); give the model that prepare() returned.")
        if self._run.config.mode == "fsdp":
            self._run.refuse_if_left("get_state_dict")
        return state.whole_tensors(model)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = True) -> None:
        """Rank 0 writes `obj` into the file `f`: a dict of tensors as safetensors, JSON values as JSON. Other ranks do
        nothing. Collective where tensors are sharded."""
        unsupported.refuse_pickle(safe_serialization)
        if objects.has_sharded(obj):
            self._run.refuse_if_left("save")
        whole = objects.gathered(obj)
        if self.is_main_process:
            objects.save(whole, f)

    @property
    def should_save_model(self) -> bool:
        """Whether this is rank 0, which writes files that the script saves itself; `save_model` is called by all
        ranks."""
        return self.is_main_process

    @property
    def project_dir(self) -> str | None:
        """The project folder; None without one."""
        return self._run.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The log folder: the project folder unless another one is set."""
        return self._run.project.logging_dir

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The project folder and how its checkpoints are named."""
        return self._run.project
