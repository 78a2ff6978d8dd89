"""GradientState: the position of the loop in its accumulation window. All objects share one state."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar
from weakref import ref

from shardkit.data.loader import active_loader
from shardkit.errors import UsageError
from shardkit.runtime.run import Run
from shardkit.runtime.settings import with_value
from shardkit.runtime.steps.training_step import accumulate_over


class PluginKwargs(MutableMapping):
    """The settings of gradient accumulation by name. `num_steps` and `sync_with_dataloader` are those of the run, also
    where a script sets them; others have no effect."""

    def __init__(self, of: Callable[[], Run | None], given: Mapping[str, Any]) -> None:
        self._of = of
        self._others = {name: value for name, value in given.items() if name != "num_steps"}

    def _values(self) -> dict[str, Any]:
        run = self._of()
        return {"num_steps": 1 if run is None else run.accumulation.steps, **self._others}

    def __getitem__(self, name: str) -> Any:
        return self._values()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        run = self._of()
        if name == "num_steps":
            if run is not None:
                accumulate_over(run, value)
            return
        if name == "sync_with_dataloader" and run is not None:
            run.config = with_value(run.config, "shardkit.end_window_with_data", bool(value))
            run.accumulation.ends_with_data = bool(value)
        self._others[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._others:
            raise UsageError(
                f"plugin_kwargs: a setting of the run cannot be removed (got {name!r}); set another value."
            )
        del self._others[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __repr__(self) -> str:
        return repr(self._values())


class GradientState:
    """The current position of the loop in its accumulation window and loader, of the newest Accelerator."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None, _run: Run | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self._of: Callable[[], Run | None] = lambda: None
            self._settings = PluginKwargs(lambda: self._of(), {})
            self._plain_sync = True
        if gradient_accumulation_plugin is not None:
            self._settings = PluginKwargs(lambda: self._of(), gradient_accumulation_plugin.to_kwargs())
        if _run is not None:
            self._of = ref(_run)

    @property
    def initialized(self) -> bool:
        """Whether the state is set."""
        return bool(self._shared_state)

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()

    @property
    def plugin_kwargs(self) -> PluginKwargs:
        """The settings of gradient accumulation by name, which scripts may change."""
        return self._settings

    @plugin_kwargs.setter
    def plugin_kwargs(self, settings: Mapping[str, Any]) -> None:
        self._settings.update(settings)

    @property
    def num_steps(self) -> int:
        """Micro-batches per optimizer step."""
        run = self._of()
        return run.accumulation.steps if run is not None else 1

    @property
    def adjust_scheduler(self) -> bool:
        """The value of the plugin. It has no effect: schedulers step once per optimizer step."""
        return bool(self.plugin_kwargs.get("adjust_scheduler", True))

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends a window early."""
        return bool(self.plugin_kwargs.get("sync_with_dataloader", True))

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its window."""
        run = self._of()
        return run.accumulation.sync_gradients if run is not None else self._plain_sync

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Let the script set whether this micro-batch is the last of its window."""
        run = self._of()
        self._plain_sync = bool(sync_gradients)
        if run is not None:
            run.accumulation.declare(bool(sync_gradients))

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that is being iterated, the innermost one; None outside of loops."""
        run = self._of()
        return active_loader(run.loaders) if run is not None else None

    @property
    def dataloader_references(self) -> list[Any]:
        """The prepared loaders that are being iterated, outermost first; None before them."""
        run = self._of()
        open_ones = [one for one in run.loaders if one.is_iterating] if run is not None else []
        return [None, *sorted(open_ones, key=lambda one: one.began)]

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the loader's last."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """The number of real samples in the last global batch if it is padded, else -1."""
        active = self.active_dataloader
        return -1 if active is None else active.remainder

    is_xla_gradients_synced = False

    def __repr__(self) -> str:
        return (
            f"Sync Gradients: {self.sync_gradients}\nAt end of current dataloader: {self.end_of_dataloader}\n"
            f"Extra samples added: {self.remainder}\n"
        )
