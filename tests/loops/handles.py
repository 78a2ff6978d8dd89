"""Scripts that go on with what they had before prepare, or set something on what prepare returned."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from shardkit.distributed.collectives import broadcast_object_list
from tests.loops.net import Net, adam, evaluate, loss_of, started, train
from tests.loops.run import WORDS, Run, loop, whole

SHARDED = (1, 2, 4, 5)


@loop()
def numbers_of_weights_and_gradients(run: Run) -> None:
    """Logged, compared and added up as numbers, with torch's words alone."""
    model, optimizer = started(run)
    for step in range(2):
        run.backward(loss_of(model, run.batch(step)))
        for p in model.parameters():
            gradient: Any = p.grad
            run.seen += [gradient.data.norm(2).item(), float(gradient.abs().max()), float((gradient != 0).sum())]
            p = p.detach()
            run.seen += [p.min().item(), p.mean().item(), p.std().item(), float(p.sum())]
            run.seen += [float(bool(p.norm() > 1.5)), float(bool(torch.isnan(gradient).any()))]
        run.seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        run.step(optimizer)


class Tempered(Net):
    temperature = 1.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.temperature


class Strong(torch.optim.SGD):
    strength = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.strength)
        return super().step(closure)


@loop()
def attributes_set_in_training(run: Run) -> None:
    """On the model, its optimizer and its schedule; what was not there before, too."""
    torch.manual_seed(0)
    model: Any = Tempered()
    optimizer: Any = Strong(model.parameters(), lr=0.1)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    for step in range(6):
        model.temperature, model.note = 1.0 + step, step
        optimizer.strength = 0.5 * step
        if step == 3:
            schedule.base_lrs = [0.01]
            run.unwrap(model).embed.requires_grad_(False)  # DDP begins anew
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.seen += [optimizer.param_groups[0]["lr"], run.unwrap(model).note]
        run.step(optimizer)
        schedule.step()
        run.see_mean(loss)


@loop()
def the_name_from_before(run: Run) -> None:
    """prepare is called by the old names, twice, and what it returns is not always used."""
    net = Net()
    run.prepare(net)
    run.models.clear()
    model = run.prepare(net)
    run.models.clear()
    torch.manual_seed(5)
    model.load_state_dict(Net().state_dict(), strict=False)
    optimizer = adam(net.parameters())
    run.prepare(net, optimizer)
    model.to(run.device)
    train(run, net, optimizer)
    net.float().to(run.device)
    train(run, model, optimizer, 10)


@loop()
def parameters_from_before_added_later(run: Run) -> None:
    model = Net()
    head, rest = list(model.head.parameters()), [p for name, p in model.named_parameters() if "head" not in name]
    model, optimizer = run.prepare(model, adam(rest))
    train(run, model, optimizer)
    optimizer.add_param_group({"params": head, "lr": 0.05})
    train(run, model, optimizer, 10)


def scaled_by_hand(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """torch's GradScaler: a fused kernel gets the scale by attributes of the optimizer."""
    scaler = torch.amp.GradScaler(run.device.type, init_scale=1024.0)
    for step in range(run.steps):
        optimizer.zero_grad()
        loss = loss_of(model, run.batch(step))
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        run.see_mean(loss)
        run.seen.append(scaler.get_scale())


@loop()
def a_scaler_of_the_script(run: Run) -> None:
    model = Net()
    scaled_by_hand(run, *run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True)))


@loop()
def a_scaler_of_the_script_with_adam(run: Run) -> None:
    model = Net()
    scaled_by_hand(run, *run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, fused=True)))


@loop(refused=dict.fromkeys(SHARDED, "model.to: a sharded model keeps its dtype"), refused_alone=True)
def another_dtype_after_prepare(run: Run) -> None:
    model = run.prepare(Net())
    model.double()
    train(run, model, run.prepare(adam(model.parameters())))


@loop(refused=dict.fromkeys(SHARDED, "parameter.register_hook: would never run"), refused_alone=True)
def hooks_on_gradients_after_prepare(run: Run) -> None:
    model, optimizer = started(run)
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient * 3)
    train(run, model, optimizer)


