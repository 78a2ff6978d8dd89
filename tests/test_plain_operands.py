"""Plain tensors beside sharded ones give what one process gives: a copy of the model from before `prepare` (averages,
targets, weights to stay close to), masks, and the gradients of losses that contain them."""

import copy
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from shardkit import Accelerator
from shardkit.distributed import named_barrier
from shardkit.distributed.tensors import is_dtensor
from shardkit.errors import UsageError
from tests import loops
from tests.loops.net import Net, loss_of
from tests.loops.run import RanksRun, Run, whole


class ScaledNet(Net):
    """With a parameter of one element, and one without dims, which FSDP does not shard."""

    def __init__(self):
        super().__init__()
        self.scale, self.gain = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale * self.gain


def assign(target, values):
    target.data = values


def lerp_each(averages, parameters):
    torch._foreach_lerp_(averages, parameters, 0.1)


def add_each(averages, parameters):
    torch._foreach_mul_(averages, 0.9)
    torch._foreach_add_(averages, parameters, alpha=0.1)


def elastic(old, p):
    difference = 0.1 * (p.data - old.data)
    p.data.sub_(difference)
    old.data.add_(difference)


def prune(old, p):
    mask = torch.ones_like(old)
    mask[p.abs() < 0.1] = 0
    p.mul_(mask).mul_(old.abs() < p)
    old.masked_fill_(p > 0, 0.5)


def prune_where_both_agree(old, p):
    mask = old > 0
    mask &= p.abs() > 0.1
    other = p > -0.5
    other |= old > 0.2
    p.mul_(mask).mul_(other)


def keep_largest(old, p):
    p.copy_(old * (p.abs() > torch.quantile(p.abs().flatten(), 0.3)))


def swap(old, p):
    kept = old.data.clone()
    old.data.copy_(p.data)
    p.data.copy_(kept)


def vector_of(old):
    return parameters_to_vector(old.parameters())


def task_vector(old, model):
    tasks = {name: value - old.state_dict()[name] for name, value in model.state_dict().items()}
    model.load_state_dict({name: old.state_dict()[name] + 0.5 * value for name, value in tasks.items()})


def averaged(old, model, **average):
    averages = AveragedModel(old, **average)
    for _ in range(2):
        averages.update_parameters(model)
    old.load_state_dict(averages.module.state_dict())


