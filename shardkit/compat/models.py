"""Accelerate's functions on modules: empty weights, sizes, tied parameters."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.compat.kinds import CustomDtype
from shardkit.distributed import accelerators
from shardkit.distributed.modules import unwrapped
from shardkit.errors import UsageError
from shardkit.runtime.summary import tied_groups
from shardkit.sharding import init, weight_files
from shardkit.wording import first_few


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """A context in which parameters of new modules are on the meta device; with `include_buffers` buffers, too."""
    with torch.device("meta") if include_buffers else init.init_empty_weights():
        yield


@contextmanager
def init_on_device(device: Any, include_buffers: bool | None = None) -> Iterator[None]:
    """A context in which tensors of new modules are created on the device."""
    with torch.device(device):
        yield


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | Path,
    device_map: Any = None,
    offload_folder: Any = None,
    dtype: Any = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Any = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Give the model the weights of a safetensors file, or of a folder with such files, as `save_model` writes; each
    rank reads its part of a prepared one. With `strict` the files must have all of its weights.

    The arguments that offload have no effect without a device map, as in Accelerate; a device map is refused.
    """
    here = "load_checkpoint_in_model"
    if device_map is not None:
        raise UsageError(f"{here}: device_map is not supported (got {device_map!r}); call model.to(device) afterwards.")
    inner = unwrapped(model)
    own = {name: one for name, one in inner.state_dict(keep_vars=True).items() if isinstance(one, torch.Tensor)}
    if empty := sorted(name for name, one in own.items() if one.is_meta):
        raise UsageError(
            f"{here}: the model is on the meta device (got {first_few(empty, 3)}); load them by "
            "accelerator.prepare_model(model, weights=...)."
        )
    path = Path(checkpoint)
    loaded, problems = weight_files.load(inner, path.parent if path.name.endswith(".index.json") else path)
    if strict and (missing := sorted(own.keys() - loaded)):
        problems.append(f"{path}: lacks weights of the model (got none for {first_few(missing, 5)}); leave out strict.")
    if problems:
        raise UsageError(f"{here}: " + "\n".join(problems))


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
    """Move a parameter or buffer to the device, and set its values if `value` is given."""
    *path, name = tensor_name.split(".")
    for part in path:
        module = getattr(module, part)
    old = module._parameters.get(name, module._buffers.get(name))
    if old is None:
        raise ValueError(f"{type(module).__name__}: has no parameter or buffer with this name (got {tensor_name}).")
    if value is None and old.is_meta and torch.device(device).type != "meta":
        raise ValueError(f"{tensor_name}: has no values (got a tensor on the meta device); give `value`.")
    if value is not None and value.shape != old.shape:
        raise ValueError(f"{tensor_name}: expected shape {tuple(old.shape)} (got {tuple(value.shape)}).")
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
    """Names of buffers that are not in the state dict."""
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


_BITS = {torch.bool: 1, CustomDtype.INT2: 2, CustomDtype.INT4: 4, CustomDtype.FP8: 8}


def dtype_byte_size(dtype: torch.dtype | CustomDtype | str) -> float:
    """Bytes per element of a dtype, or of its name. As in Accelerate, 1/8 for bool, although torch stores a byte."""
    if isinstance(dtype, torch.dtype) and dtype not in _BITS:
        return dtype.itemsize
    bits = _BITS.get(dtype) or int((re.search(r"\d+$", dtype) or "0")[0] if isinstance(dtype, str) else 0)
    if not bits:
        raise ValueError(f"dtype_byte_size: not a dtype (got {dtype!r}); give one of torch, or of CustomDtype.")
    return bits / 8


