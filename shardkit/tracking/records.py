"""Built-in metric files: JSON lines and CSV. Each record is written to the system before `log` returns."""

import csv
import io
import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardkit.tracking.tracker import MEASURED, Step, Tracker, config_as_json, plain

Record = dict[str, Any]


class _File(Tracker):
    """A file of records in the run's folder: `metrics.<suffix>`.

    A new run renames an older run's file with a number. A resumed run drops the records that will be repeated, and
    appends.
    """

    requires_logging_directory = True
    suffix = ""

    def __init__(self, folder: Path, is_resumed: Callable[[], bool], **_: Any) -> None:
        self.path = folder / f"metrics.{self.suffix}"
        self._is_resumed = is_resumed
        self._is_open = False
        self._process, self._is_older = os.getpid(), self.path.exists()
        self._config: dict[str, Any] | None = None
        self._come_again: set[str] | None = None
        """Names of values that were logged since a checkpoint was loaded; None without a load."""

    @property
    def tracker(self) -> Any:
        """The file's path."""
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Written to `config.json` with the first record: until then it is unknown whether the run is resumed."""
        self._config = values

    def finish(self) -> None:
        if self._config is not None:
            self._open()

    def log(self, values: dict[str, Any], step: Step = None, **_: Any) -> None:
        self._open()
        if self._come_again is not None:
            names = {name for name in values if not name.startswith(MEASURED)} - self._come_again
            if names:
                self._drop(step, names)
        self._write(_record(values, step))

    def rewind(self, step: float, names: frozenset[str]) -> None:
        """Drops the records from the step on that have one of the names, and those of other names when they are logged:
        a script may count them otherwise, as epochs."""
        self._come_again = set()
        self._drop(step, {*names})

    def _drop(self, step: Step, names: set[str]) -> None:
        assert self._come_again is not None
        self._come_again |= names
        if not self.path.exists():
            return
        text = self._text([record for record in self.records() if not _comes_again(record, step, names)])
        if text != self._content():  # also where the last line is incomplete: the next would continue it
            _replace(self.path, text)

    def _open(self) -> None:
        if self._is_open or os.getpid() != self._process:  # a worker of a loader, which was forked from this run
            return
        self._is_open = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_older and self.path.exists() and not self._is_resumed():
            os.rename(self.path, _free_name(self.path))
        if self._config is not None:
            _replace(self.path.with_name("config.json"), config_as_json(self._config) + "\n")

    def _append(self, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)  # the script, or somebody, may have deleted it
        with open(self.path, "ab", buffering=0) as file:
            size, left = file.seek(0, os.SEEK_END), memoryview(text.encode())
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:  # a full disk: the next line must not continue half of this one
                file.truncate(size)
                raise

    def _content(self) -> str:
        """The file's text, with the line ends that are in its values."""
        with open(self.path, newline="", encoding="utf-8") as file:
            return file.read()

    def _complete(self) -> str:
        """The file's text without an incomplete last line."""
        text = self._content()
        return text[: text.rfind("\n") + 1]

    def records(self) -> list[Record]:
        """The file's records, without an incomplete last line."""
        raise NotImplementedError

    def _write(self, record: Record) -> None:
        raise NotImplementedError

    def _text(self, records: list[Record]) -> str:
        raise NotImplementedError


class JsonLines(_File):
    """One JSON object per line: `step`, and the values by name."""

    name, suffix = "jsonl", "jsonl"

    def _write(self, record: Record) -> None:
        self._append(self._text([record]))

    def records(self) -> list[Record]:
        found = []
        for line in self._complete().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def _text(self, records: list[Record]) -> str:
        return "".join(json.dumps({name: _json(value) for name, value in one.items()}) + "\n" for one in records)


class Csv(_File):
    """A table with one column per name; a new name adds a column, and the file is rewritten."""

    name, suffix = "csv", "csv"

    def _write(self, record: Record) -> None:
        columns = self._columns()
        known = set(columns)
        if new := [name for name in record if name not in known]:
            records = self.records() if columns else []
            _replace(self.path, _table([*columns, *new], [*records, record]))
        else:
            self._append(_rows(columns, [record]))

    def records(self) -> list[Record]:
        table = csv.DictReader(io.StringIO(self._complete(), newline=""))
        rows = [row for row in table if None not in (*row, *row.values())]
        return [row | {"step": _step(row["step"])} for row in rows]

    def _columns(self) -> list[str]:
        """Those of the file: it may have been moved away, or another process has added some."""
        if not self.path.exists():
            return []
        with open(self.path, newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])

    def _text(self, records: list[Record]) -> str:
        return _table(self._columns(), records)


def _table(columns: list[str], records: list[Record]) -> str:
    return _rows(columns, [{name: name for name in columns}, *records])


def _rows(columns: list[str], records: list[Record]) -> str:
    rows = []
    for record in records:
        row = io.StringIO()
        csv.writer(row, lineterminator="\r\n").writerow([record.get(name) for name in columns])  # so quotes both
        rows.append(row.getvalue().removesuffix("\r\n") + "\n")
    return "".join(rows)


def _record(values: dict[str, Any], step: Step) -> Record:
    """One call's record. A value that is named `step` gets another name: a resumed run drops records by their step."""
    return {"step": _valid(step), **{_column(name): _valid(plain(one)) for name, one in values.items()}}


def _column(name: str) -> str:
    return "logged_step" if name == "step" else _valid(name)


def _valid(value: Any) -> Any:
    """The value; a text in a form that UTF-8 has, which names of files may lack."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _comes_again(record: Record, step: Step, names: set[str]) -> bool:
    at = record.get("step")
    if not (isinstance(at, (int, float)) and isinstance(step, (int, float)) and at >= step):
        return False
    return any(record.get(_column(name)) not in ("", None) for name in names)


def _step(text: str) -> Step:
    """A step as it was written: a number, or a text of another form."""
    for kind in (int, float):
        with suppress(ValueError):
            if str(number := kind(text)) == text:
                return number
    return text or None


def _json(value: Any) -> Any:
    """The value for JSON: NaN and Infinity as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _free_name(path: Path) -> Path:
    number = 1
    while (free := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return free


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(text.encode())
    os.replace(temporary, path)
