"""The functions of `accelerate.utils` for nested tensors and collectives, on shardkit's collectives."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit import env
from shardkit.compat.differences import takes_back
from shardkit.data.device import to_device
from shardkit.distributed import collectives, nested
from shardkit.distributed.modules import every_parameter, unwrapped
from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import UsageError
from shardkit.runtime.checkpoints import objects
from shardkit.sharding import precision


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor is not padded."""


def gather(tensor: Any) -> Any:
    """The tensors of all ranks, concatenated along dim 0, on every rank; in one process unchanged. Collective."""
    gathered = collectives.gather(tensor)
    return gathered if collectives.world_size() > 1 else detached(tensor)


def detached(data: Any) -> Any:
    """The structure with its tensors, without their graphs."""
    return recursively_apply(torch.Tensor.detach, data)


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors of rank `from_process`, on every rank. Collective."""
    return collectives.broadcast(tensor, from_process)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """The tensors, padded along `dim` to the longest of all ranks. Collective."""
    return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)


def gather_object(object: Any) -> list[Any]:
    """The objects of all ranks as one list: the items of a list, tuple, set or array; a dict or a text is one object.
    Collective."""
    is_one = isinstance(object, (Mapping, str, bytes)) or getattr(object, "ndim", 1) == 0
    return collectives.gather_object([*object] if isinstance(object, Iterable) and not is_one else object)


def reduce(tensor: Any, reduction: Any = "mean", scale: float = 1.0) -> Any:
    """Mean or sum over all ranks, on every rank. Collective. The default is the mean, as in Accelerate's function; that
    of the method `Accelerator.reduce` is the sum."""
    return collectives.reduce(tensor, reduction, scale)


# ---- structures ----


def is_torch_tensor(tensor: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(tensor, torch.Tensor)


def is_namedtuple(data: Any) -> bool:
    """Whether it is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether it is a TensorInformation."""
    return isinstance(tensor_info, TensorInformation)


class TensorInformation:
    """A tensor's shape and dtype."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items as a list, tuple or named tuple like `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """`data` with `func(leaf, ...)` instead of each leaf for which `test_type` is true. Others stay unchanged, or raise
    TypeError with `error_on_other_type`."""

    def inner(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return honor_type(item, (inner(one) for one in item))
        if isinstance(item, Mapping):
            return type(item)({key: inner(value) for key, value in item.items()})  # type: ignore[call-arg]
        if test_type(item):
            return func(item, *args, **kwargs)
        if error_on_other_type:
            raise TypeError(f"{func.__name__}: expected nested tensors (got {type(item).__name__}).")
        return item

    return inner(data)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """The structure with its tensors on the device, except those under `skip_keys` in any of its mappings."""
    return to_device(tensor, torch.device(device), [skip_keys] if isinstance(skip_keys, str) else list(skip_keys or []))


def get_data_structure(data: Any) -> Any:
    """The structure with a TensorInformation instead of each tensor."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Uninitialized tensors for a structure from `get_data_structure`."""
    make = lambda info: torch.empty(info.shape, dtype=info.dtype)  # noqa: E731
    return recursively_apply(make, data_structure, test_type=is_tensor_information)


def find_batch_size(data: Any) -> int | None:
    """Length of the first tensor; None if the structure is empty."""
    found = nested.leaves(data)
    if not found:
        return None
    if not isinstance(found[0], torch.Tensor):
        raise TypeError(f"find_batch_size: expected a tensor (got {type(found[0]).__name__}).")
    return found[0].shape[0]


