"""Every question as a record: what it is called, when it is asked, what can be answered and what that costs.

The loop (`loop.py`), plain mode, the review and the docs page are all made from QUESTIONS. A question whose `key` is a
setting's name goes into the file under it; the others are turned into settings by `answers.py`. A question that
`applies` but is `advanced` takes its default unless it is asked for in the review.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from socket import gethostname
from typing import Any, Literal

from shardkit.config.keys import all_keys
from shardkit.config.schema import ShardingStrategy, read_count, read_names
from shardkit.config.texts import text_of
from shardkit.model.cut import select_units
from shardkit.model.describe import count_text
from shardkit.wizard import numbers
from shardkit.wizard.model import check_spec
from shardkit.wizard.prompter import Option
from shardkit.wizard.situation import CPU, ELSEWHERE, HERE, SEVERAL, SLURM, TPU, Situation

NONE_WORDS = {"none", "no", "-"}


@dataclass(frozen=True)
class Default:
    """What Enter takes, and why."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Question:
    """One thing to ask."""

    key: str
    title: str
    default: Callable[[Situation], Default]
    kind: Literal["choose", "several", "text"] = "text"
    options: Callable[[Situation], Sequence[Option]] = lambda s: ()
    check: Callable[[Situation, str], Any] = lambda s, typed: typed
    """The answer that typed text stands for; raises ValueError with what is wrong and what to do."""
    applies: Callable[[Situation], bool] = lambda s: True
    advanced: bool = False
    lines: Callable[[Situation], Sequence[str]] = lambda s: ()
    note: Callable[[Situation, Any], str] = lambda s, value: ""
    needs_model: bool = False
    when: str = "always"
    help_text: str = ""

    @property
    def name(self) -> str:
        """The question in a word or two."""
        return self.key.rpartition(".")[2].replace("_", " ")

    @property
    def help(self) -> str:
        """What `?` shows: the setting's own text, and what the question adds."""
        key = next((key for key in all_keys().values() if key.name == self.key), None)
        own = f"{key.yaml_name}: {text_of(key.section, key.path[-1])}" if key else ""
        return "\n".join(text for text in (own, self.help_text) if text)


def show(value: Any) -> str:
    """An answer as a person reads it."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


# --- the pieces that several questions share ---


def yes_no(yes: str, no: str) -> Callable[[Situation], Sequence[Option]]:
    """The two options of a yes-or-no question, with what each means."""
    return lambda s: (Option(False, "no", no), Option(True, "yes", yes))


def always(value: Any, reason: str) -> Callable[[Situation], Default]:
    """A default that depends on nothing."""
    return lambda s: Default(value, reason)


def whole_number(low: int, high: int | None = None) -> Callable[[Situation, str], int]:
    """Reads a whole number: 2, 1e8, 100M; out of range or not a number is a ValueError that says so."""

    def check(s: Situation, typed: str) -> int:
        return _in_range(typed, low, high)

    return check


def _in_range(typed: str, low: int, high: int | None) -> int:
    number = read_count(typed)
    allowed = f"{low:,} to {high:,}" if high else f"{low:,} or more"
    if not isinstance(number, int):
        raise ValueError(f"not a whole number (got {typed!r}); give {allowed}.")
    if number < low or (high is not None and number > high):
        raise ValueError(f"out of range (got {number:,}); give {allowed}.")
    return number


def _optional_number(s: Situation, typed: str) -> int | None:
    return None if typed.lower() in NONE_WORDS else _in_range(typed, 0, None)


def _optional_text(s: Situation, typed: str) -> str | None:
    return None if typed.lower() in NONE_WORDS else typed


# --- model ---


def _check_model(s: Situation, typed: str) -> str | None:
    return None if typed.lower() in {*NONE_WORDS, "skip"} else check_spec(typed, s.folder)


# --- where ---


def _devices_text(s: Situation) -> str:
    names = sorted({device.name for device in s.hardware.devices})
    return f"{s.gpus} x {', '.join(names)}" if s.gpus else f"CPU only, {s.hardware.cores} cores"


def _where_options(s: Situation) -> Sequence[Option]:
    here = [Option(HERE, "this machine", _devices_text(s))]
    if s.gpus:
        here.append(Option(CPU, "cpu of this machine", "slow; for tests"))
    return (
        *here,
        Option(ELSEWHERE, "another machine", "one machine with GPUs that is not this one"),
        Option(SEVERAL, "several machines", "the same command is typed on each"),
        Option(SLURM, "slurm", "machines and address come from the job"),
        Option(TPU, "tpu", "PyTorch/XLA"),
    )


def _where_default(s: Situation) -> Default:
    if s.is_in_slurm_job:
        return Default(SLURM, "SLURM started this shell")
    return Default(HERE, f"found here: {_devices_text(s)}")


def _machines_default(s: Situation) -> Default:
    if s.where == SLURM and s.hardware.scheduler and s.is_in_slurm_job:
        return Default(s.hardware.scheduler.machines, "the job's")
    return Default(2, "the smallest number that is several")


def _check_address(s: Situation, typed: str) -> str | None:
    if typed.lower() in NONE_WORDS:
        return None
    host, port = split_address(typed)
    if not host or any(character.isspace() for character in host):
        raise ValueError(f"not an address (got {typed!r}); give a name or IP, and a port if wanted: node-a:29500.")
    if port is not None and not 1 <= port <= 65535:
        raise ValueError(f"port out of range (got {port}); give 1 to 65535.")
    return typed


def split_address(address: str) -> tuple[str, int | None]:
    """("node-a", 29500) of "node-a:29500"; the port is None where none is given. IPv6 with a port is bracketed."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, _port(rest[1:]) if rest.startswith(":") else None
    if address.count(":") == 1:
        host, _, port = address.partition(":")
        return host, _port(port)
    return address, None


