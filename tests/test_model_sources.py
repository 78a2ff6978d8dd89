"""Where a model can come from, and what is known of it then."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shardkit.errors import ModelError
from shardkit.model import comment, gpt, open_models
from shardkit.model.describe import from_json, to_json
from shardkit.model.facts import transformer_facts
from shardkit.model.gpt_module import GPT
from shardkit.model.live import tree_of
from shardkit.model.probe import build_factory, build_transformers, describe_factory
from shardkit.model.sources import describe
from shardkit.model.tree import ModuleNode
from shardkit.wording import count_text

SMALL = "gpt:layers=2,hidden=16,heads=4,vocab=50,seq=8"


def shapes(tree: ModuleNode) -> list[tuple[str, tuple[int, ...], str | None]]:
    return [(f"{n.fqn}.{p.name}", p.shape, p.tied_to) for n in tree.walk() for p in n.parameters]


@pytest.mark.requirement("B5")
@pytest.mark.parametrize(
    ("name", "billions", "shape"),
    [("gpt-175b", 175, (96, 12288, 96)), ("gpt-1t", 1008, (128, 25600, 160))],
)
def test_the_notes_models_are_built_in(name, billions, shape):
    found = describe(name)
    assert found.numel / 1e9 == pytest.approx(billions, rel=2e-3)
    assert (found.facts.layers, found.facts.hidden, found.facts.heads) == shape
    assert found.suggested_classes == ["Block"]


def test_the_head_tied_gives_the_notes_1008_billion():
    assert round(describe("gpt:layers=128,hidden=25600,heads=160,tied=true").numel / 1e9) == 1008


PUBLISHED = {
    **{"gpt2": 124_439_808, "gpt2-xl": 1_557_611_200},
    **{"llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192},
    **{"llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496},
    **{"llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800},
    **{"llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3.3-70b": 70_553_706_496},
    **{"mistral-7b-v0.3": 7_248_023_552, "mixtral-8x7b": 46_702_792_704},
    **{"qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688},
    **{"qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352},
    **{"qwen2.5-72b": 72_706_203_648},
    **{"qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096},
    **{"qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264},
    **{"qwen3-30b-a3b": 30_532_122_624},
    **{"gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-2-27b": 27_227_128_320},
    **{"qwen3-235b-a22b": 235_093_634_560, "gemma-3-270m": 268_098_176, "gemma-3-1b": 999_885_952},
    **{"mistral-nemo-2407": 12_247_782_400, "ministral-8b-2410": 8_019_808_256},
    **{"mistral-small-24b-2501": 23_572_403_200, "phi-4": 14_659_507_200},
    **{"olmo-2-0425-1b": 1_484_916_736, "olmo-2-1124-7b": 7_298_617_344},
    **{"olmo-2-1124-13b": 13_716_198_400, "olmo-2-0325-32b": 32_234_279_936},
    **{"smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384},
    **{"smollm3-3b": 3_075_098_624, "tinyllama-1.1b-v1.0": 1_100_048_384},
    **{"phi-3-mini": 3_821_079_552, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672},
    **{"gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "codellama-7b": 6_738_546_688},
    **{"pythia-70m": 70_426_624, "pythia-160m": 162_322_944, "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632},
    **{"pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960, "pythia-6.9b": 6_857_302_016},
    **{"pythia-12b": 11_846_072_320, "mistral-7b": 7_241_732_096, "mistral-7b-v0.2": 7_241_732_096},
    **{"mixtral-8x22b": 140_620_634_112, "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896},
    **{"phi-3-medium": 13_960_238_080, "starcoder2-3b": 3_030_371_328, "starcoder2-7b": 7_173_923_840},
    "starcoder2-15b": 15_957_889_024,
    # Without the routers' biases (buffers), and the layer that predicts further tokens.
    **{"deepseek-v3": 671_026_404_352, "deepseek-r1": 671_026_404_352, "kimi-k2": 1_026_408_209_408},
}
"""Parameters of the published weights."""


@pytest.mark.slow
@pytest.mark.requirement("B5")
@pytest.mark.parametrize("name", PUBLISHED)
def test_an_open_model_has_the_parameters_of_its_published_weights(name):
    with torch.device("meta"):
        model = build_transformers(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


def test_every_open_model_is_compared_and_in_the_documentation():
    assert PUBLISHED.keys() == open_models.SIZES.keys()
    page = (Path(__file__).parent.parent / "docs/how-to/plan.md").read_text()
    assert [name for name in PUBLISHED if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-0.6B-Base", "qwen3-0.6b"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("google/gemma-3-1b-pt", "gemma-3-1b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b-v1.0"),
        ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-2407"),
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo-2-1124-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B-Thinking-2507", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("EleutherAI/pythia-1.4b-deduped", "pythia-1.4b"),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", None),
        ("codellama/CodeLlama-7b-Python-hf", None),
        ("models/meta-llama/Llama-3.1-8B", None),
        ("meta-llama/Llama-3.1-8B/", None),
    ],
)
def test_names_on_a_hub_mean_the_models_sizes(spec, name):
    assert open_models.name_of(spec) == name


def test_a_file_of_the_same_name_is_no_open_model(tmp_path):
    (tmp_path / "gpt2").write_text("notes")
    with pytest.raises(ModelError, match="gpt2: not a file that describes a model"):
        describe("gpt2", folder=tmp_path)


@pytest.mark.slow
def test_a_folder_of_the_same_name_is_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = describe("qwen3-0.6b")
    assert found.facts.layers == 28
    assert "The sizes are those of qwen3-0.6b, as published; nothing was downloaded." in found.notes
    (tmp_path / "qwen3-0.6b").mkdir()
    (tmp_path / "qwen3-0.6b" / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2})
    )
    found = describe("qwen3-0.6b")
    assert found.facts.layers == 2 and "published" not in "".join(found.notes)


@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_is_the_torch_model(tied):
    shape = gpt.GptShape(layers=2, hidden=16, heads=4, vocab=50, seq=8, tied=tied)
    with torch.device("meta"):
        model = GPT(shape)
    built, formula = tree_of(model), gpt.tree(shape)
    assert shapes(built) == shapes(formula)
    assert [n.class_name for n in built.walk() if n.parameters] == [
        n.class_name for n in formula.walk() if n.parameters
    ]
    assert formula.numel == sum(p.numel() for p in model.parameters())


def test_the_torch_model_computes():
    model = GPT(gpt.parse("layers=2,hidden=16,heads=4,vocab=50,seq=8"))
    assert model(torch.zeros(3, 8, dtype=torch.long)).shape == (3, 8, 50)


def test_a_wrong_formula_names_everything_that_is_wrong():
    with pytest.raises(ModelError) as caught:
        describe("gpt:layers=x,hiden=3,heads=5,heads=6")
    text = str(caught.value)
    assert "layers: not a whole number from 1 to 10,000 (got 'x')" in text
    assert "hiden: unknown" in text
    assert "heads: given twice (got '6' too)" in text
    assert "hidden: missing" in text
    assert "write gpt:layers=" in text


def test_hidden_is_a_multiple_of_heads():
    with pytest.raises(ModelError, match=r"hidden: not a multiple of heads \(got 10 and 4\)"):
        describe("gpt:layers=1,hidden=10,heads=4")


def test_a_description_survives_json():
    found = describe(SMALL)
    assert from_json(json.loads(json.dumps(to_json(found)))) == found
    marks = {"alias_of": "first", "has_statistics": True, "is_lookup": True, "is_kept_whole": True}
    marked = replace(found, tree=replace(found.tree, children=(ModuleNode("again", "Linear", **marks),)))
    assert from_json(json.loads(json.dumps(to_json(marked)))) == marked


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("gpt-175", "did you mean gpt-175b?"),
        ("nowhere/config.json", "no such file or folder; check the path"),
        ("someone/their-model", "models are not downloaded: give the folder of its config.json"),
        ("meta-llama/Llama-3.1-8", "did you mean llama-3.1-8b or llama-3-8b or llama-3.1-70b?"),
        ("what", "not a model; give module:function"),
        ("train.py", "a file is not a model; give module:function, as train:FUNCTION."),
        ("./src/train.py:build", "give module:function, as src.train:build."),
        ("/src/train.py:build", "give module:function, as train:build, in the folder /src."),
        pytest.param(
            "torch.nn:Identity",
            "Identity has no parameters (got 0); give a model to train.",
            marks=pytest.mark.slow,  # it is built, in a process of its own
        ),
    ],
)
def test_what_is_not_a_model_says_what_can_be_given(spec, text):
    with pytest.raises(ModelError) as caught:
        describe(spec)
    assert text in str(caught.value)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


MODEL = """
import torch
from torch import nn

