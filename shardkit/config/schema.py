"""The schema of the configuration. The YAML has Accelerate's keys and nesting; here the fields have clean names.

The string under a field is its only description: the docs page, the wizard's help and the comment in the YAML are made
from it (`config/descriptions.py` reads it). A field's `alias` is its key in the YAML. This module reads no file,
hardware or environment; checks across fields are in `config/checks.py`.
"""

from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from shardkit.config.host_port import without_brackets
from shardkit.digits import UNITS, count_in, number_in

MixedPrecision = Literal["no", "fp16", "bf16", "fp8", "mxfp8"]
Dtype = Literal["fp32", "bf16", "fp16"]
CommHook = Literal["no", "fp16", "bf16", "power_sgd"]
RendezvousBackend = Literal["static", "c10d", "etcd-v2", "etcd"]


class DistributedType(str, Enum):
    """How ranks share the work."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"
    XLA = "XLA"


class ShardingStrategy(str, Enum):
    """What is sharded over the ranks; in files also by number, 1 to 5 in this order."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"

    @property
    def number(self) -> int:
        return list(ShardingStrategy).index(self) + 1

    @property
    def is_hybrid(self) -> bool:
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether parameters are freed between forward and backward (ZeRO-3) or kept (ZeRO-2)."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class WrapPolicy(str, Enum):
    """How a model is cut into FSDP units."""

    TRANSFORMER_BASED_WRAP = "TRANSFORMER_BASED_WRAP"
    SIZE_BASED_WRAP = "SIZE_BASED_WRAP"
    NO_WRAP = "NO_WRAP"


class BackwardPrefetch(str, Enum):
    """When the next unit's parameters are gathered in backward."""

    BACKWARD_PRE = "BACKWARD_PRE"
    BACKWARD_POST = "BACKWARD_POST"
    NO_PREFETCH = "NO_PREFETCH"


class StateDictType(str, Enum):
    """How a training state is written."""

    SHARDED_STATE_DICT = "SHARDED_STATE_DICT"
    FULL_STATE_DICT = "FULL_STATE_DICT"


_YES = {"yes", "true", "on", "y", "1"}
_NO = {"no", "false", "off", "n", "0"}


def read_bool(value: Any) -> Any:
    """yes/no, true/false, on/off, y/n, 1/0 in any case; other values are rejected by pydantic."""
    if isinstance(value, str):
        word = value.strip().lower()
        return True if word in _YES else False if word in _NO else value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    return value


def read_count(value: Any) -> Any:
    """100000000, "1e8", "100M", "100_000_000", "100,000,000" -> 100000000; other values are rejected by pydantic."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    count = count_in(value) if isinstance(value, str) else None
    return value if count is None else count


def read_seconds(value: Any) -> Any:
    """600, "600", "1e3" -> seconds. Units are rejected by pydantic: `10m` is not ten million seconds."""
    is_unit = isinstance(value, str) and value.strip()[-1:].lower() in UNITS
    return value if is_unit else read_count(value)


def read_precision(value: Any) -> Any:
    """YAML reads an unquoted `no` as False; fp32 and none mean the same."""
    if value is False or (isinstance(value, str) and value.strip().lower() in {"no", "none", "fp32", "false", "off"}):
        return "no"
    return value.strip().lower() if isinstance(value, str) else value


# Other names in Accelerate's files: of DDP on any accelerator, of which the ranks take what their machine has; older
# ones of XLA, and of one process on a Mac's GPU.
_DISTRIBUTED_TYPES = {
    **dict.fromkeys(("MULTI_XPU", "MULTI_HPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"), "MULTI_GPU"),
    **{"TPU": "XLA", "MPS": "NO", "FALSE": "NO"},
}


def read_distributed_type(value: Any) -> Any:
    """Any case, and the names in `_DISTRIBUTED_TYPES`; YAML reads an unquoted `NO` as False."""
    if value is False or value is None:
        return "NO"
    if not isinstance(value, str):
        return value
    name = value.strip().upper()
    return _DISTRIBUTED_TYPES.get(name, name)


def read_strategy(value: Any) -> Any:
    """1 to 5 or a name, in any case, with spaces, dashes or underscores."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and (number := number_in(value)) is not None:
        value = number
    if isinstance(value, int):
        names = list(ShardingStrategy)
        return names[value - 1] if 1 <= value <= len(names) else value
    return read_name(value)


