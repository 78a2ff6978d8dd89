"""Settings objects of Accelerate's `Accelerator` as its attributes: kwargs handlers, the loaders' configuration, the
options of torch.compile.

Scripts also set these attributes, or fields of the objects, after they created the Accelerator. That takes effect
wherever Accelerate reads the object later, or raises UsageError.
"""

from collections.abc import Callable
from copy import copy
from operator import attrgetter
from typing import Any, TypeVar

import torch

from shardkit.compat.handlers import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
)
from shardkit.compat.kinds import FP8BackendType
from shardkit.compat.plugins import DATA_SETTINGS, DataLoaderConfiguration
from shardkit.config.code import Given
from shardkit.config.meaning import eight_bits
from shardkit.config.schema import Config
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.runtime.run import Run
from shardkit.runtime.settings import Settings, with_value

Handler = TypeVar("Handler", bound=KwargsHandler)

_DDP = "Accelerator(kwargs_handlers=DistributedDataParallelKwargs)"
_FIND_UNUSED = "shardkit.ddp_find_unused_parameters"

log = get_logger(__name__)


def _can_reduce_unused() -> bool:
    from shardkit.sharding.fsdp.shard_model import can_reduce_unused  # imports FSDP, which other runs do not need

    return can_reduce_unused()


def _set_later(kind: type[Handler]) -> property:
    """The object of this class in `kwargs_handlers`, or the one set later; None without one."""
    name = f"_{kind.__name__}"

    def found(self: "GivenObjects") -> Handler | None:
        return vars(self).get(name, self._given(kind))

    def put(self: "GivenObjects", handler: Handler | None) -> None:
        vars(self)[name] = handler

    return property(found, put)


def _fixed(kind: type[Handler]) -> property:
    """The object of this class in `kwargs_handlers`, else None. It is read when the Accelerator is made."""

    def found(self: "GivenObjects") -> Handler | None:
        return self._given(kind)

    def put(self: "GivenObjects", handler: Handler | None) -> None:
        if handler is not found(self):
            raise UsageError(
                f"Accelerator: a {kind.__name__} is read when the Accelerator is made (got {handler!r} afterwards); "
                "give it to Accelerator(kwargs_handlers=[...])."
            )

    return property(found, put)


def _recipe() -> property:
    """None: recipes for fp8 are shardkit's."""

    def put(self: "GivenObjects", recipe: Any) -> None:
        if recipe is not None:
            raise UsageError(
                f"Accelerator: recipes for fp8 are not supported (got {recipe!r}); shardkit converts models with "
                "torchao: use mixed_precision fp8."
            )

    return property(lambda self: None, put)


class Followed:
    """Settings in an object of the script, by their dotted names, which it may change at any time."""

    def __init__(self, values: Callable[[], dict[str, Any]]) -> None:
        self._values, self._before = values, values()

    def changes(self) -> dict[str, Any]:
        """The settings that have changed since the last call."""
        before, self._before = self._before, self._values()
        return {name: value for name, value in self._before.items() if value != before[name]}


class GivenObjects:
    """These attributes, as properties."""

    _run: Run
    _dataloader_config: DataLoaderConfiguration
    state: Any

    ddp_handler = _set_later(DistributedDataParallelKwargs)
    autocast_handler = _set_later(AutocastKwargs)
    profile_handler = _set_later(ProfileKwargs)
    scaler_handler = _fixed(GradScalerKwargs)
    init_handler = _fixed(InitProcessGroupKwargs)
    fp8_recipe_handler, ao_recipe_handler, te_recipe_handler, msamp_recipe_handler = (_recipe() for _ in range(4))
    has_lomo_optimizer = delayed_fp8_autocast = False

    def _given(self, kind: type[Handler]) -> Handler | None:
        return next((one for one in self._run.handlers if isinstance(one, kind)), None)

    @property
    def fp8_enabled(self) -> bool:
        """Whether Linear layers are computed in 8 bits."""
        return eight_bits(self._run.config) is not None

    has_fp8_handler = fp8_enabled

    @property
    def fp8_backend(self) -> FP8BackendType:
        """AO (torchao) with fp8, else NO."""
        return FP8BackendType.AO if self.fp8_enabled else FP8BackendType.NO

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The argument of the constructor, or the one set later. Loaders that are prepared from now on follow it."""
        return self._dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        self._dataloader_config = config

    def _follow_objects(self, given: DataLoaderConfiguration | None) -> None:
        """Show the settings of the run in the objects, and read them again from now on."""
        run = self._run
        values = {field: attrgetter(name)(run.config) for field, name in DATA_SETTINGS.items()}
        self._dataloader_config = given or DataLoaderConfiguration(**values)
        self._profile_given = copy(self.profile_handler)
        self._followed = [
            Followed(lambda: {name: getattr(self._dataloader_config, field) for field, name in DATA_SETTINGS.items()}),
            Followed(lambda: {"shardkit.compile": "shardkit.compile" in self.state.dynamo_plugin.shardkit_settings()}),
        ]

    def _read_objects(self) -> None:
        """Take over what the script has changed in its objects since they were read."""
        self._read_changes()
        self._read_ddp_handler()
        if self.autocast_handler is not None:
            self.autocast_handler.shardkit_settings()  # refuses one that is not enabled

    def _read_changes(self) -> None:
        for name, value in (change for one in self._followed for change in one.changes().items()):
            self._run.config = with_value(self._run.config, name, value)

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all ranks together."""
        self._read_changes()
        return self._run.config.shardkit.data.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether a short last batch is padded, so that every rank gets the same number of samples."""
        self._read_changes()
        return self._run.config.shardkit.data.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._dataloader_config.even_batches = bool(value)

    def _changed_profile_handler(self) -> ProfileKwargs | None:
        """The object if it is not as the constructor has read it."""
        return None if self.profile_handler == self._profile_given else self.profile_handler

    def _read_ddp_handler(self) -> None:
        """Take over the settings of `ddp_handler`, which may have changed since the last `prepare`."""
        config, others = self._run.config, dict(self._run.chosen)
        values = {} if self.ddp_handler is None else self.ddp_handler.shardkit_settings()
        if config.mode == "fsdp" and values.get(_FIND_UNUSED) and not _can_reduce_unused():
            del values[_FIND_UNUSED]  # the Trainer always sets it, and Accelerate's FSDP ignores it
            log.info(
                "DistributedDataParallelKwargs(find_unused_parameters=True): no effect under FSDP before torch 2.13 "
                "(got %s); use the same parameters on all ranks.",
                torch.__version__,
            )
        before = [name for name, origin in others.items() if origin == _DDP]
        if values == {name: attrgetter(name)(config) for name in before}:
            return  # its notes are logged
        for name in before:
            config = with_value(config, name, attrgetter(name)(Config()))
            del others[name]
        found = Settings(config, others).with_given([Given(_DDP, values)] if values else [])
        self._run.config, self._run.chosen = found.config, found.chosen
