"""Models, optimizers, schedulers and loaders that are prepared one by one, in any order, again, or cannot be."""

import gc
import inspect
from collections import Counter
from weakref import ref

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator, ProjectConfiguration, init_empty_weights
from shardkit.errors import CheckpointError, ModelError, UsageError
from shardkit.runtime import summary
from tests.ranks import log_lines
from tests.training import BOTH, DDP, FULL, Block, Model, Points, loss_of, one_step, parts, weights_of


def prepared_in_pieces(config: dict, order: str) -> list[torch.Tensor]:
    accelerator = Accelerator(config=config)
    model, optimizer, loader, scheduler = parts(16, 4)
    for batch in loader:  # the optimizer has state before it is prepared
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        break
    if order == "model first":
        model, optimizer = accelerator.prepare_model(model), accelerator.prepare_optimizer(optimizer)
    else:
        optimizer, model = accelerator.prepare_optimizer(optimizer), accelerator.prepare_model(model)
    loader, scheduler = accelerator.prepare_data_loader(loader), accelerator.prepare_scheduler(scheduler)
    assert accelerator.prepare(model, optimizer, loader, scheduler) == (model, optimizer, loader, scheduler)
    for batch in loader:
        one_step(accelerator, model, optimizer, batch)
        scheduler.step()
    assert accelerator.counters.step == 2
    return weights_of(model)


def by_hand() -> list[torch.Tensor]:
    model, optimizer, loader, scheduler = parts(16, 4)
    first = next(iter(loader))
    for batch in [first, *DataLoader(Points(16), batch_size=8)]:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if batch is not first:
            scheduler.step()
    return weights_of(model)


@pytest.mark.requirement("D3")
@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_objects_may_be_prepared_one_by_one_and_an_optimizer_keeps_its_state(ranks, config, order):
    for found in ranks.run(2, prepared_in_pieces, config, order):
        torch.testing.assert_close(found, by_hand(), rtol=1e-5, atol=1e-6)


def counted_at_a_save(config: dict) -> list[tuple[int, int, int]]:
    accelerator = Accelerator(config=config, gradient_accumulation_steps=2)
    model, optimizer, loader, _ = accelerator.prepare(*parts(32, 4))
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            one_step(accelerator, model, optimizer, batch)
            at_step = accelerator.counters.state_dict()
            found.append((at_step["step"], at_step["samples_seen"], accelerator.counters.samples_seen))
    accelerator.counters.load_state_dict({"step": 5, "samples_seen": 60})
    assert accelerator.counters.state_dict() == {"step": 5, "samples_seen": 60, "loaders": 1}
    return found


@pytest.mark.parametrize("config", BOTH)
def test_a_save_counts_samples_up_to_the_last_step(ranks, config):
    expected = [(0, 0, 8), (1, 16, 16), (1, 16, 24), (2, 32, 32)]
    assert ranks.run(2, counted_at_a_save, config) == [expected] * 2


def two_models(config: dict, zero_first: bool) -> tuple[int, int, list[torch.Tensor]]:
    accelerator = Accelerator(config=config, gradient_accumulation_steps=2)
    torch.manual_seed(1)
    student, teacher = Model(), Model().requires_grad_(False)
    other = Model()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (student, other)]
    student, teacher, nothing, other, first, second = accelerator.prepare(student, teacher, None, other, *optimizers)
    assert nothing is None
    loader = accelerator.prepare(DataLoader(Points(32), batch_size=4))
    for batch in loader:
        with accelerator.accumulate(student, other):
            target = teacher(batch["x"])
            for model, optimizer in ((student, first), (other, second)):
                if zero_first:
                    optimizer.zero_grad()
                accelerator.backward(nn.functional.mse_loss(model(batch["x"]), target))
                optimizer.step()
                if not zero_first:
                    optimizer.zero_grad()
    return accelerator.counters.step, accelerator.counters.samples_seen, weights_of(student) + weights_of(other)


