"""Accelerate's plugin and configuration classes. `shardkit_settings()` of each returns the keys of shardkit.yaml."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from torch import nn

from shardkit import env
from shardkit.compat.handlers import KwargsHandler
from shardkit.compat.kinds import DynamoBackend
from shardkit.config.schema import (
    BackwardPrefetch,
    ShardingStrategy,
    StateDictType,
    WrapPolicy,
    read_bool,
    read_name,
    read_prefetch,
    read_strategy,
)
from shardkit.errors import UsageError

DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
_NAME_OF = {
    **{
        name: f"fsdp_{name}"
        for name in (
            *("sharding_strategy", "reshard_after_forward", "backward_prefetch", "auto_wrap_policy", "ignored_modules"),
            *("state_dict_type", "limit_all_gathers", "use_orig_params", "sync_module_states", "forward_prefetch"),
            *("activation_checkpointing", "cpu_ram_efficient_loading", "min_num_params"),
        )
    },
    "cpu_offload": "fsdp_offload_params",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}


def _name(value: Any) -> Any:
    """The name of an enumeration's member (torch's FSDP1 enumerations are accepted); other values unchanged."""
    return value.name.lstrip("_") if isinstance(value, Enum) else value


@dataclass
class FullyShardedDataParallelPlugin:
    """FSDP's settings, with Accelerate's names. None: as in shardkit.yaml.

    `accelerator.state.fsdp_plugin` is such an object with the values of the run.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: str | Iterable[nn.Module] | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool | None = None
    use_orig_params: bool | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        self.on_state_dict_type: Callable[[Any], None] | None = None
        """Called with a new state dict type, if the object belongs to a run."""
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = self.transformer_cls_names_to_wrap.split(",")
            self.transformer_cls_names_to_wrap = [name.strip() for name in names if name.strip()]

    def shardkit_settings(self) -> dict[str, Any]:
        """{dotted key of shardkit.yaml: value} of the given fields, with distributed_type FSDP. Raises UsageError that
        lists all unsupported values."""
        given: dict[str, Any] = {"distributed_type": "FSDP"}
        problems: list[str] = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None:
                continue
            try:
                given |= self._setting(one.name, value)
            except UsageError as error:
                problems.append(f"FullyShardedDataParallelPlugin: {one.name}: {error}")
        if problems:
            raise UsageError("\n".join(problems))
        return given

    def _setting(self, name: str, value: Any) -> dict[str, Any]:
        """One field as settings."""
        if name == "mixed_precision_policy":
            return _precision(value)
        if name == "auto_wrap_policy":
            return _wrap(value)
        if name in ("fsdp_version", "state_dict_config", "optim_state_dict_config"):
            return {}  # FSDP2 is always used, and a full state dict is always in host memory on rank 0
        if name == "activation_checkpointing_offload":
            return {"shardkit.offload_activations": True} if value else {}
        if name == "param_init_fn":
            instead = "a model on the meta device is initialized by reset_parameters of its modules"
            raise UsageError(f"is not supported (got {value!r}); remove it: {instead}.")
        return {f"fsdp_config.{_NAME_OF[name]}": _READ.get(name, lambda given: given)(value)}

    # Methods that callers of Accelerate use.

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Set the state dict type that the Trainer and save_state write."""
        if state_dict_type is not None:
            name = read_name(_name(state_dict_type))
            self.state_dict_type = _member(StateDictType, name, "set_state_dict_type: ")

    def __setattr__(self, name: str, value: Any) -> None:
        """In a run, a state dict type that is assigned takes effect, too; another value of a setting is refused."""
        follow = getattr(self, "on_state_dict_type", None)
        if follow is not None and name == "state_dict_type":
            value = _member(StateDictType, read_name(_name(value)), "state_dict_type: ")
        elif follow is not None and name in _NAME_OF and self._differs(name, value):
            raise UsageError(
                f"fsdp_plugin.{name}: is fixed when the Accelerator is made (got {value!r}, the run has "
                f"{getattr(self, name)!r}); set fsdp_config.{_NAME_OF[name]} in shardkit.yaml, or give "
                f"Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin({name}=...))."
            )
        super().__setattr__(name, value)
        if follow is not None and name == "state_dict_type":
            follow(value)

    def _differs(self, name: str, value: Any) -> bool:
        now = getattr(self, name)
        return value is not None and (now is None or self._setting(name, value) != self._setting(name, now))

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Does nothing: `prepare` finds the blocks."""

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Set the dtypes: the name of a precision, or {name: dtype}. Keeps an existing policy unless `override`."""
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = mixed_precision

    def set_cpu_offload(self) -> None:
        """Does nothing: `cpu_offload` is read directly."""

    def validate_mixed_precision_policy(self) -> None:
        """Raises an error if the policy is not supported."""
        if self.mixed_precision_policy is not None:
            _precision(self.mixed_precision_policy)

    def validate_cpu_offload(self) -> None:
        """Raises an error if the value is invalid."""
        if self.cpu_offload is not None:
            _offload(self.cpu_offload)


Choice = TypeVar("Choice", bound=Enum)


def _member(kind: type[Choice], value: Any, where: str = "") -> Choice:
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(one.value for one in kind)
        raise UsageError(f"{where}is not one of the choices (got {value!r}); use one of {choices}.") from None


_FUNCTIONS = {
    "transformer_auto_wrap_policy": WrapPolicy.TRANSFORMER_BASED_WRAP,
    "size_based_auto_wrap_policy": WrapPolicy.SIZE_BASED_WRAP,
}


def _wrap(value: Any) -> dict[str, Any]:
    """The settings of a policy by its name, or of one of torch's wrap policy functions of FSDP1, with the block classes
    or the size that functools.partial gives it."""
    if isinstance(value, partial) and _is_of_peft(value):
        value = WrapPolicy.TRANSFORMER_BASED_WRAP
    function = getattr(value, "func", value)
    if not callable(function) or isinstance(value, (str, WrapPolicy)):
        return {f"fsdp_config.{_NAME_OF['auto_wrap_policy']}": _member(WrapPolicy, read_name(value)).value}
    name = getattr(function, "__name__", type(function).__name__)
    if name not in _FUNCTIONS:
        raise UsageError(f"functions are not supported as wrap policy (got {name}); give the block classes.")
    given: dict[str, Any] = {"auto_wrap_policy": _FUNCTIONS[name].value}
    arguments = getattr(value, "keywords", {})
    if classes := arguments.get("transformer_layer_cls"):
        given["transformer_cls_names_to_wrap"] = sorted(one.__name__ for one in classes)
    if "min_num_params" in arguments:
        given["min_num_params"] = arguments["min_num_params"]
    return {f"fsdp_config.{_NAME_OF[key]}": setting for key, setting in given.items()}


def _is_of_peft(policy: Any) -> bool:
    """Whether it is what peft's `fsdp_auto_wrap_policy` returns: units of the model's blocks, which `prepare` finds,
    and of each trained module, since FSDP1 cannot have frozen and trained parameters in one."""
    functions = [getattr(part, "keywords", {}).get("lambda_fn") for part in policy.keywords.get("policies", ())]
    return any(str(getattr(one, "__module__", "")).startswith("peft.") for one in functions)


def _offload(value: Any) -> bool:
    found = read_bool(getattr(value, "offload_params", value))
    return found if isinstance(found, bool) else type(value).__name__ == "CPUOffloadPolicy"


def _ignored(value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(
            f"module objects are not supported (got a {type(value).__name__}); give a regular expression for names."
        )
    return value


def _precision(policy: Any) -> dict[str, Any]:
    """The settings of a policy of torch, of {name: dtype}, or of the name of a precision."""
    if isinstance(policy, str):
        return {"mixed_precision": policy}
    parts = policy if isinstance(policy, dict) else {name: getattr(policy, name, None) for name in _POLICY}
    names = {name: str(parts[name]).removeprefix("torch.") for name in _POLICY if parts.get(name) is not None}
    if unknown := [f"{name}={dtype}" for name, dtype in names.items() if dtype not in DTYPES]:
        raise UsageError(f"is float32, bfloat16 or float16 (got {', '.join(unknown)}); use one of them.")
    return {f"shardkit.precision.{name}": DTYPES[dtype] for name, dtype in names.items()}


_POLICY = ("param_dtype", "reduce_dtype", "output_dtype")
_READ: dict[str, Callable[[Any], Any]] = {
    "reshard_after_forward": _name,
    "sharding_strategy": lambda value: _member(ShardingStrategy, read_strategy(_name(value))).value,
    "backward_prefetch": lambda value: _member(BackwardPrefetch, read_prefetch(_name(value))).value,
    "cpu_offload": _offload,
    "ignored_modules": _ignored,
    "state_dict_type": lambda value: _member(StateDictType, read_name(_name(value))).value,
}


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Gradient accumulation: `num_steps` micro-batches per optimizer step."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def shardkit_settings(self) -> dict[str, Any]:
        """The steps and the end of windows. `sync_each_batch` is ignored: it does not change the gradients."""
        given: dict[str, Any] = {}
        if self.num_steps is not None:
            given["shardkit.gradient_accumulation_steps"] = self.num_steps
        if not self.sync_with_dataloader and (self.num_steps or 1) > 1:
            given["shardkit.end_window_with_data"] = False
        return given


DATA_SETTINGS = {
    "split_batches": "shardkit.data.split_batches",
    "even_batches": "shardkit.data.even_batches",
    "data_seed": "shardkit.data.seed",
}
"""Fields of DataLoaderConfiguration, and the keys of shardkit.yaml for them."""


@dataclass
class DataLoaderConfiguration:
    """How loaders split the data over ranks."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    custom_classes: Any = field(default=None, repr=False)

    def shardkit_settings(self) -> dict[str, Any]:
        """The fields that differ from the defaults. Dispatching, the sampler and the copying of batches are always
        shardkit's."""
        values = {field: getattr(self, field) for field in DATA_SETTINGS}
        return {
            DATA_SETTINGS[name]: value
            for name, value in values.items()
            if value != getattr(DataLoaderConfiguration, name)
        }


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """torch.compile's options."""

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        name = str(getattr(self.backend, "value", self.backend) or env.get("ACCELERATE_DYNAMO_BACKEND") or "NO")
        self.backend = DynamoBackend(name.upper())

    def to_kwargs(self) -> dict[str, Any]:
        """The keyword arguments for torch.compile; none without a backend."""
        if self.backend is DynamoBackend.NO:
            return {}
        given = {name: value for name, value in self._options().items() if value is not None}
        return {"backend": self.backend.value.lower(), **given}

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("mode", "fullgraph", "dynamic", "options")}

    def shardkit_settings(self) -> dict[str, Any]:
        """Whether units are compiled. Raises UsageError for other backends than inductor, and for its options."""
        if self.disable or self.backend is DynamoBackend.NO:
            return {}
        if self.backend is not DynamoBackend.INDUCTOR:
            raise UsageError(
                f"TorchDynamoPlugin: backend: only inductor is supported (got {self.backend.value}); "
                "use INDUCTOR, or call torch.compile in the script."
            )
        given = [f"{name}={value!r}" for name, value in self._options().items() if value and value != "default"]
        if given:
            raise UsageError(
                f"TorchDynamoPlugin: units are compiled with torch's defaults (got {', '.join(given)}); leave it out, "
                "or call torch.compile in the script."
            )
        return {"shardkit.compile": True}


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """The class with this name among the classes of the submodules; None if there is none."""
    return next((type(one) for one in module.modules() if type(one).__name__ == name), None)
