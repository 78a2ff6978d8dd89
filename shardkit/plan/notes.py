"""Notes on a plan: what exceeds a limit, is not counted in full, or is not known."""

from collections.abc import Iterator
from itertools import dropwhile

from shardkit.config.meaning import dtypes, eight_bits, offloads_state
from shardkit.errors import UsageError
from shardkit.model.adapters import is_beside_adapter
from shardkit.model.blocks import inside_blocks
from shardkit.model.cut import shard_dim
from shardkit.model.tree import ModuleNode
from shardkit.plan import context
from shardkit.plan.answer import Change, PlanRequest
from shardkit.plan.closed_form import keeps_on_host, keeps_shards_on_host
from shardkit.plan.roofline import unlike_published, why_unknown
from shardkit.plan.unit_sizes import axes
from shardkit.wording import counted

# Rows of a table of positions that no token uses: 2 in BART and OPT, one more than the padding index in RoBERTa.
_UNUSED_POSITIONS = 8
# Parts of a model below this share of its parameters get no note.
_REMARKABLE = 0.01
_PADDED = 0.1
_EIGHT_BITS = (
    "Linear layers in 8 bits: memory and traffic are those of bf16 (fp8 gathers less); the fastest time includes the "
    "published speed-up of large layers."
)
_OFFLOAD = (
    "Offload to the host makes a step longer than estimated: its copies and the optimizer's step there are not counted."
)
_OFFLOADED_STATE = (
    "A step is longer than estimated: copies of the optimizer's state from host memory and back are not counted."
)
_PACKED = "A step is longer than estimated: each product unpacks its weights from 4 bits, which is not counted."
_EXPERTS = (
    "Experts in one tensor get no adapters in this plan. peft trains some beside them, in models that it knows, with "
    '"all-linear" or names such as gate_proj: several times as many parameters. Name layers of attention alone, here '
    "by --lora-targets and in the script."
)
_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
_POWER_SGD = "power_sgd: traffic is that of uncompressed gradients, as before power_sgd_start_step."


def check_seq_len(request: PlanRequest) -> str | None:
    """A note if sequences exceed the configured maximum; UsageError if the model has no positions for them."""
    facts, given = request.description.facts, request.seq_len
    longest = (facts.seq_len if facts else None) or request.description.longest
    if longest is None or given is None or given <= longest:
        return None
    tables = [
        parameter
        for node in request.description.tree.walk()
        if node.parameters and ("pos" in node.fqn.rpartition(".")[2] or node.fqn.endswith("wpe"))
        for parameter in node.parameters
        if len(parameter.shape) == 2 and longest <= parameter.shape[0] <= longest + _UNUSED_POSITIONS
    ]
    if tables:
        raise UsageError(
            f"--seq-len: the model has positions for {longest:,} tokens (got {given:,}); give at most as many."
        )
    return f"--seq-len {given:,} exceeds the {longest:,} tokens of the model's configuration."


def undivided(request: PlanRequest) -> str | None:
    """A note if more than _REMARKABLE of the parameters cannot be sharded evenly, or shards are padded by more than
    _PADDED."""
    found = axes(request.config, request.world_size, request.ranks_per_machine)
    if found.mode != "fsdp":
        return None
    shards, tree = found.shards, request.description.tree
    few = {
        name: parameter
        for name, parameter in tree.owned()
        if parameter.shape and parameter.shape[0] < shards and not shard_dim(parameter.shape, shards)
    }
    if sum(parameter.numel for parameter in few.values()) < _REMARKABLE * tree.numel:
        return _padded(tree, shards)
    name, parameter = max(few.items(), key=lambda item: item[1].numel)
    return (
        f"{name} {parameter.shape} cannot be sharded evenly over {shards:,} ranks on any dim: {parameter.shape[0]:,} "
        f"ranks hold all of it, and gathered parameters are padded."
    )


