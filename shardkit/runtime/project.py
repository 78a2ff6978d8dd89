"""Where a run keeps its checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import ConfigError, UsageError
from shardkit.runtime.settings_objects import foreign_text
from shardkit.storage import objects
from shardkit.storage.url import Url, is_url, place_of


@dataclass
class ProjectConfiguration:
    """The project's folder, and whether save_state() names checkpoints in it by itself, by their step.

    `total_limit` keeps that many of the newest (default: shardkit.checkpoint.keep_last). `iteration` is accepted for
    scripts that pass it: names come from the step, so that a resumed run continues them. `logging_dir` is where
    trackers and traces are written; by default the project's folder, unless that is a URL (s3://, gs://, ...): it holds
    checkpoints only. A checkpoint is written once, on storage that all machines share: `save_on_each_node` is refused.
    """

    project_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    logging_dir: str | None = None
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.save_on_each_node:
            raise UsageError(
                "ProjectConfiguration(save_on_each_node=...): a checkpoint is written once (got True); "
                "use storage that all machines share."
            )
        if self.logging_dir is not None and is_url(self.logging_dir):
            raise UsageError(
                f"ProjectConfiguration(logging_dir=...): trackers write files (got {self.logging_dir}); name a folder."
            )
        if self.logging_dir is None:
            self.logging_dir = _folder_for_logs(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """The project's folder, and that for logs where none is named."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = _folder_for_logs(project_dir)


def _folder_for_logs(project_dir: str | None) -> str | None:
    """The project's folder; None where that is in a store of objects, into which no log is written."""
    return None if project_dir is None or is_url(project_dir) else project_dir


def project_of(project_dir: str | Path | None, given: Any) -> ProjectConfiguration:
    """The project as Accelerator's arguments say it; a folder given on its own counts where the object has none.

    Raises ConfigError where `given` is no ProjectConfiguration."""
    project = ProjectConfiguration() if given is None else given
    if not isinstance(project, ProjectConfiguration):
        what = foreign_text(given) or f"is no ProjectConfiguration (got {given!r}); use shardkit.ProjectConfiguration"
        raise ConfigError(f"Accelerator(project_config=...): {what}.")
    if project.project_dir is None and project_dir is not None:
        project.set_directories(str(project_dir))
    return project


def problem_of(project: ProjectConfiguration) -> str | None:
    """What would keep this rank from saving into the project's store of objects; None where it has none, or may."""
    place = None if project.project_dir is None else place_of(project.project_dir)
    return objects.problem(place) if isinstance(place, Url) else None
