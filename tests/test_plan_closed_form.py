"""Memory in closed form, against numbers worked out by hand."""

from dataclasses import asdict, replace
from math import ceil

import pytest
import torch
from torch import nn

from shardkit.config.meaning import with_strategy
from shardkit.config.schema import (
    Config,
    DdpConfig,
    FsdpConfig,
    MeshConfig,
    PrecisionConfig,
    ShardingStrategy,
    ShardkitConfig,
)
from shardkit.errors import ConfigError, ModelError, UsageError
from shardkit.model.describe import TransformerFacts
from shardkit.model.live import tree_of
from shardkit.model.sources import describe
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.plan import activations
from shardkit.plan.averages import Ema
from shardkit.plan.closed_form import Estimate, estimate
from shardkit.plan.optimizers import state_bytes
from shardkit.plan.rank_memory import Memory

GIB = 2**30


def linear(fqn: str, inputs: int, outputs: int, trainable: bool = True, dtype: str = "float32") -> ModuleNode:
    return ModuleNode(fqn, "Linear", (Parameter("weight", (outputs, inputs), dtype, trainable),))


def model(layers: int = 3, rows: int = 64, trainable: bool = True, head: ModuleNode | None = None) -> ModuleNode:
    """An embedding and a head of rows x 8 each, around blocks of 512 parameters each."""
    blocks = tuple(
        ModuleNode(
            f"layers.{i}",
            "Block",
            children=(
                linear(f"layers.{i}.up", 8, 32, trainable),
                linear(f"layers.{i}.down", 32, 8, trainable),
            ),
        )
        for i in range(layers)
    )
    stack = ModuleNode("layers", "ModuleList", children=blocks, is_container=True)
    return ModuleNode("", "Model", children=(linear("embed", 8, rows), stack, head or linear("head", 8, rows)))


def configuration(strategy: int = 1, precision: str = "bf16", **fsdp: object) -> Config:
    return Config(mixed_precision=precision, fsdp=FsdpConfig(sharding_strategy=strategy, **fsdp))


def planned(tree: ModuleNode, config: Config, world_size: int = 4, **known: object) -> Estimate:
    return estimate(tree, config, world_size=world_size, **known)


# 5 x 512 = 2,560 parameters on 4 ranks: 2,560 bytes of fp32 shards, twice that for AdamW.
SHARDS = {"parameters": 2560, "optimizer_state": 5120}
ROOT, BLOCK = 2 * 1024, 2 * 512  # gathered in bf16


@pytest.mark.requirement("A1")
def test_full_shard_by_hand():
    """At the middle block: its parameters and the next ones gathered; the head's and its own gradients in bf16, the
    last block's in the fp32 input of its reduce-scatter, and its reduced shard."""
    found = planned(model(), configuration(1)).memory
    expected = Memory(**SHARDS, gradients=512, gathered=ROOT + 2 * BLOCK, reduction=1024 + 1024 + 2048)
    assert (found.moment, found.peak) == ("backward of layers.1", expected)
    assert found.peak.total == 16384
    assert not found.activations_known


def test_every_moment_of_full_shard_by_hand():
    totals = [(m.phase, m.unit, m.memory.total) for m in planned(model(), configuration(1)).memory.timeline]
    persistent = 2560 + 5120
    # Parameters, the output of the all-gather, and that of the one before, which for the first block is the root's.
    first, forward = persistent + 2 * ROOT + 2 * BLOCK, persistent + ROOT + 3 * BLOCK
    assert totals == [
        ("forward", "layers.0", first),
        ("forward", "layers.1", forward),
        ("forward", "layers.2", forward),
        ("forward", "the root", persistent + ROOT + BLOCK),
        ("loss", "", persistent + ROOT),
        ("backward", "layers.2", persistent + ROOT + 2 * BLOCK + 1024 + 1024),
        ("backward", "layers.1", 16384),
        ("backward", "layers.0", persistent + 1024 + ROOT + BLOCK + 1024 + 1024 + 2048),
        ("backward", "the root", persistent + 1536 + ROOT + 2048 + 2048),
        ("reduction", "the root", persistent + 2560 + 2048 + 4096),
        ("optimizer", "", persistent + 2560),
    ]


