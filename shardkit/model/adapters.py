"""A model as LoRA trains it: all weights frozen, and two small matrices beside each chosen linear layer, as peft puts
them there. As QLoRA does, the frozen weights of these layers may be packed in 4 bits, as bitsandbytes packs them.

`adapted` changes a description, without torch; a simulation gives the layers that `chosen` names to peft itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from shardkit.digits import number_of_flag
from shardkit.errors import UsageError
from shardkit.model.blocks import inside_blocks
from shardkit.model.describe import PARAMETERS_IN_FP32, QUANTIZATION_NOT_APPLIED, ModelDescription
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.wording import first_few, near_or

# The second is GPT-2's, whose weights are (inputs, outputs).
_LINEAR = ("Linear", "Conv1D")
_QUANTIZATION = (
    "quantization_config is not applied: frozen weights are in the dtype in which they compute; --load-in-4bit has "
    "them in 4 bits."
)
# Names that peft gives: of the layer, and of the two matrices beside it.
_LAYER, _FIRST, _SECOND = "base_layer", "lora_A", "lora_B"
_ALL = "all-linear"
"""peft's word for all that get adapters where none is named."""
_LARGEST_RANK = 65_536
"""More than the width of any model."""
# Storage of packed weights that FSDP2 of every torch shards.
_STORAGE, _WEIGHTS_OF_STORAGE = "bfloat16", 4


@dataclass(frozen=True)
class Adapters:
    """`rank`: the width between the two matrices. `targets`: names of linear layers, or the last parts of names; none:
    all in the model's repeated blocks. `are_packed`: whether the weights of these blocks' linear layers have 4 bits.
    `compute`: the dtype in which the model computes, as named in settings, and which other frozen weights have;
    adapters are in fp32."""

    rank: int
    targets: tuple[str, ...] = ()
    are_packed: bool = False
    compute: str = "fp32"

    @property
    def text(self) -> str:
        """What is trained, and how the rest is kept: `LoRA of rank 16 (q_proj), frozen weights in 4 bits`."""
        where = f" ({', '.join(self.targets)})" if self.targets else ""
        return f"LoRA of rank {self.rank}{where}" + (", frozen weights in 4 bits" if self.are_packed else "")

    @property
    def dtype(self) -> str:
        """That of frozen weights, as torch names it."""
        return {"bf16": "bfloat16", "fp16": "float16"}.get(self.compute, "float32")

    @property
    def flags(self) -> list[str]:
        """Those of `shardkit plan` and `shardkit config` that ask for the same."""
        targets = ["--lora-targets", ",".join(self.targets)] if self.targets else []
        return ["--lora", str(self.rank), *targets, *(["--load-in-4bit"] if self.are_packed else [])]


def adapters_of(rank: str | None, targets: str | None, in_4_bits: bool) -> Adapters | None:
    """What --lora, --lora-targets and --load-in-4bit say; None where the whole model is trained. UsageError, with all
    problems, where the others are given without --lora, or the rank is no number."""
    names = tuple(dict.fromkeys(name.strip() for name in (targets or "").split(",") if name.strip()))
    number = number_of_flag("--lora", rank, 1, _LARGEST_RANK)
    if number is not None and (names or targets is None):
        return Adapters(number, () if names == (_ALL,) else names, in_4_bits)
    problems = []
    if number is not None:
        problems.append(f"--lora-targets: names no layer (got {targets!r}); write q_proj,v_proj.")
    elif targets is not None:
        problems.append(f"--lora-targets: only used with --lora (got {targets!r}); add --lora 16.")
    if in_4_bits and number is None:
        problems.append("--load-in-4bit: weights in 4 bits are not trained (got no --lora); add --lora 16.")
    if problems:
        raise UsageError("\n".join(problems))
    return None


def adapted(description: ModelDescription, adapters: Adapters) -> ModelDescription:
    """The model with the adapters, which alone are trained.

    UsageError where the layers are not known, or the model has frozen parameters already."""
    _check(description, adapters)
    tree = description.tree
    names = set(chosen(tree, adapters))
    packed = set(_linear_in_blocks(tree)) if adapters.are_packed else set()
    changed = _Changed(names, packed, adapters.rank, adapters.dtype).node(tree)
    notes = [note for note in description.notes if note not in (PARAMETERS_IN_FP32, QUANTIZATION_NOT_APPLIED)]
    if QUANTIZATION_NOT_APPLIED in description.notes and not adapters.are_packed:
        notes.append(_QUANTIZATION)
    return replace(description, tree=changed, notes=tuple(notes))


def _check(description: ModelDescription, adapters: Adapters) -> None:
    spec = description.spec
    if not description.has_class_names:
        raise UsageError(
            f"--lora: names of weights do not tell which layers are linear (got {spec}); give the model's config.json, "
            "or module:function."
        )
    if any(not parameter.trainable for _, parameter in description.tree.owned()):
        raise UsageError(
            f"--lora: {spec} has frozen parameters already, and is planned as it is; leave --lora out, or give the "
            "model without its adapters."
        )


