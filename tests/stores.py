"""A store of objects that needs no server: files below a folder, without folders, seen by all processes of a test.

    url = stores.made(tmp_path)                       objects://<tmp_path>/bucket
    stores.misbehave(tmp_path, "unanswered", "MANIFEST", 1)

It is as S3 where that matters: an object is there whole or not at all, a PUT that may only create is refused in one
step, and what is listed are names with a prefix. On request it loses the answer to a write ("unanswered"), fails
("unread", "unwritten", "refused"), or leaves names out of its listings ("unlisted").
"""

import json
import os
import uuid
from datetime import datetime, timezone
from pathlib import Path

import fsspec
from fsspec.spec import AbstractFileSystem

BUCKET = "bucket"


def made(folder: Path) -> str:
    """The URL of a new bucket."""
    (folder / BUCKET).mkdir()
    return f"objects://{folder}/{BUCKET}"


def misbehave(folder: Path, kind: str = "", name: str = "", times: int = 0) -> None:
    """From now on, so many times, where the name of an object holds this; without a kind never again."""
    (folder / BUCKET / ".fault").write_text(json.dumps([kind, name, times]))


class Objects(AbstractFileSystem):
    protocol = "objects"
    root_marker = "/"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + str(path).removeprefix("objects://").strip("/")

    def _fails(self, kind, path):
        note = Path(path[: path.index(f"/{BUCKET}/") + len(BUCKET) + 1], ".fault") if f"/{BUCKET}/" in path else None
        if note is None or not note.exists():
            return False
        wanted, name, times = json.loads(note.read_text())
        if (wanted, times > 0) != (kind, True) or name not in path:
            return False
        note.write_text(json.dumps([wanted, name, times - 1]))
        return True

    def info(self, path, **kwargs):
        path = self._strip_protocol(path)
        if self._fails("expired", path):
            raise OSError(22, "Bad Request")  # as s3fs takes an answer without a body
        if os.path.isdir(path):
            if not self.find(path):
                raise FileNotFoundError(path)
            return {"name": path, "size": 0, "type": "directory"}
        seen = os.stat(path)
        return {"name": path, "size": seen.st_size, "type": "file", "ETag": f"{seen.st_ino}-{seen.st_mtime_ns}"}

    def find(self, path, maxdepth=None, withdirs=False, detail=False, **kwargs):
        if self._fails("expired", path):
            raise PermissionError("The provided token has expired.")
        names = [f"{at}/{name}" for at, _, found in os.walk(self._strip_protocol(path)) for name in found]
        names = sorted(name for name in names if not name.endswith("/.fault") and not self._fails("unlisted", name))
        return {name: self.info(name) for name in names} if detail else names

    def ls(self, path, detail=True, **kwargs):
        path = self._strip_protocol(path)
        names = {path + "/" + name.removeprefix(path + "/").split("/")[0] for name in self.find(path)}
        if not names:
            raise FileNotFoundError(path)
        return [self.info(name) for name in sorted(names)] if detail else sorted(names)

    def modified(self, path):
        return datetime.fromtimestamp(os.stat(self._strip_protocol(path)).st_mtime, timezone.utc)

    def cat_file(self, path, start=None, end=None, **kwargs):
        path = self._strip_protocol(path)
        if self._fails("expired", path):
            raise PermissionError("The provided token has expired.")
        if self._fails("unread", path):
            raise OSError(5, "the store is down")
        with open(path, "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        path = self._strip_protocol(path)
        if self._fails("refused", path):
            raise PermissionError("The AWS Access Key Id you provided does not exist in our records.")
        if self._fails("unwritten", path):
            raise OSError(5, "the store is down")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{os.path.dirname(path)}/../.{uuid.uuid4().hex}"
        Path(temporary).write_bytes(value)
        try:
            os.link(temporary, path) if mode == "create" else os.replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
        if self._fails("unanswered", path):
            raise TimeoutError("no answer came")

    def open(self, path, mode="rb", block_size=None, **kwargs):
        assert mode == "wb"
        return Upload(self, path)

    def rm(self, path, recursive=False, maxdepth=None):
        path = self._strip_protocol(path)
        for name in self.find(path) if os.path.isdir(path) else [path]:
            os.unlink(name)


class Upload:
    """Parts; the object is there when it is closed."""

    closed = False

    def __init__(self, store, path):
        self.store, self.path, self.data = store, path, bytearray()

    def write(self, data):
        if self.store._fails("unwritten", self.path):
            raise OSError(5, "the store is down")
        self.data += data

    def close(self):
        if not self.closed:
            self.closed = True
            self.store.pipe_file(self.path, bytes(self.data))


fsspec.register_implementation("objects", Objects, clobber=True)
