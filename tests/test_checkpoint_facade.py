"""save_state and load_state as a script uses them: folders by step, exact data position, replacement, saving beside."""

import copy
import json
import logging
import pickle
import random
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from shardkit import Accelerator, ProjectConfiguration
from shardkit.checkpoint.files import folder, manifest
from shardkit.checkpoint.saving import retention
from shardkit.cli import main as command_line
from shardkit.errors import CheckpointError, UsageError
from shardkit.runtime.checkpoints import saving
from tests.numbered_runs import in_parts, run_of, train, uninterrupted
from tests.ranks import log_lines


@pytest.mark.slow
@pytest.mark.requirement("A5")
@pytest.mark.fault_row(20)
@pytest.mark.parametrize("parts", [(1, 3, 4), (4, 1, 3), (5, 2, 1)], ids=str)
def test_a_resume_of_a_resume_goes_on_exactly(ranks, tmp_path, parts):
    expected = ranks.run(2, uninterrupted, tmp_path / "whole", 8)
    assert ranks.run(2, in_parts, tmp_path / "parts", parts, 0) == expected


@pytest.mark.faults  # starting and ending workers takes half a minute; test_data_resume has them without a save
@pytest.mark.fault_row(20)
def test_workers_that_read_ahead_lose_nothing(ranks, tmp_path):
    expected = ranks.run(2, uninterrupted, tmp_path / "whole", 6)
    assert ranks.run(2, in_parts, tmp_path / "parts", (3, 3), 2) == expected


def part_of(project, steps, first):
    run = run_of(project, seed=3)
    if not first:
        run[0].load_state()
    seen = [samples for samples, _ in train(run, steps)]
    run[0].save_state()
    saving.close(run[0]._run)
    return seen


@pytest.mark.slow
@pytest.mark.requirement("D4")
@pytest.mark.fault_row(20)
def test_over_other_numbers_of_ranks_each_sample_comes_once(ranks, tmp_path):
    expected = [samples for samples, _ in ranks.run(2, uninterrupted, tmp_path / "whole", 8)[0]]
    seen = []
    for number, (size, steps) in enumerate([(2, 2), (1, 3), (3, 3)]):
        seen += ranks.run(size, part_of, tmp_path / "parts", steps, number == 0)[0]
    assert seen == expected


def skip_by_hand(project):
    run = run_of(project)
    train(run, 2)
    run[0].save_state()
    position = run[3].state_dict()
    run[0].load_state(data_position=False)
    alone = run[3].state_dict()
    run[0].load_state()
    loader = run[0].skip_first_batches(run[3], 2)
    rest = [run[0].gather_for_metrics(numbers).tolist() for numbers, _ in loader]
    return position["samples_seen"], alone == position, len(rest)


def test_skipping_by_hand_after_loading_does_not_skip_twice(ranks, tmp_path):
    assert ranks.run(2, skip_by_hand, tmp_path) == [(24, True, 2)] * 2


def saved_at(project, place):
    """Windows of two micro-batches. One save in the fourth micro-batch, at a place in it; then a run that resumes."""
    run = run_of(project, gradient_accumulation_steps=2)
    accelerator, model, optimizer, loader, _ = run
    given, at_save = [], None
    for number, (numbers, inputs) in enumerate(loader):
        if (place, number) in (("at its start", 3), ("before the window", 2)):
            at_save = accelerator.save_state()
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            if (place, number) == ("before the step", 3):
                at_save = accelerator.save_state()
            optimizer.step()
            optimizer.zero_grad()
        given.append(accelerator.gather_for_metrics(numbers).sort().values.tolist())
    saving.close(accelerator._run)
    resumed, (step, samples) = run_of(project), manifest_counts(at_save)
    resumed[0].load_state(at_save)
    again = [samples for samples, _ in train(resumed, 2)]
    saving.close(resumed[0]._run)
    return step, samples, given[2:] == again


def manifest_counts(path):
    record = manifest.read(path)
    return record.step, json.loads((path / "state/common.json").read_text())["loaders"]["loader.0"]["samples_seen"]


@pytest.mark.fault_row(20)
@pytest.mark.requirement("A5")
@pytest.mark.parametrize("place", ["before the window", "at its start", "before the step"])
def test_a_save_between_two_steps_loses_no_batch_that_no_step_has_used(ranks, tmp_path, place):
    assert ranks.run(2, saved_at, tmp_path, place) == [(1, 24, True)] * 2