def ignorant_find_batch_size(data: Any) -> int | None:
    """As `find_batch_size`, ignoring other values; None without any tensor."""
    tensors = [leaf for leaf in nested.leaves(data) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return tensors[0].shape[0] if tensors else None


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor; None without any."""
    return next((leaf.device for leaf in nested.leaves(data) if isinstance(leaf, torch.Tensor)), None)


def listify(data: Any) -> Any:
    """Tensors as lists of numbers."""
    as_list = lambda tensor: (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).tolist()  # noqa: E731
    return recursively_apply(as_list, data)


def slice_tensors(data: Any, tensor_slice: slice, process_index: Any = None, num_processes: Any = None) -> Any:
    """Apply a slice to every tensor."""
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate the tensors of structures with the same form, along `dim`."""
    first = data[0]
    if isinstance(first, (tuple, list)):
        return honor_type(first, (concatenate([one[i] for one in data], dim) for i in range(len(first))))
    if isinstance(first, Mapping):
        return type(first)({key: concatenate([one[key] for one in data], dim) for key in first})  # type: ignore[call-arg]
    if not isinstance(first, torch.Tensor):
        raise TypeError(f"concatenate: expected nested tensors (got {type(first).__name__}).")
    return torch.cat(list(data), dim=dim)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last item of each tensor until the batch size is divisible by the number of ranks."""
    missing = -batch_size % num_processes

    def pad(one: torch.Tensor) -> torch.Tensor:
        if not missing or not one.dim():
            return one
        last = one.narrow(dim, one.shape[dim] - 1, 1)
        return torch.cat([one, last.repeat_interleave(missing, dim)], dim)

    return recursively_apply(pad, tensor)


def copy_tensor_to_devices(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all ranks. Collective."""
    return collectives.reduce(tensor, "sum")


def convert_to_fp32(tensor: Any) -> Any:
    """Convert fp16 and bf16 tensors to fp32."""
    narrow = (torch.float16, torch.bfloat16)
    return recursively_apply(lambda one: one.float() if one.dtype in narrow else one, tensor)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it returns fp32 tensors."""

    @wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


# ---- models and objects ----


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """The script's module without DDP's wrapper; without torch.compile's too, unless `keep_torch_compile`; without
    mixed precision in its forward, unless `keep_fp32_wrapper`."""
    compiled = getattr(model, "_orig_mod", None)
    inner = unwrapped(model if compiled is None else compiled)
    if not keep_fp32_wrapper:
        precision.restore_forward(inner)
    inside = getattr(inner, "_orig_mod", None)
    if keep_torch_compile:
        return inner if compiled is None or inner is not compiled else model
    return inner if inside is None else inside


def is_compiled_module(module: Any) -> bool:
    """Whether a module was returned by torch.compile."""
    return isinstance(module, torch._dynamo.eval_frame.OptimizedModule)


def has_compiled_regions(module: nn.Module) -> bool:
    """Whether a submodule is compiled."""
    return any(is_compiled_module(one) for one in module.modules())


def model_has_dtensor(model: nn.Module) -> bool:
    """Whether a parameter is sharded."""
    return any(is_dtensor(parameter) for parameter in every_parameter(model))


def is_peft_model(model: Any) -> bool:
    """Whether it is a peft model."""
    try:
        from peft import PeftModel
    except ImportError:
        return False
    return isinstance(extract_model_from_parallel(model), PeftModel)


def save(obj: Any, f: str | Path, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Rank 0, with `save_on_each_node` the first rank of every machine, writes a dict of tensors as safetensors, or
    JSON-serializable values as JSON. With `--accelerates-meaning save` it uses torch.save. Collective where tensors are
    sharded."""
    whole = objects.gathered(obj)
    here = env.ranks() if save_on_each_node else None
    if (collectives.rank() if here is None else here.local_rank) == 0:
        if takes_back("save") and not safe_serialization:
            torch.save(whole, f)
        else:
            objects.save(
                whole,
                f,
                "split the object, or launch with --as-accelerate --accelerates-meaning save, which uses torch.save",
            )


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load a file of `save` or torch.save. Pickles are read with `weights_only=True` by default."""
    path = None if hasattr(f, "read") else Path(f)
    if path is not None and path.is_file():
        with suppress(Exception):  # of a file of another kind
            from safetensors.torch import load_file

            return load_file(path, device=str(map_location or "cpu"))
    try:
        return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})
    except OSError:
        raise
    except Exception as error:  # torch's unpickler raises IndexError and others for what is no pickle
        with suppress(ValueError):
            return json.loads("" if path is None else path.read_text())
        raise UsageError(
            f"load: {f}: not a file of safetensors, JSON or torch.save (got {error}); give another file."
        ) from error


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with contiguous tensors; of tensors that share memory only the first is kept."""
    seen: set[tuple[int, int]] = set()
    kept: dict[str, Any] = {}
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            place = (value.data_ptr(), value.numel())
            if value.numel() and place in seen:
                continue
            seen.add(place)
            value = value.contiguous()
        kept[name] = value
    return kept


def merge_dicts(source: Mapping[str, Any], destination: dict[str, Any]) -> dict[str, Any]:
    """`destination`, updated in place with the values of `source`, recursively."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """An attribute by its dotted name."""
    return attrgetter(attr)(obj)


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """All modules, children before their parents; with `return_fqns` as (name, module)."""
    waiting, found = [("", model)], []
    while waiting:
        name, module = waiting.pop()
        found.append((name, module))
        waiting += [(f"{name}.{inner}" if name else inner, child) for inner, child in module.named_children()]
    return found[::-1] if return_fqns else [module for _, module in found[::-1]]


def get_pretty_name(obj: Any) -> str:
    """The name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return getattr(named, "__qualname__", None) or getattr(named, "__name__", None) or str(obj)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Set a random generator to rank 0's state: the one of the given kind, or `generator`. Collective."""
    kind = str(getattr(rng_type, "value", rng_type))
    if generator is None and kind not in ("None", "torch", "xla", "generator"):
        module = torch.get_device_module(kind)
        module.set_rng_state(collectives.broadcast(module.get_rng_state()))
        return
    own = torch.default_generator if generator is None else generator
    own.set_state(collectives.broadcast(own.get_state()))


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """As `synchronize_rng_state`, for each kind. Collective."""
    for kind in rng_types:
        is_its_own = str(getattr(kind, "value", kind)) == "generator"
        if not is_its_own or generator is not None:
            synchronize_rng_state(kind, generator if is_its_own else None)
