"""How DDP exchanges gradients: every setting of `shardkit.ddp`, against plain torch in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shardkit import Accelerator
from shardkit.runtime.checkpoints import loading
from tests.training import loop, parts, plain, weights_of


def config_of(**ddp: Any) -> dict[str, Any]:
    return {"distributed_type": "MULTI_CPU", "shardkit": {"ddp": ddp}}


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def loops() -> dict[str, dict[str, Any]]:
    """The same loop with each setting."""
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "static_graph": {"static_graph": True},
        "buckets": {"bucket_cap_mb": 1, "broadcast_buffers": False},
        "fp16": {"comm_hook": "fp16"},
        "bf16": {"comm_hook": "bf16"},
        "power_sgd": {"comm_hook": "PowerSGD", "power_sgd_start_step": 2, "power_sgd_rank": 64},
        "power_sgd in bf16": {"comm_hook": "power_sgd", "power_sgd_start_step": 2, "comm_wrapper": "bf16"},
    }
    return {name: loop(config_of(**ddp), 24, 2, 2, 2) for name, ddp in settings.items()}


@pytest.mark.slow
def test_each_way_to_exchange_gradients_trains_as_one_process_does(ranks):
    expected = plain(24, 4, 2, 2)["weights"]
    first, second = ranks.run(2, loops)
    found = {name: largest_difference(result["weights"], expected) for name, result in first.items()}
    for name in ("plain", "static_graph", "buckets", "power_sgd"):
        assert found[name] < 1e-4, found  # rank 64 is the whole gradient
    assert 0 < found["fp16"] < 0.02 and 0 < found["bf16"] < 0.1, found
    assert found["power_sgd in bf16"] > 1e-3, found  # rank 1 leaves something out
    for name in first:  # whatever is left out, ranks agree
        assert largest_difference(first[name]["weights"], second[name]["weights"]) == 0


def power_sgd_after_a_load(folder: str) -> dict[str, Any]:
    """Weights after a loop that loads what it has saved, in the process that trained on and in a new Accelerator."""
    found: dict[str, Any] = {"told": []}
    config = config_of(comm_hook="power_sgd", power_sgd_start_step=2)
    warning, loading.log.warning = loading.log.warning, lambda text, *values: found["told"].append(text % values)
    try:
        for name in ("goes on", "new"):
            accelerator = Accelerator(config=config)
            model, optimizer, loader, _ = parts(24, 2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            if name == "goes on":
                train(accelerator, model, optimizer, loader)
                accelerator.save_state(folder)
                train(accelerator, model, optimizer, loader)
            accelerator.load_state(folder)
            train(accelerator, model, optimizer, loader)
            found[name] = weights_of(model)
    finally:
        loading.log.warning = warning
    return found


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        accelerator.backward(model(batch["x"]).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
def test_power_sgd_starts_anew_after_a_load_and_says_so(ranks, tmp_path):
    first, second = ranks.run(2, power_sgd_after_a_load, str(tmp_path / "saved"))
    assert largest_difference(first["goes on"], first["new"]) == 0, "nothing is left of the weights before the load"
    assert largest_difference(first["new"], second["new"]) == 0
    told = [line for line in first["told"] if "PowerSGD" in line]
    assert len(told) == 2 and not any("PowerSGD" in line for line in second["told"])
    assert told[0].startswith("checkpoint: what PowerSGD has left out of gradients is in no checkpoint;")
    assert "for the next 2 steps" in told[0]


def traffic(hook: str) -> tuple[list[str], int]:
    """The dtypes that ranks send in a step, and the registered hook's bytes."""
    sent: list[str] = []
    original = dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        sent.append(str(tensor.dtype))
        return original(tensor, *args, **arguments)

    accelerator = Accelerator(config=config_of(comm_hook=hook))
    model, optimizer, loader, _ = parts(8, 4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    dist.all_reduce = noted
    try:
        for batch in loader:
            accelerator.backward(model(batch["x"]).sum())
    finally:
        dist.all_reduce = original
    return sent, len(weights_of(model))


@pytest.mark.parametrize(("hook", "dtype"), [("fp16", "torch.float16"), ("bf16", "torch.bfloat16")])
def test_gradients_are_sent_in_the_dtype_of_the_hook(ranks, hook, dtype):
    for sent, _ in ranks.run(2, traffic, hook):
        assert sent and set(sent) == {dtype}


def test_three_ranks_share_a_bf16_hook(ranks):
    results = ranks.run(3, loop, config_of(comm_hook="bf16"), 18, 2, 1, 1)
    assert largest_difference(results[0]["weights"], results[2]["weights"]) == 0
    assert largest_difference(results[0]["weights"], plain(18, 6, 1, 1)["weights"]) < 0.1


def average_of_a_prepared_model(freezes: bool) -> dict[str, Any]:
    accelerator = Accelerator(config=config_of(), mixed_precision="bf16")
    model, optimizer, loader, _ = parts(24, 2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.requires_grad_(not freezes)
    average = AveragedModel(model)
    model.requires_grad_(True)
    train(accelerator, model, optimizer, loader)
    batch = next(iter(loader))
    before = average(batch["x"])
    average.update_parameters(model)  # for the first time: a copy
    found = {"kept": largest_difference(weights_of(average), weights_of(model))}
    with torch.no_grad():
        found["outputs"] = float((average(batch["x"]) - model(batch["x"])).abs().max())
        found["before"] = float((before - model(batch["x"])).abs().max())
    if not freezes:
        average(batch["x"]).square().mean().backward()
        found["gradient"] = next(average.parameters()).grad.tolist()
    return found


@pytest.mark.parametrize("freezes", [False, True])
def test_a_copy_of_a_prepared_model_has_its_own_weights(ranks, freezes):
    first, second = ranks.run(2, average_of_a_prepared_model, freezes)
    for found in (first, second):
        assert found["kept"] == 0 and found["outputs"] == 0 and found["before"] > 0
    assert first.get("gradient") == second.get("gradient")  # averaged over ranks, as torch's copy does


def gradients_noted() -> list[bool]:
    """Of each step, whether the gradients that DDP takes for views of its buckets are those of the parameters."""
    accelerator = Accelerator(config=config_of(), gradient_accumulation_steps=2)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(3)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found = []
    for number in range(12):
        model.module[1].requires_grad_(number < 4 or number >= 8)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((2, 5), 1.0 + number)).sum())
            if accelerator.sync_gradients:
                trained = {id(p): p.grad for p in model.parameters() if p.requires_grad}
                noted = {key: gradient for key, (gradient, _) in model._in_buckets.items()}
                found.append(noted.keys() == trained.keys() and all(noted[key] is trained[key] for key in noted))
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_gradients_in_buckets_are_known(ranks):
    """Others, such as freed ones, would look as if a script had replaced them: a rank would create its reducer again,
    alone, and all would wait for ever."""
    assert ranks.run(2, gradients_noted) == [[True] * 6] * 2


