"""FLOPs of a token, which the estimate of a step's time is made of, against those that torch counts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shardkit.model.describe import TransformerFacts
from shardkit.model.facts import longest_sequence, transformer_facts
from shardkit.model.live import tree_of
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.plan import roofline

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
}
T5 = {
    "vocab_size": 960,
    "d_model": 64,
    "d_ff": 128,
    "num_heads": 4,
    "d_kv": 16,
    "num_layers": 2,
    "num_decoder_layers": 3,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 96, "n_embd": 64, "n_head": 4, "n_layer": 3}),
    "opt": (  # some versions of Transformers read values of its mask for SDPA, which has none on meta
        "OPTForCausalLM",
        SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64, "attn_implementation": "eager"},
    ),
    "a decoder that attends to an encoder": ("T5ForConditionalGeneration", T5),
    "tables shared by encoder and decoder, not by the head": (
        "T5ForConditionalGeneration",
        T5 | {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"},
    ),
    "latent attention": ("MiniCPM3ForCausalLM", SIZES | LATENT),
    "layers without attention": (
        "Lfm2ForCausalLM",
        SIZES | {"num_key_value_heads": 4, "layer_types": ["conv", "full_attention", "conv"]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_is_what_torch_counts(family):
    """Sequences as long as the model is wide, so that attention weighs."""
    import transformers

    name, settings = FAMILIES[family]
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"this version of Transformers has no {name}")
    with torch.device("meta"):
        model = kind(kind.config_class(**settings)).eval()
        tokens = torch.zeros(1, 64, dtype=torch.long)
        inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if "T5" in name else {})
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**inputs)
    tree, facts = tree_of(model), transformer_facts(model.config, model)
    assert roofline.why_unknown(tree, facts) is None
    # Vectors, such as those of norms, are counted as matrices of one column.
    assert roofline.work_per_token(tree, facts, 64).forward * 64 == pytest.approx(counter.get_total_flops(), rel=0.02)


def config(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(num_hidden_layers=8, hidden_size=64, num_attention_heads=4, **fields)


def tokens_seen(seq_len: int, **fields: Any) -> float:
    """Tokens that each token attends to, by the FLOPs of a model that has nothing but attention."""
    facts = transformer_facts(config(**fields))
    assert facts is not None
    return roofline.work_per_token(ModuleNode("", "Model"), facts, seq_len).forward / (4 * 64)


@pytest.mark.parametrize(
    ("fields", "seen"),
    [
        ({}, 8 * 1000),
        ({"sliding_window": 100}, 8 * 100),
        ({"sliding_window": 100, "use_sliding_window": False}, 8 * 1000),
        ({"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"] * 4}, 4 * 100 + 4 * 1000),
        ({"attention_chunk_size": 200, "layer_types": ["chunked_attention"] * 6 + ["full_attention"] * 2}, 3200),
        ({"layer_types": ["linear_attention"] * 6 + ["full_attention", "hybrid"]}, 2 * 1000),
        ({"layers_block_type": ["mamba"] * 7 + ["attention"]}, 1000),
        ({"is_encoder_decoder": True, "decoder_layers": 5}, (8 + 2 * 5) * 1000),
    ],
)
def test_each_kind_of_layer_sees_its_tokens(fields, seen):
    assert tokens_seen(1000, **fields) == seen


def test_keys_and_values_of_different_sizes():
    facts = transformer_facts(config(qk_head_dim=192, v_head_dim=128, head_dim=64))
    assert facts is not None
    assert facts.head_dim == 160


def test_sound_and_video_have_no_tokens_that_a_configuration_tells():
    sound = nn.Linear(2, 2)
    sound.main_input_name = "input_values"
    assert transformer_facts(config(), sound) is None
    assert transformer_facts(config(image_size=224, patch_size=16)).seq_len == 197
    assert transformer_facts(config(image_size=224, patch_size=16, num_frames=16)).seq_len is None


def test_positions_are_counted_from_the_padding_index_on():
    model = nn.ModuleDict({"position_embeddings": nn.Embedding(514, 8, padding_idx=1)})
    assert transformer_facts(config(max_position_embeddings=514), model).seq_len == 512
    assert transformer_facts(config(max_position_embeddings=514)).seq_len == 514


def test_the_longest_text_of_a_model_of_texts_and_images():
    text = SimpleNamespace(max_position_embeddings=4096)
    assert longest_sequence(SimpleNamespace(get_text_config=lambda: text)) == 4096
    assert longest_sequence(text) == 4096
    assert longest_sequence(SimpleNamespace()) is None


def linear(fqn: str, alias_of: str | None = None) -> ModuleNode:
    tied = None if alias_of is None else f"{alias_of}.weight"
    return ModuleNode(fqn, "Linear", (Parameter("weight", (8, 8), tied_to=tied),), alias_of=alias_of)


def block(fqn: str, alias_of: str | None = None, inner: str = "up") -> ModuleNode:
    child = linear(f"{fqn}.{inner}", f"{alias_of}.{inner}" if alias_of else None)
    return ModuleNode(fqn, "Block", children=(child,), alias_of=alias_of)


def stack(*blocks: ModuleNode) -> ModuleNode:
    return ModuleNode("", "Model", children=(ModuleNode("layers", "ModuleList", children=blocks, is_container=True),))


FACTS = TransformerFacts(layers=2, hidden=8, heads=1, key_value_heads=1, feed_forward=8)


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        (stack(block("layers.0"), block("layers.1")), None),
        (stack(block("layers.0")), "how often a module that layers share is used"),
        (stack(block("layers.0"), block("layers.1", "layers.0")), "how often a module that layers share is used"),
        (stack(block("layers.0", inner="experts"), block("layers.1")), "how many experts compute a token"),
    ],
)
def test_what_the_parameters_do_not_tell_is_not_guessed(tree, reason):
    assert roofline.why_unknown(tree, FACTS) == reason


def test_modules_that_share_a_parameter_each_multiply_with_it():
    shared = ModuleNode("two", "Linear", (Parameter("weight", (8, 8), tied_to="one.weight"),))
    tree = ModuleNode("", "Model", children=(linear("one"), shared))
    assert roofline.work_per_token(tree, FACTS, 1).forward == 2 * 2 * 64 + 4 * 2 * 8


@pytest.mark.requirement("U6")
def test_what_is_unlike_the_published_runs_is_said():
    tree = stack(*(ModuleNode(f"layers.{i}", "Block", (Parameter("w", (20_000, 20_000)),)) for i in range(2)))
    assert roofline.unlike_published(tree, FACTS, 2, 2048, 8) is None
    for changed, text in (
        ((tree, FACTS, 1, 2048, 8), "2,048 tokens a micro-batch"),
        ((tree, FACTS, 1, 131_072, 8), "sequences of 131,072 tokens"),
        ((tree, FACTS, 2, 2048, 1024), "1,024 ranks"),
        ((stack(block("layers.0")), FACTS, 2, 2048, 8), "64 parameters"),
    ):
        assert f"Steps may take longer than estimated ({text}): published" in (
            roofline.unlike_published(*changed) or ""
        )
