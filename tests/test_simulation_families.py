"""Models that are more than a stack of blocks, simulated: unused branches, adapters, encoder-decoders."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.config.schema import Config, FsdpConfig
from shardkit.model.describe import ModelDescription
from shardkit.model.facts import transformer_facts
from shardkit.model.families import activation_gaps
from shardkit.model.live import tree_of
from shardkit.model.sources import describe
from shardkit.plan import activations, worker
from shardkit.plan.answer import PlanRequest, row
from shardkit.plan.devices import DEVICES
from shardkit.plan.notes import frozen_above
from shardkit.plan.rank_memory import Memory
from shardkit.plan.simulation import _simulation, simulate

MIB = 2**20
HERE = __name__


def stack(layers: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)) for _ in range(layers))


class Branching(nn.Module):
    """32 MiB of parameters that are used, and as many that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.unused = stack(4), stack(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rows() -> torch.Tensor:
    return torch.zeros(2, 1024)


class MyAdamW(torch.optim.AdamW):
    """A class of the user's own: it steps on sharded tensors as it is."""


def my_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return MyAdamW(parameters, foreach=True)


def small_llama() -> Any:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=200, max_position_embeddings=64)
    return transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32)


def with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(small_llama(), LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]))


def small_t5() -> Any:
    import transformers

    config = transformers.T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=6, num_heads=4, vocab_size=200)
    return transformers.T5ForConditionalGeneration._from_config(config, dtype=torch.float32)


def simulated(spec: str, is_exact: bool = True, **known: Any) -> worker.Step:
    """A step of a model of this file on 8 ranks, as the child process does it."""
    given = {"optimizer": "adamw", "batch": None, "precision": "no", "seq_len": 32} | known
    job = worker.Job(
        "factory",
        f"{HERE}:{spec}",
        [],
        8,
        8,
        given["optimizer"],
        given["batch"],
        2,
        given["seq_len"],
        is_exact,
    )
    config = Config(num_processes=8, mixed_precision=given["precision"], fsdp=FsdpConfig(**known.get("fsdp", {})))
    return worker.simulated(job, config)[0]


def at_optimizer(step: worker.Step) -> Memory:
    return next(moment.memory for moment in step.moments if moment.phase == "optimizer")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", f"{HERE}:my_optimizer"])
def test_what_gets_no_gradient_has_no_optimizer_state(optimizer):
    """Two moments of a shard each for the 32 MiB that are used; the update's temporaries are no larger than the shard.
    Shapes that DTensor works out are never memory."""
    step = simulated("Branching", batch=f"{HERE}:rows", optimizer=optimizer)
    used = 8 * (1024 * 1024 + 1024) * 4 // 8
    state = at_optimizer(step).optimizer_state
    assert 2 * used <= state <= 3.1 * used
    assert at_optimizer(step).gradients == used
    assert step.unused == tuple(
        f"unused.{i}.{j}.{name}" for i in range(4) for j in (0, 2) for name in ("weight", "bias")
    )
    (remark,) = worker._to_json(step, None)["remarks"]
    assert remark.startswith("No gradient in the simulated step, and so no optimizer state: unused.0.0 and others.")


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks Transformers by its old name
def test_adapters_have_the_only_gradients_and_state(recomputes):
    step = simulated("with_adapters", precision="bf16", fsdp={"activation_checkpointing": recomputes})
    model = with_adapters()
    numel = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    memory = at_optimizer(step)
    assert memory.parameters == pytest.approx(4 * numel / 8, rel=0.02)
    assert memory.gradients == pytest.approx(4 * trained / 8, rel=0.02)
    assert memory.optimizer_state < 2.1 * memory.gradients
    assert step.unused == ()


@pytest.mark.slow
def test_an_encoder_decoder_recomputes():
    whole, less = (simulated("small_t5", fsdp={"activation_checkpointing": on}) for on in (False, True))
    peaks = [max(moment.memory.activations for moment in step.moments) for step in (whole, less)]
    assert peaks[1] < peaks[0] / 2


def of_family(name: str) -> Any:
    """A small model of a Transformers family, as its class makes it."""
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
    whisper = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "max_source_positions": 32}
    whisper |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    opt = {"hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "dropout": 0.0, "num_attention_heads": 4}
    made = {
        "llama": ("Llama", "ForCausalLM", {**sizes, "num_key_value_heads": 2, "vocab_size": 200}),
        "qwen3": ("Qwen3", "ForCausalLM", {**sizes, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 200}),
        "opt": ("OPT", "ForCausalLM", opt),
        "vit": ("ViT", "ForImageClassification", {**sizes, "image_size": 32}),
        "wav2vec2": ("Wav2Vec2", "ForCTC", sizes),
        "whisper": ("Whisper", "ForConditionalGeneration", {**whisper, "vocab_size": 52000}),
        "clip": ("CLIP", "Model", {"text_config": {**sizes, "vocab_size": 200}, "vision_config": sizes}),
        "bert": ("Bert", "ForSequenceClassification", {**sizes, "vocab_size": 200}),
    }
    family, task, given = made[name]
    config = getattr(transformers, f"{family}Config")(**given)
    return getattr(transformers, f"{family}{task}")._from_config(config, dtype=torch.float32)


FAMILIES = ("llama", "qwen3", "opt", "vit", "wav2vec2", "whisper", "clip")
for _family in FAMILIES:
    globals()[_family] = partial(of_family, _family)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "vit", *(pytest.param(f, marks=pytest.mark.loops) for f in ("qwen3", "opt"))]
)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_closed_form_counts_what_a_block_keeps(family, precision):
    """Per block and token within 1 %: what lies between two blocks of a forward."""
    model = of_family(family)
    facts = transformer_facts(model.config, model)
    seq_len = None if family == "vit" else 32
    step = simulated(family, precision=precision, seq_len=seq_len)
    blocks = [moment.memory.activations for moment in step.moments if moment.phase == "forward" and "." in moment.unit]
    itemsize = 4 if precision == "no" else 2
    expected = activations.of_transformer(facts, 2, seq_len or facts.seq_len, itemsize)
    assert facts.gaps == ()
    assert (blocks[4] - blocks[2]) / 2 == pytest.approx(expected.block_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["whisper", *(pytest.param(f, marks=pytest.mark.loops) for f in ("wav2vec2", "clip"))]
)
def test_families_whose_input_is_no_text_have_a_batch(family):
    step = simulated(family, seq_len=4000 if family == "wav2vec2" else 32)
    assert max(moment.memory.activations for moment in step.moments) > 0
    assert step.unused == (("wav2vec2.masked_spec_embed",) if family == "wav2vec2" else ())


