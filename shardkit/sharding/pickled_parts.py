"""Says so when a script pickles sharded tensors, as `torch.save(model.state_dict(), path)` does: each rank writes its
own part only, and without the files of all ranks the weights are lost."""

import copyreg
from functools import cache
from typing import Any

from torch.distributed.tensor import DTensor

from shardkit.distributed.tensors import local_part, sharded_like
from shardkit.log import get_logger
from shardkit.sharding.sharded_parameter import ShardedParameter

log = get_logger(__name__)


@cache
def install() -> None:
    """Makes pickling a sharded tensor log a warning, the first time. Has an effect once per process."""
    for kind in (DTensor, ShardedParameter):
        copyreg.pickle(kind, _reduced)


def _reduced(tensor: DTensor) -> Any:
    """As torch pickles it; a parameter as the tensor that it holds."""
    if tensor.device_mesh.size() > 1 and any(placement.is_shard() for placement in tensor.placements):
        _tell()
    plain = sharded_like(local_part(tensor), tensor) if type(tensor) is ShardedParameter else tensor
    return plain.__reduce_ex__(2)


@cache
def _tell() -> None:
    log.warning(
        "torch.save: sharded tensors are pickled, so this rank writes its own part of each only, which cannot be read "
        "without the files of all ranks; accelerator.get_state_dict(model) gives whole tensors, "
        "accelerator.save_model(model, folder) and save_state() write them. All ranks must call these."
    )
