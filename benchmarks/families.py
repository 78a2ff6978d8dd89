"""Transformers families in their default configurations: planned by formula and simulated, or refused in words.

    python -m benchmarks.families [--only llama] [--page docs/reference/families.md]

8 ranks, FULL_SHARD, bf16, AdamW, one sequence of 512 tokens; sound and images as long and large as the default.
No weights are needed: a config.json with the family's name stands for each.
"""

import argparse
import json
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from benchmarks import interleaved
from shardkit.config.schema import Config
from shardkit.errors import ShardkitError
from shardkit.sizes import GIB

FAMILIES = {
    "albert": "AlbertForMaskedLM",
    "bart": "BartForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "bloom": "BloomForCausalLM",
    "clip": "CLIPModel",
    "cohere": "CohereForCausalLM",
    "convnext": "ConvNextForImageClassification",
    "deberta-v2": "DebertaV2ForMaskedLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForMaskedLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "hubert": "HubertForCTC",
    "jamba": "JambaForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "llava": "LlavaForConditionalGeneration",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "modernbert": "ModernBertForMaskedLM",
    "mt5": "MT5ForConditionalGeneration",
    "olmo2": "Olmo2ForCausalLM",
    "opt": "OPTForCausalLM",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "pegasus": "PegasusForConditionalGeneration",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "roberta": "RobertaForMaskedLM",
    "rwkv": "RwkvForCausalLM",
    "siglip": "SiglipModel",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "swin": "SwinForImageClassification",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "wav2vec2": "Wav2Vec2ForCTC",
    "whisper": "WhisperForConditionalGeneration",
}
RANKS, TOKENS = 8, 512
# Sound and images, as long and large as the family's default.
NO_TEXT = {"convnext", "deit", "dinov2", "hubert", "swin", "vit", "wav2vec2", "whisper"}
# Their own loss takes the logits as they are computed; others convert them to fp32 first.
LOSS_IN_16_BITS = {"mt5", "t5"}


@dataclass(frozen=True)
class Outcome:
    """What the plan says of a family: bytes of a rank's peak, or why there are none.

    `tokens` is the length of the sequence, None for sound and images. `closed_bytes` is a lower bound where the closed
    form does not know all of the family's activations. It trains every parameter and computes the loss in fp32;
    `less_bytes` is what the simulated step takes less because it does not: gradients and optimizer state of a part that
    text alone leaves without a gradient, and logits of a model whose own loss is in 16 bits.
    """

    parameters: int
    tokens: int | None
    closed_bytes: int
    is_bound: bool
    simulated_bytes: int | None
    unused: str | None = None
    refusal: str | None = None
    less_bytes: int = 0


def outcome(family: str) -> Outcome:
    """Describe and simulate a family as the child processes of `shardkit plan` do. Any error but one in words comes
    through."""
    from shardkit.model.probe import describe_transformers
    from shardkit.plan import worker
    from shardkit.plan.closed_form import estimate

    config = Config(num_processes=RANKS, mixed_precision="bf16")
    tokens = None if family in NO_TEXT else _tokens(family)
    with tempfile.TemporaryDirectory(prefix="shardkit-families-") as scratch:
        path = Path(scratch) / "config.json"
        path.write_text(json.dumps({"model_type": family, "architectures": [FAMILIES[family]]}))
        found = describe_transformers(str(path))
        facts = found.facts
        closed = estimate(found.tree, config, world_size=RANKS, facts=facts, batch_size=1, seq_len=tokens).memory
        numbers = (found.numel, tokens, closed.peak.total, not closed.activations_known)
        job = worker.Job("transformers", str(path), [], RANKS, RANKS, "adamw", None, 1, tokens, is_exact=False)
        try:
            step, _ = worker.simulated(job, config)
        except ShardkitError as error:
            return Outcome(*numbers, None, refusal=str(error))
    peak = max((moment.memory for moment in step.moments), key=lambda memory: memory.total)
    states = max(0, closed.peak.optimizer_state - peak.optimizer_state)
    less = states + states // 2  # AdamW: 8 bytes of state and 4 of gradient for each parameter
    if family in LOSS_IN_16_BITS:
        less += (tokens or 0) * (facts.vocabulary or 0) * 6  # 10 bytes a logit, not 16
    return Outcome(*numbers, peak.total, step.unused[0].rpartition(".")[0] if step.unused else None, less_bytes=less)


def _tokens(family: str) -> int:
    """As many as the text of the family may have, up to TOKENS."""
    from transformers import AutoConfig

    positions = getattr(AutoConfig.for_model(family).get_text_config(), "max_position_embeddings", None)
    return min(TOKENS, positions or TOKENS)


def page(outcomes: dict[str, Outcome]) -> str:
    """Markdown for docs/reference/families.md."""
    lines = [
        "# Families that were planned",
        "",
        f"Default configurations of {len(outcomes)} Transformers families on {RANKS} ranks: FULL_SHARD, bf16, AdamW,",
        "one sequence of text (sound and images as long and large as the default), nothing recomputed.",
        "`make test-families` runs them; `python -m benchmarks.families --page FILE` writes this page.",
        "",
        "GiB a rank at the peak. ≥: the closed form leaves something out, and the report says what. A part without a",
        "gradient gets none from the batch that is made up, such as a tower for images from text: give `--batch`.",
        "The closed form trains such parts too, and computes the loss in fp32: it may lie above the simulation there",
        "(qwen2_5_vl), and where a model computes its own loss in 16 bits (mt5).",
        "",
        "| family | model | billions of parameters | tokens | simulated | closed form | without a gradient |",
        "|---|---|---|---|---|---|---|",
        *(_row(family, each) for family, each in outcomes.items()),
    ]
    return "\n".join(lines) + "\n"


def _row(family: str, found: Outcome) -> str:
    simulated = found.refusal or f"{(found.simulated_bytes or 0) / GIB:,.2f}"
    closed = f"{'≥ ' if found.is_bound else ''}{found.closed_bytes / GIB:,.2f}"
    size, tokens = f"{found.parameters / 1e9:,.2f}", f"{found.tokens:,}" if found.tokens else "-"
    return f"| {' | '.join([family, FAMILIES[family], size, tokens, simulated, closed, found.unused or '-'])} |"


def main() -> None:
    """Plans the families, prints one line each, writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="families with this in their name")
    parser.add_argument("--page", type=interleaved.writable, help="where to write the page of all families")
    options = parser.parse_args()
    outcomes = {}
    for family in FAMILIES:
        if options.only in family:
            try:
                outcomes[family] = outcome(family)
                print(_row(family, outcomes[family]), flush=True)
            except Exception:
                print(f"{family}: {traceback.format_exc()}", flush=True)
    if options.page:
        options.page.write_text(page(outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
