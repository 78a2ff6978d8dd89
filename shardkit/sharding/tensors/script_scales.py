"""The loss scale of a script's own GradScaler, where gradients of offloaded parameters are in host memory.

torch copies the scale from the device, and does not wait for the copy: kernels on the CPU would read what was in that
memory before, and the note of an overflow would be overwritten by the copy (torch 2.11 to 2.15).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from shardkit.distributed import accelerators
from shardkit.distributed.tensors import is_dtensor, local_part
from shardkit.sharding.tensors.dtensor_operators import as_torch_does, handle, operators


@cache
def install() -> None:
    """Makes the CPU wait for the copy. Has an effect once per process."""
    handle(operators("_amp_foreach_non_finite_check_and_unscale_"), _after_copies)


def _after_copies(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradients: Sequence[torch.Tensor] = args[0]
    if any(is_dtensor(one) and one.device_mesh.device_type != "cpu" and local_part(one).is_cpu for one in gradients):
        accelerators.finish_stream()
    return as_torch_does(operator, args, kwargs)