def _port(text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"not a port (got {text!r}); give 1 to 65535.")
    return int(text)


def _address_default(s: Situation) -> Default:
    if s.where == SLURM and s.hardware.scheduler and s.hardware.scheduler.main_address:
        return Default(s.hardware.scheduler.main_address, "the job's first machine")
    if s.where == SLURM:
        return Default(None, "the job's script gives it, since only the job knows")
    return Default(gethostname(), "this machine; it must be machine 0")


def _check_machine_rank(s: Situation, typed: str) -> int:
    return 0 if typed.lower() in {"launch", *NONE_WORDS} else _in_range(typed, 0, s.machines - 1)


def _per_machine_default(s: Situation) -> Default:
    if s.on_tpu:
        return Default(8, "a TPU host has 8 cores or 4; see its description")
    if s.on_cpu:
        return Default(min(2, s.hardware.cores), "the smallest number that shows a distributed run")
    if s.gpus and s.where != ELSEWHERE:
        return Default(s.gpus, "one for each GPU found here")
    return Default(8, "the usual number of GPUs in one machine")


def _check_per_machine(s: Situation, typed: str) -> int:
    number = _in_range(typed, 1, 4096)
    if s.where == HERE and not s.on_cpu and number > s.gpus:
        raise ValueError(f"more than the GPUs of this machine (got {number}); give 1 to {s.gpus}, or choose its CPU.")
    return number


def _processes_note(s: Situation, value: Any) -> str:
    total = f"{s.machines * int(value):,} in total" if s.machines > 1 else ""
    crowded = s.on_cpu and s.where in {HERE, CPU} and int(value) > s.hardware.cores
    return "; ".join(filter(None, [total, f"more than the {s.hardware.cores} cores here: slow" if crowded else ""]))


# --- how ---

STRATEGY_TEXTS = {
    ShardingStrategy.FULL_SHARD: "parameters, gradients, optimizer split; least memory",
    ShardingStrategy.SHARD_GRAD_OP: "parameters kept for backward; less traffic",
    ShardingStrategy.NO_SHARD: "every process holds everything (DDP); most memory",
    ShardingStrategy.HYBRID_SHARD: "1 inside each machine, copied across machines",
    ShardingStrategy.HYBRID_SHARD_ZERO2: "2 inside each machine, copied across machines",
}


