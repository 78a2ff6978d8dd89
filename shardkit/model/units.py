"""How a model is cut into FSDP units: the only place that decides it,
for training, simulation and closed form alike."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shardkit.config.schema import FsdpConfig, WrapPolicy
from shardkit.errors import ModelError
from shardkit.model.tree import ModuleNode

CALLS_NO_CHILD = {"MultiheadAttention", "TransformerEncoderLayer"}  # the latter in evaluation


@dataclass(frozen=True)
class BlockClass:
    """A class that occurs in a model: how often, how large each, and its share of all parameters."""

    name: str
    count: int
    numel_each: int
    share: float


def select_units(root: ModuleNode, config: FsdpConfig) -> list[str]:
    """Fqns of the modules that become units of their own, children before parents; the root is one always, unlisted.

    By class without a class named: those that repeat in the model, or by size where none does (see `missing_blocks`).
    Raises ModelError where a named class is not in the model, with the model's candidates.
    """
    match config.auto_wrap_policy:
        case WrapPolicy.NO_WRAP:
            return []
        case WrapPolicy.SIZE_BASED_WRAP:
            return _by_size(root, config.min_num_params)
        case WrapPolicy.TRANSFORMER_BASED_WRAP:
            names = config.transformer_layer_cls_to_wrap or repeated_classes(root)
            return _by_class(root, names) if names else _by_size(root, config.min_num_params)


def repeated_classes(root: ModuleNode) -> list[str]:
    """Names of the outermost repeated block classes: those a Transformer's layers have, e.g. ["GPT2Block"].

    A block is a module with parameters and children that occurs at least twice directly inside a container
    (ModuleList, Sequential). A class found only inside another block is part of that block.
    """
    names: list[str] = []

    def visit(node: ModuleNode) -> None:
        if node.is_container or node.class_name == "Sequential":
            counts = Counter(child.class_name for child in node.children if child.children and child.numel)
            repeated = {name for name, count in counts.items() if count >= 2}
            names.extend(name for name in counts if name in repeated and name not in names)
            descend = [child for child in node.children if child.class_name not in repeated]
        else:
            descend = list(node.children)
        for child in descend:
            visit(child)

    visit(root)
    return names


def missing_blocks(root: ModuleNode, config: FsdpConfig) -> str | None:
    """The sentence for a model that was to be cut by class, with no class named and none that repeats; else None."""
    by_class = config.auto_wrap_policy is WrapPolicy.TRANSFORMER_BASED_WRAP
    if not by_class or config.transformer_layer_cls_to_wrap or repeated_classes(root):
        return None
    return (
        f"fsdp_auto_wrap_policy: no block class repeats in the model ({root.class_name}), so it is cut by size: units "
        f"of at least {config.min_num_params:,} parameters (fsdp_min_num_params), or one unit."
    ) + (f" {candidates_text(root)}" if block_classes(root) else "")


def block_classes(root: ModuleNode) -> list[BlockClass]:
    """Classes that could be units, the largest share first: every class with parameters and children but the root's."""
    total = max(1, root.numel)
    sizes: dict[str, list[int]] = {}
    for node in root.walk():
        if node.fqn and node.children and not node.is_container and node.numel:
            sizes.setdefault(node.class_name, []).append(node.numel)
    classes = [BlockClass(name, len(n), max(n), sum(n) / total) for name, n in sizes.items()]
    return sorted(classes, key=lambda c: (-c.share, -c.count))


def _by_class(root: ModuleNode, names: Sequence[str]) -> list[str]:
    present = {node.class_name for node in root.walk()}
    missing = [name for name in names if name not in present]
    if missing:
        raise ModelError("\n".join(_missing_text(root, name, present) for name in missing))
    containers = sorted({node.class_name for node in root.walk() if node.is_container} & set(names))
    if containers:
        raise ModelError(
            f"fsdp_transformer_layer_cls_to_wrap: {', '.join(containers)} only holds modules and has no forward of its "
            f"own, so it cannot be a unit; name the class inside it. {candidates_text(root)}"
        )
    return children_first(root, {node.fqn for node in root.walk() if node.class_name in set(names) and node.fqn})


def _missing_text(root: ModuleNode, name: str, present: set[str]) -> str:
    near = get_close_matches(name, present, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"fsdp_transformer_layer_cls_to_wrap: no module of class {name} in the model ({root.class_name}); "
        f"{hint}{candidates_text(root)}"
    )


def candidates_text(root: ModuleNode) -> str:
    """Which classes fsdp_transformer_layer_cls_to_wrap could name."""
    classes = block_classes(root)[:6]
    if not classes:
        return "It has no class with parameters and submodules of its own."
    listed = ", ".join(f"{c.name} ({c.count} x {c.numel_each:,} parameters)" for c in classes)
    return f"Candidates in it: {listed}."


def _by_size(root: ModuleNode, min_num_params: int) -> list[str]:
    """Bottom-up: a module becomes a unit when what is left in it, beside the units below, reaches the minimum.

    A container is never one: its parameters count for the module around it. Neither is what lies in a module that uses
    its children's weights without calling them: nobody would gather these.
    """
    chosen: set[str] = set()

    def left_over(node: ModuleNode) -> int:
        own = sum(p.numel for p in node.parameters if p.tied_to is None)
        if node.class_name in CALLS_NO_CHILD:
            rest = node.numel
        else:
            rest = own + sum(left_over(child) for child in node.children)
        if node.fqn and not node.is_container and rest >= min_num_params:
            chosen.add(node.fqn)
            return 0
        return rest

    left_over(root)
    return children_first(root, chosen)


def children_first(root: ModuleNode, chosen: set[str]) -> list[str]:
    """The chosen fqns in the order in which they are sharded: what lies inside a unit before the unit."""
    order: list[str] = []

    def visit(node: ModuleNode) -> None:
        for child in node.children:
            visit(child)
        if node.fqn in chosen:
            order.append(node.fqn)

    visit(root)
    return order