CHANGES: dict[str, Any] = {
    "average, added": lambda old, p: old.mul_(0.9).add_(p, alpha=0.1),
    "average, between": lambda old, p: old.lerp_(p, 0.1),
    "average, by differences": lambda old, p: old.sub_(0.1 * (old - p)),
    "average, copied": lambda old, p: old.copy_(0.9 * old + 0.1 * p),
    "average, assigned": lambda old, p: assign(old, 0.9 * old.data + 0.1 * p.data),
    "average, into out": lambda old, p: torch.add(old.mul_(0.9), p, alpha=0.1, out=old),
    "average of both, into out": lambda old, p: torch.lerp(p, old, 0.5, out=p),
    "largest, into out": lambda old, p: torch.maximum(old, p, out=old),
    "average of magnitudes": lambda old, p: old.copy_(torch.maximum(old, p.abs())),
    "average of squares": lambda old, p: old.mul_(0.9).addcmul_(p, p, value=0.1),
    "copy": lambda old, p: old.copy_(p),
    "copy of data": lambda old, p: old.data.copy_(p.data),
    "assigned copy": lambda old, p: assign(old, p.data.clone()),
    "back": lambda old, p: p.copy_(old),
    "half way": lambda old, p: p.copy_(0.5 * old + 0.5 * p),
    "half way, assigned": lambda old, p: assign(p, torch.lerp(p.data, old.data, 0.5)),
    "elastic": elastic,
    "swap": swap,
    "mask": lambda old, p: p.mul_(old.abs() > 0.1),
    "mask, assigned": lambda old, p: assign(p, p.data * (old.abs() > 0.1).float()),
    "mask of rows": lambda old, p: p.mul_((old.sum(-1, keepdim=True) > 0).float()),
    "mask, filled": lambda old, p: p.copy_(p.masked_fill(old.abs() < 0.1, 0.0)),
    "mask, chosen": lambda old, p: p.copy_(torch.where(old.abs() < 0.1, torch.zeros_like(p), p)),
    "mask, chosen from both": lambda old, p: p.copy_(torch.where(old > p, old, p)),
    "mask of sharded values": prune,
    "mask, changed in place": prune_where_both_agree,
    "mask of the largest": keep_largest,
    "clamp": lambda old, p: p.copy_(torch.clamp(p, min=old - 0.01, max=old + 0.01)),
}
CHANGES_OF_MODELS: dict[str, Any] = {
    "load": lambda old, model: old.load_state_dict(model.state_dict()),
    "load of averages": lambda old, model: old.load_state_dict(
        {name: 0.9 * value + 0.1 * model.state_dict()[name] for name, value in old.state_dict().items()}
    ),
    "task vector": task_vector,
    "averages of lists": lambda old, model: lerp_each([*old.parameters()], [*model.parameters()]),
    "sums of lists": lambda old, model: add_each([*old.parameters()], [*model.parameters()]),
    "AveragedModel": averaged,
    "AveragedModel, one by one": lambda old, model: averaged(old, model, avg_fn=get_ema_avg_fn(0.9)),
    "AveragedModel, at once": lambda old, model: averaged(old, model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
}
NUMBERS: dict[str, Any] = {
    "distance": lambda old, p: (p - old).norm().item(),
    "distance, from the copy": lambda old, p: (old - p).square().sum().item(),
    "dist": lambda old, p: torch.dist(p, old).item(),
    "largest difference": lambda old, p: (p - old).abs().max().item(),
    "mse": lambda old, p: F.mse_loss(p, old).item(),
    "l1": lambda old, p: F.l1_loss(p, old, reduction="sum").item(),
    "product": lambda old, p: (old * p).sum().item(),
    "dot": lambda old, p: torch.dot(p.flatten(), old.flatten()).item(),
    "cosine": lambda old, p: F.cosine_similarity(p.flatten(), old.flatten(), dim=0).item(),
    "quotients": lambda old, p: (p / (old.abs() + 1)).sum().item() + ((old + 1) / (p.abs() + 1)).sum().item(),
    "divergence": lambda old, p: F.kl_div(p.log_softmax(-1), old.softmax(-1), reduction="sum").item(),
    "distance of several": lambda old, p: (torch.stack([old, 2 * old]) - p).square().sum().item(),
    "scaled by a norm": lambda old, p: (old * p.norm()).sum().item(),
    "chosen": lambda old, p: old[p > 0].sum().item(),
    "equal": lambda old, p: float(torch.equal(p, old)) + 2 * float(torch.equal(old, old + p - p)),
    "close": lambda old, p: float(torch.allclose(p, old)) + 2 * float((p == old).all()),
    "larger": lambda old, p: float((p > old).sum()) + float((old >= p).sum()),
}
PENALTIES: dict[str, Any] = {
    "squares": lambda old, p: (p - old).square().sum(),
    "squares, from the copy": lambda old, p: (old - p).pow(2).sum(),
    "weighted squares": lambda old, p: (old.square() * (p - old) ** 2).sum(),
    "norm": lambda old, p: (p - old).norm(),
    "magnitudes": lambda old, p: (p - old).abs().mean(),
    "mse": lambda old, p: F.mse_loss(p, old),
    "masked": lambda old, p: (p * (old > 0)).square().sum(),
    "chosen": lambda old, p: torch.where(old > 0, p, old).square().sum(),
    "larger": lambda old, p: torch.maximum(p, old).sum(),
    "quotients": lambda old, p: (p / (old.abs() + 1)).sum(),
    "product": lambda old, p: torch.dot(p.flatten(), old.flatten()),
    "squares of several": lambda old, p: (p - torch.stack([old, 2 * old])).square().sum(),
    "divergence": lambda old, p: kl_divergence(Normal(p, 1.0), Normal(old, 1.0)).sum(),
}
PENALTIES_OF_MODELS: dict[str, Any] = {
    "vector": lambda old, model: (parameters_to_vector(model.parameters()) - vector_of(old)).norm().square(),
}


def results(run: Run) -> dict[str, list[float]]:
    """{use: what it gave, and the weights of the model and its copy after it}."""
    torch.manual_seed(0)
    model = ScaledNet()
    copied = copy.deepcopy(model).requires_grad_(False).to(run.device)
    model = run.prepare(model)
    inner, found = run.unwrap(model), {}
    start = {name: whole(value).clone() for name, value in inner.state_dict().items()}

    def reset() -> None:
        copied.load_state_dict(start)
        inner.load_state_dict({name: 1.1 * value + 0.01 for name, value in start.items()})

    def pairs() -> list[tuple[Any, Any]]:
        return list(zip(copied.parameters(), inner.parameters(), strict=True))

    with torch.no_grad():
        for name, change in (CHANGES | CHANGES_OF_MODELS).items():
            reset()
            for operands in pairs() if name in CHANGES else [(copied, inner)]:
                change(*operands)
            found[name] = joined([*inner.parameters(), *copied.parameters()])
        reset()
        for name, number in NUMBERS.items():
            found[name] = [number(old, p) for old, p in pairs()]
    with torch.inference_mode():
        found["inference mode"] = [number(old, p) for number in NUMBERS.values() for old, p in pairs()]
    for name, penalty in (PENALTIES | PENALTIES_OF_MODELS).items():
        for number in range(2):
            operands = pairs() if name in PENALTIES else [(copied, inner)]
            run.backward(loss_of(model, run.batch(number)) + sum(penalty(old, p) for old, p in operands))
        found[f"penalty: {name}"] = joined([p.grad for p in inner.parameters()])
        model.zero_grad()
    copied.requires_grad_(True)
    for number in range(2):
        tokens = torch.ones(2, 6, dtype=torch.long, device=run.device)
        loss = loss_of(model, run.batch(number)) + loss_of(copied, tokens)
        run.backward(loss + sum((p - old).square().sum() + (old * p).mean() for old, p in pairs()))
    assert not any(is_dtensor(old.grad) for old in copied.parameters())
    found["copy that needs a gradient"] = joined([p.grad for p in (*inner.parameters(), *copied.parameters())])
    return found


class Layers(torch.nn.Module):
    """One of each kind that multiplies its input with a weight."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv1d(6, 3, 2), torch.nn.GroupNorm(1, 3)
        self.linear, self.last_norm, self.table = (
            torch.nn.Linear(3, 7),
            torch.nn.LayerNorm(7),
            torch.nn.Embedding(11, 7),
        )

    def forward(self, x, tokens):
        return self.last_norm(self.linear(self.norm(self.conv(x)).mean(-1))) * self.table(tokens).sum(1)


PRODUCTS: dict[str, Any] = {
    "similarities": lambda x, w: x @ w.T,
    "a row": lambda x, w: x @ w[0],
    "linear": lambda x, w: F.linear(x, w, w[:, 0]),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "distances": lambda x, w: torch.cdist(x, w),
    "rows": lambda x, w: F.embedding(x.argmax(-1) % 3, w),
}


def products(run: Run) -> list[float]:
    """Of samples with sharded weights: in a plain copy that holds them, and one by one."""
    torch.manual_seed(0)
    model = Layers()
    copied = copy.deepcopy(model)
    model = run.unwrap(run.prepare(model))
    copied.load_state_dict(model.state_dict(), assign=True)
    samples = run.draw(1, 6, 5), run.batch(1)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            run.see_mean(copied(*samples).square().mean())
            for product in PRODUCTS.values():
                run.see_mean(product(run.draw(2, 7), model.table.weight).square().mean())
    copied.requires_grad_(False)
    needing = samples[0].requires_grad_()
    (gradient,) = torch.autograd.grad(copied(*samples).square().sum(), needing)
    run.see_mean(gradient.square().mean())
    with torch.no_grad():  # a factor that is equal on all ranks
        weight = model.linear.weight
        weight.copy_((torch.eye(7) + 0.1) @ weight)
        weight.data = weight @ torch.ones(3, 3)
    run.see(weight.square().sum())
    return run.seen


def products_on_ranks(strategy: int) -> list[float]:
    loop = loops.run.Loop(products, fsdp=loops.run.BY_SIZE)
    return products(RanksRun(accelerator=Accelerator(config=loops.config_of(strategy, loop))))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), [(2, 1), (3, 2), (4, 4), (2, 3)])
def test_products_of_samples_with_sharded_weights(ranks, world, strategy):
    expected = products(Run())
    for found in ranks.run(world, products_on_ranks, strategy):
        assert found == pytest.approx(expected, rel=1e-4)


def train_by_products() -> list[str]:
    _, model = sharded(torch.nn.Linear(4, 3))
    texts = []
    for product in (lambda x, w: x @ w.T, lambda x, w: torch.cdist(x, w)):
        with pytest.raises(UsageError) as found:
            product(torch.ones(2, 4), model.weight)
        texts.append(str(found.value))
    with pytest.raises(UsageError):
        torch.mv(torch.ones(2, 4, requires_grad=True), model.requires_grad_(False).weight[0])
    return texts


def test_products_that_would_be_trained_are_refused(ranks):
    for product, distance in ranks.run(2, train_by_products):
        assert "cannot be trained" in product and "shape (4, 3) in aten::mm)" in product
        assert "shape (3, 4) in aten::_cdist_forward)" in distance and "parameter.full_tensor()" in distance


def joined(tensors: list[torch.Tensor]) -> list[float]:
    return torch.cat([whole(tensor.detach()).flatten() for tensor in tensors]).tolist()


def on_ranks(strategy: int, loop: str) -> dict[str, list[float]]:
    return results(RanksRun(accelerator=Accelerator(config=loops.config_of(strategy, loops.LOOPS[loop]))))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), [(2, 1), (3, 2), (4, 4), (2, 3)])
def test_plain_operands_count_as_equal_on_all_ranks(ranks, world, strategy):
    expected = results(Run())
    for found in ranks.run(world, on_ranks, strategy, "usual"):
        assert set(found) == set(expected)
        for name, values in found.items():
            difference = (torch.tensor(values) - torch.tensor(expected[name])).abs().max().item()
            assert difference < 3e-5, name


def sharded(model: torch.nn.Module) -> tuple[Accelerator, Any]:
    fsdp = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    accelerator = Accelerator(config={"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": fsdp})
    return accelerator, accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]


LOSSES_OF_OWN_SAMPLES: dict[str, Any] = {
    "aten::index.Tensor": lambda table, rank: table[torch.arange(4) + rank].square().sum(),
    "aten::mul.Tensor": lambda weights, rank: ((torch.arange(4.0) + rank) * weights.exp()).sum(),
    "aten::add.Tensor": lambda weights, rank: (torch.full((4,), 1 + rank * 1j) + weights).abs().sum(),
}


def lose_of_own_samples(operator: str, shape: tuple[int, ...]) -> str:
    accelerator, weights = sharded(torch.nn.ParameterList([torch.zeros(shape)]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "double", None)  # as on a device that has no fp64
        with pytest.raises(UsageError) as found:
            accelerator.backward(LOSSES_OF_OWN_SAMPLES[operator](weights[0], accelerator.process_index))
    return str(found.value)


@pytest.mark.parametrize(
    ("operator", "shape"), [("aten::index.Tensor", (8, 3)), ("aten::mul.Tensor", (4,)), ("aten::add.Tensor", (4,))]
)
def test_values_of_own_samples_are_refused_in_a_loss(ranks, operator, shape):
    for text in ranks.run(2, lose_of_own_samples, operator, shape):
        assert "differs between" in text
        assert f"shape (4,) in {operator}" in text


def multiply_own_samples() -> str:
    accelerator, norm = sharded(torch.nn.LayerNorm(4))
    with torch.no_grad():
        for _ in range(3):
            assert (torch.zeros(2, 4) * norm.weight).shape == (2, 4)
        with pytest.raises(UsageError) as found:
            (torch.ones(2, 4) * accelerator.process_index) * norm.weight
    return str(found.value)


def test_samples_are_refused_without_a_gradient_too(ranks):
    for text in ranks.run(2, multiply_own_samples):
        assert "shape (2, 4) in aten::mul.Tensor" in text


PENALIZED: dict[str, Any] = {
    "add": lambda loss, penalty: loss + 0.1 * penalty,
    "add, swapped": lambda loss, penalty: penalty + loss,
    "sub": lambda loss, penalty: loss - penalty,
    "mul": lambda loss, penalty: loss * penalty.sqrt(),
    "div": lambda loss, penalty: loss / penalty,
    "in place": lambda loss, penalty: loss.clone().add_(penalty),
    "stack": lambda loss, penalty: torch.stack([loss, penalty]).sum(),
    "where": lambda loss, penalty: torch.where(loss > 1, loss, penalty),
}


def evaluate_with_a_penalty(kind: str) -> tuple[float, float]:
    """Of this rank's loss, in an evaluation, and of the whole weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    weight = model.weight.detach().clone()
    accelerator, model = sharded(model)
    loss = torch.tensor(1.0 + accelerator.process_index)
    with torch.no_grad():
        found, alone = (PENALIZED[kind](loss, one.square().sum()) for one in (model.weight, weight))
    return found.item(), alone.item()


@pytest.mark.parametrize("kind", PENALIZED)
def test_a_rank_adds_a_penalty_to_the_loss_of_its_own_samples_in_an_evaluation(ranks, kind):
    for found, alone in ranks.run(2, evaluate_with_a_penalty, kind):
        assert found == pytest.approx(alone)


def average_on_rank_0() -> str:
    model = torch.nn.Linear(3, 2)
    average = copy.deepcopy(model).requires_grad_(False)
    accelerator, model = sharded(model)
    if not accelerator.is_main_process:
        return ""
    named_barrier.IN_STEP_S, found_s = 0.5, named_barrier.IN_STEP_S
    try:
        with pytest.raises(UsageError) as found, torch.no_grad():
            average.weight.lerp_(model.weight, 0.1)
    finally:
        named_barrier.IN_STEP_S = found_s
    return str(found.value)


@pytest.mark.slow
def test_an_average_of_the_main_process_alone_is_refused(ranks):
    text = ranks.run(2, average_on_rank_0)[0]
    assert text.startswith("plain.lerp_(sharded): rank 1 has not come after")
    assert "outside of `if accelerator.is_main_process`" in text
