"""`shardkit checkpoint convert` of DeepSpeed's checkpoints, which DeepSpeed itself has made (tests/data/zero)."""

import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from shardkit import Accelerator
from shardkit.checkpoint.commands import convert, zero
from shardkit.checkpoint.commands.dcp import LazyTensor
from shardkit.cli.main import run
from shardkit.errors import EXIT_CHECKPOINT, CheckpointCorrupted, CheckpointError
from shardkit.model.prepared import Prepared
from tests.data.zero.net import Net, batch, groups_of, loss_of

SAVED = Path(__file__).parent / "data" / "zero"
FSDP = {"distributed_type": "FSDP", "use_cpu": True}
ALONE = {"distributed_type": "NO", "use_cpu": True}
KINDS = {"zero0": (False, False), "zero1": (True, True), "zero2": (False, False), "zero3": (False, True)}
"""Whether the model is tied, and has a frozen parameter."""
ONE_OF_3 = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
ONE = "zero1/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def built(kind: str) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(*KINDS[kind])
    return net, torch.optim.AdamW(groups_of(net), lr=0.01)


def expected(kind: str) -> dict[str, dict[str, torch.Tensor]]:
    return torch.load(SAVED / kind / "expected.pt", weights_only=True)


def two_more_steps(kind: str, checkpoint: Path, config: dict, ranks_of_source: list[int]) -> dict[str, torch.Tensor]:
    """The weights after two steps from the checkpoint on, this rank's batches being those of these ranks there."""
    accelerator = Accelerator(config=config)
    net, optimizer = accelerator.prepare(*built(kind))
    if kind == "zero2":
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10))
    accelerator.load_state(checkpoint)
    for step in (3, 4):
        tokens = torch.cat([batch(step, rank) for rank in ranks_of_source])
        accelerator.backward(loss_of(net, tokens))
        optimizer.step()
        if kind == "zero2":
            scheduler.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in accelerator.get_state_dict(net).items()}


def of_this_rank(kind: str, checkpoint: Path) -> dict[str, torch.Tensor]:
    return two_more_steps(kind, checkpoint, FSDP, [torch.distributed.get_rank()])


def of_all(kind: str, checkpoint: Path) -> dict[str, torch.Tensor]:
    return two_more_steps(kind, checkpoint, ALONE, [0, 1])


