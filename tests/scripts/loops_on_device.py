"""One process that runs loops of tests/loops on one device, and compares them with plain torch on the CPU.

    python loops_on_device.py cpu|cuda|openreg|xla PART PARTS RESULT.json
    shardkit launch -n 2 loops_on_device.py openreg PART PARTS RESULT.json

Of all loops it takes every PARTS-th from number PART on, or the one named PART, under strategies 1 and 3, and 1 with
offloaded parameters; on XLA devices, of which there are four, under strategy 1. The result: {loop and way:
what differs}.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy
import torch.distributed as dist

from shardkit import Accelerator
from tests import loops, openreg

# CUDA's and XLA's generators draw other numbers than the CPU's, which torch_openreg uses.
DRAWN = ("rows_written", "values_drawn_after_prepare")
# Gradients that live in host memory are joined by operations on the device.
NOT_OFFLOADED = ("gradients_joined_and_split", "rows_written_by_way_of_the_whole")
# torch_openreg has no convolutions, no cells of GRUs and LSTMs, and no views of complex numbers.
NOT_ON_OPENREG = (
    "a_state_kept_between_steps",
    "a_state_made_like_a_weight_and_forwards_called_by_name",
    "channels_last_before_prepare",
    "channels_last_after_prepare",
    "complex_weights",
)
# torch_xla has no norms of complex gradients, no mean(0) of one number, no checkpoint or GradScaler of torch's own, no
# tensors whose sizes depend on values, and nothing here that torch.func can differentiate. Muon computes in bf16, with
# other roundings.
# A line search compiles each trial.
NOT_ON_XLA = (
    "complex_weights",
    "a_penalty_in_the_loss",
    "recomputing_by_a_backward_inside",
    "recomputing_by_hooks",
    "recomputing_a_module_that_ran_twice",
    "rows_and_elements_one_by_one",
    "gradients_of_each_sample",
    "with_muon",
    "with_lbfgs",
    "scripted",
    "a_scaler_of_the_script",
    *(name for name in loops.LOOPS if name.startswith("derivatives_")),
)
LEFT_OUT = {"cuda": DRAWN, "openreg": NOT_ON_OPENREG, "xla": (*DRAWN, *NOT_ON_XLA)}
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "openreg": "cpu:gloo,openreg:through_host"}
# Of the same operations in another order; the device's kernels for sums are others, too.
BOUND = 1e-3


def main() -> None:
    device, part, parts = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if device == "openreg":
        openreg.prepare()
    is_launched = "WORLD_SIZE" in os.environ
    if device == "xla":  # before the first backward, at which torch lists its devices
        Accelerator(config=loops.config_of(1, loops.LOOPS["usual"], device)).free_memory()
    else:
        alone: dict[str, Any] = {} if is_launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(BACKENDS[device], **alone)
    ways = [("", 1, {}), ("", 3, {}), (" offloaded", 1, {"fsdp_offload_params": True})][: 1 if device == "xla" else 3]
    left_out = LEFT_OUT.get(device, ())
    problems: dict[str, str] = {}
    names = [name for name in loops.LOOPS if name not in left_out]
    for name in [part] if part in loops.LOOPS else names[int(part) :: parts]:
        expected = loops.plain(name)
        for way, strategy, fsdp in ways:
            is_left_out = is_launched and strategy == 3 and loops.LOOPS[name].is_for_shards
            if not is_left_out and not (fsdp and name in NOT_OFFLOADED):
                problem = _problem(name, strategy, device, fsdp, expected)
                problems |= {f"{name}, strategy {strategy}{way}": problem} if problem else {}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    if dist.is_initialized():
        dist.destroy_process_group()
    if is_first:
        Path(sys.argv[4]).write_text(json.dumps(problems))


def _problem(name: str, strategy: int, device: str, fsdp: dict[str, Any], expected: Any) -> str | None:
    """What differs from plain torch; None if nothing does."""
    try:
        found = loops.on_ranks(name, (strategy,), device, **fsdp)[strategy]
    except Exception:  # the other loops run all the same
        return traceback.format_exc()[-2000:]
    if isinstance(found, str):  # refused, as it is to be
        return None
    seen = numpy.array(found[0]), numpy.array(expected[0])
    if seen[0].shape != seen[1].shape or not numpy.allclose(*seen, rtol=BOUND, atol=BOUND):
        return f"saw {found[0]}, in plain torch {expected[0]}"
    far = [
        fqn for fqn, weight in expected[1].items() if not numpy.allclose(found[1][fqn], weight, rtol=BOUND, atol=BOUND)
    ]
    return f"other weights: {far}" if far else None


if __name__ == "__main__":
    main()
