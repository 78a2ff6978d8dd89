"""What a parameter carries over into sharding, what cannot follow it, and references that the script still holds."""

import copy
import io
import logging
import os
import pickle
import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, distribute_tensor

from shardkit import Accelerator
from shardkit.distributed.collectives import broadcast_object_list
from shardkit.errors import ModelError, UsageError
from shardkit.runtime.steps import foreign_steps
from shardkit.sharding.tensors import pickled_parts
from tests import loops
from tests.loops.net import Net, adam, loss_of


def accelerator_for(strategy: int) -> Accelerator:
    return Accelerator(config=loops.config_of(strategy, loops.LOOPS["usual"]))


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 11, (12, 6), generator=generator).chunk(dist.get_world_size())[dist.get_rank()]


def refusal(function: Any) -> str:
    """The text of the error; empty if there is none."""
    try:
        function()
    except (UsageError, ModelError) as error:
        return str(error)
    return ""


# ---- what is carried over ----


@torch.compile(backend="aot_eager")
def compiled_square(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.square().sum()


def in_a_compiled_function() -> tuple[float, float, float]:
    accelerator = accelerator_for(1)
    model = accelerator.prepare(Net(8))
    weight = model.parts[0].up.weight
    (gradient,) = torch.autograd.grad(compiled_square(weight), weight)
    expected = weight.full_tensor().detach()
    found = compiled_square(weight).full_tensor() - expected.square().sum()
    return float(found.abs()), float((gradient.full_tensor() - 2 * expected).abs().max()), float(expected.abs().max())


@pytest.mark.slow
def test_a_compiled_function_takes_a_sharded_parameter(ranks):
    error, error_of_gradient, largest = ranks.run(2, in_a_compiled_function)[1]
    assert error < 1e-4 and error_of_gradient < 1e-6 < largest


def carried(strategy: int) -> tuple[Any, ...]:
    accelerator, model, heard = accelerator_for(strategy), Net(), []
    model.embed.weight._no_weight_decay = True
    model.parts[0].up.weight.note = {"lr": 3}
    model.head.weight.register_post_accumulate_grad_hook(lambda p: heard.append(type(p.grad)))
    inside = []
    model.parts[0].register_forward_pre_hook(lambda module, args: inside.append(module.up.weight.note))
    model = accelerator.prepare(model)
    accelerator.backward(loss_of(model, batch()))
    parameters = dict(accelerator.unwrap_model(model).named_parameters())
    notes = parameters["embed.weight"]._no_weight_decay, parameters["parts.0.up.weight"].note, inside[0]
    return (*notes, [kind is DTensor for kind in heard])


@pytest.mark.parametrize("strategy", [1, 2])
def test_attributes_and_hooks_after_accumulation_follow(ranks, strategy):
    assert ranks.run(2, carried, strategy) == [(True, {"lr": 3}, {"lr": 3}, [True])] * 2


def with_a_gradient_hook(strategy: int) -> str:
    model = Net()
    model.head.weight.register_hook(lambda gradient: gradient * 2)
    return refusal(lambda: accelerator_for(strategy).prepare(model))


def test_hooks_that_change_gradients_are_refused_where_they_would_be_lost(ranks):
    expected = "model: head.weight has a gradient hook (register_hook)"
    assert all(text.startswith(expected) for text in ranks.run(2, with_a_gradient_hook, 1))
    assert ranks.run(2, with_a_gradient_hook, 3) == ["", ""]


def with_a_module_of_kind(strategy: int, kind: str) -> str:
    model = Net()
    model.extra = {
        "scripted": lambda: torch.jit.script(nn.Linear(2, 2)),
        "traced": lambda: torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)),
        "without parameters": lambda: torch.jit.script(nn.Tanh()),
        "limited": lambda: nn.Embedding(4, 2, max_norm=0.5),
    }[kind]()
    return refusal(lambda: accelerator_for(strategy).prepare(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.slow
def test_modules_whose_weights_cannot_be_sharded_or_kept_equal_are_refused(ranks):
    for kind in ("scripted", "traced"):
        assert "model: extra is a TorchScript module" in ranks.run(2, with_a_module_of_kind, 1, kind)[1]
        assert ranks.run(2, with_a_module_of_kind, 3, kind) == ["", ""]
    assert ranks.run(2, with_a_module_of_kind, 1, "without parameters") == ["", ""]
    for strategy in (1, 3):
        for text in ranks.run(2, with_a_module_of_kind, strategy, "limited"):
            assert "model: extra changes its weight in forward" in text and "(got max_norm=0.5)" in text
    assert ranks.run(1, with_a_module_of_kind, 3, "limited") == [""]


class OwnParameters(Net):
    """Its `parameters()` takes no argument, and leaves out the embedding, which stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def parameters(self) -> Any:
        yield from (p for p in super().parameters() if p is not self.embed.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


class HoldsOwnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnParameters()
        self.recurrent = nn.RNN(11, 11, batch_first=True)

    def parameters(self) -> Any:
        return nn.Module.parameters(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.inner(tokens))[0]


class NamesWithout(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if name != "scale")


def trained_as_redefined(strategy: int, kind: type[nn.Module]) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    accelerator, model = accelerator_for(strategy), kind()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD([*model.parameters()], lr=0.5))
    for _ in range(2):
        accelerator.backward(loss_of(model, batch()))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.parametrize("kind", [OwnParameters, HoldsOwnParameters])
@pytest.mark.parametrize("strategy", [1, 2, 3])
def test_a_class_may_redefine_parameters_without_their_arguments(ranks, strategy, kind):
    (plain,), (found, _) = (
        ranks.run(1, trained_as_redefined, 3, kind),
        ranks.run(2, trained_as_redefined, strategy, kind),
    )
    torch.testing.assert_close(found, plain)


def names_without(strategy: int) -> str:
    return refusal(lambda: accelerator_for(strategy).prepare(NamesWithout()))


def test_a_class_whose_named_parameters_leave_some_out_is_refused_where_fsdp_would(ranks):
    assert "NamesWithout leaves out its own parameters" in ranks.run(2, names_without, 1)[1]
    assert ranks.run(2, names_without, 3) == ["", ""]


def with_a_hook_after_accumulation() -> str:
    model = Net()
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    return refusal(lambda: accelerator_for(3).prepare(model))


def test_hooks_that_would_see_one_ranks_gradient_are_refused(ranks):
    for text in ranks.run(2, with_a_hook_after_accumulation):
        assert "head.weight has a post-accumulate-grad hook, which would run before its gradient is averaged" in text


def parametrized_after_prepare(has_bias: bool) -> tuple[str, bool]:
    """The error of the first step, and whether the weights are those from before it."""
    accelerator = accelerator_for(3)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(nn.Linear(5, 7, bias=has_bias), nn.Linear(7, 3, bias=has_bias)))
    for linear in accelerator.unwrap_model(model):
        nn.utils.parametrizations.spectral_norm(linear)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.full((2, 5), dist.get_rank() + 1.0)).sum())
    before = [p.detach().clone() for p in model.parameters()]
    text = refusal(optimizer.step)
    return text, all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("has_bias", [True, False])
def test_parameters_that_ddp_no_longer_sees_are_refused_before_the_step(ranks, has_bias):
    """Without a bias in the model all of them are such, and torch's reducer waits for none."""
    for text, are_kept in ranks.run(2, parametrized_after_prepare, has_bias):
        assert "torch's reducer does not see those of some parameters" in text
        assert are_kept


# ---- references from before ----


def used_before(strategy: int) -> list[str]:
    """The error of each use of a parameter that was taken before prepare."""
    accelerator, model = accelerator_for(strategy), Net()
    before = list(model.parameters())
    accelerator.prepare(model)
    uses = (
        lambda: sum(p.pow(2).sum() for p in before),
        lambda: torch.stack([p.norm() for p in before]),
        lambda: [p.requires_grad_(False) for p in before],
        lambda: torch.nn.utils.parameters_to_vector(before),
        lambda: [p.add_(1) for p in before],
        lambda: torch.nn.utils.clip_grad_norm_(before, 1.0),
        lambda: [p.data.clamp_(-1, 1) for p in before],
        lambda: [setattr(p, "grad", None) for p in before],
        lambda: [p for p in before if p.ndim > 1],
        lambda: copy.deepcopy(before),
        lambda: pickle.dumps(before),
    )
    return [refusal(use) for use in uses]


def test_parameters_taken_before_prepare_say_so_when_they_are_used(ranks):
    for texts in ranks.run(2, used_before, 1):
        for text in texts:
            assert text.startswith("embed.weight: this parameter was taken from the model before prepare"), text
            assert "take it from the prepared model: model.parameters()." in text
        assert [text.split("a use of ")[1].split(")")[0] for text in texts[5:]] == [
            *("grad", "data", "grad", "ndim", "data", "data"),
        ]
    assert ranks.run(2, used_before, 3) == [[""] * 11] * 2


class InPlainList(nn.Module):
    """Its layers are in a plain list, and only their parameters are registered."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.layers = kind([nn.Linear(4, 4) for _ in range(2)])
        self.all = nn.ParameterList(parameter for layer in self.layers for parameter in layer.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layers_in(kind: type) -> str:
    model = Accelerator(config={"use_cpu": True, "num_processes": 2}).prepare(InPlainList(kind))
    return refusal(lambda: model(torch.ones(1, 4)))


def test_modules_in_a_plain_list_are_said_to_belong_into_a_module_list(ranks):
    for text in ranks.run(2, layers_in, list):
        assert text.startswith("all.0: this parameter was taken") and "belong into an nn.ModuleList." in text
    assert ranks.run(2, layers_in, nn.ModuleList) == [""] * 2


class Shifted(Net):
    """Its first parameter has no dimension, so it is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self._parameters["shift"] = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.shift


def unprepared_optimizer(strategy: int, kind: type[nn.Module]) -> str:
    accelerator, model = accelerator_for(strategy), kind()
    optimizer = adam(model.parameters())
    model = accelerator.prepare(model)
    accelerator.backward(loss_of(model, batch()))
    return refusal(optimizer.step)


@pytest.mark.parametrize("kind", [Net, Shifted])
def test_an_optimizer_built_before_and_not_prepared_is_refused_at_its_first_step(ranks, kind):
    for text in ranks.run(2, unprepared_optimizer, 1, kind):
        assert text.startswith("optimizer step: AdamW was built before its model was prepared, and was not prepared")
    assert ranks.run(2, unprepared_optimizer, 3, kind) == ["", ""]


def test_models_are_walked_through_for_an_unprepared_optimizer_only_where_something_has_changed(alone, monkeypatch):
    accelerator, walks = accelerator_for(3), []
    monkeypatch.setattr(foreign_steps, "every_parameter", lambda model: walks.append(model) or iter(model.parameters()))
    first, second = accelerator.prepare(Net()), Net()
    optimizer = adam(second.parameters())

    def walked() -> list[nn.Module]:  # without those of earlier tests that are not collected yet
        return [one for one in walks if one in accelerator._run.models]

    def noticed() -> bool:
        for _ in range(3):
            optimizer.step()
        return optimizer in foreign_steps.stepped_on(accelerator._run.accumulation)

    assert not noticed()
    assert walked() == [first]
    prepared = accelerator.prepare(second)
    assert noticed()
    assert walked() == [first, first, prepared]
    optimizer.add_param_group({"params": [torch.zeros(1, requires_grad=True)]})
    assert noticed()
    assert walked() == [first, first, prepared, first, prepared]


def added_to_the_optimizer(strategy: int) -> list[str]:
    """What an optimizer refuses to train that prepare would refuse, too: of another model, and of a new module."""
    accelerator = accelerator_for(strategy)
    model, optimizer = accelerator.prepare(*((one := Net()), adam(one.parameters())))
    refused = [refusal(lambda: optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()}))]
    accelerator.free_memory()
    model = accelerator.prepare(Net())
    accelerator.unwrap_model(model).head = nn.Linear(7, 11)
    late = adam(model.parameters())
    accelerator.backward(loss_of(model, batch()))
    return [*refused, refusal(late.step)]


