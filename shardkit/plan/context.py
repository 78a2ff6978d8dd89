"""Context parallelism in a plan: which groups can share sequences, and what they exchange.

In a layer every rank sends its slice's queries, keys and values for heads of whole sequences, and the output back; in
backward their gradients (`sharding/context_parallel/attention.py`; DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509).
"""

from math import gcd

from shardkit.config.schema import Config
from shardkit.errors import UsageError
from shardkit.model.describe import TransformerFacts
from shardkit.plan.traffic import Collective

KEY = "shardkit.mesh.context_size"


def check(size: int, world_size: int, facts: TransformerFacts | None, seq_len: int | None) -> None:
    """Raises UsageError, with all reasons, where groups of `size` ranks cannot share the sequences."""
    wholes = [
        (world_size, "the number of ranks", "choose a divisor"),
        (seq_len, "a sequence's tokens", "choose a divisor, or a --seq-len to which the script pads"),
        (facts.heads if facts else None, "the attention heads", "choose a divisor"),
    ]
    problems = [
        f"{KEY}: does not divide {what} (got {size} for {whole:,}); {advice}."
        for whole, what, advice in wholes
        if whole and whole % size
    ]
    if problems:
        raise UsageError("\n".join(problems))


def key_value_heads(facts: TransformerFacts, size: int) -> int:
    """Heads of keys and of values that are sent: those that several ranks need are repeated."""
    return facts.key_value_heads * (size // gcd(facts.key_value_heads, size))


def exchange(config: Config, facts: TransformerFacts, tokens: int, itemsize: int, ranks_joined: int) -> Collective:
    """The all-to-alls of one step. `tokens`: of a rank's slices in one micro-batch."""
    size, section = config.shardkit.mesh.context_size, config.shardkit
    attentions = facts.layers if facts.attentions is None else facts.attentions
    times = 2 * attentions
    if config.fsdp.activation_checkpointing:  # what is recomputed is exchanged again, also beside saved products
        times += -(-attentions // section.recompute_every)
    times *= section.gradient_accumulation_steps
    heads = 2 * facts.heads + 2 * key_value_heads(facts, size)
    sent = times * tokens * heads * facts.width_of_head * itemsize
    return Collective("all_to_all", "context", 2 * times, sent, size, min(ranks_joined, size))