print("this must not reach anybody")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 100, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)
        self.register_buffer("steps", torch.zeros(3))


def build():
    return Model(), {"batch": 1}


def several():
    return Model(), Layer(), {"batch": 1}, Layer()


def broken():
    return nn.Linear(2, "three")
"""


@pytest.mark.slow
def test_a_factory_is_built_in_a_child_on_the_meta_device(tmp_path, capfd):
    write(tmp_path, "mine.py", MODEL)
    found = describe("mine:build", folder=tmp_path)
    assert found.name == "Model"
    assert found.numel == 100 * 8 + 3 * (8 * 32 + 32 + 32 * 8 + 8)
    assert found.suggested_classes == ["Layer"]
    assert [c.count for c in found.block_classes] == [3]
    assert found.tree.children[0].parameters[0].trainable is False
    assert found.tree.children[-1].parameters[0].tied_to == "embed.weight"
    assert [b.name for b in found.tree.buffers] == ["steps"]
    assert found.notes == ()
    assert capfd.readouterr() == ("", "")


def test_of_several_models_the_first_is_described_and_the_others_are_named(monkeypatch, tmp_path):
    write(tmp_path, "several_of_mine.py", MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    found = describe_factory("several_of_mine:several")
    assert found.name == "Model" and found.notes == (
        "several_of_mine:several returns 3 models, and only the first, Model, is counted, not Layer, Layer; "
        "return one module that holds all of them.",
    )


def test_a_factory_gives_a_module():
    with pytest.raises(TypeError, match="time:time returns an object of type float, not a torch"):
        build_factory("time:time")


@pytest.mark.slow
def test_the_users_error_names_the_line(tmp_path):
    write(tmp_path, "mine.py", MODEL)
    line = MODEL.splitlines().index('    return nn.Linear(2, "three")') + 1
    with pytest.raises(ModelError) as caught:
        describe("mine:broken", folder=tmp_path)
    expected = f"mine.py:{line}: the model mine:broken cannot be built on the meta device (TypeError"
    assert str(caught.value).startswith(expected)
    assert "gpt:layers=" in str(caught.value)


@pytest.mark.slow
def test_a_function_that_loads_weights_is_told_to_build_from_the_configuration(tmp_path):
    from transformers import BertConfig

    BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1).save_pretrained(tmp_path / "tiny")
    code = "from transformers import {0}\n\n\ndef build():\n    return {0}.from_pretrained({1!r})\n"
    write(tmp_path, "model.py", code.format("BertModel", "tiny"))
    with pytest.raises(ModelError, match=r"no weights are needed: write from_config\(.* at model\.py:5, or give"):
        describe("model:build", folder=tmp_path)
    write(tmp_path, "configuration.py", code.format("BertConfig", "no/such"))
    with pytest.raises(ModelError, match=r"correct the code at configuration\.py:5, or describe its sizes"):
        describe("configuration:build", folder=tmp_path)


@pytest.mark.slow
def test_code_that_does_not_parse_names_the_line(tmp_path):
    write(tmp_path, "mine.py", "import torch\ndef build(:\n")
    with pytest.raises(ModelError, match=r"^mine\.py:2: .*SyntaxError"):
        describe("mine:build", folder=tmp_path)


@pytest.mark.slow
def test_a_child_that_dies_is_reported(tmp_path):
    write(tmp_path, "mine.py", "import os\ndef build():\n    os._exit(7)\n")
    with pytest.raises(ModelError, match="ended with exit code 7"):
        describe("mine:build", folder=tmp_path)


def test_a_factory_that_takes_too_long_is_ended(tmp_path):
    write(tmp_path, "mine.py", "import time\ntime.sleep(600)\n")
    with pytest.raises(ModelError, match=r"mine:build: not built after 0\.5 s"):
        describe("mine:build", timeout_s=0.5, folder=tmp_path)


def transformers_configs() -> dict[str, object]:
    from transformers import GPT2Config, LlamaConfig, T5Config, ViTConfig

    return {"gpt2": GPT2Config(), "llama": LlamaConfig(), "t5": T5Config(), "vit": ViTConfig()}


# Class, parameters, blocks, and facts at the real sizes: GPT-2 124 M, Llama 7 B, T5 small 60.5 M, ViT base 85.8 M.
REAL = {
    "gpt2": ("GPT2LMHeadModel", 124_439_808, ["GPT2Block"], (12, 768, 12, 3072, 50257, 1024, False)),
    "llama": ("LlamaForCausalLM", 6_738_415_616, ["LlamaDecoderLayer"], (32, 4096, 32, 11008, 32000, 2048, True)),
    "t5": ("T5ForConditionalGeneration", 60_506_624, ["T5Block"], (12, 512, 8, 2048, 32128, None, False)),
    "vit": ("ViTForImageClassification", 85_800_194, ["ViTLayer"], (12, 768, 12, 3072, None, 197, False)),
}


@pytest.mark.slow
@pytest.mark.requirement("B3")
@pytest.mark.parametrize("family", list(REAL))
def test_transformers_models_at_their_real_sizes(tmp_path, family):
    name, numel, classes, facts = REAL[family]
    transformers_configs()[family].save_pretrained(tmp_path)
    with torch.device("meta"):
        model = build_transformers(str(tmp_path))
    found = transformer_facts(model.config)
    from shardkit.model.blocks import repeated_classes

    tree = tree_of(model)
    assert (type(model).__name__, tree.numel, repeated_classes(tree)) == (name, numel, classes)
    assert all(p.dtype == "float32" for node in tree.walk() for p in node.parameters)
    shown = (found.layers, found.hidden, found.heads, found.feed_forward, found.vocabulary, found.seq_len)
    assert (*shown, found.is_gated) == facts


@pytest.mark.slow
def test_a_config_that_cannot_be_built_is_told_with_its_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    with pytest.raises(ModelError) as caught:
        describe("config.json", folder=tmp_path)
    text = str(caught.value)
    assert "'hidden_size': TypeError" in text and "(value: 'x')" in text
    assert "correct the file, or install a version of Transformers that knows this model" in text


@pytest.mark.slow
def test_code_beside_a_config_is_never_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(
        ValueError, match=r"code beside the file \(auto_map\), which is not run here; .* module:function"
    ):
        build_transformers(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_file_of_another_kind_is_there_but_no_model(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a file that describes a model; give module:function"):
        describe("./pytorch_model.bin", folder=tmp_path)


def test_weights_are_described_by_their_headers_alone(tmp_path):
    model = GPT(gpt.parse("layers=12,hidden=16,heads=4,vocab=50,seq=8"))
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    names = sorted(state)
    save_file({name: state[name] for name in names[:30]}, tmp_path / "model-00001.safetensors")
    save_file({name: state[name] for name in names[30:]}, tmp_path / "model-00002.safetensors")
    found = describe(str(tmp_path))
    assert found.numel == sum(p.numel() for p in model.parameters())
    assert found.suggested_classes == ["blocks[*]"]
    assert not found.has_class_names
    assert found.facts is None
    blocks = next(child for child in found.tree.children if child.fqn == "blocks")
    assert [child.fqn for child in blocks.children] == [f"blocks.{index}" for index in range(12)]


def test_weights_in_8_bits_are_counted_and_packed_ones_are_named(tmp_path):
    state = {f"h.{i}.weight": torch.zeros(4, 8).to(torch.float8_e4m3fn) for i in range(2)}
    state |= {"h.2.weight": torch.zeros(4, 8).to(torch.float8_e5m2), "norm.weight": torch.zeros(8)}
    save_file(state, tmp_path / "eight.safetensors")
    found = describe("eight.safetensors", folder=tmp_path)
    assert found.numel == 3 * 32 + 8 and len(found.notes) == 1
    packed = {"q.qweight": torch.zeros(4, 8, dtype=torch.int32), "q.zeros": torch.zeros(2, dtype=torch.uint8)}
    save_file(state | packed, tmp_path / "packed.safetensors")
    found = describe("packed.safetensors", folder=tmp_path)
    assert found.numel == 3 * 32 + 8
    assert found.notes[1].startswith("Not counted: 2 tensors of I32, U8, 34 numbers in all; a weight packed in them")


def test_integers_of_64_bits_and_masks_are_buffers(tmp_path):
    state = {"norm.weight": torch.zeros(8), "norm.num_batches_tracked": torch.tensor(0), "mask": torch.ones(4, 4) > 0}
    save_file(state, tmp_path / "model.safetensors")
    found = describe("model.safetensors", folder=tmp_path)
    assert (found.numel, len(found.notes)) == (8, 1)
    buffers = {node.name_of(buffer): buffer.numel for node in found.tree.walk() for buffer in node.buffers}
    assert buffers == {"norm.num_batches_tracked": 1, "mask": 16}


def test_weights_that_lie_there_in_two_forms_are_counted_once(tmp_path):
    save_file({"model.norm.weight": torch.zeros(8)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"norm.weight": torch.zeros(8)}, tmp_path / "consolidated.safetensors")
    found = describe(str(tmp_path))
    assert found.numel == 8
    assert found.notes[1].startswith("consolidated.safetensors: not counted; it holds the same weights")
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    assert describe(str(tmp_path)).numel == 8


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00[]"])
def test_a_file_that_is_no_safetensors_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        describe("model.safetensors", folder=tmp_path)


def test_the_files_of_a_checkpoint_are_no_whole_weights(tmp_path):
    """Half of each tensor would be counted, on two ranks."""
    folder = tmp_path / "step-00000010" / "model"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        save_file({"layer.weight": torch.zeros(4, 8)}, folder / f"r0000{rank}-of-00002.safetensors")
    (folder.parent / "MANIFEST.json").write_text("{}")
    for path in (folder, folder / "r00000-of-00002.safetensors", folder.parent):
        with pytest.raises(
            ModelError,
            match=r"is a checkpoint, .* save_model or `shardkit checkpoint merge CHECKPOINT -o FOLDER` writes",
        ):
            describe(str(path))
    save_file({"layer.weight": torch.zeros(8, 8)}, tmp_path / "r00000-of-00001.safetensors")
    assert describe(str(tmp_path)).numel == 64


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(ModelError, match=r"no \.safetensors file in this folder"):
        describe(str(tmp_path))


def test_describing_by_formula_or_weights_loads_no_torch(tmp_path):
    save_file({"layer.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    code = (
        "import sys; from shardkit.model.sources import describe; describe('gpt-175b'); "
        f"describe({str(tmp_path)!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_comment_that_names_the_model():
    text = "# shardkit.yaml\nmixed_precision: bf16\n"
    assert comment.read(text) is None
    named = comment.write(text, "mine:build")
    assert named == "# shardkit.yaml\n# model: mine:build\nmixed_precision: bf16\n"
    assert comment.read(named) == comment.read(named.replace(":build", ":build  a remark")) == "mine:build"
    again = comment.write(named, r"other\1:build")
    assert comment.read(again) == r"other\1:build"
    assert again.count("# model:") == 1


@pytest.mark.parametrize(
    "spec", ["my models/config.json", "it's/config.json", "it's my 'own' one/config.json", "a 'b c'", "C:\\models\\gpt"]
)
def test_the_comment_holds_a_path_of_any_characters(spec):
    named = comment.write("# ours\r\nmixed_precision: bf16\r\n", spec)
    assert named.startswith("# ours\r\n# model: ") and named.endswith("\r\nmixed_precision: bf16\r\n")
    assert comment.read(named) == spec
    remarked = named.replace("\r\nmixed", """  # it's the small one, "ours\r\nmixed""")
    assert comment.read(remarked) == spec
    assert comment.write(named, "mine:build") == "# ours\r\n# model: mine:build\r\nmixed_precision: bf16\r\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(6_738_415_616, "6.74 B"), (999_814_144, "1 B"), (999_400_000, "999 M"), (124_439_808, "124 M"), (8192, "8,192")],
)
def test_counts_as_people_say_them(count, text):
    assert count_text(count) == text
