"""The model, read beside the questions: a child process builds it while the person answers."""

import threading
from pathlib import Path

from shardkit.errors import ModelError
from shardkit.model import builtin
from shardkit.model.describe import Description
from shardkit.model.sources import FORMS, describe

TIMEOUT_S = 120.0


class ModelReader:
    """Reads one model at a time in the background; `result` waits for it."""

    def __init__(self, folder: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self.spec: str | None = None
        self._thread: threading.Thread | None = None
        self._results: dict[str, Description | ModelError] = {}

    def begin(self, spec: str | None) -> None:
        """Start reading the model that `spec` names, unless it was read before; None: there is no model."""
        self.spec = spec
        if spec is not None and not isinstance(self._results.get(spec), Description):
            self._results.pop(spec, None)
            self._thread = threading.Thread(target=self._read, args=(spec,), daemon=True)
            self._thread.start()

    def is_reading(self) -> bool:
        """Whether `result` would have to wait."""
        return self.spec is not None and self.spec not in self._results

    def result(self) -> Description | None:
        """What is known of the model; None without one. Waits. Raises ModelError where it cannot be read."""
        if self.spec is None:
            return None
        if self.is_reading() and self._thread is not None:
            self._thread.join()
        found = self._results[self.spec]
        if isinstance(found, ModelError):
            raise found
        return found

    def _read(self, spec: str) -> None:
        try:
            self._results[spec] = describe(spec, self.timeout_s, self.folder)
        except ModelError as error:
            self._results[spec] = error
        except Exception as error:
            self._results[spec] = ModelError(f"--model {spec}: cannot be read ({error}); leave it out to go on.")


def check_spec(spec: str, folder: Path) -> str:
    """The spec, if it has the form of one; ValueError with what to do otherwise. Looks at names only: instant."""
    if spec in builtin.BUILTIN or spec.startswith("gpt:") or (folder / spec).exists():
        return spec
    module, colon, attribute = spec.partition(":")
    if colon and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")]):
        return spec
    raise ValueError(f"not a model (got {spec!r}); give {FORMS}, or press Enter to go on without.")
