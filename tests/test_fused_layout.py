"""torch's fused kernels take it for granted that parameter, gradient and state lie in memory in the same order. They
are chosen here where torch's default would not use them, so what lies otherwise must give the same results."""

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

from shardkit.checkpoint.states.state import Live
from shardkit.optim.kernels import choose_kernels
from tests import checkpoints


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def steps(parameter, gradients, chooses, kind=AdamW, load=None):
    optimizer = kind([parameter], lr=0.1)
    if chooses:
        choose_kernels(optimizer)
    for gradient in gradients:
        parameter.grad = gradient
        optimizer.step()
        if load is not None:
            state = optimizer.state_dict()
            for row in state["state"].values():
                row.update({key: load(value) for key, value in row.items() if key != "step"})
            optimizer.load_state_dict(state)
    return parameter.detach().clone()


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(
    "parameter",
    [lambda: numbers(4, 3), lambda: numbers(3, 4).t(), lambda: numbers(4, 6)[:, ::2]],
    ids=["usual", "transposed", "gaps"],
)
@pytest.mark.parametrize(
    "load", [None, torch.Tensor.contiguous, lambda t: t.t().contiguous().t()], ids=["", "rows", "columns"]
)
def test_gradients_and_state_may_lie_otherwise(parameter, kind, load):
    gradients = [numbers(4, 3, seed=1), numbers(3, 4, seed=2).t(), numbers(4, 6, seed=3)[:, ::2]]
    plain, chosen = (steps(nn.Parameter(parameter()), gradients, chooses, kind, load) for chooses in (False, True))
    torch.testing.assert_close(chosen, plain)


def by_hand():
    """Gradients that the script assigns to shards."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from shardkit.optim.stepping import stepper_of

    model = nn.Linear(3, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(numbers(4, 3))
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=0.1)
    stepper = stepper_of(optimizer)
    for gradient in (numbers(4, 3, seed=1), numbers(3, 4, seed=2).t(), numbers(4, 6, seed=3)[:, ::2]):
        weight = model.weight
        part = gradient[weight.device_mesh.get_local_rank() * 2 :][:2]
        weight.grad = DTensor.from_local(part, weight.device_mesh, weight.placements)
        stepper.step()
    return checkpoints.full(model.weight).detach()


def test_gradients_of_shards_may_lie_otherwise(ranks):
    gradients = [numbers(4, 3, seed=1), numbers(3, 4, seed=2).t(), numbers(4, 6, seed=3)[:, ::2]]
    expected = steps(nn.Parameter(numbers(4, 3)), gradients, chooses=False)
    for found in ranks.run(2, by_hand):
        torch.testing.assert_close(found, expected)


def test_a_loaded_state_lies_as_its_parameter(tmp_path):
    def built(seed):
        model = nn.ParameterDict({"weight": nn.Parameter(numbers(3, 4, seed=seed).t())})
        optimizer = AdamW(model.parameters(), lr=0.1)
        choose_kernels(optimizer)
        return Live([model], [optimizer])

    def step(live, seed):
        live.models[0]["weight"].grad = numbers(4, 3, seed=seed)
        live.optimizers[0].step()
        return live.models[0]["weight"].detach().clone()

    live, found = built(1), built(2)
    step(live, 3)
    checkpoints.save(live, tmp_path / "c")
    checkpoints.load(found, tmp_path / "c")
    row = found.optimizers[0].state[found.models[0]["weight"]]
    assert row["exp_avg"].stride() == found.models[0]["weight"].stride()
    torch.testing.assert_close(step(found, 4), step(live, 4))


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_parameters_may_be_laid_out_anew_between_steps(kind):
    found = []
    for chooses in (False, True):
        model = nn.Conv2d(3, 4, 2, bias=False)
        with torch.no_grad():
            model.weight.copy_(numbers(4, 3, 2, 2))
        optimizer = kind(model.parameters(), lr=0.1, amsgrad=True)
        if chooses:
            choose_kernels(optimizer)
        for number, layout in enumerate([torch.contiguous_format, torch.channels_last, torch.contiguous_format]):
            model.to(memory_format=layout)
            for seed in range(2):
                model(numbers(2, 3, 4, 4, seed=10 * number + seed)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(model.weight.detach())
    torch.testing.assert_close(*found)