def evaluated(project):
    run = run_of(project)
    accelerator, evaluation = run[0], run[0].prepare(DataLoader(torch.arange(24), batch_size=4))
    train(run, 2)
    for number, _ in enumerate(evaluation):
        if number == 1:
            accelerator.save_state()
    saving.close(accelerator._run)
    resumed = run_of(project)
    evaluation = resumed[0].prepare(DataLoader(torch.arange(24), batch_size=4))
    resumed[0].load_state()
    seen = [number for batch in evaluation for number in resumed[0].gather_for_metrics(batch).tolist()]
    saving.close(resumed[0]._run)
    return seen, resumed[3].samples_seen


def test_an_evaluation_that_a_save_fell_into_starts_anew(ranks, tmp_path):
    assert ranks.run(2, evaluated, tmp_path) == [(list(range(24)), 24)] * 2


def load_inside_the_loop(project):
    run = run_of(project)
    accelerator, model, optimizer, loader, _ = run
    path = accelerator.save_state()
    for number, (_, inputs) in enumerate(loader):
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            before = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
            with pytest.raises(CheckpointError, match="inside the loop over its loader") as caught:
                accelerator.load_state(path)
            message = str(caught.value)
            assert all(torch.equal(tensor.full_tensor(), before[n]) for n, tensor in model.state_dict().items())
            counters = (accelerator.counters.step, accelerator.counters.samples_seen, loader.samples_seen)
            break
    accelerator.load_state(path)
    saving.close(accelerator._run)
    return message.splitlines()[0].endswith("cannot be loaded; nothing was changed:"), counters, loader.samples_seen


def test_loading_inside_the_loop_changes_nothing_on_any_rank(ranks, tmp_path):
    assert ranks.run(2, load_inside_the_loop, tmp_path) == [(True, (2, 24, 24), 0)] * 2


def both_kinds(project):
    run = run_of(project)
    train(run, 1)
    sharded = run[0].save_state()
    run[0].state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    train(run, 1)
    full = run[0].save_state()
    whole = run[0].get_state_dict(run[1])
    assert (run[0].is_main_process and {"0.weight", "2.bias"} < set(whole)) or not whole
    return [(path.name, manifest.read(path).kind) for path in (sharded, full)]


def whole_state_used_on_all_ranks(project):
    run = run_of(project)
    whole = run[0].get_state_dict(run[1])
    assert pickle.loads(pickle.dumps(whole)).keys() == copy.deepcopy(whole).keys() == {**whole}.keys()
    own = project / str(run[0].process_index)
    calls = (
        lambda: torch.save({"epoch": 1, "model": whole}, f"{own}.pt"),
        lambda: save_file(whole, f"{own}.safetensors"),
        lambda: run[1].load_state_dict(whole),
    )
    if not run[0].is_main_process:
        return [refusal_of(call) for call in calls]
    for call in calls:
        call()
    return [set(torch.load(f"{own}.pt")["model"]), set(load_file(f"{own}.safetensors"))]


def refusal_of(call):
    with pytest.raises(UsageError) as raised:
        call()
    return str(raised.value)


def test_an_empty_state_dict_of_another_rank_is_neither_written_nor_loaded(ranks, tmp_path):
    """Where all ranks write one file, it would often be the empty one."""
    saved, refused = ranks.run(2, whole_state_used_on_all_ranks, tmp_path)
    assert all({"0.weight", "2.bias"} < names for names in saved)
    assert [text.split(":")[0] for text in refused] == ["torch.save", "safetensors", "load_state_dict"]
    reason = "get_state_dict gathers of a sharded model (got an empty dict on rank 1)"
    assert all(reason in text for text in refused)
    assert "copy.deepcopy(model.state_dict())" in refused[-1] and "is_main_process" in refused[0]


def best_weights_loaded_again():
    accelerator = Accelerator(config={"distributed_type": "MULTI_CPU", "use_cpu": True})
    model = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    best = accelerator.get_state_dict(model)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    of_last = accelerator.get_state_dict(model)
    model.load_state_dict(best)
    loaded = accelerator.unwrap_model(model).state_dict()
    return [[torch.equal(tensor, state[name]) for name, tensor in loaded.items()] for state in (best, of_last)]


def test_every_rank_has_the_whole_state_of_a_model_that_is_not_sharded(ranks):
    """Early stopping takes the best weights and loads them again, on all ranks."""
    assert ranks.run(2, best_weights_loaded_again) == [[[True] * 2, [False] * 2]] * 2


