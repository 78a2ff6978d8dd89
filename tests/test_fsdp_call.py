"""`shardkit.fsdp`: one call, with and without a launcher."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardkit import fsdp
from shardkit.errors import UsageError
from tests import models

EXAMPLES = {
    "basic": """
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
fsdp_model = fsdp(model)
fsdp_model(torch.randn(2, 784)).sum().backward()
""",
    "wrapping": """
class TransformerBlock(nn.Module):
    def __init__(self):
        # Define your custom transformer layer here
        pass

model = nn.Sequential(nn.Linear(784, 256), TransformerBlock(), nn.Linear(256, 10))
fsdp_model = fsdp(model, auto_wrap=True, TransformerBlock=TransformerBlock)
""",
    "advanced": """
model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
fsdp_model = fsdp(model, mp="bf16", shard_strat="FULL_SHARD")
output = fsdp_model(torch.randn(2, 784))
output.sum().backward()
print(output.dtype, type(model[0].weight).__name__)
""",
}


@pytest.mark.slow
@pytest.mark.requirement("Z1")
def test_the_examples_run_in_one_process(tmp_path: Path):
    script = tmp_path / "examples.py"
    script.write_text("import torch\nimport torch.nn as nn\nfrom shardkit import fsdp\n" + "".join(EXAMPLES.values()))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch.float32", "ShardedParameter"]
    assert "TransformerBlock.__init__ does not call super().__init__()" in done.stderr


def on_two_ranks() -> list[str]:
    torch.manual_seed(dist.get_rank())
    found = []
    for arguments in (
        {},
        {"shard_strat": "SHARD_GRAD", "auto_wrap": True},
        {"shard_strat": "full_shard", "auto_wrap": True, "TransformerBlock": models.Block, "mp": "bf16"},
        {"mp": "bf16"},
    ):
        model = fsdp(models.Gpt(), **arguments)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        compute: list[str] = []
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.blocks[0].up.register_forward_hook(lambda m, a, out, compute=compute: compute.append(str(out.dtype)))
        tokens = torch.randint(0, 19, (2, 8), generator=torch.Generator().manual_seed(0))
        losses = []
        for _ in range(3):
            loss = models.next_token_loss(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0] and loss.dtype == torch.float32
        blocks = sum(isinstance(block, FSDPModule) for block in inner.blocks)
        kind = "ddp" if inner is not model else "fsdp"
        assert isinstance(inner.embed.weight, DTensor) == (kind == "fsdp")
        found.append(f"{kind} {blocks} {compute[0]}")
    return found


@pytest.mark.slow
@pytest.mark.requirement("Z1")
def test_strategies_and_precisions_on_two_ranks(ranks):
    expected = ["ddp 0 torch.float32", "fsdp 3 torch.float32", "fsdp 3 torch.bfloat16", "ddp 0 torch.bfloat16"]
    assert ranks.run(2, on_two_ranks) == [expected, expected]


def test_unknown_words_are_refused_together():
    class Unfinished(nn.Module):
        def __init__(self):
            pass

    model = Unfinished()
    with pytest.raises(UsageError) as caught:
        fsdp(model, mp="bf61", shard_strat="FULL_SHRAD")
    assert str(caught.value).splitlines() == [
        "fsdp: mp: not known (got 'bf61'); did you mean BF16?",
        "fsdp: shard_strat: not known (got 'FULL_SHRAD'); did you mean FULL_SHARD?",
    ]
    assert not vars(model), "the model was changed"
