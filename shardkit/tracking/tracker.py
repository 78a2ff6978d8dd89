"""The base class of trackers, and the placeholder on other ranks."""

import json
from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from shardkit.errors import UsageError

Step = float | int | str | None

_PLAIN = (bool, int, float, str, NoneType)

MEASURED = "speed/"
"""How the names begin of what a run measures of itself (`shardkit.log_speed`)."""


class Tracker:
    """Base class of trackers. Pass an object of your own subclass as `Accelerator(log_with=MyTracker())`.

    Called on rank 0 only, or on every rank if `main_process_only` is False.
    """

    name = "tracker"
    """The name for `get_tracker`."""
    requires_logging_directory = False
    main_process_only = True
    takes_objects = False
    """Whether `log` also takes values that are neither numbers nor texts, such as images."""

    @property
    def tracker(self) -> Any:
        """The native object that `get_tracker(name, unwrap=True)` returns."""
        return self

    def start(self) -> None:
        """Called once, by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Stores the values of `init_trackers(config=values)`."""

    def log(self, values: dict[str, Any], step: int | None = None, **arguments: Any) -> None:
        """Logs numbers and texts by name. `arguments` are `log_kwargs[name]` of `Accelerator.log`."""
        raise UsageError(f"log: {type(self).__name__} has no method log(values, step, **arguments); write one.")

    def rewind(self, step: float, names: frozenset[str]) -> None:
        """Called after a checkpoint was loaded: values after `step`, and those of these names at `step`, are logged
        again."""

    def finish(self) -> None:
        """Called once, by `end_training`. Everything must be stored when it returns."""


class NoTracker(Tracker):
    """Placeholder for a tracker on other ranks: every call and attribute does nothing and returns this object."""

    def __init__(self, name: str) -> None:
        self.name = name

    def log(self, values: Any = None, step: int | None = None, *_: Any, **arguments: Any) -> Any:
        """Nothing."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **arguments: Any) -> Any:
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getitem__(self, name: Any) -> Any:
        return self

    def __setitem__(self, name: Any, value: Any) -> None: ...

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<no {self.name} on this rank>"


def refuse_others(values: Any, step: Any, objects_are_taken: bool) -> None:
    """Raises UsageError where values are not numbers and texts by name, or the step is none of these. Checks types
    only, so it is the same on all ranks. `objects_are_taken`: whether a tracker takes other objects."""
    if not isinstance(values, Mapping):
        raise UsageError(f'log: not values by name (got {type(values).__name__}); write {{"loss": loss}}.')
    if text := _problem("step", step):
        raise UsageError(f"log: step: {text}; give a number, or leave it out: it is the optimizer step then.")
    checked = {name: None if objects_are_taken and is_object(value) else value for name, value in values.items()}
    problems = [f"{name!r}: {text}" for name, value in checked.items() if (text := _problem(name, value))]
    if problems:
        raise UsageError(
            f"log: {'; '.join(problems[:3])}; log its mean, or use a tracker that takes it: "
            'log_with="wandb", accelerator.get_tracker("wandb").log(...).'
        )


def is_object(value: Any) -> bool:
    """Whether the value is neither number, text, tensor nor array: an image, a table, a list."""
    if isinstance(value, _PLAIN):
        return False
    return not hasattr(value, "full_tensor") and not callable(getattr(value, "item", None))


def plain(value: Any) -> float | int | str | bool | None:
    """A Python number or text; as text what is neither, such as a complex number or a date. Reading a device tensor
    synchronizes the device."""
    found = value if isinstance(value, _PLAIN) else value.item()
    return found if isinstance(found, _PLAIN) else str(found)


def config_as_json(values: Mapping[str, Any]) -> str:
    """The configuration of a run as JSON; as text what JSON has no form for: objects, dicts whose keys are no text, NaN
    and infinity."""
    return json.dumps({str(name): _in_json(value) for name, value in values.items()}, indent=1)


def _in_json(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, default=_number_or_text), parse_constant=lambda text: str(float(text)))
    except (TypeError, ValueError, RecursionError):  # other keys; a value that contains itself
        return str(value)


def _number_or_text(value: Any) -> Any:
    return str(value) if _problem("config", value) else plain(value)


def _problem(name: Any, value: Any) -> str | None:
    if not isinstance(name, str):
        return f"a name must be text (got {type(name).__name__})"
    if isinstance(value, _PLAIN):
        return None
    if hasattr(value, "full_tensor"):
        return "a sharded tensor (got a DTensor)"
    if is_object(value):
        return f"not a number or text (got {type(value).__name__})"
    size = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", 1)
    return None if size == 1 else f"not one number (got {size} of them)"
