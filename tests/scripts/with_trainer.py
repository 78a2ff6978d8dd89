"""A training run on the Transformers Trainer, which knows nothing of shardkit."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16))
samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no"
)
trainer = Trainer(model, arguments, train_dataset=samples)
trainer.train()
state = trainer.accelerator.state
print(f"world {state.num_processes}, {state.mixed_precision}, {trainer.state.global_step} steps")
