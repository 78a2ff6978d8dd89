"""save_model: what plain safetensors, Transformers and peft open, from any number of ranks, whole or not at all."""

import json
import os
import socket
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from shardkit import Accelerator
from shardkit.checkpoint.exporting import export, save_model
from shardkit.checkpoint.states import state
from shardkit.distributed import control
from shardkit.errors import CheckpointSaveError, UsageError
from tests import checkpoints, forked
from tests.checkpoints import build, full, train

# peft and Transformers warn each other about what they deprecate.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


def tensors_in(folder):
    """Everything that the .safetensors files of a folder hold."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


def names_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


def whole(model):
    """The model's tensors, gathered, each once."""
    found = state.model_tensors(model)
    ties = state.tied_names(model, found)
    return {name: full(tensor).clone() for name, tensor in found.items() if name not in ties}


def save(model, folder, **settings):
    save_model.save(model, Path(folder), control.start(60.0), **settings)


def assert_equal(found, expected, dtype=None):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted), name


def export_all_ways(strategy, folder):
    live = build(strategy)
    train(live, 1)
    model = live.models[0]
    expected = whole(model)
    save(model, folder / "one")
    assert_equal(tensors_in(folder / "one"), expected)
    assert names_in(folder / "one") == ["model.safetensors"]
    save(model, folder / "many", max_shard_size="200B", dtype="bf16")
    assert_equal(tensors_in(folder / "many"), expected, torch.bfloat16)
    index = json.loads((folder / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert len(names_in(folder / "many")) == 1 + len(set(index["weight_map"].values())) > 3
    for name, file in index["weight_map"].items():
        with safe_open(folder / "many" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    sizes = [path.stat().st_size for path in (folder / "many").glob("*.safetensors")]
    assert index["metadata"]["total_size"] == sum(
        t.numel() * (2 if t.is_floating_point() else 8) for t in expected.values()
    )
    return len(sizes)


@pytest.mark.requirement("D4")
@pytest.mark.requirement("A6")
@pytest.mark.parametrize(("size", "strategy"), [(1, "single"), (2, "fsdp"), (2, "ddp"), (4, "fsdp"), (4, "hybrid")])
def test_plain_safetensors_reads_what_any_ranks_wrote(ranks, tmp_path, size, strategy):
    assert len(set(ranks.run(size, export_all_ways, strategy, tmp_path))) == 1


def export_tied(folder):
    live = build("fsdp")
    save(live.models[0], folder)
    return {name: full(tensor) for name, tensor in state.model_tensors(live.models[0]).items()}


def test_tied_weights_are_written_once_and_load_strictly(ranks, tmp_path):
    expected = ranks.run(2, export_tied, tmp_path)[0]
    assert "head.weight" in expected and "head.weight" not in tensors_in(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    from safetensors.torch import load_model

    model = checkpoints.Net()
    load_model(model, str(tmp_path / "model.safetensors"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name])


def accelerated(wrap, model, optimizer=None, **fsdp):
    policy = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": wrap}
    given = {"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": {**policy, **fsdp}}
    accelerator = Accelerator(config=given)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer):
    tokens = torch.arange(12).reshape(2, 6) % 17
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()


def export_gpt2(folder):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    run = accelerated("GPT2Block", GPT2LMHeadModel(config))
    step(*run)
    run[0].state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    run[0].save_model(run[1], folder, max_shard_size="2KB")
    run[0].save_model(run[1], folder / "half", dtype="bf16")
    return whole(run[1])


@pytest.mark.slow
@pytest.mark.requirement("A6")
def test_transformers_opens_the_export(ranks, tmp_path):
    expected = ranks.run(2, export_gpt2, tmp_path)[0]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = model.state_dict()
    assert torch.equal(found["lm_head.weight"], expected["transformer.wte.weight"])
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=17, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def export_lora(folder):
    import peft

    settings = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"], init_lora_weights=False
    )
    run = accelerated("LlamaDecoderLayer", peft.get_peft_model(llama(), settings))
    step(*run)
    run[0].save_model(run[1], folder)
    return {name: tensor for name, tensor in whole(run[1]).items() if "lora_" in name or "modules_to_save" in name}


@pytest.mark.slow
@pytest.mark.requirement("N4")
def test_peft_opens_the_adapters(ranks, tmp_path):
    expected = ranks.run(2, export_lora, tmp_path)[0]
    assert names_in(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 10_000
    import peft

    model = peft.PeftModel.from_pretrained(llama(), tmp_path)
    found = {name: t for name, t in model.state_dict().items() if "lora_" in name or "modules_to_save" in name}
    assert_equal(found, expected)


def p_tuned():
    import peft

    settings = peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)
    return peft.get_peft_model(llama(), settings)


def export_p_tuning(folder):
    run = accelerated("LlamaDecoderLayer", p_tuned())
    step(*run)
    run[0].save_model(run[1], folder)
    step(*run)  # the model goes on
    run[0].save_model(run[1], folder)
    return whole(run[1])


@pytest.mark.slow
@pytest.mark.requirement("N4")
def test_p_tuning_saves_its_prompt(ranks, tmp_path):
    weights = ranks.run(2, export_p_tuning, tmp_path)[0]
    model = p_tuned()
    assert model.load_state_dict(weights, strict=False).missing_keys == ["word_embeddings.weight"]  # tied
    assert_equal(tensors_in(tmp_path), {"prompt_embeddings": model.get_prompt_embedding_to_save("default")})
    assert names_in(tmp_path) == ["adapter_config.json", "adapter_model.safetensors"]


def export_over(folder, first, second, fault=None):
    """One export, then another over it, of a model with other weights."""
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    save(models[0], folder, max_shard_size=first)
    forked.arm(fault)
    save(models[1], folder, max_shard_size=second)
    return "saved"


def opened_as_transformers_does(folder):
    """model.safetensors if it is there, else what the index names."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return {name: load_file(folder / file)[name] for name, file in index["weight_map"].items()}


def weights_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).state_dict()


# Of one or several files, over one or several: and what a reader finds when rank 0 or 1 is killed at that point.
KILLS = [
    ("300B", "300B", "export-write:1:kill", "old"),
    ("300B", "300B", "export-name-first:0:kill", "old"),
    ("300B", "300B", "export-name-last:0:kill", "new"),
    ("5GB", "300B", "export-publish:0:kill", "old"),
    ("5GB", "300B", "export-name-first:0:kill", "old"),
    ("5GB", "300B", "export-name-last:0:kill", "old"),
    ("300B", "5GB", "export-publish:0:kill", "old"),
    ("300B", "5GB", "export-name-last:0:kill", "new"),
    ("5GB", "5GB", "export-write:0:kill", "old"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "fault", "left"), KILLS)
def test_a_killed_export_leaves_the_one_before_or_the_new_one(tmp_path, first, second, fault, left):
    outcomes = forked.run(2, export_over, tmp_path, first, second, fault)
    assert fault.rpartition(":")[0].replace(":", ".") in outcomes[0].marks
    assert all(outcome.value is None for outcome in outcomes)
    assert_equal(opened_as_transformers_does(tmp_path), dict(weights_of({"old": 1, "new": 2}[left])))
    assert forked.run(1, export_over, tmp_path, second, first)[0].value == "saved"
    assert_equal(tensors_in(tmp_path), dict(weights_of(2)))
    assert len(names_in(tmp_path)) == (1 if first == "5GB" else 3)


def export_with_a_fault(folder):
    live = build("fsdp")
    save(live.models[0], folder)
    before = names_in(folder)
    forked.arm("export-write:1:raise=ENOSPC")
    with pytest.raises(CheckpointSaveError) as raised:
        save(live.models[0], folder, max_shard_size="1KB")
    return [str(raised.value), before]


@pytest.mark.slow
def test_a_failure_of_one_rank_is_told_by_all(tmp_path):
    outcomes = forked.run(2, export_with_a_fault, tmp_path)
    assert outcomes[0].error is None, outcomes[0].error
    where = f"save_model: {tmp_path}: rank 1 (host {socket.gethostname()})"
    text = f"{where}: No space left on device: (fault injected at export-write). "
    for outcome in outcomes:
        assert outcome.value == [text + "The previous contents of the folder are unchanged.", names_in(tmp_path)]


def export_different(folder):
    """Models of other shapes, and of other names."""
    rank, told = torch.distributed.get_rank(), []
    for model in (nn.Linear(2 + rank, 2), nn.Sequential(nn.Linear(2, 2)) if rank else nn.Linear(2, 2)):
        with pytest.raises(CheckpointSaveError) as raised:
            save(model, folder)
        told.append(str(raised.value))
    return told


def test_ranks_with_different_models_are_refused(ranks, tmp_path):
    text = f"save_model: {tmp_path}: the models differ between ranks; call it on all ranks with the same model."
    assert ranks.run(2, export_different, tmp_path) == [[text] * 2] * 2


def test_refusals_in_words(tmp_path):
    with pytest.raises(UsageError, match=r"max_shard_size: not a size \(got 'big'\); write it with its unit: 5GB,"):
        save(nn.Linear(2, 2), tmp_path, max_shard_size="big")
    with pytest.raises(UsageError, match="max_shard_size: not a size"):
        save(nn.Linear(2, 2), tmp_path, max_shard_size="9" * 400 + "GB")
    with pytest.raises(UsageError, match=r"max_shard_size: not a size \(got '2'\); write it with its unit: 5GB,"):
        save(nn.Linear(2, 2), tmp_path, max_shard_size="2")
    with pytest.raises(UsageError, match=r"save_model: unknown dtype \(got 'int8'\); use fp32, bf16"):
        save(nn.Linear(2, 2), tmp_path, dtype="int8")
    with pytest.raises(CheckpointSaveError, match=r"weight: has no values yet \(meta device\); prepare\(\) the model"):
        save(nn.Linear(2, 2, device="meta"), tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointSaveError, match="is a file; give a folder"):
        save(nn.Linear(2, 2), tmp_path / "file")
    (tmp_path / "MANIFEST.json").touch()
    with pytest.raises(CheckpointSaveError, match="is a checkpoint"):
        save(nn.Linear(2, 2), tmp_path)
    assert names_in(tmp_path) == ["MANIFEST.json", "file"]
    (tmp_path / "MANIFEST.json").write_text('{"name": "a web page"}')
    save(nn.Linear(2, 2), tmp_path)
    assert names_in(tmp_path) == ["MANIFEST.json", "file", "model.safetensors"]


@pytest.mark.parametrize("size", ["5GB", "100B"])
def test_nothing_is_exported_into_a_part_of_a_checkpoint(tmp_path, size):
    final = tmp_path / "step-00000001"
    checkpoints.save(build("single"), final, 1)
    before = {path: path.stat().st_mtime_ns for path in final.rglob("*")}
    for below in ("model", "new/deeper", "state/../model"):
        with pytest.raises(CheckpointSaveError, match=rf"is inside the checkpoint {final}"):
            save(nn.Linear(8, 8), final / below, max_shard_size=size)
    assert {path: path.stat().st_mtime_ns for path in final.rglob("*")} == before
    (tmp_path / "MANIFEST.json").write_text("of another program")
    save(nn.Linear(8, 8), tmp_path / "export")


def test_a_failed_export_leaves_no_new_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(export.disk, "free_bytes", lambda path: 0)
    (tmp_path / "empty").mkdir()
    for name in ("new/deeper", "empty"):
        with pytest.raises(CheckpointSaveError, match="No space left on device"):
            save(nn.Linear(2, 2), tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_of_two_exports_at_once_no_index_names_files_of_both(tmp_path, monkeypatch):
    """Both begin in an empty folder; the second is killed between its renames."""
    plans = [export.plan(dict.fromkeys(names, ("F32", (2,))), {}, 8) for names in ("ab", "cd")]
    one, two = (export.begin(tmp_path, files) for files in plans)
    export.publish(one)
    replace = os.replace

    def killed(source, target):
        replace(source, target)
        if Path(target).parent == tmp_path:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            export.publish(two)

    def tensors_of():
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        return {name for name, file in index.items() if name in load_file(tmp_path / file)}

    assert tensors_of() == {"a", "b"}
    export.discard(two)
    again = export.begin(tmp_path, export.tagged(plans[1], "-0000aaaa"))
    export.publish(again)
    assert tensors_of() == {"c", "d"} and len(export.names_in(tmp_path)) == 3


def test_other_files_and_folders_stay(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / ".tmp-export-0123").mkdir()
    for size in ("100B", "100B", "5GB", 100):
        save(nn.Linear(8, 8), tmp_path, max_shard_size=size)
    assert names_in(tmp_path) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["checkpoints"]


def test_narrow_floats_are_widened_and_the_rest_is_kept(tmp_path):
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    model.register_buffer("count", torch.tensor(3))
    model.register_buffer("exact", torch.ones(1, dtype=torch.float64))
    save(model, tmp_path)
    kinds = {name: tensor.dtype for name, tensor in tensors_in(tmp_path).items()}
    assert kinds["weight"] == kinds["bias"] == torch.float32
    assert kinds["count"] == torch.int64
    assert kinds["exact"] == torch.float64


def test_blocks_of_a_sharded_dim_1_and_of_large_tensors(tmp_path, monkeypatch):
    from shardkit.checkpoint.files import disk

    monkeypatch.setattr(disk, "BLOCK_BYTES", 64)
    model = nn.Linear(37, 11)
    save(model, tmp_path)
    assert_equal(tensors_in(tmp_path), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("2 GiB", 2**31), ("2Gi", 2**31), ("1.5kb", 1500), (7, 7), ("9B", 9)]
)
def test_sizes(text, size):
    assert export.size_in_bytes(text) == size
