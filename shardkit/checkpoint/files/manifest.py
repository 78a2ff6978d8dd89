"""The commit record of a checkpoint: its metadata, and the size and digests of every file in it.

It is written last and contains a digest of itself. Any change is an error with the reason. A file has one digest for
each rank that wrote into it, over the bytes of that rank in file order.
"""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from shardkit.checkpoint.files import digest as digests
from shardkit.checkpoint.files import disk
from shardkit.errors import CheckpointCorrupted, CheckpointError
from shardkit.storage import objects
from shardkit.storage.url import Place, Url

NAME = "MANIFEST.json"
# What Windows and file servers add to folders that are looked at.
_OF_SYSTEMS = {"Thumbs.db", "desktop.ini", "@eaDir"}
FORMAT = "shardkit-checkpoint"
VERSION = 6  # the newest version that this shardkit reads
ARRAYS_VERSION = 6  # of a checkpoint with arrays of numpy
TAGS_VERSION = 5  # of a checkpoint with values of types that were added to `values`
STORE_VERSION = 4  # of a checkpoint in an object store
ADDITIONS_VERSION = 3  # of a checkpoint with files that hooks added
APART_VERSION = 2  # of a checkpoint with per-rank state, or optimizer state beyond that of its parameters
PLAIN_VERSION = 1  # of a checkpoint that readers of version 1 read completely

# The only names that a reader opens. A manifest with other names is refused, so no path leads out of the folder.
FILE_NAME = re.compile(
    r"index\.json|config\.yaml|state/(common|rank-\d{5,7})\.json"
    r"|(?P<section>(model|optim)(_\d{1,5})?|objects|own)/((?P=section)|r\d{5,7}-of-\d{5,7})\.safetensors"
)

# The prefix of a checkpoint's files in a store: the save id. On a disk they are next to the manifest.
DATA = re.compile(r"[0-9a-f]{32}")

# Names that hooks may give to their files: no parent folders, and no characters that other systems do not allow.
ADDITION = re.compile(r"[^/\\\x00-\x1f]{1,255}(/[^/\\\x00-\x1f]{1,255}){0,15}")


def is_addition(name: str) -> bool:
    """Whether a hook may add a file with this name to a checkpoint."""
    return bool(ADDITION.fullmatch(name)) and not {".", ".."} & {*name.split("/")} and name != NAME


@dataclass(frozen=True)
class File:
    """One file: its size, and the digest of the bytes that each rank wrote into it."""

    bytes: int
    digests: dict[int, str]


@dataclass(frozen=True)
class Manifest:
    """The metadata of a checkpoint."""

    kind: str
    step: int
    epoch: int
    samples_seen: int
    save_id: str
    run_id: str
    parent: str | None
    created_utc: str
    world_size: int
    mesh: dict[str, Any]
    config_sha256: str | None
    model_fingerprint: str
    versions: dict[str, str]
    sections: list[str]
    digest: str
    files: dict[str, File] = field(default_factory=dict)
    version: int = PLAIN_VERSION
    additions: dict[str, File] = field(default_factory=dict)
    """Files that the user's hooks added: verified like the rest, but not opened by a reader."""
    data: str | None = None
    """The subfolder with the files; None: they are next to the manifest."""
    nan: list[str] = field(default_factory=list)
    """Some of the model's tensors that have NaN values."""

    def stored(self, name: str) -> str:
        """The path of a file, relative to the manifest's folder."""
        return name if self.data is None else f"{self.data}/{name}"

    @property
    def every_file(self) -> dict[str, File]:
        """The checkpoint's files and those that hooks added."""
        return {**self.files, **self.additions}

    @property
    def bytes(self) -> int:
        """Total size of all files."""
        return sum(file.bytes for file in self.every_file.values())


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file, with the digest of itself."""
    value: dict[str, Any] = {"format": FORMAT, "min_reader": manifest.version, **asdict(manifest)}
    value["files"] = _files_to_json(manifest.files)
    value["additions"] = _files_to_json(manifest.additions)
    if not manifest.additions:
        del value["additions"]  # so that files of older versions stay byte-identical
    if manifest.data is None:
        del value["data"]
    if not manifest.nan:
        del value["nan"]
    value["self_sha256"] = hashlib.sha256(disk.to_json(value)).hexdigest()
    return disk.to_json(value)


def _files_to_json(files: dict[str, File]) -> dict[str, Any]:
    return {
        name: {"bytes": file.bytes, "digests": {str(rank): text for rank, text in sorted(file.digests.items())}}
        for name, file in files.items()
    }


def self_digest(folder: Place) -> str:
    """sha256 of the manifest's bytes; must be equal on all ranks."""
    return hashlib.sha256(disk.read_small(folder, NAME)).hexdigest()


