"""The engine through its public face: a YAML file with Accelerate's keys, and `Accelerator.prepare`."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from shardkit import Accelerator, init_empty_weights
from tests import models
from tests.models import Reductions


def written(folder: Path, fsdp: dict[str, Any], **top: Any) -> Path:
    """A file as a user writes it."""
    path = folder / "shardkit.yaml"
    keys = {"distributed_type": "FSDP", "num_processes": 2, "use_cpu": True, "fsdp_config": fsdp, **top}
    path.write_text(yaml.safe_dump(keys))
    return path


def tokens() -> torch.Tensor:
    return torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))


def trained(path: Path, traces: bool = False) -> dict[str, Any]:
    """What this rank holds after one step, and what the backend was asked for; with `traces`, by torch's profiler too.

    Not with DDP: it waits for the future of a collective, and gloo's thread writes the collective's end later, into
    memory that a profiler which stops then has freed (valgrind, torch 2.13).
    """
    torch.manual_seed(dist.get_rank())
    accelerator = Accelerator(config=path)
    model = models.Gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    inner = accelerator.unwrap_model(model)
    computed: list[str] = []
    inner.blocks[0].up.register_forward_hook(lambda m, a, out: computed.append(str(out.dtype)))
    tracing = profile(activities=[ProfilerActivity.CPU]) if traces else nullcontext()
    with tracing as trace, Reductions() as reductions:
        loss = models.next_token_loss(model, tokens())
        accelerator.backward(loss)
    gradients = [p.grad for p in inner.parameters()]
    optimizer.step()
    state = optimizer.optimizer.state.values()
    events = sorted(trace.events(), key=lambda event: event.time_range.start) if trace is not None else []
    return {
        "parameters": held(inner.parameters()),
        "gradients": held(gradients),
        "state": held(value for entry in state for key, value in entry.items() if key != "step"),
        "units": [fqn for fqn, module in inner.named_modules() if isinstance(module, FSDPModule)],
        "compute": computed[0],
        "reduced": sorted(set(reductions.dtypes)),
        "kept": str(next(inner.parameters()).dtype),
        "prefetched": [e.name.rpartition(" ")[2] for e in events if e.name.startswith("FSDP::forward_prefetch")],
        "backward": [
            e.name for e in events if e.name.startswith(("FSDP::all_gather (b", "FSDP::post_backward_reduce (b"))
        ],
    }


def held(tensors: Any) -> int:
    """Bytes of the tensors on this rank."""
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


@pytest.mark.slow
@pytest.mark.requirement("A1")
@pytest.mark.parametrize(
    ("strategy", "share"), [(1, 2), ("shard_grad_op", 2), ("NO_SHARD", 1), (4, 2), ("hybrid shard zero2", 2)]
)
def test_a_strategy_by_number_or_name_shards_what_it_says(ranks, tmp_path, strategy, share):
    path = written(tmp_path, {"fsdp_sharding_strategy": strategy})
    total = sum(p.nbytes for p in models.Gpt().parameters())
    for found in ranks.run(2, trained, path):
        assert found["parameters"] == pytest.approx(total / share, rel=0.05)
        assert found["gradients"] == found["parameters"] and found["state"] == 2 * found["parameters"]
        assert bool(found["units"]) == (share > 1)


@pytest.mark.slow
@pytest.mark.requirement("A3")
def test_units_by_class_and_by_size(ranks, tmp_path):
    classes = {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block,Embedding",
    }
    assert set(ranks.run(2, trained, written(tmp_path, classes))[0]["units"]) == {
        "", "embed", "blocks.0", "blocks.1", "blocks.2"
    }  # fmt: skip
    size = {"fsdp_wrap_policy": "SIZE_BASED_WRAP", "min_num_param": 400}
    assert set(ranks.run(2, trained, written(tmp_path, size))[0]["units"]) >= {"", "blocks.0.qkv", "blocks.1.qkv"}


@pytest.mark.requirement("A4")
@pytest.mark.slow
def test_prefetch_as_the_file_says(ranks, tmp_path):
    ahead = {"fsdp_backward_prefetch_policy": "BACKWARD_PRE", "fsdp_forward_prefetch": True}
    found = ranks.run(2, trained, written(tmp_path, ahead), True)[0]
    assert found["prefetched"] == ["blocks.1", "blocks.2"]
    backward = found["backward"][3:]  # after forward's gathers
    assert [name.partition("(")[0] for name in backward[:2]] == ["FSDP::all_gather ", "FSDP::all_gather "]
    found = ranks.run(2, trained, written(tmp_path, {"fsdp_backward_prefetch": "NO_PREFETCH"}), True)[0]
    assert found["prefetched"] == []
    kinds = [name.partition(" (")[0] for name in found["backward"][3:]]
    assert kinds == ["FSDP::all_gather", "FSDP::post_backward_reduce"] * 3


@pytest.mark.slow
@pytest.mark.requirement("B4")
@pytest.mark.requirement("N2")
@pytest.mark.parametrize(("settings", "reduced"), [({}, "torch.float32"), ({"reduce_dtype": "bf16"}, "torch.bfloat16")])
def test_dtypes_as_the_file_says(ranks, tmp_path, settings, reduced):
    path = written(tmp_path, {}, mixed_precision="bf16", shardkit={"precision": settings})
    for found in ranks.run(2, trained, path):
        assert (found["compute"], found["reduced"], found["kept"]) == ("torch.bfloat16", [reduced], "torch.float32")


def filled(path: Path, weights: Path) -> list[float]:
    accelerator = Accelerator(config=path)
    with init_empty_weights():
        model = models.Gpt(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer, weights=weights)
    return losses_of(accelerator, model, optimizer)


def losses_of(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for _ in range(3):
        loss = models.next_token_loss(model, torch.ones(1, 6, dtype=torch.long))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def built(path: Path) -> list[float]:
    torch.manual_seed(5 + dist.get_rank())
    accelerator = Accelerator(config=path)
    model = models.Gpt(tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return losses_of(accelerator, *accelerator.prepare(model, optimizer))


@pytest.mark.slow
@pytest.mark.requirement("A7")
@pytest.mark.parametrize("strategy", [1, 3])
def test_reading_slices_is_as_good_as_rank_0s_weights(ranks, tmp_path, strategy):
    torch.manual_seed(5)
    weights = tmp_path / "model.safetensors"
    save_file({fqn: p.detach() for fqn, p in models.Gpt(tied=True).named_parameters()}, weights)
    settings = {"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True, "fsdp_use_orig_params": True}
    path = written(tmp_path, {"fsdp_sharding_strategy": strategy, **settings})
    assert ranks.run(2, filled, path, weights) == ranks.run(2, built, path)