def read_name(value: Any) -> Any:
    """A name of an enumeration, in any case, with spaces or dashes for underscores."""
    if isinstance(value, str):
        return value.strip().upper().replace("-", "_").replace(" ", "_")
    return value


def read_prefetch(value: Any) -> Any:
    """As `read_name`; none, no, false and an absent value mean NO_PREFETCH."""
    if value is None or value is False:
        return BackwardPrefetch.NO_PREFETCH
    name = read_name(value)
    return BackwardPrefetch.NO_PREFETCH if name in ("NONE", "NO", "FALSE") else name


def read_names(value: Any) -> Any:
    """Class names as a list, or as one comma-separated string; surrounding spaces are stripped."""
    lines = read_lines(value)
    if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
        return [name.strip() for line in lines for name in line.split(",") if name.strip()]
    return lines


def read_lines(value: Any) -> Any:
    """A list of strings without empty ones; a single string becomes a list of one."""
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)) and all(isinstance(line, str) for line in value):
        return [line for line in value if line.strip()]
    return value


def read_text(value: Any) -> Any:
    """An empty string means None."""
    return (value.strip() or None) if isinstance(value, str) else value


def read_host(value: Any) -> Any:
    """As `read_text`; an IPv6 address also in brackets, as in URLs."""
    text = read_text(value)
    return without_brackets(text) if isinstance(text, str) else text


def read_word(value: Any) -> Any:
    """A lower-case name with dashes, read in any case, with spaces or underscores for dashes."""
    return value.strip().lower().replace("_", "-").replace(" ", "-") if isinstance(value, str) else value


def read_member(value: Any) -> Any:
    """A lower-case name with underscores, read in any case; YAML reads an unquoted `no` as False."""
    if value is False or value is None:
        return "no"
    if not isinstance(value, str):
        return value
    name = value.strip().lower().replace("-", "_").replace(" ", "_")
    return {"powersgd": "power_sgd", "none": "no", "false": "no"}.get(name, name)


def read_numbers(value: Any) -> Any:
    """Comma-separated numbers, also from a list or a single number."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, (list, tuple)):
        return ",".join(str(number).strip() for number in value) or None
    return read_text(value)


Bool = Annotated[bool, BeforeValidator(read_bool)]
# Beyond these, arithmetic in 64 bits overflows: of sizes in bytes, and of times in nanoseconds.
MOST, _LONGEST_S = 10**15, 10**9
SEEDS = 2**64
Count = Annotated[int, BeforeValidator(read_count), Field(le=MOST)]
Seconds = Annotated[float, BeforeValidator(read_seconds), Field(le=_LONGEST_S)]
Names = Annotated[list[str], BeforeValidator(read_names)]
Lines = Annotated[list[str], BeforeValidator(read_lines)]
Text = Annotated[str | None, BeforeValidator(read_text)]
Host = Annotated[str | None, BeforeValidator(read_host)]
SectionKind = TypeVar("SectionKind", bound="Section")


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable, both names of a field are read."""

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, frozen=True, validate_default=False, allow_inf_nan=False
    )

    def changed(self: SectionKind, **settings: Any) -> SectionKind:
        """A copy with other settings, which are not checked; those of an inner section as a dict:
        `config.changed(use_cpu=True, fsdp={"offload_params": False})`."""
        inner = {name: one for name in settings if isinstance(one := getattr(self, name), Section)}
        return self.model_copy(update=settings | {name: one.changed(**settings[name]) for name, one in inner.items()})


