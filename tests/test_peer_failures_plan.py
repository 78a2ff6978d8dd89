"""What goes wrong with Accelerate's `estimate-memory` and with naming block classes from memory: the same here, right.

The numbers are those of the list of failures that the wizard and launcher tests follow too.
"""

import json
from pathlib import Path

import pytest

from shardkit.cli.main import run


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def save_llama(folder: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=96
    ).save_pretrained(folder)


@pytest.mark.slow
def test_18_a_local_folder_is_planned_offline_with_ranks_strategies_and_activations(capsys):
    save_llama(Path("model"))
    assert run(["plan", "--model", "model", "--world", "16", "--batch-size", "2", "--device", "a100-80", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["model"]["name"], data["world_size"]) == ("LlamaForCausalLM", 16)
    assert data["model"]["facts"]["layers"] == 3
    assert "fp32" in data["notes"][0]
    assert {found["units"] for found in data["strategies"]} == {4, 1}  # the blocks found by themselves; DDP has none
    assert len(data["strategies"]) == 5
    assert all(found["activations_known"] or found["strategy"] == "NO_SHARD" for found in data["strategies"])
    assert all(any(found["peak"].values()) for found in data["strategies"])


def test_18_a_model_that_is_not_there_is_said_so(capsys):
    assert run(["plan", "--model", "org/some-model", "--world", "2"]) == 2
    err = capsys.readouterr().err
    says = "no such folder; models are not downloaded: give the folder of its config.json."
    assert err == f"--model org/some-model: {says}\n"


@pytest.mark.slow
@pytest.mark.requirement("A3")
def test_21_the_block_class_is_found_in_the_model(capsys):
    save_llama(Path("model"))
    wrong = "fsdp_config.fsdp_transformer_layer_cls_to_wrap=LlamaDecoderLayr"
    assert run(["plan", "--model", "model", "--world", "2", "--set", wrong]) == 1
    err = capsys.readouterr().err
    assert "did you mean LlamaDecoderLayer?" in err
    assert "LlamaDecoderLayer (3 x 41,088 parameters)" in err
