"""Input and result of `shardkit plan`, as plain values. Report, JSON and chart are made from an Answer; simulated
memory is stored next to the closed form's (`Row.simulated`)."""

from dataclasses import dataclass, replace
from pathlib import Path

from shardkit.config import xla
from shardkit.config.meaning import dtypes, with_strategy
from shardkit.config.schema import Config, ShardingStrategy
from shardkit.errors import UsageError
from shardkit.model.adapters import Adapters, adapted
from shardkit.model.cut import as_trained
from shardkit.model.describe import ModelDescription
from shardkit.plan.activations import Loss
from shardkit.plan.averages import Ema
from shardkit.plan.closed_form import Estimate, estimate
from shardkit.plan.devices import Device
from shardkit.plan.failures import MACHINE_WRITES, Saves, saves
from shardkit.plan.rank_memory import RankMemory
from shardkit.plan.roofline import StepTime, step_time
from shardkit.plan.unit_sizes import itemsize
from shardkit.plan.whole_run import RunEstimate, WholeRun, run_estimate

# Longer sequences than those of most training runs; models take up to a million tokens.
USUAL_TOKENS = 8192


@dataclass(frozen=True)
class PlanRequest:
    """A model, a configuration, and the machines to plan for. `batch_size`: sequences per micro-batch and rank, or
    group of ranks that share each. `ranks_per_machine`: of a full machine; a world may have fewer ranks.
    `ranks_joined`: those that the device's fast links join, of which a rack or a pod has several machines'.
    `full_machine`: ranks per machine of other numbers of ranks, where these have no machines of their own as the
    request's may have, whose number does not divide evenly; None: `ranks_per_machine`.

    `is_on_tpu`: the configuration was translated from PyTorch/XLA (`tpu.as_planned`). `own_optimizer`, `own_batch`: the
    script's, as module:function, which a simulation uses in place of `optimizer` and of `batch_size` x `seq_len`.
    `folder`: where relative paths and modules are found; None: the current one.
    """

    description: ModelDescription
    config: Config
    world_size: int
    ranks_per_machine: int
    device: Device
    full_machine: int | None = None
    optimizer: str = "adamw"
    batch_size: int | None = None
    seq_len: int | None = None
    loss: Loss = Loss.HELD
    ema: Ema = Ema.NO
    is_on_tpu: bool = False
    own_optimizer: str | None = None
    own_batch: str | None = None
    folder: Path | None = None
    run: WholeRun | None = None
    """The whole run, where its time is asked for."""
    adapters: Adapters | None = None
    """Those in the description, where only adapters are trained; a simulation adds them to the model."""
    whole_model: ModelDescription | None = None
    """The model without adapters, where it has some."""
    host_bytes: int | None = None
    """Host memory of a machine, where that is given; else the device's is taken."""
    storage_bytes_per_s: float | None = None
    """What storage writes, from all machines, where that is given."""

    def with_config(self, config: Config) -> "PlanRequest":
        """The request under another configuration; frozen weights beside adapters have its compute dtype."""
        changed = replace(self, config=config)
        return changed if self.adapters is None else changed.with_adapters(self.adapters)

    def with_world(self, world_size: int) -> "PlanRequest":
        """The request for another number of ranks, on full machines, or on ones that divide them evenly."""
        full = self.full_machine or self.ranks_per_machine
        per_machine = full if world_size <= full else evenly(world_size, full)
        return replace(self, world_size=world_size, ranks_per_machine=per_machine)

    def with_adapters(self, adapters: Adapters) -> "PlanRequest":
        """The request with adapters in place of those it has; the model's own weights are frozen, in the dtype in which
        they compute. UsageError where the model cannot have them."""
        if adapters.are_packed and self.is_on_tpu:
            raise UsageError("--load-in-4bit: bitsandbytes does not run on TPUs (got one); leave it out.")
        adapters = replace(adapters, compute=dtypes(self.config).param or "fp32")
        if adapters == self.adapters:
            return self
        whole = self.whole_model or self.description
        return replace(self, description=adapted(whole, adapters), adapters=adapters, whole_model=whole)

    @property
    def ranks_joined(self) -> int:
        return max(self.ranks_per_machine, self.device.joined)

    @property
    def ranks_of_a_machine(self) -> int:
        return min(self.ranks_per_machine, self.world_size)

    @property
    def rank_device(self) -> Device:
        """The device, with one rank's part of the host memory."""
        if self.host_bytes is None:
            return self.device
        return replace(self.device, host_bytes=self.host_bytes // self.ranks_of_a_machine)

    @property
    def machines(self) -> int:
        return -(-self.world_size // self.ranks_per_machine)

    @property
    def written_per_s(self) -> float:
        """Bytes a second that all machines write, as given or assumed."""
        return self.storage_bytes_per_s or MACHINE_WRITES * self.machines

    @property
    def sequence_tokens(self) -> int | None:
        """Tokens of a sequence: as given, else the model's maximum; None if that is unknown."""
        facts = self.description.facts
        return self.seq_len or (facts.seq_len if facts else None)

    @property
    def shared_by(self) -> int:
        """Ranks that share each sequence."""
        return self.config.shardkit.mesh.context_size

    @property
    def rank_tokens(self) -> int | None:
        """Tokens of a rank in a micro-batch, where they are known."""
        tokens = self.sequence_tokens
        return self.batch_size * tokens // self.shared_by if self.batch_size and tokens else None

    @property
    def step_sequences(self) -> int | None:
        """Sequences of one optimizer step, over all ranks; None where the batch is unknown."""
        if not self.batch_size:
            return None
        steps = self.config.shardkit.gradient_accumulation_steps
        return self.batch_size * self.world_size // self.shared_by * steps

    @property
    def has_unusual_sequences(self) -> bool:
        """Whether sequences are longer than those of most runs only because that is the model's maximum."""
        return bool(self.batch_size and not self.seq_len and (self.sequence_tokens or 0) > USUAL_TOKENS)


def evenly(world_size: int, per_machine: int) -> int:
    """The most ranks per machine, of so many at most, that all machines of the world can have."""
    return next(each for each in range(min(per_machine, world_size), 0, -1) if world_size % each == 0)


@dataclass(frozen=True)
class Row:
    """One strategy: memory, traffic, and step time if it can be estimated.

    `simulated`, if present, replaces the closed form's memory.
    """

    strategy: ShardingStrategy
    estimate: Estimate
    fits: bool | None
    time: StepTime | None
    simulated: RankMemory | None = None
    run: RunEstimate | None = None
    """Of the whole run, where that is asked for and the time of a step is known."""

    @property
    def label(self) -> str:
        """`1 FULL_SHARD`."""
        return f"{self.strategy.number} {self.strategy.value}"

    @property
    def memory(self) -> RankMemory:
        return self.simulated or self.estimate.memory


@dataclass(frozen=True)
class Change:
    """A possible change and its effect on the peak. `text`: settings under their keys, or flags of plan.

    Peak and saving are closed-form values, before and after the change; `host_bytes`: what is then in host memory.
    `fits` is None if the configuration itself was simulated: simulated and closed-form values are not mixed.
    """

    text: str
    peak_bytes: int
    saved_bytes: int
    fits: bool | None
    host_bytes: int = 0


@dataclass(frozen=True)
class SearchResult:
    """The answer to --find, as text and as a number or name; `value` is None if nothing fits."""

    question: str
    value: int | str | None
    text: str


@dataclass(frozen=True)
class Answer:
    """The result of `shardkit plan`. `rows`: the possible strategies in order; `chosen`: the configured one."""

    request: PlanRequest
    rows: tuple[Row, ...]
    chosen: ShardingStrategy
    suggested: ShardingStrategy | None
    reason: str
    changes: tuple[Change, ...] = ()
    finding: SearchResult | None = None
    notes: tuple[str, ...] = ()

    @property
    def chosen_row(self) -> Row:
        """The row of the configuration's strategy."""
        return next(row for row in self.rows if row.strategy is self.chosen)


def row(request: PlanRequest, strategy: ShardingStrategy | None = None) -> Row:
    """One strategy's row; None: the configured strategy."""
    config = request.config if strategy is None else with_strategy(request.config, strategy)
    tree, facts = request.description.tree, request.description.facts
    found = estimate(
        tree,
        config,
        world_size=request.world_size,
        ranks_per_machine=request.ranks_per_machine,
        ranks_joined=request.ranks_joined,
        optimizer=request.optimizer,
        facts=facts,
        batch_size=request.batch_size,
        seq_len=request.seq_len,
        loss=request.loss,
        ema=request.ema,
    )
    time = step_time(tree, facts, found, request.device, request.batch_size, request.sequence_tokens)
    run = None
    if request.run is not None and time is not None:
        run = run_estimate(request.run, time, request.world_size, _saves(request, found))
    return Row(config.fsdp.sharding_strategy, found, fits(request.rank_device, found.memory), time, run=run)


def fits(device: Device, memory: RankMemory) -> bool | None:
    """Whether a rank fits, on its device and in its part of the host memory; None if unknown. If activations are
    missing, the result is False or None, never True."""
    found = device.fits(memory.peak.total, memory.host.total)
    return None if found and not memory.activations_known else found


def checkpoint_bytes(request: PlanRequest, found: Estimate) -> int | None:
    """What `save_state` writes of parameters and optimizer state, over all ranks; None where weight averages or an
    optimizer of one's own are not counted as the script saves them."""
    if request.ema is not Ema.NO or request.own_optimizer:
        return None
    first, host = found.memory.timeline[0].memory, found.memory.host
    # Without what the shards of a rank are filled up by: the state has the parameters' share of it.
    tree = as_trained(request.description.tree, dtypes(found.config).param)
    parameters = sum(parameter.numel * itemsize(parameter.dtype) for _, parameter in tree.owned())
    of_rank = first.parameters + host.parameters
    return parameters * (of_rank + first.optimizer_state + host.optimizer_state) // max(of_rank, 1)


def _saves(request: PlanRequest, found: Estimate) -> Saves | None:
    size = checkpoint_bytes(request, found)
    is_blocking = request.config.shardkit.checkpoint.blocking
    return None if size is None else saves(size, found.axes.shards, request.written_per_s, is_blocking)


def yes_no(fits: bool | None) -> str:
    """The cell of a table that says whether a rank fits."""
    return "-" if fits is None else "yes" if fits else "NO"


def retries(device: Device, memory: RankMemory) -> bool | None:
    """Whether active memory fits but reserved memory does not: the allocator then frees segments and retries, which is
    slower. None if either is unknown."""
    if memory.reserved_bytes is None or not device.has_caching_allocator:
        return None
    alive, reserved = fits(device, memory), device.fits(memory.reserved_bytes)
    return None if alive is None or reserved is None else alive and not reserved


def possible_strategies(request: PlanRequest) -> list[ShardingStrategy]:
    """All five; the hybrid ones on several machines or where configured; on TPUs those that PyTorch/XLA has."""
    has_mesh = bool(request.config.shardkit.mesh.shard_size or request.config.shardkit.mesh.replicate_size)
    several = request.machines > 1 and request.world_size % request.ranks_per_machine == 0
    configured = configured_strategy(request.config)
    known = xla.STRATEGIES if request.is_on_tpu else tuple(ShardingStrategy)
    return [s for s in known if not s.is_hybrid or several or has_mesh or s is configured]


def configured_strategy(config: Config) -> ShardingStrategy:
    """The strategy of the configuration; NO_SHARD for DDP and for a single process."""
    return ShardingStrategy.NO_SHARD if config.mode in ("ddp", "single") else config.fsdp.sharding_strategy
