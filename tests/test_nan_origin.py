"""`debug: true`: no step on gradients that are NaN or infinite, and the error names what had such values first."""

import copy
import gc
import logging
import pickle
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, TensorDataset

from shardkit import Accelerator
from shardkit.errors import ModelError
from tests.ranks import log_lines

WIDTH = 8


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.up, self.act, self.fault = nn.Linear(WIDTH, WIDTH), nn.GELU(), fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.up(x))
        if self.fault == "root of zero":
            y = y + (y * 0).abs().sqrt()  # finite, but its gradient is not
        if self.fault == "mask":
            y = nn.functional.softmax(y.masked_fill(y < y.amax(-1, keepdim=True), -torch.inf), -1)
        return x + y


class Net(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block(fault if number == 1 else "") for number in range(2))
        self.head = nn.Linear(WIDTH, 1)
        if fault == "parametrization":
            self.head = weight_norm(self.head)
            nn.init.zeros_(self.head.parametrizations.weight.original1)
        if fault == "weight":
            nn.init.constant_(self.blocks[1].up.weight, torch.nan)
        if fault == "overflow":
            nn.init.constant_(self.head.weight, 3e38)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, x: torch.Tensor, fault: str) -> torch.Tensor:
    loss = model(x).square().mean()
    if fault == "loss":
        loss = loss + (loss - loss).log()
    if fault == "penalty":
        loss = loss + (model.head.bias * 0).abs().sqrt().sum()
    return loss


def ended(settings: dict[str, Any], fault: str) -> str:
    """What ends a training of two steps of two micro-batches."""
    torch.manual_seed(0)
    data = torch.rand(32, 4)
    if fault == "sample":
        data[21, 2] = torch.nan  # of rank 1, in the first micro-batch of step 2
    section = {"gradient_accumulation_steps": 2, **settings.get("shardkit", {})}
    accelerator = Accelerator(config={"use_cpu": True, "debug": True, **settings, "shardkit": section})
    model = Net(fault)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(data), 4))
    with torch.no_grad():
        model(torch.full((4, 4), torch.nan))  # an evaluation has no gradients
    for (x,) in loader:
        before = copy.deepcopy(accelerator.get_state_dict(model))
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, fault))
            try:
                optimizer.step()
            except ModelError as error:
                after = accelerator.get_state_dict(model)
                torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
                return str(error)
            optimizer.zero_grad()
    return f"done: {accelerator.counters.step} steps"


MODES: dict[str, dict[str, Any]] = {
    "FSDP": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "Block"}},
    "DDP": {"distributed_type": "MULTI_CPU"},
}

