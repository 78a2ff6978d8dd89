"""Several tasks of one model, weighed and learned one by one; agents with their rollouts; penalties by steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, log_softmax, softplus

from tests.loops.net import Net, adam, layers, started
from tests.loops.run import BY_SIZE, WHOLE, Run, loop, whole

SHARDED = (1, 2, 4, 5)


class Weights(nn.Module):
    """Learned weights of two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, losses: torch.Tensor) -> torch.Tensor:
        return (losses * (-self.logs).exp() + self.logs).sum()


class TwoHeads(nn.Module):
    """(samples, 5) -> scores (samples, 3) and values (samples,)."""

    def __init__(self, has_weights: bool = False) -> None:
        super().__init__()
        self.trunk = layers(5, 7, 7)
        self.policy, self.value = nn.Linear(7, 3), nn.Linear(7, 1)
        if has_weights:
            self.weights = Weights()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.policy(x), self.value(x).squeeze(-1)


def losses_of(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores, values = model(x)
    return cross_entropy(scores, torch.zeros(len(x), dtype=torch.long, device=x.device)), (values - 1).pow(2).mean()


def _two_heads(run: Run, has_weights: bool = False) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = TwoHeads(has_weights)
    return run.prepare(model, adam(model.parameters()))


@loop(fsdp=BY_SIZE)
def heads_one_by_one(run: Run) -> None:
    """The backward of each head reaches its own parameters and those of the trunk."""
    model, optimizer = _two_heads(run)
    for step in range(run.steps):
        first, second = losses_of(model, run.draw(step, 5))
        run.backward(first, retain_graph=True)
        run.backward(second)
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(first + second)


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def heads_of_two_forwards(run: Run) -> None:
    """Each forward and its backward are of one head."""
    model, optimizer = _two_heads(run)
    for step in range(run.steps):
        first, _ = losses_of(model, run.draw(step, 5))
        run.backward(first)
        _, second = losses_of(model, run.draw(step + 50, 5))
        run.backward(second)
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(first + second)


@loop(
    fsdp=BY_SIZE,
    accumulation=2,
    refused=dict.fromkeys((4, 5), "two backwards of a window reached different parameters of a unit"),
)
def heads_one_by_one_in_windows(run: Run) -> None:
    """Hybrid strategies add up buffers of a unit until the end of the window."""
    model, optimizer = _two_heads(run)
    for micro in range(6):
        with run.accumulate(model):
            first, second = losses_of(model, run.draw(micro, 5))
            if micro % 2:
                run.backward(first, retain_graph=True)
            run.backward(second)
            run.step(optimizer)
            run.see_mean(first + second)


@loop(fsdp=BY_SIZE, refused={3: "shardkit.ddp_find_unused_parameters: true"}, is_long_run_only=True)
def one_head_alone(run: Run) -> None:
    model, optimizer = _two_heads(run)
    for step in range(run.steps):
        _, loss = losses_of(model, run.draw(step, 5))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE, shardkit={"ddp_find_unused_parameters": True})
def one_head_alone_with_unused(run: Run) -> None:
    one_head_alone(run)


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def gradients_of_tasks_compared(run: Run) -> None:
    """PCGrad: where the gradients of two tasks are in conflict, one is changed."""
    model, optimizer = _two_heads(run)
    for step in range(run.steps):
        losses, of_tasks = losses_of(model, run.draw(step, 5)), []
        for loss in losses:
            run.backward(loss, retain_graph=loss is losses[0])
            of_tasks.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            optimizer.zero_grad()
        both = [(a, b) for a, b in zip(*of_tasks, strict=True) if a is not None and b is not None]
        conflict = sum(whole((a * b).sum()) for a, b in both)
        run.see(conflict)
        for p, a, b in zip(model.parameters(), *of_tasks, strict=True):
            p.grad = (a if b is None else b) if a is None or b is None else a + b * (0.5 if conflict < 0 else 1.0)
        run.step(optimizer)


