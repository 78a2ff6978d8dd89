"""Step time and MFU as a roofline estimate: arithmetic and links at a stated part of their peak, between no overlap and
full overlap of the two. An estimate, to compare settings with; only a run tells the time."""

from dataclasses import dataclass

from shardkit.config.meaning import dtypes
from shardkit.config.schema import Config
from shardkit.model.describe import TransformerFacts
from shardkit.model.tree import ModuleNode
from shardkit.plan.devices import Device
from shardkit.plan.traffic import Traffic

# What well-tuned training reaches of the peaks. 0.6 of peak in matrix products is around the best published MFU of
# large dense models (PaLM 0.46, https://arxiv.org/abs/2204.02311, table 3) plus what is not matrix products; 0.8 of a
# link is what NCCL's own tests reach for large messages. Assumptions, printed with every answer.
COMPUTE_EFFICIENCY = 0.6
LINK_EFFICIENCY = 0.8


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: fastest_s with communication hidden behind compute, slowest_s with none hidden."""

    compute_s: float
    inside_s: float
    between_s: float
    model_flops: float
    peak_flops: float

    @property
    def communication_s(self) -> float:
        """Both kinds of links work at the same time."""
        return max(self.inside_s, self.between_s)

    @property
    def fastest_s(self) -> float:
        return max(self.compute_s, self.communication_s)

    @property
    def slowest_s(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def best_mfu(self) -> float:
        """Model flops utilization when everything overlaps: recomputation does not count as useful."""
        return self.model_flops / (self.fastest_s * self.peak_flops)

    @property
    def worst_mfu(self) -> float:
        return self.model_flops / (self.slowest_s * self.peak_flops)


def step_time(
    tree: ModuleNode,
    facts: TransformerFacts | None,
    config: Config,
    traffic: Traffic,
    device: Device,
    batch_size: int | None,
    seq_len: int | None,
) -> StepTime | None:
    """One rank's step, or None where the work or the device's speed is not known."""
    seq_len = seq_len or (facts.seq_len if facts else None)
    peak = device.flops.get(dtypes(config).param or "fp32")
    if facts is None or not batch_size or not seq_len or not peak:
        return None
    if (traffic.inside_bytes and not device.link_bytes_per_s) or (
        traffic.between_bytes and not device.network_bytes_per_s
    ):
        return None
    tokens = batch_size * seq_len * config.shardkit.gradient_accumulation_steps
    flops = tokens * flops_per_token(tree, facts, seq_len)
    recompute = 4 / 3 if config.fsdp.activation_checkpointing else 1.0
    inside = traffic.inside_bytes / (device.link_bytes_per_s * LINK_EFFICIENCY) if traffic.inside_bytes else 0.0
    between = traffic.between_bytes / (device.network_bytes_per_s * LINK_EFFICIENCY) if traffic.between_bytes else 0.0
    return StepTime(flops * recompute / (peak * COMPUTE_EFFICIENCY), inside, between, flops, peak)


def flops_per_token(tree: ModuleNode, facts: TransformerFacts, seq_len: int) -> float:
    """6 N + 12 layers x hidden x sequence, forward and backward (https://arxiv.org/abs/2204.02311, appendix B).

    N leaves out embedding tables, which are looked up, unless they serve as the head as well.
    """
    tied = {p.tied_to for node in tree.walk() for p in node.parameters if p.tied_to}
    lookups = sum(
        p.numel
        for node in tree.walk()
        if node.class_name == "Embedding"
        for p in node.parameters
        if p.tied_to is None and f"{node.fqn}.{p.name}" not in tied
    )
    return 6.0 * (tree.numel - lookups) + 12.0 * facts.layers * facts.hidden * seq_len
