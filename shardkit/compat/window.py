"""GradientState: the position of the loop in its accumulation window. All objects share one state."""

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ref

from shardkit.data.loader import active_loader
from shardkit.runtime.run import Run


class GradientState:
    """The current position of the loop in its accumulation window and loader, of the newest Accelerator."""

    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, gradient_accumulation_plugin: Any = None, _run: Run | None = None) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            self.plugin_kwargs: dict[str, Any] = {}
            self._of: Callable[[], Run | None] = lambda: None
            self._plain_sync = True
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()
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
        return active is not None and active.end_of_loader

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