class FsdpConfig(Section):
    """How the model is sharded over the ranks."""

    version: Annotated[int, BeforeValidator(read_count)] = Field(2, ge=1, le=2, alias="fsdp_version")
    """FSDP version that the file was written for; shardkit always runs FSDP2 and notes where a version 1 setting
    differs."""

    sharding_strategy: Annotated[ShardingStrategy, BeforeValidator(read_strategy)] = Field(
        ShardingStrategy.FULL_SHARD, alias="fsdp_sharding_strategy"
    )
    """What is sharded: 1 FULL_SHARD, 2 SHARD_GRAD_OP, 3 NO_SHARD (DDP), 4 HYBRID_SHARD, 5 HYBRID_SHARD_ZERO2."""

    reshard_after_forward: Bool | None = Field(None, alias="fsdp_reshard_after_forward")
    """FSDP version 2's form: true frees parameters after forward (strategy 1 or 4), false keeps them (2 or 5)."""

    offload_params: Bool = Field(False, alias="fsdp_offload_params")
    """Keep parameters, gradients and optimizer state in host memory when not in use."""

    auto_wrap_policy: Annotated[WrapPolicy, BeforeValidator(read_name)] = Field(
        WrapPolicy.TRANSFORMER_BASED_WRAP, alias="fsdp_auto_wrap_policy"
    )
    """How the model is divided into FSDP units: by block class, by parameter count, or not at all."""

    transformer_layer_cls_to_wrap: Names = Field(default_factory=list, alias="fsdp_transformer_layer_cls_to_wrap")
    """Names of the block classes that become units; empty: classes that repeat in the model, or by size if none
    does."""

    min_num_params: Count = Field(100_000_000, ge=1, alias="fsdp_min_num_params")
    """Minimum parameters of a unit for SIZE_BASED_WRAP; 1e8, 100M and 100000000 are the same."""

    backward_prefetch: Annotated[BackwardPrefetch, BeforeValidator(read_prefetch)] = Field(
        BackwardPrefetch.BACKWARD_PRE, alias="fsdp_backward_prefetch"
    )
    """When backward gathers the next unit: before this unit's gradients (faster), after them, or without prefetch."""

    forward_prefetch: Bool = Field(False, alias="fsdp_forward_prefetch")
    """Gather the next unit's parameters explicitly while this one computes forward."""

    state_dict_type: Annotated[StateDictType, BeforeValidator(read_name)] = Field(
        StateDictType.SHARDED_STATE_DICT, alias="fsdp_state_dict_type"
    )
    """Format of save_state: each rank writes its shard, or full files; both load on any number of ranks."""

    cpu_ram_efficient_loading: Bool = Field(True, alias="fsdp_cpu_ram_efficient_loading")
    """On GPUs, lets Transformers load weights on rank 0 alone, from which sync_module_states copies them. Models built
    under init_empty_weights() are read in slices by every rank in any case."""

    sync_module_states: Bool = Field(True, alias="fsdp_sync_module_states")
    """Copy rank 0's weights and buffers to every rank before training."""

    use_orig_params: Bool = Field(True, alias="fsdp_use_orig_params")
    """FSDP2 always keeps the original parameters; false is accepted with a note."""

    activation_checkpointing: Bool = Field(False, alias="fsdp_activation_checkpointing")
    """Recompute the activations of each repeated block in backward instead of keeping them."""

    limit_all_gathers: Bool = Field(True, alias="fsdp_limit_all_gathers")
    """FSDP2 always limits how many all-gathers run at once; false is accepted with a note."""

    ignored_modules: Text = Field(None, alias="fsdp_ignored_modules")
    """A regular expression over module names; matching modules are not sharded but replicated."""


class PrecisionConfig(Section):
    """Dtypes beyond `mixed_precision`. None: as mixed_precision implies."""

    param_dtype: Dtype | None = None
    """Dtype of the gathered parameters and of compute."""

    reduce_dtype: Dtype | None = None
    """Dtype in which gradients are reduced and accumulated; fp32 unless set here."""

    output_dtype: Dtype | None = None
    """Dtype of the model's outputs; fp32 under mixed precision unless set here."""

    init_scale: float = Field(65536.0, gt=0)
    """Initial loss scale under fp16."""

    growth_factor: float = Field(2.0, gt=1)
    """Factor for the loss scale after `growth_interval` steps without an overflow."""

    backoff_factor: float = Field(0.5, gt=0, lt=1)
    """Factor for the loss scale after an overflow."""

    growth_interval: Count = Field(2000, ge=1)
    """Steps without an overflow after which the loss scale grows."""


