"""Which models the closed form's activations are right for, and what they leave out of the others, in words.

A family is known where the formula of `plan/activations.py` agrees with a simulated step
(`tests/test_simulation_families.py`).
"""

from typing import Any

# model_type of Transformers configurations whose blocks are the formula's.
PLAIN_FAMILIES = frozenset(
    {
        *("bert", "gpt_neox", "granite", "llama", "mistral", "opt"),
        *("qwen2", "qwen3", "roberta", "smollm3", "starcoder2", "vit"),
    }
)
# Activation functions that are one operator, which keeps its input; relu keeps its output, which is kept anyway.
FUSED_FUNCTIONS = frozenset({"gelu", "gelu_pytorch_tanh", "relu", "silu", "swish"})
_DROPOUTS = (
    *("attention_dropout", "hidden_dropout", "dropout", "activation_dropout", "dropout_rate", "resid_pdrop"),
    *("attn_pdrop", "embd_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"),
)


def activation_gaps(config: Any) -> tuple[str, ...]:
    """What the closed form does not count of a model with this configuration; empty where it counts everything."""
    family = getattr(config, "model_type", None) or "this model"
    found = []
    if family not in PLAIN_FAMILIES:
        found.append(f"what blocks of {family} keep beside those of a plain Transformer")
    dropouts = [name for name in _DROPOUTS if (getattr(config, name, 0) or 0) > 0]
    if dropouts:
        found.append(f"dropout masks and scores ({dropouts[0]})")
    function = getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)
    if isinstance(function, str) and function not in FUSED_FUNCTIONS:
        found.append(f"the parts of {function}")
    if getattr(config, "_attn_implementation", None) == "eager":
        found.append("attention scores")
    return tuple(found)