@pytest.mark.requirement("D4")
@pytest.mark.requirement("A6")
def test_the_kind_can_change_during_a_run(ranks, tmp_path):
    found = ranks.run(2, both_kinds, tmp_path)
    assert found == [[("step-00000001", "sharded"), ("step-00000002", "full")]] * 2
    assert (tmp_path / "checkpoints/step-00000002/model/model.safetensors").exists()


def beside(project):
    run = run_of(project)
    train(run, 1)
    weights = {name: tensor.clone() for name, tensor in run[1].state_dict().items()}
    path = run[0].save_state(blocking=False)
    train(run, 2)
    path_after = run[0].save_state(blocking=False)
    saving.wait(run[0]._run)
    run[0].load_state(path)
    same = all(torch.equal(a.to_local(), weights[n].to_local()) for n, a in run[1].state_dict().items())
    latest = folder.read_latest(path.parent)
    saving.close(run[0]._run)
    return same, path.name, path_after.name, latest


def test_saving_beside_training_saves_what_was(ranks, tmp_path):
    assert ranks.run(2, beside, tmp_path) == [(True, "step-00000001", "step-00000003", "step-00000003")] * 2


def replace_one(project):
    run = run_of(project)
    train(run, 1)
    run[0].save_state(project / "mine")
    train(run, 2)
    run[0].save_state(project / "mine")
    run[0].save_state(project / "mine")
    step = manifest.read(project / "mine").step
    run[0].load_state(project / "mine")
    return step, sorted(path.name for path in project.iterdir())


def replace_with_notes(project, is_damaged):
    run = run_of(project)
    path = run[0].save_state(project / "mine")
    (path / "more").mkdir()
    for name in ("notes.txt", "more/notes.txt"):
        (path / name).write_text(name)
    if is_damaged:
        (path / manifest.NAME).write_text("{")
    run[0].save_state(path)
    run[0].load_state(path)
    return [path.name for path in project.iterdir()], [
        (path / name).read_text() for name in ("notes.txt", "more/notes.txt")
    ]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_other_files_stay_in_a_folder_that_is_saved_to_again(ranks, tmp_path, is_damaged):
    """Such as the epoch, which scripts write beside their last checkpoint."""
    expected = ["mine"], ["notes.txt", "more/notes.txt"]
    assert ranks.run(1, replace_with_notes, tmp_path, is_damaged) == [expected]


def replace_with_a_files_namesake(project):
    run = run_of(project)
    path = run[0].save_state(project / "mine")
    (path / "notes").write_text("keep me")
    run[0].register_save_state_pre_hook(lambda models, weights, folder: (Path(folder) / "notes").write_text("new"))
    run[0].save_state(path)
    (kept,) = project.glob("mine.replaced-*")
    return (path / "notes").read_text(), (kept / "notes").read_text()


def test_other_files_in_a_replaced_checkpoint_are_kept(ranks, tmp_path):
    assert ranks.run(1, replace_with_a_files_namesake, tmp_path) == [("new", "keep me")]


def replace_a_mix(project):
    run = run_of(project)
    path = run[0].save_state(project / "mine")
    (path / "model" / "r00002-of-00003.safetensors").write_text("of another checkpoint")
    run[0].save_state(path)
    run[0].load_state(path)
    (kept,) = project.glob("mine.replaced-*")
    return [item.name for item in (kept / "model").glob("r00002-*")]


def test_files_of_another_checkpoint_do_not_come_into_the_new_one(ranks, tmp_path):
    assert ranks.run(1, replace_a_mix, tmp_path) == [["r00002-of-00003.safetensors"]]


@pytest.mark.slow
@pytest.mark.fault_row(4)
def test_a_named_checkpoint_is_replaced_as_a_whole(ranks, tmp_path):
    assert ranks.run(2, replace_one, tmp_path) == [(3, ["mine"])] * 2