def _why_not(s: Situation, strategy: ShardingStrategy) -> str:
    if s.has_base and s.base.fsdp.sharding_strategy is strategy and s.base.num_machines == s.machines:
        return ""
    if not strategy.is_hybrid or s.base.shardkit.mesh.replicate_size > 1 or s.base.shardkit.mesh.shard_size > 1:
        return ""
    if s.machines < 2:
        return "needs 2 machines"
    return "needs 2 processes a machine" if s.per_machine < 2 else ""


def strategy_options(s: Situation) -> Sequence[Option]:
    """The five strategies; with a model, memory, fit and traffic beside each instead of the text."""
    estimates, device = numbers.estimates(s), numbers.device_of(s)
    suggested = _strategy_default(s).value if estimates else None
    options = []
    for strategy, text in STRATEGY_TEXTS.items():
        why_not = _why_not(s, strategy)
        if why_not:
            text = ""
        elif strategy in estimates:
            text = numbers.cells(estimates[strategy], device)
            text += "  <- suggested" if strategy.value == suggested else ""
        options.append(Option(strategy.value, strategy.value, text, why_not))
    return options


def _strategy_default(s: Situation) -> Default:
    value, reason = numbers.suggested(s, [strategy for strategy in STRATEGY_TEXTS if not _why_not(s, strategy)])
    return Default(value.value, reason)


def _offload_default(s: Situation) -> Default:
    return Default(*numbers.suggest_offload(s))


def _offload_options(s: Situation) -> Sequence[Option]:
    no, yes = numbers.offload_texts(s)
    return Option(False, "no", no), Option(True, "yes", yes)


def _class_default(s: Situation) -> Default:
    if s.model is None:
        return Default([], "the repeated block classes are found in the model when training starts")
    if not s.has_class_names:
        return Default([], "a file of weights, or sizes, have no class names; they are found when training starts")
    classes = numbers.suggested_classes(s.model)
    return Default(classes, "the model's repeated block classes" if classes else "no class repeats in the model")


def _wrap_default(s: Situation) -> Default:
    if s.model is not None and not numbers.suggested_classes(s.model):
        return Default("SIZE_BASED_WRAP", "no class repeats in the model")
    return Default("TRANSFORMER_BASED_WRAP", "units that are a model's blocks are the right size")


def _class_options(s: Situation) -> Sequence[Option]:
    if s.model is None or not s.has_class_names:
        return ()
    return tuple(
        Option(c.name, c.name, f"{c.count} x {count_text(c.numel_each)}, {c.share:.0%} of parameters")
        for c in numbers.block_classes(s.model)
    )


def _check_classes(s: Situation, typed: str) -> list[str]:
    names = [] if typed.lower() in NONE_WORDS else read_names(typed)
    wrong = [name for name in names if not name.isidentifier()]
    if wrong:
        raise ValueError(f"not a class name (got {wrong[0]!r}); give names with commas, like BertLayer, T5Block.")
    known = {option.value for option in _class_options(s)}
    missing = [name for name in names if known and name not in known]
    if missing:
        raise ValueError(f"not a class of the model (got {missing[0]}); choose among {', '.join(sorted(known))}.")
    return names


def _min_params_default(s: Situation) -> Default:
    quarter = s.model.numel // 4 if s.model else 0
    if s.model and quarter < 100_000_000:
        return Default(max(1, quarter), "a quarter of the model")
    return Default(100_000_000, "the usual size of a large block")


