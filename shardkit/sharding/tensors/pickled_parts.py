"""Says so when a script pickles sharded tensors, as `torch.save(model.state_dict(), path)` does: each rank writes its
own part only, and without the files of all ranks the weights are lost. A rank that loads the part of another one stops:
torch would take it for the rank's own. Copies by copy.deepcopy are of all ranks' parts. Safetensors would write the
memory of a tensor, which sharded ones do not have: that is refused."""

import copyreg
from functools import cache
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from shardkit.distributed import collectives
from shardkit.distributed.tensors import local_part, sharded_like
from shardkit.errors import UsageError
from shardkit.log import get_logger
from shardkit.sharding.tensors.copied_parts import CopiedPart
from shardkit.sharding.tensors.sharded_parameter import ShardedParameter

log = get_logger(__name__)


@cache
def install() -> None:
    """Makes pickling a sharded tensor log a warning, the first time, and loading another rank's an error, as is writing
    one by safetensors. Has an effect once per process."""
    for kind in (DTensor, ShardedParameter, CopiedPart):
        copyreg.pickle(kind, _reduced)
    DTensor.__setstate__ = _set_state  # type: ignore[method-assign, assignment]
    DTensor.__deepcopy__ = _deep_copy  # type: ignore[method-assign, assignment]
    DTensor.storage = _refuse_to_safetensors  # type: ignore[method-assign, assignment]


def _reduced(tensor: DTensor) -> Any:
    """As torch pickles it, with exceptions. A tensor that every rank has whole, as rows of a sharded table are, is
    pickled as a plain one, which a process without ranks can load. A parameter is the tensor that it holds. And of a
    part of a tensor that is not its first, torch (seen in 2.13) would pickle memory that a DTensor does not have."""
    if all(placement.is_replicate() for placement in tensor.placements):
        return local_part(tensor).requires_grad_(tensor.requires_grad).__reduce_ex__(2)
    if tensor.device_mesh.size() > 1:
        if any(placement.is_partial() for placement in tensor.placements):
            _warn_of_pending()
        else:
            _warn_of_parts()
    plain: torch.Tensor = tensor
    if type(tensor) is ShardedParameter:
        plain = sharded_like(local_part(tensor), tensor)
    elif type(tensor) is CopiedPart or tensor.data_ptr() != 0:
        plain = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return plain.__reduce_ex__(2)


def _deep_copy(tensor: DTensor, memo: dict[int, Any]) -> DTensor:
    """As torch copies it. A gradient of FSDP is a part of a buffer, and where that part is not the first, torch (seen
    in 2.13) would copy memory that a DTensor does not have."""
    if id(tensor) in memo or not tensor.is_leaf or tensor.data_ptr() == 0:
        return torch.Tensor.__deepcopy__(tensor, memo)
    memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def _refuse_to_safetensors(tensor: DTensor) -> NoReturn:
    """What safetensors (seen in 0.8) asks for where a tensor has no memory of its own. Raises UsageError."""
    raise UsageError(
        f"safetensors: a sharded tensor has no memory of its own to write (got one of shape {tuple(tensor.shape)}); "
        "give save_file whole tensors: accelerator.get_state_dict(model) gives them to rank 0, and peft's "
        "get_peft_model_state_dict(model, state_dict=...) takes the adapters from these; or call "
        "accelerator.save_model(model, folder). All ranks must call get_state_dict and save_model."
    )


@cache
def _warn_of_parts() -> None:
    log.warning(
        "torch.save: sharded tensors are pickled, so this rank writes its own part of each only, which cannot be read "
        "without the files of all ranks; accelerator.save_model(model, folder) and save_state() write whole tensors, "
        "accelerator.get_state_dict(model) gives them to rank 0, for torch.save there. All ranks must call these three."
    )


@cache
def _warn_of_pending() -> None:
    log.warning(
        "torch.save: a value that is not summed over the ranks yet is pickled, such as a loss with a penalty on "
        "sharded weights, so this rank writes its part of the sum only; save its number, which all ranks must take: "
        "loss.item()."
    )


def _set_state(tensor: DTensor, state: Any) -> None:
    """As torch does while it loads. Raises UsageError on a rank that has another part than the rank that saved."""
    torch._utils._set_obj_state(tensor, state)
    mesh, rank = tensor.device_mesh, collectives.rank()
    saved = mesh.get_coordinate()  # in the pickle, so of the rank that saved
    if collectives.world_size() == 1 or saved is None:
        return
    here = (mesh.mesh == rank).nonzero().flatten().tolist()
    split = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if split and (not here or any(here[axis] != saved[axis] for axis in split)):
        raise UsageError(
            f"torch.load: the file has parts of sharded tensors that rank {int(mesh.mesh[tuple(saved)])} wrote (got it "
            f"on rank {rank}), and this rank has other parts; load here what this rank wrote, or save whole tensors: "
            "save_state() and load_state(), which all ranks call; accelerator.get_state_dict(model) gives rank 0 whole "
            "ones, too, and loss.item() a loss."
        )
