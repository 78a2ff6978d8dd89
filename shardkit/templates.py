"""Templates shipped with shardkit: configurations (NAME.yaml) and starter scripts that use them."""

from difflib import get_close_matches
from pathlib import Path

from shardkit.errors import UsageError


def folder() -> Path:
    """The folder of the templates: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parent
    installed = package / "_templates"
    return installed if installed.is_dir() else package.parent / "templates"


def names() -> list[str]:
    """Names of the configurations, e.g. "cpu"."""
    return sorted(path.stem for path in folder().glob("*.yaml"))


def find(name: str) -> Path:
    """The configuration file for a template's name or a path. UsageError where neither exists."""
    if name in names():
        return folder() / f"{name}.yaml"
    if Path(name).is_file():
        return Path(name)
    near = get_close_matches(name, names(), 1)
    hint = f"did you mean {near[0]}?" if near else f"use a file, or one of {', '.join(names())}."
    raise UsageError(f"template: no such template or file (got {name!r}); {hint}")
