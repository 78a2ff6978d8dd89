"""Reads the model in a child process."""

from pathlib import Path

from shardkit.errors import ModelError
from shardkit.model.describe import ModelDescription
from shardkit.model.sources import describe

TIMEOUT_S = 120.0


class ModelReader:
    """Reads models, with a cache."""

    def __init__(self, folder: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self._known: dict[str, ModelDescription] = {}

    def knows(self, spec: str) -> bool:
        """Whether the model is in the cache."""
        return spec in self._known

    def read(self, spec: str) -> ModelDescription:
        """The description of the model `spec`. Raises ModelError where it cannot be read."""
        if spec not in self._known:
            try:
                self._known[spec] = describe(spec, self.timeout_s, self.folder)
            except ModelError:
                raise
            except Exception as error:
                raise ModelError(f"--model {spec}: cannot be read ({error}); leave it out to continue.") from error
        return self._known[spec]
