"""The shape of a Transformer, from a configuration that has Transformers' names."""

from typing import Any

from torch import nn

from shardkit.model.describe import TransformerFacts
from shardkit.model.families import RUNS_EVERY_EXPERT, activation_gaps, adapter_gaps

# A token of the sequence is one of these models' units of work: sound has frames, many samples each.
_INPUTS = ("input_ids", "pixel_values")


def transformer_facts(config: Any, model: nn.Module | None = None) -> TransformerFacts | None:
    """The facts in a Transformers configuration, with the names of any family; None if some are missing, or the model
    takes neither tokens nor images. Without the model, logits over the vocabulary are assumed."""
    layers = _first(config, "num_hidden_layers", "num_layers", "n_layer", "encoder_layers")
    hidden = _first(config, "hidden_size", "d_model", "n_embd")
    heads = _first(config, "num_attention_heads", "num_heads", "n_head", "encoder_attention_heads")
    if (
        layers is None
        or hidden is None
        or heads is None
        or getattr(model, "main_input_name", _INPUTS[0]) not in _INPUTS
    ):
        return None
    is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    decoder_layers = (_first(config, "num_decoder_layers", "decoder_layers") or 0) if is_encoder_decoder else 0
    attentions, windowed = _attentions(config)
    experts, active = _experts(config)
    return TransformerFacts(
        layers=layers + decoder_layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=_first(config, "num_key_value_heads") or heads,
        feed_forward=_first(config, "intermediate_size", "d_ff", "n_inner", "encoder_ffn_dim", "ffn_dim") or 4 * hidden,
        vocabulary=_first(config, "vocab_size") if _has_logits(model) else None,
        seq_len=_positions(config, model) or _patches(config),
        is_gated=bool(getattr(config, "is_gated_act", False)) or hasattr(config, "rms_norm_eps"),
        head_dim=_head_dim(config),
        keeps_function_input=getattr(config, "hidden_act", None) != "relu"
        and getattr(config, "activation_function", None) != "relu",
        normalizes_in_fp32=hasattr(config, "rms_norm_eps"),
        normalizes_heads=str(getattr(config, "model_type", "")).startswith("qwen3"),
        experts=experts,
        active_experts=active,
        window=_window(config),
        attentions=layers + 2 * decoder_layers if decoder_layers else attentions,
        windowed=windowed,
        gaps=activation_gaps(config) + adapter_gaps(model),
    )


def longest_sequence(config: Any) -> int | None:
    """The most tokens of a text, also where the text model's configuration is inside that of a larger one."""
    inner = getattr(config, "get_text_config", None)
    return _positions(inner() if callable(inner) else config, None)


def _first(config: Any, *names: str) -> int | None:
    """The value of the first of these names that is a positive whole number."""
    values = (getattr(config, name, None) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _positions(config: Any, model: nn.Module | None) -> int | None:
    """Tokens of the longest sequence. A table of positions with a padding index has rows that no token uses, as those
    of RoBERTa: positions are counted from the index on."""
    found = _first(config, "max_position_embeddings", "n_positions")
    for name, module in model.named_modules() if found and model is not None else ():
        if isinstance(module, nn.Embedding) and "position" in name and module.num_embeddings == found:
            return found - (0 if module.padding_idx is None else module.padding_idx + 1)
    return found


def _head_dim(config: Any) -> int | None:
    """Elements of one head. Where keys and values differ (multi-head latent attention), their mean, which gives the
    sizes and products of both."""
    keys, values = _first(config, "qk_head_dim"), _first(config, "v_head_dim")
    return (keys + values) // 2 if keys and values else _first(config, "head_dim")


def _window(config: Any) -> int | None:
    """Tokens that an attention with a window sees, at most. `local_attention` is that of both sides together."""
    if not getattr(config, "use_sliding_window", True):
        return None
    return _first(config, "local_attention", "sliding_window", "attention_chunk_size")


def _attentions(config: Any) -> tuple[int | None, int | None]:
    """(layers with softmax attention, those of them with a window), by the kinds of layers; None if none are given.
    Hybrid layers have attention beside a state-space model."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if not isinstance(kinds, (list, tuple)) or not all(isinstance(kind, str) for kind in kinds):
        return None, None
    attending = [k for k in kinds if k == "hybrid" or (k.endswith("attention") and not k.startswith("linear"))]
    return len(attending), sum(k.startswith(("sliding", "chunked")) for k in attending)


def _experts(config: Any) -> tuple[int, int]:
    """(experts, those that compute one token); 0 where unknown."""
    experts = _first(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") or 0
    if getattr(config, "model_type", None) in RUNS_EVERY_EXPERT:
        return experts, experts
    return experts, _first(config, "num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k") or 0


def _has_logits(model: nn.Module | None) -> bool:
    """Whether the model computes logits over its vocabulary, by Transformers' output embeddings."""
    try:
        embeddings = getattr(model, "get_output_embeddings", None)
        return embeddings is None or embeddings() is not None
    except (AttributeError, NotImplementedError):
        return False


def _patches(config: Any) -> int | None:
    """Sequence length of an image model: its patches and the class token. Of videos it is not known."""
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int) and patch > 0 and not hasattr(config, "num_frames"):
        return (image // patch) ** 2 + 1
    return None
