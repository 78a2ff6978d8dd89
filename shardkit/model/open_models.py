"""Open models by name, such as llama-3.1-8b: their sizes, for Transformers to build the module from. Nothing is
downloaded. The sizes are those of the `config.json` that each model was published with."""

import os
import re
from pathlib import Path
from typing import Any

Sizes = dict[str, Any]


def _decoder(hidden: int, inner: int, layers: int, heads: int, groups: int, *shared: Sizes, **others: Any) -> Sizes:
    """The keys that most decoders share. `groups`: heads of keys and values."""
    sizes: Sizes = {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "tie_word_embeddings": False,
    }
    for more in (*shared, others):
        sizes |= more
    return sizes


def _neox(hidden: int, layers: int, heads: int, vocab: int = 50304) -> Sizes:
    return {
        "model_type": "gpt_neox",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }


_LLAMA_2 = {"vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 8192}
_CODE_LLAMA = {"vocab_size": 32016, "max_position_embeddings": 16384}
_LLAMA_31 = {"vocab_size": 128256, "max_position_embeddings": 131072}
_QWEN_2 = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN_2_LARGE = {**_QWEN_2, "vocab_size": 152064}
_QWEN_3 = {"model_type": "qwen3", "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128}
_GEMMA = {"model_type": "gemma", "vocab_size": 256000, "max_position_embeddings": 8192, "head_dim": 256}
_GEMMA_2 = {"model_type": "gemma2", "vocab_size": 256000, "max_position_embeddings": 8192}
_GEMMA_3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "head_dim": 256,
}
_MISTRAL = {"model_type": "mistral", "vocab_size": 32768, "max_position_embeddings": 32768}
_MISTRAL_1 = {**_MISTRAL, "vocab_size": 32000}
_MISTRAL_2024 = {**_MISTRAL, "vocab_size": 131072, "head_dim": 128}
_MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_QWEN_3_EXPERTS = {
    **_QWEN_3,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_PHI_3 = {"model_type": "phi3", "vocab_size": 32064, "max_position_embeddings": 4096, "pad_token_id": 32000}
_PHI_4 = {**_PHI_3, "vocab_size": 100352, "max_position_embeddings": 16384, "pad_token_id": 100349}
_OLMO_2 = {"model_type": "olmo2", "vocab_size": 100352, "max_position_embeddings": 4096}
_SMOLLM_2 = {"vocab_size": 49152, "max_position_embeddings": 8192}
_SMOLLM_3 = {"model_type": "smollm3", "vocab_size": 128256, "max_position_embeddings": 65536}
_TINYLLAMA = {"vocab_size": 32000, "max_position_embeddings": 2048}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "head_dim": 64,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
}
_DEEPSEEK_3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_KIMI_2 = {
    **_DEEPSEEK_3,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}
_STARCODER_2 = {"model_type": "starcoder2", "vocab_size": 49152, "max_position_embeddings": 16384, "eos_token_id": 0}
_TIED = {"tie_word_embeddings": True}

SIZES: dict[str, Sizes] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "pythia-70m": _neox(512, 6, 8),
    "pythia-160m": _neox(768, 12, 12),
    "pythia-410m": _neox(1024, 24, 16),
    "pythia-1b": _neox(2048, 16, 8),
    "pythia-1.4b": _neox(2048, 24, 16),
    "pythia-2.8b": _neox(2560, 32, 32),
    "pythia-6.9b": _neox(4096, 32, 32, 50432),
    "pythia-12b": _neox(5120, 36, 40, 50688),
    "llama-2-7b": _decoder(4096, 11008, 32, 32, 32, _LLAMA_2),
    "llama-2-13b": _decoder(5120, 13824, 40, 40, 40, _LLAMA_2),
    "llama-2-70b": _decoder(8192, 28672, 80, 64, 8, _LLAMA_2),
    "codellama-7b": _decoder(4096, 11008, 32, 32, 32, _CODE_LLAMA),
    "llama-3-8b": _decoder(4096, 14336, 32, 32, 8, _LLAMA_3),
    "llama-3-70b": _decoder(8192, 28672, 80, 64, 8, _LLAMA_3),
    "llama-3.1-8b": _decoder(4096, 14336, 32, 32, 8, _LLAMA_31),
    "llama-3.1-70b": _decoder(8192, 28672, 80, 64, 8, _LLAMA_31),
    "llama-3.1-405b": _decoder(16384, 53248, 126, 128, 8, _LLAMA_31),
    "llama-3.2-1b": _decoder(2048, 8192, 16, 32, 8, _LLAMA_31, _TIED, head_dim=64),
    "llama-3.2-3b": _decoder(3072, 8192, 28, 24, 8, _LLAMA_31, _TIED, head_dim=128),
    "llama-3.3-70b": _decoder(8192, 28672, 80, 64, 8, _LLAMA_31),
    "mistral-7b": _decoder(4096, 14336, 32, 32, 8, _MISTRAL_1),
    "mistral-7b-v0.2": _decoder(4096, 14336, 32, 32, 8, _MISTRAL_1),
    "mistral-7b-v0.3": _decoder(4096, 14336, 32, 32, 8, _MISTRAL),
    "mistral-nemo-2407": _decoder(5120, 14336, 40, 32, 8, _MISTRAL_2024, max_position_embeddings=131072),
    "mistral-small-24b-2501": _decoder(5120, 32768, 40, 32, 8, _MISTRAL_2024),
    "ministral-8b-2410": _decoder(4096, 12288, 36, 32, 8, _MISTRAL_2024),
    "mixtral-8x7b": _decoder(4096, 14336, 32, 32, 8, _MIXTRAL),
    "mixtral-8x22b": _decoder(6144, 16384, 56, 48, 8, _MIXTRAL, max_position_embeddings=65536),
    "qwen2.5-0.5b": _decoder(896, 4864, 24, 14, 2, _QWEN_2, _TIED),
    "qwen2.5-1.5b": _decoder(1536, 8960, 28, 12, 2, _QWEN_2, _TIED),
    "qwen2.5-3b": _decoder(2048, 11008, 36, 16, 2, _QWEN_2, _TIED),
    "qwen2.5-7b": _decoder(3584, 18944, 28, 28, 4, _QWEN_2_LARGE),
    "qwen2.5-14b": _decoder(5120, 13824, 48, 40, 8, _QWEN_2_LARGE),
    "qwen2.5-32b": _decoder(5120, 27648, 64, 40, 8, _QWEN_2_LARGE),
    "qwen2.5-72b": _decoder(8192, 29568, 80, 64, 8, _QWEN_2_LARGE),
    "qwen3-0.6b": _decoder(1024, 3072, 28, 16, 8, _QWEN_3, _TIED),
    "qwen3-1.7b": _decoder(2048, 6144, 28, 16, 8, _QWEN_3, _TIED),
    "qwen3-4b": _decoder(2560, 9728, 36, 32, 8, _QWEN_3, _TIED),
    "qwen3-8b": _decoder(4096, 12288, 36, 32, 8, _QWEN_3),
    "qwen3-14b": _decoder(5120, 17408, 40, 40, 8, _QWEN_3),
    "qwen3-32b": _decoder(5120, 25600, 64, 64, 8, _QWEN_3),
    "qwen3-30b-a3b": _decoder(2048, 6144, 48, 32, 4, _QWEN_3_EXPERTS),
    "qwen3-235b-a22b": _decoder(4096, 12288, 94, 64, 4, _QWEN_3_EXPERTS, moe_intermediate_size=1536),
    "gemma-2b": _decoder(2048, 16384, 18, 8, 1, _GEMMA, _TIED),
    "gemma-7b": _decoder(3072, 24576, 28, 16, 16, _GEMMA, _TIED),
    "gemma-2-2b": _decoder(2304, 9216, 26, 8, 4, _GEMMA_2, _TIED, head_dim=256),
    "gemma-2-9b": _decoder(3584, 14336, 42, 16, 8, _GEMMA_2, _TIED, head_dim=256),
    "gemma-2-27b": _decoder(4608, 36864, 46, 32, 16, _GEMMA_2, _TIED, head_dim=128),
    "gemma-3-270m": _decoder(640, 2048, 18, 4, 1, _GEMMA_3, _TIED),
    "gemma-3-1b": _decoder(1152, 6912, 26, 4, 1, _GEMMA_3, _TIED),
    "phi-3-mini": _decoder(3072, 8192, 32, 32, 32, _PHI_3),
    "phi-3-medium": _decoder(5120, 17920, 40, 40, 10, _PHI_3),
    "phi-4": _decoder(5120, 17920, 40, 40, 10, _PHI_4),
    "olmo-2-0425-1b": _decoder(2048, 8192, 16, 16, 16, _OLMO_2),
    "olmo-2-1124-7b": _decoder(4096, 11008, 32, 32, 32, _OLMO_2),
    "olmo-2-1124-13b": _decoder(5120, 13824, 40, 40, 40, _OLMO_2),
    "olmo-2-0325-32b": _decoder(5120, 27648, 64, 40, 8, _OLMO_2),
    "smollm2-135m": _decoder(576, 1536, 30, 9, 3, _SMOLLM_2, _TIED),
    "smollm2-360m": _decoder(960, 2560, 32, 15, 5, _SMOLLM_2, _TIED),
    "smollm2-1.7b": _decoder(2048, 8192, 24, 32, 32, _SMOLLM_2, _TIED),
    "smollm3-3b": _decoder(2048, 11008, 36, 16, 4, _SMOLLM_3, _TIED),
    "tinyllama-1.1b-v1.0": _decoder(2048, 5632, 22, 32, 4, _TINYLLAMA),
    "starcoder2-3b": _decoder(3072, 12288, 30, 24, 2, _STARCODER_2, _TIED),
    "starcoder2-7b": _decoder(4608, 18432, 32, 36, 4, _STARCODER_2, _TIED),
    "starcoder2-15b": _decoder(6144, 24576, 40, 48, 4, _STARCODER_2),
    "gpt-oss-20b": _decoder(2880, 2880, 24, 64, 8, _GPT_OSS, num_local_experts=32),
    "gpt-oss-120b": _decoder(2880, 2880, 36, 64, 8, _GPT_OSS, num_local_experts=128),
    "deepseek-v3": _decoder(7168, 18432, 61, 128, 128, _DEEPSEEK_3),
    "deepseek-r1": _decoder(7168, 18432, 61, 128, 128, _DEEPSEEK_3),
    "kimi-k2": _decoder(7168, 18432, 61, 64, 64, _KIMI_2),
}

_VARIANTS = re.compile(
    r"-(?:chat|instruct|base|hf|it|pt|4k|128k|coder|math|thinking|deduped|v0\.1|0324|0528|0905|2507)(?=-|$)"
)
"""Parts of names on model hubs that do not change a model's sizes."""


def name_of(spec: str) -> str | None:
    """The name of the open model that a spec means, also by its name on a hub: meta-llama/Llama-3.1-8B-Instruct."""
    plain = _VARIANTS.sub("", spec.rpartition("/")[2].lower().removeprefix("meta-"))
    return plain if plain in SIZES and spec.count("/") <= 1 else None


def meant_by(spec: str, folder: Path) -> str | None:
    """The same, unless a file or folder has this name: then that is meant."""
    return None if os.path.exists(folder / spec) else name_of(spec)