def _padded(tree: ModuleNode, shards: int) -> str | None:
    """A note if padding adds much: 16,384 ranks get 2 of 25,600 rows each, or none, and gather 32,768."""
    extra: dict[str, int] = {}
    for name, parameter in tree.owned():
        rows = parameter.shape[0] if parameter.shape else 0
        if rows and not shard_dim(parameter.shape, shards):
            extra[name] = -rows % shards * (parameter.numel // rows)
    if sum(extra.values()) < _PADDED * tree.numel:
        return None
    share, name = sum(extra.values()) / tree.numel, max(extra, key=lambda each: extra[each])
    rows = dict(tree.owned())[name].shape[0]
    return (
        f"Shards on {shards:,} ranks are padded: parameters take, and are gathered as, {share:.0%} more ({name} has "
        f"{rows:,} rows). A number of ranks that divides the rows avoids that, or a hybrid strategy with such a "
        "shardkit.mesh.shard_size."
    )


def frozen_above(request: PlanRequest) -> str | None:
    """A note if the closed form counts activations of more than _REMARKABLE of the parameters as if they were trained:
    of frozen ones in blocks that a gradient passes, but for layers with adapters, which keep the same."""
    if request.description.facts is None or not request.batch_size:
        return None
    in_blocks = ((node.name_of(p), p) for node in inside_blocks(request.description.tree) for p in node.parameters)
    above = dropwhile(lambda parameter: not parameter[1].trainable, in_blocks)
    frozen = sum(p.weights for name, p in above if not (p.trainable or is_beside_adapter(name)))
    if frozen < max(1, _REMARKABLE * request.description.numel):
        return None
    return (
        "Frozen layers that a gradient passes: activations are counted as if these were trained; blocks with adapters "
        "in a few layers save up to a third less, which --simulate counts."
    )


def frozen_in_fp32(request: PlanRequest) -> str | None:
    """A note where most of the memory for parameters is frozen ones in fp32, of which 16 bits are used."""
    compute = dtypes(request.config).param
    frozen = [p.weights for _, p in request.description.tree.owned() if not p.trainable and p.dtype == "float32"]
    if compute not in ("bf16", "fp16") or sum(frozen) < request.description.numel / 2:
        return None
    return f"Frozen weights are in fp32; loaded in {compute}, in which they compute, they take half as much."


def outputs_in_16_bits(request: PlanRequest) -> str | None:
    """A note where the closed form counts logits in fp32 that are in 16 bits."""
    facts, dtype = request.description.facts, request.config.shardkit.precision.output_dtype
    if facts is None or not facts.vocabulary or not request.batch_size or dtype not in ("bf16", "fp16"):
        return None
    return (
        f"shardkit.precision.output_dtype: logits in {dtype} are counted as if they were in fp32; a loss that computes "
        "in their dtype needs half as much, which --simulate counts."
    )


def notes_on(request: PlanRequest) -> Iterator[str]:
    """Notes on settings that the plan does not count in full, or that the device does not support."""
    config, device = request.config, request.device
    if device.is_tpu and not request.is_on_tpu:
        yield (
            f"{device.name}: on TPUs shardkit trains with PyTorch/XLA, and this plan is for distributed_type "
            f"{config.distributed_type.value}; plan with --set distributed_type=XLA --set xla=true."
        )
    kind = eight_bits(config)
    if kind and device.multiplies_in(kind) is False:
        yield f"{device.name} does not compute in {kind}, so a run is refused; plan with --set mixed_precision=bf16."
    elif kind:
        yield _EIGHT_BITS
    if config.shardkit.ddp.comm_hook == "power_sgd":
        yield _POWER_SGD
    if request.shared_by > 1:
        yield _of_shared_sequences(request)
    if request.adapters and request.adapters.are_packed:
        yield from _few_packed(request)
    if request.adapters and _may_train_experts(request, request.adapters.targets):
        yield _EXPERTS


def _may_train_experts(request: PlanRequest, targets: tuple[str, ...]) -> bool:
    """Whether peft may train adapters beside the experts of a tensor, which it takes for layers of these names."""
    names = {name.rpartition(".")[2] for name in targets}
    in_blocks = [p for node in inside_blocks(request.description.tree) for p in node.parameters]
    stacked = sum(p.weights for p in in_blocks if len(p.shape) == 3)
    return stacked > _REMARKABLE * request.description.numel and not (names and names.isdisjoint(_OF_EXPERTS))


def _few_packed(request: PlanRequest) -> Iterator[str]:
    """A note where most weights are in no linear layer of a block, which alone are packed."""
    numel = request.description.numel
    packed = sum(parameter.packed for _, parameter in request.description.tree.owned())
    if packed < numel / 2:
        yield (
            f"{packed / numel:.0%} of the weights have 4 bits: those of linear layers in blocks. Experts in one tensor "
            "and tables of embeddings are not packed."
        )


def note_on_shared_sequences(changes: tuple[Change, ...]) -> str | None:
    """What else to do where one of the changes is that ranks share sequences."""
    if not any(context.KEY in change.text for change in changes):
        return None
    return (
        f"{context.KEY}: the script's forward and loss run inside of accelerator.context_parallel. A step then has "
        "fewer sequences; shardkit.gradient_accumulation_steps makes up for it."
    )


def _of_shared_sequences(request: PlanRequest) -> str:
    """What ranks that share sequences compute, and exchange."""
    ranks, facts = request.shared_by, request.description.facts
    text = f"{ranks} ranks share each sequence, inside of accelerator.context_parallel in the script"
    if facts is None or not request.rank_tokens or not request.step_sequences:
        missing = "the model's shape is unknown" if facts is None else "add --batch-size"
        return f"{text}; what they exchange in attention is not in the traffic: {missing}."
    tokens, sequences = counted(request.rank_tokens, "token"), counted(request.step_sequences, "sequence")
    return (
        f"{text}: each computes {tokens} of a micro-batch, and a step has {sequences} over all ranks. Attention waits "
        "for what they exchange, also in the fastest time."
    )


def note_on_time(request: PlanRequest) -> str | None:
    """Why there is no estimate of the time, or why it may be too short."""
    description, batch_size = request.description, request.batch_size
    facts, seq_len = description.facts, request.sequence_tokens
    if facts is None or not batch_size or not seq_len:
        return None
    if reason := why_unknown(description.tree, facts):
        return f"No time is estimated: the model's code decides {reason}."
    if not request.device.flops:
        return None
    unlike = unlike_published(description.tree, facts, batch_size, seq_len, request.world_size, request.shared_by)
    offloads = keeps_on_host(request.config) or keeps_shards_on_host(request.config)
    state = _OFFLOADED_STATE if offloads_state(request.config) else None
    packed = _PACKED if request.adapters and request.adapters.are_packed else None
    return " ".join(filter(None, [unlike, _OFFLOAD if offloads else None, state, packed])) or None
