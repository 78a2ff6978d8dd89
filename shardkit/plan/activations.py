"""Activation memory of a Transformer by formula: what autograd saves in forward for backward.

The count follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198), section 4, without dropout masks and with attention that keeps no score matrix
(scaled_dot_product_attention's flash and memory-efficient kernels; https://arxiv.org/abs/2205.14135).
"""

from dataclasses import dataclass
from enum import Enum

from shardkit.model.describe import TransformerFacts
from shardkit.plan.context import key_value_heads

_FP32_BYTES = 4


class Loss(str, Enum):
    """What the script does with the logits: holds the model's output until the end of the step, drops it before
    backward, or never materializes all of them (a fused or chunked loss)."""

    HELD = "held"
    DROPPED = "dropped"
    FUSED = "fused"


# Bytes per logit at the loss. All are fp32: the logits themselves (where the script holds them), their log-softmax, and
# the gradients of both. A fused loss keeps the 16-bit gradient and works in fp32: 6 bytes, and less where it is
# computed in chunks (https://arxiv.org/abs/2410.10989, section 3.2; https://arxiv.org/abs/2411.09009).
LOSS_BYTES = {Loss.HELD: 16, Loss.DROPPED: 12, Loss.FUSED: 6}
LOSS_TEXTS = {
    Loss.HELD: "Loss: logits are held through the step (16 bytes per logit); --loss dropped or fused needs less.",
    Loss.DROPPED: "Loss: logits are dropped before backward (12 bytes per logit).",
    Loss.FUSED: "Loss: fused or computed in chunks (at most 6 bytes per logit).",
}


@dataclass(frozen=True)
class Activations:
    """Bytes that one micro-batch saves on one rank, and the rank's tokens in it.

    block_bytes: all of one block; block_input_bytes: its input only (what activation checkpointing saves);
    logits_bytes: logits, log-softmax and gradients at the loss; output_bytes: the logits alone, if the script holds the
    model's output. `gaps`: what is not counted, as text; with any, the sum is a lower bound.
    """

    block_bytes: int = 0
    block_input_bytes: int = 0
    logits_bytes: int = 0
    output_bytes: int = 0
    gaps: tuple[str, ...] = ()
    tokens: int = 0


@dataclass(frozen=True)
class Trained:
    """What of a block is trained, as far as it determines what the block saves: `adapter_numel` is what adapters have
    between their two matrices, in elements per token; `norms`: whether weights of norms are. All linear layers count
    as trained, or as ones with an adapter, which saves the same."""

    adapter_numel: int = 0
    norms: bool = True


ALL = Trained()


def of_transformer(
    facts: TransformerFacts,
    batch_size: int,
    seq_len: int,
    itemsize: int,
    loss: Loss = Loss.HELD,
    is_autocast: bool = False,
    shared_by: int = 1,
    trained: Trained = ALL,
) -> Activations:
    """Activations of one micro-batch of `batch_size` sequences, each on `shared_by` ranks; `itemsize` is the compute
    dtype's.

    Under autocast the residual stream and the inputs of norms stay in fp32. Matrix products that share an input each
    cast it separately, which is not counted.
    """
    tokens = batch_size * seq_len // shared_by
    casts_once = facts.casts_once and not trained.adapter_numel  # an adapter casts its layer's input again
    vocabulary = facts.vocabulary or 0
    stream = _FP32_BYTES if is_autocast else itemsize
    # Under a lower compute dtype the outputs are cast up, and the loss is computed in fp32.
    exchanged = 0 if shared_by == 1 else exchanged_numel(facts, shared_by) * itemsize
    of_token = block_token_bytes(facts, itemsize, trained) + exchanged + 2 * facts.hidden * (stream - itemsize)
    return Activations(
        block_bytes=tokens * of_token,
        block_input_bytes=tokens * facts.hidden * stream,
        logits_bytes=tokens * vocabulary * LOSS_BYTES[loss],
        output_bytes=tokens * vocabulary * _FP32_BYTES if loss is Loss.HELD else 0,
        gaps=(*facts.gaps, *(("autocast's copies",) if is_autocast and not casts_once else ())),
        tokens=tokens,
    )


def exchanged_numel(facts: TransformerFacts, shared_by: int) -> int:
    """Elements that one block saves per token in addition where ranks share sequences: attention's output is there for
    whole sequences and for the slice, and repeated keys and values."""
    repeated = 2 * (key_value_heads(facts, shared_by) - facts.key_value_heads)
    return facts.width_of_head * (facts.heads + repeated)


def block_token_bytes(facts: TransformerFacts, itemsize: int, trained: Trained = ALL) -> int:
    """Bytes that one block saves per token: its elements, softmax statistics, fp32 copies of norms, and what is between
    the matrices of adapters."""
    size = (block_numel(facts) + trained.adapter_numel) * itemsize + facts.heads * _FP32_BYTES
    normalized = itemsize if trained.norms else 0  # what a norm has made, which the gradient of its weight needs
    if facts.normalizes_in_fp32:  # the input in fp32, one factor a row (RMSNorm as Transformers writes it), twice
        size += 2 * (facts.hidden * (_FP32_BYTES + normalized - itemsize) + _FP32_BYTES)
    if facts.normalizes_heads:  # the same of every query and key, and what was normalized
        heads = facts.heads + facts.key_value_heads
        size += heads * (facts.width_of_head * (_FP32_BYTES + normalized) + _FP32_BYTES)
    return size


def block_numel(facts: TransformerFacts) -> int:
    """Elements that one block saves per token.

    4 x hidden: input, first norm's output, second norm's input and output; heads x head_dim each: queries, attention's
    output; key-value heads x head_dim each: keys, values; feed-forward width each: its hidden layer before and after
    the activation function (only after, if backward needs no more), and, if gated, the gate and the product.
    """
    attention = 2 * facts.width_of_head * (facts.heads + facts.key_value_heads)
    inner = (4 if facts.is_gated else 2) - (0 if facts.keeps_function_input else 1)
    return 4 * facts.hidden + attention + inner * facts.feed_forward
