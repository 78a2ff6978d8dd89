"""A save that is asked for is made, whether or not the step moved; only equal bytes are left as they
are. And the odd orders of saving and loading that nobody wrote down."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardkit import Accelerator, ProjectConfiguration
from shardkit.checkpoint.files import folder, manifest
from shardkit.checkpoint.saving import lock
from shardkit.distributed.tensors import local_part
from shardkit.errors import CheckpointSaveError
from shardkit.runtime.checkpoints import saving
from tests import forked
from tests.loops.run import whole
from tests.numbered_runs import run_of, train


class Noted:
    """A registered object."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def perturb_weights(run, noted):
    with torch.no_grad():
        for parameter in run[1].parameters():
            parameter.data.add_(1.0)  # moves no version counter


def step_by_hand(run, noted):
    """As SAM's second step, or an optimizer that is not prepared: it is counted as a step of its own."""
    for parameter in run[1].parameters():
        parameter.grad = torch.ones_like(parameter)
    run[2].optimizer.step()
    run[2].optimizer.zero_grad()


def change_rate(run, noted):
    for group in run[2].param_groups:
        group["lr"] = 0.125


def change_object(run, noted):
    noted.value += 1


def draw(run, noted):
    torch.rand(())


def change_moment(run, noted):
    next(iter(run[2].optimizer.state.values()))["exp_avg"].data.mul_(0.5)


CHANGES = [perturb_weights, step_by_hand, change_rate, change_object, draw, change_moment]


def save_change_save(project, change, blocking, output):
    """Two saves of one step; whether the second has another save_id, and brings back the changed state."""
    run, noted = run_of(project), Noted()
    run[0].register_for_checkpointing(noted)
    train(run, 1)
    first = run[0].save_state(output, blocking=blocking)
    saving.wait(run[0]._run)
    before = manifest.read(first).save_id
    run[0].wait_for_everyone()
    if change is not None:
        change(run, noted)
    second = run[0].save_state(output, blocking=blocking)
    assert (second == first) == (change is not step_by_hand)
    saving.wait(run[0]._run)
    expected = summary(run, noted)
    perturb_weights(run, noted)
    noted.value, run[2].param_groups[0]["lr"] = 99, 99.0
    run[0].load_state(second)
    found = summary(run, noted)
    saving.close(run[0]._run)
    return manifest.read(second).save_id != before, found == expected


def summary(run, noted):
    weights = [parameter.full_tensor().tolist() for parameter in run[1].parameters()]
    rows = [row["exp_avg"].full_tensor().tolist() for row in run[2].optimizer.state.values()]
    return weights, rows, noted.value, run[2].param_groups[0]["lr"], torch.get_rng_state().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_state_that_changed_within_a_step_is_saved(ranks, tmp_path, change):
    assert ranks.run(2, save_change_save, tmp_path, change, None, None) == [(True, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("output", [None, "named"])
@pytest.mark.parametrize("blocking", [True, False])
def test_equal_bytes_are_left_as_they_are(ranks, tmp_path, blocking, output):
    target = None if output is None else tmp_path / output
    assert ranks.run(2, save_change_save, tmp_path / "run", None, blocking, target) == [(False, True)] * 2
    assert ranks.run(2, save_change_save, tmp_path / "other", change_object, blocking, target) == [(True, True)] * 2


def change_on_one_rank(project):
    """Only rank 1's registered object changed: all ranks save."""
    run, noted = run_of(project), Noted()
    run[0].register_for_checkpointing(noted)
    path = run[0].save_state()
    before = manifest.read(path).save_id
    run[0].wait_for_everyone()
    noted.value = run[0].process_index
    run[0].save_state()
    run[0].load_state()
    saving.close(run[0]._run)
    return manifest.read(path).save_id != before, noted.value


def test_a_change_on_one_rank_is_a_change(ranks, tmp_path):
    assert ranks.run(2, change_on_one_rank, tmp_path) == [(True, 0), (True, 1)]


def damage_and_save(project):
    run = run_of(project)
    path = run[0].save_state()
    if run[0].is_main_process:
        next((path / "model").iterdir()).unlink()
    run[0].wait_for_everyone()
    run[0].save_state()
    run[0].load_state()
    saving.close(run[0]._run)
    return folder.inspect(path).step


def test_what_was_damaged_since_is_saved_again(ranks, tmp_path):
    assert ranks.run(2, damage_and_save, tmp_path) == [0, 0]


def accelerator_of(project):
    """An accelerator with nothing prepared yet."""
    given = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}}
    return Accelerator(
        config=given, project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
    )


