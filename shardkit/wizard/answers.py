"""Answers -> Config, and back, so that an edited file starts with its answers."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from enum import Enum
from operator import attrgetter
from typing import Any

from shardkit.config import checks, host_port
from shardkit.config.keys import all_keys
from shardkit.config.meaning import runs_on_cpu
from shardkit.config.schema import Config, DistributedType, ShardingStrategy
from shardkit.wizard import conditions
from shardkit.wizard.question import Question
from shardkit.wizard.questions import QUESTIONS
from shardkit.wizard.readers import FormError, split_address
from shardkit.wizard.situation import CPU, ELSEWHERE, HERE, SEVERAL, SLURM, TPU, Situation

_DEFAULTS = {key.name: getattr(key.default, "value", key.default) for key in all_keys().values()}
_SETTINGS = set(_DEFAULTS)
_CHANGED_BY_ANSWERS = [question.key for question in QUESTIONS if question.key in _SETTINGS]
# No question asks for these; they have to suit the answers.
_CHANGED_BY_ANSWERS += ["shardkit.mesh.replicate_size", "shardkit.mesh.shard_size", "gpu_ids"]
_DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


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
        found = question.read(situation, typed(question, value))
    except FormError:
        return situation.has_base and value == _own(situation.base, question)
    except ValueError:
        return False
    return found == value if value in (None, []) else True


def _own(config: Config, question: Question) -> Any:
    """The configuration's value of what a question asks for: a setting, or the address, which two of them hold."""
    if question.key == "address":
        return _address(config.main_process_ip, config.main_process_port)
    return _plain(attrgetter(question.key)(config))


def typed(question: Question, value: Any) -> str:
    """The text to type for that answer."""
    if value is None or value == []:
        return "none"
    separator = "; " if question.key == "commands" else ", "
    return separator.join(value) if isinstance(value, list) else str(value)


def to_config(situation: Situation) -> Config:
    """The configuration for the settled answers. Settings that no question asks for, neither now nor when the file was
    opened, are kept from `situation.base`; those that contradict the answers are not."""
    kept = _unasked(situation)
    config = _with_answers(situation, kept)
    while (
        wrong := {next((key for key in finding.keys if key in kept), "") for finding in checks.problems(config)} & kept
    ):
        kept -= wrong
        config = _with_answers(situation, kept)
    return config


def _unasked(situation: Situation) -> set[str]:
    """The settings in which the answers say nothing about an opened file."""
    opened = replace(situation, answers={})
    before = settle(opened, from_config(opened.base, opened)).answers if opened.has_base else {}
    return {key for key in _CHANGED_BY_ANSWERS if key not in situation.answers and key not in before}


def _with_answers(situation: Situation, kept: Set[str]) -> Config:
    data = situation.base.model_dump()
    for key in _CHANGED_BY_ANSWERS:
        if key not in kept:
            _set(data, key, situation.answers.get(key, all_keys()[tuple(key.split("."))].default))
    _set_place(data, situation)
    return Config.model_validate(data)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *blocks, last = key.split(".")
    for block in blocks:
        data = data[block]
    data[last] = value


def _set_place(data: dict[str, Any], s: Situation) -> None:
    """Sets device, number of machines and processes, and address."""
    data["num_machines"], data["num_processes"] = s.machines, s.world_size
    data["distributed_type"] = kind = _distributed_type(s)
    says_device = kind not in (DistributedType.MULTI_CPU, DistributedType.XLA)  # of which use_cpu is only a variant
    data["use_cpu"] = s.on_cpu if says_device or kind is not s.base.distributed_type else s.base.use_cpu
    if kind in _DDP:
        data["fsdp"]["sharding_strategy"] = s.base.fsdp.sharding_strategy
    _set_address(data, s)


def _set_address(data: dict[str, Any], s: Situation) -> None:
    address, is_new = s.answers.get("address"), (s.machines > 1) is not (s.base.num_machines > 1)
    if address:
        data["main_process_ip"], data["main_process_port"] = split_address(address)
        return
    if s.machines > 1 or is_new:
        data["main_process_ip"] = None
    if is_new:
        data["main_process_port"] = None


def _distributed_type(s: Situation) -> DistributedType:
    """FSDP covers all five strategies; an equivalent type of an edited file is kept."""
    if s.on_tpu:
        return DistributedType.XLA
    if s.world_size == 1:
        alone = s.has_base and s.base.num_processes == 1 and s.base.distributed_type is not DistributedType.XLA
        return s.base.distributed_type if alone else DistributedType.NO
    is_alike = s.base.distributed_type in _DDP and runs_on_cpu(s.base) is s.on_cpu
    return s.base.distributed_type if is_alike and s.strategy is ShardingStrategy.NO_SHARD else DistributedType.FSDP


def from_config(config: Config, situation: Situation) -> dict[str, Any]:
    """The answers that result in `config`, and those that it has for questions which do not apply yet."""
    given: dict[str, Any] = {}
    for question in QUESTIONS:
        if question.key in _SETTINGS or question.key == "address":
            given[question.key] = _own(config, question)
    given["where"] = _place(config, situation)
    given["processes_per_machine"] = config.processes_per_machine
    if config.distributed_type in _DDP:
        given["fsdp.sharding_strategy"] = ShardingStrategy.NO_SHARD.value
    if config.distributed_type is DistributedType.MULTI_CPU:
        given["use_cpu"] = True
    given |= _details(situation, given)
    settled = settle(situation, given).answers
    own = {key: value for key, value in given.items() if key != "use_cpu" and value != _DEFAULTS.get(key)}
    return own | {key: value for key, value in given.items() if key in settled}


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
