"""The hooks that a script registers for saves and loads; `state_hooks.py` calls them.

A separate module, so that a script that never saves does not import the checkpoint writer.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.hooks import RemovableHandle

from shardkit.errors import UsageError

SaveHook = Callable[[list[Any], list[Any], str], Any]
LoadHook = Callable[[list[Any], str], Any]


@dataclass
class StateHooks:
    """The registered hooks, in calling order."""

    at_save: "OrderedDict[int, SaveHook]" = field(default_factory=OrderedDict)
    at_load: "OrderedDict[int, LoadHook]" = field(default_factory=OrderedDict)
    keep_models: bool = False
    """Whether a checkpoint has all models, also those whose weights a save hook has removed."""


def register(hooks: "OrderedDict[int, Any]", hook: Any, name: str) -> RemovableHandle:
    """A handle whose `remove()` unregisters the hook. Raises UsageError where the hook is not callable."""
    if not callable(hook):
        raise UsageError(f"{name}: a hook must be callable (got {type(hook).__name__}); give a function.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