def folds(project):
    """Two folds in one run, with free_memory between; whether each loads its own."""
    accelerator, told = accelerator_of(project), []
    for fold in range(2):
        torch.manual_seed(fold)
        model = nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if fold:
            accelerator.save_state()  # before its first step
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(project / f"fold-{fold}")
        path = accelerator.save_state()
        weights = model.weight.full_tensor().clone()
        for named in (None, project / f"fold-{fold}"):
            nn.init.zeros_(model.weight)
            accelerator.load_state(named)
            told.append(torch.equal(model.weight.full_tensor(), weights))
        assert folder.candidates(path.parent)[0].path == path, "the newest one is this fold's"
        model, optimizer = accelerator.free_memory(model, optimizer)
    saving.close(accelerator._run)
    return told


@pytest.mark.parametrize("world", [1, 2])
def test_folds_load_their_own(ranks, tmp_path, world):
    assert ranks.run(world, folds, tmp_path) == [[True] * 4] * world


# ---- other orders ----


def freed_while_saving(project):
    accelerator, model = accelerator_of(project), nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    weights = model.weight.full_tensor().clone()
    path = accelerator.save_state(blocking=False)
    kept = accelerator._run.saving.background
    model, optimizer = accelerator.free_memory(model, optimizer)
    assert not kept._buffers and not kept._step_hooks
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.load_state(path)
    saving.close(accelerator._run)
    return torch.equal(model.weight.full_tensor(), weights)


def test_memory_is_freed_while_a_save_is_under_way(ranks, tmp_path):
    assert ranks.run(2, freed_while_saving, tmp_path) == [True] * 2


def beside_and_then(project, then):
    run = run_of(project)
    train(run, 2)
    weights = [parameter.full_tensor().clone() for parameter in run[1].parameters()]
    path = run[0].save_state(blocking=False)
    match then:
        case "load":
            perturb_weights(run, None)
            run[0].load_state()
        case "load twice":
            perturb_weights(run, None)
            run[0].load_state(path)
            run[0].load_state(path)
        case "save":
            run[0].save_state()
        case "save beside":
            run[0].save_state(blocking=False)
        case "export":
            run[0].save_model(run[1], project / "export")
        case "load and save at once":
            run[0].load_state(path)
            run[0].save_state()
    same = all(torch.equal(p.full_tensor(), w) for p, w in zip(run[1].parameters(), weights, strict=True))
    saving.close(run[0]._run)  # as end_training does, but for the process group
    return same, folder.inspect(path).step, [found.step for found in folder.steps(path.parent)]


@pytest.mark.parametrize(
    "then", ["load", "load twice", "save", "save beside", "export", "load and save at once", "end"]
)
def test_a_save_beside_training_and_then(ranks, tmp_path, then):
    assert ranks.run(2, beside_and_then, tmp_path, then) == [(True, 2, [2])] * 2


def save_and_wait(run, blocking):
    run[0].save_state(blocking=blocking)
    saving.wait(run[0]._run)


def fail_and_save(project, fault, blocking):
    """A save fails on one rank; the next one is good."""
    run = run_of(project)
    train(run, 1)
    run[0].save_state()
    train(run, 1)
    forked.arm(fault)
    with pytest.raises(CheckpointSaveError):
        save_and_wait(run, blocking)
    forked.arm(None)
    path = run[0].save_state(blocking=blocking)
    saving.wait(run[0]._run)
    step = folder.inspect(path).step
    run[0].load_state()
    saving.close(run[0]._run)
    return step, run[0].counters.step, sorted(found.name for found in path.parent.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("fault", ["preflight:1:raise=EIO", "temporary:0:raise=EROFS", "write:1:raise=ENOSPC"])
def test_a_failed_save_and_then_a_good_one(tmp_path, fault, blocking):
    outcomes = forked.run(2, fail_and_save, tmp_path, fault, blocking)
    expected = [2, 2, [".lock", "LATEST", "step-00000001", "step-00000002"]]
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(expected, None)] * 2