def convert_file_size_to_int(size: int | str) -> int:
    """The bytes of a number or of text such as `10GB` or `5GiB`. As in Accelerate, `Gb` and `gb` are bits."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([KMGT]?)(i?)B\s*", str(size), re.IGNORECASE)
    if isinstance(size, int) and size >= 0:
        return size
    if match is None:
        raise ValueError(f"not a size (got {size!r}); give a number with B, KB, MB, GB, TB or KiB, MiB, GiB, TiB.")
    number, prefix, binary = match.groups()
    found = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))
    is_in_bits = prefix and not binary and str(size).rstrip().endswith("b")
    return found // 8 if is_in_bits else found


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> Any:
    """{name: bytes of the module or tensor}; that of the whole model is under ''."""
    found: dict[str, float] = defaultdict(int)
    wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    for name, tensor in model.named_buffers() if buffers_only else named_module_tensors(model, recurse=True):
        item = dtype_byte_size(tensor.dtype)
        if special_dtypes and name in special_dtypes:
            item = dtype_byte_size(special_dtypes[name])
        elif wanted is not None and tensor.is_floating_point():
            item = min(item, dtype_byte_size(wanted))
        parts = name.split(".")
        for length in range(len(parts) + 1):
            found[".".join(parts[:length])] += tensor.numel() * item
    return found


def calculate_maximum_sizes(model: nn.Module) -> tuple[float, tuple[float, list[str]]]:
    """(bytes of the whole model, (bytes of its largest layers, [their names])). A layer is a tensor of the model
    itself, a module without children, or one of the classes in `model._no_split_modules`."""
    found = compute_module_sizes(model)
    whole = getattr(model, "_no_split_modules", None) or []
    own = [*model.named_parameters(recurse=False), *model.named_buffers(recurse=False)]
    layers = [name for name, _ in own if name in found] + [*_layers(model, whole)]
    largest = max((found[name] for name in layers), default=0)
    return found[""], (largest, [name for name in layers if found[name] == largest])


def _layers(model: nn.Module, whole: Collection[str], prefix: str = "") -> Iterator[str]:
    """The names of the modules below that are not split."""
    for name, child in model.named_children():
        if type(child).__name__ in whole or not [*child.children()]:
            yield prefix + name
        else:
            yield from _layers(child, whole, f"{prefix}{name}.")


def get_max_memory(max_memory: dict[Any, Any] | None = None) -> dict[Any, int]:
    """{GPU number or "cpu": free bytes}; or the given values, in bytes."""
    if max_memory is not None:
        texts = {key: convert_file_size_to_int(value) for key, value in max_memory.items() if isinstance(value, str)}
        return max_memory | texts
    numbers = range(accelerators.count())
    found: dict[Any, int] = {number: torch.accelerator.get_memory_info(number)[0] for number in numbers}
    return found | {"cpu": _free_memory()}


def _free_memory() -> int:
    text = Path("/proc/meminfo")
    if not text.exists():
        return 0
    match = re.search(r"MemAvailable:\s+(\d+) kB", text.read_text())
    return int(match[1]) * 1024 if match else 0


def get_balanced_memory(
    model: nn.Module, max_memory: dict[Any, Any] | None = None, *_: Any, **__: Any
) -> dict[Any, int]:
    """As `get_max_memory`: shardkit does not distribute layers over devices."""
    return get_max_memory(max_memory)


# ---- ties ----


def find_tied_parameters(model: nn.Module, **_: Any) -> list[list[str]]:
    """The names of each tied parameter."""
    return [sorted(group) for group in tied_groups(model)]


def retie_parameters(model: nn.Module, tied_params: list[list[str]]) -> None:
    """Tie the parameters of each group to the first one with values."""
    for group in tied_params:
        found = [model.get_parameter(name) for name in group]
        kept = next((one for one in found if not one.is_meta), found[0])
        for name in group:
            path, _, last = name.rpartition(".")
            setattr(model.get_submodule(path), last, kept)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Whether the model's configuration ties its embeddings."""
    return bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """A value that is equal for tensors with the same storage."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def load_state_dict(checkpoint_file: str | Path, device_map: Any = None) -> dict[str, torch.Tensor]:
    """The tensors of a file, in host memory."""
    if device_map not in (None, {"": "cpu"}):
        raise UsageError(
            f"load_state_dict: only reads into host memory (got device_map={device_map!r}); remove device_map."
        )
    if str(checkpoint_file).endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(checkpoint_file)
    return torch.load(checkpoint_file, map_location="cpu", weights_only=True)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """torch.autocast with the dtype of the run's mixed precision (bf16 with fp8); a null context in fp32."""
    from shardkit.compat.states import AcceleratorState

    state = AcceleratorState()
    if not native_amp or state.mixed_precision == "no":
        return nullcontext()
    dtype = torch.float16 if state.mixed_precision == "fp16" else torch.bfloat16
    given = {} if autocast_kwargs is None else autocast_kwargs.to_kwargs()
    return torch.autocast(state.device.type, dtype=dtype, **given)