def begins_anew_in_a_window() -> list[float]:
    """The gradients of a window whose first forward lets DDP begin anew, as a converted model or a thawed parameter
    does, with two turns of the optimizer in each micro-batch, as GANs have."""
    accelerator = Accelerator(config=config_of(), gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    model.double()
    found = []
    for size in ((1, 10), (100, 1000)):
        with accelerator.accumulate(model):
            for mean in size:
                mine = mean * (2 * accelerator.process_index + 1) / 2
                accelerator.backward(model(torch.full((1, 1), mine, dtype=torch.float64)).sum())
                found.append(model.weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
    return found


def test_a_window_stays_one_where_ddp_begins_anew(ranks):
    first, second = ranks.run(2, begins_anew_in_a_window)
    assert first[2:] == second[2:] == [(1 + 10 + 100) / 2, 1000 / 2]
    assert first[0] != second[0]  # not exchanged within the window


class WithoutInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(3))

    def forward(self, factor: float = 1.0) -> torch.Tensor:
        return factor * self.values.sum()


def with_a_device() -> list[float]:
    """The means of the gradients. On a device torch's DDP moves what is put in, here to the CPU."""
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True})
    model: Any = accelerator.prepare(WithoutInputs())
    model.device_ids, found = [0], []
    for output in (lambda: model(), lambda: model(2.0), lambda: model(factor=3.0)):
        model.zero_grad()
        (output() * (1 + accelerator.process_index)).backward()
        found.append(float(model.module.values.grad[0]))
    assert model.device_ids == [0]
    return found


def test_a_forward_without_inputs_on_a_device(ranks):
    assert ranks.run(2, with_a_device) == [[1.5, 3.0, 4.5]] * 2
