"""The modules `accelerate`, `accelerate.utils`, ... as a script sees them: names are looked up in the tables of
`names.py`.

    standing_in_for("accelerate")      makes `import accelerate` and its submodules import shardkit.compat
    standing_in_for("shardkit.compat") the same submodules below shardkit.compat, for scripts that change their imports

A refused name can be imported, compared and subclassed. It raises UsageError when it is called, or an attribute of it
is read.
"""

import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any, NoReturn

from shardkit.compat import names
from shardkit.compat.touched import TOUCHED
from shardkit.errors import UsageError

VERSION = "1.15.0"
"""The version of accelerate whose names and signatures are provided, and that libraries see as its version."""


class StandIn(ModuleType):
    """One module of accelerate."""

    def __init__(self, name: str, below: str) -> None:
        """`below`: the dotted name below accelerate, "" for the package itself."""
        super().__init__(name, f"Stands in for accelerate{'.' + below if below else ''}; see shardkit.compat.names.")
        self.__dict__["_below"] = below
        if not below:
            self.__version__ = VERSION

    def __getattr__(self, name: str) -> Any:
        return look_up(self.__name__, self.__dict__["_below"], name, sys._getframe(1))

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system sets a submodule on its package: `utils.tqdm` would hide the function of that name.
        if not (isinstance(value, StandIn) and name in names.places(self.__dict__["_below"])):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *known(self.__dict__["_below"])})


def known(below: str) -> list[str]:
    """All names of one module, including refused ones, without its submodules."""
    return sorted({*names.places(below), *names.refusals(below)})


def look_up(module: str, below: str, name: str, frame: Any = None) -> Any:
    """The object for a name in a module. Raises AttributeError if there is none."""
    if name == "__all__":
        return known(below)
    dotted = f"{below}.{name}" if below else name
    place = names.places(below).get(name)
    if place is None and dotted in names.modules():
        return import_module(f"{module}.{name}")
    if place is not None:
        TOUCHED.note(TOUCHED.stood_in, dotted, frame)
        return getattr(import_module(place[0]), place[1])
    if instead := names.refusals(below).get(name):
        TOUCHED.note(TOUCHED.refused, dotted, frame)
        return refused(name, instead)
    if not name.startswith("__"):
        TOUCHED.note(TOUCHED.missing, dotted, frame)
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}: shardkit.compat provides the names of accelerate {VERSION}, "
        "which do not include it"
    )


# ---- refused names ----


class _RefusedType(type):
    """The metaclass of a refused name: reading its attributes raises UsageError, comparing does not."""

    instead: str

    def __call__(cls, *args: Any, **arguments: Any) -> NoReturn:
        raise UsageError(f"accelerate's {cls.__name__}: is not supported (got a call); {cls.instead}.")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(f"accelerate's {cls.__name__}: is not supported (got .{name}); {cls.instead}.")


@cache
def refused(name: str, instead: str) -> type:
    """A class with this name that cannot be instantiated; the error says what to use instead."""
    return _RefusedType(name, (), {"instead": instead, "__doc__": f"Refused: {instead}."})


# ---- importing ----


class Finder(MetaPathFinder, Loader):
    """Finds the replacements of accelerate's modules, under a prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        below = self._below(fullname)
        if below is None or below not in names.modules():
            return None
        return ModuleSpec(fullname, self, origin="shardkit.compat", is_package=True)

    def _below(self, fullname: str) -> str | None:
        if fullname == self.prefix:
            return ""
        return fullname[len(self.prefix) + 1 :] if fullname.startswith(self.prefix + ".") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        below = self._below(spec.name)
        assert below is not None
        return StandIn(spec.name, below)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: names are looked up when they are used."""


class _Metadata(Distribution):
    """The metadata of the package accelerate for importlib.metadata. sentence-transformers takes a package without the
    home page for another one of the same name."""

    def read_text(self, filename: str) -> str | None:
        return {
            "METADATA": "Metadata-Version: 2.1\nName: accelerate\n"
            f"Version: {VERSION}\nHome-page: https://github.com/huggingface/accelerate\n",
            "top_level.txt": "accelerate\n",
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


class MetadataFinder(DistributionFinder):
    """Finds this metadata before that of an installed accelerate."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        wanted = getattr(context, "name", None)
        return [_Metadata()] if wanted is None or wanted.lower().replace("_", "-") == "accelerate" else []


def standing_in_for(prefix: str) -> None:
    """In this process, make imports of the prefix and its submodules find the replacements."""
    if any(isinstance(one, Finder) and one.prefix == prefix for one in sys.meta_path):
        return
    if prefix == "accelerate":
        sys.meta_path.insert(0, MetadataFinder())
        sys.meta_path.insert(0, Finder(prefix))
    else:  # real modules of the package come first
        sys.meta_path.append(Finder(prefix))
