"""Built-in models. The two GPTs are those of the PyTorch team's FSDP measurements (minGPT, 50K vocabulary,
fp16, SGD), where they are listed with 175 and 1008 billion parameters. minGPT's head is not tied to the embedding,
which makes the second 1009 billion; `gpt:...,tied=true` gives 1008."""

from shardkit.model.gpt import GptShape

BUILTIN = {
    "gpt-175b": GptShape(layers=96, hidden=12288, heads=96),
    "gpt-1t": GptShape(layers=128, hidden=25600, heads=160),
}
