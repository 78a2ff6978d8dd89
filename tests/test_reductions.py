"""Penalties on sharded weights, and numbers of them, are those of whole tensors: values and gradients."""

import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shardkit import Accelerator
from tests import loops
from tests.loops.net import Net, loss_of
from tests.loops.run import RanksRun, Run, whole


def eye_like(square: torch.Tensor) -> torch.Tensor:
    """As PEFT's AdaLoRA makes it."""
    return torch.eye(*square.shape, out=torch.empty_like(square))


PENALTIES: dict[str, Any] = {
    "mse": F.mse_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "soft margin": F.soft_margin_loss,
    "cross entropy": lambda p, old: F.binary_cross_entropy(p.sigmoid(), old.sigmoid()),
    "cross entropy of logits": lambda p, old: F.binary_cross_entropy_with_logits(p, old.sigmoid()),
    "summed mse": lambda p, old: F.mse_loss(p, old, reduction="sum"),
    "sum": lambda p, old: p.sum(),
    "variance": lambda p, old: (p - old).var(),
    "a row": lambda p, old: p[0].square().mean(),
    "differences of rows": lambda p, old: p.diff(dim=0).abs().mean(),
    "largest value": lambda p, old: (p - old).norm(float("inf")),
    "sorted": lambda p, old: (p.sort(0).values * old).mean(),
    "norms of columns": lambda p, old: p.norm(dim=0).sum().square(),
    "norms of columns, one part": lambda p, old: p.norm(dim=0).view(1, 7)[:, :3].sum().square(),
    "a part of rows": lambda p, old: p.chunk(3)[0].norm(),
    "a part of columns": lambda p, old: p.split(2, 1)[1].square().sum(),
    "distance of columns from orthogonal ones": lambda p, old: (p.T @ p - eye_like(p.T @ p)).norm(),
}
NUMBERS: dict[str, Any] = {
    "an answer": lambda p: (p > -9).any().float() + 1,
    "answers of columns": lambda p: (p > 0).all(0).float().sum() + 1,
    "sum of numbers in a plain tensor": lambda p: torch.ones(()).add_(p.norm()).mul_(p.abs().sum()).sub_(p.sum()),
    "number as text": lambda p: torch.tensor(float(f"{p.norm():.6f}")),
    "quotient by a sum": lambda p: p[0, 0] / p.abs().sum(),
    "mean of norms": lambda p: p.norm(dim=0).mean(),
    "sum of norms": lambda p: p.norm(dim=0).sum(),
    "sum of norms, halved": lambda p: (p.norm(dim=0) / 2).sum(),
    "running sums of columns": lambda p: (p.cumsum(-2) * p).sum(),
    "closeness": lambda p: torch.tensor(float(torch.allclose(p, p + 1e-9)) + 2 * float(torch.allclose(p, p + 1))),
    "values written into a new tensor like a product": lambda p: torch.empty_like(p.T @ p).fill_(2).sum(),
    "values written into a new tensor of its size": lambda p: (p.T @ p).new_empty(7, 7).fill_(2).sum(),
    "norms in one tensor": lambda p: torch.cat([p.norm().view(1), p.norm().view(1)]).sum(),
    "mean and norm in one tensor": lambda p: torch.stack([p.mean(), p.norm()]).square().sum(),
    "means and norms of columns in one tensor": lambda p: torch.stack([p.mean(0), p.norm(dim=0)]).square().sum(),
    "smallest and largest in one tensor": lambda p: torch.cat([p.min().view(1), p.max().view(1)]).sum(),
}
if torch.__version__ >= "2.13":  # the oldest lacks these
    NUMBERS["running products of columns"] = lambda p: (p.cumprod(-2) * p).sum()
    NUMBERS["running sums of exponentials"] = lambda p: (p.logcumsumexp(-2) * p).sum()
EXTREMES: dict[str, Any] = {
    "largest": lambda p: p.max(),
    "smallest": lambda p: p.min(),
    "largest of all": lambda p: p.amax(),
    "smallest of a row": lambda p: p.amin(1).sum(),
    "largest of columns": lambda p: p.max(0).values.sum(),
    "smallest of rows": lambda p: p.min(1).values.sum(),
    "both": lambda p: p.aminmax().max,
    "place of the largest": lambda p: p.argmax() * p.sum(),
    "places of the smallest": lambda p: (p.argmin(0) * p[0]).sum(),
    "places, counted from the end": lambda p: (p.argmax(-2) * p[0]).sum(),
    "place in a row": lambda p: (p.argmax(1, keepdim=True) * p).sum(),
    "largest magnitude": lambda p: p.norm(float("inf")),
    "norm": lambda p: p.norm(),
}


