"""Keys of Accelerate's files that shardkit does not have: translated where there is an equivalent, else refused.

Empty values and Accelerate's defaults are always accepted: its wizard writes them for unused features.
"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shardkit.config.document import shortened
from shardkit.config.keys import Path
from shardkit.config.schema import read_bool, read_count


@dataclass
class Translation:
    """The translation of a foreign key: shardkit settings, notes, and problems."""

    settings: dict[Path, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


INSTEAD = {
    "deepspeed_config": "DeepSpeed is not run here; use fsdp_config (ZeRO 2 is SHARD_GRAD_OP, ZeRO 3 is FULL_SHARD)",
    "megatron_lm_config": "Megatron-LM is not run here; use fsdp_config",
    "mpirun_config": "MPI is not used here; start several CPU processes with `shardkit launch --cpu -n 2 SCRIPT.py`",
    "ipex_config": "Intel's extension is not used here; plain torch has bf16 on the CPU: mixed_precision: bf16",
}
_SAGEMAKER = ["ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name"]
_SAGEMAKER += ["pytorch_version", "transformers_version", "py_version", "sagemaker_inputs_file"]
_SAGEMAKER += ["sagemaker_metrics_file", "additional_args"]
INSTEAD |= dict.fromkeys(_SAGEMAKER, "SageMaker jobs are not started here; run shardkit launch on the machine itself")

# Values of unsupported features: the message says this in place of the list of choices.
REFUSED_VALUES: dict[Path, dict[str, str]] = {
    ("distributed_type",): {
        "DEEPSPEED": INSTEAD["deepspeed_config"],
        "MEGATRON_LM": INSTEAD["megatron_lm_config"],
        "TP": "tensor parallelism is not supported; use FSDP",
        "MULTI_NEURON": "AWS Trainium is not supported; use FSDP or MULTI_GPU on another accelerator, or MULTI_CPU",
    },
    ("shardkit", "ddp", "comm_hook"): dict.fromkeys(
        ("batched_power_sgd", "batched-power-sgd", "batched_powersgd"),
        "torch's implementation fails in its first step; use power_sgd",
    ),
    ("compute_environment",): {"AMAZON_SAGEMAKER": INSTEAD["region"]},
    ("fsdp", "state_dict_type"): {
        "LOCAL_STATE_DICT": "it only loads on the same number of ranks; use SHARDED_STATE_DICT, which loads on any"
    },
}


# Keys that identify a NeMo model configuration.
NEMO_KEYS = {"megatron_amp_O2", "fsdp_grad_reduce_dtype", "fsdp_sharded_checkpoint"}
# Keys that identify DeepSpeed's own JSON.
DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"}


def is_foreign(section: Path, key: str) -> bool:
    """Whether a key is known, but not a shardkit key."""
    return key in _TRANSLATIONS.get(section, {})


def translate(section: Path, key: str, value: Any) -> Translation:
    """The translation of a foreign key with this value."""
    return _TRANSLATIONS[section][key](key, value)


def hint(section: Path, key: str, file: str) -> str | None:
    """The advice for keys that belong somewhere else."""
    if section == () and key in {"lr", "learning_rate", "batch_size", "epochs"}:
        return "it belongs in your training script."
    if section == () and key in NEMO_KEYS:
        return f"it is NeMo's; convert the file with: shardkit config convert {shlex.quote(file)}"
    if section == () and key in DEEPSPEED_KEYS:
        return f"it is DeepSpeed's. {INSTEAD['deepspeed_config']}."
    return None


def _is_empty(value: Any) -> bool:
    """Whether the value is empty, or what Accelerate's wizard writes for "not used": empty text or block, none, no,
    0."""
    if isinstance(value, Mapping):
        return all(_is_empty(inner) for inner in value.values())
    if isinstance(value, list):
        return all(_is_empty(item) for item in value)
    return value is None or str(value).strip().lower() in {"", "no", "none", "false", "null", "0"}


def _refuse(key: str, value: Any) -> Translation:
    if _is_empty(value):
        return Translation()
    return Translation(problems=[_refusal(INSTEAD[key], value)])


def _refusal(text: str, value: Any) -> str:
    """`what; what to do` with the value inserted."""
    what, _, instead = text.partition("; ")
    return f"{what} (got {shortened(value)}); {instead}."


def _deepspeed(key: str, value: Any) -> Translation:
    """What DeepSpeed does by its block, beside ZeRO, is named, since a run without it would train otherwise."""
    if _is_empty(value):
        return Translation()
    settings = value if isinstance(value, Mapping) else {}
    also = []
    if settings.get("offload_param_device") == "cpu":
        also.append("fsdp_offload_params: true")
    elif settings.get("offload_optimizer_device") == "cpu":
        also.append("shardkit.offload_optimizer: true")
    if not _is_one(steps := settings.get("gradient_accumulation_steps")):
        also.append(f"shardkit.gradient_accumulation_steps: {shortened(steps)}")
    if not _is_empty(norm := settings.get("gradient_clipping")):
        also.append(f"accelerator.clip_grad_norm_(model.parameters(), {shortened(norm)}) in the script")
    refusal = _refusal(INSTEAD[key], value).rstrip(".")
    return Translation(problems=[f"{refusal}{', with ' if also else ''}{', '.join(also)}."])


def _offloaded_checkpoints(key: str, value: Any) -> Translation:
    """What recomputed blocks keep, on the host."""
    if _is_empty(value):
        return Translation()
    note = f"is read as shardkit.offload_activations: {shortened(value)}."
    return Translation({("shardkit", "offload_activations"): value}, notes=[note])


def _ipex(key: str, value: Any) -> Translation:
    """Intel's GPUs, which `use_xpu` chooses, are used without its extension."""
    given = {name: inner for name, inner in value.items() if name != "use_xpu"} if isinstance(value, Mapping) else value
    return _refuse(key, given)


