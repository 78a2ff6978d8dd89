"""Answers -> Config, and back, so that an edited file starts with its answers."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from typing import Any

from shardkit.config import host_port
from shardkit.config.keys import all_keys
from shardkit.config.meaning import runs_on_cpu
from shardkit.config.schema import Config, DistributedType, ShardingStrategy
from shardkit.wizard import conditions
from shardkit.wizard.question import Question
from shardkit.wizard.questions import QUESTIONS
from shardkit.wizard.readers import split_address
from shardkit.wizard.situation import CPU, ELSEWHERE, HERE, SEVERAL, SLURM, TPU, Situation

_SETTINGS = {key.name for key in all_keys().values()}


def walk(situation: Situation, given: Mapping[str, Any]) -> Iterator[tuple[Question, Situation]]:
    """All questions in order, each with its situation: the settled answers of those before it. What is given to a
    question when it has been yielded counts for those after it."""
    for question in QUESTIONS:
        yield question, situation
        situation = _with_answer(situation, question, given)


def settle(situation: Situation, given: Mapping[str, Any], until: str | None = None) -> Situation:
    """The situation with the answer of every question that applies: the given one if it is possible, else the default.
    Stops before the question `until`."""
    for question in QUESTIONS:
        if question.key == until:
            break
        situation = _with_answer(situation, question, given)
    return situation


def _with_answer(situation: Situation, question: Question, given: Mapping[str, Any]) -> Situation:
    if not question.applies(situation):
        return situation
    return replace(situation, answers={**situation.answers, question.key: answer_of(question, situation, given)})


def answer_of(question: Question, situation: Situation, given: Mapping[str, Any]) -> Any:
    """The given answer of a question that applies, if it is still possible; else its default."""
    if question.key in given and is_possible(question, situation, given[question.key]):
        return given[question.key]
    return question.default(situation).value


def is_possible(question: Question, situation: Situation, value: Any) -> bool:
    """Whether the answer is possible in this situation."""
    if question.kind == "choose":
        return any(option.value == value and not option.disabled for option in question.options(situation))
    try:
        read = question.check(situation, typed(question, value))
    except ValueError:
        return False
    return read == value if value in (None, []) else True


def typed(question: Question, value: Any) -> str:
    """The text to type for that answer."""
    if value is None or value == []:
        return "none"
    separator = "; " if question.key == "commands" else ", "
    return separator.join(value) if isinstance(value, list) else str(value)


def to_config(situation: Situation) -> Config:
    """The configuration for the settled answers. Settings without a question are kept from `situation.base`."""
    data = situation.base.model_dump()
    for question in QUESTIONS:
        if question.key in _SETTINGS:
            default = all_keys()[tuple(question.key.split("."))].default
            _put(data, question.key, situation.answers.get(question.key, default))
    _put_place(data, situation)
    _drop_what_contradicts(data, situation)
    return Config.model_validate(data)


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    *blocks, last = key.split(".")
    for block in blocks:
        data = data[block]
    data[last] = value


def _put_place(data: dict[str, Any], s: Situation) -> None:
    """Sets device, number of machines and processes, and address."""
    data["num_machines"], data["num_processes"] = s.machines, s.world_size
    data["distributed_type"] = kind = _distributed_type(s)
    if kind is not DistributedType.MULTI_CPU:
        data["use_cpu"] = s.on_cpu
    _put_address(data, s)


def _put_address(data: dict[str, Any], s: Situation) -> None:
    address = s.answers.get("address")
    if address:
        data["main_process_ip"], data["main_process_port"] = split_address(address)
        return
    data["main_process_ip"] = None
    if (s.machines > 1) is not (s.base.num_machines > 1):
        data["main_process_port"] = None


def _distributed_type(s: Situation) -> DistributedType:
    """FSDP covers all five strategies; an equivalent type of an edited file is kept."""
    if s.on_tpu:
        return DistributedType.XLA
    if s.world_size == 1:
        alone = s.has_base and s.base.num_processes == 1 and s.base.distributed_type is not DistributedType.XLA
        return s.base.distributed_type if alone else DistributedType.NO
    ddp = DistributedType.MULTI_CPU if s.on_cpu else DistributedType.MULTI_GPU
    if s.strategy is ShardingStrategy.NO_SHARD and s.base.distributed_type is ddp:
        return ddp
    return DistributedType.FSDP


def _drop_what_contradicts(data: dict[str, Any], s: Situation) -> None:
    """Resets settings of an edited file that have no meaning with the new answers."""
    data["fsdp"]["reshard_after_forward"] = None
    if s.has_base and data["distributed_type"] is s.base.distributed_type and not s.shards:
        _keep_unused(data["fsdp"], s)
    if data["distributed_type"] in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        data["fsdp"]["sharding_strategy"] = s.base.fsdp.sharding_strategy
    mesh = data["shardkit"]["mesh"]
    sizes = [size for size in (mesh["replicate_size"], mesh["shard_size"]) if size]
    fits = all(s.world_size % size == 0 for size in sizes)
    product = len(sizes) < 2 or sizes[0] * sizes[1] == s.world_size
    if s.strategy is None or not s.strategy.is_hybrid or not fits or not product:
        mesh["replicate_size"] = mesh["shard_size"] = 0
    chosen = data["gpu_ids"]
    if chosen and chosen.lower() != "all" and len(chosen.split(",")) < s.per_machine:
        data["gpu_ids"] = None


def _keep_unused(fsdp: dict[str, Any], s: Situation) -> None:
    """Keeps FSDP settings of an edited file that have no effect."""
    if s.strategy is not None and s.base.mode == "fsdp":
        return
    for key, value in s.base.fsdp.model_dump().items():
        if f"fsdp.{key}" not in s.answers:
            fsdp[key] = value


def from_config(config: Config, situation: Situation) -> dict[str, Any]:
    """The answers that result in `config`."""
    given: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.key in _SETTINGS:
            given[question.key] = _plain(attrgetter(question.key)(config))
    given["where"] = _place(config, situation)
    given["processes_per_machine"] = config.processes_per_machine
    given["address"] = _address(config.main_process_ip, config.main_process_port)
    if config.distributed_type in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        given["fsdp.sharding_strategy"] = ShardingStrategy.NO_SHARD.value
    if config.distributed_type is DistributedType.MULTI_CPU:
        given["use_cpu"] = True
    given |= _details(situation, given)
    settled = settle(situation, given).answers
    return {key: value for key, value in given.items() if key in settled}


def _details(situation: Situation, given: Mapping[str, Any]) -> dict[str, str]:
    """The answer about FSDP's details: "each" if a file differs from the suggestion."""
    own = [question for question in QUESTIONS if question.asked is conditions.each_detail and question.key in given]
    here = settle(situation, {key: value for key, value in given.items() if key not in {q.key for q in own}})
    same = all(given[q.key] == here.answers[q.key] for q in own if q.key in here.answers)
    return {} if same else {"details": "each"}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _address(host: str | None, port: int | None) -> str | None:
    if host is None or port is None:
        return host
    return host_port.joined(host, port)


def _place(config: Config, s: Situation) -> str:
    on_cpu = runs_on_cpu(config)
    if config.distributed_type is DistributedType.XLA:
        return TPU
    if config.num_machines > 1:
        return SLURM if s.is_in_slurm_job else SEVERAL
    if on_cpu:
        return CPU if s.gpus else HERE
    return HERE if s.gpus and config.num_processes <= s.gpus else ELSEWHERE
