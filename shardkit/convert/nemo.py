"""NeMo's model configurations with FSDP: the keys about sharded training.

A NeMo file also describes the model and the optimizer; these belong in the training script, and are listed as left out.
"""

from collections.abc import Callable, Mapping
from typing import Any

from shardkit.config import document, validation
from shardkit.config.accelerate_keys import NEMO_KEYS
from shardkit.config.keys import Path
from shardkit.config.layers import Layer, Origin, SettingEntry
from shardkit.config.schema import StateDictType, read_bool, read_count
from shardkit.convert.report import Conversion, Line

_STRATEGIES = {"full": "FULL_SHARD", "hybrid": "HYBRID_SHARD", "grad": "SHARD_GRAD_OP"}
_DTYPES = {"32": "fp32", "fp32": "fp32", "bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "fp16": "fp16"}
_PRECISIONS = {"32": "no", "fp32": "no", "bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}
_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size")

_CONTEXT_SIZE = ("shardkit", "mesh", "context_size")

_COUNTED = "counted in num_processes and num_machines"

Found = dict[Path, Any]
Reading = Callable[[Any], tuple[Found, str]]
"""From a key's value to settings, and what is said of it."""


class Refused(Exception):
    """An unsupported value; the message says what to do."""


def is_nemo(data: Any) -> bool:
    """Whether this is a NeMo file, by its keys at the top level or in its `model` block."""
    blocks = [data, data.get("model")]
    return any(
        bool(NEMO_KEYS & set(block)) or isinstance(read_bool(block.get("fsdp")), bool)
        for block in blocks
        if isinstance(block, Mapping)
    )


def from_nemo(text: str, name: str) -> Conversion:
    """The conversion of a NeMo file, key by key. Raises ConfigError where it is not YAML."""
    data = document.raw(document.compose(text, name))
    layer, lines, others = Layer(), [], []
    for key, value in _flat(data):
        reading = _READINGS.get(key.removeprefix("model."))
        if reading is None:
            others.append(key)
            continue
        line, found = _read(key, value, reading)
        lines.append(line)
        layer.entries |= {path: SettingEntry(value, Origin("file", name), key) for path, value in found.items()}
    _count(data, layer)
    lines += _without_fsdp(layer)
    config, _ = validation.build(layer)
    lines += [Line("", "refused", problem) for problem in layer.problems]
    return Conversion(name, config, [*lines, *_left_out(others)])


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """All keys, dotted. In a file whose blocks lost their indentation, `optim:` is empty and `name:` is next to it."""
    flat: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat += _flat(value, f"{prefix}{key}.")
        elif value is not None or key != "optim":
            flat.append((f"{prefix}{key}", value))
    if data.get("optim", "") is None and "name" in data:
        flat = [(f"{prefix}optim.name" if key == f"{prefix}name" else key, value) for key, value in flat]
    return flat


def _read(key: str, value: Any, reading: Reading) -> tuple[Line, Found]:
    try:
        found, text = reading(value)
    except Refused as problem:
        return Line(key, "refused", f"{problem} (got {document.shortened(value)})"), {}
    return Line(key, "changed" if found else "left out", text), found


def _fsdp(value: Any) -> tuple[Found, str]:
    if _yes(value):
        return {("distributed_type",): "FSDP"}, "distributed_type: FSDP"
    return {("distributed_type",): "MULTI_GPU"}, "distributed_type: MULTI_GPU (DDP)"


def _as_given(setting: str) -> Reading:
    """Of a value that is the same here."""
    return lambda value: ({tuple(setting.split(".")): value}, f"{setting}: {value}")


def _not_a_setting(text: str) -> Reading:
    """Of a key that no setting here stands for."""
    return lambda value: ({}, text)


def _one_of(known: Mapping[str, str], path: Path, shown: str, words: str) -> Reading:
    """Of a word that another one stands for here. `words`: those that can be given."""

    def read(value: Any) -> tuple[Found, str]:
        found = known.get(str(value).lower())
        if found is None:
            raise Refused(f"is not one of {words}")
        return {path: found}, f"{shown}: {found}"

    return read


def _state_dict_type(value: Any) -> tuple[Found, str]:
    kind = StateDictType.SHARDED_STATE_DICT if _yes(value) else StateDictType.FULL_STATE_DICT
    return {("fsdp", "state_dict_type"): kind}, f"fsdp_state_dict_type: {kind.value}"


def _use_orig_params(value: Any) -> tuple[Found, str]:
    text = "FSDP2 always keeps the original parameters, so fine-tuning with frozen parameters needs no setting"
    return {("fsdp", "use_orig_params"): _yes(value)}, f"fsdp_use_orig_params: {str(_yes(value)).lower()}; {text}"


def _offload(value: Any) -> tuple[Found, str]:
    return {("fsdp", "offload_params"): _yes(value)}, f"fsdp_offload_params: {str(_yes(value)).lower()}"


def _amp_o2(value: Any) -> tuple[Found, str]:
    if _yes(value):
        raise Refused("megatron_amp_O2 does not work with FSDP; set it to False, and mixed_precision here")
    return {}, "off, as required by FSDP"


def _optimizer(value: Any) -> tuple[Found, str]:
    if str(value) == "distributed_fused_adam":
        raise Refused("distributed_fused_adam shards by itself and does not work with FSDP; use fused_adam")
    if str(value) == "fused_adam":
        return {}, "your script creates the optimizer: torch.optim.AdamW(..., fused=True)"
    return {}, f"your script creates the optimizer ({document.shortened(value)})"


def _activation_checkpointing(value: Any) -> tuple[Found, str]:
    if str(value).lower() == "full":
        return {("fsdp", "activation_checkpointing"): True}, "fsdp_activation_checkpointing: true"
    if value is None or str(value).lower() in {"none", "null", ""}:
        return {}, "off"
    raise Refused("only whole blocks can be recomputed; write full, or leave it out")


def _parallel(value: Any) -> tuple[Found, str]:
    if str(value) not in {"1", "None"}:
        raise Refused("only data and context parallelism are supported; write 1")
    return {}, "not used"


def _context(value: Any) -> tuple[Found, str]:
    if str(value) in {"1", "None"}:
        return {}, "not used"
    return {_CONTEXT_SIZE: value}, f"{'.'.join(_CONTEXT_SIZE)}: {value}"


def _devices(value: Any) -> tuple[Found, str]:
    if str(value).strip() in {"-1", "auto", "None"}:
        return {}, "all of each machine, as without num_processes"
    if _count_of(value) is None:
        raise Refused("is not a number of devices, their numbers, -1 or auto")
    numbers = _numbers_of(value)
    if len(numbers) < 2 and not isinstance(value, list):
        return {}, _COUNTED
    return {("gpu_ids",): ",".join(numbers)}, f"gpu_ids: {','.join(numbers)}; counted in num_processes"


def _numbers_of(value: Any) -> list[str]:
    """The devices that a list or a text with commas names."""
    return [str(one).strip() for one in (value if isinstance(value, list) else str(value).split(","))]


def _count_of(value: Any) -> int | None:
    """How many devices of a machine train; None: as many as it has."""
    numbers = _numbers_of(value)
    if isinstance(value, list) or len(numbers) > 1:
        return (len(numbers) or None) if all(number.isdecimal() for number in numbers) else None
    count = read_count(value)
    return count if isinstance(count, int) and count > 0 else None


def _count(data: Mapping[str, Any], layer: Layer) -> None:
    """Sets num_processes, the total (NeMo counts devices per machine), and the accumulation steps from the batch
    sizes."""
    trainer, model = (block if isinstance(block, Mapping) else {} for block in (data.get("trainer"), data.get("model")))
    machines, devices = _number(trainer, "num_nodes") or 1, _count_of(trainer.get("devices"))
    origin = Origin("file", "trainer.num_nodes")
    if machines > 1:
        layer.entries[("num_machines",)] = SettingEntry(machines, origin, "trainer.num_nodes")
    if not devices:
        return
    layer.entries[("num_processes",)] = SettingEntry(machines * devices, origin, "trainer.devices")
    micro, whole = (_number(model, f"{name}_batch_size") or 0 for name in ("micro", "global"))
    readers = machines * devices // (_number(model, "context_parallel_size") or 1)
    steps, rest = divmod(whole, micro * readers) if micro and readers else (0, 0)
    if steps > 1 and not rest:
        path = ("shardkit", "gradient_accumulation_steps")
        layer.entries[path] = SettingEntry(steps, Origin("file", "model.global_batch_size"), "model.global_batch_size")


def _number(block: Mapping[str, Any], key: str) -> int | None:
    number = read_count(block.get(key))
    return number if isinstance(number, int) and number > 0 else None


def _without_fsdp(layer: Layer) -> list[Line]:
    """A file without FSDP keys means DDP."""
    if ("distributed_type",) in layer.entries or ("fsdp", "sharding_strategy") in layer.entries:
        return []
    layer.entries[("distributed_type",)] = SettingEntry("MULTI_GPU", Origin("file", "fsdp"), "fsdp")
    return [Line("fsdp", "changed", "missing: distributed_type: MULTI_GPU (DDP)")]


def _left_out(keys: list[str]) -> list[Line]:
    if not keys:
        return []
    names = ", ".join(keys[:6]) + (", ..." if len(keys) > 6 else "")
    return [Line(names, "left out", "about the model, the data or NeMo itself: set these in your script")]


def _yes(value: Any) -> bool:
    answer = read_bool(value)
    if not isinstance(answer, bool):
        raise Refused("is not True or False")
    return answer


_BATCHED = "the data loader's batch; their ratio over all processes is shardkit.gradient_accumulation_steps"
_MIXED_PRECISION = _one_of(_PRECISIONS, ("mixed_precision",), "mixed_precision", "32, bf16 and 16")
_REDUCE_DTYPE = "shardkit.precision.reduce_dtype"
_READINGS: dict[str, Reading] = {
    "fsdp": _fsdp,
    "fsdp_sharding_strategy": _one_of(
        _STRATEGIES, ("fsdp", "sharding_strategy"), "fsdp_sharding_strategy", "full, hybrid and grad"
    ),
    "fsdp_grad_reduce_dtype": _one_of(_DTYPES, tuple(_REDUCE_DTYPE.split(".")), _REDUCE_DTYPE, "32, bf16 and 16"),
    "fsdp_sharded_checkpoint": _state_dict_type,
    "fsdp_use_orig_params": _use_orig_params,
    "fsdp_cpu_offload": _offload,
    "megatron_amp_O2": _amp_o2,
    "optim.name": _optimizer,
    "activations_checkpoint_granularity": _activation_checkpointing,
    "trainer.precision": _MIXED_PRECISION,
    "precision": _MIXED_PRECISION,
    "trainer.accumulate_grad_batches": _as_given("shardkit.gradient_accumulation_steps"),
    "trainer.devices": _devices,
    "trainer.num_nodes": _not_a_setting(_COUNTED),
    "micro_batch_size": _not_a_setting(_BATCHED),
    "global_batch_size": _not_a_setting(_BATCHED),
    "native_amp_init_scale": _as_given("shardkit.precision.init_scale"),
    "seed": _as_given("shardkit.seed"),
    "context_parallel_size": _context,
    **dict.fromkeys(_PARALLEL, _parallel),
}