@loop(fsdp=BY_SIZE, refused=dict.fromkeys(SHARDED, "call this module: model.weigh(losses)"))
def losses_weighed_in_the_loop(run: Run) -> None:
    """By a parameter of the model: a rank would use its own losses alone for the part that it has."""
    model, optimizer = _two_heads(run, has_weights=True)
    for step in range(run.steps):
        logs, losses = run.unwrap(model).weights.logs, losses_of(model, run.draw(step, 5))
        loss = losses[0] * (-logs[0]).exp() + logs[0] + losses[1] * (-logs[1]).exp() + logs[1]
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE)
def losses_weighed_by_a_module(run: Run) -> None:
    """As the error says."""
    model, optimizer = _two_heads(run, has_weights=True)
    for step in range(run.steps):
        loss = run.unwrap(model).weights(torch.stack(losses_of(model, run.draw(step, 5))))
        run.backward(loss)
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE)
def losses_weighed_by_the_whole_parameter(run: Run) -> None:
    """Its gradient in the loop is the mean over ranks, and is added to that of the forward."""
    model, optimizer = _two_heads(run)
    for step in range(run.steps):
        first, second = losses_of(model, run.draw(step, 5))
        bias, weight = (
            p.full_tensor() if isinstance(p, DTensor) else p
            for p in (run.unwrap(model).policy.bias, run.unwrap(model).value.weight)
        )
        loss = first * bias.exp().sum() + second * weight.exp().mean() + bias.pow(2).sum()
        run.backward(loss)
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def rollouts_learned_several_times(run: Run) -> None:
    """PPO: a rollout in inference mode, epochs over it, until the policy has moved too far from the rollout's."""
    model, optimizer = _two_heads(run)
    for rollout in range(2):
        states = [run.draw(10 * rollout + time, 5) for time in range(3)]
        model.eval()
        with torch.inference_mode():
            before = [log_softmax(model(state)[0], -1) for state in states]
        model.train()
        for _ in range(3):
            for state, old in zip(states, before, strict=True):
                scores, values = model(state)
                ratio, advantage = (log_softmax(scores, -1) - old.clone()).exp(), state.sum(-1, keepdim=True)
                gained = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                loss = 0.5 * (values - advantage.squeeze(-1)).pow(2).mean() - gained
                run.backward(loss)
                run.clip(model.parameters(), 0.5)
                run.step(optimizer)
                run.see_mean(loss)
            if float(run.mean(ratio.log().abs().mean())) > 0.12:  # all ranks stop
                break