def test_what_is_refused_is_forgotten(alone):
    """A notebook corrects the cell and runs it again."""
    accelerator = Accelerator(config={"use_cpu": True, "distributed_type": "NO"})
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(UsageError, match="trains parameters of no prepared model"):
        accelerator.prepare(model, torch.optim.SGD(other.parameters()))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters()))
    with pytest.raises(UsageError, match="trains parameters of no prepared model"):
        optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 1
    assert accelerator.prepare(optimizer) is optimizer


@pytest.mark.parametrize("strategy", [1, 3])
def test_an_optimizer_does_not_train_what_is_not_reduced(ranks, strategy):
    for strangers, late in ranks.run(2, added_to_the_optimizer, strategy):
        assert "AdamW trains parameters of no prepared model (got 2 of 15" in strangers
        assert "put a parameter without a module (SAC's log_alpha) into a module of its own" in strangers
        assert "trains parameters that were added to the model after it was prepared (got head.weight" in late


def raw_step_in_fp16() -> list[str]:
    accelerator = Accelerator(config={"use_cpu": True, "num_processes": 1, "mixed_precision": "fp16"})
    model = Net()
    raw = adam(model.parameters())
    model, optimizer = accelerator.prepare(model, raw)
    accelerator.backward(loss_of(model, batch()))
    refused = [refusal(raw.step), refusal(optimizer.step)]
    loss_of(model, batch()).backward()
    return [*refused, refusal(raw.step)]


