"""The same engine on one CUDA device: equivalence, offloading, 16 bits. Skipped, with the reason, without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SCRIPT = """
import json, sys
import torch
from shardkit.config.schema import Config
from shardkit.distributed import process
from shardkit.optim import clip, loss_scale, local_step, rebind
from shardkit.sharding import precision
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallel import parallelize
from torch.distributed.tensor import DTensor

sys.path.insert(0, sys.argv[2])
from tests import models

arguments = json.loads(sys.argv[1])
config = precision.supported(Config(num_processes=1, **arguments), torch.device("cuda", 0))
here = process.start(config)
torch.manual_seed(0)
model = models.Gpt(width=64, layers=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
names = rebind.ParameterNames.of(model)
model = parallelize(model, config, build_mesh(config, here), here)
rebind.rebind(optimizer, names, model)
stepper = local_step.stepper_of(optimizer)
scaler = loss_scale.make_scaler(config, here.device)
losses, norms = [], []
for step in range(6):
    tokens = torch.randint(0, 19, (8, 33), generator=torch.Generator().manual_seed(step)).to(here.device)
    with precision.autocast(config, here.device):
        loss = models.next_token_loss(model, tokens)
    (scaler.scale(loss) if scaler else loss).backward()
    if scaler:
        scaler.unscale_(optimizer)
    norms.append(clip.clip_grad_norm_(model.parameters(), 1.0).item())
    if scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        stepper.step()
    optimizer.zero_grad()
    losses.append(loss.item())
weight = model.head.weight
local = weight.to_local() if isinstance(weight, DTensor) else weight
state = optimizer.state[weight]["exp_avg"]
print(json.dumps({
    "losses": losses, "norms": norms, "device": local.device.type, "dtype": str(local.dtype),
    "state": (state.to_local() if isinstance(state, DTensor) else state).device.type,
    "fused": optimizer.param_groups[0]["fused"],
}))
process.leave()
"""


def run(tmp_path: Path, **arguments: object) -> dict:
    """What one rank on the GPU reports; a process of its own, since a process group is for good."""
    import json

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, script, json.dumps(arguments), root],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def reference() -> list[float]:
    from tests import models

    torch.manual_seed(0)
    model = models.Gpt(width=64, layers=4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(6):
        tokens = torch.randint(0, 19, (8, 33), generator=torch.Generator().manual_seed(step)).cuda()
        loss = models.next_token_loss(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", [1, 2, 3])
@pytest.mark.parametrize(("mixed_precision", "bound"), [("no", 1e-4), ("bf16", 0.05), ("fp16", 0.05)])
def test_training_equals_plain_torch(tmp_path, strategy, mixed_precision, bound):
    found = run(tmp_path, mixed_precision=mixed_precision, fsdp_config={"fsdp_sharding_strategy": strategy})
    assert found["losses"] == pytest.approx(reference(), abs=bound)
    assert found["dtype"] == "torch.float32" and found["fused"] is True


@pytest.mark.requirement("A2")
def test_offloaded_parameters_live_on_the_cpu(tmp_path):
    found = run(tmp_path, fsdp_config={"fsdp_offload_params": True})
    assert found["device"] == found["state"] == "cpu"
    assert found["losses"] == pytest.approx(reference(), abs=1e-4)
