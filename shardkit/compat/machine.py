"""The functions of `accelerate.utils` about this machine and its packages."""

import importlib.metadata
import importlib.util
import operator
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shardkit import env

_PACKAGES = {
    "4bit_bnb": "bitsandbytes", "8bit_bnb": "bitsandbytes", "aim": "aim", "boto3": "boto3",
    "clearml": "clearml", "comet_ml": "comet_ml", "datasets": "datasets", "dvclive": "dvclive",
    "lomo": "lomo_optim", "matplotlib": "matplotlib", "mlflow": "mlflow", "pandas": "pandas",
    "peft": "peft", "pynvml": "pynvml", "pytest": "pytest", "rich": "rich", "sagemaker": "sagemaker",
    "schedulefree": "schedulefree", "swanlab": "swanlab", "timm": "timm", "torchao": "torchao",
    "torchdata": "torchdata",
    "torchdata_stateful_dataloader": "torchdata.stateful_dataloader", "torchvision": "torchvision",
    "trackio": "trackio", "transformers": "transformers", "triton": "triton", "wandb": "wandb",
    "transformer_engine": "transformer_engine", "import_timer": "import_timer",
}  # fmt: skip
# Not supported, or called by shardkit alone (torch_xla), even if installed: scripts then choose another code path.
_NEVER = [
    *("deepspeed", "megatron_lm", "msamp", "pippy", "torch_xla", "npu", "mlu", "sdaa", "musa", "hpu", "neuron", "xpu"),
    *("fp8", "amdsmi", "bitsandbytes_multi_backend", "transformer_engine_mxfp8", "xccl", "cuda_ipc"),
]


def is_package_there(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _tensorboard() -> bool:
    return is_package_there("tensorboard") or is_package_there("tensorboardX")


def _bnb(min_version: str | None = None) -> bool:
    return is_package_there("bitsandbytes") and (
        min_version is None or compare_versions("bitsandbytes", ">=", min_version)
    )


def _bf16(ignore_tpu: bool = False) -> bool:
    import torch

    return torch.cuda.is_bf16_supported() if torch.cuda.is_available() else True


def _rich() -> bool:
    return is_package_there("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _rocm() -> bool:
    import torch

    return torch.version.hip is not None


def _mps(min_version: str = "1.12") -> bool:
    import torch

    return torch.backends.mps.is_available() and torch.backends.mps.is_built()


_ASKED: dict[str, Callable[..., bool]] = {
    **{
        f"is_{name}_available": lambda *_, found=package: is_package_there(found) for name, package in _PACKAGES.items()
    },
    **{f"is_{name}_available": lambda *_, **__: False for name in _NEVER},
    "is_bnb_available": _bnb,
    "is_rich_available": _rich,
    "is_tensorboard_available": _tensorboard,
    "is_bf16_available": _bf16,
    "is_fp16_available": _cuda,
    "is_cuda_available": _cuda,
    "is_rocm_available": _rocm,
    "is_mps_available": _mps,
    "is_weights_only_available": lambda: True,
    "is_habana_gaudi1": lambda: False,
}
NAMES = list(_ASKED)


def __getattr__(name: str) -> Any:
    if name in _ASKED:
        return _ASKED[name]
    raise AttributeError(name)


# ---- versions ----

_COMPARED = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare the version of a package, given by its name or as a version: `compare_versions("torch", ">=", "2.0")`."""
    from torch.torch_version import Version  # the package packaging may not be installed

    if operation not in _COMPARED:
        raise ValueError(f"compare_versions: unknown operation (got {operation!r}); use one of {', '.join(_COMPARED)}.")
    is_name = isinstance(library_or_version, str)
    found = importlib.metadata.version(library_or_version) if is_name else library_or_version
    return _COMPARED[operation](Version(str(found)), Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version, without suffixes such as `+cu126`."""
    import torch
    from torch.torch_version import Version

    return compare_versions(Version(Version(torch.__version__).base_version), operation, version)


# ---- environment ----


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0 (or a bool) for y, yes, t, true, on, 1 and n, no, f, false, off, 0. Raises ValueError for other text."""
    word = value.lower()
    if word in {"y", "yes", "t", "true", "on", "1"}:
        return True if to_bool else 1
    if word in {"n", "no", "f", "false", "off", "0"}:
        return False if to_bool else 0
    raise ValueError(f"str_to_bool: not a boolean (got {value!r}); use yes or no.")


def get_int_from_env(env_keys: list[str], default: int) -> int:
    """The value of the first variable that is set to a number >= 0, or the default."""
    found = [int(value) for key in env_keys if (value := env.get(key)) and int(value) >= 0]
    return found[0] if found else default


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A variable as a boolean."""
    return str_to_bool(env.get(key, str(default)) or str(default)) == 1


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """The value of a variable, or the default."""
    return env.get(key, default) or default


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Those of the packages that are imported already."""
    import sys

    return [name for name in library_names if name in sys.modules]


@contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """A context with these variables set, their names in upper case. Restores the previous values at its end."""
    names, found = {name.upper() for name in variables}, env.copy()
    env.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        others = {name: value for name, value in env.copy().items() if name not in names}
        env.replace(others | {name: found[name] for name in names if name in found})


@contextmanager
def clear_environment() -> Iterator[None]:
    """A context without any environment variable. Restores all at its end."""
    found = env.copy()
    env.replace({})
    try:
        yield
    finally:
        env.replace(found)


def purge_accelerate_environment(func_or_cls: Any) -> Any:
    """The function or class, unchanged: variables of Accelerate that it sets stay set."""
    return func_or_cls


def convert_dict_to_env_variables(current_env: dict[str, Any]) -> list[str]:
    """`name=value` lines."""
    return [f"{name}={value}\n" for name, value in current_env.items()]


def get_gpu_info() -> tuple[list[str], int]:
    """Names of the GPUs, and their number."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_name(number) for number in range(count)], count


def check_cuda_p2p_ib_support() -> bool:
    """Whether the GPUs support peer-to-peer transfers and InfiniBand (not GeForce RTX 40)."""
    return all(f"RTX 40{number}" not in name for name in get_gpu_info()[0] for number in range(60, 100, 10))


def check_cuda_fp8_capability() -> bool:
    """Whether the GPU computes in fp8."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def get_current_device_type() -> tuple[str, str]:
    """The device type, and the distributed type for it."""
    from shardkit.distributed import accelerators

    kind = accelerators.kind()
    return ("cpu", "MULTI_CPU") if kind is None else (kind, "XLA" if kind == "xla" else "MULTI_GPU")


def get_cpu_distributed_information() -> Any:
    """An object with rank, world_size, local_rank and local_world_size."""
    return env.ranks() or env.Ranks(0, 0, 1, 1)


def check_os_kernel() -> None:
    """Does nothing: the kernel version is not checked."""


def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Does nothing: the launcher sets the affinity, see `enable_cpu_affinity` in shardkit.yaml."""


def is_port_in_use(port: Any = None) -> bool:
    """Whether a process listens on a port of this machine (default: 29500)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("localhost", int(port or 29500))) == 0


def convert_bytes(size: float) -> str:
    """A size as text with a unit."""
    for unit in ("bytes", "KB", "MB", "GB", "TB", "PB"):
        if size < 1024.0 or unit == "PB":
            break
        size /= 1024.0
    return f"{round(size, 2)} {unit}"