def refuse_things(project):
    run = run_of(project / "a")
    with pytest.raises(CheckpointError, match="no checkpoint here yet; call save_state"):
        run[0].load_state()
    train(run, 1)
    run[0].save_state()
    assert run[0].save_state() == project / "a/checkpoints/step-00000001"
    with pytest.raises(CheckpointError, match=r"a folder of checkpoints; name one of them, such as .*step-00000001"):
        run[0].load_state(project / "a/checkpoints")
    (project / "other").mkdir(exist_ok=True)
    (project / "other/notes.txt").write_text("mine")
    for of_another_program in (False, True):  # on a disk that ignores case, a manifest.json is a MANIFEST.json
        if of_another_program:
            (project / "other" / manifest.NAME).write_text('{"name": "a web page"}')
        says = "a folder with other files in it; use another name, or write those files after the save"
        with pytest.raises(CheckpointError, match=says):
            run[0].save_state(project / "other")
    run[0].free_memory()
    with pytest.raises(UsageError, match=r"save_state: nothing to save .* call it after prepare\(\) and before free_"):
        run[0].save_state()
    saved = manifest.read(project / "a/checkpoints/step-00000001")
    assert "model" in saved.sections, "the checkpoint of this step was not replaced"
    run[0].prepare(nn.Linear(1, 1))
    run[0].project_configuration.automatic_checkpoint_naming = False
    with pytest.raises(UsageError, match="no folder is given"):
        run[0].save_state()


def start_where_none_is(project):
    run = run_of(project)
    for path, says in ((None, "no checkpoint here yet; call save_state"), (project / "best", "no such folder")):
        with pytest.raises(FileNotFoundError, match=says) as caught:
            run[0].load_state(path)
        assert isinstance(caught.value, CheckpointError)
    try:
        run[0].load_state(project / "best")
    except FileNotFoundError:
        train(run, 1)
    if run[0].process_index == 1:
        (project / "own-1").mkdir()
    with pytest.raises(CheckpointError) as caught:
        run[0].load_state(project / f"own-{run[0].process_index}")
    assert not isinstance(caught.value, FileNotFoundError)
    run[0].save_state(project / "best")
    return run[0].load_state(project / "best").name, run[0].counters.step


def test_a_script_may_catch_that_there_is_no_checkpoint_yet(ranks, tmp_path):
    assert ranks.run(2, start_where_none_is, tmp_path) == [("best", 1)] * 2


def test_what_cannot_be_done_is_said(ranks, tmp_path):
    ranks.run(1, refuse_things, tmp_path)
    assert (tmp_path / "other/notes.txt").read_text() == "mine"


def keep_some(project, limit):
    run = run_of(project, limit=limit, checkpoint={"keep_every": 4})
    root = project / "checkpoints"
    for step in range(1, 8):
        train(run, 1)
        run[0].save_state()
        if step == 3 and run[0].is_main_process:
            retention.pin(root / "step-00000003")
        run[0].wait_for_everyone()
    return sorted(path.name for path in root.iterdir())


@pytest.mark.slow
def test_retention_keeps_the_newest_the_multiples_and_the_pinned(ranks, tmp_path):
    names = ["step-00000003", "step-00000003.PIN", "step-00000004", "step-00000006", "step-00000007"]
    assert ranks.run(2, keep_some, tmp_path, 2)[0] == [".lock", "LATEST", *names]


def diverge(project):
    """Steps 1 to 7 with a save after each, with NaN in one weight from step 3 on, then a resume of the newest."""
    run, said = run_of(project, limit=2), []
    for step in range(1, 8):
        train(run, 1)
        if step == 3:
            weight = next(parameter for parameter in run[1].parameters() if parameter.ndim == 2)
            with torch.no_grad():
                weight[-1].fill_(torch.nan)
        with log_lines("shardkit.checkpoint") as lines:
            run[0].save_state()
        said += [line for line in lines if "NaN" in line]
    run = run_of(project, limit=2)
    with log_lines("shardkit") as lines:
        run[0].load_state()
    said += [line for line in lines if "NaN" in line]
    return sorted(path.name for path in (project / "checkpoints").glob("step-*")), said


def diverge_between_named(project):
    """A save into a folder of the script's, and one with NaN beside it; what is said then."""
    run = run_of(project)
    train(run, 1)
    run[0].save_state(project / "epoch_1")
    with torch.no_grad():
        next(iter(run[1].parameters())).fill_(torch.nan)
    with log_lines("shardkit.checkpoint") as lines:
        run[0].save_state(project / "epoch_2")
    return [line for line in lines if "NaN" in line]


def test_a_save_with_nan_names_the_one_before_that_the_script_has_named(ranks, tmp_path):
    said = ranks.run(2, diverge_between_named, tmp_path)[0]
    assert len(said) == 1 and f"resume from the last one without, {tmp_path / 'epoch_1'}; with" in said[0]