def read(folder: Place) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError with the reason if it is missing or invalid."""
    if isinstance(folder, Path) and not exists(folder):
        raise _missing(folder)
    try:
        text = disk.read_small(folder, NAME)
    except CheckpointCorrupted:
        if exists(folder):
            raise
        raise _missing(folder) from None
    return from_bytes(text, str(folder / NAME))


def is_replaced(folder: Place, manifest: Manifest) -> bool:
    """Whether the folder has the manifest of another checkpoint by now: a run has saved there meanwhile."""
    with suppress(CheckpointError, OSError):
        return read(folder).save_id != manifest.save_id
    return False


TO_CONVERT = (
    "was saved by Accelerate or torch.distributed.checkpoint; write it in this form with shardkit checkpoint convert "
    "FOLDER -o OUTPUT"
)
# Each alone tells such a folder: an export of weights has none of them.
_OF_OTHERS = (".metadata", "pytorch_model_fsdp_0", "pytorch_model_fsdp.bin", "optimizer.bin", "random_states_0.pkl")


def is_to_convert(folder: Place) -> bool:
    """Whether `shardkit checkpoint convert` reads this folder, by the names in it."""
    return not isinstance(folder, Url) and any(os.path.exists(folder / name) for name in _OF_OTHERS)


def _missing(folder: Place) -> CheckpointError:
    if not disk.is_there(folder):
        return CheckpointError(f"{folder}: no such folder; give the folder of a checkpoint.")
    if isinstance(folder, Path) and folder.is_file():
        return CheckpointError(f"{folder}: is a file; give the folder of a checkpoint.")
    if is_to_convert(folder):
        return CheckpointError(f"{folder}: {TO_CONVERT}.")
    return CheckpointError(
        f"{folder}: not a checkpoint, or an incomplete one ({NAME} is missing); use another checkpoint."
    )


def exists(folder: Place) -> bool:
    """Whether there is a manifest."""
    return objects.look(folder / NAME) is not None if isinstance(folder, Url) else disk.is_there(folder / NAME)


def is_checkpoint(folder: Place) -> bool:
    """Whether there is a manifest of shardkit, which may be damaged."""
    return exists(folder) and not is_of_another_program(folder)


def is_of_another_program(folder: Place) -> bool:
    """Whether the file is undamaged JSON of another format: of a web page, say, on a disk that ignores case."""
    try:
        return not _is_ours(disk.from_json(disk.read_small(folder, NAME), NAME))
    except CheckpointError:
        return False
    except OSError:
        if isinstance(folder, Url):  # the store does not answer
            raise
        return False


def _is_ours(value: Any) -> bool:
    return isinstance(value, dict) and value.get("format") == FORMAT


def from_bytes(text: bytes, where: str) -> Manifest:
    """As `read`, from the manifest's bytes."""
    value = disk.from_json(text, where)
    if not _is_ours(value):
        raise CheckpointCorrupted(f"{where}: not a shardkit manifest.")
    stated = value.pop("self_sha256", None)
    if stated != hashlib.sha256(disk.to_json(value)).hexdigest():
        raise CheckpointCorrupted(f"{where}: its digest does not match its contents; it was changed or damaged.")
    if not isinstance(value.get("min_reader"), int) or value["min_reader"] > VERSION:
        found = value.get("version")
        raise CheckpointError(
            f"{where}: format version {found} is newer than this shardkit supports ({VERSION}); upgrade shardkit."
        )
    try:
        return _from_json(value)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointCorrupted(f"{where}: {error}.") from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


_FORMS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("save_id", "run_id", "created_utc", "model_fingerprint"), _is_text),
    **dict.fromkeys(("parent", "config_sha256"), _is_text_or_none),
    "versions": lambda value: isinstance(value, dict),
    "sections": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "mesh": lambda value: isinstance(value, dict) and all(isinstance(inner, list) for inner in value.values()),
}


def _from_json(value: dict[str, Any]) -> Manifest:
    known = {item.name for item in fields(Manifest)}
    given = {key: item for key, item in value.items() if key in known}
    if value["digest"] not in digests.NAMES or value["kind"] not in ("sharded", "full"):
        raise ValueError(f"unknown digest or kind (got {value['digest']!r}, {value['kind']!r})")
    numbers = ("step", "epoch", "samples_seen", "world_size", "version")
    if not all(type(value[key]) is int and value[key] >= 0 for key in numbers):
        raise ValueError(f"{', '.join(numbers)} must be non-negative integers")
    if wrong := next((key for key, is_right in _FORMS.items() if not is_right(value[key])), None):
        raise ValueError(f"{wrong} has another form (got {str(value[wrong])[:80]!r})")
    given["files"] = {name: _file(name, file, value["world_size"]) for name, file in value["files"].items()}
    added = value.get("additions", {})
    given["additions"] = {name: _file(name, file, value["world_size"], is_added=True) for name, file in added.items()}
    if twice := given["files"].keys() & given["additions"].keys():
        raise ValueError(f"a file is listed twice (got {min(twice)!r})")
    if not (isinstance(nan := value.get("nan", []), list) and all(map(_is_text, nan))):
        raise ValueError(f"nan has another form (got {str(nan)[:80]!r})")
    if given.get("data") is not None and not DATA.fullmatch(given["data"]):
        raise ValueError(f"an invalid folder name (got {given['data']!r})")
    return Manifest(**given)


