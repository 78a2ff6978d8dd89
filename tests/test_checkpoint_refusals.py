"""What a load or save refuses because the script and the checkpoint, or the folder, do not belong together."""

import threading

import pytest
import torch
from torch import nn

from shardkit.checkpoint.files import folder, manifest
from shardkit.distributed.process import leave
from shardkit.errors import CheckpointError, UsageError
from tests import checkpoints, forked
from tests.numbered_runs import run_of, train


def load_too_early(project):
    """A run that loads before it has prepared anything; then one that lacks only the loader."""
    run = run_of(project)
    train(run, 2)
    run[0].save_state()
    early = run_of(project)[0]
    state = early._run
    parts = state.models, state.optimizers, state.schedulers, state.loaders
    kept = [list(part) for part in parts]
    told = []
    for missing in (parts, parts[:2], parts[1:2], parts[3:]):
        for part in missing:
            part.clear()
        with pytest.raises(CheckpointError) as raised:
            early.load_state()
        told.append(str(raised.value))
        assert early.counters.step == 0
        for part, whole in zip(parts, kept, strict=True):
            part[:] = whole
    early.load_state()
    return told, early.counters.step


def test_what_is_saved_and_not_prepared_is_missed(ranks, tmp_path):
    ((told, step),) = ranks.run(1, load_too_early, tmp_path)
    nothing, no_model, no_optimizer, no_loader = told
    model = "model: in the checkpoint, but not prepared; prepare it before loading, or load with strict=False"
    assert model in nothing and "optim: in the checkpoint, but not prepared" in nothing and "loader.0" in nothing
    assert model in no_model
    assert "optim: in the checkpoint, but not prepared" in no_optimizer and "model:" not in no_optimizer
    assert "loader.0: the checkpoint has its position" in no_loader and "data_position=False" in no_loader
    assert step == 2


def test_without_strict_an_optimizer_that_was_not_saved_stays_as_it_is(tmp_path):
    live = checkpoints.build("plain")
    checkpoints.train(live, 2)
    weights = checkpoints.state.Live(live.models, objects=live.objects)
    checkpoints.save(weights, tmp_path / "weights")
    found = checkpoints.build("plain", seed=1)
    with pytest.raises(CheckpointError, match=r"optim: prepared in this run, but not in .* strict=False"):
        checkpoints.load(found, tmp_path / "weights")
    checkpoints.load(found, tmp_path / "weights", strict=False)
    assert not found.optimizers[0].state
    assert torch.equal(found.models[0].head.weight, live.models[0].head.weight)


def test_a_view_of_repeated_values_is_refused_before_anything_is_changed(tmp_path):
    """Torch cannot write into one either; it was met half-way, in every checkpoint that a resume tried."""
    live = checkpoints.build("plain")
    live.models[0].register_buffer("table", torch.arange(3.0).expand(4, 3))
    checkpoints.save(live, tmp_path / "c")
    with torch.no_grad():
        live.models[0].scale.fill_(7)
    with pytest.raises(CheckpointError, match=r"nothing was changed:\n  model: table: repeats its values in the model"):
        checkpoints.load(live, tmp_path / "c")
    assert live.models[0].scale.max() == 7
    live.models[0].table = torch.zeros(4, 3)
    checkpoints.load(live, tmp_path / "c")
    assert live.models[0].table[3].tolist() == [0, 1, 2] and live.models[0].scale.max() == 1