def two_accelerators(project):
    """One after another in one process, into one folder; the first one is closed late."""
    first = run_of(project)
    train(first, 1)
    first[0].save_state()
    second = run_of(project)
    second[0].load_state()
    train(second, 1)
    second[0].save_state()
    saving.close(first[0]._run)
    taken = (project / "checkpoints" / lock.NAME).read_text()
    second[0].wait_for_everyone()
    train(second, 1)
    second[0].save_state()
    saving.close(second[0]._run)
    second[0].wait_for_everyone()
    return second[0].counters.step, "pid" in taken, (project / "checkpoints" / lock.NAME).read_text()


def test_two_accelerators_share_the_folder_of_one_process(ranks, tmp_path):
    assert ranks.run(2, two_accelerators, tmp_path) == [(3, True, "")] * 2


def save_in_the_loop(project):
    """A save after every batch and after the loop, twice at the end; each resumes where it was made."""
    run = run_of(project)
    accelerator, model, optimizer, loader, _ = run
    for number, (_, inputs) in enumerate(loader):
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(project / str(number))
    accelerator.save_state(project / "end")
    accelerator.save_state(project / "end")
    saving.close(accelerator._run)
    left = []
    for name in (*range(number + 1), "end"):
        resumed = run_of(project / "again")
        resumed[0].load_state(project / str(name))
        left.append(sum(1 for _ in resumed[3]))
        saving.close(resumed[0]._run)
    return left


@pytest.mark.slow
def test_saves_inside_and_after_a_loop_resume_where_they_were_made(ranks, tmp_path):
    assert ranks.run(2, save_in_the_loop, tmp_path) == [[3, 2, 1, 0, 4]] * 2


def saved_in_an_evaluation(project, mode):
    """Saves, exports and loads as in a function of evaluation with that mode, and trains on; the weights after it."""
    run, averages = run_of(project), Noted()
    accelerator, model = run[:2]
    accelerator.register_for_checkpointing(averages)
    train(run, 1)
    averages.value = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with mode():
        accelerator.save_state(project / "best")
        accelerator.save_model(model, project / "export")
        kept = accelerator.get_state_dict(model)
    train(run, 1)
    run[2].optimizer.state.clear()
    with mode():
        accelerator.load_state(project / "best")
    train(run, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            averages.value[name].lerp_(parameter, 0.1)
        for value in kept.values():
            value.mul_(2)
    found = [*model.parameters(), *averages.value.values()]
    saving.close(accelerator._run)
    return [whole(tensor).tolist() for tensor in found]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_state_may_be_saved_and_loaded_in_inference_mode(ranks, tmp_path, world):
    expected = ranks.run(world, saved_in_an_evaluation, tmp_path / "a", torch.no_grad)
    assert ranks.run(world, saved_in_an_evaluation, tmp_path / "b", torch.inference_mode) == expected
    assert load_file(tmp_path / "a/export/model.safetensors").keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}


def registered_again(project):
    """An object that a cell of a notebook, run again, has registered twice; its value, loaded where it is once."""
    first, second = Noted(3), Noted()
    accelerator = run_of(project)[0]
    accelerator.register_for_checkpointing(first)
    accelerator.register_for_checkpointing(first, first)
    accelerator.save_state(project / "saved")
    saving.close(accelerator._run)
    accelerator = run_of(project)[0]
    accelerator.register_for_checkpointing(second)
    accelerator.load_state(project / "saved")
    saving.close(accelerator._run)
    return second.value


def test_an_object_that_is_registered_again_is_saved_once(ranks, tmp_path):
    assert ranks.run(2, registered_again, tmp_path) == [3, 3]


def loaded_twice(project):
    """The optimizer's state before and after a load: where it lies in memory, and whether its values came back."""
    run = run_of(project)
    train(run, 1)
    run[0].save_state(project / "saved")
    before = summary(run, Noted())
    train(run, 1)
    places = memory_of_state(run[2])
    run[0].load_state(project / "saved")
    train_on = memory_of_state(run[2]) == places, summary(run, Noted()) == before
    train(run, 1)
    saving.close(run[0]._run)
    return *train_on, memory_of_state(run[2]) == places


def memory_of_state(optimizer):
    return [local_part(row[name]).data_ptr() for row in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("world", [1, 2])
def test_a_load_over_a_state_fills_its_tensors(ranks, tmp_path, world):
    assert ranks.run(world, loaded_twice, tmp_path) == [(True, True, True)] * world
