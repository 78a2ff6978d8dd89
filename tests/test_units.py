"""How a model is cut into units."""

from dataclasses import replace

import pytest

from shardkit.config.schema import FsdpConfig
from shardkit.errors import ModelError
from shardkit.model.blocks import repeated_classes
from shardkit.model.cut import note_on_units, select_units
from shardkit.model.tree import ModuleNode, Parameter


def linear(fqn: str, inputs: int, outputs: int) -> ModuleNode:
    return ModuleNode(fqn, "Linear", (Parameter("weight", (outputs, inputs)),))


def transformer(layers: int = 3) -> ModuleNode:
    blocks = tuple(
        ModuleNode(
            f"layers.{i}", "Block", children=(linear(f"layers.{i}.up", 8, 32), linear(f"layers.{i}.down", 32, 8))
        )
        for i in range(layers)
    )
    stack = ModuleNode("layers", "ModuleList", children=blocks, is_container=True)
    return ModuleNode("", "Model", children=(linear("embed", 100, 8), stack, linear("head", 8, 100)))


def test_blocks_are_found_without_a_name():
    assert repeated_classes(transformer()) == ["Block"]
    assert select_units(transformer(), FsdpConfig()) == ["layers.0", "layers.1", "layers.2"]


def unet(stages: int = 3) -> ModuleNode:
    """Each stage is a ModuleList of a block, an attention and a linear layer, as in published UNets."""

    def stage(fqn: str) -> ModuleNode:
        block = ModuleNode(f"{fqn}.0", "ResBlock", children=(linear(f"{fqn}.0.conv", 8, 8),))
        attention = ModuleNode(f"{fqn}.1", "Attention", children=(linear(f"{fqn}.1.qkv", 8, 24),))
        down = linear(f"{fqn}.2", 8, 8)
        return ModuleNode(fqn, "ModuleList", children=(block, attention, down), is_container=True)

    downs = ModuleNode("downs", "ModuleList", children=tuple(stage(f"downs.{i}") for i in range(stages)))
    return ModuleNode("", "Unet", children=(replace(downs, is_container=True), linear("head", 8, 8)))


def test_blocks_in_lists_of_lists_are_found_and_the_inner_lists_are_no_blocks():
    assert repeated_classes(unet()) == ["ResBlock", "Attention"]
    units = select_units(unet(), FsdpConfig())
    assert units == [f"downs.{stage}.{part}" for stage in range(3) for part in range(2)]


def with_norms(width: int) -> ModuleNode:
    """Attentions in one list with norms of a class of the model's own, as in x-transformers."""

    def layer(fqn: str) -> tuple[ModuleNode, ...]:
        norm = ModuleNode(f"{fqn}.0", "Norm", (Parameter("gain", (width,)),), (ModuleNode(f"{fqn}.0.n", "LayerNorm"),))
        return norm, ModuleNode(f"{fqn}.1", "Attention", children=(linear(f"{fqn}.1.qkv", width, 3 * width),))

    lists = [ModuleNode(f"layers.{i}", "ModuleList", (), layer(f"layers.{i}"), is_container=True) for i in range(2)]
    layers = ModuleNode("layers", "ModuleList", (), tuple(lists), is_container=True)
    return ModuleNode("", "Decoder", children=(linear("embed", 100, width), layers))


def test_small_helpers_beside_the_blocks_are_no_units():
    assert repeated_classes(with_norms(width=64)) == ["Attention"]
    assert select_units(with_norms(width=64), FsdpConfig()) == ["layers.0.1", "layers.1.1"]
    assert repeated_classes(with_norms(width=8)) == ["Norm", "Attention"]


def test_a_stage_that_holds_much_of_the_model_is_mentioned_with_the_blocks_in_it():
    def stage(number: int, width: int) -> ModuleNode:
        fqn = f"stages.{number}"
        blocks = tuple(
            ModuleNode(f"{fqn}.blocks.{i}", "Block", children=(linear(f"{fqn}.blocks.{i}.up", width, width),))
            for i in range(2)
        )
        stack = ModuleNode(f"{fqn}.blocks", "Sequential", children=blocks)
        return ModuleNode(fqn, "Stage", children=(stack,))

    stages = ModuleNode("stages", "Sequential", children=tuple(stage(n, 8 * 2**n) for n in range(3)))
    model = ModuleNode("", "Swin", children=(stages, linear("head", 8, 8)))
    said = note_on_units(model, FsdpConfig())
    assert said is not None
    assert "one unit, stages.2 (Stage), holds" in said and "cls_to_wrap: Block makes units of its blocks" in said
    assert note_on_units(model, FsdpConfig(transformer_layer_cls_to_wrap="Block")) is None
    assert note_on_units(transformer(), FsdpConfig()) is None and note_on_units(unet(), FsdpConfig()) is None


def test_a_whole_model_of_its_blocks_class_is_no_large_block():
    blocks = tuple(ModuleNode(str(i), "Sequential", children=(linear(f"{i}.0", 8, 8),)) for i in range(3))
    assert note_on_units(ModuleNode("", "Sequential", children=blocks), FsdpConfig()) is None


def test_size_never_takes_a_container():
    units = select_units(transformer(), FsdpConfig(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=500))
    assert units == ["embed", "layers.0", "layers.1", "layers.2", "head"]


def test_a_class_that_is_not_there_is_an_error_with_candidates():
    with pytest.raises(
        ModelError, match=r"no module of class Blok .*did you mean Block\?.*Block \(3 x 512 parameters\)"
    ):
        select_units(transformer(), FsdpConfig(transformer_layer_cls_to_wrap="Blok"))


def test_where_nothing_repeats_size_decides_and_that_is_said():
    model = ModuleNode("", "Model", children=(linear("a", 20, 20), linear("b", 2, 2)))
    assert select_units(model, FsdpConfig()) == []
    assert select_units(model, FsdpConfig(min_num_params=100)) == ["a"]
    said = note_on_units(model, FsdpConfig(min_num_params=100))
    assert (
        "no block class repeats in the model (Model), so it is wrapped by size: units of at least 100 parameters"
        in said
    )
    for settled in ({"auto_wrap_policy": "NO_WRAP"}, {"transformer_layer_cls_to_wrap": "Linear"}):
        assert note_on_units(model, FsdpConfig(**settled)) is None
    assert note_on_units(transformer(), FsdpConfig()) is None


def test_no_wrap_has_no_units():
    assert select_units(transformer(), FsdpConfig(auto_wrap_policy="no_wrap")) == []