def test_without_strict_what_differs_stays_as_it_is_and_is_named(tmp_path, caplog):
    """A layer with another name, an optimizer and a schedule of other classes: the state of an AdamW made an RMSprop
    fail in its first step."""
    saved = checkpoints.build("plain")
    checkpoints.train(saved, 2)
    checkpoints.save(saved, tmp_path / "saved")
    live = checkpoints.build("plain", seed=1)
    (model,) = live.models
    model.size = model.scale
    del model.scale
    optimizer = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], lr=0.5)
    live.optimizers[0] = optimizer
    live.objects["scheduler.0"] = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [torch.optim.lr_scheduler.ConstantLR(optimizer)] * 2, milestones=[1]
    )
    with pytest.raises(CheckpointError) as refused:
        checkpoints.load(live, tmp_path / "saved")
    told = str(refused.value)
    assert "in the model, not in the checkpoint: size; load with strict=False to keep it unchanged" in told
    assert "in the checkpoint, not in the model: scale; load with strict=False to leave it out" in told
    checkpoints.load(live, tmp_path / "saved", strict=False)
    assert torch.equal(model.head.weight, saved.models[0].head.weight)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    warned = caplog.text
    assert "loaded with strict=False, without what differs:" in warned
    assert "model: in the model, not in the checkpoint: size\n" in warned
    assert "model: in the checkpoint, not in the model: scale\n" in warned
    assert (
        "optim: was saved from another class than RMSprop (it has amsgrad, betas, decoupled_weight_decay inste"
        in warned
    )
    assert "instead of alpha, centered, momentum)" in warned, "settings that no checkpoint has are not named"
    assert "scheduler.0: was saved from another class than SequentialLR" in warned
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def test_a_setting_that_only_the_saved_groups_had_is_no_other_class(tmp_path):
    saved, live = checkpoints.build("plain"), checkpoints.build("plain", seed=1)
    checkpoints.train(saved, 1)
    saved.optimizers[0].param_groups[0]["name"] = "decayed"
    checkpoints.save(saved, tmp_path / "saved")
    checkpoints.load(live, tmp_path / "saved")
    assert checkpoints.digest_of(live) == checkpoints.digest_of(saved)


class OwnLoading(torch.optim.AdamW):
    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OwnLoading])
def test_without_strict_the_state_of_a_parameter_that_was_not_saved_stays(tmp_path, kind):
    """A layer that was frozen when the checkpoint was saved."""
    model, values = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.ones(5, 3)
    optimizer = kind(model[1].parameters())
    model(values).sum().backward()
    optimizer.step()
    checkpoints.save(checkpoints.state.Live([model], [optimizer]), tmp_path / "a")
    both = kind(model.parameters())
    for _ in range(2):
        both.step()
    kept = both.state[model[0].weight]["exp_avg"].clone()
    checkpoints.load(checkpoints.state.Live([model], [both]), tmp_path / "a", strict=False)
    assert torch.equal(both.state[model[0].weight]["exp_avg"], kept)
    assert [both.state[layer.weight]["step"].item() for layer in model] == [2, 1]