def test_a_step_on_scaled_gradients_is_refused(ranks):
    ((scaled, prepared, plain),) = ranks.run(1, raw_step_in_fp16)
    assert scaled.startswith("optimizer step: AdamW is not a prepared optimizer, and the gradients still have fp16's")
    assert (prepared, plain) == ("", "")


def added_after(strategy: int) -> str:
    accelerator, model = accelerator_for(strategy), Net()
    model = accelerator.prepare(model)
    accelerator.unwrap_model(model).head = nn.Linear(7, 11)
    return refusal(lambda: accelerator.prepare(adam(model.parameters())))


@pytest.mark.parametrize("strategy", [1, 3])
def test_modules_put_into_a_prepared_model_are_refused(ranks, strategy):
    for text in ranks.run(2, added_after, strategy):
        assert "trains parameters that were added to the model after it was prepared" in text
        assert "head.weight" in text


def shared_by_two(strategy: int, at_once: bool) -> str:
    accelerator, first, second = accelerator_for(strategy), Net(), Net()
    second.embed = first.embed

    def prepare() -> None:
        if at_once:
            accelerator.prepare(first, second)
        else:
            accelerator.prepare(first)
            accelerator.prepare(second)

    return refusal(prepare)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("strategy", [1, 3])
def test_two_models_that_share_a_parameter_are_refused(ranks, strategy, at_once):
    for text in ranks.run(2, shared_by_two, strategy, at_once):
        assert text.startswith("prepare: two models share embed.weight")
        assert "put both into one module" in text


