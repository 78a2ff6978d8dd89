"""The description of a model as a plain value, and its JSON form, in which the child process returns it."""

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from shardkit.model.blocks import BlockClass, block_classes, repeated_classes
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.wording import count_text

PARAMETERS_IN_FP32 = (
    "Parameters count as fp32, as in training with mixed precision, regardless of the saved weights' dtype."
)
QUANTIZATION_NOT_APPLIED = (
    "quantization_config is not applied: the plan is for training all weights in full; for adapters beside frozen "
    "weights in 4 bits add --lora 16 --load-in-4bit."
)


@dataclass(frozen=True)
class TransformerFacts:
    """The shape of a Transformer, as needed for activation memory and FLOPs; None is unknown.

    `seq_len`: maximum sequence length; `layers`: encoder plus decoder layers; `vocabulary`: size of the logits, None
    without logits; `head_dim` None means hidden / heads. `keeps_function_input`: backward of the activation function
    needs its input. `normalizes_in_fp32`: norms compute in fp32 regardless of the compute dtype; with
    `normalizes_heads`, also those of queries and keys. `casts_once`: no two matmuls share an input, so autocast makes
    one copy of each. A token uses `active_experts` of the `experts`, 0 if unknown. `attentions`: one per layer (None),
    fewer where layers have none, more where a decoder's layer also attends to the encoder; `windowed` of them (None:
    all) see no more than `window` tokens, if that is given. `gaps`: activations that the closed form omits, as text;
    with any, its result is a lower bound.
    """

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    feed_forward: int
    vocabulary: int | None = None
    seq_len: int | None = None
    is_gated: bool = False
    head_dim: int | None = None
    keeps_function_input: bool = True
    normalizes_in_fp32: bool = False
    normalizes_heads: bool = False
    casts_once: bool = False
    experts: int = 0
    active_experts: int = 0
    window: int | None = None
    attentions: int | None = None
    windowed: int | None = None
    gaps: tuple[str, ...] = ()

    @property
    def width_of_head(self) -> int:
        """Elements of one head's query."""
        return self.head_dim or self.hidden // self.heads


@dataclass(frozen=True)
class ModelDescription:
    """A model: its module tree, its source, and the facts that determine its memory.

    `has_class_names` is False where the tree was derived from names of weights: its class names are then invented and
    must not be written into a configuration. `longest`: the most tokens of a sequence, by the model's configuration.
    """

    spec: str
    name: str
    tree: ModuleNode
    facts: TransformerFacts | None = None
    has_class_names: bool = True
    notes: tuple[str, ...] = ()
    longest: int | None = None

    @property
    def numel(self) -> int:
        """Number of parameters, tied ones counted once, and packed ones as what they hold."""
        return self.tree.weights

    @cached_property
    def block_classes(self) -> list[BlockClass]:
        """Classes that could be FSDP units, largest share of parameters first."""
        return block_classes(self.tree)

    @cached_property
    def suggested_classes(self) -> list[str]:
        """The repeated block classes; empty if none repeats."""
        return repeated_classes(self.tree)

    @property
    def text(self) -> str:
        """One line: name, size, blocks."""
        blocks = [c for c in self.block_classes if c.name in self.suggested_classes]
        listed = ", ".join(f"{c.count} x {c.name}" for c in blocks)
        return f"{self.name}, {count_text(self.numel)} parameters" + (f", {listed}" if listed else "")


def to_json(description: ModelDescription) -> dict[str, Any]:
    """A JSON-able form that `from_json` reads back exactly."""
    return {
        "spec": description.spec,
        "name": description.name,
        "tree": _as_lists(description.tree),
        "facts": asdict(description.facts) if description.facts else None,
        "has_class_names": description.has_class_names,
        "notes": list(description.notes),
        "longest": description.longest,
    }


def from_json(data: dict[str, Any]) -> ModelDescription:
    """The description that `to_json` was given."""
    return ModelDescription(
        spec=data["spec"],
        name=data["name"],
        tree=_node_from_json(data["tree"]),
        facts=TransformerFacts(**data["facts"] | {"gaps": tuple(data["facts"]["gaps"])}) if data["facts"] else None,
        has_class_names=data["has_class_names"],
        notes=tuple(data["notes"]),
        longest=data["longest"],
    )


def _as_lists(value: Any) -> Any:
    """A node, with all below it, as the list of its fields; so are its parameters."""
    if isinstance(value, (ModuleNode, Parameter)):
        return [_as_lists(getattr(value, field.name)) for field in fields(value)]
    return [_as_lists(one) for one in value] if isinstance(value, tuple) else value


def _node_from_json(data: list[Any]) -> ModuleNode:
    fqn, class_name, parameters, children, is_container, buffers, *marks = data
    return ModuleNode(
        fqn,
        class_name,
        tuple(_parameter_from_json(p) for p in parameters),
        tuple(_node_from_json(child) for child in children),
        is_container,
        tuple(_parameter_from_json(b) for b in buffers),
        *marks,
    )


def _parameter_from_json(data: list[Any]) -> Parameter:
    name, shape, *others = data
    return Parameter(name, tuple(shape), *others)