def test_groups_with_settings_of_their_own_are_not_given_those_of_one_saved_group(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    checkpoints.save(checkpoints.state.Live([model], [torch.optim.SGD(model.named_parameters(), 0.1)]), tmp_path / "a")
    for rate in (0.5, 0.1):
        first, second = ([*model.named_parameters()][part] for part in (slice(2), slice(2, None)))
        groups = [{"params": first}, {"params": second, "lr": rate}]
        live = checkpoints.state.Live([model], [torch.optim.SGD(groups, 0.1)])
        if rate == 0.5:
            text = r"param_groups\[0\] and \[1\] were saved as one, and their settings differ \(lr\); use the groups"
            with pytest.raises(CheckpointError, match=text):
                checkpoints.load(live, tmp_path / "a")
            assert live.optimizers[0].param_groups[1]["lr"] == 0.5
        checkpoints.load(live, tmp_path / "a", strict=rate != 0.5)
        assert live.optimizers[0].param_groups[1]["lr"] == 0.1


def go_back_and_save_again(project):
    """Save step 2, go back to step 1, train otherwise to step 2, save: which weights step 2 then holds."""
    run = run_of(project)
    train(run, 1)
    first = run[0].save_state()
    train(run, 1)
    second = run[0].save_state()
    run[0].load_state(first)
    for group in run[2].param_groups:
        group["lr"] = 0.5
    train(run, 1)
    assert run[0].save_state() == second
    weights = [parameter.full_tensor().clone() for parameter in run[1].parameters()]
    nn.init.zeros_(next(run[1].parameters()))
    run[0].load_state(second)
    return all(torch.equal(a.full_tensor(), b) for a, b in zip(run[1].parameters(), weights, strict=True))


def test_a_step_that_is_reached_again_is_saved_again(ranks, tmp_path):
    assert ranks.run(1, go_back_and_save_again, tmp_path) == [True]


def name_odd_folders(project):
    run = run_of(project / "run")
    train(run, 1)
    run[0].save_state()
    with pytest.raises(UsageError, match=r"save_state: not the path of a folder \(got ''\)"):
        run[0].save_state("")
    with pytest.raises(UsageError, match=r"save_model: not the path of a folder \(got None\); give a path"):
        run[0].save_model(run[1], None)
    with pytest.raises(CheckpointError, match=r"a folder of checkpoints; name one of them, such as .*step-00000001"):
        run[0].load_state(project / "run")
    run[0].save_state(project / "own" / "best")
    with pytest.raises(CheckpointError, match=r"a folder of checkpoints; name one of them, such as .*best"):
        run[0].load_state(project / "own")
    (project / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"failed: a file; use another name: .*notes\.txt"):
        run[0].save_state(project / "notes.txt")
    with pytest.raises(CheckpointError, match="no such folder"):
        run[0].load_state(project / "rnu")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        run[0].load_state("/")


def test_odd_folders_are_told_apart(ranks, tmp_path):
    ranks.run(1, name_odd_folders, tmp_path)


def load_folders_of_ranks(project):
    """The error of a load for which each rank names a folder of its own."""
    accelerator = run_of(project)[0]
    for number in range(2):
        accelerator.save_state(project / f"best-{number}")
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(project / f"best-{accelerator.process_index}")
    return str(caught.value)


def test_ranks_that_load_different_folders_are_told_so(ranks, tmp_path):
    those = f"{tmp_path}/best-0 on rank 0, {tmp_path}/best-1 on rank 1"
    said = f"checkpoint: the ranks do not load the same folder: {those}; give all ranks the same."
    assert ranks.run(2, load_folders_of_ranks, tmp_path) == [said] * 2


def on_another_thread(project):
    """What calls on a thread get while this one trains, and afterwards on a thread that trained itself."""
    run = run_of(project)
    train(run, 1)
    told = []

    def call(function):
        try:
            function()
        except UsageError as error:
            told.append(str(error))

    for function in (run[0].save_state, run[0].load_state, lambda: run[0].save_model(run[1], project / "export")):
        thread = threading.Thread(target=call, args=(function,), name="saver")
        thread.start()
        thread.join()
    for number in range(2):
        trained = threading.Thread(target=lambda: (train(run, 1), run[0].save_state()), name=f"trainer {number}")
        trained.start()
        trained.join()
    run[0].load_state()
    return told, run[0].counters.step


def test_a_state_is_not_saved_from_another_thread_than_the_one_that_trains(ranks, tmp_path):
    """It would mix two steps, and on several ranks the communication of both."""
    for told, step in ranks.run(2, on_another_thread, tmp_path):
        assert [line.split(":")[0] for line in told] == ["save_state", "load_state", "save_model"]
        assert all("another thread than the one that trains (got saver, MainThread trains)" in line for line in told)
        assert step == 3


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_a_state_is_not_saved_amid_a_step(tmp_path, alone, place):
    """As by a signal handler that saves."""
    run = run_of(tmp_path)

    def save(*given):
        run[0].save_state()

    match place:
        case "forward":
            run[1].register_forward_pre_hook(save)
        case "backward":
            run[1].register_forward_hook(lambda module, inputs, output: (output.register_hook(save), None)[1])
        case "step":
            run[2].optimizer.register_step_pre_hook(save)
    with pytest.raises(UsageError, match="save_state: called while a model or an optimizer is at work"):
        train(run, 1)
    assert not (tmp_path / "checkpoints").exists()


def after_the_end(project):
    run = run_of(project)
    train(run, 1)
    saved = run[0].save_state()
    train(run, 1)
    run[0].end_training()
    leave()  # as end_training does in a launched run
    told = []
    calls = (
        run[0].save_state,
        lambda: run[0].save_state(saved),
        run[0].load_state,
        lambda: run[0].gather(ONE),
        lambda: run[0].get_state_dict(run[1]),
        lambda: run[0].save(run[1].state_dict(), project / "weights.safetensors"),
    )
    for call in calls:
        with pytest.raises(UsageError) as raised:
            call()
        told.append(str(raised.value))
    return told


ONE = torch.ones(1)


@pytest.mark.slow
def test_ranks_that_have_left_their_world_save_nothing(tmp_path):
    """Each took itself for all of them: rank 0's shards became a checkpoint of one rank, in place of a whole one."""
    for outcome in forked.run(2, after_the_end, tmp_path):
        assert outcome.error is None, outcome.error
        calls = ["save_state", "save_state", "load_state", "gather", "get_state_dict", "save"]
        assert [line.split(":")[0] for line in outcome.value] == calls
        assert all("the 2 ranks have left their process group" in line for line in outcome.value)
    (step,) = folder.steps(tmp_path / "checkpoints")
    assert manifest.read(step.path).world_size == 2
