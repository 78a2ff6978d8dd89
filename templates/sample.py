"""Plain torch reads what `train.py` exported, and writes a few lines. shardkit is not needed here.

python sample.py EXPORT_FOLDER [PROMPT]
"""

import sys
from pathlib import Path

import torch
from gpt import CONTEXT, GPT
from safetensors.torch import load_file


@torch.no_grad()
def write(model: GPT, prompt: str, length: int = 200, temperature: float = 0.7) -> str:
    """The prompt, continued by so many bytes."""
    generator = torch.Generator().manual_seed(0)
    text = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([text[-CONTEXT:]]))[0, -1]
        text.append(int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)))
    return bytes(text).decode(errors="replace")


if __name__ == "__main__":
    files = sorted(Path(sys.argv[1]).glob("*.safetensors")) if len(sys.argv) > 1 else []
    if not files:
        given = f"{sys.argv[1]}: no *.safetensors in it" if len(sys.argv) > 1 else "no folder"
        sys.exit(f"sample: the folder of an export is needed (got {given}); python sample.py runs/gpt/export")
    weights = {}
    for file in files:
        weights |= load_file(file)
    torch.set_num_threads(1)  # one byte at a time is too little work to share
    model = GPT()
    model.load_state_dict(weights)
    print(write(model.eval(), sys.argv[2] if len(sys.argv) > 2 else "def "))
    assert "shardkit" not in sys.modules
