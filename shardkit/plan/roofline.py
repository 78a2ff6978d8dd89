"""Step time and MFU as a roofline estimate: compute at published fractions of peak FLOPS, links at an assumed fraction
of their bandwidth, from full overlap of the two to none. Always an interval; only a run gives the time."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardkit.config.meaning import eight_bits
from shardkit.config.schema import Config
from shardkit.model.blocks import repeated_classes
from shardkit.model.describe import TransformerFacts
from shardkit.model.tree import ModuleNode, Parameter
from shardkit.plan.closed_form import Estimate
from shardkit.plan.devices import (
    PUBLISHED_NUMEL,
    PUBLISHED_RANKS,
    PUBLISHED_SEQ_LEN,
    PUBLISHED_TOKENS,
    Device,
    Efficiency,
)
from shardkit.plan.traffic import Traffic
from shardkit.plan.unit_sizes import compute_dtype
from shardkit.wording import count_text, counted

# Fraction of a link's bandwidth that NCCL's tests reach for large messages: an assumption, printed with every plan.
LINK_EFFICIENCY = 0.8
# torchtitan, Llama 3.1 8B on 8 and on 128 H100: 1.16 times the tokens with torch.compile.
# https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md
COMPILE_SPEEDUP = 1.16
# The same with Linear layers and all-gathers in fp8, over torch.compile alone; and Llama 3.1 405B's layers in mxfp8.
# https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/quantization/mxfp8.md
EIGHT_BIT_SPEEDUP = {"fp8": 1.28, "mxfp8": 1.20}


@dataclass(frozen=True)
class Work:
    """Floating-point operations per token in forward and backward, without recomputation."""

    forward: float
    backward: float

    @property
    def useful(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step. compute_s: at the best, typical and worst published efficiency; fastest_s: the
    best with communication fully overlapped, except the exchange between ranks that share sequences, exchange_s, for
    which attention waits; slowest_s: the worst without overlap. `tokens`: of one rank."""

    compute_s: tuple[float, float, float]
    inside_s: float
    between_s: float
    exchange_s: float
    model_flops: float
    peak_flops: float
    tokens: int
    efficiency: Efficiency

    @property
    def communication_s(self) -> float:
        """Seconds of communication; links inside and between machines work at the same time."""
        return max(self.inside_s, self.between_s)

    @property
    def fastest_s(self) -> float:
        return max(self.compute_s[0] + self.exchange_s, self.communication_s)

    @property
    def slowest_s(self) -> float:
        return self.compute_s[2] + self.communication_s

    @property
    def best_mfu(self) -> float:
        """Model flops utilization of the fastest step: recomputation does not count as useful."""
        return self.model_flops / (self.fastest_s * self.peak_flops)

    @property
    def worst_mfu(self) -> float:
        return self.model_flops / (self.slowest_s * self.peak_flops)


def step_time(
    tree: ModuleNode,
    facts: TransformerFacts | None,
    estimated: Estimate,
    device: Device,
    batch_size: int | None,
    seq_len: int | None,
) -> StepTime | None:
    """One rank's step time, or None if FLOPs or the device's speed are unknown. Of a sequence that ranks share, each
    computes a part."""
    config, traffic = estimated.config, estimated.traffic
    compute = compute_dtype(tree, config)
    peak = device.flops.get(compute)
    if facts is None or not batch_size or not seq_len or not peak:
        return None
    if tree.once(("why unknown", facts), lambda: why_unknown(tree, facts)):
        return None
    if (traffic.inside_bytes and not device.link_bytes_per_s) or (
        traffic.between_bytes and not device.network_bytes_per_s
    ):
        return None
    section = config.shardkit
    tokens = batch_size * seq_len // section.mesh.context_size * section.gradient_accumulation_steps
    work = tree.once(("work", facts, seq_len), lambda: work_per_token(tree, facts, seq_len))
    recomputes = config.fsdp.activation_checkpointing
    flops = tokens * (work.useful + recomputed_part(config) * work.forward) + estimated.step_flops
    efficiency = device.efficiency(compute, recomputes)
    best = efficiency.high * (COMPILE_SPEEDUP if config.shardkit.compile else 1.0)
    if (kind := eight_bits(config)) and device.multiplies_in(kind) is not False:
        best *= EIGHT_BIT_SPEEDUP[kind]
    inside_s, between_s = _seconds(traffic, device)
    return StepTime(
        compute_s=(flops / (peak * best), flops / (peak * efficiency.typical), flops / (peak * efficiency.low)),
        inside_s=inside_s,
        between_s=between_s,
        exchange_s=max(_seconds(traffic.on_axis("context"), device)),
        model_flops=tokens * work.useful,
        peak_flops=peak,
        tokens=tokens,
        efficiency=efficiency,
    )


def _seconds(traffic: Traffic, device: Device) -> tuple[float, float]:
    """What is sent, on the links inside machines and on those between."""
    inside, between = traffic.inside_bytes, traffic.between_bytes
    return (
        inside / (device.link_bytes_per_s * LINK_EFFICIENCY) if inside else 0.0,
        between / (device.network_bytes_per_s * LINK_EFFICIENCY) if between else 0.0,
    )