class MeshConfig(Section):
    """What the ranks are divided into: replicas and shards of the hybrid strategies (0: computed from the machines),
    and groups that share each sequence."""

    replicate_size: Count = Field(0, ge=0)
    """Number of model replicas; by default one per machine."""

    shard_size: Count = Field(0, ge=0)
    """Number of ranks that shard one replica; by default the ranks of one machine."""

    context_size: Count = Field(1, ge=1)
    """Number of ranks that share each sequence, for long ones (context parallelism); 1: each rank has whole ones."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    digest: Literal["xxh3", "sha256"] = "xxh3"
    """Checksum of the saved files: xxh3 detects corruption (fast), sha256 also detects tampering."""

    verify: Literal["digest", "size"] = "digest"
    """What is verified when a checkpoint is read: every byte, or only file sizes."""

    keep_last: Count = Field(3, ge=1)
    """Number of newest checkpoints to keep."""

    keep_every: Count = Field(0, ge=0)
    """Checkpoints at multiples of this many steps are never deleted; 0: none."""

    blocking: Bool = True
    """Whether save_state waits until the files are written; false copies the state and writes it in the background."""

    timeout_s: Seconds = Field(600.0, gt=0)
    """How long ranks wait for each other in a save or load, in seconds."""

    resume: str = "never"
    """"never", "auto" (the newest valid checkpoint of the project folder), or the path or URL of a checkpoint."""

    max_shard_size: str = "5GB"
    """Maximum file size of a full export."""


class LaunchConfig(Section):
    """Timeouts, restarts and output of the launcher."""

    hang_timeout_s: Seconds = Field(600.0, gt=0)
    """Time without progress after which the launcher checks for a hang, in seconds."""

    stop_timeout_s: Seconds = Field(120.0, gt=0)
    """Time for ranks to save and exit after SIGTERM, in seconds."""

    process_group_timeout_s: Seconds = Field(1800.0, gt=0)
    """Timeout of a collective, in seconds."""

    max_restarts: Count = Field(0, ge=0)
    """Maximum restarts after failures; the launch stops after 3 in a row without a new checkpoint."""

    log_dir: Text = None
    """Folder for every rank's output; by default runs/<time> in the current folder."""

    show: str = "all"
    """Ranks whose output is shown: all, or comma-separated numbers."""

    start: Annotated[Literal["auto", "fork", "exec"], BeforeValidator(read_word)] = "auto"
    """How ranks start: fork (from a process with torch loaded), exec (a new Python each), auto (fork on the CPU)."""

    meet_timeout_s: Seconds = Field(900.0, gt=0)
    """How long the machines of a run wait for each other at the start, in seconds."""

    min_machines: Count | None = Field(None, ge=1, le=100_000)
    """Elastic: the run goes on with this many machines or more, up to num_machines; None: always with num_machines."""

    join_timeout_s: Seconds = Field(30.0, ge=0)
    """Elastic: how long a start waits for num_machines once min_machines are there, in seconds."""

    lost_timeout_s: Seconds = Field(30.0, gt=0)
    """Time without a sign of life after which a machine of an elastic run counts as lost, in seconds."""

    bind_address: Host = None
    """Address that machine 0 listens on, if it differs from the one that others connect to; loopback on one machine."""

    threads_per_rank: Count = Field(0, ge=0)
    """OMP_NUM_THREADS of every rank; 0: cores divided by ranks on this machine."""


class DdpConfig(Section):
    """How DDP (NO_SHARD, MULTI_GPU, MULTI_CPU) reduces gradients."""

    comm_hook: Annotated[CommHook, BeforeValidator(read_member)] = "no"
    """Compression of gradients: no, fp16, bf16, or power_sgd (a low-rank approximation)."""

    comm_wrapper: Annotated[Literal["no", "fp16", "bf16"], BeforeValidator(read_member)] = "no"
    """Dtype in which power_sgd computes and sends."""

    power_sgd_rank: Count = Field(1, ge=1)
    """Rank of power_sgd's approximation: higher is more accurate and slower."""

    power_sgd_start_step: Count = Field(1000, ge=2)
    """Steps with uncompressed gradients before power_sgd starts."""

    bucket_cap_mb: Count = Field(25, ge=1)
    """Bucket size of the gradient all-reduce, in MiB."""

    static_graph: Bool = False
    """Every step uses the same parameters in the same way, so DDP need not search for unused ones."""

    broadcast_buffers: Bool = True
    """Broadcast rank 0's buffers (running statistics) to all ranks in each forward."""