@pytest.mark.slow
def test_retention_keeps_the_last_checkpoint_before_weights_became_nan(ranks, tmp_path, capsys):
    names, said = ranks.run(2, diverge, tmp_path)[0]
    assert names == ["step-00000002", "step-00000006", "step-00000007"]
    assert len(said) == 6 and all("step-00000002" in line for line in said)
    assert "the weights that were loaded have NaN values" in said[-1]
    assert command_line.run(["checkpoint", "list", str(tmp_path)]) == 0
    marked = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "NaN" in line]
    assert sorted(marked) == ["6", "7"]
    assert command_line.run(["checkpoint", "inspect", str(tmp_path / "checkpoints/step-00000007")]) == 0
    assert "NaN       in " in capsys.readouterr().out
    assert command_line.run(["checkpoint", "prune", str(tmp_path), "--keep-last", "1", "--dry-run"]) == 0
    assert [line.split("/")[-1] for line in capsys.readouterr().out.splitlines()[:-1]] == ["step-00000006"]


def save_config(project):
    run = run_of(project)
    train(run, 1)
    return str(run[0].save_state())


def test_the_configuration_is_saved_with_every_checkpoint(ranks, tmp_path):
    (path,) = ranks.run(1, save_config, tmp_path)
    assert "seed: 3" in (Path(path) / "config.yaml").read_text()
    record = json.loads((Path(path) / "MANIFEST.json").read_text())
    assert (record["step"], record["samples_seen"], record["world_size"]) == (1, 12, 1)


def resume_on_another_world(project, apart=()):
    with log_lines("shardkit.checkpoint") as lines:
        run = run_of(project)
        rank = run[0].process_index
        generators = {"python": random, "numpy": numpy.random, "torch": torch.random.default_generator}
        for name, generator in generators.items():
            seed = generator.manual_seed if name == "torch" else generator.seed
            seed(rank if name in apart else 5)
        run[0].load_state()
    drawn = {"python": random.random(), "numpy": numpy.random.rand(), "torch": torch.rand(()).item()}
    return drawn, [line for line in lines if "are seeded from" in line]


@pytest.mark.slow
@pytest.mark.fault_row(21)
@pytest.mark.parametrize("apart", [("python", "numpy", "torch"), ("torch",), ("python", "numpy"), ()], ids=str)
def test_random_streams_are_derived_on_another_world_with_a_warning(ranks, tmp_path, apart):
    """A script may decide by a number that all ranks draw: with others on each they would wait for ever."""
    ranks.run(2, in_parts, tmp_path, (1,), 0)
    first, second = (ranks.run(3, resume_on_another_world, tmp_path, apart) for _ in range(2))
    assert [drawn for drawn, _ in first] == [drawn for drawn, _ in second]
    for name in ("python", "numpy", "torch"):
        assert len({drawn[name] for drawn, _ in first}) == (3 if name in apart else 1), name
    assert "saved by 2 ranks, loading on 3" in first[0][1][0] and not first[1][1]


def go_back(project):
    run = run_of(project)
    for steps in (1, 1, 3):
        train(run, steps)
        run[0].save_state()
    run[0].load_state(project / "checkpoints/step-00000001")
    train(run, 2)
    run[0].save_state()
    run[0].load_state()
    step, names = run[0].counters.step, [found.step for found in folder.steps(project / "checkpoints")]
    train(run, 2)
    run[0].save_state()
    run[0].load_state()
    again = run[0].counters.step
    saving.close(run[0]._run)
    return step, names, again, manifest.read(project / "checkpoints/step-00000005").parent is not None


def test_going_back_and_on_leaves_the_line_that_was_given_up(ranks, tmp_path):
    assert ranks.run(2, go_back, tmp_path) == [(3, [5, 3, 2, 1], 5, True)] * 2


