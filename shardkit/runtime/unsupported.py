"""Arguments and attributes of Accelerate that shardkit does not support, each with what to do instead."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from shardkit.errors import UsageError
from shardkit.wording import near_or

ARGUMENTS = {
    "deepspeed_plugin": "shardkit does not run DeepSpeed; strategies 1 to 5 are in shardkit.yaml under fsdp_config",
    "deepspeed_plugins": "shardkit does not run DeepSpeed; strategies 1 to 5 are in shardkit.yaml under fsdp_config",
    "megatron_lm_plugin": "shardkit does not run Megatron-LM; strategies 1 to 5 are in shardkit.yaml under fsdp_config",
    "dispatch_batches": "every rank reads its own part of the data; leave it out",
    "use_seedable_sampler": "the order of the data is always a function of (seed, epoch); leave it out",
    "dynamo_backend": "set shardkit.compile: true in shardkit.yaml",
    "torch_tp_plugin": "shardkit does not split tensors inside a layer; leave it out",
}

ATTRIBUTES = {
    "lomo_backward": "LOMO is not supported; use FSDP, which shards the gradients over ranks",
    "deepspeed_ulysses_dl_adapter": "loaders yield whole sequences; accelerator.context_parallel splits them",
    "flag_tensor": "set_trigger sets the flag, check_trigger reads and resets it",
    "save_iteration": "checkpoints are named by their step: accelerator.counters.step",
}


def refuse_arguments(arguments: dict[str, Any], known: Collection[str]) -> None:
    """Raises UsageError with every unsupported argument of Accelerator, which takes the known ones; an empty default is
    accepted."""
    found = [(name, value) for name, value in arguments.items() if (value and value != "no") or name not in ARGUMENTS]
    problems = [_argument_text(name, value, known) for name, value in found]
    if problems:
        raise UsageError("\n".join(problems))


def _argument_text(name: str, value: Any, known: Collection[str]) -> str:
    if name in ARGUMENTS:
        return f"Accelerator({name}=...): not supported (got {value!r}); {ARGUMENTS[name]}."
    hint = near_or(name, known, f"it takes {', '.join(known)}.")
    return f"Accelerator({name}=...): unknown argument (got {value!r}); {hint}"


def attribute_text(name: str, known: Collection[str]) -> str:
    """The text of the Accelerator's AttributeError; it has the known names."""
    if name in ATTRIBUTES:
        return f"Accelerator.{name} is not part of shardkit; {ATTRIBUTES[name]}."
    near = get_close_matches(name, known, 1, cutoff=0.7)
    return f"'Accelerator' object has no attribute {name!r}" + (f"; did you mean {near[0]}?" if near else "")


def refuse_dispatch(slice_fn_for_dispatch: Any) -> None:
    """Raises UsageError where one rank would read for all."""
    if slice_fn_for_dispatch is not None:
        raise UsageError(
            "prepare_data_loader(slice_fn_for_dispatch=...): every rank reads its own part of the data (got a "
            "function); leave it out."
        )


def refuse_pickle(safe_serialization: bool) -> None:
    """Raises UsageError where a script requests torch.save's format."""
    if not safe_serialization:
        raise UsageError(
            "save: shardkit writes safetensors and JSON only (got safe_serialization=False); "
            "leave the argument out, or write with torch.save yourself."
        )
