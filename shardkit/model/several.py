"""The configuration of one of several models: a setting that names parts of models applies to those that have them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from shardkit.config.schema import Config, FsdpConfig
from shardkit.errors import ModelError
from shardkit.model.cut import block_names
from shardkit.model.tree import ModuleNode


def for_one_of(config: Config, tree: ModuleNode, others: Sequence[ModuleNode]) -> tuple[Config, list[str]]:
    """The configuration for this model beside the others, and the names of the settings that are off for it.

    Without classes to wrap and modules to ignore that only other models have (a generator's blocks for its
    discriminator), and without work on blocks where only others have blocks. What no model has is kept, for the error.
    """
    if not others:
        return config, []
    pattern = config.fsdp.ignored_modules
    fsdp = {
        "transformer_layer_cls_to_wrap": _classes_for(config.fsdp.transformer_layer_cls_to_wrap, tree, others),
        "ignored_modules": None if pattern and _is_only_in_others(pattern, tree, others) else pattern,
    }
    if _has_blocks(tree, config.fsdp) or not any(_has_blocks(other, config.fsdp) for other in others):
        return config.changed(fsdp=fsdp), []
    section = config.shardkit
    wanted = {
        "fsdp_activation_checkpointing": config.fsdp.activation_checkpointing,
        "xla_fsdp_grad_ckpt": config.xla_fsdp_grad_ckpt,
        "shardkit.offload_activations": section.offload_activations,
        "shardkit.compile": section.compile,
    }
    changed = config.changed(
        fsdp={**fsdp, "activation_checkpointing": False},
        xla_fsdp_grad_ckpt=False,
        shardkit={"offload_activations": False, "compile": False},
    )
    return changed, [name for name, is_wanted in wanted.items() if is_wanted]


def _classes_for(names: Sequence[str], tree: ModuleNode, others: Sequence[ModuleNode]) -> list[str]:
    own, elsewhere = _classes(tree), set[str]().union(*map(_classes, others))
    return [name for name in names if name in own or name not in elsewhere]


def _classes(tree: ModuleNode) -> set[str]:
    return {node.class_name for node in tree.walk()}


def _is_only_in_others(pattern: str, tree: ModuleNode, others: Sequence[ModuleNode]) -> bool:
    try:
        matches = re.compile(pattern).fullmatch
    except re.error:
        return False
    return not _any(matches, tree) and any(_any(matches, other) for other in others)


def _any(matches: Callable[[str], Any], tree: ModuleNode) -> bool:
    return any(node.fqn and matches(node.fqn) for node in tree.walk())


def _has_blocks(tree: ModuleNode, config: FsdpConfig) -> bool:
    present = _classes(tree)
    own = [name for name in config.transformer_layer_cls_to_wrap if name in present]
    try:
        return bool(block_names(tree, config.changed(transformer_layer_cls_to_wrap=own)))
    except ModelError:
        return False