@pytest.mark.slow
def test_the_simulated_sequence_is_the_one_that_is_reported(tmp_path):
    """RoBERTa's table has two rows of positions that no token uses."""
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    transformers.RobertaConfig(vocab_size=100, max_position_embeddings=34, **sizes).save_pretrained(tmp_path)
    asked = PlanRequest(describe(str(tmp_path)), Config(num_processes=2), 2, 2, DEVICES["cpu"], batch_size=1)
    assert asked.sequence_tokens == 32
    (by_default,) = simulate(asked)
    job = worker.Job("transformers", str(tmp_path), [], 2, 2, "adamw", None, batch_size=1, seq_len=32, is_exact=False)
    given = _simulation(asked, asked.config, worker._to_json(*worker.simulated(job, asked.config)))
    assert by_default.memory.peak == given.memory.peak


def test_a_family_that_the_closed_form_does_not_know_is_a_lower_bound():
    import transformers

    gaps = activation_gaps(transformers.T5Config(dropout_rate=0.1))
    assert gaps[0] == "what blocks of t5 save in addition to those of a plain Transformer"
    assert "dropout masks and scores (dropout_rate)" in gaps
    assert activation_gaps(transformers.LlamaConfig()) == ()
    assert activation_gaps(transformers.LlamaConfig(attention_dropout=0.1)) == (
        "dropout masks and scores (attention_dropout)",
    )


def test_a_classifier_makes_no_logits_over_its_vocabulary():
    model = of_family("bert")
    assert transformer_facts(model.config, model).vocabulary is None
    assert transformer_facts(small_llama().config, small_llama()).vocabulary == 200


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "bytes_each"), [("held", 16), ("dropped", 12), ("fused", 6)])
def test_the_loss_keeps_what_is_said(loss, bytes_each):
    """Logits of 4 x 512 tokens over a vocabulary that is larger than all else."""
    spec = "gpt:layers=2,hidden=16,heads=2,vocab=20000,seq=512"
    job = worker.Job("gpt", spec, [], 8, 8, "sgd", None, 4, None, True, loss)
    config = Config(num_processes=8, mixed_precision="bf16", fsdp=FsdpConfig(activation_checkpointing=True))
    peak = max(moment.memory.activations for moment in worker.simulated(job, config)[0].moments)
    logits = 4 * 512 * 20000
    assert peak <= 1.05 * bytes_each * logits
    if loss != "fused":
        assert peak >= 0.98 * bytes_each * logits


def half_frozen() -> nn.Module:
    model = small_llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    return model


@pytest.mark.slow
def test_frozen_blocks_below_the_first_trained_one_save_nothing():
    asked = PlanRequest(describe(f"{HERE}:half_frozen"), Config(num_processes=2), 2, 2, DEVICES["cpu"], batch_size=4)
    counted, (found,) = row(asked).memory, simulate(asked)
    simulated = max(moment.memory.activations for moment in found.memory.timeline)
    assert max(moment.memory.activations for moment in counted.timeline) == pytest.approx(simulated, rel=0.1)
    assert frozen_above(asked) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ()),
        ({"lora_dropout": 0.1}, ("dropout masks and what they are applied to (lora_dropout)",)),
        ({"use_dora": True}, ("weights with LoRA's added to them (use_dora)",)),
    ],
)
@pytest.mark.filterwarnings("ignore:::peft", "ignore:::transformers")
def test_what_adapters_save_is_a_lower_bound_where_it_is_not_less_than_training_all(given, expected):
    import peft

    model = peft.get_peft_model(small_llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], **given))
    facts = transformer_facts(model.config, model)
    assert facts.gaps == expected
    asked = PlanRequest(ModelDescription("", "", tree_of(model), facts), Config(), 2, 2, DEVICES["cpu"], batch_size=4)
    assert frozen_above(asked).startswith("Frozen layers that a gradient passes: activations are counted as if")
    assert frozen_above(replace(asked, batch_size=None)) is None


@pytest.mark.filterwarnings("ignore:::peft", "ignore:::transformers")
def test_adapters_other_than_lora_are_not_counted():
    import peft

    model = peft.get_peft_model(small_llama(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    assert transformer_facts(model.config, model).gaps == ("what peft's IA3 saves",)
