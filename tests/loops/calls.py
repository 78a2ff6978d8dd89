"""How the model is called, and what its forward returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint

from tests.loops.net import Net, Part, adam, cross_entropy, evaluate, loss_of, started, train
from tests.loops.run import BY_SIZE, LOOPS, WHOLE, WORDS, Loop, Run, loop


@loop()
def a_method_besides_forward(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        loss = run.unwrap(model).loss(run.batch(step))
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def methods_and_forward_take_turns(run: Run) -> None:
    model, optimizer = started(run)
    for step in range(run.steps):
        tokens = run.batch(step)
        loss = run.unwrap(model).loss(tokens) if step % 2 else loss_of(model, tokens)
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def inner_modules_called_from_outside(run: Run) -> None:
    """Embeddings given to the model's parts by hand, as multimodal models and prompt tuning do."""
    model, optimizer = started(run)
    for step in range(run.steps):
        tokens, inner = run.batch(step), run.unwrap(model)
        x = inner.embed(tokens[:, :-1]) * 1.5
        x = inner.parts[0].down(torch.relu(inner.parts[0].up(x)))
        x = inner.parts[1](x)
        loss = cross_entropy(inner.head(inner.norm(x)), tokens)
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


class ChangingOutputs(Net):
    """It changes what its parts give."""

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = part(x)
            x += 0.1
        return self.norm(x)


@loop()
def outputs_of_units_changed_in_place(run: Run) -> None:
    torch.manual_seed(0)
    train(run, *started(run, ChangingOutputs()))


def _odd_outputs(wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any], blocks: bool) -> Any:
    """What forward returns is no tensor."""

    class Odd(Net):
        def forward(self, tokens: torch.Tensor) -> Any:
            return wrap(cross_entropy(super().forward(tokens[:, :-1]), tokens))

    def odd_outputs(run: Run) -> None:
        torch.manual_seed(0)
        model = Odd()
        if not blocks:
            model.parts = nn.ModuleList()
        model, optimizer = started(run, model)
        for step in range(run.steps):
            loss = unwrap(model(run.batch(step)))
            run.backward(loss)
            run.step(optimizer)
            run.see_mean(loss)

    return odd_outputs


@dataclass
class Output:
    loss: torch.Tensor
    other: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Output

    @property
    def loss(self) -> torch.Tensor:
        return self.inner.loss


class Opaque:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


_ODD: dict[str, Callable[[Any], Any]] = {
    "a_dataclass": Output,
    "a_dataclass_in_a_frozen_one": lambda loss: Frozen(Output(loss)),
    "a_namespace": lambda loss: SimpleNamespace(loss=loss),
    "an_object": Opaque,
}
for _name, _wrap in _ODD.items():
    LOOPS[f"forward_returns_{_name}"] = Loop(_odd_outputs(_wrap, lambda output: output.loss, True))
    LOOPS[f"forward_returns_{_name}_without_blocks"] = Loop(
        _odd_outputs(_wrap, lambda output: output.loss, False), fsdp=WHOLE
    )