class Adapted(nn.Module):
    """A low-rank adapter on a frozen base."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapters_only(project):
    """The adapter trains, is saved and resumed; the base does not move."""
    torch.manual_seed(0)
    model = Adapted()
    wrap = {"fsdp_auto_wrap_policy": "NO_WRAP"}
    naming = ProjectConfiguration(str(project), automatic_checkpoint_naming=True)
    given = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": wrap}
    accelerator = Accelerator(config=given, project_config=naming)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)

    def steps(count):
        for number in range(count):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}

    before = steps(2)
    accelerator.save_state()
    after = steps(2)
    accelerator.load_state()
    again = steps(2)
    saving.close(accelerator._run)
    assert torch.equal(before["base.weight"], again["base.weight"])
    assert not torch.equal(before["up.weight"], again["up.weight"])
    assert all(torch.equal(after[name], again[name]) for name in after)
    return sorted(path.name for path in (project / "checkpoints/step-00000002/optim").iterdir())


@pytest.mark.requirement("N4")
def test_adapters_on_a_frozen_base_are_saved_and_resumed(ranks, tmp_path):
    assert len(ranks.run(2, adapters_only, tmp_path)[0]) == 2


class Target(nn.Linear):
    """Follows the trained model."""


def followed(folder, strategy, how):
    """A target is filled after prepare, and follows in training if `how` says so. Returns the warnings."""
    with log_lines(level=logging.WARNING) as lines:
        accelerator = Accelerator(config={"use_cpu": True, "fsdp_config": {"fsdp_sharding_strategy": strategy}})
        model, target = nn.Linear(4, 3), Target(4, 3).requires_grad_(False)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        target = accelerator.prepare_model(target, evaluation_mode=True)
        target.load_state_dict(accelerator.unwrap_model(model).state_dict())
        if how == "registered":
            accelerator.register_for_checkpointing(target)
        for step in range(2):
            if how == "prepared" and step == 1:
                target = accelerator.prepare(target)
            accelerator.backward((model(torch.ones(2, 4)) - target(torch.ones(2, 4)) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            follows = how in ("follows", "registered") or (how == "prepared" and step == 1)
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True) if follows else ():
                slow.data.mul_(0.9)
                slow.data.add_(0.1 * fast.data)
            accelerator.save_state(folder / str(step))
        accelerator.free_memory()
    return [line for line in lines if "evaluation_mode" in line]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [1, 3])
def test_a_save_warns_once_of_a_model_for_evaluation_that_follows_in_training(ranks, tmp_path, strategy):
    told = ranks.run(2, followed, tmp_path / "follows", strategy, "follows")
    assert told[1] == [] and len(told[0]) == 1
    assert "no checkpoint has them (got Target); prepare it without evaluation_mode" in told[0][0]
    assert ranks.run(2, followed, tmp_path / "still", strategy, "still") == [[], []]
    assert ranks.run(2, followed, tmp_path / "registered", strategy, "registered") == [[], []]
    assert ranks.run(2, followed, tmp_path / "prepared", strategy, "prepared") == [[], []]


def left_out(folder, what, how):
    """A run that does not prepare the optimizer, or its schedule, and one that resumes it. Returns the warnings, the
    rate at the end, and the weights."""
    with log_lines(level=logging.WARNING) as lines:
        for part in range(2):
            accelerator = Accelerator(config={"use_cpu": True, "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}})
            torch.manual_seed(part)
            model = nn.Linear(4, 3)
            if what == "optimizer":
                model = accelerator.prepare(model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            if what == "schedule":
                model, optimizer = accelerator.prepare(model, optimizer)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            if how == "registered":
                accelerator.register_for_checkpointing(schedule, *[optimizer] * (what == "optimizer"))
            if how == "hooks":
                accelerator.register_save_state_pre_hook(lambda models, weights, output: None)
            if part == 1:
                accelerator.load_state(folder)
            for step in range(2 * part, 2 * part + 2):
                inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step)).chunk(2)
                accelerator.backward(model(inputs[accelerator.process_index]).square().mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            for _ in range(2 - part):
                accelerator.save_state(folder)
            weights = accelerator.get_state_dict(model)
            accelerator.free_memory()
    told = [line for line in lines if "begins it anew" in line]
    return told, optimizer.param_groups[0]["lr"], {name: one.tolist() for name, one in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["optimizer", "schedule"])
def test_a_save_warns_once_of_an_optimizer_or_schedule_that_was_not_prepared(ranks, tmp_path, what):
    told, rate, _ = ranks.run(2, left_out, tmp_path / "left out", what, "")[0]
    name = "AdamW" if what == "optimizer" else "a schedule of AdamW"
    assert len(told) == 2 and f"(got {name}); prepare it, or register it" in told[0]
    assert rate == pytest.approx(0.1 / 3), "the resumed run has begun the schedule anew"
    told, rate, weights = ranks.run(2, left_out, tmp_path / "registered", what, "registered")[0]
    assert told == [] and rate == pytest.approx(0.1 / 5)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for name, one in model.state_dict().items():
        torch.testing.assert_close(torch.tensor(weights[name]), one, atol=1e-5, rtol=1e-4)
    assert ranks.run(2, left_out, tmp_path / "hooks", what, "hooks")[0][0] == []
