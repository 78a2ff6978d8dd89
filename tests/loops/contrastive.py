"""Losses over the samples of all ranks, and models that follow another one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, log_softmax, normalize, softmax

from tests.loops.net import adam, layers
from tests.loops.run import BATCH, BY_SIZE, Run, loop


def info_nce(ours: torch.Tensor, theirs: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Each sample's pair against those of all others, both (samples, features)."""
    logits = scale * ours @ theirs.T
    pairs = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, pairs) + cross_entropy(logits.T, pairs)) / 2


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = layers(5, 7, 6), layers(4, 7, 6)
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return normalize(self.image(image), dim=-1), normalize(self.text(text), dim=-1), self.log_scale.exp()


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def towers_of_one_model(run: Run) -> None:
    """The learned temperature is kept below a limit."""
    torch.manual_seed(1)
    model = Towers()
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        image, text, scale = model(run.draw(step, 5), run.draw(step + 50, 4))
        loss = info_nce(run.gather(image), run.gather(text), scale)
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        with torch.no_grad():
            run.unwrap(model).log_scale.clamp_(0, 1.02)
        run.see(loss)


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def towers_of_two_models(run: Run) -> None:
    torch.manual_seed(1)
    image, text = layers(5, 7, 6), layers(4, 7, 6)
    image, text, first, second = run.prepare(image, text, adam(image.parameters()), adam(text.parameters()))
    for step in range(run.steps):
        ours, theirs = image(run.draw(step, 5)), text(run.draw(step + 50, 4))
        loss = info_nce(run.gather(ours), run.gather(theirs), 2.0)
        run.backward(loss)
        run.clip([*image.parameters(), *text.parameters()], 0.5)
        run.step(first, second)
        run.see(loss)


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def cached_gradients_of_embeddings(run: Run) -> None:
    """GradCache: the loss of embeddings without a graph, then each chunk again with the gradients of its embeddings."""
    torch.manual_seed(1)
    model = layers(5, 7, 6)
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        views = [run.draw(step, 5), run.draw(step + 50, 5)]
        with torch.no_grad():
            embeddings = [model(view) for view in views]
        ours, theirs = [embedding.requires_grad_() for embedding in embeddings]
        loss = info_nce(run.gather(ours), run.gather(theirs), 2.0)
        loss.backward()
        for view, embedding in zip(views, embeddings, strict=True):
            for chunk, gradient in zip(view.split(2), embedding.grad.split(2), strict=True):
                if step % 2:
                    run.backward((model(chunk) * gradient).sum())
                else:
                    model(chunk).backward(gradient)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see(loss)


class WithQueue(nn.Module):
    """MoCo: keys of a slowly following encoder, of this batch and, in a queue, of those before."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.query = layers(5, 7, 6)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", normalize(torch.randn(3 * BATCH, 6), dim=-1))
        self.gather = run.gather

    def follow(self) -> None:
        for query, key in zip(self.query.parameters(), self.key.parameters(), strict=True):
            key.data = key.data * 0.9 + query.data * 0.1

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        query = normalize(self.query(x), dim=-1)
        with torch.no_grad():
            key = normalize(self.key(y), dim=-1)
        logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
        self.queue = torch.cat([self.gather(key), self.queue[:-BATCH]])
        return cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


@loop(fsdp=BY_SIZE, is_long_run_only=True)
def a_queue_of_keys(run: Run) -> None:
    torch.manual_seed(1)
    model = WithQueue(run)
    model, optimizer = run.prepare(model, adam(model.query.parameters()))
    for step in range(run.steps):
        run.unwrap(model).follow()
        loss = model(run.draw(step, 5), run.draw(step + 50, 5))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
        run.see(run.unwrap(model).queue.sum())


def _following(follow: Any) -> Any:
    """A frozen teacher, prepared by itself, that follows the student; the mean of its outputs is subtracted."""

    def following(run: Run) -> None:
        torch.manual_seed(1)
        student = layers(5, 7, 6)
        teacher = run.prepare(copy.deepcopy(student).requires_grad_(False))
        student, optimizer = run.prepare(student, adam(student.parameters()))
        center = torch.zeros(6, device=run.device)
        for step in range(run.steps):
            with torch.no_grad():
                target = teacher(run.draw(step + 50, 5))
            loss = -(softmax(target - center, -1) * log_softmax(student(run.draw(step, 5)), -1)).sum(-1).mean()
            run.backward(loss)
            run.step(optimizer)
            center = 0.9 * center + 0.1 * run.mean(target.mean(0))
            with torch.no_grad():
                follow(teacher, student)
            run.see_mean(loss)
            run.see(center.sum())

    return following


def _by_parameter(teacher: nn.Module, student: nn.Module) -> None:
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.lerp_(fast, 0.1)


loop("the_student_loaded_into_its_teacher", fsdp=BY_SIZE)(
    _following(lambda teacher, student: teacher.load_state_dict(student.state_dict()))
)
loop("the_teacher_follows_parameters", fsdp=BY_SIZE, is_long_run_only=True)(_following(_by_parameter))
loop("the_teacher_follows_at_once", fsdp=BY_SIZE, is_long_run_only=True)(
    _following(lambda a, b: torch._foreach_lerp_(list(a.parameters()), list(b.parameters()), 0.1))
)


def _copied_at_once(teacher: nn.Module, student: nn.Module) -> None:
    averages = [0.9 * slow + 0.1 * fast for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True)]
    torch._foreach_copy_(list(teacher.parameters()), averages)


loop("the_teacher_is_copied_at_once", fsdp=BY_SIZE)(_following(_copied_at_once))


@loop(fsdp=BY_SIZE)
def gradients_and_plain_values_copied_at_once(run: Run) -> None:
    model = layers(5, 7, 6)
    began = [p.detach().clone() for p in model.parameters()]
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(2):
        loss = model(run.draw(step, 5)).pow(2).mean()
        run.backward(loss)
        gradients = [p.grad for p in model.parameters()]
        kept = [torch.empty_like(gradient) for gradient in gradients]
        torch._foreach_copy_(kept, gradients)
        torch._foreach_copy_(gradients, torch._foreach_mul(kept, 0.5), non_blocking=True)
        run.step(optimizer)
        run.see_mean(loss)
        if step == 0:
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), began)
