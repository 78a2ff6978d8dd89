"""Attention masks that models of Transformers make themselves (sliding windows, padding), in a region: those of the
whole sequence, from this rank's slice."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from shardkit.sharding.context_parallel.torch_functions import current_group

KIND = "sdpa"


@cache
def install() -> None:
    """Has Transformers' function for such masks ask whether it is in a region. Has an effect once per process, and none
    for versions before 4.53, whose models make their masks in another way: these are refused in the first forward."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as known
    except ImportError:
        return
    if KIND in known:
        known.register(KIND, _of_whole_sequences(known[KIND]))


def _of_whole_sequences(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def run(*arguments: Any, **named: Any) -> Any:
        group, own = current_group(), _positions(named)
        if group is None or own is None or named.get("kv_length") != own:
            return make(*arguments, **named)
        whole = own * group.size
        sizes: dict[str, Any] = {"q_length": whole} if "q_length" in named else {}
        if (positions := named.get("cache_position")) is not None:
            sizes["cache_position"] = torch.arange(whole, device=positions.device)
        if (padding := named.get("attention_mask")) is not None:
            sizes["attention_mask"] = group.gathered(padding, 1)
        return make(*arguments, **{**named, "kv_length": whole, **sizes})

    return run


def _positions(named: dict[str, Any]) -> int | None:
    """The number of queries, by the names of several versions."""
    positions = named.get("cache_position")
    return named.get("q_length") if positions is None else len(positions)
