"""Builds a model on the meta device and describes it.

Run in a child process by `sources.py`, because it loads torch and the user's own code.
"""

import json
import sys
import traceback
from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardkit.model.describe import ModelDescription, TransformerFacts, to_json
from shardkit.model.families import activation_gaps
from shardkit.model.live import tree_of


def main() -> None:
    """`python -m shardkit.model.probe KIND SPEC RESULT`: writes the description, or the error, to RESULT."""
    kind, spec, result = sys.argv[1:4]
    try:
        describe = {"factory": describe_factory, "transformers": describe_transformers}[kind]
        answer: dict[str, Any] = {"description": to_json(describe(spec))}
    except (Exception, SystemExit) as error:
        answer = {"error": error_text(error), "where": where(error)}
    Path(result).write_text(json.dumps(answer))


def describe_factory(spec: str) -> ModelDescription:
    """The model that `module:function` returns, built on the meta device."""
    with torch.device("meta"):
        model = build_factory(spec)
    config = getattr(model, "config", None)
    facts = transformer_facts(config, model) if config is not None and not isinstance(config, Mapping) else None
    return ModelDescription(spec, type(model).__name__, tree_of(model), facts)


def imported(spec: str) -> Any:
    """The object that `module:name` names; the current folder's modules count."""
    module, _, name = spec.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    return attrgetter(name)(import_module(module))


def build_factory(spec: str) -> nn.Module:
    """The model of `module:name`: a function or class is called without arguments; a module is returned."""
    found = imported(spec)
    model = found if isinstance(found, nn.Module) else found()
    if isinstance(model, (tuple, list)) and model:
        model = model[0]
    if not isinstance(model, nn.Module):
        raise TypeError(f"{spec} returns an object of type {type(model).__name__}, not a torch.nn.Module")
    return model


def describe_transformers(path: str) -> ModelDescription:
    """The model of a Transformers config.json, with new weights on the meta device."""
    with torch.device("meta"):
        model = build_transformers(path)
    notes = ["Parameters count as fp32, as in training with mixed precision, regardless of the saved weights' dtype."]
    if getattr(model.config, "quantization_config", None):
        notes.append(
            "quantization_config is not applied: the plan is for training all weights in full. For frozen quantized "
            "weights give --model module:function, a function that builds the quantized model."
        )
    return ModelDescription(
        path, type(model).__name__, tree_of(model), transformer_facts(model.config, model), notes=tuple(notes)
    )


def build_transformers(path: str) -> nn.Module:
    """The architecture in the file; if it has none, the first Auto class that supports its model type."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)._from_config(config, dtype=torch.float32)
    for task in ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification"):
        auto = getattr(transformers, f"AutoModelFor{task}")
        if type(config) in auto._model_mapping:
            return auto.from_config(config, dtype=torch.float32)
    return transformers.AutoModel.from_config(config, dtype=torch.float32)


def transformer_facts(config: Any, model: nn.Module | None = None) -> TransformerFacts | None:
    """The facts in a Transformers configuration, with the names of any family; None if some are missing. Without the
    model, logits over the vocabulary are assumed."""

    def first(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    layers = first("num_hidden_layers", "num_layers", "n_layer", "encoder_layers")
    hidden = first("hidden_size", "d_model", "n_embd")
    heads = first("num_attention_heads", "num_heads", "n_head", "encoder_attention_heads")
    if layers is None or hidden is None or heads is None:
        return None
    decoder_layers = first("num_decoder_layers", "decoder_layers") if _is_encoder_decoder(config) else None
    return TransformerFacts(
        layers=layers + (decoder_layers or 0),
        hidden=hidden,
        heads=heads,
        key_value_heads=first("num_key_value_heads") or heads,
        feed_forward=first("intermediate_size", "d_ff", "n_inner", "encoder_ffn_dim", "ffn_dim") or 4 * hidden,
        vocabulary=first("vocab_size") if _has_logits(model) else None,
        seq_len=first("max_position_embeddings", "n_positions") or _patches(config),
        is_gated=bool(getattr(config, "is_gated_act", False)) or hasattr(config, "rms_norm_eps"),
        head_dim=first("head_dim"),
        keeps_function_input=getattr(config, "hidden_act", None) != "relu"
        and getattr(config, "activation_function", None) != "relu",
        normalizes_in_fp32=hasattr(config, "rms_norm_eps"),
        normalizes_heads=str(getattr(config, "model_type", "")).startswith("qwen3"),
        experts=first("num_local_experts", "num_experts", "n_routed_experts") or 0,
        active_experts=first("num_experts_per_tok", "moe_topk", "num_experts_per_token") or 0,
        window=first("sliding_window") if getattr(config, "use_sliding_window", True) else None,
        gaps=activation_gaps(config),
    )


def _has_logits(model: nn.Module | None) -> bool:
    """Whether the model computes logits over its vocabulary, by Transformers' output embeddings."""
    try:
        embeddings = getattr(model, "get_output_embeddings", None)
        return embeddings is None or embeddings() is not None
    except (AttributeError, NotImplementedError):
        return False


def _is_encoder_decoder(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def _patches(config: Any) -> int | None:
    """Sequence length of an image model: its patches and the class token."""
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if isinstance(image, int) and isinstance(patch, int) and patch > 0:
        return (image // patch) ** 2 + 1
    return None


def error_text(error: BaseException) -> str:
    """`TypeError: message`, one line only; two where the first announces the second by a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[: 2 if lines[0].endswith(':') else 1])}"


def where(error: BaseException) -> str | None:
    """file:line of the innermost frame in the user's code; None if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    package, libraries = Path(__file__).parent.parent, Path(torch.__file__).parent.parent
    not_theirs = (str(package), str(libraries), str(Path(json.__file__).parent.parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(not_theirs)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


if __name__ == "__main__":
    main()