class Average(nn.Module):
    """An average of a model's weights that keeps the model it follows as a submodule."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.followed = model
        self.average = copy.deepcopy(model).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        for kept, parameter in zip(self.average.parameters(), self.followed.parameters(), strict=True):
            kept.lerp_(parameter, 0.5)


def averaged(strategy: int | None) -> tuple[str, list[torch.Tensor]]:
    """What prepare says of an average of a prepared model; its weights after two steps, unprepared. None: plain torch
    on all samples."""
    torch.manual_seed(3)
    model, said = Net(), ""
    average, optimizer = Average(model), adam(model.parameters())
    tokens = torch.randint(0, 11, (12, 6), generator=torch.Generator().manual_seed(0))
    backward = torch.Tensor.backward
    if strategy is not None:
        accelerator = accelerator_for(strategy)
        model, optimizer = accelerator.prepare(model, optimizer)
        said, tokens, backward = refusal(lambda: accelerator.prepare(average)), batch(), accelerator.backward
    for _ in range(2):
        backward(loss_of(model, tokens))
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    return said, list(average.average.parameters())


@pytest.mark.parametrize("strategy", [1, 3])
def test_an_average_that_keeps_a_prepared_model_is_told_to_stay_unprepared_and_follows_it(ranks, strategy):
    _, expected = averaged(None)
    for said, found in ranks.run(2, averaged, strategy):
        assert said.startswith("prepare: two models share followed.embed.weight")
        assert "Average has no other parameters to train, so do not prepare it" in said
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


# ---- values set by assignment ----


def assigned() -> list[Any]:
    accelerator, model = accelerator_for(1), Net()
    model = accelerator.prepare(model)
    weight = model.head.weight
    found = []
    weight.data = weight.data * 0 + 2.0
    found.append(weight.full_tensor().unique().tolist())
    weight.data = torch.full((11, 7), 3.0)
    found.append(weight.full_tensor().unique().tolist())
    with torch.no_grad():
        found.append(model.head(torch.ones(1, 7)).detach().unique().numel() > 0)
    found.append(refusal(lambda: setattr(weight, "data", torch.zeros(2, 2)))[:60])
    found.append(float(copy.deepcopy(weight).full_tensor()[0, 0].detach()))
    found.append(type(weight * 1) is DTensor and type(model.state_dict()["head.weight"]) is DTensor)
    return found


def test_assigning_data_sets_the_values(ranks):
    for found in ranks.run(2, assigned):
        assert found[:3] == [[2.0], [3.0], True]
        assert found[3] == "parameter.data = ...: a sharded parameter keeps its shape (g"
        assert found[4:] == [3.0, True]


def moved_parts() -> tuple[list[torch.Tensor], list[str]]:
    """A loop that moves parts of the model to where they are, as modules do with what they get in forward."""
    accelerator, model = accelerator_for(1), Net()
    model, optimizer = accelerator.prepare(model, adam(model.parameters()))
    for _ in range(3):
        accelerator.backward(loss_of(model, batch()))
        optimizer.step()
        optimizer.zero_grad()
        model.head.to(accelerator.device)
        model.parts[0].float()
    parts = (model.head, model.parts[0])
    refusals = [refusal(part.double) for part in parts]
    return [p.full_tensor().detach() for p in model.parameters()], refusals


def test_parts_of_a_sharded_model_are_moved_as_the_whole_is(ranks):
    for weights, refusals in ranks.run(2, moved_parts):
        torch.testing.assert_close(weights, ranks.run(1, moved_parts)[0][0])
        assert [text.split(" (got")[0] for text in refusals] == [
            "model.to: a sharded model keeps its dtype and device",
        ] * 2


def initialized_again() -> tuple[torch.Tensor, str]:
    """Values that a script gives to sharded weights by torch's initializations."""
    model = accelerator_for(1).prepare(Net())
    nn.init.eye_(model.parts[0].up.weight)
    wide = model.parts[0].down.weight
    return model.parts[0].up.weight.full_tensor().detach(), refusal(lambda: nn.init.orthogonal_(wide))


