"""Every file that the wizard can write loads, round-trips, and is valid: sampled over all answers."""

import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit import templates
from shardkit.config import checks, edit, files, validation
from shardkit.config.command import settings_of
from shardkit.config.hardware import Hardware
from shardkit.config.keys import all_keys, value_at
from shardkit.config.scheduler import Scheduler
from shardkit.config.schema import Config
from shardkit.errors import ConfigError
from shardkit.launch.spec import launch_spec
from shardkit.model.sources import describe
from shardkit.wizard import commands
from shardkit.wizard.answers import from_config, settle, to_config
from shardkit.wizard.questions import QUESTIONS, by_key
from shardkit.wizard.situation import Situation
from tests.wizard_talk import CPU_ONLY, EIGHT_GPUS, OLD_GPUS, SMALL_GPT

IN_A_JOB = Hardware(EIGHT_GPUS.devices, 64, EIGHT_GPUS.memory_bytes, Scheduler("SLURM", 4, 1, "node03", "17"))
SIZES_ONLY = describe(SMALL_GPT)
WITH_CLASSES = replace(SIZES_ONLY, spec="my_model:build")
TYPED = {
    "model": ["none"],
    "num_machines": ["2", "3", "16"],
    "address": ["none", "node-a", "node-a:29501", "[::1]:29500", "10.0.0.1:1"],
    "processes_per_machine": ["1", "2", "8"],
    "fsdp.transformer_layer_cls_to_wrap": ["none", "BertLayer", "T5Block, ViTLayer"],
    "fsdp.min_num_params": ["1", "1e8", "50M"],
    "tpu_name": ["none", "my-pod", "null: yes"],
    "tpu_zone": ["none", "us-central1-a"],
    "shardkit.gradient_accumulation_steps": ["1", "4"],
    "shardkit.seed": ["none", "0", "1e6"],
    "shardkit.launch.max_restarts": ["0", "3"],
    "shardkit.launch.min_machines": ["none", "1", "2"],
    "gpu_memory": ["48GiB", "24 GB"],
    "machine_rank": ["launch", "1"],
    "main_training_function": ["main", "train"],
    "tpu_vm": ["none", "vm-1, vm-2"],
    "tpu_env": ["none", "A=1, B=x y"],
    "commands": ["none", "ls -l; echo '#, no: comment'"],
}


def possible(question, here):
    """The answers that the question takes as things are, of those that are typed here."""
    values = []
    for text in TYPED[question.key]:
        with suppress(ValueError):
            values.append(question.read(here, text))
    return values


@st.composite
def answered(draw):
    """A situation in which every question that applies got one of its possible answers."""
    hardware = draw(st.sampled_from([CPU_ONLY, EIGHT_GPUS, OLD_GPUS, IN_A_JOB]))
    situation = Situation(hardware, model=draw(st.sampled_from([None, SIZES_ONLY, WITH_CLASSES])))
    given_answers = {}
    for question in QUESTIONS:
        here = settle(situation, given_answers, until=question.key)
        if not question.applies(here):
            continue
        options = [option.value for option in question.options(here) if not option.disabled]
        if question.kind == "choose":
            given_answers[question.key] = draw(st.sampled_from(options))
        elif options:
            given_answers[question.key] = draw(st.lists(st.sampled_from(options), unique=True))
        else:
            given_answers[question.key] = draw(st.sampled_from(possible(question, here)))
    return settle(situation, given_answers), given_answers


SAMPLED = settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@pytest.mark.requirement("D1")
@SAMPLED
@given(answered())
def test_every_file_loads_and_says_what_was_answered(sample):
    situation, answers = sample
    config = to_config(situation)
    assert checks.problems(config) == []
    assert files.read_text(files.dump(config)).config == config
    assert files.read_text(files.dump(config, comments=False)).config == config
    assert config.num_processes == situation.world_size
    ranks = situation.machines if situation.on_tpu else situation.world_size  # one rank drives them all
    assert launch_spec(config, "train.py").world_size == ranks
    kept = {key: value for key, value in situation.answers.items() if key in answers}
    assert kept == answers, "an answer that was possible is not in the file"


@pytest.mark.slow
@SAMPLED
@given(answered())
def test_every_file_can_be_edited_without_a_change(sample):
    situation, _ = sample
    config = to_config(situation)
    base = Situation(situation.hardware, model=situation.model, base=config, has_base=True)
    assert to_config(settle(base, from_config(config, base))) == config
    assert edit.edited(files.dump(config), config) == files.dump(config)


@pytest.mark.slow
@SAMPLED
@given(answered())
def test_the_settings_of_the_printed_command_give_the_same_configuration(sample):
    config = to_config(sample[0])
    assert files.suggest(settings_of(config)).config == config


