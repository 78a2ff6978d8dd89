"""Activation memory of a Transformer by formula: what autograd keeps from forward for backward.

The count follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198), section 4, without dropout masks and with attention that keeps no score matrix
(scaled_dot_product_attention's flash and memory-efficient kernels; https://arxiv.org/abs/2205.14135).
"""

from dataclasses import dataclass

from shardkit.model.describe import TransformerFacts

_FP32_BYTES = 4


@dataclass(frozen=True)
class Activations:
    """Bytes that one micro-batch keeps on one rank.

    block_bytes: of one block, everything; block_input_bytes: its input only (all that is kept of a block whose
    activations are recomputed); logits_bytes: logits, their log-softmax and the gradients of both, at the loss;
    output_bytes: the logits alone, alive as long as the script holds the model's output.
    """

    block_bytes: int = 0
    block_input_bytes: int = 0
    logits_bytes: int = 0
    output_bytes: int = 0


def of_transformer(facts: TransformerFacts, batch_size: int, seq_len: int, itemsize: int) -> Activations:
    """Activations of one micro-batch of `batch_size` sequences; `itemsize` is the compute dtype's."""
    tokens = batch_size * seq_len
    vocabulary = facts.vocabulary or 0
    # Under a lower compute dtype the outputs are cast up, and the loss is computed in fp32.
    return Activations(
        block_bytes=tokens * (block_numel(facts) * itemsize + facts.heads * _FP32_BYTES),
        block_input_bytes=tokens * facts.hidden * itemsize,
        logits_bytes=tokens * vocabulary * 4 * _FP32_BYTES,
        output_bytes=tokens * vocabulary * _FP32_BYTES,
    )


def block_numel(facts: TransformerFacts) -> int:
    """Elements that one block keeps for each token; heads x 4 bytes of softmax statistics come on top.

    hidden, 6 times: input, first norm's output, queries, attention's output, second norm's input and output; keys and
    values once each; of the feed-forward, its hidden layer before and after the activation function, and where it
    is gated, the gate and the product as well.
    """
    keys_and_values = 2 * facts.hidden * facts.key_value_heads // facts.heads
    return 6 * facts.hidden + keys_and_values + (4 if facts.is_gated else 2) * facts.feed_forward