@pytest.mark.parametrize("prefetch", ["BACKWARD_POST", "NO_PREFETCH"])
def test_without_prefetch_one_unit_less_is_gathered(prefetch):
    ahead = planned(model(), configuration(1)).memory.timeline[6].memory
    late = planned(model(), configuration(1, backward_prefetch=prefetch)).memory.timeline[6].memory
    assert ahead.gathered - late.gathered == BLOCK


def test_shard_grad_op_keeps_everything_gathered():
    found = planned(model(), configuration(2)).memory
    assert max(m.memory.gathered for m in found.timeline) >= 2 * 2560
    assert found.timeline[6].memory.gathered == ROOT + 2 * BLOCK  # blocks 0 and 1; the last is done with
    assert found.peak.parameters == 2560


def test_no_shard_is_whole_on_every_rank():
    found = planned(model(), configuration(3, "no")).memory
    assert found.peak == Memory(parameters=4 * 2560, gradients=4 * 2560, optimizer_state=8 * 2560)
    assert planned(model(), configuration(3)).memory.peak.gathered == 2 * 2560  # autocast's copies


def test_autocast_copies_fp32_matrices_that_a_gradient_passes():
    """Not tables, vectors, frozen weights in bf16 (LoRA), nor frozen layers below the first trained one."""
    table = replace(linear("embed", 8, 64, trainable=False), is_lookup=True)
    bottom, top = linear("bottom", 8, 16, trainable=False), linear("top", 16, 8, trainable=False)
    half, scale = linear("half", 8, 8, False, "bfloat16"), ModuleNode("scale", "Scale", (Parameter("weight", (8,)),))
    tree = ModuleNode("", "Model", children=(table, bottom, linear("first", 8, 4), top, half, scale))
    for config in (configuration(3), Config(distributed_type="NO", mixed_precision="bf16")):
        found = planned(tree, config, world_size=1 if config.mode == "single" else 4).memory
        assert found.timeline[0].memory.gathered == 2 * (8 * 4 + 16 * 8)


def test_hybrid_shards_inside_machines():
    found = planned(model(), configuration(4), world_size=4, ranks_per_machine=2)
    assert (found.axes.shards, found.axes.replicas) == (2, 2)
    assert found.memory.peak.parameters == 2 * 2560


def test_a_given_mesh_decides_the_hybrid_axes():
    config = configuration(4).model_copy(update={"shardkit": ShardkitConfig(mesh=MeshConfig(replicate_size=4))})
    assert planned(model(), config, world_size=16).axes.shards == 4
    with pytest.raises(ConfigError, match=r"does not divide the number of ranks \(got 4 of 6\)"):
        planned(model(), config, world_size=6)
    with pytest.raises(ConfigError, match=r"unset, so that the 8 ranks of a machine .* \(got 12\); set shard_size"):
        planned(model(), configuration(4), world_size=12)


def test_one_rank_gathers_nothing():
    found = planned(model(), configuration(1, "no"), world_size=1)
    assert found.traffic.collectives == ()
    assert found.memory.peak.parameters == 4 * 2560


def test_the_process_alone():
    config = Config(distributed_type="NO", mixed_precision="no")
    found = planned(model(), config, world_size=1)
    assert found.memory.peak == Memory(parameters=4 * 2560, gradients=4 * 2560, optimizer_state=8 * 2560)


@pytest.mark.requirement("B1")
def test_the_notes_order():
    """FSDP with auto-wrap < FSDP < DDP."""
    peaks = [
        planned(model(layers=12), config).memory.peak.total
        for config in (
            configuration(1, "no"),
            configuration(1, "no", auto_wrap_policy="NO_WRAP"),
            configuration(3, "no"),
        )
    ]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == 3


@pytest.mark.requirement("A2")
def test_offload_moves_the_shards_to_the_host():
    found = planned(model(), configuration(1, offload_params=True)).memory
    assert (found.peak.parameters, found.peak.gradients, found.peak.optimizer_state) == (0, 0, 0)
    assert found.host == Memory(parameters=2560, gradients=2560, optimizer_state=5120)
    assert found.peak.gathered > 0


