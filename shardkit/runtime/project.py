"""Where a run keeps its checkpoints."""

from dataclasses import dataclass


@dataclass
class ProjectConfiguration:
    """The project's folder, and whether save_state() names checkpoints in it by itself, by their step.

    `total_limit` keeps that many of the newest (default: shardkit.checkpoint.keep_last). `iteration` is accepted for
    scripts that pass it: names come from the step, so that a resumed run continues them.
    """

    project_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    logging_dir: str | None = None

    def __post_init__(self) -> None:
        if self.logging_dir is None:
            self.logging_dir = self.project_dir