@loop(refused={3: "has a post-accumulate-grad hook, which would run before its gradient is averaged"})
def optimizers_in_backward(run: Run) -> None:
    """A step for each parameter as soon as it has its gradient."""
    model = run.prepare(Net())
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.see_mean(loss)


@loop(
    accumulation=2, refused=dict.fromkeys((*SHARDED, 3), "in the middle of an accumulation window"), refused_alone=True
)
def the_optimizer_from_before_in_windows(run: Run) -> None:
    """It would step in each micro-batch."""
    model = Net()
    optimizer = adam(model.parameters())
    model, _ = run.prepare(model, optimizer)
    for micro in range(4):
        with run.accumulate(model):
            run.backward(loss_of(model, run.batch(micro)))
            run.step(optimizer)


@loop()
def rows_written(run: Run) -> None:
    """The padding's row is kept at zero, some rows are frozen, others are set."""
    model, optimizer = started(run)
    inner: Any = run.unwrap(model)
    began = inner.head.weight.detach().clone()
    for step in range(3):
        run.backward(loss_of(model, run.batch(step)))
        inner.embed.weight.grad[1:3].zero_()
        inner.head.weight.grad[:2] = 0
        inner.head.bias.grad[-1] *= 0.5
        run.step(optimizer)
        with torch.no_grad():
            inner.embed.weight[0].zero_()
            inner.embed.weight[-1] = 0.25
            inner.embed.weight[3:9:2].mul_(0.9).add_(0.01)
            inner.embed.weight[4].copy_(inner.embed.weight[5] * 2)
            inner.head.weight[4:6] = began[4:6]
            inner.head.weight.data[7] = torch.arange(7.0) / 7
            inner.head.weight[:, 1] = 0.1
            inner.head.weight[:, 3].copy_(torch.tensor(0.3, device=run.device).expand(WORDS))  # `= 0.3` on some devices
            inner.parts[0].up.weight.split(5)[1].clamp_(-0.1, 0.1)
            nn.init.constant_(inner.parts[1].up.bias[:3], 0.2)
            torch.manual_seed(step)
            inner.parts[1].up.weight[2:5].normal_()
        row = inner.embed.weight.detach()[2].clone()
        run.see(row.zero_().sum() + inner.embed.weight.detach()[2].sum())


@loop()
def rows_chosen_by_tensors(run: Run) -> None:
    """Textual inversion: only the new tokens are trained, and the others set back; rows by masks and by numbers."""
    model, optimizer = started(run)
    inner: Any = run.unwrap(model)
    is_new = torch.arange(WORDS, device=run.device) >= WORDS - 4
    some = torch.tensor([6, 0, 3], device=run.device)
    began = inner.embed.weight.data.clone()
    for step in range(3):
        tokens = run.batch(step)
        loss = loss_of(model, tokens)
        if step == 1:
            loss = loss + inner.embed.weight[some].pow(2).sum() + 0.1 * inner.head.weight[is_new].abs().sum()
        run.backward(loss)
        gradient = inner.head.weight.grad
        gradient.data[~is_new, :] = gradient.data[~is_new, :].fill_(0)
        inner.parts[0].up.weight.grad[:, [0, 2]] = 0
        inner.head.bias.grad[some] *= 0.5
        run.step(optimizer)
        with torch.no_grad():
            inner.embed.weight[~is_new] = began[~is_new]
            inner.embed.weight.index_fill_(0, some[1:], 0.25)
            inner.head.weight.index_copy_(0, some, torch.ones(3, 7, device=run.device) / 7)
            inner.head.bias.masked_fill_(is_new, -0.1)
            inner.head.weight[3:9, some.div(2).long()] = 0.2
            inner.head.weight[-1, some[:2]] *= 0.5
            inner.norm.weight[inner.norm.weight > 1] = 0.9
            inner.norm.bias.data[inner.norm.bias.data < 0] *= 0.5
            inner.parts[1].up.bias.index_add_(0, some[1:], torch.ones(2, device=run.device))
        run.see(inner.embed.weight[is_new].detach().sum() + inner.embed.weight.index_select(0, some).detach().norm())