@pytest.mark.parametrize("trainable", [True, False])
def test_what_is_not_sharded_is_not_offloaded(trainable):
    """The ignored head of 512 parameters and a buffer stay on the device, with gradients and optimizer state."""
    tree = replace(model(head=linear("head", 8, 64, trainable)), buffers=(Parameter("table", (100,)),))
    fsdp = {"offload_params": True, "ignored_modules": "head"}
    found = planned(tree, configuration(1, **fsdp), ema=Ema.MODEL).memory
    sharded, last = 2048, found.timeline[-1].memory  # 2,048 parameters, each rank a quarter of their 4 bytes
    assert found.host == Memory(parameters=2 * sharded, gradients=sharded, optimizer_state=2 * sharded)
    whole = 4 * 512
    assert last.parameters == found.peak.parameters == 2 * (whole + 4 * 100)
    assert (last.gradients, last.optimizer_state) == ((whole, 2 * whole) if trainable else (0, 0))


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_rows_and_columns_are_not_offloaded(optimizer):
    """Nor is what a step on whole tensors makes; state that is sharded as the parameters are is on the host."""
    usual, offloaded = (
        planned(model(), configuration(1, offload_params=offload), optimizer=optimizer) for offload in (False, True)
    )
    host = offloaded.memory.host.optimizer_state
    for before, after in zip(usual.memory.timeline, offloaded.memory.timeline, strict=True):
        assert before.memory.optimizer_state == after.memory.optimizer_state + host
        assert after.memory.parameters == 0
    between = usual.memory.timeline[0].memory.optimizer_state
    assert host == (between if optimizer == "muon" else 0) and between > 0  # the model has matrices only


@pytest.mark.parametrize(("optimizer", "times"), [("sgd", 0), ("momentum", 1), ("adam", 2), ("adamw", 2), ("AdamW", 2)])
def test_optimizer_state(optimizer, times):
    assert planned(model(), configuration(1), optimizer=optimizer).memory.peak.optimizer_state == times * 2560