def _mpirun(key: str, value: Any) -> Translation:
    """Accelerate writes `mpirun_ccl: '1'` next to a default host file."""
    hosts = value.get("mpirun_hostfile") if isinstance(value, Mapping) else value
    return _refuse(key, hosts)


def _fp8(key: str, value: Any) -> Translation:
    """How Accelerate computes in fp8. shardkit does it with torchao (AO), by the recipe that has all-gathers in fp8."""
    if _is_empty(value):
        return Translation()
    settings = {str(name).lower(): inner for name, inner in (value if isinstance(value, Mapping) else {}).items()}
    backend = str(settings.pop("backend", None) or settings.pop("fp8_backend", None) or value).upper()
    if backend not in ("AO", "TORCHAO"):
        text = "fp8 is computed with torchao here; write backend: AO, or mixed_precision: bf16"
        return Translation(problems=[_refusal(text, backend if isinstance(value, Mapping) else value)])
    settings.pop("enable_fsdp_float8_all_gather", None)
    outcome = Translation()
    if not _is_empty(settings.pop("pad_inner_dim", None)):  # the default answer of Accelerate's wizard
        outcome.notes.append("pad_inner_dim: layers whose dims 16 does not divide are not padded, but in bf16.")
    chosen = [name for name, inner in settings.items() if not _is_empty(inner)]
    text = f"{', '.join(chosen)} cannot be chosen here; leave it out"
    outcome.problems += [_refusal(text, settings[chosen[0]])] if chosen else []
    return outcome


def _half_precision(key: str, value: Any) -> Translation:
    """Very old files have `fp16: true` instead of mixed_precision."""
    match read_bool(value):
        case True:
            return Translation({("mixed_precision",): key})
        case False | None:
            return Translation()
    return Translation(problems=[f"is not yes or no (got {shortened(value)!r}); write mixed_precision: {key}."])


def _parallelism(key: str, value: Any) -> Translation:
    """Sizes of the mesh. 1 means "not used" in Accelerate."""
    outcome = Translation()
    if not isinstance(value, Mapping):
        if not _is_empty(value):
            outcome.problems.append(f"is not a block of sizes (got {shortened(value)!r}); indent its sizes below it.")
        return outcome
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in value.items()}
    context = _context(sizes, outcome)
    for name, size in sizes.items():
        if name in _DATA_SIZES and not _is_one(size):
            outcome.settings[("shardkit", "mesh", _DATA_SIZES[name])] = _data_size(name, size, context)
        elif name not in {*_DATA_SIZES, *_OF_CONTEXT} and not _is_unused(name, size, sizes):
            outcome.problems.append(f"{name} is not supported (got {shortened(size)}); write 1, or leave it out.")
    return _plain_mesh(outcome)


