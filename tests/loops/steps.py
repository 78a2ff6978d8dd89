"""Steps: one backward or several, through one model or several, gradients and weights changed in between."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.loops.net import Net, Part, adam, cross_entropy, loss_of, started, train
from tests.loops.run import BATCH, BY_SIZE, WHOLE, Run, loop


@loop()
def usual(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def zero_grad_at_the_start(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        optimizer.zero_grad()
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        optimizer.step()
        run.see_mean(loss)


@loop()
def zero_grad_of_the_model(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        model.zero_grad()
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        optimizer.step()
        run.see_mean(loss)


@loop()
def two_forwards_one_backward(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step)) + 0.5 * loss_of(model, run.batch(step + 100))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def two_forwards_two_backwards(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        first, second = loss_of(model, run.batch(step)), loss_of(model, run.batch(step + 100))
        run.backward(first)
        run.backward(second)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(first + second)


@loop()
def two_losses_of_one_forward(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        logits = model(run.batch(step)[:, :-1])
        loss, other = cross_entropy(logits, run.batch(step)), logits.pow(2).mean()
        run.backward(loss, retain_graph=True)
        run.backward(other)
        run.step(optimizer)
        run.see_mean(loss + other)


@loop()
def losses_of_different_parts(run: Run) -> None:
    """The first loss ends in the middle of the model, the second at its end."""
    model, optimizer = started(run)
    for step in range(run.steps):
        tokens, inner = run.batch(step), run.unwrap(model)
        early = inner.parts[0](inner.embed(tokens)).pow(2).mean()
        run.backward(early)
        late = loss_of(model, tokens)
        run.backward(late)
        run.step(optimizer)
        run.see_mean(early + late)


@loop()
def a_penalty_on_weights(run: Run) -> None:
    """Added to the gradients by hand: weight decay as some scripts write it."""
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(p, alpha=0.1)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def a_penalty_in_the_loss(run: Run) -> None:
    """Of all weights, by their squares; of some, by their size; of the distance to where they began."""
    model, optimizer = started(run)
    inner: Any = run.unwrap(model)
    began = [p.detach().clone() for p in model.parameters()]
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        loss = loss + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
        loss = 2 - (2 - loss - 0.1 * inner.head.weight.abs().mean()).mean(0) / 1.0
        loss = loss + sum((p - old).pow(2).sum() for p, old in zip(model.parameters(), began, strict=True))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop(accumulation=2)
def a_penalty_in_the_loss_of_windows(run: Run) -> None:
    model, optimizer = started(run)
    for micro in range(6):
        with run.accumulate(model):
            loss = loss_of(model, run.batch(micro)) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
            run.backward(loss)
            run.step(optimizer)


@loop()
def noise_and_signs_on_gradients(run: Run) -> None:
    """Gradients changed and replaced between backward and step."""
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        for p in model.parameters():
            p.grad = torch.sign(p.grad) * 0.1 + p.grad.clamp(-0.5, 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def weights_clamped_after_a_step(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        for p in model.parameters():
            p.data.clamp_(-0.3, 0.3)
        run.see_mean(loss)


@loop()
def weights_reset_in_training(run: Run) -> None:
    """A head begun anew in the middle of a run."""
    model, optimizer = started(run)
    train(run, model, optimizer)
    with torch.no_grad():
        run.unwrap(model).head.weight.zero_()
        run.unwrap(model).head.bias.fill_(0.1)
    train(run, model, optimizer, 10)


@loop(fsdp=BY_SIZE)
def gradient_penalty(run: Run) -> None:
    """The gradient of the output by its input is part of the loss, as in WGAN-GP."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))).requires_grad_()
        value = model(x)
        (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        loss = value.mean() + 2.0 * (gradient.norm(dim=1) - 1).pow(2).mean()
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)
        run.see_mean(model(x.detach()).mean())


OF_TORCH_XLA = {"xla": "Checkpointing is not compatible with .grad()"}


@loop(fsdp={**WHOLE, "fsdp_activation_checkpointing": True}, refused=OF_TORCH_XLA)
def gradient_penalty_of_recomputed_blocks(run: Run) -> None:
    _penalized(run)


@loop(fsdp={"fsdp_transformer_layer_cls_to_wrap": "Part", "fsdp_activation_checkpointing": True}, refused=OF_TORCH_XLA)
def gradient_penalty_of_recomputed_units(run: Run) -> None:
    _penalized(run, is_tied=True)


