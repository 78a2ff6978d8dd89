"""Where a run keeps its checkpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardkit.errors import ConfigError, UsageError
from shardkit.runtime.settings_objects import foreign_text


@dataclass
class ProjectConfiguration:
    """The project's folder, and whether save_state() names checkpoints in it by itself, by their step.

    `total_limit` keeps that many of the newest (default: shardkit.checkpoint.keep_last). `iteration` is accepted for
    scripts that pass it: names come from the step, so that a resumed run continues them. `logging_dir` is where
    trackers and traces are written; by default the project's folder. A checkpoint is written once, on storage that all
    machines share: `save_on_each_node` is refused.
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
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def set_directories(self, project_dir: str | None = None) -> None:
        """The project's folder, and that for logs where none is named."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


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
