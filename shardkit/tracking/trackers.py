"""The trackers of a run: selection, start, and logging to all of them."""

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.tracking.installed import Mlflow, TensorBoard, Trackio, WeightsAndBiases
from shardkit.tracking.records import Csv, JsonLines
from shardkit.tracking.tracker import NoTracker, Step, Tracker, is_object, plain, refuse_others
from shardkit.wording import near_or

log = get_logger(__name__)

# By name: the class, and the packages of which one must be installed.
KNOWN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "jsonl": (JsonLines, ()),
    "csv": (Csv, ()),
    "tensorboard": (TensorBoard, ("tensorboard", "tensorboardX")),
    "wandb": (WeightsAndBiases, ("wandb",)),
    "mlflow": (Mlflow, ("mlflow",)),
    "trackio": (Trackio, ("trackio",)),
}
WHERE = "Accelerator(log_with=...)"
UNSUPPORTED = ("aim", "comet_ml", "clearml", "dvclive", "swanlab")


def chosen(log_with: Any) -> list[str | Tracker]:
    """The trackers that `log_with` selects: names, enum members, Tracker objects, or a list of these; "all" is kept as
    it is, for `expanded`. Raises UsageError with everything that is invalid."""
    given = log_with if isinstance(log_with, (list, tuple)) else [] if log_with is None else [log_with]
    names = [_name(one) for one in given]
    if "all" in names:
        return ["all", *dict.fromkeys(one for one in names if isinstance(one, Tracker))]
    problems = [text for one in names if isinstance(one, str) and (text := _problem(one))]
    if problems:
        raise UsageError("\n".join(problems))
    return list(dict.fromkeys(names))


def expanded(selected: Sequence[str | Tracker]) -> list[str | Tracker]:
    """The selected trackers, with all installed ones for "all"."""
    names = [name for name in KNOWN if is_installed(name)]
    return [one for given in selected for one in (names if given == "all" else [given])]


def missing(selected: Sequence[str | Tracker]) -> str | None:
    """The error text for selected trackers that are not installed; only rank 0 needs them."""
    problems = [
        f"{WHERE}: {name} is not installed; pip install {KNOWN[name][1][0]}, or leave it out."
        for name in selected
        if isinstance(name, str) and name != "all" and not is_installed(name)
    ]
    return "\n".join(problems) or None