def _odd_outputs_of_blocks(wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]) -> Any:
    """What a block returns is no tensor, and the model changes it in place."""

    class OddPart(Part):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x).view(x.shape))

    class Holder(Net):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(OddPart(7) for _ in range(2))

        def features(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for part in self.parts:
                x = unwrap(part(x))
                x += 0.1
            return self.norm(x)

    def odd_outputs(run: Run) -> None:
        torch.manual_seed(0)
        train(run, *started(run, Holder()))

    return odd_outputs


_ODD_PARTS = {"fsdp_transformer_layer_cls_to_wrap": "OddPart"}
for _name, _wrap in _ODD.items():
    LOOPS[f"blocks_return_{_name}"] = Loop(_odd_outputs_of_blocks(_wrap, lambda output: output.loss), fsdp=_ODD_PARTS)
LOOPS["blocks_return_a_distribution"] = Loop(
    _odd_outputs_of_blocks(lambda x: Independent(Normal(x, 1.0), 1), lambda output: output.mean), fsdp=_ODD_PARTS
)


LOOPS["forward_returns_a_dict_of_lists"] = Loop(
    _odd_outputs(lambda x: {"a": [None, x], "b": 3}, lambda o: o["a"][1], True)
)


class KeepsLoss(Net):
    """The loss is left on the module."""

    def forward(self, tokens: torch.Tensor) -> None:
        self.kept = cross_entropy(super().forward(tokens[:, :-1]), tokens)


@loop()
def the_loss_is_kept_on_the_module(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, KeepsLoss())
    for step in range(run.steps):
        model(run.batch(step))
        loss = run.unwrap(model).kept
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


class Auxiliary(Net):
    """Each part leaves a loss of its own on itself, as routers of mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        for part in self.parts:
            part.register_forward_hook(_leave_loss)


def _leave_loss(part: nn.Module, _: Any, output: torch.Tensor) -> None:
    part.auxiliary = output.pow(2).mean() + part.up.weight.pow(2).sum()


@loop()
def losses_left_on_blocks(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, Auxiliary())
    for step in range(run.steps):
        loss = loss_of(model, run.batch(step))
        for part in run.unwrap(model).parts:
            loss = loss + 0.1 * part.auxiliary
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def hidden_states_by_hooks(run: Run) -> None:
    """Activations taken by forward hooks are a part of the loss."""
    model, optimizer = started(run)
    taken: list[torch.Tensor] = []
    run.unwrap(model).parts[0].register_forward_hook(lambda module, args, output: taken.append(output))
    for step in range(run.steps):
        taken.clear()
        loss = loss_of(model, run.batch(step)) + taken[0].pow(2).mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


@loop()
def model_called_in_pieces(run: Run) -> None:
    """features() of the model, then its head, which keeps the root's parameters in two calls."""
    model, optimizer = started(run)
    for step in range(run.steps):
        tokens, inner = run.batch(step), run.unwrap(model)
        loss = cross_entropy(inner.head(inner.features(tokens[:, :-1])), tokens)
        with torch.no_grad():
            run.see_mean(inner.head(inner.features(tokens)).mean())
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


class Tied(nn.Module):
    """The embedding shares its weight with the head, and is in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.head.weight = self.net.embed.weight
        self.prompt = nn.Parameter(torch.ones(1, 7) * 0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.net.head(self.net.norm(self.net.parts[0](self.net.embed(tokens) + self.prompt)))


@loop(fsdp={"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 60})
def tied_modules_of_an_inner_unit(run: Run) -> None:
    """Forward calls modules of a model inside, as prompt tuning does, and the loop calls them directly."""
    torch.manual_seed(0)
    model = Tied()
    model.net.parts[1].requires_grad_(False)
    model, optimizer = started(run, model)
    for step in range(run.steps):
        tokens, inner = run.batch(step), run.unwrap(model)
        loss = loss_of(model, tokens)
        with torch.no_grad():
            run.see_mean(inner.net.embed(tokens).mean())
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


class Projected(Net):
    """A method that uses a parameter of the model itself, which is no module's to call."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Parameter(torch.ones(7, 3) * 0.1)

    def project(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.features(tokens) @ self.projection


@loop()
def a_method_with_a_parameter_of_its_own(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, Projected())
    run.register(model, "project")
    for step in range(run.steps):
        tokens = run.batch(step)
        loss = run.unwrap(model).project(tokens).pow(2).mean() + loss_of(model, tokens)
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


class Stepping(Net):
    """A method that calls the model itself, as `training_step` of Lightning does, and a forward that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WORDS))

    def forward(self, tokens: torch.Tensor, hint: torch.Tensor | None = None) -> torch.Tensor:
        if hint is None:
            with torch.no_grad():
                hint = self(tokens, torch.zeros(()))
            hint = hint + 0.1 * self(tokens, hint)
        return super().forward(tokens) * self.scale + 0.1 * hint

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(self(tokens[:, :-1]) * self.scale, tokens)
        with torch.no_grad():
            aim = self(tokens.flip(1)) * self.scale
        return loss + 0.1 * (self(tokens.flip(1)) * self.scale - aim.tanh()).pow(2).mean()


class Learning(Stepping):
    """A method with whole steps: forward, backward, and what the optimizer does."""

    def learn(self, run: Run, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            loss = cross_entropy(self(tokens[:, :-1]) * self.scale, tokens)
            run.backward(loss)
            run.step(optimizer)
        return loss.detach() + (self(tokens) * self.scale).mean()


@loop()
def a_method_with_whole_steps(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, Learning())
    run.register(model, "learn")
    for step in range(run.steps):
        run.see_mean(model.learn(run, optimizer, run.batch(step)))
        evaluate(run, model)


@loop()
def a_method_that_calls_the_model_itself(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, Stepping())
    run.register(model, "training_step")
    for step in range(run.steps):
        loss = model.training_step(run.batch(step))
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
        with torch.no_grad(), suppress(RuntimeError):
            model.training_step(run.batch(step).float())  # raises in its first forward
        evaluate(run, model)


class Scaling(nn.Module):
    """A step of a flow, which is no unit by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.shift) * self.log_scale.exp()

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x * (-self.log_scale).exp() - self.shift


class Coupled(nn.Module):
    """A step with a part, which is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.scaling, self.part, self.strength = Scaling(), Part(5), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaling(x) + self.strength * self.part(x)

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaling.inverse(x - self.strength * self.part(x))


class Flow(nn.Sequential):
    def sample(self, x: torch.Tensor) -> torch.Tensor:
        for step in reversed(self):
            x = step.inverse(x)
        return x


@loop(fsdp={"fsdp_transformer_layer_cls_to_wrap": ["Coupled", "Part"]})
def methods_of_the_modules_inside(run: Run) -> None:
    """They are called by a method of the model, in training and between steps."""
    torch.manual_seed(0)
    model, optimizer = started(run, Flow(Coupled(), Coupled()))
    for module in model.modules():
        if hasattr(module, "inverse"):
            run.register(module, "inverse")
    for step in range(run.steps):
        with torch.no_grad():
            run.see_mean(run.unwrap(model).sample(run.draw(step, 5)).square().mean())
        back = run.unwrap(model).sample(run.draw(step + 50, 5))
        loss = model(run.draw(step, 5)).square().mean() + back.square().mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


class TiedInside(nn.Module):
    """A module inside a unit has a parameter of the unit, and one of the unit around it, which the head shares."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(5), Part(5)])
        self.head = nn.Linear(5, 10, bias=False)
        self.parts[0].up.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)