@loop()
def rows_and_elements_one_by_one(run: Run) -> None:
    """`for row in weight`, `unbind`, and what a mask selects, with gradients; rows are written, too."""
    model, optimizer = started(run)
    inner: Any = run.unwrap(model)
    for step in range(2):
        weight = inner.parts[0].up.weight
        loss = loss_of(model, run.batch(step)) + 0.1 * sum(row.norm() for row in weight)
        loss = loss + 0.1 * torch.masked_select(weight, weight.detach() > 0).pow(2).sum()
        run.backward(loss)
        run.step(optimizer)
        with torch.no_grad():
            for row in inner.head.weight.unbind():
                row.div_(row.norm())
            inner.parts[1].down.weight.unbind(1)[2].zero_()
        run.see_mean(loss)
        run.seen += [float(one) for one in inner.head.bias.detach()]
        run.seen += [float(len(weight.detach().clamp(min=0).nonzero()))]


@loop()
def plain_values_in_place(run: Run) -> None:
    """Noise, masks and averages that are whole on all ranks, in gradients and weights."""
    model, optimizer = started(run)
    for step in range(run.steps):
        run.backward(loss_of(model, run.batch(step)))
        drawn = torch.Generator().manual_seed(step)
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=drawn).to(run.device)
            p.grad += 0.01 * noise
            p.grad *= noise > -1
            p.grad /= 1 + noise.abs()
            p.grad.masked_fill_(noise > 1, 0.0).clamp_(min=-noise.abs(), max=noise.abs())
            p.grad.addcmul_(p.grad, noise, value=0.1).addcdiv_(noise, 1 + noise.abs(), value=1e-3)
        run.step(optimizer)
        with torch.no_grad():
            for p in model.parameters():
                average = torch.randn(p.shape, generator=drawn).to(run.device)
                p.lerp_(average, 0.01).sub_(0.01 * average)
                p.data.mul_(average > -1).add_(average, alpha=0.01)
        evaluate(run, model)


@loop(refused=dict.fromkeys(SHARDED, "a part of it is a copy, so writing to this one"), refused_alone=True)
def parts_of_rows_written(run: Run) -> None:
    """Torch's copy of a copy: where it belongs is not known."""
    model, _ = started(run)
    with torch.no_grad():
        run.unwrap(model).embed.weight[2:5][1].zero_()


@loop()
def rows_written_by_way_of_the_whole(run: Run) -> None:
    """As the error of a part of rows says."""
    model, optimizer = started(run)
    for step in range(3):
        run.backward(loss_of(model, run.batch(step)))
        weight = run.unwrap(model).embed.weight
        gradient = whole(weight.grad).clone()
        gradient[1:3] = 0
        if isinstance(weight, DTensor):
            gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements)
        weight.grad = gradient
        run.step(optimizer)
        values = whole(weight).clone()
        values[0] = 0.0
        weight.data = values


@loop()
def state_replaced_by_hand(run: Run) -> None:
    model, optimizer = started(run)
    train(run, model, optimizer)
    optimizer.state = defaultdict(dict)
    optimizer.param_groups = [{**group, "lr": 0.02} for group in optimizer.param_groups]
    train(run, model, optimizer, 10)


@loop(accumulation=2, refused=dict.fromkeys((1, 2, 3, 4, 5), "micro-batches are gone"), refused_alone=True)
def zero_grad_of_the_model_in_windows(run: Run) -> None:
    """It does not wait for the end of the window."""
    model, optimizer = started(run)
    for micro in range(4):
        with run.accumulate(model):
            run.backward(loss_of(model, run.batch(micro)))
            if run.is_step or not run.is_plain:
                optimizer.step()
                model.zero_grad()