WRITTEN_BY_HAND = [
    "num_processes: 8\nshardkit:\n  launch:\n    max_restarts: 5000\n",
    "distributed_type: MULTI_GPU\nnum_processes: 8\n",
    "distributed_type: MULTI_CPU\nnum_processes: 4\n",
    "distributed_type: NO\n",
    "distributed_type: FSDP\nnum_processes: 1\nfsdp_config:\n  fsdp_offload_params: true\n",
    "num_processes: 4\nuse_cpu: true\nmixed_precision: fp16\n",
    "num_processes: 4\nnum_machines: 2\n",
    "num_processes: 4\nnum_machines: 2\nmain_process_ip: node-a\nmain_process_port: 0\n",
    "num_processes: 4\nfsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n",
    "num_processes: 4\nfsdp_config:\n  fsdp_sharding_strategy: 4\nshardkit:\n  mesh:\n    replicate_size: 2\n",
    "num_processes: 4\nmain_process_port: 3000\ngpu_ids: 0,1,2,3\n",
    "xla: true\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: 2\n  fsdp_transformer_layer_cls_to_wrap: A\n"
    "xla_fsdp_settings:\n  compute_dtype: bfloat16\n",
    "distributed_type: XLA\nnum_processes: 8\nmain_training_function: pkg.main\n"
    "tpu_env: ['LIBTPU_INIT_ARGS=--xla_a=1,--xla_b=2', 'my.path=/a:/b']\n",
    "num_processes: 4\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: my.Block\n",
]
SHIPPED = [*templates.folder().glob("*.yaml"), *(Path(__file__).parent / "data" / "config").glob("example*.yaml")]


TEXTS = {f"text {number}": text for number, text in enumerate(WRITTEN_BY_HAND)}
TEXTS |= {path.stem: path.read_text() for path in sorted(SHIPPED)}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_enter_all_the_way_through_an_existing_file_changes_nothing(text):
    """On any machine, the values of an opened file are possible answers to all questions."""
    config = files.read_text(text).config
    for hardware in (CPU_ONLY, EIGHT_GPUS, OLD_GPUS):
        base = Situation(hardware, base=config, has_base=True)
        assert to_config(settle(base, from_config(config, base))) == config


def test_a_files_own_form_of_a_value_is_kept_but_not_taken_for_an_answer():
    """It became the default: what is typed is split at commas, what a file has is not."""
    config = files.read_text(WRITTEN_BY_HAND[-2]).config
    base = Situation(EIGHT_GPUS, base=config, has_base=True)
    answers = from_config(config, base)
    assert settle(base, answers | {"tpu_env": ["A=1"]}).answers["tpu_env"] == ["A=1"]
    assert settle(base, answers | {"tpu_env": ["A=1,--b"]}).answers["tpu_env"] == []
    with pytest.raises(ValueError, match="not NAME=value"):
        by_key("tpu_env").read(base, "A=1,--b")


OPENED = [
    "num_processes: 1\ndistributed_type: NO\n",
    "num_processes: 2\nuse_cpu: true\n",
    "num_processes: 8\nmixed_precision: bf16\n",
    "num_processes: 8\ndistributed_type: MULTI_GPU\nuse_cpu: true\n",
    "num_processes: 4\ndistributed_type: MULTI_CPU\nmixed_precision: fp16\n",
    "distributed_type: XLA\nxla: true\nnum_processes: 8\nfsdp_config: {fsdp_sharding_strategy: 4}\n",
]
OTHER_VALUES = {"list": "A=1", "dict": "{compute_dtype: bfloat16}", "int": "2", "float": "2", "str": "abc"}
OF_THE_BASE = {"distributed_type", "num_machines", "num_processes", "use_cpu"}


def with_every_setting_changed(config):
    """The configuration with another value of each setting that may have one there."""
    for path, key in all_keys().items():
        kind = next((kind for kind in OTHER_VALUES if kind in str(key.field.annotation)), "str")
        values = [*validation.choices_of(key.field)[::-1], OTHER_VALUES[kind], "true", "false", "0"]
        for value in values if key.name not in OF_THE_BASE else []:
            with suppress(ConfigError):
                changed = files.overlaid(config, {key.name: value})
                if value_at(changed, path) != value_at(config, path):
                    config = changed
                    break
    return config


