"""Hides preloaded torch modules in a forked rank until the script imports torch.

torch reads some environment variables when it is imported. If a script, or a package that it imports, sets one of them
before it imports torch, the preloaded modules cannot be used: the rank then replaces itself by a new Python process,
which runs the script from its beginning. Variables that the script's source sets are found before the start
(`variables_set`).
"""

import importlib.abc
import importlib.machinery
import os
import re
import sys
import warnings
import zipimport
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from shardkit import env

READ_AT_IMPORT = (
    r"(?:OMP|GOMP|KMP|MKL|MKLDNN|ONEDNN|DNNL|OPENBLAS|GOTO|BLIS|NPY|NUMPY|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TORCHEXPORT"
    r"|PYTORCH|SYMPY|KINETO)_(?!HOME\b|EXTENSIONS_DIR\b|NCCL_)[A-Z0-9_]+"
)
"""Variables that torch, numpy and their libraries read once, when they are imported (found by tracing getenv)."""


# ---- before the start: the script's source ----


def variables_set(script: str, is_module: bool) -> list[str]:
    """Variables that libraries read at import, and that the script, or a module next to it, may set."""
    names: set[str] = set()
    for text in own_texts(script, is_module):
        if "environ" in text or "putenv" in text:
            names |= set(re.findall(rf"[\"'(,]\s*({READ_AT_IMPORT})\s*[\"'=]", text))
    return sorted(names)


def own_texts(script: str, is_module: bool) -> Iterator[str]:
    """The texts of `own_files`."""
    for file in own_files(script, is_module):
        yield file.read_text(errors="replace")


def own_files(script: str, is_module: bool) -> Iterator[Path]:
    """The script, and the modules that it imports from its folder, found by lines that begin with an import."""
    folder = folder_of(script, is_module)
    path = Path(script)
    waiting = list(files_of(folder, script)) if is_module else [path / "__main__.py" if path.is_dir() else path]
    seen: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        with suppress(OSError):
            text = file.read_text(errors="replace")
            yield file
            for dots, name in re.findall(r"^\s*(?:import|from)\s+(\.*)([\w.]*)", text, re.MULTILINE):
                waiting += files_of(file.parent if dots else folder, name)


def files_of(folder: Path, name: str) -> Iterator[Path]:
    """The files that `import name` would read below the folder."""
    place = folder
    for part in filter(None, name.split(".")):
        place = place / part
        yield from (file for file in (place.with_name(f"{part}.py"), place / "__init__.py") if file.is_file())
    yield from (file for file in [place / "__main__.py"] if file.is_file())


def folder_of(script: str, is_module: bool) -> Path:
    """The folder that Python puts first into `sys.path` for a script."""
    path = Path(script)
    if is_module:
        return Path.cwd()
    return path.absolute() if is_container(script) else path.resolve().parent


def is_container(script: str) -> bool:
    """Whether it is a folder or a zip file, whose `__main__` Python runs."""
    with suppress(zipimport.ZipImportError):
        return Path(script).is_dir() or bool(zipimport.zipimporter(script))
    return False


# ---- in the rank ----


@dataclass(frozen=True)
class Before:
    """The state of the interpreter before it imported torch."""

    modules: frozenset[str]
    filters: tuple[Any, ...]


@dataclass(frozen=True)
class Taken:
    """The changes by importing torch: modules, and warning filters in their order."""

    modules: dict[str, ModuleType]
    filters: list[Any]


def before() -> Before:
    """The current state, for `take_out`."""
    return Before(frozenset(sys.modules), tuple(warnings.filters))


def take_out(found: Before) -> Taken:
    """Removes modules of torch and shardkit, and warning filters, that were added since `found`. Returns them."""
    names = [name for name in sys.modules if name.split(".")[0] in {"torch", "shardkit"} and name not in found.modules]
    filters = [one for one in warnings.filters if one not in found.filters]
    set_filters(found.filters)
    return Taken({name: sys.modules.pop(name) for name in names}, filters)


def set_filters(filters: Iterable[Any]) -> None:
    """Sets the warning filters."""
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():  # leaving it resets the cache of warnings already shown
        pass


class Preloaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Restores the modules when the first of them is imported. If variables that they read at import have changed, it
    replaces this process by `command` instead."""

    def __init__(self, taken: Taken, command: Sequence[str]) -> None:
        self._modules, self._filters, self._command = taken.modules, taken.filters, command
        self._variables = read_at_import(env.copy())

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = self._modules.get(fullname)
        if found is None or found.__spec__ is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=found.__spec__.origin)
        spec.submodule_search_locations = found.__spec__.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if read_at_import(env.copy()) != self._variables:
            restart(self._command)
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        set_filters([*self._filters, *(one for one in warnings.filters if one not in self._filters)])
        self._own_spec = self._modules[spec.name].__spec__
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has replaced it


def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables among these that libraries read when they are imported."""
    return {name: value for name, value in variables.items() if re.fullmatch(READ_AT_IMPORT, name)}


def restart(command: Sequence[str]) -> NoReturn:
    """Replaces this process by a command, with the current environment."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(command[0], list(command))
