"""The module tree of a GPT from five sizes, without torch.

The architecture is minGPT's: learned positions, blocks of attention and a 4x feed-forward with biases, a final norm,
and an untied head. `gpt_module.py` builds the same model in torch."""

from dataclasses import dataclass, fields
from typing import Any

from shardkit.config.schema import read_bool, read_count
from shardkit.errors import ModelUnknown
from shardkit.model.describe import TransformerFacts
from shardkit.model.tree import ModuleNode, Parameter


@dataclass(frozen=True)
class GptShape:
    """Sizes of a GPT. `vocab` 50257 is GPT-2's byte-pair vocabulary, the usual "50K"."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 50257
    seq: int = 2048
    tied: bool = False


def parse(text: str) -> GptShape:
    """The shape in `layers=2,hidden=64,heads=4[,vocab=..][,seq=..][,tied=true]`; raises ModelUnknown with all
    problems."""
    known = {field.name for field in fields(GptShape)}
    values: dict[str, Any] = {}
    problems: list[str] = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition("=")
        name = name.strip()
        if name not in known:
            problems.append(f"{name}: unknown (known: {', '.join(sorted(known))})")
        elif name in values:
            problems.append(f"{name}: given twice (got {value.strip()!r} too)")
        elif (number := _number(name, value.strip())) is None:
            problems.append(f"{name}: not a whole number from 1 to {_most(name):,} (got {value.strip()!r})")
        else:
            values[name] = number
    problems += [f"{name}: missing" for name in ("layers", "hidden", "heads") if name not in text]
    if not problems and values["hidden"] % values["heads"]:
        problems.append(f"hidden: not a multiple of heads (got {values['hidden']} and {values['heads']})")
    if problems:
        raise ModelUnknown(
            f"--model gpt:{text}: {'; '.join(problems)}; "
            "write gpt:layers=96,hidden=12288,heads=96[,vocab=50257][,seq=2048][,tied=true]."
        )
    return GptShape(**values)


def _number(name: str, text: str) -> int | bool | None:
    """The value of one of the sizes; None where it is none."""
    if name == "tied":
        answer = read_bool(text)
        return answer if isinstance(answer, bool) else None
    value = read_count(text)
    return value if isinstance(value, int) and 0 < value <= _most(name) else None


def _most(name: str) -> int:
    """The largest value: of layers, each of which is made, and of sizes, whose products must stay numbers of bytes."""
    return 10_000 if name == "layers" else 10**9


def facts(shape: GptShape) -> TransformerFacts:
    """The facts that determine its activation memory."""
    return TransformerFacts(
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        key_value_heads=shape.heads,
        feed_forward=4 * shape.hidden,
        vocabulary=shape.vocab,
        seq_len=shape.seq,
        casts_once=True,
    )


def tree(shape: GptShape) -> ModuleNode:
    """The module tree, in the order in which the torch model registers it."""
    blocks = tuple(_block(f"blocks.{index}", shape.hidden) for index in range(shape.layers))
    head = Parameter("weight", (shape.vocab, shape.hidden), tied_to="tokens.weight" if shape.tied else None)
    return ModuleNode(
        "",
        "GPT",
        children=(
            ModuleNode("tokens", "Embedding", (Parameter("weight", (shape.vocab, shape.hidden)),), is_lookup=True),
            ModuleNode("positions", "Embedding", (Parameter("weight", (shape.seq, shape.hidden)),), is_lookup=True),
            ModuleNode("blocks", "ModuleList", children=blocks, is_container=True),
            _norm("norm", shape.hidden),
            ModuleNode("head", "Linear", (head,)),
        ),
    )


def _block(fqn: str, hidden: int) -> ModuleNode:
    attention = ModuleNode(
        f"{fqn}.attention",
        "Attention",
        children=(
            _linear(f"{fqn}.attention.qkv", hidden, 3 * hidden),
            _linear(f"{fqn}.attention.out", hidden, hidden),
        ),
    )
    feed_forward = ModuleNode(
        f"{fqn}.feed_forward",
        "FeedForward",
        children=(
            _linear(f"{fqn}.feed_forward.up", hidden, 4 * hidden),
            _linear(f"{fqn}.feed_forward.down", 4 * hidden, hidden),
        ),
    )
    norms = _norm(f"{fqn}.norm_attention", hidden), _norm(f"{fqn}.norm_feed_forward", hidden)
    return ModuleNode(fqn, "Block", children=(norms[0], attention, norms[1], feed_forward))


def _linear(fqn: str, inputs: int, outputs: int) -> ModuleNode:
    return ModuleNode(fqn, "Linear", (Parameter("weight", (outputs, inputs)), Parameter("bias", (outputs,))))


def _norm(fqn: str, hidden: int) -> ModuleNode:
    return ModuleNode(fqn, "LayerNorm", (Parameter("weight", (hidden,)), Parameter("bias", (hidden,))))