@loop()
def a_module_of_two_units_called_by_itself(run: Run) -> None:
    torch.manual_seed(0)
    model, optimizer = started(run, TiedInside())
    inner = run.unwrap(model)
    for step in range(run.steps):
        x = run.draw(step, 5)
        loss = model(x).square().mean() + inner.parts[0].up(x).square().mean()
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)


class Recomputed(Net):
    """Blocks that compute their activations again in backward."""

    is_reentrant = False

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.is_reentrant)
        return self.norm(x)


def _recomputing(is_reentrant: bool) -> Any:
    def recomputing(run: Run) -> None:
        torch.manual_seed(0)
        model = Recomputed()
        model.is_reentrant = is_reentrant
        model, optimizer = started(run, model)
        train(run, model, optimizer)

    return recomputing


LOOPS["recomputing_by_a_backward_inside"] = Loop(_recomputing(True))
LOOPS["recomputing_by_hooks"] = Loop(_recomputing(False))


class RecomputedTwice(Recomputed):
    """Its blocks run twice, as those of a looped Transformer."""

    is_reentrant = True

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for part in [*self.parts, *self.parts]:
            x = checkpoint(part, x, use_reentrant=True)
        return self.norm(x)


@loop(refused={3: "mark a variable ready only once"})
def recomputing_a_module_that_ran_twice(run: Run) -> None:
    torch.manual_seed(0)
    train(run, *started(run, RecomputedTwice()))


@loop()
def recomputing_twice_what_is_trained(run: Run) -> None:
    """Before the trained modules comes a frozen one, so that torch's DDP has a gradient of each parameter, and reduces
    them, before the modules run for the second time in backward."""
    torch.manual_seed(0)
    model = RecomputedTwice()
    model.embed.requires_grad_(False)
    model.embed.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    train(run, *started(run, model))


