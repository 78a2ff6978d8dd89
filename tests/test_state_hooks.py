"""Hooks at saves and loads, as scripts for diffusion models write them: what they add is part of the checkpoint."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from shardkit import Accelerator, compat
from shardkit.checkpoint.files import verify
from shardkit.checkpoint.saving import additions
from shardkit.checkpoint.states.state import Live
from shardkit.cli.main import run
from shardkit.errors import EXIT_CHECK_FAILED, CheckpointError, CheckpointSaveError, UsageError
from shardkit.runtime.checkpoints import saving
from tests.checkpoints import save
from tests.training import Model, Points, weights_of

DDP = {"distributed_type": "MULTI_CPU", "use_cpu": True}
FSDP = {"distributed_type": "FSDP", "use_cpu": True}


class Script:
    """A trained and a frozen model, an average of the weights, and a hook of each kind."""

    def __init__(self, config: dict[str, Any], pops: bool = True) -> None:
        torch.manual_seed(3)
        self.accelerator = Accelerator(config=config)
        self.average = nn.Linear(2, 2)
        model, frozen = Model(), Model().requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        loader = torch.utils.data.DataLoader(Points(12), batch_size=2)
        self.model, self.frozen, self.optimizer, self.loader = self.accelerator.prepare(
            model, frozen, optimizer, loader
        )
        self.pops, self.calls = pops, []
        self.handles = [
            self.accelerator.register_save_state_pre_hook(self.save),
            self.accelerator.register_load_state_pre_hook(self.load),
        ]

    def save(self, models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        self.calls.append(("save", len(models), len(weights)))
        whole = self.accelerator.get_state_dict(models[0])
        if self.accelerator.is_main_process:
            os.makedirs(os.path.join(output_dir, "unet", "deep"))
            save_file(whole, os.path.join(output_dir, "unet", "diffusion.safetensors"))
            save_file(self.average.state_dict(), os.path.join(output_dir, "unet", "deep", "ema.safetensors"))
            Path(output_dir, "model.json").write_text("{}")
            while self.pops and weights:
                weights.pop()

    def load(self, models: list[nn.Module], input_dir: str) -> None:
        self.calls.append(("load", len(models)))
        self.average.load_state_dict(load_file(os.path.join(input_dir, "unet", "deep", "ema.safetensors")))
        while self.pops and models:
            model = models.pop()
            if model is self.accelerator.unwrap_model(self.model):  # as it was given, without DDP around it
                model.load_state_dict(load_file(os.path.join(input_dir, "unet", "diffusion.safetensors")))

    def train(self) -> None:
        for batch in self.loader:
            self.accelerator.backward(nn.functional.mse_loss(self.model(batch["x"]), batch["y"]))
            self.optimizer.step()
            self.optimizer.zero_grad()


def saved_and_loaded(config: dict[str, Any], pops: bool, folder: Path, blocking: bool) -> dict[str, Any]:
    script = Script(config, pops)
    script.train()
    path = script.accelerator.save_state(folder / "saved", blocking=blocking)
    saving.wait(script.accelerator._run)
    with torch.no_grad():
        script.average.weight.fill_(7)
    before = weights_of(script.model)
    script.train()
    expected = weights_of(script.model)
    again = Script(config, pops)
    again.accelerator.load_state(path)
    assert again.average.weight.max() < 1
    restored = weights_of(again.model)
    again.train()
    for handle in again.handles:
        handle.remove()
    again.accelerator.save_state(folder / "plain")
    assert all(torch.equal(a, b) for a, b in zip(before, restored, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, weights_of(again.model), strict=True))
    return {"calls": script.calls + again.calls}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "config", "pops", "blocking"),
    [
        (1, DDP, True, True),
        (2, DDP, True, False),
        (2, FSDP, False, True),
        pytest.param(3, FSDP, False, False, marks=pytest.mark.slow),
    ],
)
def test_what_hooks_write_is_part_of_the_checkpoint(ranks, tmp_path, capsys, world_size, config, pops, blocking):
    results = ranks.run(world_size, saved_and_loaded, config, pops, tmp_path, blocking)
    assert results == [{"calls": [("save", 2, 2), ("load", 2)]}] * world_size
    found = verify.open_checkpoint(tmp_path / "saved")
    assert found.manifest.additions.keys() == {
        "unet/diffusion.safetensors",
        "unet/deep/ema.safetensors",
        "model.json",
    }
    assert found.manifest.version == 3
    assert any(name.startswith("model/") for name in found.manifest.files) is not pops
    assert verify.damages(found) == []
    output = tmp_path.with_name(f"{tmp_path.name}-merged")
    code, told = run(["checkpoint", "merge", str(found.path), "-o", str(output)]), capsys.readouterr().err
    if pops:
        assert code == 3 and "its models are in files of the script's save hook (got model.json, unet/deep" in told
    else:
        assert code == 0 and (output / "model.safetensors").exists()
        assert "files of the script's save hook were not exported (got model.json, unet/deep/ema" in told
        assert f" in {found.path})" in told
    plain = verify.open_checkpoint(tmp_path / "plain").manifest
    assert plain.version < 3 and not plain.additions and any(name.startswith("model/") for name in plain.files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "saved"]
    added = tmp_path / "saved" / "unet" / "deep" / "ema.safetensors"
    added.write_bytes(added.read_bytes()[:-1] + b"x")
    assert "ema.safetensors: its xxh3 digest differs" in verify.damages(found)[0]


def loaded_on_others(folder: Path) -> list[torch.Tensor]:
    script = Script(DDP)
    script.accelerator.load_state(folder / "saved")
    return weights_of(script.model)


@pytest.mark.slow
def test_another_number_of_ranks_loads_it(ranks, tmp_path):
    ranks.run(2, saved_and_loaded, DDP, True, tmp_path, True)
    (one,) = ranks.run(1, loaded_on_others, tmp_path)
    for several in ranks.run(3, loaded_on_others, tmp_path):
        assert all(torch.equal(a, b) for a, b in zip(one, several, strict=True))


def faults(folder: Path) -> list[str]:
    """What is said of hooks that do what they must not, each on one rank only."""
    script = Script(DDP)
    accelerator, rank = script.accelerator, dist.get_rank() if dist.is_initialized() else 0
    accelerator.save_state(folder / "good")
    for handle in script.handles:
        handle.remove()
    said, causes = [], []

    def attempt(hook: Any, call: Any, error: type[Exception]) -> None:
        handle = hook(accelerator)
        with pytest.raises(error) as caught:
            call()
        handle.remove()
        said.append(str(caught.value))
        causes.append(type(caught.value.__cause__))

    def save(hook: Any, error: type[Exception] = CheckpointSaveError) -> None:
        attempt(lambda a: a.register_save_state_pre_hook(hook), lambda: accelerator.save_state(folder / "new"), error)

    def fails(models: list, weights: list, output_dir: str) -> None:
        if rank == 1:
            raise KeyError("average")

    def links(models: list, weights: list, output_dir: str) -> None:
        if rank == 0:
            os.symlink("/etc/hostname", Path(output_dir, "link"))

    def collides(models: list, weights: list, output_dir: str) -> None:
        if rank == 0:
            Path(output_dir, "index.json").write_text("{}")

    def changes(models: list, weights: list, output_dir: str) -> None:
        weights[0] = dict(weights[0])

    for hook in (fails, links, collides, changes):
        save(hook)
    assert causes[0] is (KeyError if rank == 1 else type(None)), "the traceback has the line of the hook"

    def load() -> None:
        accelerator.load_state(folder / "good")

    attempt(lambda a: a.register_load_state_pre_hook(lambda models, folder: None), load, CheckpointError)
    attempt(
        lambda a: a.register_load_state_pre_hook(lambda models, folder: models.clear() if rank else models.pop()),
        lambda: accelerator.load_state(folder / "good", strict=False),
        CheckpointError,
    )
    with pytest.raises(CheckpointError) as caught:
        load()
    said.append(str(caught.value))
    accelerator.load_state(folder / "good", strict=False)
    with pytest.raises(UsageError, match="a hook must be callable"):
        accelerator.register_save_state_pre_hook(3)
    return said


def test_what_hooks_must_not_do_fails_on_all_ranks_and_leaves_nothing(ranks, tmp_path):
    for said in ranks.run(2, faults, tmp_path):
        failed, links, collides, changes, untaken, unlike, unknown = said
        assert "rank 1 (host" in failed and "): KeyError: 'average'." in failed
        assert "a save hook wrote link, which is not a regular file" in links
        assert "a save hook wrote index.json, a name that the checkpoint itself uses; use another name" in collides
        assert "a save hook changed what `weights` holds" in changes
        assert "model: a save hook removed it from `weights`, so the checkpoint lacks it" in untaken
        assert "load hooks loaded different models on different ranks (got models [" in unlike
        assert "model: prepared in this run, but not in the checkpoint" in unknown
    assert sorted(os.listdir(tmp_path)) == ["good"]


def resumed_without_a_load_hook(folder: Path) -> bool:
    accelerator = compat.Accelerator(config=FSDP)
    model = accelerator.prepare(Model())
    before = weights_of(model)

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process and weights:
            weights.pop()

    accelerator.register_save_state_pre_hook(save)
    accelerator.save_state(folder / "saved")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder / "saved")
    after = weights_of(model)
    accelerator.end_training()
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_hooks_written_for_accelerate_may_remove_a_sharded_model_and_not_load_it(ranks, tmp_path):
    assert all(ranks.run(2, resumed_without_a_load_hook, tmp_path))


def test_a_link_to_a_folder_is_refused_as_one_to_a_file(tmp_path):
    """Its files would not be in the checkpoint."""
    (tmp_path / "there").mkdir()
    staging = additions.begin(tmp_path / "new", "0" * 32)
    os.symlink(tmp_path / "there", staging.path / "link")
    with pytest.raises(CheckpointError, match="a save hook wrote link, which is not a regular file"):
        additions.take(staging, tmp_path, "xxh3")
    staging.discard()


@pytest.mark.parametrize(
    ("name", "content", "digest", "is_same"),
    [
        ("weights.bin", b"1", "xxh3", True),
        ("weights.bin", b"1", "sha256", True),
        ("weights.bin", b"2", "xxh3", False),
        ("other.bin", b"1", "xxh3", False),
    ],
)
def test_diff_compares_the_files_of_hooks(tmp_path, capsys, name, content, digest, is_same):
    """A model that a hook saved is in them alone."""

    def saved(where: str, name: str, content: bytes, digest: str) -> str:
        staging = additions.begin(tmp_path / where, "0" * 32)
        (staging.path / name).write_bytes(content)
        model = nn.Linear(1, 1)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        save(Live([model], seed=0), tmp_path / where, staging=staging, digest=digest)
        staging.discard()
        return str(tmp_path / where)

    first, second = saved("a", "weights.bin", b"1", "xxh3"), saved("b", name, content, digest)
    assert run(["checkpoint", "diff", first, second]) == (0 if is_same else EXIT_CHECK_FAILED)
    out = capsys.readouterr().out
    assert all((f"state: file {one} differs\n" in out) is not is_same for one in {"weights.bin", name})