class Trackers:
    """The trackers from `init_trackers` to `end_training`. `is_main`: whether this is rank 0. `loads()`: the number of
    checkpoints loaded so far."""

    def __init__(self, selected: Sequence[str | Tracker], is_main: bool, loads: Callable[[], int]) -> None:
        self.selected, self._is_main, self._loads = selected, is_main, loads
        self._loads_seen = 0
        self._has_announced = False
        self.counts_for_objects = True
        """Whether trackers that take objects get the optimizer step, too, where a call has none. They drop what comes
        with a smaller step than before, and a script for Accelerate may count otherwise in its other calls."""
        self.active: list[Tracker] = []
        """The trackers on this rank, in the order of `log_with`; the default jsonl file comes last."""
        self._by_name: dict[str, Tracker] = {}

    def start(
        self,
        project: str,
        folder: str | Path | None,
        config: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers. `folder`: the log folder; `arguments`: constructor arguments by tracker name."""
        if self.active:
            self.finish()
        if not isinstance(project, (str, os.PathLike)):
            raise UsageError(
                f"init_trackers: the project's name is not a text (got {type(project).__name__}); give one, such as "
                'init_trackers("first").'
            )
        name = re.sub(r"[^\w.-]+", "_", project := str(project))
        place = None if folder is None else Path(folder) / name
        if config is not None and not isinstance(config, Mapping):
            raise UsageError(
                f"init_trackers: config is not values by name (got {type(config).__name__}); give a dict, such as "
                "vars(args) or dataclasses.asdict(config)."
            )
        wanted, arguments = self._wanted(place), arguments or {}
        self._refuse(wanted, place, arguments)
        if place is not None and self._is_main:
            _make(place)
        self.active = [self._created(one, project, place, arguments) for one in wanted]
        self._by_name = {tracker.name: tracker for tracker in self.active}
        for tracker in self.active:
            tracker.start()
            if config is not None:
                tracker.store_init_configuration(dict(config))

    def _wanted(self, place: Path | None) -> list[str | Tracker]:
        """The selected ones, and the file of metrics where there is a folder."""
        wanted = expanded(self.selected)
        if place is None and "all" in self.selected:
            wanted = [one for one in wanted if not _kind_of(one).requires_logging_directory or one in self.selected]
        if place is None and "jsonl" not in wanted:
            log.info("trackers: no metrics file, because no folder is set; use Accelerator(project_dir=...).")
        return wanted if place is None or "jsonl" in wanted else [*wanted, "jsonl"]

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name, or its native object; on other ranks a placeholder that does nothing, also where a
        script has called `init_trackers` on the main process only."""
        if not self._by_name and not self._is_main:
            return NoTracker(name)
        by_name = self._by_name | {tracker.name: tracker for tracker in self.active}
        found = by_name.get(name)
        if found is None:
            there = ", ".join(by_name) or "none: call init_trackers first"
            raise UsageError(f"get_tracker: no tracker of this name (got {name!r}); there are {there}.")
        return found.tracker if unwrap else found

    def log(
        self,
        values: Mapping[str, Any],
        step: Any,
        optimizer_step: int,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        measured: Mapping[str, float] | None = None,
    ) -> None:
        """Logs the values, and the `measured` ones, to all trackers; objects to those that take them. Raises UsageError
        on every rank where a value is neither number nor text, and no selected tracker takes objects."""
        refuse_others(values, step, any(_kind_of(one).takes_objects for one in expanded(self.selected)))
        given: Any = plain(step)
        step = optimizer_step if given is None else given
        if not self.active:
            if not self._has_announced:
                self._has_announced = True
                log.info("trackers: log() before init_trackers(), or after end_training(): nothing is recorded.")
            return
        arguments = arguments or {}
        _refuse_unknown("log: log_kwargs", arguments, {tracker.name for tracker in self.active})
        self._note_loads(step, frozenset(values))
        numbers = {name: value for name, value in values.items() if not is_object(value)}
        for tracker in self.active:
            found = {**(values if tracker.takes_objects else numbers), **(measured or {})}
            at = step if self.counts_for_objects or not tracker.takes_objects else given
            if found or not values:
                tracker.log(found, step=at, **arguments.get(tracker.name, {}))

    def finish(self) -> None:
        """Finishes all trackers. A second call does nothing."""
        done, self.active = self.active, []
        for tracker in done:
            tracker.finish()

    def _note_loads(self, step: Step, names: frozenset[str]) -> None:
        loads = self._loads()
        if loads > self._loads_seen and isinstance(step, (int, float)):
            self._loads_seen = loads
            for tracker in self.active:
                tracker.rewind(step, names)

    def _created(
        self, one: str | Tracker, project: str, place: Path | None, arguments: Mapping[str, Mapping[str, Any]]
    ) -> Tracker:
        if isinstance(one, Tracker):
            return one if self._is_main or not one.main_process_only else NoTracker(one.name)
        if not self._is_main:
            return NoTracker(one)
        kind, packages = KNOWN[one]
        of_project = (project,) if packages else ()  # files lie in a folder of that name
        return kind(*of_project, place, lambda: self._loads() > 0, **arguments.get(one, {}))

    def _refuse(
        self, wanted: Sequence[str | Tracker], place: Path | None, arguments: Mapping[str, Mapping[str, Any]]
    ) -> None:
        homeless = [_kind_of(one).name for one in wanted if _kind_of(one).requires_logging_directory]
        if homeless and place is None:
            raise UsageError(
                f"init_trackers: {', '.join(homeless)} needs a folder (got none); give Accelerator(project_dir=...) or "
                "ProjectConfiguration(logging_dir=...)."
            )
        names = {_kind_of(one).name for one in wanted}
        _refuse_unknown("init_trackers: init_kwargs", arguments, names)
        if unused := [name for name in arguments if name not in names]:
            log.info("trackers: init_kwargs of %s are not used: log_with does not name them.", ", ".join(unused))


def _make(folder: Path) -> None:
    """Makes the folder at the start, so that one that cannot be written is not found after hours, at the first log."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"init_trackers: the folder {folder} cannot be written ({error.strerror}); give another one with "
            "Accelerator(project_dir=...) or ProjectConfiguration(logging_dir=...)."
        ) from None


def _refuse_unknown(where: str, arguments: Mapping[str, Any], names: set[str]) -> None:
    """Raises UsageError for arguments of a tracker that neither the run nor anybody has."""
    if unknown := [name for name in arguments if name not in (*names, *KNOWN, *UNSUPPORTED)]:
        there = ", ".join(sorted(names))
        raise UsageError(f"{where} for an unknown tracker (got {', '.join(unknown)}); there are {there}.")


def _name(given: Any) -> str | Tracker:
    """The name in lower case; enum members by their value."""
    if isinstance(given, Tracker):
        return given
    if isinstance(given, type):
        return f"the class {given.__name__}"
    value = getattr(given, "value", given)
    return value.lower() if isinstance(value, str) else f"a {type(given).__name__}"


def _kind_of(one: str | Tracker) -> Any:
    """The class of a known tracker, by its name; another tracker itself. Both have the attributes of a Tracker."""
    return KNOWN[one][0] if isinstance(one, str) else one


def is_installed(name: str) -> bool:
    """Whether the packages of a known tracker are installed."""
    packages = KNOWN[name][1]
    return not packages or any(find_spec(package) is not None for package in packages)


def _problem(name: str) -> str | None:
    if name in UNSUPPORTED:
        return f"{WHERE}: {name} is not supported; subclass shardkit.Tracker, and pass an object."
    if name not in KNOWN:
        hint = near_or(name, KNOWN, f"use {', '.join(KNOWN)}, all, or a shardkit.Tracker.")
        return f"{WHERE}: unknown tracker (got {name}); {hint}"
    return None