def test_sharded_weights_are_initialized_again_or_an_error_says_how(ranks):
    for values, text in ranks.run(2, initialized_again):
        assert torch.equal(values, torch.eye(14, 7))
        assert text.startswith("sharded tensor: it cannot be transposed in place (got t_(), maybe of nn.init.orthog")


def numbers_of_parts() -> list[Any]:
    """Of a sharded tensor, as a script logs them: an error in words; of its norm, the number."""
    accelerator, model = accelerator_for(1), Net()
    model = accelerator.prepare(model)
    weight = model.head.weight
    reads = (lambda: weight.detach().cpu().numpy(), lambda: weight.tolist(), lambda: np.asarray(weight.detach()))
    norm = float(weight.full_tensor().detach().norm())
    close = np.allclose([weight.norm().tolist(), weight.detach().norm().numpy()], norm)
    return [*map(refusal, reads), close]


def test_numbers_of_a_sharded_tensor_are_those_of_the_whole_one(ranks):
    for *texts, is_close in ranks.run(2, numbers_of_parts):
        assert is_close and [text.split(" (got")[0] for text in texts] == [
            f"tensor.{name}: a rank has only a part of a sharded tensor" for name in ("numpy", "tolist", "__array__")
        ]


def own_mesh() -> DeviceMesh:
    """A mesh of this rank alone."""
    return DeviceMesh("cpu", torch.arange(2).view(2, 1), mesh_dim_names=("replicas", "own"))["own"]


