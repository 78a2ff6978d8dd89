"""Loading straight into the live tensors. What fails before the first write changes nothing; what
fails after it ends in the checkpoint before, or in words, and never in a mix that could be saved."""

import os
import shutil
import signal

import pytest
import torch

from benchmarks.checkpoint import peak_of
from shardkit.checkpoint.files import folder
from shardkit.checkpoint.loading import read, seen
from shardkit.checkpoint.states import state
from shardkit.distributed import control
from shardkit.distributed.tensors import local_part
from shardkit.errors import CheckpointCorrupted, CheckpointError, CheckpointSaveError, StateIncomplete
from shardkit.runtime.checkpoints import saving, separate_checkpoints
from tests import checkpoints, forked
from tests.checkpoints import fill, prepared, values_in
from tests.numbered_runs import run_of, train
from tests.test_faults_load import save_steps


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Steps 1, 2 and 3, saved by two ranks."""
    root = tmp_path_factory.mktemp("saved")
    ranks.run(2, save_steps, root, "sharded", (1, 2, 3))
    return root


def load_with(root, fault):
    """What a load is told that meets a fault on its way into the live tensors, and whether it says incomplete."""
    live, unfinished = prepared("fsdp"), read.Unfinished()
    fill(live, 77)
    forked.arm(fault)
    try:
        checkpoints.load(live, root / "step-00000003", unfinished=unfinished)
    except CheckpointError as error:
        return type(error).__name__, str(error), sorted(unfinished.parts)[:2]
    return "loaded", "", []


@pytest.mark.slow
@pytest.mark.fault_row(42)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("action", ["raise=EIO", "kill"])
def test_a_failure_while_filling_says_incomplete_on_every_rank(saved, action, rank):
    outcomes = forked.run(2, load_with, saved, f"fill:{rank}:{action}")
    assert outcomes[0].marks == {f"fill.{rank}"}
    survivors = [outcome for outcome in outcomes if outcome.exit_code == 0]
    assert len(survivors) == (1 if action == "kill" else 2)
    assert any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes) == (action == "kill")
    for outcome in survivors:
        kind, told, parts = outcome.value
        assert kind == "StateIncomplete" and parts[0].startswith("model: ")
        assert "only part of the state was loaded; load another checkpoint before you continue" in told
        assert ("a rank died" if action == "kill" else "Input/output error") in told


class Arming:
    """A registered object whose first loading arms a fault, which then hits the filling; the next disarms it."""

    def __init__(self, fault):
        self.fault, self.loads = fault, 0
        self.value = {"count": 77, "pair": (1, 2), "weights": torch.zeros(3)}

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value, self.loads = value, self.loads + 1
        forked.arm(self.fault if self.loads == 1 else None)


def newest_with(root, fault):
    live = prepared("fsdp")
    fill(live, 77)
    live.objects["registered.0"] = Arming(fault)
    found = checkpoints.load_newest(live, root)
    values = {float(v) for t in state.model_tensors(live.models[0]).values() for v in local_part(t).flatten().tolist()}
    for row in live.optimizers[0].state.values():
        values |= {float(v) for tensor in row.values() for v in local_part(tensor).flatten().tolist()}
    values.add(float(live.objects["registered.0"].value["count"]))
    return found.checkpoint.manifest.step, sorted(values)


@pytest.mark.slow
@pytest.mark.fault_row(42)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_newest_falls_back_to_the_one_before_as_a_whole(saved, rank):
    outcomes = forked.run(2, newest_with, saved, f"fill:{rank}:raise=EIO")
    assert outcomes[0].marks == {f"fill.{rank}"}
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [([2, [2.0]], None)] * 2


def newest_of_one(root):
    live, unfinished = prepared("plain"), read.Unfinished()
    live.objects["registered.0"] = Arming("fill:0:raise=EIO")
    with pytest.raises(StateIncomplete, match=r"(?s)the state is now incomplete:.*step 3: .*Input/output error"):
        checkpoints.load_newest(live, root, unfinished=unfinished)
    return bool(unfinished.parts)


@pytest.mark.slow
@pytest.mark.fault_row(42)
def test_where_there_is_none_before_it_says_incomplete(saved, tmp_path):
    shutil.copytree(saved / "step-00000003", tmp_path / "step-00000003")
    (outcome,) = forked.run(1, newest_of_one, tmp_path)
    assert (outcome.value, outcome.error) == (True, None)


def refuse_to_save(project, fault):
    """A mix is never saved, nor exported; after a load that succeeds all goes on."""
    run = run_of(project)
    train(run, 1)
    path = run[0].save_state()
    train(run, 1)
    forked.arm(fault)
    with pytest.raises(StateIncomplete):
        run[0].load_state(path)
    forked.arm(None)
    for blocking in (True, False):
        with pytest.raises(CheckpointSaveError, match=r"the state is incomplete since loading .*step-00000001"):
            run[0].save_state(blocking=blocking)
    with pytest.raises(CheckpointSaveError, match=r"save_model: the state is incomplete since"):
        run[0].save_model(run[1], project / "export")
    with pytest.raises(CheckpointSaveError, match=r"save_only_model: the state is incomplete since"):
        separate_checkpoints.save_only_model(run[0]._run, run[1], project / "export")
    found = [item.step for item in folder.steps(path.parent)]
    run[0].load_state(path)
    train(run, 1)
    run[0].save_state()
    saving.close(run[0]._run)
    return found, [item.step for item in folder.steps(path.parent)]


@pytest.mark.slow
@pytest.mark.fault_row(42)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_mix_is_never_saved(tmp_path, rank):
    outcomes = forked.run(2, refuse_to_save, tmp_path, f"fill:{rank}:raise=EIO")
    expected = [[1], [2, 1]]
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(expected, None)] * 2
    assert not (tmp_path / "export").exists()


def freed_after_a_failure(project):
    run = run_of(project)
    path = run[0].save_state()
    forked.arm("fill:0:raise=EIO")
    with pytest.raises(StateIncomplete):
        run[0].load_state(path)
    forked.arm(None)
    run[0].free_memory()
    model = run[0].prepare(torch.nn.Linear(2, 2))
    run[0].save_state(project / "new")
    saving.close(run[0]._run)
    return model.weight.shape[0]


@pytest.mark.slow
def test_what_is_prepared_anew_is_not_incomplete(tmp_path):
    (outcome,) = forked.run(1, freed_after_a_failure, tmp_path)
    assert (outcome.value, outcome.error) == (2, None)


# ---- files that change under the reader ----


class Changing(Arming):
    """Changes the checkpoint between verifying and filling."""

    def __init__(self, change):
        super().__init__(None)
        self.change = change

    def load_state_dict(self, value):
        super().load_state_dict(value)
        if self.loads == 1:
            self.change()


def optimizer_file(root):
    return root / "step-00000003/optim/r00001-of-00002.safetensors"


def cut(root):
    os.truncate(optimizer_file(root), 400)


def write_into(root):
    with optimizer_file(root).open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\xff" * 8)


@pytest.mark.fault_row(43)
@pytest.mark.parametrize(("change", "text"), [(cut, "it is truncated"), (write_into, "changed while it was read")])
def test_a_file_that_changes_meanwhile_is_noticed(saved, tmp_path, change, text):
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    live = prepared("plain")
    live.objects["registered.0"] = Changing(lambda: change(root))
    with pytest.raises(StateIncomplete, match=rf"r00001-of-00002.safetensors: .*{text}"):
        checkpoints.load(live, root / "step-00000003")
    live.objects["registered.0"].loads = 1
    found = checkpoints.load_newest(live, root)
    assert found.checkpoint.manifest.step == 2 and values_in(live) == {2.0}


def replace(root):
    """As a save of the same name does, or one that deletes: another folder gets the name."""
    (root / "step-00000003").rename(root / "away")
    shutil.copytree(root / "step-00000001", root / "step-00000003")


@pytest.mark.fault_row(43)
def test_a_checkpoint_that_is_replaced_meanwhile_is_read_to_its_end(saved, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    live = prepared("plain")
    live.objects["registered.0"] = Changing(lambda: replace(root))
    checkpoints.load(live, root / "step-00000003")
    assert values_in(live) == {3.0}, "one checkpoint or the other, and never both"


@pytest.mark.fault_row(43)
def test_a_checkpoint_that_was_replaced_before_is_noticed(saved, tmp_path):
    root = tmp_path / "copy"
    shutil.copytree(saved, root)
    agreed = control.start(60.0)
    checkpoint = seen.open_together(root / "step-00000003", agreed)
    replace(root)
    live = prepared("plain")
    fill(live, 77)
    with pytest.raises(CheckpointCorrupted, match="was replaced by another checkpoint while it was read"):
        read._load(live, checkpoint, agreed, read.LoadOptions())
    assert values_in(live) == {77.0}


# ---- what is written where ----


@pytest.mark.parametrize("strategy", ["plain", "fsdp", "ddp"])
def test_tensors_that_are_there_are_filled_in_place(ranks, saved, strategy):
    assert ranks.run(2, loaded_in_place, saved, strategy) == [True] * 2


def loaded_in_place(root, strategy):
    live = prepared(strategy)
    before = {name: (local.data_ptr(), local._version) for name, local in locals_of(live).items()}
    checkpoints.load(live, root / "step-00000002")
    for name, local in locals_of(live).items():
        assert local.data_ptr() == before[name][0] and set(local.flatten().tolist()) <= {2.0}
        # A part of a sharded parameter has a count of its own each time that it is asked for.
        assert strategy == "fsdp" or local._version > before[name][1], "autograd must notice"
    return True


def locals_of(live):
    """What this rank holds of every tensor of model and optimizer, by name."""
    found = {name: local_part(tensor) for name, tensor in state.model_tensors(live.models[0]).items()}
    for number, row in enumerate(live.optimizers[0].state.values()):
        found |= {f"{number}/{key}": local_part(tensor) for key, tensor in row.items()}
    return found


class Strided(torch.nn.Module):
    """Parameters and a buffer that are no plain stretch of memory, of several dtypes, one of them empty."""

    def __init__(self, value):
        super().__init__()
        self.transposed = torch.nn.Parameter(torch.full((40, 30), value).t())
        self.last = torch.nn.Parameter(torch.full((2, 3, 4, 5), value).contiguous(memory_format=torch.channels_last))
        self.part = torch.nn.Parameter(torch.full((8, 9), value)[:, 2:5])
        self.scalar = torch.nn.Parameter(torch.tensor(value, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("mask", torch.full((7,), bool(value)))


@pytest.mark.parametrize("block", [16, 200, 1 << 20])
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_tensors_of_any_stride_are_filled(tmp_path, monkeypatch, kind, block):
    from shardkit.checkpoint.files import disk

    checkpoints.save(state.Live([Strided(3.0)]), tmp_path / "c", kind=kind)
    monkeypatch.setattr(disk, "BLOCK_BYTES", block)
    model = Strided(0.0)
    strides = [tensor.stride() for tensor in model.state_dict().values()]
    checkpoints.load(state.Live([model]), tmp_path / "c")
    expected = Strided(3.0).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert [tensor.stride() for tensor in model.state_dict().values()] == strides


def columns_and_back(folder, kind):
    """Split on dim 1, with rows longer than a block, read on other numbers of ranks."""
    from tests.test_checkpoint_state import columns

    model = columns(1, 40)
    checkpoints.save(state.Live([model]), folder, kind=kind)
    return model.weight.full_tensor().detach()


def columns_in_small_blocks(folder, block):
    from shardkit.checkpoint.files import disk
    from shardkit.checkpoint.states import fill as filling
    from tests.test_checkpoint_state import columns

    found = disk.BLOCK_BYTES, filling.RUN_BYTES
    disk.BLOCK_BYTES, filling.RUN_BYTES = block, 64
    try:
        model = columns(9, 40)
        checkpoints.load(state.Live([model]), folder)
        return model.weight.full_tensor().detach()
    finally:
        disk.BLOCK_BYTES, filling.RUN_BYTES = found


@pytest.mark.slow
@pytest.mark.parametrize("block", [100, 1000, 5000])
@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_columns_are_read_in_bounded_blocks(ranks, tmp_path, kind, block):
    expected = ranks.run(2, columns_and_back, tmp_path / "c", kind)[0]
    for world in (2, 3):
        found = ranks.run(world, columns_in_small_blocks, tmp_path / "c", block)
        assert all(torch.equal(one, expected) for one in found)


def large(seed, has_state):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*[torch.nn.Linear(1500, 1500) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if has_state:
        model(torch.ones(1, 1500)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state.Live([model], [optimizer])


def memory_of_a_load(folder, has_state):
    """MiB beyond the final state at the peak of a load."""
    checkpoints.save(large(1, True), folder)
    live = large(2, has_state)
    size = sum(p.numel() * p.element_size() for p in live.models[0].parameters()) / 2**20
    return peak_of(lambda: checkpoints.load(live, folder)) - (0 if has_state else 2 * size), size


@pytest.mark.slow
@pytest.mark.parametrize("has_state", [False, True])
def test_a_load_takes_no_memory_beyond_the_state(tmp_path, has_state):
    (outcome,) = forked.run(1, memory_of_a_load, tmp_path / "c", has_state)
    extra, size = outcome.value
    assert size > 65 and extra < 32


def not_covered(project):
    """What a failed load wrote must be written by the next one, whatever it leaves out."""
    live, unfinished = prepared("plain"), read.Unfinished()
    checkpoints.save(live, project / "whole")
    small = state.Live([torch.nn.Linear(2, 2)])
    checkpoints.save(small, project / "other")
    forked.arm("fill:0:raise=EIO")
    with pytest.raises(StateIncomplete):
        checkpoints.load(live, project / "whole", unfinished=unfinished)
    forked.arm(None)
    with pytest.raises(CheckpointError, match=r"model: .* overwritten by the failed load of .*whole, and not in this"):
        checkpoints.load(live, project / "other", strict=False, unfinished=unfinished)
    checkpoints.load(live, project / "whole", unfinished=unfinished)
    return not unfinished.parts


def test_a_load_that_covers_less_does_not_make_it_whole(tmp_path):
    (outcome,) = forked.run(1, not_covered, tmp_path)
    assert (outcome.value, outcome.error) == (True, None)


def test_without_verifying_a_wrong_header_is_still_noticed_before_anything_changes(saved, tmp_path):
    shutil.copytree(saved / "step-00000003", tmp_path / "c")
    victim = tmp_path / "c/model/r00001-of-00002.safetensors"
    data = victim.read_bytes()
    assert data.count(b'"F32"')
    victim.write_bytes(data.replace(b'"F32"', b'"I32"'))
    live = prepared("plain")
    fill(live, 77)
    with pytest.raises(CheckpointCorrupted, match="does not match the index"):
        checkpoints.load(live, tmp_path / "c", verify="size")
    assert values_in(live) == {77.0}
    assert folder.inspect(tmp_path / "c").step == 3
