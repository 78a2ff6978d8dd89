"""Traffic in closed form against the bytes of the collectives that torch really starts, for all five strategies."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardkit.config.schema import Config, FsdpConfig, PrecisionConfig, ShardkitConfig
from shardkit.model.describe import TransformerFacts
from shardkit.model.gpt import GptShape
from shardkit.model.gpt_module import GPT
from shardkit.model.live import tree_of
from shardkit.plan.closed_form import estimate
from shardkit.plan.traffic import Collective
from shardkit.plan.unit_sizes import axes

# Odd sizes, so that dim 0 never divides evenly and every shard is padded.
SHAPE = GptShape(layers=3, hidden=12, heads=2, vocab=101, seq=7)
KINDS = {
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
}


class CountedBytes(TorchDispatchMode):
    """Bytes of each kind of collective: output of an all-gather, input of a reduce-scatter, tensor of an all-reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            name = function._schema.name.removeprefix("c10d::").strip("_")
            tensor = args[1] if name == "reduce_scatter_base" else args[0]
            tensors = tensor if isinstance(tensor, list) else [tensor]
            if name in KINDS:
                self.found[KINDS[name]] += sum(t.numel() * t.element_size() for t in tensors)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A process group of any size whose collectives do nothing, with this process as rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def counted(model: nn.Module, config: Config, world_size: int, machine: int) -> Counter[str]:
    """What one training step of the runtime's own model starts. DDP agrees on its buckets in the first two."""
    from shardkit.distributed.process import Process
    from shardkit.sharding.mesh import build_mesh
    from shardkit.sharding.parallelize import parallelize

    process = Process(0, 0, world_size, machine, torch.device("cpu"), "fake")
    parallel = parallelize(model, config, build_mesh(config, process), process)
    tokens = torch.zeros(1, SHAPE.seq, dtype=torch.long)
    for _ in range(3):
        with CountedBytes() as mode:
            parallel(tokens).sum().backward()
    return mode.found


def planned(collectives: tuple[Collective, ...]) -> Counter[str]:
    found: Counter[str] = Counter()
    for collective in collectives:
        found[collective.kind] += collective.payload_bytes
    return found


def configuration(strategy: int, precision: str = "no", **fsdp: Any) -> Config:
    section = FsdpConfig(sharding_strategy=strategy, sync_module_states=False, **fsdp)
    return Config(num_processes=16, num_machines=2, mixed_precision=precision, fsdp=section)


@pytest.mark.requirement("A1")
@pytest.mark.parametrize("world", [16], indirect=True)
@pytest.mark.parametrize(
    ("strategy", "precision", "fsdp"),
    [
        (1, "no", {}),
        (1, "bf16", {"auto_wrap_policy": "NO_WRAP"}),
        (1, "bf16", {"backward_prefetch": "NO_PREFETCH", "activation_checkpointing": True}),
        (2, "bf16", {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 500}),
        (4, "bf16", {}),
        (5, "no", {}),
        (1, "bf16", {"ignored_modules": "positions"}),
    ],
)
def test_bytes_are_those_of_the_real_collectives(world, strategy, precision, fsdp):
    config = configuration(strategy, precision, **fsdp)
    model = GPT(SHAPE)
    expected = planned(estimate(tree_of(model), config, world_size=world).traffic.collectives)
    assert counted(model, config, world, machine=8) == expected


def with_shared_buffer() -> GPT:
    model = GPT(SHAPE)
    model.register_buffer("mean", torch.zeros(5))
    model.blocks[0].register_buffer("mean", model.mean)
    return model


def ddp_step(config: Config) -> Counter[str]:
    """On a live rank: the fake process group cannot run DDP."""
    return counted(with_shared_buffer(), config, world_size=dist.get_world_size(), machine=2)


@pytest.mark.parametrize("reduce_dtype", [None, "bf16"])
def test_bytes_under_ddp(ranks, reduce_dtype):
    section = ShardkitConfig(precision=PrecisionConfig(reduce_dtype=reduce_dtype))
    config = configuration(3).model_copy(update={"shardkit": section})
    expected = planned(estimate(tree_of(with_shared_buffer()), config, world_size=2).traffic.collectives)
    assert ranks.run(2, ddp_step, config) == [expected, expected]


