"""What Accelerate offers on modules before and beside training: empty weights, sizes, ties, hooks around forward."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import update_wrapper
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.distributed import accelerators
from shardkit.errors import UsageError
from shardkit.sharding import init


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Modules built inside have parameters without memory; buffers too, where they are included."""
    with torch.device("meta") if include_buffers else init.init_empty_weights():
        yield


@contextmanager
def init_on_device(device: Any, include_buffers: bool | None = None) -> Iterator[None]:
    """Modules built inside have their tensors on the device."""
    with torch.device(device):
        yield


# ---- one tensor of a module ----


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Any,
    value: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    fp16_statistics: Any = None,
    tied_params_map: Any = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Puts a parameter or buffer on the device, with new values where they are given."""
    *path, name = tensor_name.split(".")
    for part in path:
        module = getattr(module, part)
    old = module._parameters.get(name, module._buffers.get(name))
    if old is None:
        raise ValueError(f"{type(module).__name__}: has no parameter or buffer of this name (got {tensor_name}).")
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ValueError(f"{tensor_name}: has no values yet (meta device); give some.")
    if value is not None and value.shape != old.shape:
        raise ValueError(f"{tensor_name}: shape {tuple(old.shape)} is expected (got {tuple(value.shape)}).")
    new = old.detach() if value is None else value.detach()
    keeps_dtype = dtype is None and value is not None and not re.match("torch.u?int|torch.bool", str(value.dtype))
    new = new.to(device, old.dtype if keeps_dtype else dtype, non_blocking=non_blocking)
    if name in module._parameters:
        parameter = nn.Parameter(new, requires_grad=old.requires_grad and new.is_floating_point())
        parameter.__dict__.update(old.__dict__)
        module._parameters[name] = parameter
    else:
        module._buffers[name] = new


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Names of buffers that a state dict leaves out."""
    found: set[str] = set()
    for path, inner in module.named_modules() if recurse else [("", module)]:
        found |= {f"{path}.{name}" if fqns and path else name for name in inner._non_persistent_buffers_set}
    return found


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of parameters and buffers."""
    yield from module.named_parameters(recurse=recurse)
    left_out = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    if include_buffers:
        yield from ((name, one) for name, one in module.named_buffers(recurse=recurse) if name not in left_out)


# ---- sizes ----


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Bytes of an element."""
    return dtype.itemsize


def convert_file_size_to_int(size: int | str) -> int:
    """Bytes: of `10GB` or `5GiB` too."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
    if match is None:
        raise ValueError(f"a size is a number with B, KB, MB, GB, TB or KiB, MiB, GiB, TiB (got {size!r}).")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> Any:
    """Bytes below each name; the whole model's under ''."""
    found: dict[str, int] = defaultdict(int)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        item = tensor.dtype.itemsize
        if special_dtypes and name in special_dtypes:
            item = special_dtypes[name].itemsize
        elif wanted is not None and tensor.is_floating_point():
            item = min(item, wanted.itemsize)
        parts = name.split(".")
        for length in range(len(parts) + 1):
            found[".".join(parts[:length])] += tensor.numel() * item
    return found


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the whole model, and of its largest leaf with its name."""
    found = compute_module_sizes(model)
    leaves = {name: found[name] for name, module in model.named_modules() if not [*module.children()] and name in found}
    largest = max(leaves, key=lambda name: leaves[name], default="")
    return found[""], (leaves.get(largest, 0), [largest])


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, int]:
    """Free bytes by device: numbers of GPUs, and cpu; or what is given, in bytes."""
    if max_memory is not None:
        return {key: convert_file_size_to_int(value) for key, value in max_memory.items()}
    numbers = range(accelerators.count())
    found: dict[Any, int] = {number: torch.accelerator.get_memory_info(number)[0] for number in numbers}
    return found | {"cpu": _free_memory()}


def _free_memory() -> int:
    text = Path("/proc/meminfo")
    if not text.exists():
        return 0
    match = re.search(r"MemAvailable:\s+(\d+) kB", text.read_text())
    return int(match[1]) * 1024 if match else 0


def get_balanced_memory(model: nn.Module, max_memory: dict[Any, Any] | None = None, **_: Any) -> dict[Any, int]:
    """As `get_max_memory`: models are not laid out over devices by layers here."""
    return get_max_memory(max_memory)


# ---- ties ----


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """Groups of names of one parameter."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Gives all names of a group the parameter of the first that has values."""
    for group in tied_params:
        found = [model.get_parameter(name) for name in group]
        kept = next((one for one in found if not one.is_meta), found[0])
        for name in group:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, kept)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the model's own configuration ties its embeddings."""
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """What is equal for tensors of one memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def load_state_dict(checkpoint_file: str | Path, device_map: Any = None) -> dict[str, torch.Tensor]:
    """The tensors of a file, in host memory."""
    if device_map not in (None, {"": "cpu"}):
        raise UsageError(f"load_state_dict: reads into host memory only (got device_map={device_map!r}).")
    if str(checkpoint_file).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(checkpoint_file)
    return torch.load(checkpoint_file, map_location="cpu", weights_only=True)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """torch.autocast in the precision that runs; nothing where it is fp32."""
    from shardkit.compat.states import AcceleratorState

    state = AcceleratorState()
    if not native_amp or state.mixed_precision == "no":
        return nullcontext()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[state.mixed_precision]
    given = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(state.device.type, dtype=dtype, **given)


# ---- hooks around forward ----


class ModelHook:
    """What runs around a module's forward."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """When it is added; the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Before forward; its arguments."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """After forward; its result."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """When it is removed; the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one, in this order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """The module, whose forward the hook runs around; it replaces the one before, or comes after it."""
    if append and getattr(module, "_hf_hook", None) is not None:
        before: Any = module._hf_hook
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    else:
        remove_hook_from_module(module)
    plain: Callable[..., Any] = module.forward
    hook.init_hook(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
        with torch.no_grad() if hook.no_grad else nullcontext():
            output = plain(*args, **kwargs)
        return hook.post_forward(module, output)

    module._hf_hook, module._old_forward = hook, plain  # type: ignore[assignment]
    module.forward = update_wrapper(forward, plain)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """The module without its hook."""
    if "_hf_hook" in module.__dict__:
        module._hf_hook.detach_hook(module)  # type: ignore[operator, union-attr]
        del module.__dict__["_hf_hook"], module.__dict__["_old_forward"], module.__dict__["forward"]
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Removes all hooks, of the modules inside too."""
    remove_hook_from_module(module, recurse=True)
