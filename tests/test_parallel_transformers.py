"""Models from Transformers and PEFT: wrapped by class, tied, loaded by slices; each trains as in one process."""

import copy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardkit import init_empty_weights
from shardkit.checkpoint.exporting import save_model
from shardkit.config.schema import Config
from shardkit.distributed import control, process
from shardkit.optim import rebind, stepping
from shardkit.sharding import weight_files
from shardkit.sharding.mesh import build_mesh
from shardkit.sharding.parallelize import parallelize
from shardkit.sharding.units import units_of
from tests.engine import whole

pytestmark = pytest.mark.slow  # every rank imports Transformers

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WORDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def build(name: str) -> nn.Module:
    """A small random model. Only the ranks import Transformers."""
    import transformers as hf

    text = {"vocab_size": 31, **WORDS}
    if name == "GPT2Block":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(n_positions=32, n_embd=16, n_layer=2, n_head=2, **off, **text))
    if name == "BertLayer":
        return hf.BertForMaskedLM(hf.BertConfig(max_position_embeddings=32, **SMALL, **NO_DROPOUT, **text))
    if name == "T5Block":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        return hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **sizes, **text))
    if name == "LlamaDecoderLayer":
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=1, max_position_embeddings=32, **SMALL, **text))
    assert name == "ViTLayer"
    sizes = {"image_size": 16, "patch_size": 8, "num_labels": 3}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **SMALL, **NO_DROPOUT))


