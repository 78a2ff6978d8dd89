"""TRL's trainers on tiny models and local data.

Arguments: kind (sft, dpo, reward, grpo), output folder, samples a rank, what sft pads to a multiple of. Writes
found.json.
"""

import json
import random
import sys
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    set_seed,
)

KIND, OUT, SAMPLES = sys.argv[1], sys.argv[2], int(sys.argv[3])
MULTIPLE = int(sys.argv[4]) if len(sys.argv) > 4 else None
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(60))]
CONFIG = Qwen2Config(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
)
ARGUMENTS = {
    "output_dir": OUT,
    "per_device_train_batch_size": SAMPLES,
    "num_train_epochs": 1,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "bf16": False,
    "gradient_checkpointing": False,
}


def tokenizer():
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def sentences(count, length, seed):
    drawn = random.Random(seed)
    return [" ".join(drawn.choice(WORDS[3:]) for _ in range(length)) for _ in range(count)]


def model(kind=Qwen2ForCausalLM):
    set_seed(0)
    return kind(CONFIG)


def trainer():
    tokens = tokenizer()
    if KIND == "sft":
        from trl import SFTConfig, SFTTrainer

        data, beside = (Dataset.from_dict({"text": sentences(count, 8, 0)}) for count in (16, 6))
        said = SFTConfig(max_length=32, pad_to_multiple_of=MULTIPLE, eval_strategy="epoch", **ARGUMENTS)
        said.per_device_eval_batch_size = SAMPLES
        return SFTTrainer(model(), args=said, train_dataset=data, eval_dataset=beside, processing_class=tokens)
    if KIND == "dpo":
        from trl import DPOConfig, DPOTrainer

        data = Dataset.from_dict(
            {"prompt": sentences(16, 4, 0), "chosen": sentences(16, 6, 1), "rejected": sentences(16, 6, 2)}
        )
        said = DPOConfig(max_length=32, **ARGUMENTS)
        return DPOTrainer(model(), ref_model=model(), args=said, train_dataset=data, processing_class=tokens)
    if KIND == "reward":
        from trl import RewardConfig, RewardTrainer

        data = Dataset.from_dict({"chosen": sentences(16, 6, 1), "rejected": sentences(16, 6, 2)})
        CONFIG.num_labels = 1
        said = RewardConfig(max_length=32, **ARGUMENTS)
        scored = model(Qwen2ForSequenceClassification)
        return RewardTrainer(scored, args=said, train_dataset=data, processing_class=tokens)
    from trl import GRPOConfig, GRPOTrainer

    data = Dataset.from_dict({"prompt": sentences(16, 4, 0)})
    said = GRPOConfig(num_generations=2, max_completion_length=6, max_steps=3, **ARGUMENTS)
    rewards = lambda completions, **_: [float(len(one)) for one in completions]  # noqa: E731
    return GRPOTrainer(model(), reward_funcs=rewards, args=said, train_dataset=data, processing_class=tokens)


run = trainer()
run.train()
if run.is_world_process_zero():
    log = run.state.log_history
    losses = [one["loss"] for one in log if "loss" in one]
    beside = [
        one.get(name) for one in log for name in ("num_tokens", "mean_token_accuracy", "eval_loss") if name in one
    ]
    Path(OUT, "found.json").write_text(json.dumps({"losses": losses, "beside": beside, "steps": run.state.global_step}))