@loop()
def texts_that_each_rank_ends_by_itself(run: Run) -> None:
    """GRPO on whole weights: each rank generates until its own longest text has ended."""

    def write(model: nn.Module, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        with run.unsharded(model):
            while (ends > tokens.shape[1]).any():
                tokens = _one_longer(model, tokens)
        return tokens

    _learn_from_texts(run, write)


@loop(is_long_run_only=True)
def texts_of_different_lengths(run: Run) -> None:
    """GRPO: each rank generates until the longest text of all ranks has ended."""

    def write(model: nn.Module, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        while run.mean((ends > tokens.shape[1]).float().mean()) > 0:
            tokens = _one_longer(model, tokens)
        return tokens

    _learn_from_texts(run, write)


@torch.no_grad()
def _one_longer(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)


def _learn_from_texts(run: Run, write: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """`write(model, tokens, ends)` generates to the given lengths; what is behind an end does not count."""
    model = Net()
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        tokens = run.batch(step)[:, :2]
        ends = 3 + tokens[:, 0] % 4
        tokens = write(model, tokens, ends)
        counts = torch.arange(1, tokens.shape[1], device=ends.device) < ends[:, None]
        of_tokens = cross_entropy(model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:], reduction="none")
        loss = (of_tokens * counts * tokens[:, :1]).sum(1).mean() / run.mean(counts.float().sum(1).mean())
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def actor_and_critics(run: Run) -> None:
    """SAC: two critics with one optimizer, frozen for the actor's step, and targets that follow them."""
    torch.manual_seed(1)
    actor, critics = layers(5, 7, 2), nn.ModuleList(layers(7, 7, 1) for _ in range(2))
    targets = copy.deepcopy(critics).requires_grad_(False)
    objects = [actor, *critics, *targets, adam(actor.parameters()), adam(critics.parameters())]
    actor, first, second, *followers, for_actor, for_critics = run.prepare(*objects)
    for step in range(run.steps):
        state, action = run.draw(step, 5), run.draw(step + 20, 2)
        with torch.no_grad():
            reached = torch.cat([state, actor(state)], 1)
            value = 1 + torch.min(*[follower(reached) for follower in followers])
        for_critics.zero_grad()
        loss = sum((critic(torch.cat([state, action], 1)) - value).pow(2).mean() for critic in (first, second))
        run.backward(loss)
        for_critics.step()
        run.see_mean(loss)
        for critic in (first, second):
            critic.requires_grad_(False)
        taken = torch.cat([state, actor(state)], 1)
        for_actor.zero_grad()
        loss = -torch.min(first(taken), second(taken)).mean()
        run.backward(loss)
        for_actor.step()
        run.see_mean(loss)
        for critic, follower in zip((first, second), followers, strict=True):
            critic.requires_grad_(True)
            for fast, slow in zip(critic.parameters(), follower.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def a_penalty_every_other_step(run: Run) -> None:
    """R1, lazily: phases are frozen by requires_grad_, the critic steps more often and faster than the generator."""
    torch.manual_seed(2)
    generator, critic = layers(3, 7, 5), layers(5, 7, 7, 1)
    fast = torch.optim.Adam(critic.parameters(), lr=4e-2, eps=1e-4, betas=(0.0, 0.9))
    generator, critic, for_generator, for_critic = run.prepare(generator, critic, adam(generator.parameters()), fast)
    for step in range(6):
        noise, real = run.draw(step, 3), run.draw(step + 50, 5).requires_grad_()
        critic.requires_grad_(True)
        generator.requires_grad_(False)
        of_real = critic(real)
        loss = softplus(-of_real).mean() + softplus(critic(generator(noise))).mean()
        if step % 2 == 0:
            (gradient,) = torch.autograd.grad(of_real.sum(), real, create_graph=True)
            loss = loss + 0.5 * gradient.pow(2).sum(1).mean()
        for_critic.zero_grad()
        run.backward(loss)
        for_critic.step()
        run.see_mean(loss)
        if step % 2:
            critic.requires_grad_(False)
            generator.requires_grad_(True)
            loss = softplus(-critic(generator(noise))).mean()
            for_generator.zero_grad()
            run.backward(loss)
            for_generator.step()
            run.see_mean(loss)


def _in_a_container(run: Run, container: Any) -> None:
    """Two models that share a part, which the loop calls one by one, each with an optimizer."""
    torch.manual_seed(3)
    body, first, second = layers(5, 7, 6), layers(6, 3), layers(6, 7, 1)
    models = run.prepare(container([body, first, second]))
    body, first, second = run.unwrap(models)
    one = run.prepare(adam([*body.parameters(), *first.parameters()]))
    other = run.prepare(torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9))
    for step in range(run.steps):
        x = run.draw(step, 5)
        with torch.no_grad():
            run.see_mean(second(body(x)).mean())
        inner = body(x)
        loss = first(inner).pow(2).mean() + (second(inner) - x.mean(-1, keepdim=True)).pow(2).mean()
        run.backward(loss)
        run.clip(models.parameters(), 0.5)
        run.step(one, other)
        run.see_mean(loss)


@loop(fsdp=WHOLE)
def models_in_a_list(run: Run) -> None:
    _in_a_container(run, nn.ModuleList)


class Named(nn.ModuleDict):
    def __init__(self, models: list[nn.Module]) -> None:
        super().__init__(dict(zip("abc", models, strict=True)))

    def __iter__(self) -> Any:
        return iter(self.values())


@loop(fsdp=BY_SIZE)
def models_in_a_dictionary(run: Run) -> None:
    _in_a_container(run, Named)


@loop(fsdp=BY_SIZE)
def models_by_their_names_in_a_dictionary(run: Run) -> None:
    model, optimizer = started(run, nn.ModuleDict({"body": layers(5, 7, 6), "head": layers(6, 3)}))
    for step in range(3):
        loss = model["head"](model["body"](run.draw(step, 5))).pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
    assert (len(model), list(model), "head" in model, "tail" in model) == (2, ["body", "head"], True, False)


@loop(fsdp=BY_SIZE)
def layers_of_a_sequential_model_by_number(run: Run) -> None:
    model, optimizer = started(run, layers(5, 7, 6, 3))
    for step in range(3):
        x = run.draw(step, 5)
        for layer in model:
            x = layer(x)
        loss = x.pow(2).mean() + model(run.draw(step + 50, 5)).mean()
        run.backward(loss)
        run.see(model[-1].weight.grad.norm())
        run.step(optimizer)
        run.see_mean(loss)
