"""Parameters of other dtypes and shapes: fp64, complex, bf16, without a dimension, in ignored modules."""

from __future__ import annotations

import torch
from torch import nn

from tests.loops.net import Net, adam, loss_of, started, train
from tests.loops.run import BATCH, BY_SIZE, Run, loop


@loop(bound=1e-10)
def fp64(run: Run) -> None:
    """fp64 gradients are reduced in fp64: the result is exact far beyond fp32."""
    torch.manual_seed(0)
    model, optimizer = started(run, Net().double())
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.clip(model.parameters(), 0.3)
        run.step(optimizer)
        run.see_mean(loss)


class Waves(nn.Module):
    """Complex weights, as spectral operators have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7))
        self.spectrum = nn.Linear(7, 7, bias=False, dtype=torch.complex64)
        self.last = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(torch.fft.ifft(self.spectrum(torch.fft.fft(x + 0j))).real)


@loop(fsdp=BY_SIZE)
def complex_weights(run: Run) -> None:
    torch.manual_seed(3)
    model = Waves()
    model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4))
    for step in range(run.steps):
        x = run.part(torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(step)))
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)


class Scaled(Net):
    """Temperatures without a dimension, in the model and in each part."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))
        for part in self.parts:
            part.gate = nn.Parameter(torch.tensor(0.5))
            part.register_forward_hook(lambda module, args, output: output * module.gate)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.temperature


@loop()
def parameters_without_a_dimension(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, Scaled())
    train(run, model, optimizer)


@loop()
def unfreezing_parameters_without_a_dimension(run: Run) -> None:
    torch.manual_seed(0)
    model = Scaled()
    model.temperature.requires_grad_(False)
    for part in model.parts:
        part.gate.requires_grad_(False)
    model, optimizer = run.prepare(model, adam(model.parameters()))
    train(run, model, optimizer)
    model.requires_grad_(True)
    train(run, model, optimizer, 10)


class WithNothing(Net):
    """A table of no rows in each part, as a size of 0 in a configuration makes one."""

    def __init__(self) -> None:
        super().__init__()
        for part in self.parts:
            part.rows = nn.Parameter(torch.empty(0, 7))
            part.register_forward_hook(lambda module, args, output: output + module.rows.sum())


@loop()
def parameters_without_elements(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, WithNothing())
    train(run, model, optimizer)


@loop(fsdp={"fsdp_transformer_layer_cls_to_wrap": "Part", "fsdp_ignored_modules": "head|parts.0.up"})
def ignored_modules(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        run.clip(model.parameters(), 0.5)
        run.step(optimizer)
        run.see_mean(loss)


@loop(fsdp={"fsdp_transformer_layer_cls_to_wrap": "Part", "fsdp_ignored_modules": "head|parts.0.up"})
def unfreezing_ignored_modules(run: Run) -> None:
    model = Net()
    model.head.requires_grad_(False)
    model.parts[0].requires_grad_(False)
    model, optimizer = run.prepare(model, adam(model.parameters()))
    train(run, model, optimizer)
    model.requires_grad_(True)
    train(run, model, optimizer, 10)


@loop(fsdp={"fsdp_transformer_layer_cls_to_wrap": "Part", "fsdp_ignored_modules": "head"})
def only_ignored_modules_are_trained(run: Run) -> None:
    model = Net().requires_grad_(False)
    model.head.requires_grad_(True)
    model, optimizer = run.prepare(model, adam(model.head.parameters()))
    train(run, model, optimizer)


@loop(fsdp={"fsdp_transformer_layer_cls_to_wrap": "Part", "fsdp_ignored_modules": "head|parts.0.up"})
def gradients_set_to_zero(run: Run) -> None:
    """Of sharded and of replicated parameters, which no foreach operator takes together."""
    model = Net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True))
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.see_mean(loss)