def two_models_by_hand() -> list[torch.Tensor]:
    torch.manual_seed(1)
    student, teacher = Model(), Model().requires_grad_(False)
    other = Model()
    for model in (student, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in DataLoader(Points(32), batch_size=16):
            nn.functional.mse_loss(model(batch["x"]), teacher(batch["x"])).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(student) + weights_of(other)


@pytest.mark.slow
@pytest.mark.requirement("N4")
@pytest.mark.parametrize("config", BOTH)
@pytest.mark.parametrize("zero_first", [False, True])
def test_several_models_in_turn_and_one_without_an_optimizer(ranks, config, zero_first):
    for steps, samples, weights in ranks.run(2, two_models, config, zero_first):
        assert (steps, samples) == (2, 32)
        torch.testing.assert_close(weights, two_models_by_hand(), rtol=1e-5, atol=1e-6)


CALLS = Counter[str]()


class First(Block):
    name = "First"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLS[self.name] += 1
        return super().forward(x)


class Second(First):
    name = "Second"


def of_different_blocks() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Models with blocks of two classes, and one without blocks."""
    torch.manual_seed(1)
    models: list[nn.Module] = [Model(), Model(), nn.Sequential(nn.Linear(6, 3))]
    models[0].blocks = nn.ModuleList([First() for _ in range(2)])
    models[1].blocks = nn.ModuleList([Second() for _ in range(3)])
    return models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def each_by_its_own_blocks(together: bool) -> tuple[list[list[str]], dict[str, int], list[torch.Tensor], list[str]]:
    section = {
        "fsdp_transformer_layer_cls_to_wrap": ["First", "Second"],
        "fsdp_activation_checkpointing": True,
        "fsdp_ignored_modules": r"blocks\.2\.down",
    }
    accelerator = Accelerator(config={**FULL, "fsdp_config": section})
    models, optimizers = of_different_blocks()
    CALLS.clear()
    if together:
        prepared = accelerator.prepare(*models, *optimizers)
        models, optimizers = list(prepared[:3]), list(prepared[3:])
    else:
        models = [*accelerator.prepare(*models[:2]), accelerator.prepare(models[2])]
        optimizers = [accelerator.prepare(one) for one in optimizers]
    for batch in accelerator.prepare(DataLoader(Points(16), batch_size=4)):
        for model, optimizer in zip(models, optimizers, strict=True):
            one_step(accelerator, model, optimizer, batch)
    units = [summary.unit_texts(model) for model in models]
    calls, weights = dict(CALLS), [w for model in models for w in weights_of(model)]
    refused = []
    for names, some in ((["First", "Second"], slice(0, 1)), (["First", "Lost"], slice(0, 3))):
        accelerator.free_memory()
        section = {"fsdp_transformer_layer_cls_to_wrap": names}
        accelerator = Accelerator(config={**FULL, "fsdp_config": section})
        with pytest.raises(ModelError) as error:
            accelerator.prepare(*of_different_blocks()[0][some])
        refused.append(str(error.value))
    return units, calls, weights, refused


@pytest.mark.slow
@pytest.mark.requirement("N4")
@pytest.mark.parametrize("together", [True, False])
def test_each_of_several_models_is_cut_and_recomputed_by_its_own_blocks(ranks, together):
    models, optimizers = of_different_blocks()
    for batch in DataLoader(Points(16), batch_size=8):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = [w for model in models for w in weights_of(model)]
    for units, calls, weights, refused in ranks.run(2, each_by_its_own_blocks, together):
        assert [[text.split(" (")[0] for text in one] for one in units] == [
            ["2 x First", "root"],
            ["2 x Second", "1 x Second", "root"],
            ["root"],
        ]
        assert calls == {"First": 2 * 2 * 2, "Second": 2 * 3 * 2}  # steps x blocks x (forward and recomputation)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        assert "no module of class Second in the model (Model)" in refused[0]
        assert "The class of another model may be named where both are prepared in one call." in refused[0]
        assert "no module of class Lost" in refused[1] and "of class First" not in refused[1]


def from_file(path: str) -> list[torch.Tensor]:
    accelerator = Accelerator(config=FULL)
    with init_empty_weights():
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer, model = accelerator.prepare(optimizer, model, weights=path)
    for batch in accelerator.prepare(DataLoader(Points(16), batch_size=4)):
        one_step(accelerator, model, optimizer, batch)
    return weights_of(model)


@pytest.mark.requirement("A7")
def test_a_model_without_memory_is_filled_from_a_file_and_its_optimizer_follows(ranks, tmp_path):
    model, optimizer, loader, _ = parts(16, 8)
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    for batch in loader:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(2, from_file, str(tmp_path / "model.safetensors")):
        torch.testing.assert_close(found, weights_of(model), rtol=1e-5, atol=1e-6)


class Warming:
    """A schedule written around its optimizer, which the loop calls in its place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


def refusals() -> list[str]:
    accelerator = Accelerator(config=FULL)
    model, other = Model(), Model()
    messages = []
    warming = Warming(torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(UsageError) as caught:
        accelerator.prepare(model, {"lr": 1}, "text", warming, torch.optim.lr_scheduler.StepLR)
    messages.append(str(caught.value))
    model = accelerator.prepare(model)
    with pytest.raises(UsageError) as caught:
        accelerator.prepare(torch.optim.SGD(other.parameters(), lr=1))
    messages.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        accelerator.clip_grad_norm_(other.parameters(), 1.0)
    messages.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        accelerator.register_for_checkpointing(object())
    messages.append(str(caught.value))
    return messages


def test_what_cannot_be_prepared_is_refused_in_words(ranks):
    for kinds, strangers, unknown, registered in ranks.run(2, refusals):
        assert kinds.splitlines() == [
            "prepare: argument 2 is neither model, optimizer, data loader nor scheduler (got dict); leave it out.",
            "prepare: argument 3 is neither model, optimizer, data loader nor scheduler (got str); leave it out.",
            "prepare: argument 4 has zero_grad() as optimizers have, but is no torch.optim.Optimizer (got Warming); "
            "derive it from that, or prepare the optimizer inside, and create Warming around the prepared one.",
            "prepare: argument 5 is a class (got StepLR); give an object of it.",
        ]
        assert strangers.startswith("prepare: SGD trains parameters of no prepared model (got 10 of 10")
        assert unknown.startswith("clip: not parameters of a prepared model (got 10); use model.parameters()")
        assert "no state_dict and load_state_dict (got object)" in registered


def prepared_again(config: dict, batch_size: int) -> tuple[list[torch.Tensor], list[float]]:
    """An evaluation, a training, an evaluation and a training of one model, as the Transformers Trainer does: each
    begins with `free_memory`, and prepares the model and the same optimizer again."""
    accelerator = Accelerator(config=config | {"shardkit": {"gradient_accumulation_steps": 2}})
    inner, optimizer, loader, scheduler = parts(24, batch_size)
    rates = []
    for _ in range(2):
        inner = accelerator.unwrap_model(accelerator.prepare_model(inner, evaluation_mode=True))
        with torch.no_grad():
            inner(torch.ones(2, 6))
        accelerator.free_memory()
        model, optimizer, batches, scheduler = accelerator.prepare(inner, optimizer, loader, scheduler)
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        inner = accelerator.unwrap_model(model)
        accelerator.free_memory()
    return weights_of(model), [*rates, accelerator.counters.step]


@pytest.mark.slow
def test_a_model_is_prepared_again_after_free_memory(ranks, alone):
    expected, rates = prepared_again({"use_cpu": True}, 8)
    assert rates[-1] == 4
    for config in (FULL, DDP):
        for found, on_rank in ranks.run(2, prepared_again, config, 4):
            assert on_rank == pytest.approx(rates)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def prepared_by_one_after_the_other(config: dict, batch_size: int) -> list[torch.Tensor]:
    """A trainer that keeps what `prepare` has returned, and gives it to the Accelerator of its next run."""
    model, optimizer, loader, _ = parts(16, batch_size)
    for frees in (True, False, True):
        accelerator = Accelerator(config=config)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader)
        for batch in batches:
            one_step(accelerator, model, optimizer, batch)
        if frees:
            accelerator.free_memory()
    evaluated = Accelerator(config=config).prepare_model(model, evaluation_mode=True)
    assert not isinstance(evaluated, nn.parallel.DistributedDataParallel)
    return weights_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("config", BOTH)
def test_a_prepared_model_is_prepared_by_another_accelerator(ranks, alone, config):
    expected = prepared_by_one_after_the_other({"use_cpu": True}, 8)
    for found in ranks.run(2, prepared_by_one_after_the_other, config, 4):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def depths_of_calls(config: dict) -> tuple[list[int], str]:
    """How many functions a block's forward lies in, for a model that is prepared by one Accelerator after the other;
    and the strategy that is shown."""
    config = config | {"fsdp_config": {"fsdp_activation_checkpointing": True}}
    model, depths = Model(), []
    model.blocks[0].register_forward_pre_hook(lambda *_: depths.append(len(inspect.stack(0))))
    for _ in range(4):
        accelerator = Accelerator(config=config)
        prepared = accelerator.prepare(model)
        prepared(torch.ones(2, 6))
        model = accelerator.unwrap_model(prepared)
    return depths, summary.text(accelerator._run)


@pytest.mark.parametrize("config", BOTH)
def test_blocks_are_changed_once_by_several_accelerators(ranks, config):
    for depths, shown in ranks.run(2, depths_of_calls, config):
        assert len(set(depths)) == 1
        assert "activation checkpointing" in shown


def dtypes_of_compute(config: dict) -> list[torch.dtype]:
    accelerator, model, found = Accelerator(config=config | {"mixed_precision": "bf16"}), Model(), []
    model.head.register_forward_hook(lambda _, __, output: found.append(output.dtype))
    for _ in range(2):
        model = accelerator.unwrap_model(accelerator.prepare(model), keep_fp32_wrapper=False)
        accelerator.free_memory()
        accelerator.prepare(model)(torch.ones(2, 6))
    return found


@pytest.mark.parametrize("config", BOTH)
def test_a_model_whose_forward_was_restored_computes_in_mixed_precision_when_it_is_prepared_again(ranks, config):
    assert ranks.run(2, dtypes_of_compute, config) == [[torch.bfloat16] * 2] * 2


def weights_loaded_later(config: dict, path: str) -> list[list[torch.Tensor]]:
    """Weights given for a model that is prepared already: for evaluation, for training, by an earlier Accelerator."""
    found = []
    for evaluates in (True, False):
        accelerator = Accelerator(config=config)
        model = accelerator.prepare_model(Model(), evaluation_mode=evaluates)
        model = accelerator.prepare(model, weights=path)
        found.append(weights_of(model))
    model = accelerator.unwrap_model(model).requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    found.append(weights_of(Accelerator(config=config).prepare_model(model, weights=path)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("config", BOTH)
def test_a_model_that_is_prepared_already_gets_the_weights_of_a_later_call(ranks, tmp_path, config):
    torch.manual_seed(11)
    wanted = Model()
    save_file(dict(wanted.named_parameters()), tmp_path / "model.safetensors")
    for found in ranks.run(2, weights_loaded_later, config, str(tmp_path / "model.safetensors")):
        for weights in found:
            torch.testing.assert_close(weights, weights_of(wanted))


def trained_without_a_prepared_model(config: dict, has_own_ddp: bool) -> tuple[list[torch.Tensor], str]:
    accelerator = Accelerator(config=config)
    model, optimizer, loader, _ = parts(16, 4)
    if has_own_ddp:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    try:
        for batch in loader:
            one_step(accelerator, model, optimizer, batch)
    except UsageError as error:
        return weights_of(model), str(error)
    return weights_of(model), ""


@pytest.mark.parametrize("config", BOTH)
def test_an_optimizer_without_its_model_is_refused_where_nothing_reduces_its_gradients(ranks, config):
    (first, said), (second, said_too) = ranks.run(2, trained_without_a_prepared_model, config, False)
    assert said == said_too
    assert said.startswith("optimizer step: AdamW trains a model that was not prepared (got no model in prepare, and ")
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_a_model_that_the_script_distributes_itself_is_trained(ranks):
    (first, said), (second, _) = ranks.run(2, trained_without_a_prepared_model, DDP, True)
    assert not said
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def critics_prepared() -> list[str]:
    class Critic(nn.Sequential):
        """A class that no other test prepares."""

    accelerator = Accelerator(config=FULL)
    with log_lines() as lines:
        accelerator.prepare(Critic(nn.Linear(2, 2)), Critic(nn.Linear(2, 2)))
        accelerator.prepare(Critic(nn.Linear(2, 4)))
    return [line for line in lines if "Critic" in line and "fsdp_auto_wrap_policy" in line]


def test_how_models_of_one_class_are_divided_is_said_once(ranks):
    first, _ = ranks.run(2, critics_prepared)
    assert len(first) == 1 and "no block class repeats in the model (Critic)" in first[0]


@pytest.mark.slow
def test_a_loader_made_in_each_round_is_dropped_with_its_data_and_has_an_order_of_its_own(alone, tmp_path):
    """As for the samples of a policy, or where the batch size grows."""
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    settings = {"use_cpu": True, "shardkit": {"seed": 0, "checkpoint": {"resume": "auto"}}}
    accelerator = Accelerator(config=settings, project_config=project)
    data, orders = [], []
    for _ in range(5):
        dataset = TensorDataset(torch.arange(6.0))
        data.append(ref(dataset))
        loader = accelerator.prepare(DataLoader(dataset, shuffle=True))
        orders.append(torch.cat([values for (values,) in loader]).tolist())
    assert len({tuple(order) for order in orders}) == 5
    del dataset, loader
    kept = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6.0))))
    gc.collect()
    assert [one() for one in data] == [None] * 5
    accelerator.save_state()
    accelerator.free_memory()
    with pytest.raises(CheckpointError, match=r"loader\.0: the checkpoint has its position, but it is not prepared"):
        accelerator.resume()
    assert accelerator.resume(data_position=False) and kept


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 9])
def test_a_loader_made_in_an_evaluation_is_not_missed_where_the_run_is_resumed(alone, tmp_path, most):
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(config={"use_cpu": True}, project_config=project)
    model = nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(torch.ones(6, 1)))
    )

    def evaluate() -> object:
        made = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 1))))
        for number, (x,) in enumerate(made, 1):
            model(x)
            if number == most:
                break
        return made

    for (x,) in loader:
        accelerator.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        made = evaluate()
    accelerator.save_state()
    accelerator.free_memory()
    *_, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(6, 1))))
    accelerator.load_state()
    assert loader.epoch == 1 and made


def test_a_resumed_run_that_makes_a_loader_in_each_round_goes_on_with_the_order_of_the_next(alone, tmp_path):
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    settings = {"use_cpu": True, "shardkit": {"seed": 0, "checkpoint": {"resume": "auto"}}}

    def rounds(accelerator: Accelerator, number: int) -> list[list[float]]:
        made = (DataLoader(TensorDataset(torch.arange(20.0)), shuffle=True) for _ in range(number))
        return [torch.cat([values for (values,) in accelerator.prepare(one)]).tolist() for one in made]

    whole = rounds(Accelerator(config=settings), 5)
    accelerator = Accelerator(config=settings, project_config=project)
    kept = accelerator.prepare(DataLoader(TensorDataset(torch.arange(6.0))))
    before = rounds(accelerator, 2)
    accelerator.save_state()
    resumed = Accelerator(config=settings, project_config=project)
    kept = resumed.prepare(DataLoader(TensorDataset(torch.arange(6.0))))
    assert resumed.resume(data_position=False) and kept
    assert before + rounds(resumed, 2) == whole[1:]