@pytest.mark.parametrize("world", [4], indirect=True)
@pytest.mark.parametrize("strategy", [1, 2])
@pytest.mark.parametrize("prefetch", ["BACKWARD_PRE", "NO_PREFETCH"])
def test_frozen_and_tied_parameters(world, strategy, prefetch):
    """Blocks 0 and 1 are frozen: no gradient reaches them, and one is gathered ahead in vain."""
    model = GPT(GptShape(**{**vars(SHAPE), "tied": True}))
    model.requires_grad_(False)
    model.blocks[2].requires_grad_(True)
    config = configuration(strategy, "bf16", backward_prefetch=prefetch)
    found = estimate(tree_of(model), config, world_size=world)
    assert counted(model, config, world, machine=4) == planned(found.traffic.collectives)


def test_a_ring_splits_into_links_inside_and_between_machines():
    tree = tree_of(GPT(SHAPE))
    one = estimate(tree, configuration(1), world_size=8).traffic
    assert (one.between_bytes, one.inside_bytes) == (0, one.sent_bytes)
    two = estimate(tree, configuration(1), world_size=16).traffic
    assert all(c.sent_bytes == c.payload_bytes * 15 // 16 for c in two.collectives)
    assert all(c.between_bytes == c.sent_bytes // 8 for c in two.collectives)
    hybrid = estimate(tree, configuration(4), world_size=16).traffic
    by_axis = {c.axis: c for c in hybrid.collectives}
    assert by_axis["shard"].between_bytes == 0
    assert by_axis["replicate"].between_bytes == by_axis["replicate"].payload_bytes


@pytest.mark.parametrize(("strategy", "mode"), [(1, "FSDP"), (3, "MULTI_GPU")])
@pytest.mark.parametrize(
    ("changed", "times"),
    [
        ({}, 2),  # forward and backward
        ({"fsdp": {"activation_checkpointing": True}}, 3),
        ({"fsdp": {"activation_checkpointing": True}, "shardkit": {"recompute": "operators"}}, 3),
        ({"shardkit": {"gradient_accumulation_steps": 3}}, 6),
    ],
)
def test_ranks_that_share_sequences_exchange_slices_for_heads_by_hand(strategy, mode, changed, times):
    """3 layers; of each of 2 x 2 tokens of a rank 4 heads of 3 elements of queries and output, and 2 key-value heads
    once for two of the four ranks each."""
    facts = TransformerFacts(3, 12, 4, 2, 48, vocabulary=101, seq_len=8)
    config = configuration(strategy).changed(distributed_type=mode, shardkit={"mesh": {"context_size": 4}})
    known = {"world_size": 16, "facts": facts, "batch_size": 2}
    found = estimate(tree_of(GPT(SHAPE)), config.changed(**changed), **known).traffic.on_axis("context")
    (exchange,) = found.collectives
    assert exchange.payload_bytes == times * 3 * 4 * (2 * 4 + 2 * 2 * 2) * 3 * 4
    assert exchange.calls == times * 3 * 2
    assert (found.sent_bytes, found.between_bytes) == (exchange.payload_bytes * 3 // 4, 0)
    over = estimate(tree_of(GPT(SHAPE)), config.changed(**changed), **known, ranks_per_machine=2, ranks_joined=2)
    assert over.traffic.on_axis("context").between_bytes == exchange.payload_bytes // 2


def test_micro_batches_gather_each_time_and_replicas_wait():
    section = ShardkitConfig(gradient_accumulation_steps=3)
    tree = tree_of(GPT(SHAPE))
    config = configuration(4)
    once = estimate(tree, config, world_size=16).traffic.collectives
    three = estimate(tree, config.model_copy(update={"shardkit": section}), world_size=16).traffic.collectives
    assert [after.payload_bytes / before.payload_bytes for before, after in zip(once, three, strict=True)] == [3, 3, 1]


def test_hybrid_axes_are_machines():
    found = axes(configuration(5), world_size=16, ranks_per_machine=8)
    assert (found.shards, found.replicas, found.reshards_after_forward) == (8, 2, False)
