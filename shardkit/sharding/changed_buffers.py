"""Buffers that a recomputed block changes in forward, such as running statistics: a batch counts once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

BufferName = tuple[str, str]
"""The path of a module in its block, and the name of a buffer in it."""


class ChangedBuffers:
    """The buffers that the forward of one block, and of its copies, changes.

    Its recomputation finds them as the forward did, and what it does to them is dropped. Otherwise running statistics
    would take each batch twice, and a forward that uses what it changes would be recomputed with other values.
    """

    def __init__(self, block: nn.Module) -> None:
        self._paths = [path for path, module in block.named_modules() if module._buffers]
        self._known: set[BufferName] | None = None
        """Those that changed so far, of which copies are kept; None before the first forward: all may change."""

    def contexts(self, block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """The contexts of one forward and of its recomputation, of the block or of a copy of it."""
        modules = {path: block.get_submodule(path) for path in self._paths}
        found: dict[BufferName, torch.Tensor] = {}
        return self._forward(modules, found), _Recomputation(modules, found)

    @contextmanager
    def _forward(self, modules: Mapping[str, nn.Module], found: dict[BufferName, torch.Tensor]) -> Iterator[None]:
        before = {name: (buffer, _version(buffer)) for name, buffer in _present(modules)}
        copied = before if self._known is None else self._known & before.keys()
        copies = {name: before[name][0].clone() for name in copied}
        yield
        now = dict(_present(modules))
        for name, (buffer, version) in before.items():
            is_changed = now.get(name) is not buffer or _version(buffer) != version
            if name in now and (is_changed or _has_statistics(modules[name[0]])):
                found[name] = copies[name] if name in copies else now[name].clone()
        self._known = (self._known or set()) | found.keys()


class _Recomputation:
    """Puts copies of the found buffers in their places. May be entered again: a graph can be used twice."""

    def __init__(self, modules: Mapping[str, nn.Module], found: Mapping[BufferName, torch.Tensor]) -> None:
        self._modules, self._found = modules, found
        self._kept: dict[BufferName, torch.Tensor | None] = {}

    def __enter__(self) -> None:
        self._kept = {(path, name): self._modules[path]._buffers[name] for path, name in self._found}
        for (path, name), value in self._found.items():
            self._modules[path]._buffers[name] = value.clone()

    def __exit__(self, *error: object) -> None:
        for (path, name), buffer in self._kept.items():
            self._modules[path]._buffers[name] = buffer
        self._kept = {}


def _present(modules: Mapping[str, nn.Module]) -> Iterator[tuple[BufferName, torch.Tensor]]:
    for path, module in modules.items():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (path, name), buffer


def _has_statistics(module: nn.Module) -> bool:
    """Whether forward changes the module's buffers by a kernel of torch's that gives them no new version."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def _version(buffer: torch.Tensor) -> int:
    """A number that changes where the buffer is changed in place."""
    return 0 if buffer.is_inference() else buffer._version