def chosen(tree: ModuleNode, adapters: Adapters) -> list[str]:
    """The full names of the layers that get adapters. UsageError where there are none, or not of a given name."""
    names = [node.fqn for node in tree.walk() if _is_linear(node)]
    lasts = dict.fromkeys(name.rpartition(".")[2] for name in names)
    known = f"name some of {first_few(lasts, 12)}." if lasts else "give another model."
    unknown = [one for one in adapters.targets if not any(_is_named(name, one) for name in names)]
    problems = [
        f"--lora-targets: no linear layer has this name (got {one!r}); {near_or(one, lasts, known)}" for one in unknown
    ]
    found = [name for name in names if any(_is_named(name, one) for one in adapters.targets)]
    if not adapters.targets:
        found = _linear_in_blocks(tree)
        problems += [] if found else [f"--lora: no linear layer is in repeated blocks (got no --lora-targets); {known}"]
    if problems:
        raise UsageError("\n".join(problems))
    return found


def _is_named(fqn: str, name: str) -> bool:
    return fqn == name or fqn.endswith(f".{name}")


def _is_linear(node: ModuleNode) -> bool:
    has_matrix = any(parameter.name == "weight" and len(parameter.shape) == 2 for parameter in node.parameters)
    return node.class_name in _LINEAR and has_matrix and node.alias_of is None


def _linear_in_blocks(tree: ModuleNode) -> list[str]:
    """Those inside of repeated blocks: not a head, which peft and bitsandbytes leave out too."""
    return [node.fqn for node in inside_blocks(tree) if _is_linear(node)]


def between_matrices(tree: ModuleNode) -> int:
    """Elements per token between the matrices of all adapters, also of a model that peft has changed."""
    return sum(p.shape[0] for node in tree.walk() if f".{_FIRST}." in node.fqn for p in node.parameters)


def is_beside_adapter(name: str) -> bool:
    """Whether this is a parameter of a layer that has an adapter, which keeps the layer's input."""
    return f".{_LAYER}." in name


@dataclass(frozen=True)
class _Changed:
    """The tree with adapters of `rank` beside the layers `with_adapters`, and the weights of those in `packed` in 4
    bits; all else has the dtype and is frozen."""

    with_adapters: set[str]
    packed: set[str]
    rank: int
    dtype: str

    def node(self, node: ModuleNode) -> ModuleNode:
        own = tuple(self._frozen(node, parameter) for parameter in node.parameters)
        if node.fqn not in self.with_adapters or node.alias_of is not None:
            return replace(node, parameters=own, children=tuple(map(self.node, node.children)))
        return replace(node, parameters=(), children=tuple(self._layer(node, own)))

    def _frozen(self, node: ModuleNode, parameter: Parameter) -> Parameter:
        tied_to = self._renamed(parameter.tied_to)
        dtype = self.dtype if parameter.dtype == "float32" else parameter.dtype
        if parameter.name == "weight" and node.fqn in self.packed:
            return replace(_packed(parameter), tied_to=tied_to)
        return replace(parameter, dtype=dtype, trainable=False, tied_to=tied_to)

    def _renamed(self, name: str | None) -> str | None:
        module, _, last = (name or "").rpartition(".")
        return f"{module}.{_LAYER}.{last}" if module in self.with_adapters else name

    def _layer(self, node: ModuleNode, own: Sequence[Parameter]) -> Iterator[ModuleNode]:
        """The modules that peft puts in a layer's place, with parameters: the layer, and its adapters."""
        weight = next(parameter for parameter in node.parameters if parameter.name == "weight")
        outputs, inputs = weight.shape if node.class_name != "Conv1D" else reversed(weight.shape)
        yield replace(node, fqn=f"{node.fqn}.{_LAYER}", parameters=tuple(own))
        for name, shape in ((_FIRST, (self.rank, inputs)), (_SECOND, (outputs, self.rank))):
            fqn = f"{node.fqn}.{name}"
            matrix = ModuleNode(f"{fqn}.default", "Linear", (Parameter("weight", shape),))
            yield ModuleNode(fqn, "ModuleDict", children=(matrix,), is_container=True)


def _packed(parameter: Parameter) -> Parameter:
    """A frozen weight in 4 bits, with double quantization."""
    count = parameter.numel
    shape = ceil(count / _WEIGHTS_OF_STORAGE), 1
    return Parameter(parameter.name, shape, _STORAGE, False, packed=count, scale_bytes=scale_bytes(count))


def scale_bytes(weights: int, block: int = 64, is_double: bool = True) -> int:
    """Bytes of the scales of weights in 4 bits: a number in fp32 for each block of weights; with double quantization
    one byte, and a number in fp32 for 256 of these (https://arxiv.org/abs/2305.14314, section 3)."""
    scales = ceil(weights / block)
    return scales + 4 * ceil(scales / 256) if is_double else 4 * scales
