"""Plans of LoRA and QLoRA by --lora and --load-in-4bit: the tree is that of peft, what blocks save that of a simulated
step, and weights in 4 bits have bitsandbytes' bytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardkit.cli.main import run
from shardkit.config.schema import Config
from shardkit.errors import UsageError
from shardkit.model import gpt, gpt_module
from shardkit.model.adapters import Adapters, adapted, chosen, scale_bytes
from shardkit.model.describe import (
    PARAMETERS_IN_FP32,
    QUANTIZATION_NOT_APPLIED,
    ModelDescription,
    from_json,
    to_json,
)
from shardkit.model.facts import transformer_facts
from shardkit.model.live import tree_of
from shardkit.model.sources import describe
from shardkit.plan import worker
from shardkit.plan.activations import Loss, of_transformer
from shardkit.plan.answer import PlanRequest, row
from shardkit.plan.answering import SimulationOptions, answer
from shardkit.plan.closed_form import estimate, known_activations
from shardkit.plan.devices import DEVICES, find
from shardkit.plan.notes import frozen_above
from shardkit.plan.rank_memory import RankMemory
from shardkit.plan.simulation import simulate
from shardkit.plan.suggest import changes

SHAPE = gpt.GptShape(layers=3, hidden=64, heads=4, vocab=100, seq=32)
SPEC = "gpt:layers=3,hidden=64,heads=4,vocab=100,seq=32"
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
}


def config_file(family: str, folder: Path, **sizes: Any) -> Path:
    known = {"model_type": family, "vocab_size": 200, "num_attention_heads": 4, "max_position_embeddings": 64}
    file = folder / "config.json"
    file.write_text(json.dumps(known | SIZES.get(family, {}) | sizes))
    return file


def built(family: str, folder: Path) -> nn.Module:
    if family == "gpt":
        return gpt_module.GPT(SHAPE)
    from shardkit.model.probe import build_transformers

    return build_transformers(str(config_file(family, folder)))


def parameters_of(tree: Any) -> dict[str, tuple[Any, ...]]:
    return {name: (p.shape, p.dtype, p.trainable) for name, p in tree.owned()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt", ()),
        ("gpt", ("blocks.1.feed_forward.up", "out")),
        ("llama", ()),
        ("llama", ("q_proj", "down_proj")),
        ("gpt2", ()),
        ("gpt2", ("c_attn",)),
    ],
)
@pytest.mark.filterwarnings("ignore:::peft")
def test_the_tree_is_that_of_the_model_that_peft_makes(family, targets, tmp_path):
    with torch.device("meta"):
        model = built(family, tmp_path)
    description = ModelDescription("", "", tree_of(model))
    adapters = Adapters(4, targets, compute="bf16")
    layers = chosen(description.tree, adapters)
    with torch.device("meta"):
        live = worker._adapted(model, adapters)
    assert parameters_of(adapted(description, adapters).tree) == parameters_of(tree_of(live))
    assert len(layers) == sum("lora_A" in name for name, _ in live.named_parameters())


def test_layers_outside_of_blocks_have_no_adapters_unless_they_are_named():
    tree = describe(SPEC).tree
    assert {name.rpartition(".")[2] for name in chosen(tree, Adapters(8))} == {"qkv", "out", "up", "down"}
    assert chosen(tree, Adapters(8, ("head",))) == ["head"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_that_is_tied_to_a_table_stays_tied(is_tied):
    tree = describe(f"{SPEC},tied={is_tied}").tree
    changed = adapted(ModelDescription("", "", tree), Adapters(8, ("head",))).tree
    assert changed.weights == tree.weights + 8 * (100 + 64)
    (layer,) = [node for node in changed.walk() if node.fqn == "head.base_layer"]
    assert layer.parameters[0].tied_to == ("tokens.weight" if is_tied else None)


def test_weights_in_4_bits_have_half_a_byte_and_scales_that_every_rank_holds():
    """NF4 with double quantization: one byte for 64 weights, and 4 for 256 of these bytes."""
    whole = describe(SPEC)
    description = adapted(whole, Adapters(8, are_packed=True, compute="bf16"))
    assert from_json(to_json(description)) == description
    matrices, columns = 3 * 12 * 64 * 64, 3 * 8 * (64 + 192 + 64 + 64 + 64 + 256 + 256 + 64)
    assert description.numel == whole.numel + columns
    others = whole.numel - matrices
    scales = sum(n // 64 + 4 * -(-n // 64 // 256) for n in (3 * 64 * 64, 64 * 64, 4 * 64 * 64, 4 * 64 * 64)) * 3
    for ranks in (1, 2):
        config = Config(mixed_precision="bf16", num_processes=ranks)
        found = estimate(description.tree, config, world_size=ranks).memory.peak
        assert found.parameters == (matrices // 2 + 2 * others + 4 * columns) // ranks + scales
        assert found.optimizer_state == 8 * columns // ranks


def test_scales_without_double_quantization_take_4_bytes_each():
    assert scale_bytes(64 * 256, is_double=False) == 1024
    assert scale_bytes(64 * 256 + 1) == 257 + 8


class NotYetPacked(nn.Parameter):
    """Looks like bitsandbytes' parameter before it is moved to a device."""

    bnb_quantized, quant_storage, blocksize, compress_statistics = False, torch.bfloat16, 64, False