def test_adafactor_keeps_rows_and_columns():
    assert state_bytes("adafactor", (3, 5, 7), 4) == 3 * (5 + 7) * 4
    assert state_bytes("adafactor", (9,), 2) == 9 * 2


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("adamw8bit", (64, 128), 2 * (8192 + 8192 // 256 * 4 + 256 * 4)),
        ("adam4bit", (64, 128), 2 * (8192 // 2 + 8192 // 128 * 4 + 16 * 4)),
        ("AdamWFp8", (64, 128), 2 * (8192 + 8192 // 256 * 4)),
        ("adamw8bit", (63, 65), 2 * 63 * 65 * 4),  # fewer than 4,096: as large as the parameter
        ("adamw8bit", (65, 65), 2 * 65 * 65 * 4),  # no whole number of blocks
    ],
)
def test_moments_in_few_bits_by_hand(name, shape, expected):
    assert state_bytes(name, shape, 4) == expected


@pytest.mark.parametrize(
    ("ema", "frozen_dtype", "expected"),
    [
        (Ema.TRAINED, "float32", 2560 // 4 * 4),
        (Ema.MODEL, "float32", 2560 // 4 * 4 + 512 // 4 * 4),
        (Ema.MODEL, "bfloat16", 2560 // 4 * 4 + 512 // 4 * 2),
        (Ema.NO, "float32", 0),
    ],
)
def test_averages_are_sharded_as_the_parameters_are(ema, frozen_dtype, expected):
    """2,560 trained parameters and 512 frozen ones on 4 ranks; all along the step, under offload on the host."""
    tree = model(head=linear("head", 8, 64))
    tree = replace(tree, children=(*tree.children, linear("frozen", 8, 64, False, frozen_dtype)))
    plain, averaged = (planned(tree, configuration(1), ema=each).memory for each in (Ema.NO, ema))
    assert averaged.peak.parameters - plain.peak.parameters == expected
    offloaded = planned(tree, configuration(1, offload_params=True), ema=ema).memory
    assert offloaded.host.parameters == averaged.peak.parameters


def test_averages_of_16_bit_parameters_are_in_fp32():
    tree = ModuleNode("", "Model", children=(linear("one", 8, 64, dtype="bfloat16"),))
    found = planned(tree, configuration(1, "no"), ema=Ema.TRAINED).memory.peak.parameters
    assert found == 512 // 4 * (2 + 4)


def test_packed_weights_and_integer_buffers_by_hand():
    """uint8 is gathered as it is, whatever mixed precision computes in; a buffer of int64 takes 8 bytes."""
    packed = linear("packed", 8, 64, False, "uint8")
    buffers = (Parameter("positions", (1000,), "int64"), Parameter("rotations", (10,), "complex64"))
    tree = ModuleNode("", "Model", children=(packed, linear("lora", 8, 4)), buffers=buffers)
    found = planned(tree, configuration(1)).memory
    assert found.peak.parameters == 512 // 4 + 32 // 4 * 4 + 8000 + 80
    assert found.timeline[0].memory.gathered == (512 + 32 * 2) * 2  # and the all-gather's output


def test_a_buffer_that_modules_share_is_counted_once():
    first, second = (Parameter("mask", (100,)), Parameter("mask", (100,), tied_to="a.mask"))
    children = (ModuleNode("a", "A", buffers=(first,)), ModuleNode("b", "A", buffers=(second,)))
    tree = ModuleNode("", "Model", (Parameter("weight", (4, 4)),), children)
    assert planned(tree, configuration(1)).memory.peak.parameters == 4 * 4 + 4 * 100


def test_power_sgd_keeps_its_errors_and_hooks_send_16_bits():
    def under(hook: str) -> Estimate:
        section = ShardkitConfig(ddp=DdpConfig(comm_hook=hook))
        return planned(model(), configuration(3, "no").model_copy(update={"shardkit": section}))

    plain = under("no")
    assert under("power_sgd").memory.peak.total - plain.memory.peak.total == 4 * 2560
    assert under("bf16").traffic.payload_bytes == plain.traffic.payload_bytes // 2


def test_buffers_are_broadcast_where_ddp_does():
    tree = replace(model(), buffers=(Parameter("counts", (100,)),))
    section = ShardkitConfig(ddp=DdpConfig(broadcast_buffers=False))
    config = configuration(3, "no")
    kinds = [c.kind for c in planned(tree, config).traffic.collectives]
    without = planned(tree, config.model_copy(update={"shardkit": section})).traffic.collectives
    assert (kinds, [c.kind for c in without]) == (["all_reduce", "broadcast"], ["all_reduce"])


def test_an_unknown_optimizer_is_refused_with_a_suggestion():
    with pytest.raises(UsageError, match=r"unknown \(got 'adamx'\); did you mean adam"):
        planned(model(), configuration(1), optimizer="adamx")


@pytest.mark.requirement("N4")
def test_frozen_parameters_have_no_gradients_and_no_state():
    found = planned(model(trainable=False), configuration(1)).memory
    assert found.peak.parameters == 2560
    assert found.timeline[-1].memory.gradients == 1024
    assert found.timeline[-1].memory.optimizer_state == 2048


def test_shards_are_padded_to_whole_rows():
    found = planned(model(rows=101), configuration(1, "no")).memory
    rows = ceil(101 / 4)
    assert found.peak.parameters == 4 * (3 * 128 + 2 * rows * 8)


@pytest.mark.requirement("N2")
@pytest.mark.parametrize(("reduce_dtype", "bytes_each"), [(None, 4), ("bf16", 2)])
def test_gradients_are_reduced_in_their_own_dtype(reduce_dtype, bytes_each):
    section = ShardkitConfig(precision=PrecisionConfig(reduce_dtype=reduce_dtype))
    config = configuration(1).model_copy(update={"shardkit": section})
    found = planned(model(), config)
    assert found.memory.timeline[6].memory.reduction == 1024 + 1024 + 512 * bytes_each
    reduce_scatter = next(c for c in found.traffic.collectives if c.kind == "reduce_scatter")
    assert reduce_scatter.payload_bytes == 2560 * bytes_each


def test_a_tied_parameter_is_counted_once_and_lives_in_the_root():
    head = ModuleNode("head", "Linear", (Parameter("weight", (64, 8), tied_to="embed.weight"),))
    found = planned(model(head=head), configuration(1)).memory
    assert found.peak.parameters == 4 * 2048 // 4
    assert found.timeline[5].memory.reduction == 2 * 512 + 2 * 512  # the head's gradient is there first


def test_a_unit_that_shares_a_parameter_with_another_goes_up():
    """As the runtime: what two units share belongs to the root, and the smaller unit dissolves."""
    tree = model(layers=2)
    shared = linear("layers.1.up", 8, 32)
    shared = ModuleNode(shared.fqn, "Linear", (Parameter("weight", (32, 8), tied_to="layers.0.up.weight"),))
    stack = tree.children[1]
    second = ModuleNode("layers.1", "Block", children=(shared, stack.children[1].children[1]))
    blocks = ModuleNode("layers", "ModuleList", children=(stack.children[0], second), is_container=True)
    tied = ModuleNode("", "Model", children=(tree.children[0], blocks, tree.children[2]))
    assert planned(tied, configuration(1)).units == 2


def test_16_bit_parameters_are_kept_in_fp32_under_mixed_precision():
    tree = ModuleNode("", "Model", children=(linear("a", 8, 8, dtype="bfloat16"),))
    config = configuration(1, auto_wrap_policy="NO_WRAP")
    assert planned(tree, config, world_size=1).memory.peak.parameters == 4 * 64
    plain = configuration(1, "no", auto_wrap_policy="NO_WRAP")
    assert planned(tree, plain, world_size=1).memory.peak.parameters == 2 * 64


@pytest.mark.requirement("B4")
def test_batch_norm_is_a_unit_of_its_own_in_fp32():
    norm = ModuleNode("norm", "BatchNorm2d", (Parameter("weight", (8,)), Parameter("bias", (8,))), has_statistics=True)
    tree = ModuleNode("", "Model", children=(linear("a", 8, 8), norm))
    mixed = planned(tree, configuration(1, auto_wrap_policy="NO_WRAP"))
    assert mixed.units == 2
    gathered = next(c for c in mixed.traffic.collectives if c.kind == "all_gather")
    assert gathered.payload_bytes == 2 * 64 + 2 * 4 * 16  # bf16 once (the root), fp32 twice
    assert planned(tree, configuration(1, "no", auto_wrap_policy="NO_WRAP")).units == 1


def test_ignored_modules_stay_whole():
    found = planned(model(), configuration(1, "no", ignored_modules="embed"))
    assert found.memory.peak.parameters == 4 * (512 + 2048 // 4)
    assert [c.payload_bytes for c in found.traffic.collectives if c.axis == "world"] == [4 * 512]


def test_accumulation_keeps_gradients_through_the_whole_step():
    section = ShardkitConfig(gradient_accumulation_steps=2)
    config = configuration(1).model_copy(update={"shardkit": section})
    assert {m.memory.gradients for m in planned(model(), config).memory.timeline} == {2560}


def test_a_class_that_is_not_there_is_an_error():
    with pytest.raises(ModelError, match="no module of class Blok"):
        planned(model(), configuration(1, transformer_layer_cls_to_wrap="Blok"))


FACTS = TransformerFacts(layers=3, hidden=8, heads=2, key_value_heads=1, feed_forward=32, vocabulary=64, seq_len=16)


def test_activations_by_hand():
    """8 tokens; 6 x 8 + 2 x 4 + 2 x 32 elements of 2 bytes, and 2 heads x 4 bytes, for each token and block."""
    found = activations.of_transformer(FACTS, batch_size=2, seq_len=4, itemsize=2)
    assert found.block_bytes == 8 * (120 * 2 + 8)
    assert found.block_input_bytes == 8 * 8 * 2
    assert (found.logits_bytes, found.output_bytes) == (8 * 64 * 16, 8 * 64 * 4)
    gated = TransformerFacts(**{**asdict(FACTS), "is_gated": True})
    assert activations.block_numel(gated) - activations.block_numel(FACTS) == 2 * 32


@pytest.mark.parametrize(("ranks", "repeated"), [(1, 0), (2, 1)])
def test_activations_of_shared_sequences_by_hand(ranks, repeated):
    """8 tokens over the ranks; attention's output is there twice, 2 heads x 4 elements, and one key and one value head
    once for each rank."""
    found = activations.of_transformer(FACTS, 2, 4, itemsize=2, shared_by=ranks)
    tokens, output = 8 // ranks, 8 if ranks > 1 else 0
    assert found.tokens == tokens
    assert found.block_bytes == tokens * (120 * 2 + 8 + 2 * (output + 2 * 4 * repeated))
    assert found.block_input_bytes == tokens * 8 * 2
    assert (found.logits_bytes, found.output_bytes) == (tokens * 64 * 16, tokens * 64 * 4)


def test_activation_checkpointing_keeps_inputs_and_one_block():
    known = {"facts": FACTS, "batch_size": 2, "seq_len": 4}
    block, output, inputs = 8 * (120 * 2 + 8), 8 * 64 * 4, 8 * 8 * 2
    whole = planned(model(), configuration(1), **known).memory
    assert whole.activations_known
    assert whole.timeline[5].memory.activations == 3 * block + output
    less = planned(model(), configuration(1, activation_checkpointing=True), **known).memory
    assert less.timeline[5].memory.activations == 3 * inputs + block + output
    without = planned(model(), configuration(1, auto_wrap_policy="NO_WRAP"), **known).memory
    assert max(m.memory.activations for m in without.timeline) >= 3 * block


@pytest.mark.requirement("B5")
@pytest.mark.parametrize(
    ("name", "world_size", "gib"),
    # Peaks of a simulated step of the same models on fake tensors, AdamW, one sequence of 2,048, everything recomputed.
    [("gpt-175b", 128, 41.0), ("gpt-1t", 512, 115.65)],
)
def test_the_notes_models_agree_with_a_simulation(name, world_size, gib):
    found = describe(name)
    config = configuration(1, activation_checkpointing=True)
    memory = planned(found.tree, config, world_size, facts=found.facts, batch_size=1).memory
    assert memory.peak.total / GIB == pytest.approx(gib, rel=0.03)


@pytest.mark.requirement("B5")
def test_the_notes_setting():
    """fp16 and SGD: no optimizer state, the rest as under bf16."""
    found = describe("gpt-175b")
    config = configuration(1, "fp16", activation_checkpointing=True)
    peak = planned(found.tree, config, 128, optimizer="sgd", facts=found.facts, batch_size=1).memory.peak
    assert peak.optimizer_state == 0
    assert peak.parameters / GIB == pytest.approx(4 * found.numel / 128 / GIB, rel=1e-3)


@pytest.mark.requirement("B3")
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "vit"])
def test_real_models_under_all_five_strategies(family):
    import transformers

    from shardkit.model.facts import transformer_facts
    from shardkit.model.live import tree_of

    config, auto = {
        "gpt2": (transformers.GPT2Config(), transformers.AutoModelForCausalLM),
        "llama": (transformers.LlamaConfig(), transformers.AutoModelForCausalLM),
        "t5": (transformers.T5Config(), transformers.AutoModelForSeq2SeqLM),
        "vit": (transformers.ViTConfig(), transformers.AutoModelForImageClassification),
    }[family]
    with torch.device("meta"):
        tree = tree_of(auto.from_config(config, dtype=torch.float32))
    known = {
        "world_size": 16,
        "ranks_per_machine": 8,
        "facts": transformer_facts(config),
        "batch_size": 1,
        "seq_len": 128,
    }
    found = {one: estimate(tree, with_strategy(configuration(1), one), **known) for one in ShardingStrategy}
    peaks = {strategy: f.memory.peak.total for strategy, f in found.items()}
    assert min(peaks, key=lambda s: peaks[s]) is ShardingStrategy.FULL_SHARD
    assert max(peaks, key=lambda s: peaks[s]) is ShardingStrategy.NO_SHARD
    full = found[ShardingStrategy.FULL_SHARD]
    layers = transformer_facts(config).layers
    assert full.units == layers + 1
    assert full.memory.peak.parameters == pytest.approx(4 * tree.numel / 16, rel=0.05)  # padding


class Blocks(nn.Module):
    """Three blocks under their list's name, or under others too; or one block three times."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3)]
        if kind == "the first before":
            self.first = blocks[0]
        self.layers = nn.ModuleList(blocks[:1] * 3 if kind == "one" else blocks)
        if kind == "the list again":
            self.handle = self.layers


@pytest.mark.parametrize("kind", ["plain", "the first before", "the list again"])
def test_a_block_under_two_names_saves_its_activations_once(kind):
    facts = TransformerFacts(3, 8, 2, 2, 16, seq_len=4)
    known = {"facts": facts, "batch_size": 2}
    found, plain = (planned(tree_of(Blocks(each)), configuration(1), **known) for each in (kind, "plain"))
    assert (found.memory.peak, found.units) == (plain.memory.peak, plain.units)
    assert found.memory.activations_known


def test_activations_of_a_block_that_layers_share_are_not_known():
    facts = TransformerFacts(3, 8, 2, 2, 16, seq_len=4)
    found = planned(tree_of(Blocks("one")), configuration(1), facts=facts, batch_size=2).memory
    assert found.gaps == ("what the blocks save: none repeats in the model, or layers share one",)
    assert not found.activations_known