def converted(kind: str, root: Path) -> convert.Converted:
    """Stage 0 numbers its parameters."""
    net, optimizer = built(kind)
    names = {parameter: name for name, parameter in net.named_parameters()}
    groups = [[(0, names[parameter]) for parameter in group["params"]] for group in optimizer.param_groups]
    named = Prepared([{name: parameter.requires_grad for name, parameter in net.named_parameters()}], [groups])
    return convert.convert(SAVED / kind, root, prepared=named if kind == "zero0" else None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_that_deepspeed_gives(kind):
    found = {
        name: tensor.to("cpu") if isinstance(tensor, LazyTensor) else tensor
        for name, tensor in zero.read(SAVED / kind, weights_only=True).model.items()
    }
    for name, tensor in expected(kind)["at_save"].items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    frozen = Net(*KINDS[kind]).first.weight
    if kind in ("zero1", "zero3"):
        torch.testing.assert_close(found["first.weight"].float(), frozen.detach(), rtol=0, atol=0.003)
    assert found["seen"] == 3 and found["scale"].shape == (6,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero0", "zero2", "zero3"])
def test_training_goes_on_as_deepspeed_does(kind, tmp_path, ranks):
    made = converted(kind, tmp_path)
    assert (made.step, made.models, made.optimizers) == (3, 1, 1)
    later = expected(kind)["later"]
    of_two, _ = ranks.run(2, of_this_rank, kind, made.path)  # rank 0 has it all
    for weights in (of_two, *ranks.run(1, of_all, kind, made.path)):
        for name, tensor in later.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)


def test_what_is_not_converted_is_said(tmp_path, capsys):
    assert run(["checkpoint", "convert", str(SAVED / "zero2"), "-o", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "of the script's client_state: epoch" in said
    assert "DeepSpeed's own" not in said  # torch's scheduler is in it
    found = zero.read(SAVED / "zero2", weights_only=False)
    assert found.scheduler is not None and found.scheduler["last_epoch"] == 3
    only_weights = zero.read(SAVED / "zero2" / "global_step3", weights_only=True)
    assert (only_weights.optimizer, only_weights.scheduler, only_weights.step) == (None, None, 3)


def changed(path: Path, change) -> None:
    """The file with another content."""
    with torch.serialization.safe_globals([(zero._Plain, name) for name in zero._CLASSES]):
        content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def without(name: str):
    return lambda folder: (folder / name).unlink()


def cut_short(folder: Path) -> None:
    def change(content):
        flat = content["optimizer_state_dict"]
        flat["single_partition_of_fp32_groups"] = [one[:-5] for one in flat["single_partition_of_fp32_groups"]]
        del flat["param_slice_mappings"], flat["zero_stage"], flat["loss_scaler"]

    changed(folder / ONE.partition("/")[2], change)


def elastic(folder: Path) -> None:
    def change(content):
        flat = content["optimizer_state_dict"]
        flat["base_optimizer_state"] = []
        del flat["param_slice_mappings"], flat["zero_stage"], flat["loss_scaler"]

    changed(folder / ONE.partition("/")[2], change)


def of_another_step(folder: Path) -> None:
    def change(content):
        for row in content["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            row["step"] += 1
        del content["optimizer_state_dict"]["zero_stage"], content["optimizer_state_dict"]["loss_scaler"]

    changed(folder / ONE_OF_3, change)


def with_an_older_rank(folder: Path) -> None:
    path = folder / ONE.partition("/")[2]
    shutil.copy(path, path.with_name(path.name.replace("rank_1", "rank_2", 1)))


def without_optimizer_states(folder: Path) -> None:
    for path in folder.glob("*/*_optim_states.pt"):
        path.unlink()


def in_16_bits(folder: Path) -> None:
    """As FP16_Optimizer and its kin save."""
    path = folder / "global_step3" / "mp_rank_00_model_states.pt"
    changed(path, lambda content: content.update(optimizer={"fp32_groups": [], "optimizer_state_dict": {}}))


def renamed(old: str, new: str):
    return lambda folder: (folder / old).rename(folder / new)


@pytest.mark.parametrize(
    ("kind", "change", "error", "text"),
    [
        ("zero1", without("global_step3/mp_rank_00_model_states.pt"), CheckpointError,
         "is not a checkpoint of Accelerate"),
        ("zero1", without(ONE.partition("/")[2]), CheckpointError, "files of ranks are missing (got 1 of 2)"),
        ("zero1", without(ONE.partition("/")[2].replace("rank_1", "rank_0", 1)), CheckpointError,
         "files of ranks are missing (got bf16_zero_pp_rank_1"),
        ("zero1", renamed(ONE.partition("/")[2], "global_step3/zero_pp_rank_1_mp_rank_01_optim_states.pt"),
         CheckpointError, "is tensor parallel"),
        ("zero1", cut_short, CheckpointCorrupted, "is not whole in the files"),
        ("zero1", elastic, CheckpointError, "--weights-only"),
        ("zero1", with_an_older_rank, CheckpointError, "of another run (got 3 of 2); remove those from rank 2 on"),
        ("zero3", without(ONE_OF_3.replace("optim", "model")), CheckpointError, "got 1 of model states, 2 of"),
        ("zero2", without_optimizer_states, CheckpointError, "without files of optimizer states"),
        ("zero3", without_optimizer_states, CheckpointError, "without files of optimizer states"),
        ("zero3", of_another_step, CheckpointCorrupted, "its files are of several runs (got steps 3, 4)"),
        ("zero3", without("latest"), CheckpointError, "give the folder of one, such as SAVED/global_step3."),
        ("zero0", in_16_bits, CheckpointError, "stage 0 in 16 bits numbers its weights in fp32"),
    ],
)  # fmt: skip
def test_what_is_refused(kind, change, error, text, tmp_path):
    source = tmp_path / "saved"
    shutil.copytree(SAVED / kind, source)
    change(source)
    with pytest.raises(error, match=re.escape(text.replace("SAVED", str(source)))):
        convert.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_in_16_bits_have_a_note(tmp_path):
    shutil.copytree(SAVED / "zero0", tmp_path / "saved")
    in_16_bits(tmp_path / "saved")
    assert "its weights in fp32 are numbered" in zero.read(tmp_path / "saved", weights_only=True).notes[-2]


@pytest.mark.parametrize("tag", ["epoch=1-step=3", "run 5/last"])
def test_a_tag_may_have_any_name(tag, tmp_path):
    source = tmp_path / "saved"
    (source / tag).parent.mkdir(parents=True)
    shutil.copytree(SAVED / "zero3" / "global_step3", source / tag)
    (source / "latest").write_text(tag)
    assert zero.read(source, weights_only=True).step == 3


def test_a_tag_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "latest").write_text(str(SAVED / "zero3" / "global_step3"))
    assert not zero.is_zero(tmp_path / "saved")


def test_files_beside_it_have_a_note(tmp_path):
    """As in a checkpoint folder of the Trainer."""
    source = tmp_path / "saved"
    shutil.copytree(SAVED / "zero3", source)
    for name in ("scheduler.pt", "trainer_state.json", "zero_to_fp32.py", "config.json", "model.safetensors"):
        (source / name).touch()
    made = convert.convert(source, tmp_path / "out")
    assert "not converted: expected.pt, scheduler.pt, trainer_state.json" in made.notes


def test_an_empty_buffer_is_kept(tmp_path):
    shutil.copytree(SAVED / "zero3", tmp_path / "saved")

    def change(content):
        content["buffer_names"].append("none")
        content["module"]["none"] = torch.empty(0)

    changed(tmp_path / "saved" / ONE_OF_3.replace("1_mp_rank_00_optim", "0_mp_rank_00_model"), change)
    assert "none" in zero.read(tmp_path / "saved", weights_only=True).model


def test_no_code_of_the_files_runs(tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    shutil.copytree(SAVED / "zero1", tmp_path / "saved")
    path = tmp_path / "saved" / ONE.partition("/")[2]
    torch.save({"optimizer_state_dict": Evil()}, path, pickle_module=pickle)
    assert run(["checkpoint", "convert", str(tmp_path / "saved"), "-o", str(tmp_path / "out")]) == EXIT_CHECKPOINT
    assert not (tmp_path / "ran").exists()
    assert "more than tensors and plain values" in capsys.readouterr().err
