"""Trackers of other packages. Each starts at its first use, so that a run which loads a checkpoint after
`init_trackers` continues the tracker's previous run."""

import json
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardkit import env
from shardkit.tracking.tracker import Tracker, config_as_json, plain


class _LazyTracker(Tracker):
    """A tracker whose native object is created on first use."""

    def __init__(self, project: str, folder: Path | None, is_resumed: Callable[[], bool], **arguments: Any) -> None:
        self._project, self._folder, self._is_resumed, self._arguments = project, folder, is_resumed, arguments
        self._config: dict[str, Any] | None = None
        self._own: Any = None

    @property
    def tracker(self) -> Any:
        if self._own is None:
            self._own = self._begin()
            if self._config is not None:
                self._store(self._config)
        return self._own

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._config = dict(values)
        if self._own is not None:
            self._store(self._config)

    def finish(self) -> None:
        if self._own is None and self._config is not None:
            _ = self.tracker  # a run that logged nothing still stores its configuration
        if self._own is not None:
            self._end()
        self._own = None

    def _begin(self) -> Any:
        raise NotImplementedError

    def _store(self, values: dict[str, Any]) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        raise NotImplementedError

    def _former_id(self) -> str | None:
        """The id that `_store_id` stored for the run that this one continues; None for a new run."""
        path = self._id_file()
        if path is None or not path.exists() or not self._is_resumed():
            return None
        return json.loads(path.read_text())["id"]

    def _store_id(self, run_id: str) -> None:
        path = self._id_file()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"id": run_id}) + "\n")

    def _id_file(self) -> Path | None:
        return None if self._folder is None else self._folder / f"{self.name}.json"