class DataConfig(Section):
    """How prepared data loaders split the data over ranks."""

    split_batches: Bool = False
    """The loader's batch size is that of all ranks together; false: of each rank."""

    even_batches: Bool = True
    """Pad a short last batch, so that every rank gets the same number of samples; `gather_for_metrics` drops the
    padding."""

    seed: int | None = Field(None, ge=0, lt=SEEDS)
    """Seed of the data order only; None: shardkit.seed, else rank 0's."""


class ProfileConfig(Section):
    """What `accelerator.profile()` records, and in which steps; a step ends with `profiler.step()`."""

    folder: Text = None
    """Folder of the traces, one per rank; by default `profile` in the project's log folder."""

    activities: Names = Field(default_factory=list)
    """cpu and cuda; empty: all that are available."""

    skip_first: Count = Field(0, ge=0)
    """Steps skipped at the start."""

    wait: Count = Field(0, ge=0)
    """Steps skipped at the start of each cycle."""

    warmup: Count = Field(0, ge=0)
    """Steps then traced and discarded."""

    active: Count = Field(0, ge=0)
    """Steps then recorded; 0: everything inside the block, without a schedule."""

    repeat: Count = Field(0, ge=0)
    """Cycles; 0: until the end."""

    record_shapes: Bool = False
    """Record the shapes of operators' inputs."""

    profile_memory: Bool = False
    """Record memory allocations of operators."""

    with_stack: Bool = False
    """Record source lines."""

    with_flops: Bool = False
    """Estimate the FLOPs of matrix products and convolutions."""

    with_modules: Bool = False
    """Record which module an operator belongs to (TorchScript modules only)."""