def collectives_that_need_whole_tensors() -> list[str]:
    weight = accelerator_for(1).prepare(Net()).head.weight.detach()
    whole = [torch.empty(weight.shape) for _ in range(2)]
    calls = (
        lambda: dist.all_gather(whole, weight),
        lambda: dist.all_gather_into_tensor(torch.empty(2 * len(weight), *weight.shape[1:]), weight),
        lambda: dist.reduce(weight, 0),
        lambda: dist.all_reduce(weight, dist.ReduceOp.PRODUCT),
        lambda: dist.all_reduce(distribute_tensor(torch.ones(2), own_mesh())),
    )
    return [*map(refusal, calls)]


def test_collectives_of_parts_are_refused(ranks):
    for texts in ranks.run(2, collectives_that_need_whole_tensors):
        names = [text.partition(": a rank has only a part of a sharded tensor; remove the call")[0] for text in texts]
        found = [name.removeprefix("torch.distributed (").rstrip(")") for name in names]
        assert found == ["allgather", "allgather_base", "reduce", "allreduce", "allreduce"]


def pickled() -> tuple[str, str, list[str]]:
    """The kinds of tensors in pickles of whole and of sharded tensors, and the warnings of the latter."""
    accelerator, model, told = accelerator_for(1), Net(), []
    model = accelerator.prepare(model)
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    whole = type(pickle.loads(pickle.dumps(state))["head.weight"]).__name__
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    pickled_parts.log.addHandler(handler)
    pickled_parts._warn_of_parts.cache_clear()
    torch.save(copy.deepcopy(model.state_dict()), io.BytesIO())
    torch.save(list(model.parameters()), file := io.BytesIO())
    pickled_parts.log.removeHandler(handler)
    file.seek(0)
    return whole, type(torch.load(file)[0]).__name__, told


def test_a_pickled_state_dict_holds_plain_things_and_sharded_ones_with_a_warning(ranks):
    for whole, part, told in ranks.run(2, pickled):
        assert (whole, part) == ("Tensor", "DTensor")
        (text,) = told
        assert text.startswith("torch.save: sharded tensors are pickled, so this rank writes its own part")
        assert "accelerator.save_model(model, folder)" in text


def written_by_safetensors() -> list[str]:
    """What is said where a script writes sharded weights, and what is written of whole ones, on the ranks that have
    them."""
    accelerator, folder = accelerator_for(1), tempfile.mkdtemp()
    model = accelerator.prepare(Net())
    path = os.path.join(folder, "weights.safetensors")
    told = [
        refusal(lambda: safetensors.torch.save_file(model.state_dict(), path)),
        refusal(lambda: safetensors.torch.save_model(model, path)),
    ]
    if whole := accelerator.get_state_dict(model):
        safetensors.torch.save_file(whole, path)
    shutil.rmtree(folder)
    return told


