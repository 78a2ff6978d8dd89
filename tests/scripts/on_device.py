"""One process that trains a small GPT by the public face, on the device and in the way that its order says.

    python on_device.py ORDER.json RESULT.json

The order: `device` (cpu, cuda or openreg), `config`, `steps`; `dropout`; `penalty` on weights; `optimizer`; folders
`load`, `save`, `save_beside`, `export`; `steps_before`: how many of the steps are done before `prepare`, on the CPU.
Ranks split each batch; with `gloo` they meet through gloo, each alone with the first device as on a machine of its own.
With `exact` torch takes kernels that give the same bits each time. With `ends_alone` each rank ends where its work is
done, and leaves a result of its own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardkit import Accelerator
from tests import models, openreg


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    torch.use_deterministic_algorithms(order.get("exact", False))  # warn_only leaves attention's backward as it is
    if order["device"] == "openreg":
        openreg.prepare()
    if order.get("gloo"):
        dist.init_process_group("gloo")
    world = {"num_processes": int(os.environ.get("WORLD_SIZE", "1")), "use_cpu": order["device"] == "cpu"}
    accelerator = Accelerator(config={**world, **order["config"]})
    torch.manual_seed(0)
    model = models.Gpt(width=64, layers=4, dropout=order.get("dropout", 0.0))
    optimizer = models.optimizer(order.get("optimizer", "AdamW"), model)
    before = order.get("steps_before", 0)
    for step in range(before):
        models.next_token_loss(model, _tokens(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = accelerator.prepare(model, optimizer)
    if "load" in order:
        accelerator.load_state(order["load"])
    result: dict[str, Any] = {"losses": [], "norms": [], "skipped": []}
    for step in range(order.get("first", before), order["steps"]):
        if step == order.get("save_beside_at"):
            accelerator.save_state(order["save_beside"], blocking=False)
        _step(accelerator, model, optimizer, step, order.get("penalty", 0.0), result)
    if "save" in order:
        accelerator.save_state(order["save"])
    if "export" in order:
        accelerator.save_model(model, order["export"])
    weight = model.head.weight
    state = optimizer.state[weight].get("exp_avg")  # Adagrad has none, nor has one that skipped every step
    result |= {"parameter": _described(weight), "state": None if state is None else _described(state)}
    result |= {"sum": _sums(accelerator.get_state_dict(model)), "device": str(accelerator.device)}
    if order.get("ends_alone"):
        Path(f"{sys.argv[2]}.{accelerator.process_index}").write_text(json.dumps(result))
        return
    accelerator.end_training()
    if order.get("gloo"):
        dist.destroy_process_group()  # else its threads may abort the process at its end
    Path(sys.argv[2]).write_text(json.dumps(result))


def _step(accelerator: Any, model: Any, optimizer: Any, step: int, penalty: float, result: dict[str, Any]) -> None:
    tokens = _tokens(step)[accelerator.process_index :: accelerator.num_processes].to(accelerator.device)
    with accelerator.autocast():
        loss = models.next_token_loss(model, tokens)
    if penalty:
        loss = loss + penalty * sum(p.square().sum() for p in model.parameters())
    accelerator.backward(loss)
    result["norms"].append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
    optimizer.step()
    result["skipped"] += [step] if accelerator.optimizer_step_was_skipped else []
    optimizer.zero_grad()
    result["losses"].append(loss.item())


def _tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 19, (8, 33), generator=torch.Generator().manual_seed(step))


def _described(tensor: torch.Tensor) -> dict[str, Any]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return {"device": local.device.type, "dtype": str(local.dtype), "pinned": local.is_cpu and local.is_pinned()}


def _sums(state: dict[str, torch.Tensor]) -> dict[str, float]:
    """Exact in fp64, so that equal sums of every tensor mean equal tensors for what is compared here."""
    return {name: tensor.double().abs().sum().item() for name, tensor in state.items()}


if __name__ == "__main__":
    main()