def _penalized(run: Run, is_tied: bool = False) -> None:
    """The penalty's backward reaches operators of a block before the block's output."""
    torch.manual_seed(1)
    first, second = Part(11), Part(11)
    if is_tied:  # the unit around both has it
        first.up.weight = second.up.weight
    model = nn.Sequential(nn.Linear(6, 11), first, second, nn.Linear(11, 1))
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        true = run.batch(step).float() / 11
        between = (true + true.flip(-1)).requires_grad_()
        (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        loss = model(torch.cat([true, true.flip(-1)])).pow(2).mean() + (gradient.norm(dim=1) - 1).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE, refused={3: "shardkit.ddp_find_unused_parameters: true"})
def gradient_penalty_alone(run: Run) -> None:
    model, optimizer = critic(run)
    for step in range(run.steps):
        x = points(run, step)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = gradient.pow(2).sum(1).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
        for parameter in model.parameters():
            assert parameter.grad is None


@loop(fsdp=BY_SIZE, shardkit={"ddp_find_unused_parameters": True})
def gradient_penalty_alone_with_unused(run: Run) -> None:
    gradient_penalty_alone(run)


@loop(fsdp=BY_SIZE, shardkit={"ddp_find_unused_parameters": True})
def gradient_penalty_with_a_backward_of_its_own(run: Run) -> None:
    """The bias of the critic's last layer has a gradient from the first of two backwards only."""
    model, optimizer = critic(run)
    for step in range(run.steps):
        x = points(run, step)
        loss = (model(x.detach()) - 1).pow(2).mean()
        run.backward(loss)
        penalty = penalty_at(x, model)
        run.backward(penalty)
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(loss + penalty)


@loop(fsdp=BY_SIZE, shardkit={"ddp_find_unused_parameters": True})
def gradient_penalty_computed_before_another_backward(run: Run) -> None:
    """Its graph waits while the backward of the loss ends, in every other step for nothing."""
    model, optimizer = critic(run)
    for step in range(run.steps):
        x = points(run, step)
        penalty = penalty_at(x, model)
        loss = (model(x.detach()) - 1).pow(2).mean()
        run.backward(loss)
        if step % 2 == 0:
            run.backward(penalty)
        run.step(optimizer)
        run.see_mean(loss + penalty)


