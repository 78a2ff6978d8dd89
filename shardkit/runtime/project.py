"""The project folder of a run: checkpoints and logs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.checkpoint.loading import locate
from shardkit.checkpoint.saving import shared_storage
from shardkit.distributed.control import ControlGroup
from shardkit.errors import ConfigError, UsageError
from shardkit.log import get_logger
from shardkit.runtime.settings_objects import foreign_text
from shardkit.storage import objects
from shardkit.storage.url import Place, Url, is_url, place_of

log = get_logger(__name__)


@dataclass
class ProjectConfiguration:
    """The project folder, and whether save_state() names checkpoints in it automatically, by step.

    `total_limit`: how many of the newest checkpoints are kept (default: shardkit.checkpoint.keep_last). `iteration` is
    accepted and has no effect: names come from the step, so that a resumed run continues them. `logging_dir`: folder of
    trackers and traces; by default the project folder, unless that is a URL (s3://, gs://, ...), which is for
    checkpoints only. `save_on_each_node` raises UsageError: a checkpoint is written once, on storage that all machines
    share.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.set_directories(self.project_dir)

    def __setattr__(self, name: str, value: Any) -> None:
        """Scripts also set fields after the Accelerator is made, which reads them when it saves."""
        _check(name, value)
        super().__setattr__(name, _expanded(value) if name == "logging_dir" else value)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Sets the project folder, and the log folder where none is set."""
        self.project_dir = _expanded(project_dir)
        if self.logging_dir is None:
            self.logging_dir = _folder_for_logs(self.project_dir)


def _check(name: str, value: Any) -> None:
    """Raises UsageError where a field cannot have this value."""
    if name == "save_on_each_node" and value:
        raise UsageError(
            "ProjectConfiguration(save_on_each_node=...): a checkpoint is written once (got True); "
            "use storage that all machines share."
        )
    if name == "total_limit" and value is not None and (type(value) is not int or value < 1):
        raise UsageError(
            "ProjectConfiguration(total_limit=...): not a number of checkpoints to keep (got "
            f"{value!r}); give 1 or more, or None for that of shardkit.checkpoint.keep_last."
        )
    is_path = isinstance(value, (str, os.PathLike))
    if name == "logging_dir" and value is not None and (not is_path or is_url(value)):
        raise UsageError(f"ProjectConfiguration(logging_dir=...): trackers write files (got {value}); name a folder.")


def _expanded(path: str | None) -> str | None:
    """The path, with `~` expanded."""
    return os.path.expanduser(path) if path is not None and str(path).startswith("~") else path


def _folder_for_logs(project_dir: str | None) -> str | None:
    """The project's folder; None if it is in an object store, which is not used for logs."""
    return None if project_dir is None or is_url(project_dir) else project_dir


def project_of(project_dir: str | Path | None, given: Any) -> ProjectConfiguration:
    """The project from Accelerator's arguments; `project_dir` is used where the object has no folder.

    Raises ConfigError where `given` is not a ProjectConfiguration."""
    project = ProjectConfiguration() if given is None else given
    if not isinstance(project, ProjectConfiguration):
        what = (
            foreign_text(given) or f"is not a ProjectConfiguration (got {given!r}); use shardkit.ProjectConfiguration"
        )
        raise ConfigError(f"Accelerator(project_config=...): {what}.")
    if project.project_dir is None and project_dir is not None:
        project.set_directories(str(project_dir))
    return project


def problem_of(project: ProjectConfiguration) -> str | None:
    """A problem that would prevent this rank from saving into the project's object store; None if there is none."""
    place = None if project.project_dir is None else place_of(project.project_dir)
    return objects.problem(place) if isinstance(place, Url) else None


def series_of(project: ProjectConfiguration) -> Place | None:
    """Where save_state() puts checkpoints that it names itself; None where it does not."""
    if project.project_dir is None or not project.automatic_checkpoint_naming:
        return None
    return place_of(project.project_dir) / locate.SERIES


def missing_for_series(project: ProjectConfiguration) -> str | None:
    """What a script has not set, so that save_state() names no checkpoints itself; None where it does."""
    if series_of(project) is not None:
        return None
    return "project folder" if project.project_dir is None else "automatic_checkpoint_naming"


def warn_of_folder(project: ProjectConfiguration, control: ControlGroup) -> None:
    """Warns, on rank 0, where the first save_state() into the project's folder would fail. Collective."""
    series = series_of(project)
    problem = shared_storage.problem(series if isinstance(series, Path) else None, control)
    if problem and control.rank == 0:
        log.warning(
            "checkpoint: %s: save_state() will fail; use a folder that all ranks can write and all machines share, or "
            "an object store (s3://...).",
            problem,
        )