@pytest.mark.slow
@pytest.mark.parametrize("text", OPENED)
def test_no_setting_of_an_opened_file_is_lost_where_no_question_asks_for_it(text):
    """rdzv_backend on one machine, reduce_dtype under DDP, mesh sizes on a TPU, ... got their defaults."""
    config = with_every_setting_changed(files.read_text(text).config)
    changed = [path for path, key in all_keys().items() if value_at(config, path) != key.default]
    assert len(changed) > 70
    for hardware in (CPU_ONLY, EIGHT_GPUS):
        base = Situation(hardware, base=config, has_base=True)
        saved = to_config(settle(base, from_config(config, base)))
        assert {path: value_at(saved, path) for path in changed} == {path: value_at(config, path) for path in changed}


def test_a_setting_that_no_question_asked_for_is_the_answer_once_one_does():
    config = files.read_text("num_processes: 1\ndistributed_type: NO\ndebug: true\nrdzv_backend: etcd\n").config
    base = Situation(EIGHT_GPUS, base=config, has_base=True)
    answers = from_config(config, base) | {"where": "several", "processes_per_machine": 8}
    after = to_config(settle(base, answers))
    assert (after.debug, after.rdzv_backend, after.num_processes) == (True, "etcd", 16)


def test_a_setting_that_no_question_asked_for_goes_where_it_contradicts_the_answers():
    text = "num_processes: 1\ndistributed_type: NO\nfsdp_config: {fsdp_offload_params: true}\ngpu_ids: 3\n"
    config = files.read_text(text).config
    base = Situation(EIGHT_GPUS, base=config, has_base=True)
    assert to_config(settle(base, from_config(config, base))) == config
    answers = {"processes_per_machine": 8, "fsdp.sharding_strategy": "NO_SHARD"}
    after = to_config(settle(base, from_config(config, base) | answers))
    assert (after.fsdp.offload_params, after.gpu_ids, after.num_processes) == (False, None, 8)


@pytest.mark.slow
@SAMPLED
@given(answered(), st.sampled_from(list(TEXTS.values())))
def test_no_edit_leaves_a_file_that_contradicts_itself(sample, text):
    situation, answers = sample
    base = Situation(situation.hardware, situation.model, base=files.read_text(text).config, has_base=True)
    changed = to_config(settle(base, answers))
    assert checks.problems(changed) == []
    assert files.read_text(edit.edited(text, changed)).config == changed


def test_every_typed_answer_is_sampled():
    free = {question.key for question in QUESTIONS if question.kind != "choose"}
    assert free == set(TYPED)


@pytest.mark.parametrize("hardware", [CPU_ONLY, EIGHT_GPUS, OLD_GPUS])
def test_the_defaults_are_those_of_the_flags(hardware):
    """Enter all the way gives what `--defaults` gives on the same machine."""
    from shardkit.config import hardware_defaults

    config = to_config(settle(Situation(hardware), {}))
    flags = {".".join(path): value for path, value in hardware_defaults.for_hardware(hardware).items()}
    expected = files.overlaid(Config(), {name: str(value) for name, value in flags.items()})
    assert config == expected


def test_one_machine_takes_at_most_six_questions():
    for hardware in (CPU_ONLY, EIGHT_GPUS):
        situation = settle(Situation(hardware), {})
        on_the_way = [q.key for q in QUESTIONS if q.key in situation.answers and q.asked(situation)]
        assert len(on_the_way) <= 6, on_the_way


def test_every_question_has_help_and_every_option_a_consequence():
    base = settle(Situation(EIGHT_GPUS), {"where": "several"})
    for question in QUESTIONS:
        assert question.help, question.key
        for option in question.options(base):
            assert option.consequence or option.disabled, (question.key, option.value)


def test_a_size_with_a_space_is_one_word_of_the_printed_command():
    s = Situation(CPU_ONLY, answers={"where": "elsewhere", "gpu": "other", "gpu_memory": "48 GiB"})
    plan = commands.lines(s, Path("shardkit.yaml"), "m:f")[-1]
    assert shlex.split(plan)[-2:] == ["--device", "48 GiB"]


@pytest.mark.parametrize("key", ["shardkit.seed", "shardkit.gradient_accumulation_steps", "fsdp.min_num_params"])
def test_numbers_that_a_file_may_not_have_are_refused_where_they_are_typed(key):
    question = next(question for question in QUESTIONS if question.key == key)
    with pytest.raises(ValueError, match=r"out of range \(got 1,0+"):
        question.read(Situation(CPU_ONLY), "1" + "0" * 30)
    with pytest.raises(ValueError, match=r"not a whole number \(got 'many'\); give \d to 1[0-9,]+\.$"):
        question.read(Situation(CPU_ONLY), "many")


def test_a_seed_is_not_rounded():
    question = next(question for question in QUESTIONS if question.key == "shardkit.seed")
    assert question.read(Situation(CPU_ONLY), str(2**64 - 1)) == 2**64 - 1