def _units_note(s: Situation, value: Any) -> str:
    if s.model is None:
        return ""
    config = s.base.fsdp.model_copy(update={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": int(value)})
    return f"gives {len(select_units(s.model.tree, config)) + 1} units"


def _precision_default(s: Situation) -> Default:
    if s.on_cpu:
        return Default("no", "on a CPU the smaller types are slower")
    if (old := _gpu_without_bf16(s)) is not None:
        return Default("fp16", f"{old} has no bf16")
    return Default("bf16", "the range of fp32 at half the memory traffic, no loss scaling")


def _gpu_without_bf16(s: Situation) -> str | None:
    """A GPU that will be used and cannot do bf16."""
    if s.on_tpu or s.where == ELSEWHERE:
        return None
    return next((device.name for device in s.hardware.devices if not device.has_bf16), None)


def _precision_options(s: Situation) -> Sequence[Option]:
    said = s.base.mixed_precision if s.has_base and s.base.use_cpu == s.on_cpu else ""
    reason = "needs a GPU" if (s.on_cpu or s.on_tpu) and said != "fp16" else ""
    old = _gpu_without_bf16(s)
    no_bf16 = f"{old} has none" if old and not s.on_cpu and said != "bf16" else ""
    return (
        Option("bf16", "bf16", "same range as fp32, no loss scaling", disabled=no_bf16),
        Option("fp16", "fp16", "for GPUs without bf16; loss scaling is done for you", disabled=reason),
        Option("no", "no", "fp32 throughout: most memory, slowest"),
    )


# --- when each kind of question has a meaning ---


def _several(s: Situation) -> bool:
    return s.machines > 1


def _shards(s: Situation) -> bool:
    return s.shards


def _tpu(s: Situation) -> bool:
    return s.on_tpu


def _wraps(s: Situation) -> bool:
    """Whether the model is cut into units: by FSDP, and by PyTorch/XLA's."""
    return s.shards or (s.on_tpu and bool(s.answers.get("xla")))


def _pod(s: Situation) -> bool:
    return s.on_tpu and bool(s.answers.get("tpu_use_cluster"))


def _check_pairs(s: Situation, typed: str) -> list[str]:
    pairs = [] if typed.lower() in NONE_WORDS else read_names(typed)
    wrong = [pair for pair in pairs if not pair.partition("=")[0].isidentifier() or "=" not in pair]
    if wrong:
        raise ValueError(f"not NAME=value (got {wrong[0]!r}); give pairs with commas, like XLA_USE_SPMD=1, DEBUG=0.")
    return pairs


def _check_commands(s: Situation, typed: str) -> list[str]:
    return [] if typed.lower() in NONE_WORDS else [part.strip() for part in typed.split(";") if part.strip()]


QUESTIONS: tuple[Question, ...] = (
    Question(
        key="model",
        title="Model, for exact numbers? (module:function, config.json or safetensors; Enter to skip)",
        default=always(None, "without it the wizard cannot show memory"),
        check=_check_model,
        when="without --model",
        help_text="module:function is a function without arguments that returns the model; it is called on the meta "
        "device in a process of its own. A Transformers config.json, a .safetensors file or a folder with either will "
        "do as well. Nothing is downloaded.",
    ),
    Question(
        key="where",
        title="Where will it run?",
        kind="choose",
        options=_where_options,
        default=_where_default,
        help_text="What was found on this machine is not asked for again. Another machine: the file is written here "
        "for GPUs that are elsewhere. Several machines: every machine gets the same file and types the same launch "
        "command. SLURM: the launch command is typed once a machine by srun.",
    ),
    Question(
        key="num_machines",
        title="How many machines?",
        default=_machines_default,
        check=lambda s, typed: _in_range(typed, 2 if s.where == SEVERAL else 1, 4096),
        applies=lambda s: s.where in {SEVERAL, SLURM} or (s.on_tpu and s.base.num_machines > 1),
        when="several machines, SLURM",
    ),
    Question(
        key="address",
        title="Address of machine 0? (host or host:port; none: given at launch)",
        default=_address_default,
        check=_check_address,
        applies=_several,
        when="several machines",
        help_text="The machine that the others look for. Without a port, 29500. At launch: --main HOST:PORT.",
    ),
    Question(
        key="rdzv_backend",
        title="How do the machines find one another?",
        kind="choose",
        options=lambda s: (
            Option("c10d", "c10d", "start in any order; can restart"),
            Option("static", "static", "every machine has a fixed number; no restarts"),
            Option("etcd-v2", "etcd-v2", "an etcd server of your own"),
            Option("etcd", "etcd", "the older etcd protocol"),
        ),
        default=always("c10d", "machines may start in any order"),
        applies=_several,
        when="several machines",
    ),
    Question(
        key="use_cpu",
        title="What do the machines train on?",
        kind="choose",
        options=lambda s: (
            Option(False, "gpu", "one process for each GPU"),
            Option(True, "cpu", "slow; for tests and small models"),
        ),
        default=lambda s: Default(
            s.where == SEVERAL and not s.gpus, "as on this machine" if s.where == SEVERAL else "the usual case"
        ),
        applies=lambda s: s.where in {ELSEWHERE, SEVERAL, SLURM},
        advanced=True,
        when="several machines or another one, and no GPU here",
    ),
    Question(
        key="processes_per_machine",
        title="Processes on each machine?",
        default=_per_machine_default,
        check=_check_per_machine,
        note=_processes_note,
        help_text="num_processes in the file is the total: this number times the machines.",
    ),
    Question(
        key="mixed_precision",
        title="Precision?",
        kind="choose",
        options=_precision_options,
        default=_precision_default,
    ),
    Question(
        key="fsdp.sharding_strategy",
        title="How should the model be split?",
        kind="choose",
        options=strategy_options,
        default=_strategy_default,
        applies=lambda s: s.world_size > 1 and not s.on_tpu,
        lines=numbers.strategy_lines,
        needs_model=True,
        when="more than one process, not on TPU",
        help_text="\n".join(f"{s.number} {s.value}: {text}" for s, text in STRATEGY_TEXTS.items()),
    ),
    Question(
        key="tpu_use_cluster",
        title="Is it a TPU pod (several TPU machines)?",
        kind="choose",
        options=yes_no("name, zone and commands are asked next", "one TPU machine"),
        default=always(False, "one TPU machine is the common case"),
        applies=_tpu,
        when="TPU",
    ),
    Question(
        key="tpu_name",
        title="Name of the TPU? (none: set at launch)",
        default=always(None, "can be given later"),
        check=_optional_text,
        applies=_pod,
        when="TPU pod",
    ),
    Question(
        key="tpu_zone",
        title="Zone of the TPU? (none: set at launch)",
        default=always(None, "can be given later"),
        check=_optional_text,
        applies=_pod,
        when="TPU pod",
    ),
    Question(
        key="xla",
        title="Split the model over the TPU cores (PyTorch/XLA FSDP)?",
        kind="choose",
        options=yes_no("parameters, gradients, optimizer split", "every core holds the whole model"),
        default=always(True, "a model that fits whole rarely needs a TPU"),
        applies=_tpu,
        when="TPU",
    ),
    # --- advanced: asked for in the review ---
    Question(
        key="fsdp.offload_params",
        title="CPU offload: keep parameters, gradients and optimizer state in host memory?",
        kind="choose",
        options=_offload_options,
        default=_offload_default,
        applies=_shards,
        advanced=True,
        needs_model=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="fsdp.auto_wrap_policy",
        title="How is the model cut into units?",
        kind="choose",
        options=lambda s: (
            Option("TRANSFORMER_BASED_WRAP", "TRANSFORMER_BASED_WRAP", "by block class, like BertLayer"),
            Option("SIZE_BASED_WRAP", "SIZE_BASED_WRAP", "by a smallest number of parameters"),
            Option("NO_WRAP", "NO_WRAP", "the whole model is one unit: most memory"),
        ),
        default=_wrap_default,
        applies=_wraps,
        advanced=True,
        needs_model=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="fsdp.transformer_layer_cls_to_wrap",
        title="Block classes that become units?",
        kind="several",
        options=_class_options,
        default=_class_default,
        check=_check_classes,
        applies=lambda s: _wraps(s) and s.answers["fsdp.auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP",
        advanced=True,
        needs_model=True,
        when="advanced; TRANSFORMER_BASED_WRAP",
    ),
    Question(
        key="fsdp.min_num_params",
        title="Smallest unit, in parameters? (1e8, 100M and 100000000 are the same)",
        default=_min_params_default,
        check=whole_number(1),
        note=_units_note,
        applies=lambda s: _wraps(s) and s.answers["fsdp.auto_wrap_policy"] == "SIZE_BASED_WRAP",
        advanced=True,
        needs_model=True,
        when="advanced; SIZE_BASED_WRAP",
    ),
    Question(
        key="fsdp.backward_prefetch",
        title="Backward prefetch: when is the next unit gathered in backward?",
        kind="choose",
        options=lambda s: (
            Option("BACKWARD_PRE", "BACKWARD_PRE", "before this unit's gradients: fastest"),
            Option("BACKWARD_POST", "BACKWARD_POST", "after them: one gathered unit less in memory"),
            Option("NO_PREFETCH", "NO_PREFETCH", "when it is needed: least memory, slowest"),
        ),
        default=always("BACKWARD_PRE", "the gather hides behind compute"),
        applies=_shards,
        advanced=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="fsdp.forward_prefetch",
        title="Forward prefetch: gather the next unit while this one computes?",
        kind="choose",
        options=yes_no("for models whose CPU side is slow", "gathers already overlap in most models"),
        default=always(False, "gathers already overlap in most models"),
        applies=_shards,
        advanced=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="fsdp.state_dict_type",
        title="Checkpoint format (state-dict type)?",
        kind="choose",
        options=lambda s: (
            Option("SHARDED_STATE_DICT", "SHARDED_STATE_DICT", "each rank writes its own part"),
            Option("FULL_STATE_DICT", "FULL_STATE_DICT", "whole tensors; other tools open it"),
        ),
        default=always("SHARDED_STATE_DICT", "fastest to save; loads on any number of processes"),
        applies=_shards,
        advanced=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="fsdp.activation_checkpointing",
        title="Activation checkpointing: recompute activations in backward?",
        kind="choose",
        options=yes_no("much less memory, about a third more compute", "activations are kept"),
        default=always(False, "fastest where it fits"),
        applies=_shards,
        advanced=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="fsdp.cpu_ram_efficient_loading",
        title="Build the model without its weights first, and read only what each rank needs?",
        kind="choose",
        options=yes_no("least host memory", "every rank builds the whole model"),
        default=always(True, "least host memory"),
        applies=_shards,
        advanced=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="fsdp.sync_module_states",
        title="Start every rank from rank 0's weights?",
        kind="choose",
        options=yes_no("right whatever the seeds are", "only where every rank builds the same weights"),
        default=always(True, "right whatever the seeds are"),
        applies=_shards,
        advanced=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="shardkit.precision.reduce_dtype",
        title="Dtype in which gradients are reduced?",
        kind="choose",
        options=lambda s: (
            Option(None, "as usual", "fp32"),
            Option("fp32", "fp32", "said explicitly"),
            Option("bf16", "bf16", "half the traffic, less exact"),
            Option("fp16", "fp16", "half the traffic; can overflow", disabled="needs a GPU" if s.on_cpu else ""),
        ),
        default=always(None, "fp32 adds gradients exactly enough"),
        applies=_shards,
        advanced=True,
        when="advanced; strategies 1, 2, 4, 5",
    ),
    Question(
        key="shardkit.gradient_accumulation_steps",
        title="Micro-batches per optimizer step, where the script does not say?",
        default=always(1, "no accumulation"),
        check=whole_number(1),
        advanced=True,
        when="advanced",
    ),
    Question(
        key="shardkit.seed",
        title="Seed? (none: the script decides)",
        default=always(None, "the script decides"),
        check=_optional_number,
        advanced=True,
        when="advanced",
    ),
    Question(
        key="shardkit.compile",
        title="Compile each unit (torch.compile)?",
        kind="choose",
        options=yes_no("faster steps after a slow first one", "starts at once"),
        default=always(False, "starts at once"),
        applies=lambda s: not s.on_tpu,
        advanced=True,
        when="advanced; not on TPU",
    ),
    Question(
        key="shardkit.launch.max_restarts",
        title="How often may the ranks be started again after a failure?",
        default=always(0, "a failure ends the run"),
        check=whole_number(0, 1000),
        advanced=True,
        when="advanced",
    ),
    Question(
        key="machine_rank",
        title="Number of THIS machine, from 0? (launch: given with --machine-rank)",
        default=always(0, "given at launch, so that all machines share one file"),
        check=_check_machine_rank,
        applies=_several,
        advanced=True,
        when="advanced; several machines",
    ),
    Question(
        key="same_network",
        title="Do the machines reach one another directly?",
        kind="choose",
        options=yes_no("same network", "through the internet or a tunnel"),
        default=always(True, "the usual case"),
        applies=_several,
        advanced=True,
        when="advanced; several machines",
    ),
    Question(
        key="debug",
        title="Check every collective's order and shapes?",
        kind="choose",
        options=yes_no("finds mismatches; slow", "full speed"),
        default=always(False, "full speed"),
        applies=lambda s: s.world_size > 1,
        advanced=True,
        when="advanced; more than one process",
    ),
    Question(
        key="xla_fsdp_v2",
        title="Use the SPMD form of PyTorch/XLA's FSDP?",
        kind="choose",
        options=yes_no("FSDP v2", "FSDP v1"),
        default=always(False, "v1 runs everywhere"),
        applies=lambda s: s.on_tpu and bool(s.answers.get("xla")),
        advanced=True,
        when="advanced; TPU with FSDP",
    ),
    Question(
        key="xla_fsdp_grad_ckpt",
        title="Recompute activations in backward on the TPU?",
        kind="choose",
        options=yes_no("much less memory, more compute", "activations are kept"),
        default=always(False, "fastest where it fits"),
        applies=lambda s: s.on_tpu and bool(s.answers.get("xla")),
        advanced=True,
        when="advanced; TPU with FSDP",
    ),
    Question(
        key="downcast_bf16",
        title="On the TPU, use bf16 for double and float both?",
        kind="choose",
        options=yes_no("fastest", "double stays fp32"),
        default=always(False, "double stays exact"),
        applies=_tpu,
        advanced=True,
        when="advanced; TPU",
    ),
    Question(
        key="main_training_function",
        title="Name of the script's training function?",
        default=always("main", "the usual name"),
        check=lambda s, typed: _check_identifier(typed),
        applies=_tpu,
        advanced=True,
        when="advanced; TPU",
    ),
    Question(
        key="tpu_use_sudo",
        title="Do commands on the TPU's machines need sudo?",
        kind="choose",
        options=yes_no("commands start with sudo", "commands run as you"),
        default=always(False, "the usual case"),
        applies=_pod,
        advanced=True,
        when="advanced; TPU pod",
    ),
    Question(
        key="tpu_vm",
        title="Names of the TPU's machines, with commas? (none: all)",
        default=always([], "all of them"),
        check=lambda s, typed: [] if typed.lower() in NONE_WORDS else read_names(typed),
        applies=_pod,
        advanced=True,
        when="advanced; TPU pod",
    ),
    Question(
        key="tpu_env",
        title="Variables for the TPU's machines? (NAME=value, with commas)",
        default=always([], "none needed"),
        check=_check_pairs,
        applies=_tpu,
        advanced=True,
        when="advanced; TPU",
    ),
    Question(
        key="commands",
        title="Commands before training on the TPU's machines? (with semicolons)",
        default=always([], "none needed"),
        check=_check_commands,
        applies=_pod,
        advanced=True,
        when="advanced; TPU pod",
    ),
)


def _check_identifier(typed: str) -> str:
    if not typed.isidentifier():
        raise ValueError(f"not a function's name (got {typed!r}); give one like main.")
    return typed


def is_asked(question: Question, situation: Situation) -> bool:
    """Whether the question is one of the screens on the way to the review."""
    if question.key == "use_cpu":
        return not situation.gpus
    if question.key == "num_machines" and situation.where == SLURM and situation.is_in_slurm_job:
        return False
    return not question.advanced


def by_key(key: str) -> Question:
    """The question with that key."""
    return next(question for question in QUESTIONS if question.key == key)