class Skipping(nn.Module):
    """A layer is left out where a call says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        x = self.first(x).tanh()
        return self.last(x if skips else self.middle(x).tanh())


def skipping(run: Run) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = Skipping()
    return run.prepare(model, adam(model.parameters()))


@loop(fsdp=BY_SIZE, shardkit={"ddp_find_unused_parameters": True})
def a_layer_left_out_after_two_backwards(run: Run) -> None:
    model, optimizer = skipping(run)
    for step in range(run.steps):
        output = model(run.draw(step, 5), skips=step % 2 == 1)
        loss, other = output.pow(2).mean(), output.abs().mean()
        run.backward(loss, retain_graph=True)
        run.backward(other)
        run.step(optimizer)
        run.see_mean(loss + other)


@loop(fsdp=BY_SIZE, shardkit={"ddp_find_unused_parameters": True}, accumulation=2)
def a_layer_left_out_after_a_forward_without_backward(run: Run) -> None:
    model, optimizer = skipping(run)
    for micro in range(6):
        with run.accumulate(model):
            loss = model(run.draw(micro, 5), skips=micro != 3).pow(2).mean()
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)
            run.see_mean(model(run.draw(micro + 100, 5)).mean())


def critic(run: Run) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    return run.prepare(model, adam(model.parameters()))


def points(run: Run, step: int) -> torch.Tensor:
    return run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step))).requires_grad_()


def penalty_at(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).pow(2).mean()


@loop()
def gradients_zeroed_by_hand(run: Run) -> None:
    """As optimizers did before they set gradients to None, and those of some libraries do."""
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.detach_()
            parameter.grad.zero_()
        run.see_mean(loss)


@loop(fsdp=BY_SIZE)
def generator_and_critic(run: Run) -> None:
    """Two models and two optimizers that take turns; the critic's gradients from the generator's loss are dropped."""
    torch.manual_seed(2)
    generator = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5))
    critic = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    generator, critic, for_generator, for_critic = run.prepare(
        generator, critic, adam(generator.parameters()), adam(critic.parameters())
    )
    for step in range(run.steps):
        noise = torch.Generator().manual_seed(step)
        z, real = run.part(torch.randn(BATCH, 3, generator=noise)), run.part(torch.randn(BATCH, 5, generator=noise))
        fake = generator(z)
        loss = critic(fake.detach()).mean() - critic(real).mean() + critic(real).pow(2).mean()
        run.backward(loss)
        run.step(for_critic)
        run.see_mean(loss)
        loss = -critic(generator(z)).mean()
        run.backward(loss)
        run.step(for_generator)
        for_critic.zero_grad()
        run.see_mean(loss)


@loop(fsdp=BY_SIZE)
def one_optimizer_for_two_models(run: Run) -> None:
    torch.manual_seed(2)
    first, second = nn.Linear(3, 5), nn.Linear(5, 1)
    first, second, optimizer = run.prepare(
        first, second, adam([{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.1}])
    )
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(step)))
        loss = second(torch.tanh(first(x))).pow(2).mean()
        run.backward(loss)
        run.clip([*first.parameters(), *second.parameters()], 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def two_optimizers_for_one_model(run: Run) -> None:
    model = Net()
    wide = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() == 1]
    model, first, second = run.prepare(model, adam(wide), torch.optim.SGD(flat, lr=0.1, momentum=0.9))
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(first, second)
        run.see_mean(loss)


@loop()
def parameters_of_a_copy_before(run: Run) -> None:
    """A copy that was made before prepare is no part of it."""
    model = Net()
    twin = copy.deepcopy(model).to(run.device)
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        loss = (model(run.batch(step)) - twin(run.batch(step))).pow(2).mean() + loss_of(model, run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def an_optimizer_taken_later(run: Run) -> None:
    """Another optimizer goes on where the first one ends."""
    model, optimizer = started(run)
    train(run, model, optimizer)
    train(run, model, run.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), 10)


@loop()
def the_best_weights_loaded_at_the_end(run: Run) -> None:
    """A state dict of whole tensors, as it comes from a file or from a model that was not prepared."""
    model, optimizer = started(run)
    train(run, model, optimizer)
    torch.manual_seed(5)
    run.unwrap(model).load_state_dict(Net().state_dict())
    train(run, model, optimizer, 10)


@loop(refused=dict.fromkeys((1, 2, 4, 5), "is not the parameter that prepare put there"), refused_alone=True)
def other_values_in_the_place_of_parameters(run: Run) -> None:
    """torch.func.functional_call. DDP and one process compute with the given values."""
    model, _ = started(run)
    inner = run.unwrap(model)
    halves = {name: p.detach() * 0.5 for name, p in inner.named_parameters()}
    tokens = run.batch(0)
    with torch.no_grad():
        run.see_mean(cross_entropy(torch.func.functional_call(inner, halves, (tokens[:, :-1],)), tokens))


@loop(
    refused=dict.fromkeys((1, 2, 4, 5), "change and tie modules before prepare"), refused_alone=True, is_for_shards=True
)
def tied_after_prepare(run: Run) -> None:
    model, _ = started(run)
    inner: Any = run.unwrap(model)
    inner.head.weight = inner.embed.weight
    run.see_mean(loss_of(model, run.batch(0)))


@loop()
def values_drawn_after_prepare(run: Run) -> None:
    """Weights that are drawn anew, and noise: the same values as in one process, whatever the part of a rank."""
    model, optimizer = started(run)
    inner: Any = run.unwrap(model)
    torch.manual_seed(11)
    with torch.no_grad():
        nn.init.normal_(inner.embed.weight)
        nn.init.xavier_uniform_(inner.head.weight)
        nn.init.trunc_normal_(inner.parts[0].up.weight, std=0.2)
        nn.init.kaiming_uniform_(inner.parts[0].down.weight)
        inner.norm.weight.data.uniform_(0.5, 1.5)
        inner.parts[1].up.weight.add_(torch.randn_like(inner.parts[1].up.weight), alpha=0.1)
        inner.parts[1].down.weight.mul_(torch.rand_like(inner.parts[1].down.weight))
    train(run, model, optimizer)


@loop(refused=dict.fromkeys((1, 2, 4, 5), "is not the parameter that prepare put there"), refused_alone=True)
def gradients_of_each_sample(run: Run) -> None:
    """Clipped one by one, as private training does, and assigned: no forward of the prepared model, and no backward."""
    model, optimizer = started(run)
    inner = run.unwrap(model)

    def loss_of_one(values: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return cross_entropy(torch.func.functional_call(inner, values, (sample[None, :-1],)), sample[None])

    for step in range(run.steps):
        values = {name: p.detach() for name, p in inner.named_parameters()}
        gradients = torch.func.vmap(torch.func.grad(loss_of_one), (None, 0))(values, run.batch(step))
        for name, p in inner.named_parameters():
            p.grad = gradients[name].clamp(-0.05, 0.05).mean(0)
        run.step(optimizer)
    train(run, model, optimizer, 10)