def _file(name: str, value: dict[str, Any], world_size: int, is_added: bool = False) -> File:
    if not (is_addition(name) if is_added else FILE_NAME.fullmatch(name)):
        raise ValueError(f"an invalid file name (got {name[:80]!r})")
    texts = {int(rank): text for rank, text in value["digests"].items()}
    if type(value["bytes"]) is not int or value["bytes"] < 0 or not texts:
        raise ValueError(f"{name}: size or digests are missing")
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"{name}: digests must be text")
    if not all(0 <= rank < world_size for rank in texts):
        raise ValueError(f"{name}: digests of ranks outside a world of {world_size} (got {sorted(texts)[:5]})")
    return File(value["bytes"], texts)


def check_sizes(folder: Place, manifest: Manifest) -> list[str]:
    """Problems with the presence, type and size of the files; empty if there are none. Reads no contents, and looks at
    each file once. Files that a script has put beside them are no problem."""
    if isinstance(folder, Url):
        return _check_objects(folder, manifest)
    problems, found = [], _below(folder)
    for name, file in manifest.every_file.items():
        name = manifest.stored(name)
        path, seen, parent = folder / name, found.get(name), found.get(name.rpartition("/")[0])
        if seen is None and (parent is None or stat.S_ISDIR(parent.st_mode)):
            problems.append(f"{path}: missing")
        elif seen is None or not stat.S_ISREG(seen.st_mode):
            problems.append(f"{path}: not a regular file")
        elif seen.st_size != file.bytes:
            problems.append(_other_size(path, seen.st_size, file))
    return problems + _not_ours(folder, _files_among(found), manifest)


def _check_objects(url: Url, manifest: Manifest) -> list[str]:
    """As `check_sizes`, in a store. A file that the listing does not show yet is looked up by name."""
    listed = objects.below(url if manifest.data is None else url / manifest.data)
    problems, found = [], {manifest.stored(name): seen for name, seen in listed.items()}
    for name, file in manifest.every_file.items():
        name = manifest.stored(name)
        seen = found.get(name) or objects.look(url / name)
        if seen is None:
            problems.append(f"{url / name}: missing")
        elif seen.bytes != file.bytes:
            problems.append(_other_size(url / name, seen.bytes, file))
    return problems + _not_ours(url, found, manifest)


def _not_ours(folder: Place, names: Iterable[str], manifest: Manifest) -> list[str]:
    """Problems of files that look like those of a checkpoint, as if two were mixed, but are not this one's."""
    return [
        f"{folder / name}: not part of this checkpoint (move it elsewhere)"
        for name in _unknown(names, manifest)
        if FILE_NAME.fullmatch(name.removeprefix(f"{manifest.data}/"))
    ]


def _other_size(path: Place, size: int, file: File) -> str:
    return f"{path}: has {size} bytes instead of the {file.bytes} that were saved (truncated or overwritten)"


def strangers(folder: Path) -> list[str]:
    """Names of the files below a checkpoint's folder that are not in its manifest, or, if that is damaged, that the
    format does not use; except hidden ones (.DS_Store, .nfs...) and those of operating systems."""
    files = _files_among(_below(folder))
    try:
        return _unknown(files, read(folder))
    except CheckpointError:
        return _not_hidden(name for name in files if name != NAME and not FILE_NAME.fullmatch(name))


def _files_among(found: dict[str, os.stat_result]) -> list[str]:
    return [name for name, seen in found.items() if not stat.S_ISDIR(seen.st_mode)]


def _unknown(names: Iterable[str], manifest: Manifest) -> list[str]:
    return _not_hidden({*names} - {*map(manifest.stored, manifest.every_file), NAME})


def _not_hidden(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not any(part[0] == "." or part in _OF_SYSTEMS for part in name.split("/")))


def _below(folder: Path) -> dict[str, os.stat_result]:
    """The stat results of all files and folders below the folder, by relative path; links are not followed."""
    found, folders = {}, [""]
    while folders:
        inside = folders.pop()
        with os.scandir(folder / inside) as items:
            for item in items:
                found[inside + item.name] = item.stat(follow_symlinks=False)
                if item.is_dir(follow_symlinks=False):
                    folders.append(f"{inside}{item.name}/")
    return found