def unlike_published(
    tree: ModuleNode, facts: TransformerFacts, batch_size: int, seq_len: int, world_size: int, shared_by: int = 1
) -> str | None:
    """A note on what lies outside the runs that the efficiencies come from, where steps take longer; None if nothing
    does. Small products leave a device idle, and the latency of collectives and kernels is not in the estimate."""
    beyond = []
    if tree.weights < PUBLISHED_NUMEL:
        beyond.append(f"{count_text(tree.weights)} parameters")
    if facts.experts:
        beyond.append("experts")
    if (tokens := batch_size * seq_len // shared_by) < PUBLISHED_TOKENS:
        beyond.append(f"{counted(tokens, 'token')} a micro-batch")
    if seq_len > PUBLISHED_SEQ_LEN:
        beyond.append(f"sequences of {seq_len:,} tokens")
    if world_size > PUBLISHED_RANKS:
        beyond.append(f"{world_size:,} ranks")
    if not beyond:
        return None
    return (
        f"Steps may take longer than estimated ({', '.join(beyond)}): published values are for dense models of "
        f"{count_text(PUBLISHED_NUMEL)} parameters or more, at least {PUBLISHED_TOKENS:,} tokens a micro-batch, "
        f"sequences up to {PUBLISHED_SEQ_LEN:,}, and {PUBLISHED_RANKS} ranks."
    )


def recomputed_part(config: Config) -> float:
    """Fraction of forward that is recomputed; with `recompute: operators`, half of the matrix products."""
    if not config.fsdp.activation_checkpointing:
        return 0.0
    return (0.5 if config.shardkit.recompute == "operators" else 1.0) / config.shardkit.recompute_every


def work_per_token(tree: ModuleNode, facts: TransformerFacts, seq_len: int) -> Work:
    """2 N forward, 2 N for the gradients of what goes in, 2 N for those of the parameters, and attention: 12 layers x
    width x sequence for all three (https://arxiv.org/abs/2204.02311, appendix B: 6 N + 12 L H Q T).

    N excludes tables of embeddings, and counts active experts only; a head tied to a table is a matrix of its own. A
    frozen parameter has no gradient, and below the first trained one no input gradient is computed. Attention scores
    hidden by a causal mask are counted, as in published efficiencies; those outside a sliding window are not.
    """
    forward = inputs = own = 0.0
    is_before = True
    for parameter, share in _shares(tree, facts):
        is_before = is_before and not parameter.trainable
        forward += 2.0 * parameter.weights * share
        inputs += 0.0 if is_before else 2.0 * parameter.weights * share
        own += 2.0 * parameter.weights * share if parameter.trainable else 0.0
    width = facts.heads * facts.width_of_head
    attention = 4.0 * width * _tokens_seen(facts, seq_len)
    return Work(forward + attention, inputs + own + (0.0 if is_before else 2.0 * attention))


def _tokens_seen(facts: TransformerFacts, seq_len: int) -> int:
    """Tokens that one token attends to, summed over all attentions."""
    attentions = facts.layers if facts.attentions is None else facts.attentions
    windowed = 0 if facts.window is None else attentions if facts.windowed is None else facts.windowed
    return windowed * min(seq_len, facts.window or seq_len) + (attentions - windowed) * seq_len


# Modules that are used more than once may be this part of a model without changing its FLOPs by much.
_SMALL = 0.01


def why_unknown(tree: ModuleNode, facts: TransformerFacts) -> str | None:
    """Why the FLOPs of a token do not follow from the parameters, as text; None where they do."""
    if not (facts.experts and facts.active_experts) and any("experts" in node.fqn.split(".") for node in tree.walk()):
        return "how many experts compute a token"
    again = sum(node.numel_with_tied for node in tree.walk() if node.alias_of is not None and not node.is_lookup)
    if again > _SMALL * tree.numel or (facts.layers > 1 and not repeated_classes(tree)):
        return "how often a module that layers share is used"
    return None


def _shares(tree: ModuleNode, facts: TransformerFacts) -> Iterator[tuple[Parameter, float]]:
    """Parameters, and the fraction of each that one token multiplies with: none of a table of embeddings. Modules that
    share a parameter each multiply with it, such as a head with a table; a module with two names is one module."""
    among_experts = facts.active_experts / facts.experts if facts.experts and facts.active_experts else 1.0
    lists = [
        node.fqn
        for node in tree.walk()
        if facts.experts and node.is_container and len(node.children) == facts.experts and node.numel
    ]
    for node in tree.walk():
        if node.alias_of is not None:
            continue
        in_list = any(node.fqn.startswith(f"{fqn}.") for fqn in lists)
        for parameter in node.parameters:
            stacked = facts.experts and len(parameter.shape) == 3 and parameter.shape[0] == facts.experts
            yield parameter, 0.0 if node.is_lookup else among_experts if in_list or stacked else 1.0
