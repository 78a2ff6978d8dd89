"""A whole run of the Transformers Trainer on tiny models: training, evaluation, checkpoints, resuming, saving.

Arguments: kind (causal, seq2seq, lora, qlora), output folder, samples a rank and micro-batch. Writes found.json.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

KIND, OUT, SAMPLES = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def model():
    set_seed(0)
    if KIND == "seq2seq":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        return T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, **sizes))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes))
    if KIND == "qlora":
        made = in_4_bits(made)
    if KIND in ("lora", "qlora"):
        from peft import LoraConfig, get_peft_model

        return get_peft_model(made, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return made


def in_4_bits(made):
    """Loaded as in the QLoRA recipe of peft and Accelerate."""
    from peft import prepare_model_for_kbit_training
    from transformers import BitsAndBytesConfig

    folder = OUT / f"base-{os.environ.get('RANK', 0)}"
    made.config.save_pretrained(folder)  # every rank its own; of the model's method only rank 0 writes
    save_file(made.state_dict(), folder / "model.safetensors", {"format": "pt"})
    bf16 = torch.bfloat16
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = BitsAndBytesConfig(True, **kind, bnb_4bit_compute_dtype=torch.float32, bnb_4bit_quant_storage=bf16)
    made = LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=bf16)
    # DDP takes one gradient of a parameter, of which reentrant recomputation makes two.
    return prepare_model_for_kbit_training(made, gradient_checkpointing_kwargs={"use_reentrant": False})


def trainer(folder):
    kinds = {"seq2seq": (Seq2SeqTrainer, Seq2SeqTrainingArguments)}
    make, arguments = kinds.get(KIND, (Trainer, TrainingArguments))
    tokens = torch.randint(2, 32, (24, 8), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": one, "labels": one} for one in tokens]
    said = arguments(
        str(folder),
        per_device_train_batch_size=SAMPLES,
        per_device_eval_batch_size=SAMPLES,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        eval_strategy="epoch",
        # T5 leaves out the number of tokens that the Trainer tells it, which then multiplies its loss by the ranks.
        average_tokens_across_devices=KIND != "seq2seq",
        report_to=[],
        disable_tqdm=True,
    )
    made = make(model(), said, train_dataset=samples, eval_dataset=samples[:8])
    if KIND == "qlora" and made.is_fsdp_enabled:
        from peft.utils.other import fsdp_auto_wrap_policy

        made.accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(made.model)
    return made


def history(run):
    log = run.state.log_history
    return [one["loss"] for one in log if "loss" in one], [one["eval_loss"] for one in log if "eval_loss" in one]


first = trainer(OUT / "first")
first.train()
first.save_model(str(OUT / "model"))
found = {"losses": history(first)[0], "evaluated": history(first)[1], "steps": first.state.global_step}
if KIND != "seq2seq":
    found["predicted"] = first.predict(first.eval_dataset).predictions.std(2).ravel().tolist()
if first.is_world_process_zero():
    for later in (OUT / "first").glob("checkpoint-*"):  # the newest is in the middle of the second epoch
        if later.name != "checkpoint-4":
            shutil.rmtree(later)
first.accelerator.wait_for_everyone()
again = trainer(OUT / "first")
again.train(resume_from_checkpoint=True)
found["again"] = history(again)[0]
if KIND not in ("lora", "qlora"):
    with torch.no_grad():
        whole = type(first.accelerator.unwrap_model(first.model)).__mro__
        kind = next(one for one in whole if one in (LlamaForCausalLM, T5ForConditionalGeneration))
        reloaded = kind.from_pretrained(str(OUT / "model"))
        found["weights"] = [float(parameter.double().norm()) for parameter in reloaded.parameters()]
if first.is_world_process_zero():
    (OUT / "found.json").write_text(json.dumps(found))