def test_a_model_of_bitsandbytes_has_its_scales():
    layer = nn.Linear(256, 64, bias=False, device="meta")
    layer.weight = NotYetPacked(layer.weight, requires_grad=False)
    ((_, found),) = tree_of(layer).owned()
    assert (found.packed, found.scale_bytes) == (256 * 64, 1024)


def test_a_product_unpacks_one_weight_at_a_time():
    """In every moment of forward and backward at least the largest matrix of a block is there in 16 bits."""
    config = Config(mixed_precision="bf16", num_processes=2)
    peaks = [
        estimate(adapted(describe(SPEC), adapters).tree, config, world_size=2).memory.timeline
        for adapters in (Adapters(8, compute="bf16"), Adapters(8, are_packed=True, compute="bf16"))
    ]
    moment = "backward", "blocks.1"
    plain, packed = (next(m.memory.gathered for m in line if (m.phase, m.unit) == moment) for line in peaks)
    of_block, largest = 12 * 64 * 64, 4 * 64 * 64
    assert plain - packed == 2 * (2 * of_block - of_block // 2) - 2 * largest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("llama", "bf16"),
        ("gpt", "no"),
        *(
            pytest.param(family, precision, marks=pytest.mark.loops)
            for family, precision in (("llama", "no"), ("gpt", "bf16"), ("qwen3", "no"), ("qwen3", "bf16"))
        ),
    ],
)
def test_what_blocks_with_adapters_save_is_that_of_a_simulated_step(family, precision, tmp_path):
    file = config_file(family, tmp_path, num_hidden_layers=6) if family != "gpt" else None
    spec = str(file or "gpt:layers=6,hidden=64,heads=4,vocab=100,seq=32")
    adapters = Adapters(8, compute="bf16" if precision == "bf16" else "fp32")
    request = PlanRequest(
        adapted(describe(spec), adapters),
        Config(num_processes=2, mixed_precision=precision),
        2,
        2,
        DEVICES["h100-80"],
        batch_size=2,
        seq_len=32,
        adapters=adapters,
    )
    assert frozen_above(request) is None
    closed, (found,) = row(request).memory, simulate(request)
    of_both = [of_a_block(memory) for memory in (closed, found.memory)]
    assert of_both[0] == pytest.approx(of_both[1], rel=0.01)
    for name in ("parameters", "gradients", "optimizer_state"):
        of_both = [max(getattr(m.memory, name) for m in memory.timeline) for memory in (closed, found.memory)]
        assert of_both[0] == pytest.approx(of_both[1], rel=0.01)  # counters of steps are not in the closed form


def of_a_block(memory: RankMemory) -> float:
    """What one block keeps: what lies between two of a forward."""
    alive = [
        moment.memory.activations for moment in memory.timeline if moment.phase == "forward" and "." in moment.unit
    ]
    return (alive[4] - alive[2]) / 2


@pytest.mark.slow
def test_adapters_that_peft_puts_beside_experts_are_simulated(tmp_path):
    """peft parametrizes the tensor of all experts in every forward: FSDP2's parameters are written, to themselves."""
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    file = config_file("deepseek_v3", tmp_path, **heads, **experts, **sizes, num_key_value_heads=4)
    adapters = Adapters(8, compute="bf16")
    request = PlanRequest(
        adapted(describe(str(file)), adapters),
        Config(num_processes=2, mixed_precision="bf16"),
        2,
        2,
        DEVICES["h100-80"],
        batch_size=2,
        seq_len=32,
        adapters=adapters,
    )
    (found,) = simulate(request)
    assert found.memory.peak.total > 0


