"""Model families for which the closed form's activation memory is exact, and what it omits for others.

A family is listed if the formula of `plan/activations.py` agrees with a simulated step
(`tests/test_simulation_families.py`).
"""

from collections.abc import Iterator
from typing import Any

# model_type of Transformers configurations whose blocks match the formula.
PLAIN_FAMILIES = frozenset(
    {
        *("bert", "gpt_neox", "granite", "llama", "mistral", "opt"),
        *("qwen2", "qwen3", "roberta", "smollm3", "starcoder2", "vit"),
    }
)
# Families whose code in Transformers runs every expert on every token, and multiplies by 0 what is not chosen.
RUNS_EVERY_EXPERT = frozenset({"llama4", "llama4_text"})
# Activation functions that are a single operator, which saves its input; relu saves its output, which is saved anyway.
FUSED_FUNCTIONS = frozenset({"gelu", "gelu_pytorch_tanh", "relu", "silu", "swish"})
_DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "dropout_rate", "resid_pdrop"),
    *("attn_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"),
)


def activation_gaps(config: Any) -> tuple[str, ...]:
    """Activations that the closed form does not count for a model with this configuration; empty if it counts all."""
    family = getattr(config, "model_type", None) or "this model"
    found = []
    if family not in PLAIN_FAMILIES:
        found.append(f"what blocks of {family} save in addition to those of a plain Transformer")
    dropouts = [name for name in _DROPOUTS if (getattr(config, name, 0) or 0) > 0]
    if dropouts:
        found.append(f"dropout masks and scores ({dropouts[0]})")
    function = getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)
    if isinstance(function, str) and function not in FUSED_FUNCTIONS:
        found.append(f"the parts of {function}")
    if getattr(config, "_attn_implementation", None) == "eager":
        found.append("attention scores")
    return tuple(found)


def adapter_gaps(model: Any) -> tuple[str, ...]:
    """As `activation_gaps`, for what peft adds to a model. LoRA itself saves less than the frozen layers would if they
    were trained, which the closed form counts."""
    return tuple(dict.fromkeys(gap for config in _adapters(model) for gap in _gaps_of_adapter(config)))


def _adapters(model: Any) -> list[Any]:
    found = getattr(model, "peft_config", None)
    return list(found.values()) if isinstance(found, dict) else []


def _gaps_of_adapter(config: Any) -> Iterator[str]:
    kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
    if kind != "LORA":
        yield f"what peft's {kind} saves"
    if getattr(config, "lora_dropout", 0):
        yield "dropout masks and what they are applied to (lora_dropout)"
    if getattr(config, "use_dora", False):
        yield "weights with LoRA's added to them (use_dora)"