def batch(name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if name == "ViTLayer":
        images = torch.randn(4, 3, 16, 16, generator=generator)
        return {"pixel_values": images, "labels": torch.randint(0, 3, (4,), generator=generator)}
    words = torch.randint(3, 31, (4, 8), generator=generator)
    return {"input_ids": words, "labels": words.clone()}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def steps(name: str, model: nn.Module, optimizer: Any, ranks: int, step: Any = None) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        whole = batch(name, generator)
        mine = {key: value.chunk(ranks)[dist.get_rank() % ranks] for key, value in whole.items()}
        loss = model(**mine).loss
        loss.backward()
        (step or optimizer.step)()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


def train(name: str, strategy: int, folder: Path | None, **settings: Any) -> dict[str, Any]:
    """Losses on all ranks and in one process; the units; with a folder, the sharded model is loaded from there."""
    fsdp = {"fsdp_sharding_strategy": strategy, "fsdp_transformer_layer_cls_to_wrap": name, **settings}
    config = Config(num_processes=2, use_cpu=True, fsdp_config=fsdp)
    here = process.start(config)
    torch.manual_seed(0)
    reference = build(name)
    if folder is None:
        model = copy.deepcopy(reference)
    else:
        if here.rank == 0:
            reference.save_pretrained(folder)
        dist.barrier()
        with init_empty_weights():
            model = build(name)
    tied = [len(names) for names in _names(reference).values() if len(names) > 1]
    cut = [unit.fqn for unit in units_of(model, config.fsdp).units]
    optimizer = optimizer_of(model)
    names = rebind.ParameterNames.of(model)
    model = parallelize(model, config, build_mesh(config, here), here, folder)
    rebind.rebind(optimizer, names, model)
    stepper = stepping.stepper_of(optimizer)
    return {
        "found": steps(name, model, optimizer, 2, stepper.step),
        "expected": steps(name, reference, optimizer_of(reference), 1),
        "units": cut,
        "tied": tied == [len(names) for names in _names(model).values() if len(names) > 1],
        "names": [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()],
    }


def _names(model: nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(fqn)
    return found


CASES = [
    ("GPT2Block", 1, True, {}),
    ("BertLayer", 2, False, {}),
    ("T5Block", 4, True, {}),
    ("T5Block", 1, False, {"fsdp_activation_checkpointing": True}),
    ("T5Block", 1, False, {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 300}),
    ("LlamaDecoderLayer", 1, False, {"fsdp_activation_checkpointing": True}),
    ("LlamaDecoderLayer", 5, True, {}),
    ("ViTLayer", 1, True, {}),
]


@pytest.mark.requirement("B3")
@pytest.mark.parametrize(("name", "strategy", "from_file", "settings"), CASES)
def test_a_transformers_model_trains_as_in_one_process(ranks, tmp_path, name, strategy, from_file, settings):
    folder = tmp_path if from_file else None
    for result in ranks.run(2, train_with, name, strategy, folder, settings):
        assert result["found"] == pytest.approx(result["expected"], abs=2e-5)
        assert result["tied"] and result["names"]
        blocks = 4 if name == "T5Block" else 2
        assert len(result["units"]) == blocks + 1 or "fsdp_auto_wrap_policy" in settings


def train_with(name: str, strategy: int, folder: Path | None, settings: dict[str, Any]) -> dict[str, Any]:
    return train(name, strategy, folder, **settings)


def lora() -> dict[str, Any]:
    import peft

    config = Config(
        num_processes=2, use_cpu=True, fsdp_config={"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    )
    here = process.start(config)
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("LlamaDecoderLayer"), settings)
    reference = copy.deepcopy(model)
    before = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    optimizer = optimizer_of(model)
    names = rebind.ParameterNames.of(model)
    model = parallelize(model, config, build_mesh(config, here), here)
    rebind.rebind(optimizer, names, model)
    stepper = stepping.stepper_of(optimizer)
    found = steps("LlamaDecoderLayer", model, optimizer, 2, stepper.step)
    expected = steps("LlamaDecoderLayer", reference, optimizer_of(reference), 1)
    after = {fqn: p.full_tensor() for fqn, p in model.named_parameters() if isinstance(p, DTensor)}
    moved = {fqn for fqn in before if not torch.equal(before[fqn], after[fqn])}
    return {"found": found, "expected": expected, "moved": all("lora_" in fqn for fqn in moved) and len(moved) == 8}


@pytest.mark.requirement("N4")
def test_low_rank_adapters_train_and_the_rest_does_not(ranks):
    for result in ranks.run(2, lora):
        assert result["found"] == pytest.approx(result["expected"], abs=2e-5)
        assert result["moved"]


# Ways into a model besides its forward


def other_ways_in(strategy: int, with_adapters: bool) -> dict[str, bool]:
    """Whether each way into a sharded model gives what the plain model gives."""
    import peft

    config = Config(
        num_processes=2,
        use_cpu=True,
        fsdp_config={"fsdp_sharding_strategy": strategy, "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
    )
    here = process.start(config)
    torch.manual_seed(0)
    plain: Any = build("LlamaDecoderLayer")
    if with_adapters:
        settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        plain = peft.get_peft_model(plain, settings)
    plain.eval()
    sharded: Any = parallelize(copy.deepcopy(plain), config, build_mesh(config, here), here)
    tokens = torch.randint(0, 31, (2, 5), generator=torch.Generator().manual_seed(3))
    embedded = [one.get_input_embeddings()(tokens) for one in (sharded, plain)]
    logits = [one(inputs_embeds=x).logits for one, x in zip((sharded, plain), embedded, strict=True)]
    made = [one.generate(input_ids=tokens, max_new_tokens=4, do_sample=False) for one in (sharded, plain)]
    inner = [(one.get_base_model() if with_adapters else one).model for one in (sharded, plain)]
    hidden = [one(input_ids=tokens).last_hidden_state for one in inner]
    for value in (hidden[0].pow(2).mean(), hidden[1].pow(2).mean()):
        value.backward()
    gradients = [
        {name: whole(p.grad) for name, p in one.named_parameters() if p.grad is not None} for one in (sharded, plain)
    ]
    return {
        "embeddings": torch.allclose(*embedded, atol=1e-5),
        "forward": torch.allclose(*logits, atol=1e-4),
        "generate": torch.equal(*made),
        "inner model": torch.allclose(*hidden, atol=1e-4),
        "its gradients": gradients[0].keys() == gradients[1].keys()
        and all(torch.allclose(gradients[0][name], gradients[1][name], atol=1e-5) for name in gradients[1]),
    }


@pytest.mark.parametrize("with_adapters", [False, True])
@pytest.mark.parametrize("strategy", [1, 2])
def test_a_model_may_be_entered_in_other_ways_than_by_its_forward(ranks, strategy, with_adapters):
    for found in ranks.run(2, other_ways_in, strategy, with_adapters):
        assert all(found.values()), found


def loaded_with_experts(folder: Path) -> tuple[str, list[bool]]:
    """The refusal of weights as Transformers stores them, and whether those of an export are loaded."""
    import transformers as hf

    experts = {"num_local_experts": 3, "num_key_value_heads": 1}
    torch.manual_seed(0)
    model = hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=31, **experts, **SMALL, **WORDS))
    model.save_pretrained(folder / "theirs")
    save_model.save(model, folder / "ours", control.start())
    found = hf.MixtralForCausalLM(model.config)
    _, problems = weight_files.load(found, folder / "theirs")
    _, none = weight_files.load(found, folder / "ours")
    equal = [torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items()]
    return " ".join(problems), [not none, all(equal)]


def test_weights_that_transformers_joins_are_refused(ranks, tmp_path):
    (answer,) = ranks.run(1, loaded_with_experts, tmp_path)
    assert answer[1] == [True, True]
    if version("transformers") >= "5":
        assert answer[0].startswith(f"{tmp_path}/theirs: Transformers makes model.layers.0.mlp.experts.down_proj, ")
        assert "experts.0.w2.weight); build the model by from_pretrained(), on rank 0 at least," in answer[0]