_DATA_SIZES = {"dp_replicate_size": "replicate_size", "dp_shard_size": "shard_size"}
_OF_CONTEXT = {"cp_size", "cp_backend", "cp_comm_strategy", "sp_size", "sp_backend"}
_OF_CONTEXT |= {"sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"}


def _context(sizes: Mapping[str, Any], outcome: Translation) -> Any:
    """The size of the groups that share sequences. How Accelerate and DeepSpeed exchange them has no effect."""
    given = [name for name in ("cp_size", "sp_size") if not _is_one(sizes.get(name))]
    if not given:
        return 1
    if len(given) > 1:
        got = f"got {shortened(sizes['cp_size'])} and {shortened(sizes['sp_size'])}"
        outcome.problems.append(f"cp_size and sp_size both divide the sequences ({got}); write one of them.")
    size = sizes[given[0]]
    outcome.settings[("shardkit", "mesh", "context_size")] = size
    outcome.notes.append(f"{given[0]} is read as shardkit.mesh.context_size: {shortened(size)}.")
    return size


def _data_size(name: str, size: Any, context: Any) -> Any:
    """A size of the mesh here: shard groups have all ranks that share their sequences, too."""
    if str(size) == "-1":
        return "0"  # the ranks that the other size leaves
    numbers = [read_count(one) for one in (size, context)]
    is_plain = name == "dp_replicate_size" or context == 1 or not all(isinstance(one, int) for one in numbers)
    return size if is_plain else prod(numbers)


def _is_unused(name: str, size: Any, sizes: Mapping[str, Any]) -> bool:
    """Whether a setting of the mesh is empty, or of tensor parallelism without any."""
    return _is_empty(size) or (name.startswith("tp_") and _is_one(sizes.get("tp_size")))


def _is_one(size: Any) -> bool:
    """Whether a size, as of an axis of the mesh, is 1 or not given."""
    return _is_empty(size) or str(size) == "1"


def _plain_mesh(outcome: Translation) -> Translation:
    """A single size is not hybrid: all ranks shard one replica, or each has its own."""
    replicate, shard = (("shardkit", "mesh", name) for name in ("replicate_size", "shard_size"))
    if replicate in outcome.settings:
        return outcome
    if outcome.settings.pop(shard, None):
        outcome.notes.append("one replica over all ranks needs no mesh; its size is num_processes.")
    return outcome


def _dynamo(key: str, value: Any) -> Translation:
    """torch.compile. Its inductor backend with default settings is shardkit.compile."""
    settings = value if isinstance(value, Mapping) else {"backend": value}
    settings = {name.removeprefix("dynamo_"): inner for name, inner in settings.items()}
    backend = str(settings.pop("backend", None) or "no").lower()
    if backend in {"no", "none", "false"}:
        return Translation()
    outcome = Translation()
    if backend == "inductor":
        outcome.settings[("shardkit", "compile")] = "true"
        outcome.notes.append("is read as shardkit.compile: true, which compiles unit by unit.")
    else:
        outcome.problems.append(f"this backend is not supported (got {shortened(backend)}); use INDUCTOR.")
    for name, inner in settings.items():
        if not _is_empty(inner) and str(inner).lower() != "default" and name != "use_regional_compilation":
            outcome.problems.append(f"dynamo_{name} cannot be chosen here (got {shortened(inner)}); leave it out.")
    return outcome


_TRANSLATIONS: dict[Path, dict[str, Callable[[str, Any], Translation]]] = {
    (): {
        **dict.fromkeys(INSTEAD, _refuse),
        "deepspeed_config": _deepspeed,
        "mpirun_config": _mpirun,
        "ipex_config": _ipex,
        "fp8_config": _fp8,
        "fp16": _half_precision,
        "bf16": _half_precision,
        "parallelism_config": _parallelism,
        "dynamo_config": _dynamo,
        "dynamo_backend": _dynamo,
    },
    ("fsdp",): {"fsdp_activation_checkpointing_offload": _offloaded_checkpoints},
}
