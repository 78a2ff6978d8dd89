"""torch in a forked rank: loaded long ago, and not there until the script imports it.

A fresh interpreter reads a few variables when it loads torch. A script, or a package that it imports, may set them
before: then what was loaded is of no use, and the rank becomes a Python of its own, which runs the script again up to
its first import of torch. What the script itself sets is seen before anything starts (`variables_set`).
"""

import importlib.abc
import importlib.machinery
import os
import re
import sys
import warnings
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


# ---- before the start: what the script's own text says ----


def variables_set(script: str, is_module: bool) -> list[str]:
    """Variables that libraries read at import, and that the script or a module beside it may be setting."""
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
    """The script, and what it imports from its folder, as far as the lines that begin with an import tell."""
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
    """The files that `import name` would read, if it lies below the folder."""
    place = folder
    for part in filter(None, name.split(".")):
        place = place / part
        yield from (file for file in (place.with_name(f"{part}.py"), place / "__init__.py") if file.is_file())
    yield from (file for file in [place / "__main__.py"] if file.is_file())


def folder_of(script: str, is_module: bool) -> Path:
    """What Python puts first into `sys.path` for a script."""
    path = Path(script)
    if is_module:
        return Path.cwd()
    return path.absolute() if path.is_dir() else path.resolve().parent


# ---- in the rank ----


@dataclass(frozen=True)
class Before:
    """What this interpreter was before it loaded torch."""

    modules: frozenset[str]
    filters: tuple[Any, ...]


@dataclass(frozen=True)
class Taken:
    """What loading torch has made of this interpreter: modules, and filters of warnings, those tried first in front."""

    modules: dict[str, ModuleType]
    filters: list[Any]


def before() -> Before:
    """For `take_out`, later."""
    return Before(frozenset(sys.modules), tuple(warnings.filters))


def take_out(found: Before) -> Taken:
    """Removes what has come since, of torch and of shardkit."""
    names = [name for name in sys.modules if name.split(".")[0] in {"torch", "shardkit"} and name not in found.modules]
    filters = [one for one in warnings.filters if one not in found.filters]
    set_filters(found.filters)
    return Taken({name: sys.modules.pop(name) for name in names}, filters)


def set_filters(filters: Iterable[Any]) -> None:
    """Makes these the filters of warnings."""
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():  # its end forgets what older filters have let through
        pass


class Preloaded(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Puts modules back when the first of them is imported; or where variables that they read have changed since,
    replaces this process with the `command`."""

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
            start_anew(self._command)
        sys.meta_path.remove(self)
        sys.modules.update(self._modules)
        set_filters([*self._filters, *(one for one in warnings.filters if one not in self._filters)])
        self._own_spec = self._modules[spec.name].__spec__
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import has put its own there


def read_at_import(variables: Mapping[str, str]) -> dict[str, str]:
    """Of these variables, those that libraries read when they are imported."""
    return {name: value for name, value in variables.items() if re.fullmatch(READ_AT_IMPORT, name)}


def start_anew(command: Sequence[str]) -> NoReturn:
    """Makes this process another one, with the variables that it has now."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execv(command[0], list(command))
