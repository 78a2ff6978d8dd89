"""URLs of places in object stores, with an interface like `pathlib.Path`.

    place_of("s3://bucket/run")    Url; place_of("runs/a") and place_of("file:///runs/a") are a Path
    url / "name", url.parent, url.with_name(...)

A store has no folders: a Url is the name of an object, or the prefix of names. This module sends no requests.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from shardkit.errors import UsageError

# At least two letters before the colon, since `C:/` is a drive. One slash is enough: pathlib turns s3:// into s3:/.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(/+)(.*)", re.IGNORECASE | re.DOTALL)
_DISK = ("file", "local")


@dataclass(frozen=True)
class Url:
    """A name in an object store."""

    scheme: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self.parts)}"

    def __truediv__(self, name: str) -> "Url":
        return Url(self.scheme, (*self.parts, *name.split("/")))

    @property
    def name(self) -> str:
        return self.parts[-1]

    @property
    def parent(self) -> "Url":
        """The parent place; the parent of a bucket is the bucket."""
        return Url(self.scheme, self.parts[:-1]) if len(self.parts) > 1 else self

    def with_name(self, name: str) -> "Url":
        return Url(self.scheme, (*self.parts[:-1], name))


Place: TypeAlias = Path | Url


def is_url(given: Any) -> bool:
    """Whether a path or URL is a place in an object store."""
    return isinstance(place_of(given), Url)


def place_of(given: Any) -> Place:
    """The place for a path, with `~` expanded, or URL. Raises UsageError for an invalid URL."""
    if isinstance(given, Url):
        return given
    text = os.fspath(given)
    if "::" in text and "://" in text:
        raise UsageError(f"{text}: chained URLs are not supported (got ::); give the URL of the store.")
    found = _URL.match(text)
    if found is None:
        return Path(os.path.expanduser(text))
    scheme, slashes, rest = found[1].lower(), found[2], found[3]
    if len(slashes) == 1 and not _is_known(scheme):
        return Path(text)  # a folder whose name ends with a colon
    if scheme in _DISK:
        return Path(("/" if len(slashes) != 2 else "") + rest)
    parts = tuple(part for part in rest.split("/") if part)
    if not parts or {".", ".."} & {*parts}:
        raise UsageError(
            f"{text}: not a valid URL of a store (got no bucket, or . or ..); write {scheme}://bucket/folder."
        )
    return Url(scheme, parts)


def _is_known(scheme: str) -> bool:
    from fsspec.registry import known_implementations, registry

    return scheme in known_implementations or scheme in registry
