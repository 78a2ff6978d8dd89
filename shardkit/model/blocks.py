"""Block classes of a model: those that repeat, and those that could be FSDP units."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from shardkit.model.tree import ModuleNode

SMALLEST_SHARE = 0.01
"""A class is that of blocks if one of its modules has more than this part of the parameters of the largest repeated
one beside it."""


@dataclass(frozen=True)
class BlockClass:
    """A class in a model: its count, parameters per instance, and share of all parameters."""

    name: str
    count: int
    numel_each: int
    share: float


def repeated_classes(root: ModuleNode) -> list[str]:
    """Names of the outermost repeated block classes, such as a Transformer's layers: ["GPT2Block"].

    A block is a module with parameters and children that occurs at least twice directly inside a container
    (ModuleList, Sequential); containers inside a container count as one. A class found only inside another block is
    part of that block. Small helpers beside the blocks, such as norms of their own class, are left out: to gather them
    alone costs more time than to keep them gathered.
    """
    names: list[str] = []

    def visit(node: ModuleNode) -> None:
        if node.is_container or node.class_name == "Sequential":
            members = list(_members(node))
            counts = Counter(member.class_name for member in members if member.children and member.numel)
            repeated = [member for member in members if counts[member.class_name] >= 2]
            least = SMALLEST_SHARE * max((member.numel for member in repeated), default=0)
            blocks = {member.class_name for member in repeated if member.numel > least}
            names.extend(name for name in counts if name in blocks and name not in names)
            descend = [member for member in members if counts[member.class_name] < 2]
        else:
            descend = list(node.children)
        for child in descend:
            visit(child)

    visit(root)
    return names


def inside_blocks(root: ModuleNode) -> Iterator[ModuleNode]:
    """The modules in repeated blocks, the blocks themselves included; each once."""
    classes = set(repeated_classes(root))

    def visit(node: ModuleNode, is_inside: bool) -> Iterator[ModuleNode]:
        if node.alias_of is not None:
            return
        is_inside = is_inside or node.class_name in classes
        if is_inside:
            yield node
        for child in node.children:
            yield from visit(child, is_inside)

    return visit(root, False)


def _members(container: ModuleNode) -> Iterator[ModuleNode]:
    """The modules in a container and in the containers directly inside it: these have no forward of their own."""
    for child in container.children:
        if child.is_container:
            yield from _members(child)
        else:
            yield child


def block_classes(root: ModuleNode) -> list[BlockClass]:
    """Classes that could be units, largest share first: every class with parameters and children, except the root's."""
    total = max(1, root.numel)
    sizes: dict[str, list[int]] = {}
    for node in root.walk():
        if node.fqn and node.children and not node.is_container and node.numel:
            sizes.setdefault(node.class_name, []).append(node.numel)
    classes = [BlockClass(name, len(n), max(n), sum(n) / total) for name, n in sizes.items()]
    return sorted(classes, key=lambda c: (-c.share, -c.count))


def candidates_text(root: ModuleNode) -> str:
    """A sentence with candidates for fsdp_transformer_layer_cls_to_wrap."""
    classes = block_classes(root)[:6]
    if not classes:
        return "It has no class with parameters and submodules."
    listed = ", ".join(f"{c.name} ({c.count} x {c.numel_each:,} parameters)" for c in classes)
    return f"Candidates in it: {listed}."
