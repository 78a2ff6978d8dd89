"""`save_pretrained` of a sharded model writes what it writes of a model on one device, whichever library has it."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shardkit.compat
from shardkit import Accelerator
from shardkit.errors import CheckpointSaveError, UsageError
from tests.test_export import accelerated, assert_equal, llama, names_in, p_tuned, step, tensors_in, whole

# peft and Transformers warn each other about what they deprecate.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


class Encoder(nn.Module):
    """Saved as Transformers saves."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, tokens):
        return self.head(self.scale * self.embed(tokens))

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, save_function=save_file):
        found = self.state_dict() if state_dict is None else state_dict
        assert "embed.weight" in found  # peft looks for what it saves on every rank
        if is_main_process:
            Path(save_directory).mkdir(exist_ok=True)
            found = {name: tensor.contiguous() for name, tensor in found.items() if name != "head.weight"}
            save_function(found, Path(save_directory) / "model.safetensors")


class Pipeline(nn.Module):
    """A model around another, saved as diffusers and SentenceTransformers save: every rank would write."""

    def __init__(self):
        super().__init__()
        self.encoder, self.dense = Encoder(), nn.Linear(7, 3)

    def forward(self, tokens):
        return self.dense(self.encoder(tokens))

    def save_pretrained(self, folder):
        Path(folder).mkdir(exist_ok=True)
        self.encoder.save_pretrained(Path(folder) / "encoder")
        save_file(self.dense.state_dict(prefix="dense."), Path(folder) / "dense.safetensors")


def prepared(model, strategy=1, accelerator=Accelerator):
    fsdp = {"fsdp_sharding_strategy": strategy}
    accelerator = accelerator(config={"distributed_type": "FSDP", "use_cpu": True, "fsdp_config": fsdp})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def train_once(accelerator, model, optimizer):
    accelerator.backward(model(torch.arange(7)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def save_all_ways(strategy, folder):
    accelerator, model, _ = run = prepared(Pipeline(), strategy)
    ways = {
        "model": lambda to: model.save_pretrained(to),
        "part": lambda to: model.encoder.save_pretrained(to, is_main_process=accelerator.is_main_process),
        "gathered before": lambda to: model.encoder.save_pretrained(
            to, accelerator.is_main_process, accelerator.get_state_dict(model.encoder)
        ),
        "gathered, said to no rank": lambda to: model.encoder.save_pretrained(
            to, state_dict=accelerator.get_state_dict(model.encoder)
        ),
        "model again": lambda to: accelerator.unwrap_model(model).save_pretrained(to),
    }
    expected = {}
    for name, save in ways.items():
        train_once(*run)
        save(folder / name)
        assert name.startswith("gathered") or (folder / name).is_dir()  # on every rank when it goes on
        expected[name] = whole(model)
    assert "state_dict" not in vars(model.dense)
    return expected


@pytest.mark.parametrize(("world", "strategy"), [(2, 1), (3, 2), (1, 1)])
def test_the_whole_weights_are_written(ranks, tmp_path, alone, world, strategy):
    expected = ranks.run(world, save_all_ways, strategy, tmp_path)[0]
    for name in ("model", "model again"):
        found = load_file(tmp_path / name / "dense.safetensors")
        found |= {f"encoder.{key}": tensor for key, tensor in tensors_in(tmp_path / name / "encoder").items()}
        assert_equal(found, expected[name])
    for name in ("part", "gathered before", "gathered, said to no rank"):
        inner = {key: tensor for key, tensor in expected[name].items() if key.startswith("encoder.")}
        assert_equal(tensors_in(tmp_path / name), {key.removeprefix("encoder."): t for key, t in inner.items()})
    assert len(names_in(tmp_path)) == 7


def save_into_a_file(path):
    run = accelerator, model, _ = prepared(Encoder())
    with pytest.raises(CheckpointSaveError, match=r"save_pretrained: rank 0 .*File exists"):
        model.save_pretrained(path, is_main_process=accelerator.is_main_process)
    train_once(*run)
    model.save_pretrained(path.with_name("folder"))
    return whole(model)


def test_what_rank_0_cannot_write_is_an_error_of_all_and_the_run_goes_on(ranks, tmp_path):
    (tmp_path / "file").touch()
    expected = ranks.run(2, save_into_a_file, tmp_path / "file")[0]
    assert_equal(tensors_in(tmp_path / "folder"), expected)


class Shown(Encoder):
    """Saved as SentenceTransformers saves: with an example for the model card, where that can be computed."""

    def save_pretrained(self, save_directory, **kwargs):
        super().save_pretrained(save_directory, **kwargs)
        with torch.no_grad():
            example = self(torch.arange(2))
        save_file({"example": example}, Path(save_directory) / "example.safetensors")


def save_with_an_example(folder):
    run = accelerator, model, _ = prepared(Shown())
    train_once(*run)
    told = "runs a forward of the model while it writes"
    refused = pytest.raises(CheckpointSaveError, match=f"save_pretrained: .*{told}")
    with refused if accelerator.num_processes > 1 else nullcontext():
        model.save_pretrained(folder)
    with torch.no_grad():
        model(torch.arange(2))
    train_once(*run)


@pytest.mark.parametrize("world", [1, 2])
def test_a_forward_of_the_library_meanwhile_is_an_error_and_no_hang(ranks, tmp_path, world):
    ranks.run(world, save_with_an_example, tmp_path / "saved")
    assert names_in(tmp_path) == [f"saved/{name}.safetensors" for name in ["example", "model"][world - 1 :]]


def save_on_the_main_process(folder):
    accelerator, model, _ = prepared(Encoder(), accelerator=shardkit.compat.Accelerator)
    if accelerator.is_main_process:
        with pytest.raises(UsageError, match=r"save_pretrained: every rank must call it, but only some do .*py:\d+\)"):
            model.save_pretrained(folder)


def test_on_the_main_process_only_it_is_refused_at_once(ranks, tmp_path):
    ranks.run(2, save_on_the_main_process, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def with_lora():
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


MODELS = {"Transformers": llama, "peft": with_lora, "peft's encoder of prompts": p_tuned}


def save_as_scripts_end(name, folder):
    run = accelerator, model, _ = accelerated("LlamaDecoderLayer", MODELS[name]())
    step(*run)
    end = accelerator.unwrap_model(model)
    end.save_pretrained(folder / "all", is_main_process=accelerator.is_main_process, save_function=accelerator.save)
    accelerator.save_model(model, folder / "ours")
    return whole(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_libraries_open_it(ranks, tmp_path, name):
    import peft
    from transformers import AutoModelForCausalLM

    weights = ranks.run(2, save_as_scripts_end, name, tmp_path)[0]
    assert_equal(tensors_in(tmp_path / "all"), tensors_in(tmp_path / "ours"))
    if name == "Transformers":
        assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "all").state_dict(), weights)
    elif name == "peft":
        assert_equal(peft.PeftModel.from_pretrained(llama(), tmp_path / "all").state_dict(), weights)
    else:  # the encoder's outputs, see test_export
        assert peft.PeftModel.from_pretrained(llama(), tmp_path / "all").peft_type is peft.PeftType.P_TUNING