def test_sharded_weights_are_refused_where_safetensors_would_fail(ranks):
    for told in ranks.run(2, written_by_safetensors):
        for text in told:
            assert text.startswith("safetensors: a sharded tensor has no memory of its own to write (got one of ")
            assert "accelerator.get_state_dict(model) gives them to rank 0" in text


def pickled_loss() -> tuple[list[str], str]:
    """What is said where a penalty on the weights is saved, and where a rank loads that of rank 0."""
    model, told = accelerator_for(1).prepare(Net()), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    pickled_parts.log.addHandler(handler)
    pickled_parts._warn_of_pending.cache_clear()
    torch.save({"loss": model.head.weight.detach().square().sum()}, file := io.BytesIO())
    pickled_parts.log.removeHandler(handler)
    (of_rank_0,) = broadcast_object_list([file.getvalue()])
    return told, refusal(lambda: torch.load(io.BytesIO(of_rank_0)))


def test_a_pickled_loss_that_is_not_summed_over_the_ranks_is_told(ranks):
    for rank, (told, refused) in enumerate(ranks.run(2, pickled_loss)):
        assert [text.partition(" a value ")[0] for text in told] == ["torch.save:"]
        assert told[0].endswith("loss.item().")
        assert ("and loss.item() a loss." in refused) == (rank == 1)


def pickled_rows() -> list[tuple[str, bool]]:
    """What comes back of parts of a sharded parameter that do not begin where it does, and of chosen rows."""
    weight = accelerator_for(1).prepare(Net()).head.weight
    found = []
    for part in (weight[1:3], weight[1], weight.detach()[:, 1:2], weight[[1, 2]]):
        torch.save(part, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file)
        same = loaded.full_tensor() if isinstance(loaded, DTensor) else loaded
        found.append((type(loaded).__name__, torch.equal(same, part.full_tensor())))
    return found


def test_rows_of_a_sharded_parameter_are_pickled_as_plain_tensors(ranks):
    for found in ranks.run(2, pickled_rows):
        assert found == [("Tensor", True), ("Tensor", True), ("DTensor", True), ("Tensor", True)]


def loaded_from_rank_0(strategy: int) -> tuple[bool, str]:
    """Whether a rank loads what it has pickled itself, and the refusal of what rank 0 has."""
    accelerator = accelerator_for(strategy)
    state = accelerator.prepare(Net()).state_dict()
    torch.save(state, own := io.BytesIO())
    name, held = next(iter(state.items()))
    same = torch.load(io.BytesIO(own.getvalue()))[name].to_local().equal(held.to_local())
    (of_rank_0,) = broadcast_object_list([own.getvalue()])
    return same, refusal(lambda: torch.load(io.BytesIO(of_rank_0)))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), [(1, 2), (4, 4)])
def test_a_rank_loads_its_own_parts_and_refuses_those_of_another(ranks, strategy, world):
    words = "torch.load: the file has parts of sharded tensors that rank 0 wrote (got it on rank {}), and this rank has"
    for rank, (same, told) in enumerate(ranks.run(world, loaded_from_rank_0, strategy)):
        assert same
        has_those_of_rank_0 = rank % 2 == 0  # its replica has, too
        assert told == "" if has_those_of_rank_0 else told.startswith(words.format(rank))


# ---- whole values ----


def loaded_in_part() -> list[str]:
    torch.manual_seed(0)
    given = Net()
    torch.manual_seed(1)
    model = accelerator_for(1).prepare(Net())
    model.parts[0].load_state_dict(given.parts[0].state_dict())
    model.head.load_state_dict({"weight": given.head.weight}, strict=False)
    expected = given.state_dict()
    return [name for name, value in model.state_dict().items() if torch.equal(value.full_tensor(), expected[name])]


def test_a_part_of_a_model_loads_whole_values(ranks):
    part = [f"parts.0.{name}" for name in Net().parts[0].state_dict()]
    norm = ["norm.weight", "norm.bias"]  # as every Net has them
    assert ranks.run(2, loaded_in_part) == [[*part, *norm, "head.weight"]] * 2