class TensorBoard(_LazyTracker):
    """Event files in the run's folder; after a checkpoint is loaded, steps that are repeated are purged."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, *of_all: Any, **arguments: Any) -> None:
        super().__init__(*of_all, **arguments)
        self._purge: int | None = None
        self._last: dict[str, float] = {}
        """The last step of each name that this process has logged."""
        self._waits = False

    @property
    def writer(self) -> Any:
        """The SummaryWriter."""
        return self.tracker

    def rewind(self, step: float, names: frozenset[str]) -> None:
        """A process that has logged before may have loaded its best state to test it: there the purge, which is of all
        names, waits until one of them comes again."""
        self._waits = bool(self._last)
        if not self._waits:
            self._purge_from(step)

    def _purge_from(self, step: float) -> None:
        if self._own is not None:
            self._own.close()
        self._own, self._purge, self._waits = None, int(step), False

    def log(self, values: dict[str, Any], step: float | None = None, **arguments: Any) -> None:
        if isinstance(step, (int, float)):
            if self._waits and any(self._last.get(name, step - 1) >= step for name in values):
                self._purge_from(step)
            self._last |= dict.fromkeys(values, step)
        for name, value in values.items():
            number = plain(value)
            if isinstance(number, str):
                self.writer.add_text(name, number, global_step=step, **arguments)
            elif number is not None:
                self.writer.add_scalar(name, number, global_step=step, **arguments)
        self.writer.flush()

    def log_images(self, values: dict[str, Any], step: int | None, **arguments: Any) -> None:
        """Batches of images, (batch, height, width, channel) arrays by name."""
        for name, value in values.items():
            self.writer.add_images(name, value, global_step=step, **{"dataformats": "NHWC", **arguments})

    def _begin(self) -> Any:
        assert self._folder is not None
        if not self._is_resumed():
            _set_aside(self._folder)
        return _summary_writer()(str(self._folder), **{"purge_step": self._purge, **self._arguments})

    def _store(self, values: dict[str, Any]) -> None:
        self._own.add_text("config", config_as_json(values).replace("\n", "  \n"))
        self._own.flush()

    def _end(self) -> None:
        self._own.close()


class _RunTracker(_LazyTracker):
    """A tracker whose native object is a run that takes all values of a step at once, images and tables among them."""

    takes_objects = True

    @property
    def run(self) -> Any:
        """The run."""
        return self.tracker

    def log(self, values: dict[str, Any], step: int | None = None, **arguments: Any) -> None:
        self.tracker.log({name: _plain_or_object(value) for name, value in values.items()}, step=step, **arguments)


class WeightsAndBiases(_RunTracker):
    """A Weights & Biases run; a resumed run continues it."""

    name = "wandb"

    def log_images(self, values: dict[str, Any], step: int | None = None, **arguments: Any) -> None:
        """Lists of images by name."""
        import wandb

        for name, images in values.items():
            self.tracker.log({name: [wandb.Image(image) for image in images]}, step=step, **arguments)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **arguments: Any,
    ) -> None:
        """A table, from columns and data or from a data frame."""
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.tracker.log({table_name: table}, step=step, **arguments)

    def _begin(self) -> Any:
        import wandb

        former = self._former_id()
        found = {} if former is None else {"id": former, "resume": "allow"}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            found["dir"] = str(self._folder)
        run = wandb.init(project=self._project, **{**found, **self._arguments})
        self._store_id(run.id)
        return run

    def _store(self, values: dict[str, Any]) -> None:
        self._own.config.update(values, allow_val_change=True)

    def _end(self) -> None:
        self._own.finish()


class Trackio(_RunTracker):
    """A Trackio run; a resumed run continues it."""

    name = "trackio"

    def _begin(self) -> Any:
        import trackio

        former = self._former_id()
        found: dict[str, Any] = {"config": self._config or {}}
        found |= {} if former is None else {"name": former, "resume": "must"}
        run = trackio.init(project=self._project, **{**found, **self._arguments})
        self._store_id(run.name)
        return run

    def _store(self, values: dict[str, Any]) -> None: ...  # passed to init

    def _end(self) -> None:
        import trackio

        trackio.finish()


class Mlflow(_LazyTracker):
    """An MLflow run in the experiment named by the project, or by MLFLOW_EXPERIMENT_NAME; a resumed run continues it.
    Its arguments are those of mlflow.start_run, with Accelerate's: experiment_name, logging_dir, nested_run."""

    name = "mlflow"

    @property
    def active_run(self) -> Any:
        """The run."""
        return self.tracker

    @property
    def _mlflow(self) -> Any:
        """The package, whose functions log to the active run: that of this tracker, which is begun."""
        _ = self.tracker
        return import_module("mlflow")

    def log_figure(self, figure: Any, artifact_file: str, **arguments: Any) -> None:
        """A figure of matplotlib or plotly as a file of the run."""
        self._mlflow.log_figure(figure, artifact_file, **arguments)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """A file, copied into the run's files."""
        self._mlflow.log_artifact(local_path, artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """A folder's files, copied into the run's files."""
        self._mlflow.log_artifacts(local_dir, artifact_path)

    def log(self, values: dict[str, Any], step: int | None = None, **arguments: Any) -> None:
        numbers = {name: plain(value) for name, value in values.items()}
        metrics = {name: value for name, value in numbers.items() if isinstance(value, (int, float))}
        self._mlflow.log_metrics(metrics, step=step, **arguments)
        for name, value in numbers.items():
            if isinstance(value, str):
                self._mlflow.set_tag(name, value)

    def _begin(self) -> Any:
        import mlflow

        arguments = dict(self._arguments)
        experiment = arguments.pop("experiment_name", self._project)
        experiment = env.get("MLFLOW_EXPERIMENT_NAME") or experiment
        place = arguments.pop("logging_dir", None)
        if place is not None and mlflow.get_experiment_by_name(experiment) is None:
            mlflow.create_experiment(experiment, artifact_location=str(place))
        mlflow.set_experiment(experiment)
        if "nested_run" in arguments:
            arguments["nested"] = arguments.pop("nested_run")
        former = self._former_id()
        run = mlflow.start_run(**{**({} if former is None else {"run_id": former}), **arguments})
        self._store_id(run.info.run_id)
        return run

    def _store(self, values: dict[str, Any]) -> None:
        import mlflow

        # MLflow accepts 100 parameters per call, of 6,000 characters each (mlflow.utils.validation).
        texts = {name: str(value)[:6000] for name, value in values.items()}
        items = list(texts.items())
        if self._former_id() is None or not self._own.data.params:
            for start in range(0, len(items), 100):
                mlflow.log_params(dict(items[start : start + 100]))

    def _end(self) -> None:
        import mlflow

        mlflow.end_run()


def _summary_writer() -> Any:
    """torch's SummaryWriter, which needs the package tensorboard, or that of tensorboardX. Where tensorboard alone is
    installed, and lacks a package itself, the error names that."""
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        if find_spec("tensorboardX") is None:
            raise
        return import_module("tensorboardX").SummaryWriter


def _set_aside(folder: Path) -> None:
    """Moves an older run's event files into a subfolder, which TensorBoard shows as a separate run."""
    files = sorted(folder.glob("events.out.tfevents.*")) if folder.exists() else []
    if not files:
        return
    number = 1
    while (older := folder / f"older.{number}").exists():
        number += 1
    older.mkdir()
    for file in files:
        file.rename(older / file.name)


def _plain_or_object(value: Any) -> Any:
    return plain(value) if callable(getattr(value, "item", None)) else value