class ShardkitConfig(Section):
    """Settings that Accelerate does not have. Written only when something in it differs from its default."""

    precision: PrecisionConfig = PrecisionConfig()
    """Dtypes beyond mixed_precision."""

    mesh: MeshConfig = MeshConfig()
    """How the ranks are divided: mesh sizes of the hybrid strategies, and ranks that share each sequence."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""

    launch: LaunchConfig = LaunchConfig()
    """Timeouts, restarts and output of the launcher."""

    ddp: DdpConfig = DdpConfig()
    """How DDP reduces gradients."""

    data: DataConfig = DataConfig()
    """How prepared data loaders split the data over ranks."""

    profile: ProfileConfig = ProfileConfig()
    """What `accelerator.profile()` records."""

    recompute: Annotated[Literal["blocks", "operators"], BeforeValidator(read_word)] = "blocks"
    """What activation checkpointing recomputes: blocks, or operators (all but attention and half of the matmuls)."""

    recompute_every: Count = Field(1, ge=1)
    """Checkpoint the activations of every n-th block only; 1: of every block."""

    offload_activations: Bool = False
    """Keep what blocks save for backward in the host's memory; with activation checkpointing, the blocks' inputs."""

    offload_optimizer: Bool = False
    """Keep the optimizer's state in the host's memory; the step copies it to the device and back, a part at a time."""

    compile: Bool = False
    """torch.compile each repeated block."""

    seed: int | None = Field(None, ge=0, lt=SEEDS)
    """Seed of every random generator and of the data order; None: the script decides."""

    gradient_accumulation_steps: Count = Field(1, ge=1)
    """Micro-batches per optimizer step, unless the script sets it."""

    end_window_with_data: Bool = True
    """The last batch of a loader ends an accumulation window early; false: the window continues in the next epoch."""

    unsharded_generate: Bool = False
    """Under FSDP, `model.generate` gathers all weights once (in the compute dtype), instead of for each token."""

    log_speed: Bool = False
    """`accelerator.log` adds seconds per step, samples and tokens per second, MFU on known GPUs, and peak memory."""

    ddp_find_unused_parameters: Bool = False
    """Ranks may use different parameters in a step (slower). Under FSDP it needs torch 2.13."""


class Config(Section):
    """The configuration of a run: the settings of `shardkit.yaml`, as fields and arguments."""

    compute_environment: Annotated[Literal["LOCAL_MACHINE"], BeforeValidator(read_name)] = "LOCAL_MACHINE"
    """Where ranks are started: on this machine; with several machines, launch on each of them."""

    distributed_type: Annotated[DistributedType, BeforeValidator(read_distributed_type)] = DistributedType.FSDP
    """How ranks share the work: FSDP (see fsdp_config), MULTI_GPU (DDP on accelerators, also MULTI_XPU, MULTI_NPU) or
    MULTI_CPU (DDP), XLA (TPU), NO (one process)."""

    mixed_precision: Annotated[MixedPrecision, BeforeValidator(read_precision)] = "no"
    """Compute dtype: no (fp32), fp16 (with loss scaling), bf16; fp8, mxfp8: bf16, Linear layers in 8 bits (torchao)."""

    num_machines: Count = Field(1, ge=1, le=100_000)
    """Number of machines."""

    num_processes: Count = Field(1, ge=1, le=1_000_000)
    """Number of ranks in total, over all machines; on TPUs, of devices (one rank drives those of its machine)."""

    machine_rank: Count = Field(0, ge=0)
    """This machine's number, from 0; usually given at launch: --machine-rank."""

    main_process_ip: Host = None
    """Address of machine 0."""

    main_process_port: Annotated[int | None, BeforeValidator(read_count)] = Field(None, ge=0, le=65535)
    """Port on machine 0; by default a free one on one machine, 29500 on several."""

    rdzv_backend: Annotated[RendezvousBackend, BeforeValidator(read_word)] = "static"
    """For Accelerate: static, c10d, etcd-v2, etcd. shardkit's rendezvous is always at machine 0, in any order."""

    same_network: Bool = True
    """For Accelerate: whether the machines are in one network. shardkit's must reach each other directly."""

    use_cpu: Bool = False
    """Train on the CPU even where there is a GPU."""

    gpu_ids: Annotated[str | None, BeforeValidator(read_numbers)] = None
    """GPUs of this machine to use: all, or comma-separated numbers."""

    debug: Bool = False
    """Check the order and shapes of every collective, and find where NaN gradients come from (slow)."""

    main_training_function: str = "main"
    """Name of the script's training function; used on TPU only."""

    downcast_bf16: Bool = False
    """On TPU: keep every float in bf16, parameters and optimizer state too (XLA_DOWNCAST_BF16), instead of fp32."""

    enable_cpu_affinity: Bool = False
    """Pin each rank to the cores next to its GPU."""

    fsdp: FsdpConfig = Field(FsdpConfig(), alias="fsdp_config")
    """How the model is sharded over the ranks."""

    shardkit: ShardkitConfig = ShardkitConfig()
    """Settings that Accelerate does not have."""

    xla: Bool = False
    """On TPU: spread parameters over all devices, as FSDP does; false: a whole model on each."""

    xla_fsdp_v2: Bool = False
    """For Accelerate: which of PyTorch/XLA's two FSDPs. shardkit always trains with SPMD, the second."""

    xla_fsdp_settings: dict[str, Any] = Field(default_factory=dict)
    """On TPU: of PyTorch/XLA's own FSDP settings, compute_dtype; the others have no meaning in SPMD."""

    xla_fsdp_grad_ckpt: Bool = False
    """On TPU: recompute activations in backward."""

    tpu_name: Text = None
    """Name of the TPU."""

    tpu_zone: Text = None
    """Zone of the TPU."""

    tpu_use_cluster: Bool = False
    """Whether `launch` starts the run on all machines of a TPU pod, with gcloud, from where it is typed."""

    tpu_use_sudo: Bool = False
    """Whether training on a pod's machines is started with sudo."""

    tpu_env: Lines = Field(default_factory=list)
    """Environment variables for the TPU's machines, as NAME=value."""

    tpu_vm: Lines = Field(default_factory=list)
    """Names of the TPU's machines."""

    commands: Lines = Field(default_factory=list)
    """Commands that run on a pod's machines before training."""

    command_file: Text = None
    """File with such commands."""

    @property
    def mode(self) -> Literal["single", "ddp", "fsdp", "xla"]:
        """The engine: plain torch, DDP, FSDP2, or PyTorch/XLA. NO_SHARD is DDP."""
        match self.distributed_type:
            case DistributedType.XLA:
                return "xla"
            case DistributedType.FSDP:
                return "ddp" if self.fsdp.sharding_strategy is ShardingStrategy.NO_SHARD else "fsdp"
            case DistributedType.NO:
                return "single"
            case _:
                return "ddp" if self.num_processes > 1 else "single"

    @property
    def processes_per_machine(self) -> int:
        """Ranks on each machine; `checks` rejects an uneven division."""
        return max(1, self.num_processes // self.num_machines)
