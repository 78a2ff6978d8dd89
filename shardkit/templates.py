"""Templates shipped with shardkit: configurations (NAME.yaml) and starter scripts that use them."""

from pathlib import Path

from shardkit.errors import UsageError
from shardkit.wording import near_or


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
    hint = near_or(name, names(), f"use a file, or one of {', '.join(names())}.")
    raise UsageError(f"template: no such template or file (got {name!r}); {hint}")