@pytest.mark.slow
@pytest.mark.loops
def test_a_shortened_simulation_is_the_exact_one(tmp_path):
    adapters = Adapters(8, compute="bf16")
    request = PlanRequest(
        adapted(describe("gpt:layers=44,hidden=64,heads=4,vocab=100,seq=32"), adapters),
        Config(num_processes=2, mixed_precision="bf16"),
        2,
        2,
        DEVICES["h100-80"],
        batch_size=2,
        adapters=adapters,
    )
    (short,), (exact,) = simulate(request), simulate(request, is_exact=True)
    assert short.memory.peak == exact.memory.peak
    assert not [note for note in short.notes if "Every layer was simulated" in note]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = run(["plan", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return " ".join(out.split())


def test_the_report_says_what_is_trained(capsys):
    told = plan(capsys, SPEC, "--world", "2", "--device", "l4", "--lora", "16", "--load-in-4bit", "--batch-size", "1")
    assert "bf16, LoRA of rank 16, frozen weights in 4 bits: 49,152 trained, adamw" in told
    assert "Frozen layers that a gradient passes" not in told
    assert "each product unpacks its weights from 4 bits" in told
    told = plan(capsys, SPEC, "--world", "2", "--lora", "16", "--lora-targets", "qkv, out", "--batch-size", "1")
    assert "LoRA of rank 16 (qkv, out): 18,432 trained, adamw" in told
    assert "Frozen layers that a gradient passes" in told


@pytest.mark.slow
def test_weights_that_are_not_packed_are_told_where_they_are_most(capsys, tmp_path):
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    file = str(config_file("mixtral", tmp_path, **SIZES["llama"], **experts, tie_word_embeddings=False))
    asked = ("--world", "2", "--device", "l4", "--lora", "8", "--load-in-4bit")
    told = plan(capsys, file, *asked)
    assert "of the weights have 4 bits: those of linear layers in blocks. Experts" in told
    beside_experts = "Experts in one tensor get no adapters in this plan."
    assert beside_experts in told
    assert beside_experts not in plan(capsys, file, *asked, "--lora-targets", "q_proj,v_proj")
    assert "of the weights have 4 bits" not in plan(capsys, "gpt:layers=4,hidden=512,heads=4,vocab=100", *asked)


def test_a_quantization_that_is_not_planned_is_said():
    plain = describe(SPEC)
    quantized = replace(plain, notes=(QUANTIZATION_NOT_APPLIED, PARAMETERS_IN_FP32))
    (note,) = adapted(quantized, Adapters(8)).notes
    assert "quantization_config is not applied: frozen weights are in the dtype" in note
    assert adapted(quantized, Adapters(8, are_packed=True)).notes == adapted(plain, Adapters(8)).notes == ()


def test_names_of_layers_are_read_as_people_write_them(capsys):
    given = (SPEC, "--world", "2", "--batch-size", "1", "--lora", "16")
    assert plan(capsys, *given, "--lora-targets", "all-linear") == plan(capsys, *given)
    assert "LoRA of rank 16 (qkv, out):" in plan(capsys, *given, "--lora-targets", "qkv,out,qkv")
    all_names = ",".join(f"blocks.{number}.attention.qkv" for number in range(2))
    assert run(["plan", *given, "--lora-targets", f"{all_names},qkv,out,up,down"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_programs_read_which_adapters_are_planned(capsys):
    given = (SPEC, "--world", "2", "--device", "l4", "--lora", "16", "--json")
    code = run(["plan", *given])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["model"]["adapters"] == {"rank": 16, "targets": [], "are_packed": False, "compute": "bf16"}


@pytest.mark.slow
def test_frozen_weights_have_the_dtype_in_which_they_compute(capsys, tmp_path):
    file = str(config_file("llama", tmp_path))
    told = plan(capsys, file, "--world", "2", "--device", "l4", "--lora", "8")
    assert "Parameters count as fp32" not in told
    assert "Frozen weights are in fp32" not in told


@pytest.mark.slow
def test_adapters_are_among_what_would_lower_the_peak_but_in_no_combination():
    asked = PlanRequest(
        describe("gpt:layers=32,hidden=4096,heads=32"),
        Config(num_processes=2, mixed_precision="bf16"),
        2,
        8,
        find("40GiB"),
        batch_size=4,
    )
    *alone, together = changes(asked)
    assert [change.fits for change in alone if change.text.startswith("--lora 16 (adapters are trained")] == [False]
    assert together.fits and " and " in together.text and "--lora" not in together.text
    with_adapters = asked.with_adapters(Adapters(8))
    found = [change for change in changes(with_adapters) if change.text.startswith(("--lora", "--load-in-4bit"))]
    assert [change.text for change in found] == ["--load-in-4bit (frozen weights in 4 bits)"]
    assert with_adapters.with_adapters(Adapters(8, are_packed=True)).description.tree.weights == (
        with_adapters.description.tree.weights
    )


def test_another_compute_dtype_is_that_of_frozen_weights_too():
    whole, half = Config(num_processes=2), Config(num_processes=2, mixed_precision="bf16")
    asked = PlanRequest(describe(SPEC), whole, 2, 8, find("40GiB"), batch_size=4)
    started_so = row(asked.with_config(half).with_adapters(Adapters(8))).memory.peak
    asked = asked.with_adapters(Adapters(8))
    assert row(asked.with_config(half)).memory.peak == started_so
    (change,) = [change for change in changes(asked) if change.text == "mixed_precision: bf16"]
    assert change.peak_bytes == started_so.total


@pytest.mark.slow
def test_the_fewest_devices_for_qlora_are_found(capsys):
    asked = ["llama-2-70b", "--device", "4090", "--lora", "8", "--batch-size", "1", "--seq-len", "512"]
    asked += ["--find", "min-gpus", "--world", "8", "--set", "fsdp_config.fsdp_activation_checkpointing=true", "--json"]
    found = []
    for packed in ([], ["--load-in-4bit"]):
        assert run(["plan", *asked, *packed]) == 0
        found.append(json.loads(capsys.readouterr().out)["finding"]["value"])
    assert found[0] > 2 * found[1] >= 4


def weights_file(folder: Path) -> str:
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(4, 4)}, folder / "model.safetensors")
    return str(folder / "model.safetensors")


def half_frozen() -> nn.Module:
    model = gpt_module.GPT(SHAPE)
    model.tokens.requires_grad_(False)
    return model


def without_blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--lora", "0"), "--lora: is not a whole number from 1 to 65,536 (got '0'); give one."),
        (("--lora-targets", "qkv"), "--lora-targets: only used with --lora (got 'qkv'); add --lora 16."),
        (("--lora", "8", "--lora-targets", ","), "--lora-targets: names no layer (got ','); write q_proj,v_proj."),
        (("--load-in-4bit",), "--load-in-4bit: weights in 4 bits are not trained (got no --lora); add --lora 16."),
        (("--lora", "8", "--lora-targets", "qvk"), "no linear layer has this name (got 'qvk'); did you mean qkv?"),
        (("--lora", "8", "--lora-targets", "gate"), "(got 'gate'); name some of qkv, out, up, down, head."),
        (
            ("--lora", "8", "--load-in-4bit", "--simulate", "--batch-size", "1"),
            "--load-in-4bit: bitsandbytes' kernels are not simulated (got both); leave --simulate out.",
        ),
        (("--lora", "8", "--load-in-4bit", "--device", "tpu-v5p"), "bitsandbytes does not run on TPUs"),
        (("--model", f"{__name__}:half_frozen", "--lora", "8"), "half_frozen has frozen parameters already"),
        (
            ("--model", f"{__name__}:without_blocks", "--lora", "8"),
            "--lora: no linear layer is in repeated blocks (got no --lora-targets); name some of 0, 2.",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(capsys, arguments, text):
    model = () if "--model" in arguments else (SPEC,)
    code = run(["plan", *model, "--world", "2", *arguments])
    assert code != 0
    assert text in capsys.readouterr().err


def test_weights_alone_do_not_tell_which_layers_are_linear(capsys, tmp_path):
    assert run(["plan", weights_file(tmp_path), "--world", "2", "--lora", "8"]) != 0
    assert "--lora: names of weights do not tell which layers are linear" in capsys.readouterr().err


def test_a_simulation_without_peft_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(UsageError, match=r"--lora: a simulation needs peft \(not installed\); pip install peft, or"):
        worker._adapted(gpt_module.GPT(SHAPE), Adapters(8))


@pytest.mark.slow
def test_a_simulation_is_of_the_model_with_adapters():
    adapters = Adapters(8)
    request = PlanRequest(
        adapted(describe(SPEC), adapters),
        Config(num_processes=2),
        2,
        2,
        DEVICES["cpu"],
        batch_size=1,
        adapters=adapters,
    )
    found = answer(request, None, SimulationOptions(every_strategy=False, is_exact=False))
    moments = 4 * 3 * 8 * (64 + 192 + 64 + 64 + 64 + 256 + 256 + 64)  # two of 4 bytes, on two ranks
    assert found.chosen_row.memory.peak.optimizer_state == pytest.approx(moments, rel=0.01)


def test_a_model_of_one_layer_trains_its_norms():
    facts = gpt.facts(gpt.GptShape(layers=1, hidden=64, heads=4))
    tree = gpt.tree(gpt.GptShape(layers=1, hidden=64, heads=4))
    counted = known_activations(tree, Config(), facts, 1, 32, Loss.HELD)
    assert counted == of_transformer(facts, 1, 32, 4)


@pytest.mark.slow
def test_facts_are_those_of_the_model(tmp_path):
    with torch.device("meta"):
        model = built("llama", tmp_path)
    facts = transformer_facts(model.config, model)
    assert adapted(ModelDescription("", "", tree_of(model), facts), Adapters(8)).facts == facts
