"""`save_pretrained` of a model that is sharded or on XLA devices; those of Transformers, diffusers and peft have it.

Scripts for one device end with `unwrap_model(model).save_pretrained(folder, is_main_process=..., save_function=...)`.
The library would fail on sharded tensors, when all training is done. Here rank 0 gets the whole weights, and the
library's own method writes these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import FrameType, MethodType
from typing import Any

from torch import nn

from shardkit.distributed import collectives, xla
from shardkit.distributed.modules import every_parameter
from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import CheckpointSaveError, UsageError
from shardkit.runtime.run import OfModel, Run
from shardkit.signatures import signature

_NAME = "save_pretrained"


def replace(run: Run, model: nn.Module) -> None:
    """Replaces the method of a model that is sharded or on XLA devices, and of models inside it."""
    for module in model.modules():
        if hasattr(type(module), _NAME) and any(map(_needs_whole, every_parameter(module))):
            vars(module)[_NAME] = _SavePretrained(OfModel(run), model, module)


def _needs_whole(parameter: nn.Parameter) -> bool:
    """Whether the library cannot write it: it is sharded, or on XLA devices, whose memory safetensors does not read."""
    return is_dtensor(parameter) or xla.is_xla(parameter)


def before_calls(model: nn.Module, check: Callable[[str, FrameType | None], Any]) -> None:
    """Has `check` called with the name of the method and the frame of each of its calls, which it may refuse."""
    for module in model.modules():
        if isinstance(method := vars(module).get(_NAME), _SavePretrained):
            method.check = check


class _SavePretrained:
    """The method of one module: collective. Raises CheckpointSaveError on all ranks where rank 0 cannot write.

    With a `state_dict`, which the script has gathered, it is the library's own method, and so inside of another module
    that is being written; a rank to which `get_state_dict` gave nothing writes nothing. A forward that the library runs
    meanwhile is an error, which the library handles or not.
    """

    def __init__(self, of_model: OfModel, model: nn.Module, module: nn.Module) -> None:
        update_wrapper(self, getattr(type(module), _NAME))
        self._of_model, self._model, self._module = of_model, model, module
        self.check: Callable[[str, FrameType | None], Any] = lambda call, frame: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = MethodType(getattr(type(self._module), _NAME), self._module)
        given = {**signature(own).bind(*args, **kwargs).arguments, **kwargs}
        if given.get("state_dict") is not None or isinstance(vars(self._module).get("state_dict"), _PartOf):
            if given.get("state_dict") == {} and collectives.rank() > 0:
                return None  # rank 0 has them: peft would miss them here, and others write a file without weights
            return own(*args, **kwargs)
        self.check(_NAME, sys._getframe(1))
        from shardkit.checkpoint.states import state  # not before: a script may never save
        from shardkit.runtime.checkpoints.beginning import begin_save

        session = begin_save(self._of_model.run, _NAME)
        whole = state.whole_tensors(self._module)

        def write() -> Any:
            if session.control.rank == 0:
                with _showing(self._module, whole), _refusing_forwards(self._model, session.control.world_size):
                    return own(*args, **kwargs)
            return None

        attempt = session.control.attempt(write)
        if attempt.failure:
            raise CheckpointSaveError(f"{_NAME}: {attempt.failure}") from attempt.error
        return attempt.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module is not sharded by FSDP, so it gets the method of its class; one on XLA devices stays
        there."""
        copied = memo.get(id(self._module))
        if copied is not None and any(map(xla.is_xla, every_parameter(self._module))):
            return _SavePretrained(self._of_model, copied, copied)
        return self if copied is None else MethodType(getattr(type(self._module), _NAME), copied)


class _PartOf:
    """The `state_dict` of a module, from the whole weights of one around it."""

    def __init__(self, whole: dict[str, Any], inside: str) -> None:
        self._whole, self._inside = whole, inside

    def __call__(self, *_: Any, destination: Any = None, prefix: str = "", **__: Any) -> dict[str, Any]:
        found = {} if destination is None else destination
        for name, tensor in self._whole.items():
            if name.startswith(self._inside):
                found[prefix + name[len(self._inside) :]] = tensor
        return found


@contextmanager
def _refusing_forwards(model: nn.Module, ranks: int) -> Iterator[None]:
    """Inside, a forward raises UsageError: on several ranks it would wait for those that wait for this one.
    SentenceTransformer encodes an example for its model card, and leaves that out then."""
    if not any(map(is_dtensor, every_parameter(model))):
        yield
        return
    from shardkit.sharding.fsdp import unit_state  # not before: a script may shard nothing

    def refuse() -> None:
        if ranks > 1:
            raise UsageError(
                f"{_NAME}: the library runs a forward of the model while it writes, on rank 0 alone, and a sharded "
                "model needs all ranks for it; switch this off in the library, or use strategy NO_SHARD."
            )

    calls = unit_state.before_forward(model)
    calls.insert(0, refuse)
    try:
        yield
    finally:
        calls.remove(refuse)


@contextmanager
def _showing(module: nn.Module, whole: dict[str, Any]) -> Iterator[None]:
    """Inside, the module and all modules in it give their whole weights as `state_dict`."""
    found = {name: one for name, one in module.named_modules() if "state_dict" not in vars(one)}
    for name, one in found.items():
        vars(one)["state_dict"] = _PartOf(whole, f"{name}." if name else "")
    try:
        yield
    finally:
        for one in found.values():
            del vars(one)["state_dict"]