def results(run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    model = run.prepare(Net())
    weight = run.unwrap(model).head.weight  # 11 rows: no number of ranks divides them
    old = weight.detach().clone() * 0.9 + 0.01
    found = {name: float(whole(number(weight))) for name, number in NUMBERS.items()}
    for name, penalty in PENALTIES.items():
        try:
            for number in range(2):  # the second adds to the first
                value = penalty(weight, old)
                run.backward(loss_of(model, run.batch(number)) + value)
        except (NotImplementedError, RuntimeError) as error:
            # torch 2.11 and 2.12 lack some of these operators on sharded tensors.
            if torch.__version__ >= "2.13" or not re.search("no.* sharding strategy|got mixed", str(error)):
                raise
            model.zero_grad()
            continue
        found[name] = [float(whole(value)), *whole(weight.grad).flatten().tolist()]
        model.zero_grad()
    return found


def on_ranks(strategy: int) -> dict[str, Any]:
    return results(RanksRun(accelerator=Accelerator(config=loops.config_of(strategy, loops.LOOPS["usual"]))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "strategy"),
    [(2, 1), (3, 2), (4, 4)],
)
def test_penalties_and_numbers_are_those_of_whole_tensors(ranks, world, strategy):
    expected = results(Run())
    for found in ranks.run(world, on_ranks, strategy):
        assert set(found) == set(expected) or torch.__version__ < "2.13"
        for name, values in found.items():
            assert values == pytest.approx(expected[name], abs=1e-5), name


def extremes_of_one_row(run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(7, 1)
    model = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))[0]
    weight, found = run.unwrap(model).weight, {}
    for name, extreme in EXTREMES.items():
        value = extreme(weight)
        found[name] = [float(whole(value))]
        try:
            run.backward(value)
            found[name] += whole(weight.grad).flatten().tolist()
        except RuntimeError as error:  # torch 2.11 lacks the gradients of two
            if torch.__version__ >= "2.13" or not re.search("aminmax|got mixed", str(error)):
                raise
        model.zero_grad()
    return found


def of_one_row_on_ranks() -> dict[str, Any]:
    fsdp = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": fsdp})
    return extremes_of_one_row(RanksRun(accelerator=accelerator))


@pytest.mark.slow
def test_extremes_of_a_tensor_of_which_a_rank_has_no_part(ranks):
    """That rank alone would raise, and the others would wait."""
    expected = extremes_of_one_row(Run())
    for found in ranks.run(2, of_one_row_on_ranks):
        for name, values in found.items():
            assert values == pytest.approx(expected[name][: len(values)], abs=1e-6), name
            assert len(values) == len(expected[name]) or torch.__version__ < "2.13"


IN_INFERENCE_MODE: dict[str, Any] = {
    "number": lambda p: p.norm().item(),
    "number of a sum": lambda p: float((p * 2).sum()),
    "answer": lambda p: float(bool(p.sum() > 0)),
    "last of all in a row": lambda p: whole(p.flatten())[-1],
    "last of all": lambda p: whole(p.detach().ravel())[-1],
    "quantile": lambda p: whole((p + 0).quantile(0.3)),
    "unit vectors": lambda p: whole(F.normalize(p, dim=0)).abs().sum(),
    "half of it": lambda p: whole(F.mse_loss(p, p * 0.5)),
    "of two in a row": lambda p: whole(torch.vstack([p, p])).abs().sum(),
}


def of_an_evaluation() -> list[float]:
    torch.manual_seed(0)
    weight = Accelerator(config=loops.config_of(1, loops.LOOPS["usual"])).prepare(Net()).head.weight
    with torch.inference_mode():
        return [float(number(weight)) for number in IN_INFERENCE_MODE.values()]


def test_numbers_in_inference_mode(ranks):
    """torch hands DTensor other operators there."""
    torch.manual_seed(0)
    weight = Net().head.weight.detach()
    expected = [float(number(weight)) for number in IN_INFERENCE_MODE.values()]
    for found in ranks.run(2, of_an_evaluation):
        assert found == pytest.approx(expected, abs=1e-6)