class Reversible(torch.autograd.Function):
    """Blocks whose inputs are computed from their outputs in backward, as in a reversible network."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor, parts: nn.ModuleList) -> Any:
        for part in parts:
            left = left + part.down(right)
            right = right + part.up(left)
        ctx.parts = parts
        ctx.save_for_backward(left, right)
        return left, right

    @staticmethod
    def backward(ctx: Any, to_left: torch.Tensor, to_right: torch.Tensor) -> Any:
        left, right = (tensor.detach() for tensor in ctx.saved_tensors)
        for part in reversed(ctx.parts):
            right, to_left = Reversible.undone(part.up, left, right, to_left, to_right)
            left, to_right = Reversible.undone(part.down, right, left, to_right, to_left)
        return to_left, to_right, None

    @staticmethod
    def undone(module: nn.Module, given: torch.Tensor, made: torch.Tensor, to_given: Any, to_made: Any) -> Any:
        given = given.clone().requires_grad_()
        with torch.enable_grad():
            added = module(given)
            added.backward(to_made)
        return made - added.detach(), to_given + given.grad


class ReversibleNet(Net):
    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.norm(Reversible.apply(x, torch.cat([x, x], -1), self.parts)[0])


@loop()
def a_reversible_network(run: Run) -> None:
    torch.manual_seed(0)
    train(run, *started(run, ReversibleNet()))


class Delta(nn.Module):
    def __init__(self, added: torch.Tensor) -> None:
        super().__init__()
        self.added = added

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.added


class AdaptedPart(Part):
    """A weight that gets its adapter for one forward, as the target_parameters of PEFT's LoRA do."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.up.weight.requires_grad_(False)
        self.a, self.b = (nn.Parameter(torch.randn(size) / 4) for size in ((2, width), (2 * width, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        register_parametrization(self.up, "weight", Delta(self.b @ self.a))
        try:
            return super().forward(x)
        finally:
            remove_parametrizations(self.up, "weight", leave_parametrized=False)


class AdaptedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(AdaptedPart(7) for _ in range(2))


@loop(fsdp={"fsdp_transformer_layer_cls_to_wrap": "AdaptedPart"})
def a_weight_with_an_adapter_for_one_forward(run: Run) -> None:
    torch.manual_seed(0)
    train(run, *started(run, AdaptedNet()))


class Table(nn.Module):
    """What is learned is an image, say, or a prompt: nothing is put in."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.out = nn.Parameter(torch.randn(6, 7)), nn.Linear(7, 5)

    def forward(self) -> torch.Tensor:
        return self.out(self.values.tanh())


@loop(fsdp=BY_SIZE)
def a_forward_without_inputs(run: Run) -> None:
    torch.manual_seed(1)
    model = Table()
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        loss = (model() - run.draw(step, 1, 5)).pow(2).mean()
        run.backward(loss)
        run.clip(model.parameters(), 1.0)
        run.step(optimizer)
        run.see_mean(loss)


class WithLoss(Net):
    """Gives its loss and the logits of it, as models of Transformers do: an output of the model and of its head."""

    def forward(self, tokens: torch.Tensor) -> Any:
        logits = self.head(self.features(tokens[:, :-1]))
        return {"loss": cross_entropy(logits, tokens), "logits": logits}


@loop(fsdp=BY_SIZE)
def a_loss_beside_its_logits(run: Run) -> None:
    torch.manual_seed(1)
    model = WithLoss()
    model, optimizer = run.prepare(model, adam(model.parameters()))
    for step in range(run.steps):
        output = model(run.batch(step))
        run.backward(output["loss"])
        run.step(optimizer)
        run.see_mean(output["loss"])
        run.see_mean(output["logits"].square().mean())


class Recurrent(nn.Module):
    """A language model of many tutorials: takes its device from a parameter without elements, makes its first hidden
    state like a weight, and calls `forward` of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.embed = nn.Embedding(WORDS, 8)
        self.cells = nn.LSTM(8, 8, num_layers=2)
        self.head = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, WORDS))

    def first_state(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.embed.weight
        return weight.new_zeros(2, samples, 8), weight.new_full((2, samples, 8), 0.5)

    def forward(self, tokens: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        self.cells.flatten_parameters()
        outputs, state = self.cells.forward(self.embed.forward(tokens), state)
        return self.head.forward(outputs) + torch.zeros(WORDS, device=self.empty.device), state


@loop(fsdp=BY_SIZE)
def a_state_made_like_a_weight_and_forwards_called_by_name(run: Run) -> None:
    torch.manual_seed(1)
    model = Recurrent()
    model, optimizer = run.prepare(model, adam(model.parameters()))
    state = run.unwrap(model).first_state(len(run.batch(0)))
    for step in range(run.steps):
        tokens = run.batch(step).t()
        scores, state = model(tokens[:-1], tuple(one.detach() for one in state))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[1:].flatten())
        run.backward(loss)
        run.step(optimizer)
        run.see_mean(loss)
