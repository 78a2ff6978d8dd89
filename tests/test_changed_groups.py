"""Modules that a script puts into a prepared model or takes out of it, and param groups that it changes by hand."""

import pytest
import torch
from torch import nn

from tests.loops.net import Net, adam, loss_of
from tests.test_parameters import Shifted, accelerator_for, batch, refusal


def put_into_groups(strategy: int, how: str) -> str:
    accelerator = accelerator_for(strategy)
    model, optimizer = accelerator.prepare(*((one := Net()), adam(one.parameters())))
    accelerator.backward(loss_of(model, batch()))
    optimizer.step()
    accelerator.unwrap_model(model).scales = scales = nn.Linear(7, 7)
    match how:
        case "extended":
            optimizer.param_groups[0]["params"].extend(scales.parameters())
        case "replaced":
            optimizer.param_groups[0]["params"] = list(model.parameters())
        case "another group":
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": list(scales.parameters())})
        case "the optimizer inside":
            optimizer.optimizer.add_param_group({"params": scales.parameters()})
    accelerator.backward(loss_of(model, batch()) + scales(torch.ones(7)).sum())
    return refusal(optimizer.step)


def put_into_groups_of_one_not_prepared(strategy: int) -> str:
    accelerator = accelerator_for(strategy)
    model = accelerator.prepare(Net())
    optimizer = adam(model.parameters())
    accelerator.backward(loss_of(model, batch()))
    optimizer.step()
    accelerator.unwrap_model(model).scales = scales = nn.Linear(7, 7)
    optimizer.add_param_group({"params": scales.parameters()})
    accelerator.backward(loss_of(model, batch()) + scales(torch.ones(7)).sum())
    return refusal(optimizer.step)


@pytest.mark.parametrize("how", ["extended", "replaced", "another group", "the optimizer inside"])
@pytest.mark.parametrize("strategy", [1, 3])
def test_groups_changed_by_hand_do_not_train_what_is_not_reduced(ranks, strategy, how):
    for text in ranks.run(2, put_into_groups, strategy, how):
        assert "trains parameters that were added to the model after it was prepared (got scales.weight" in text


@pytest.mark.parametrize("strategy", [1, 3])
def test_nor_do_those_of_an_optimizer_that_is_not_prepared(ranks, strategy):
    for text in ranks.run(2, put_into_groups_of_one_not_prepared, strategy):
        assert "trains parameters that were added to the model after it was prepared (got scales.weight" in text


def groups_of_other_parameters(strategy: int) -> bool:
    """Groups are made smaller and whole again by hand, also with parameters taken before `prepare`."""
    accelerator, model = accelerator_for(strategy), Net()
    before = list(model.parameters())
    model, optimizer = accelerator.prepare(model, adam(before[:2]))
    for chosen in (before[:2], before[2:], list(model.parameters())):
        optimizer.param_groups[0]["params"] = chosen
        accelerator.backward(loss_of(model, batch()))
        optimizer.step()
        optimizer.zero_grad()
    return all(a is b for a, b in zip(optimizer.parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("strategy", [1, 3])
def test_groups_may_be_changed_by_hand(ranks, strategy):
    assert ranks.run(2, groups_of_other_parameters, strategy) == [True, True]


def added_between_two_prepares(strategy: int) -> tuple[str, str]:
    """The head is another one after `free_memory`, for another task; or there is none any more."""
    accelerator, model = accelerator_for(strategy), Shifted()
    model = accelerator.unwrap_model(accelerator.prepare(model))
    accelerator.free_memory()
    model.head = nn.Identity()
    without = refusal(lambda: accelerator.prepare(model, adam(model.parameters())))
    accelerator.free_memory()
    model.head = nn.Linear(7, 5)
    return without, refusal(lambda: accelerator.prepare(model, adam(model.parameters())))


def test_modules_put_into_a_sharded_model_are_refused_when_it_is_prepared_again(ranks):
    for without, text in ranks.run(2, added_between_two_prepares, 1):
        assert not without
        assert "Shifted was sharded before, and parameters were added to it since (got head.weight" in text
        assert "build a new model with them, load the weights of this one (accelerator.save_model writes them)" in text
    assert ranks.run(2, added_between_two_prepares, 3) == [("", "")] * 2


def removed_after(strategy: int) -> str:
    accelerator, model = accelerator_for(strategy), Net()
    model, _ = accelerator.prepare(model, adam(model.parameters()))
    accelerator.unwrap_model(model).head = nn.Identity()
    return refusal(lambda: accelerator.prepare(adam(model.parameters())))


@pytest.mark.parametrize("strategy", [1, 3])
def test_an_optimizer_of_a_module_that_was_taken_out_is_refused_in_words(ranks, strategy):
    for text in ranks.run(2, removed_after, strategy):
        assert "AdamW trains parameters that were removed from the model after it was prepared (got" in text
        assert "leave them out of the optimizer's param_groups" in text
        assert "call accelerator.free_memory() and prepare the model with a new optimizer" in text


def replaced_after(strategy: int) -> tuple[str, str]:
    """What is said of an optimizer of a new head, and of the remedy."""
    accelerator, model = accelerator_for(strategy), Net()
    model, _ = accelerator.prepare(model, adam(model.parameters()))
    inner = accelerator.unwrap_model(model)
    inner.head = nn.Linear(inner.head.in_features, 3)
    said = refusal(lambda: accelerator.prepare(inner, adam(inner.parameters())))
    accelerator.free_memory()
    fresh = Net()
    fresh.head = nn.Linear(fresh.head.in_features, 3)
    return said, refusal(lambda: accelerator.prepare(fresh, adam(fresh.parameters())))


def test_the_remedy_for_a_replaced_module_works(ranks):
    for said, remedied in ranks.run(2, replaced_after, 1):
        assert "build a new model with the new modules" in said and not remedied