class Lookahead(torch.optim.Optimizer):
    """As many are written: around another one, without torch's __init__, and zero_grad takes no argument."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state: Any = defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.data.clone())
            slow += 0.5 * (p.data - slow)
            p.data.copy_(slow)

    def zero_grad(self) -> None:  # type: ignore[override]
        self.optimizer.zero_grad()


@loop()
def zero_grad_without_an_argument(run: Run) -> None:
    model = Net()
    model, optimizer = run.prepare(model, Lookahead(adam(model.parameters())))
    train(run, model, optimizer)


class KeepsZeros(torch.optim.SGD):
    """Weights whose gradients are zero go on by their momentum."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


@loop()
def zero_grad_that_keeps_zeros_by_itself(run: Run) -> None:
    model = Net()
    model, optimizer = run.prepare(model, KeepsZeros(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        optimizer.step()
        run.see_mean(loss)


@loop()
def schedules_and_optimizers_told_apart_by_their_class(run: Run) -> None:
    """Some schedules step with every batch, others once per epoch."""
    for make in (
        lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=30),
        lambda optimizer: StepLR(optimizer, 1, 0.5),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    ):
        model = Net()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, schedule = run.prepare(model, optimizer, make(optimizer))
        for _ in range(2):
            for step in range(run.steps):
                loss = loss_of(model, run.batch(step))
                run.backward(loss)
                run.step(optimizer)
                if isinstance(schedule, OneCycleLR):
                    schedule.step()
            if isinstance(schedule, ReduceLROnPlateau):
                schedule.step(float(run.mean(loss)))
            elif not isinstance(schedule, OneCycleLR):
                schedule.step()
            run.seen.append(optimizer.param_groups[0]["lr"])
        run.seen += [isinstance(optimizer, torch.optim.SGD), isinstance(optimizer, torch.optim.Adam)]


@loop(is_long_run_only=True)
def a_reference_that_takes_the_trained_weights(run: Run) -> None:
    """RLHF: the reference is prepared for evaluation alone, and becomes the policy every other step."""
    policy, reference = Net(), Net().requires_grad_(False)
    if not run.is_plain:
        reference = run.accelerator.prepare_model(reference, evaluation_mode=True)
    policy, optimizer = run.prepare(policy, adam(policy.parameters()))
    for step in range(run.steps):
        with torch.no_grad():
            before = reference(run.batch(step))
        loss = (policy(run.batch(step)) - before).pow(2).mean() + loss_of(policy, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
        if step % 2:
            reference.load_state_dict(policy.state_dict())


@loop()
def a_copy_of_the_prepared_model_trained_beside_it(run: Run) -> None:
    """Adversarial weight perturbation: a copy, prepared too, goes up the loss, and the model trains at its weights."""
    model, optimizer = started(run)
    proxy = copy.deepcopy(model)
    proxy, uphill = run.prepare(proxy, torch.optim.SGD(proxy.parameters(), lr=0.05))
    for step in range(run.steps):
        proxy.load_state_dict(model.state_dict())
        run.backward(-loss_of(proxy, run.batch(step)))
        run.step(uphill)
        moved = [(q - p).detach() for p, q in zip(model.parameters(), proxy.parameters(), strict=True)]
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.add_(by)
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)


@loop()
def gradients_copied(run: Run) -> None:
    """Of earlier steps, by copy.deepcopy: a momentum of the script's own."""
    model, optimizer = started(run)
    before: list[Any] = []
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        kept = [copy.deepcopy(p.grad) for p in model.parameters()]
        for p, old in zip(model.parameters(), before, strict=False):
            p.grad.add_(old, alpha=0.5)
        before = kept
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def the_best_weights_kept_whole(run: Run) -> None:
    """They stay what they were, on the main process, and all ranks load them at the end."""
    model, optimizer = started(run)
    train(run, model, optimizer)
    if run.is_plain:
        best = copy.deepcopy(model.state_dict())
    else:
        best = run.accelerator.get_state_dict(model)
    train(run, model, optimizer, 10)
    if not run.is_plain:
        (best,) = broadcast_object_list([best])
    model.load_state_dict(best)
    train(run, model, optimizer, 20)