FAULTS = {
    "sample": "step 2 are NaN or infinite, and it has not changed the weights (got such values first on rank 1, "
    "micro-batch 1: the output of embed (Linear, float32 [4, 8]): 8 of 32 values are NaN, in row 1; its inputs have "
    "them already, from the data or from code between modules; then in gradients of 8 parameters, embed.weight, "
    "embed.bias, blocks.0.up.weight, ...)",
    "weight": "on rank 0, micro-batch 1: the output of blocks.1.up (Linear, float32 [4, 8]): 32 of 32 values are NaN, "
    "in all rows; its weight had NaN values before this step",
    "overflow": "micro-batch 1: the loss: inf, without NaN in an output before; infinite ones were first in the output "
    "of head (Linear, float32 [4, 1])",
    "root of zero": "the gradient of the output of blocks.1.act (GELU, float32 [4, 8]): 32 of 32 values are NaN, in "
    "all rows, in the backward from the output of blocks.1 (Block, float32 [4, 8]), whose gradient is finite",
    "loss": "micro-batch 1: the loss: -inf, without NaN in an output before; then",
    "penalty": "first in no output of a module: in an operation on the parameters, or outside of modules; then in "
    "gradients of 1 parameter, head.bias)",
    "parametrization": "the output of head.parametrizations.weight.0 (_WeightNorm, float32 [1, 8]): 8 of 8 values are "
    "NaN, in all rows; its inputs are finite, up to ",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_values_that_are_not_finite_are_named(ranks, mode, fault):
    found = ranks.run(2, ended, MODES[mode], fault)
    assert FAULTS[fault] in found[0]
    assert found[0] == found[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", ["", "mask"])
def test_infinite_values_that_mask_are_no_fault(ranks, mode, fault):
    assert ranks.run(2, ended, MODES[mode], fault) == ["done: 2 steps"] * 2


def test_one_process_names_them_too(alone):
    assert "on rank 0, micro-batch 2: the output of embed" in ended({}, "sample")


def freed(mode: str) -> tuple[str, bool]:
    """What is said of a model that the same run has freed and prepared again, and whether it keeps others alive."""
    accelerator = Accelerator(config={"use_cpu": True, "debug": True, **MODES[mode]})
    model, other = accelerator.prepare(Net("weight"), nn.Linear(4, 4))
    gone = weakref.ref(other)
    accelerator.free_memory(other)
    del other
    gc.collect()
    model = accelerator.unwrap_model(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.ones(4, 4)).mean())
    with pytest.raises(ModelError) as raised:
        optimizer.step()
    return str(raised.value), gone() is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_was_freed_and_prepared_again_is_looked_at(ranks, mode):
    said, is_alive = ranks.run(2, freed, mode)[0]
    assert "the output of blocks.1.up" in said
    assert not is_alive


def again() -> list[int]:
    """Forward hooks of a model prepared by one run and, after that is given up, by another."""
    model, found = Net(""), []
    for _ in range(2):
        accelerator = Accelerator(config={"use_cpu": True, "debug": True})
        model = accelerator.prepare(model)
        found.append(len(model.head._forward_hooks))
        accelerator.free_memory()
    return found


@pytest.mark.slow
def test_a_model_prepared_again_is_looked_at_once(alone):
    assert len({*again()}) == 1


def skipped() -> str:
    """A script that leaves out micro-batches whose loss is NaN on any rank."""
    torch.manual_seed(0)
    accelerator = Accelerator(config={"use_cpu": True, "debug": True, **MODES["FSDP"]})
    model = Net("")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        x = torch.full((4, 4), torch.nan if step == 1 else step / 10)
        loss = loss_of(model, x, "")
        if accelerator.reduce(loss.detach()).isnan():
            continue
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return f"done: {accelerator.counters.step} steps"


def test_a_script_may_leave_out_losses_that_are_nan(ranks):
    assert ranks.run(2, skipped) == ["done: 3 steps"] * 2


def test_a_micro_batch_that_was_left_out_is_no_origin(alone):
    accelerator = Accelerator(config={"use_cpu": True, "debug": True})
    model = Net("")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    assert loss_of(model, torch.full((4, 4), torch.nan), "").isnan()
    accelerator.backward(loss_of(model, torch.ones(4, 4), "penalty"))
    with pytest.raises(ModelError, match="first in no output of a module"):
        optimizer.step()


def scaled(sample: float) -> tuple[int, bool, str]:
    """Steps, whether the last was left out, and what was said of it: gradients overflow in fp16, until the scale is
    small enough."""
    precision = {"precision": {"init_scale": 2.0**40}}
    accelerator = Accelerator(
        config={"use_cpu": True, "debug": True, "mixed_precision": "fp16", "shardkit": precision, **MODES["DDP"]}
    )
    model = Net("")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    with log_lines("shardkit.runtime.nan_origin", logging.WARNING) as said:
        accelerator.backward(loss_of(model, torch.full((4, 4), sample), ""))
        optimizer.step()
    return accelerator.counters.step, accelerator.optimizer_step_was_skipped, "".join(said)


def test_an_overflow_is_left_to_the_loss_scale(ranks):
    assert ranks.run(2, scaled, 1.0) == [(0, True, "")] * 2


def test_what_is_left_out_by_the_loss_scale_and_not_for_it_is_told(ranks):
    (*first, said), second = ranks.run(2, scaled, 1e30)
    assert [*first] == [0, True]
    assert (
        "the loss scale leaves out step 1, which has NaN or infinite values without it (got such values first" in said
    )
    assert second == (0, True, "")


def copied(mode: str) -> str:
    """What is said after a forward of copies with NaN values: of a copy of the model, and a pickle of a whole one."""
    accelerator = Accelerator(config={"use_cpu": True, "debug": True, **MODES[mode]})
    model = Net("")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    copies = [copy.deepcopy(model)]
    if mode == "DDP":
        copies.append(pickle.loads(pickle.dumps(accelerator.unwrap_model(model))))
    for one in copies:
        one(torch.full((4, 4), torch.nan))
    accelerator.backward(model(torch.ones(4, 4)).mean() * torch.inf)
    with pytest.raises(ModelError) as raised:
        optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize("mode", MODES)
def test_copies_are_not_looked_at(ranks, mode):
    assert "first on rank 0, the loss: " in ranks.run(2, copied, mode)[0]


class Returning(nn.Module):
    """Returns its parameter, or a dataclass with the root of one."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self.weight, self.is_whole = nn.Parameter(torch.full((2, 3), -1.0)), is_whole

    def forward(self) -> Any:
        return self.weight if self.is_whole else Output(self.weight.sqrt())


@dataclass
class Output:
    values: torch.Tensor


def test_outputs_in_a_dataclass_are_looked_at(alone):
    accelerator = Accelerator(config={"use_cpu": True, "debug": True})
    model = Returning(is_whole=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model().values.sum())
    with pytest.raises(ModelError, match=r"the output of the model \(Returning, float32 \[2, 3\]\): 6 of 6 values are"):
        optimizer.step()


def test_a_parameter_that_is_returned_gets_no_hook_in_each_forward(alone):
    accelerator = Accelerator(config={"use_cpu": True, "debug": True, **MODES["DDP"]})
    model = accelerator.prepare(Returning(is_whole=True))
    for _ in range(3):
        accelerator.backward(model().sum())
    assert len(model.weight._backward_hooks or {}) == 0


def test_a_forward_before_the_step_of_another_optimizer_is_remembered(alone):
    accelerator = Accelerator(config={"use_cpu": True, "debug": True})
    critic, actor = Net(""), Net("weight")
    critic, actor, *optimizers = accelerator.prepare(
        critic, actor, *(torch.optim.SGD(one.parameters(), 0.1) for one in (critic, actor))
    )
    losses = [model(torch.ones(4, 4)).mean() for model in (critic, actor)]
    accelerator.backward(losses[0])
    optimizers[0].step()
    accelerator.backward(losses[1])
    with pytest.raises(ModelError, match=r"the output of blocks\.1\.up .* its weight had NaN values before this step"):
        optimizers[1].step()


def test_each_backward_begins_at_its_loss(alone):
    accelerator = Accelerator(config={"use_cpu": True, "debug": True})
    model = Net("")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for power in (1.0, 0.5):  # the gradient of the root of zero is infinite
        (model(torch.ones(4, 4)) * 0).abs().pow(power).mean().backward()
    with pytest.raises(ModelError, match=r"the gradient of the output of head .* in the backward from the loss, whose"):
        optimizer.step()


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_and_offloaded_blocks_are_looked_at(ranks, recompute):
    settings = copy.deepcopy(MODES["FSDP"])
    settings["fsdp_config"] |= {"fsdp_activation_checkpointing": recompute, "fsdp_offload_params": True}
    assert FAULTS["root of zero"] in ranks.run(2, ended, settings, "root of zero")[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_what_is_compiled_is_looked_at_from_outside(ranks, mode):
    settings = copy.deepcopy(MODES[mode]) | {"shardkit": {"compile": True}}
    settings.setdefault("fsdp_config", {})["fsdp_transformer_layer_cls_to_wrap"] = "Block"
    assert "the loss: inf" in ranks.run(2, ended, settings, "overflow")[0]
    assert "(got such values first on rank 0, micro-batch 1: the " in ranks.run(2, ended, settings, "weight")[0]
