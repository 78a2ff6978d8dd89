"""Files: what is read, what is refused and in which words, what is written, and that reading gives it back."""

import hashlib
import os
import re
import stat
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardkit.cli.main import run
from shardkit.config import accelerate_keys, files
from shardkit.config.command import settings_of
from shardkit.config.descriptions import text_of
from shardkit.config.edit import edited, edited_by_line
from shardkit.config.host_port import problem_of_host
from shardkit.config.json_schema import json_schema
from shardkit.config.keys import all_keys, sections
from shardkit.config.meaning import MeshSizes, mesh_sizes
from shardkit.config.schema import (
    CheckpointConfig,
    Config,
    FsdpConfig,
    LaunchConfig,
    MeshConfig,
    PrecisionConfig,
    ShardingStrategy,
    ShardkitConfig,
)
from shardkit.errors import ConfigError
from shardkit.wizard.review import why_not_writable

DATA = Path(__file__).parent / "data" / "config"


def problems(text: str | bytes, tmp_path: Path) -> list[str]:
    """What reading the text complains about, without the folder in front."""
    path = tmp_path / "shardkit.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as raised:
        files.read(path)
    lines = str(raised.value).replace(f"{tmp_path}/", "").splitlines()
    assert raised.value.exit_code == 2
    return lines


def config_of(text: str) -> Config:
    return files.read_text(text).config


@pytest.mark.requirement("A8")
@pytest.mark.requirement("A7")
@pytest.mark.parametrize("name", ["example.yaml", "example-flat.yaml"])
def test_the_documents_example_loads_unchanged(name):
    loaded = files.read(DATA / name)
    config = loaded.config
    assert (config.num_processes, config.mixed_precision, config.mode) == (2, "bf16", "fsdp")
    assert config.fsdp.offload_params
    assert config.fsdp.transformer_layer_cls_to_wrap == ["BertLayer"]
    assert config.fsdp.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert config.fsdp.cpu_ram_efficient_loading and config.fsdp.sync_module_states and config.fsdp.use_orig_params
    assert not config.downcast_bf16
    assert [note for note in loaded.notes if "fsdp_ keys are at the top level" in note] == (
        loaded.notes if "flat" in name else []
    )


@pytest.mark.requirement("A1")
@pytest.mark.parametrize(
    ("written", "strategy"),
    [
        ("1", "FULL_SHARD"),
        ("'2'", "SHARD_GRAD_OP"),
        ("no_shard", "NO_SHARD"),
        ("Hybrid Shard", "HYBRID_SHARD"),
        ("hybrid-shard-zero2", "HYBRID_SHARD_ZERO2"),
        ("5", "HYBRID_SHARD_ZERO2"),
    ],
)
def test_a_strategy_by_number_or_name(written, strategy):
    config = config_of(f"fsdp_config:\n  fsdp_sharding_strategy: {written}\n")
    assert config.fsdp.sharding_strategy.value == strategy


@pytest.mark.requirement("A3")
@pytest.mark.parametrize(
    "lines",
    [
        "fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_params: 1e6",
        "fsdp_wrap_policy: size_based_wrap\n  min_num_param: 1M",
        "auto_wrap_policy: SIZE_BASED_WRAP\n  min_num_params: 1_000_000",
        "fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n  fsdp_min_num_param: '1000000'",
    ],
)
def test_the_spellings_of_wrapping_by_size(lines):
    fsdp = config_of(f"fsdp_config:\n  {lines}\n").fsdp
    assert (fsdp.auto_wrap_policy.value, fsdp.min_num_params) == ("SIZE_BASED_WRAP", 1_000_000)


@pytest.mark.requirement("A3")
@pytest.mark.parametrize("classes", ["A,B", "[A, B]", "'A, B'", "\n  - A\n  - B"])
@pytest.mark.parametrize("key", ["fsdp_transformer_layer_cls_to_wrap", "fsdp_transformer_cls_names_to_wrap"])
def test_classes_as_text_or_list(key, classes):
    assert config_of(f"fsdp_config:\n  {key}: {classes}\n").fsdp.transformer_layer_cls_to_wrap == ["A", "B"]


@pytest.mark.requirement("A4")
@pytest.mark.parametrize("key", ["fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "backward_prefetch"])
@pytest.mark.parametrize(("word", "kind"), [("backward_post", "BACKWARD_POST"), ("null", "NO_PREFETCH")])
def test_backward_prefetch_in_any_spelling(key, word, kind):
    assert config_of(f"fsdp_config:\n  {key}: {word}\n").fsdp.backward_prefetch.value == kind


@pytest.mark.requirement("A9")
def test_words_for_yes_and_no_mean_what_they_say():
    config = config_of("mixed_precision: no\ndistributed_type: NO\nuse_cpu: yes\ndowncast_bf16: 'no'\ndebug: 0\n")
    assert (config.mixed_precision, config.mode, config.use_cpu) == ("no", "single", True)
    assert not config.downcast_bf16 and not config.debug
    assert config_of("fp16: true\n").mixed_precision == "fp16"
    assert config_of("bf16: no\n").mixed_precision == "no"


@pytest.mark.requirement("A9")
def test_the_keys_of_several_machines():
    config = config_of(
        "num_machines: 2\nnum_processes: 16\nmachine_rank: 1\nmain_process_ip: 10.0.0.1\nmain_process_port: '29501'\n"
        "rdzv_backend: c10d\nsame_network: no\ngpu_ids: 0\nmain_training_function: run\nuse_cpu: true\n"
    )
    assert (config.processes_per_machine, config.machine_rank) == (8, 1)
    assert (config.main_process_ip, config.main_process_port, config.rdzv_backend) == ("10.0.0.1", 29501, "c10d")
    assert (config.same_network, config.gpu_ids, config.main_training_function) == (False, "0", "run")


@pytest.mark.requirement("A10")
def test_the_keys_of_tpus():
    config = config_of(
        "distributed_type: FSDP\nxla: True\nxla_fsdp_settings: {compute_dtype: bfloat16, depth: 2}\n"
        "xla_fsdp_grad_ckpt: True\ntpu_use_sudo: 'yes'\ntpu_env: ['']\ntpu_vm: [a, b]\ndowncast_bf16: 'yes'\n"
    )
    assert config.mode == "xla"
    assert config.xla_fsdp_settings == {"compute_dtype": "bfloat16", "depth": 2}
    assert config.xla_fsdp_grad_ckpt and config.tpu_use_sudo is True and config.downcast_bf16
    assert (config.tpu_env, config.tpu_vm) == ([], ["a", "b"])
    inside = config_of("fsdp_config:\n  xla: true\n  xla_fsdp_settings:\n  xla_fsdp_grad_ckpt: true\n")
    assert inside.mode == "xla" and inside.xla_fsdp_grad_ckpt and inside.xla_fsdp_settings == {}


def test_a_strategys_name_in_reshard_after_forward_is_honoured_with_a_note():
    loaded = files.read_text("fsdp_config:\n  fsdp_version: 1\n  fsdp_reshard_after_forward: SHARD_GRAD_OP\n")
    assert loaded.config.fsdp.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    assert loaded.notes == [
        "shardkit.yaml:3:31: fsdp_config.fsdp_reshard_after_forward: is read as fsdp_sharding_strategy: "
        "SHARD_GRAD_OP; Accelerate ignores it and runs FULL_SHARD."
    ]


@pytest.mark.parametrize(
    ("lines", "strategy"),
    [
        ("fsdp_reshard_after_forward: false", "SHARD_GRAD_OP"),
        ("fsdp_reshard_after_forward: true", "FULL_SHARD"),
        ("fsdp_reshard_after_forward: null", "FULL_SHARD"),
        ("fsdp_sharding_strategy: 5\n  fsdp_reshard_after_forward: false", "HYBRID_SHARD_ZERO2"),
        ("fsdp_version: 1\n  fsdp_sharding_strategy: 2\n  fsdp_reshard_after_forward: true", "SHARD_GRAD_OP"),
        ("fsdp_sharding_strategy: NO_SHARD\n  fsdp_reshard_after_forward: true", "NO_SHARD"),
    ],
)
def test_reshard_after_forward_becomes_a_strategy(lines, strategy):
    fsdp = config_of(f"fsdp_config:\n  {lines}\n").fsdp
    assert (fsdp.sharding_strategy.value, fsdp.reshard_after_forward) == (strategy, None)


def test_accelerates_mesh_and_compile_are_ours():
    sizes = "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n"
    config = config_of(
        f"num_processes: 8\nparallelism_config:\n{sizes}  parallelism_config_tp_size: 1\n"
        "dynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_mode: default\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
    )
    assert config.fsdp.sharding_strategy is ShardingStrategy.HYBRID_SHARD_ZERO2
    assert config.shardkit.mesh == MeshConfig(replicate_size=2, shard_size=4)
    assert config.shardkit.compile


@pytest.mark.parametrize("sizes", [("2", "-1"), ("-1", "4")])
def test_a_size_of_minus_one_is_what_the_other_leaves(sizes):
    lines = "parallelism_config: {{dp_replicate_size: {}, dp_shard_size: {}}}\n".format(*sizes)
    config = config_of(f"distributed_type: FSDP\nnum_processes: 8\n{lines}")
    assert config.fsdp.sharding_strategy is ShardingStrategy.HYBRID_SHARD
    assert mesh_sizes(config, 8, 8) == MeshSizes(2, 4)


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ("cp_size: 2, cp_comm_strategy: alltoall, cp_backend: torch", {"context_size": 2}),
        ("dp_shard_size: 4, cp_size: 2", {"context_size": 2}),
        (
            "dp_replicate_size: 2, dp_shard_size: 2, cp_size: '2'",
            {"replicate_size": 2, "shard_size": 4, "context_size": 2},
        ),
        ("sp_size: 4, sp_backend: deepspeed, sp_seq_length: 256, sp_attn_implementation: sdpa", {"context_size": 4}),
        ("cp_size: 1, sp_size: 1, tp_size: 1, tp_backend: null", {}),
    ],
)
def test_accelerates_ranks_that_share_sequences_are_ours(sizes, mesh):
    config = config_of(f"distributed_type: FSDP\nnum_processes: 8\nparallelism_config: {{{sizes}}}\n")
    assert config.shardkit.mesh == MeshConfig(**mesh)
    assert config.fsdp.sharding_strategy.is_hybrid == ("replicate_size" in mesh)


def test_what_is_wrong_with_accelerates_sequence_sizes(tmp_path):
    wrong = "num_processes: 8\nparallelism_config: {cp_size: 2, sp_size: 4, cp_siz: 2, pp_stages: 3}\n"
    found = "\n".join(problems(wrong, tmp_path))
    assert "cp_size and sp_size both divide the sequences (got 2 and 4); write one of them." in found
    assert "cp_siz is not supported (got 2)" in found and "pp_stages is not supported (got 3)" in found
    uneven = "\n".join(problems("num_processes: 8\nparallelism_config: {cp_size: 3}\n", tmp_path))
    assert "does not divide the number of ranks (got 3 of 8); choose a divisor" in uneven


def test_accelerates_offloaded_checkpoints_are_offloaded_activations():
    lines = "fsdp_config:\n  fsdp_activation_checkpointing: true\n  fsdp_activation_checkpointing_offload: "
    assert config_of(f"{lines}true\n").shardkit.offload_activations
    assert not config_of(f"{lines}false\n").shardkit.offload_activations


def test_keys_of_things_we_do_not_do_are_fine_while_they_say_nothing(tmp_path):
    config_of(
        "deepspeed_config: {}\nmegatron_lm_config:\nfp8_config: {}\nparallelism_config: {}\ndynamo_config:\n"
        "  dynamo_backend: 'NO'\nmpirun_config:\n  mpirun_ccl: '1'\nipex_config:\n  ipex: false\n  use_xpu: true\n"
    )
    lines = problems(
        "deepspeed_config:\n  zero_stage: 3\nparallelism_config:\n  parallelism_config_tp_size: 2\n"
        "dynamo_config:\n  dynamo_backend: AOT_EAGER\ncompute_environment: AMAZON_SAGEMAKER\n"
        "distributed_type: MULTI_NEURON\nmixed_precision: fp8\nregion: us-east-1\n"
        "fsdp_config:\n  fsdp_state_dict_type: LOCAL_STATE_DICT\n",
        tmp_path,
    )
    for position, words in enumerate(
        [
            "shardkit.yaml:1:1: deepspeed_config: DeepSpeed is not run here (got {'zero_stage': '3'}); use fsdp_config",
            "shardkit.yaml:3:1: parallelism_config: tp_size is not supported (got 2); write 1, or leave it out.",
            "shardkit.yaml:5:1: dynamo_config: this backend is not supported (got aot_eager); use INDUCTOR.",
            "shardkit.yaml:7:22: compute_environment: is not supported (got 'AMAZON_SAGEMAKER'); SageMaker jobs are",
            "shardkit.yaml:8:19: distributed_type: is not supported (got 'MULTI_NEURON'); AWS Trainium is not",
            "shardkit.yaml:10:1: region: SageMaker jobs are not started here",
            "shardkit.yaml:12:25: fsdp_config.fsdp_state_dict_type: is not supported (got 'LOCAL_STATE_DICT'); it only",
        ]
    ):
        assert lines[position].startswith(words)


@pytest.mark.parametrize("name", ["MULTI_XPU", "multi_npu", "MULTI_MUSA"])
def test_ddp_on_any_accelerator(name):
    """Accelerate's files name the kind of accelerator; the ranks take what their machine has."""
    assert config_of(f"distributed_type: {name}\nnum_processes: 2\n").distributed_type.value == "MULTI_GPU"


def test_what_deepspeed_did_beside_zero_is_named(tmp_path):
    block = "zero_stage: 2, gradient_accumulation_steps: 8, gradient_clipping: 1.0, offload_optimizer_device: cpu"
    (line,) = problems(f"deepspeed_config: {{{block}}}\n", tmp_path)
    wanted = "shardkit.offload_optimizer: true, shardkit.gradient_accumulation_steps: 8, accelerator.clip_grad_norm_("
    assert line.endswith(f", with {wanted}model.parameters(), 1.0) in the script.")
    both = "deepspeed_config: {zero_stage: 3, offload_param_device: cpu, offload_optimizer_device: cpu}\n"
    assert problems(both, tmp_path)[0].endswith("ZeRO 3 is FULL_SHARD), with fsdp_offload_params: true.")
    (line,) = problems("deepspeed_config: {zero_stage: 3, offload_param_device: none}\n", tmp_path)
    assert line.endswith("ZeRO 3 is FULL_SHARD).")


def test_everything_that_is_wrong_is_told_at_once_with_its_place(tmp_path):
    lines = problems(
        "num_procesess: 2\n"
        "num_machines: two\n"
        "fsdp_config:\n"
        "  fsdp_offload_parms: true\n"
        "  num_processes: 4\n"
        "  fsdp_sharding_strategy: FULL_SHRAD\n"
        "shardkit:\n"
        "  checkpoint:\n"
        "    keep_lst: 3\n"
        "    timeout_s: -1\n"
        "main_process_port: 99999\n",
        tmp_path,
    )
    assert lines == [
        "shardkit.yaml:1:1: num_procesess: unknown key; did you mean num_processes?",
        "shardkit.yaml:2:15: num_machines: is not a whole number (got 'two'); write one such as 1.",
        "shardkit.yaml:4:3: fsdp_config.fsdp_offload_parms: unknown key; did you mean fsdp_offload_params?",
        "shardkit.yaml:5:3: fsdp_config.num_processes: unknown key; num_processes belongs at the top level",
        "shardkit.yaml:6:27: fsdp_config.fsdp_sharding_strategy: is not one of the choices (got 'FULL_SHRAD'); "
        "did you mean FULL_SHARD?",
        "shardkit.yaml:9:5: shardkit.checkpoint.keep_lst: unknown key; did you mean keep_last?",
        "shardkit.yaml:10:16: shardkit.checkpoint.timeout_s: is too small (got '-1'); write more than 0.",
        "shardkit.yaml:11:20: main_process_port: is too large (got '99999'); write 65535 or less.",
    ]


def test_the_names_known_in_a_block_are_listed_once(tmp_path):
    lines = problems("alpha: 1\nfsdp_config:\n  beta: 1\n  gamma: 2\ndelta: 1\nsharding: full\n", tmp_path)
    assert len(lines) == 5 and lines.pop().endswith("did you mean fsdp_config.fsdp_sharding_strategy?")
    listed = [line.split("known here: ")[1].split(",")[0] for line in lines]
    assert listed == ["command_file", "fsdp_activation_checkpointing", "as above", "as above"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "shardkit.yaml: is empty"),
        ("# nothing but a comment\n", "shardkit.yaml: is empty"),
        ("- a\n- b\n", "shardkit.yaml:1:1: is not made of `key: value` lines (got a list)"),
        ("just words\n", "shardkit.yaml:1:1: is not made of `key: value` lines (got 'just words')"),
        ("debug: no\n\tuse_cpu: no\n", "shardkit.yaml:2:1: indented with a tab"),
        ("fsdp_config:\n\tfsdp_version: 2\n", "shardkit.yaml:2:1: indented with a tab"),
        ("use_cpu:\ttrue\n", "shardkit.yaml:1:9: a tab; write spaces."),
        ("debug: [\n", "shardkit.yaml:2:1: is not YAML"),
        ("debug: no\n---\ndebug: yes\n", "shardkit.yaml:2:1: a second document begins here"),
        ("debug: no\ndebug: yes\n", "shardkit.yaml:2:1: debug: is given twice (first in line 1); keep one"),
        (b"\x80\x04\x95binary", "shardkit.yaml: is not a UTF-8 text file (got byte 0x80 at 0)"),
        (b"PK\x03\x04\x00\x00", "shardkit.yaml: is not a text file (got NUL bytes)"),
        ("debug: \x07\n", "shardkit.yaml:1:8: a character that YAML does not allow"),
        ("fsdp_config: 3\n", "shardkit.yaml:1:14: fsdp_config: is not a block of keys (got '3'); indent its keys"),
        ("debug: {a: 1}\n", "shardkit.yaml:1:8: debug: is not yes or no (got \"{'a': '1'}\")"),
        (
            "fsdp_config:\n  fsdp_backward_prefetch: {a: 1}\n  fsdp_reshard_after_forward: [a]\n",
            "shardkit.yaml:2:27: fsdp_config.fsdp_backward_prefetch: is not one of the choices",
        ),
        ("? [a, b]\n: 1\n", "shardkit.yaml:1:3: a key must be a plain name."),
        ("debug: !!python/object/apply:os.system [echo]\n", "shardkit.yaml:1:8: tags are not read (got !!python/"),
        ("debug: !secret x\n", "shardkit.yaml:1:8: tags are not read (got !secret)"),
        ("fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: \"['A', 'B']\"\n", "is not the name of a class"),
        ("fsdp_config:\n  fsdp_wrap_policy: NO_WRAP\n  fsdp_auto_wrap_policy: NO_WRAP\n", "sets the same as"),
        ("fsdp_config:\n  fsdp_sharding_strategy: 1\n  fsdp_reshard_after_forward: no\n", "means SHARD_GRAD_OP, but"),
        (
            "shardkit:\n  launch:\n    hang_timeout_s: 10m\n",
            "shardkit.yaml:3:21: shardkit.launch.hang_timeout_s: is not a number (got '10m'); write one such as 600.",
        ),
        ("lr: 0.1\n", "shardkit.yaml:1:1: lr: unknown key; it belongs in your training script"),
        (
            "zero_optimization: {stage: 2}\n",
            "zero_optimization: unknown key; it is DeepSpeed's. DeepSpeed is not run here; use fsdp_config (ZeRO 2 is",
        ),
        (
            "megatron_amp_O2: no\n",
            "unknown key; it is NeMo's; convert the file with: shardkit config convert shardkit.yaml",
        ),
    ],
)
def test_what_is_refused_says_where_and_why(text, words, tmp_path):
    assert words in problems(text, tmp_path)[0]


@pytest.mark.slow
def test_large_and_exploding_files_are_refused_at_once(tmp_path):
    assert "is too large for a configuration" in problems(b"debug: no # " + b"x" * 2**21, tmp_path)[0]
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    assert "too many nested values or aliases" in problems("\n".join(levels), tmp_path)[0]
    assert "too many nested values" in problems("a: &a [*a]\n", tmp_path)[0]
    assert "nested too deeply" in problems("a: " + "[" * 5000 + "]" * 5000, tmp_path)[0]
    assert len(problems("".join(f"key{i}: 1\n" for i in range(500)), tmp_path)) == 500  # all at once


def test_aliases_and_merged_blocks_are_read():
    config = config_of(
        "fsdp_config: &base\n  fsdp_offload_params: true\n  fsdp_version: 1\nshardkit: {seed: 3, <<: {compile: true}}\n"
    )
    assert config.fsdp.offload_params and config.shardkit.compile and config.shardkit.seed == 3


@pytest.mark.parametrize("text", ["\ufeffdebug: yes\n", "debug: yes\r\nuse_cpu: no\r\n", "debug: yes"])
def test_byte_order_marks_and_line_ends_of_windows(text, tmp_path):
    path = tmp_path / "shardkit.yaml"
    path.write_bytes(text.encode())
    assert files.read(path).config.debug


def test_a_missing_file_a_folder_and_one_that_may_not_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.yaml: there is no such file; write one with: shardkit config"):
        files.read(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="is a folder; name the YAML file in it"):
        files.read(tmp_path)


def test_writing_replaces_a_file_entirely(tmp_path):
    path = tmp_path / "shardkit.yaml"
    path.write_text("old")
    files.write(Config(num_processes=3), path)
    assert files.read(path).config == Config(num_processes=3)
    assert os.listdir(tmp_path) == ["shardkit.yaml"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(ConfigError, match="there is no folder"):
        files.write(Config(), tmp_path / "missing" / "shardkit.yaml")


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path, capsys):
    """As root, `-o /dev/null --force` put a file in the place of the device."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for write in (files.write_text, files.replace_text):
        with pytest.raises(ConfigError, match="pipe: is a device or a pipe; name a file"):
            write("debug: yes\n", path)
    assert run(["config", "--defaults", "--force", "-o", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[0] == f"{path}: is a device or a pipe; name a file."
    assert why_not_writable(path) == files.why_no_file(path)
    assert path.is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_file_is_written_where_the_path_is_not_utf_8(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.yaml")
    files.write_text(files.dump(Config(), path=path), path)
    assert files.read(path).config == Config()


def test_the_written_file_is_commented_ordered_and_says_what_accelerate_reads():
    text = files.dump(Config(num_processes=2, fsdp={"transformer_layer_cls_to_wrap": ["A", "B"]}))
    data = yaml.safe_load(text)
    assert list(data)[:5] == [
        "compute_environment",
        "distributed_type",
        "num_machines",
        "num_processes",
        "mixed_precision",
    ]
    assert data["mixed_precision"] == "no" and data["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "A,B"
    assert "shardkit" not in data
    assert f"# {text_of(Config, 'num_processes')}\nnum_processes: 2\n" in text
    assert "#" not in files.dump(Config(), comments=False)


def test_every_field_has_a_text():
    for key in all_keys().values():
        assert text_of(key.section, key.path[-1]).endswith((".", ":")), key.name


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)
TEXTS = (
    st.none()
    | st.sampled_from(["no", "08", "1e8", "null", "~", "a: b", "# c", "it's", "é", "- x", "yes"])
    | (WORDS.map(str.strip).filter(bool))
)
HOSTS = TEXTS.filter(lambda text: text is None or problem_of_host(text) is None)
CLASSES = st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True), max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 10**9) | st.floats(-1e3, 1e9) | st.sampled_from(["no", "a: b", "1"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["k", "v w"]), inner, max_size=2),
    max_leaves=4,
)


SECONDS = st.floats(0.001, 1e6)
CONFIGS = st.builds(
    Config,
    distributed_type=st.sampled_from(["FSDP", "MULTI_GPU", "MULTI_CPU", "XLA"]),
    mixed_precision=st.sampled_from(["no", "fp16", "bf16"]),
    num_processes=st.integers(1, 64),
    main_process_ip=HOSTS,
    main_process_port=st.none() | st.integers(0, 65535),
    rdzv_backend=st.sampled_from(["static", "c10d", "etcd-v2"]),
    same_network=st.booleans(),
    use_cpu=st.booleans(),
    main_training_function=WORDS.filter(lambda word: word.strip() != ""),
    tpu_env=st.lists(WORDS.map("A={}".format), max_size=2),
    commands=st.lists(WORDS.filter(lambda word: word.strip() != ""), max_size=2),
    tpu_name=TEXTS,
    xla_fsdp_settings=st.dictionaries(st.sampled_from(["a", "no", "b c"]), JSON, max_size=3),
    fsdp=st.builds(
        FsdpConfig,
        version=st.sampled_from([1, 2]),
        sharding_strategy=st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]),
        offload_params=st.booleans(),
        auto_wrap_policy=st.sampled_from(["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]),
        transformer_layer_cls_to_wrap=CLASSES,
        min_num_params=st.integers(1, 10**15),
        backward_prefetch=st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"]),
        forward_prefetch=st.booleans(),
        state_dict_type=st.sampled_from(["SHARDED_STATE_DICT", "FULL_STATE_DICT"]),
        use_orig_params=st.booleans(),
        ignored_modules=st.none() | st.sampled_from(["head", r"layers\.[0-9]+", "#", "a|b: c"]),
    ),
    shardkit=st.builds(
        ShardkitConfig,
        precision=st.builds(PrecisionConfig, reduce_dtype=st.sampled_from([None, "fp32", "bf16"]), init_scale=SECONDS),
        checkpoint=st.builds(CheckpointConfig, keep_last=st.integers(1, 9), timeout_s=SECONDS, resume=WORDS),
        launch=st.builds(
            LaunchConfig, log_dir=TEXTS, show=st.sampled_from(["all", "0", "0,1"]), stop_timeout_s=SECONDS
        ),
        compile=st.booleans(),
        seed=st.none() | st.integers(0, 2**63),
    ),
)
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.slow
@QUICK
@given(CONFIGS, st.booleans())
def test_reading_gives_back_what_was_written(config, comments):
    text = files.dump(config, comments)
    loaded = files.read_text(text)
    assert loaded.config == config
    assert files.dump(loaded.config, comments) == text
    assert files.digest(loaded.config) == files.digest(config)


@pytest.mark.slow
@QUICK
@given(CONFIGS)
def test_the_settings_of_a_configuration_give_it_again(config):
    assert files.overlaid(Config(), settings_of(config)) == config


@pytest.mark.slow
@settings(QUICK, max_examples=12)
@given(CONFIGS, CONFIGS)
def test_an_edited_file_says_the_new_thing(before, after):
    text = files.dump(before)
    assert edited(text, before) == text
    assert files.read_text(edited(text, after)).config == after


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_an_edit_changes_only_its_lines_and_keeps_comments(line_end):
    text = (
        "# my run\ndistributed_type: FSDP   # sharded\nfsdp_config:\n    # why: too large\n"
        "    fsdp_reshard_after_forward: SHARD_GRAD_OP  # ours\n    fsdp_transformer_layer_cls_to_wrap:\n"
        "    - A\n    - B\n\n    # the end of the block\nnum_processes: 2\nmain_process_ip:\ntpu_env: []\n"
    ).replace("\n", line_end)
    config = config_of(text)
    assert edited(text, config) == text
    changes = {"num_processes": "4", "main_process_ip": "node-a", "fsdp.transformer_layer_cls_to_wrap": "Block"}
    changes |= {"shardkit.launch.show": "0", "fsdp.sharding_strategy": "1", "fsdp.offload_params": "yes"}
    after = files.overlaid(config, changes)
    new = edited(text, after)
    assert config_of(new) == after
    for line in ["# my run", "distributed_type: FSDP   # sharded", "    # why: too large", "tpu_env: []"]:
        assert line + line_end in new
    assert "    fsdp_sharding_strategy: FULL_SHARD  # ours" + line_end in new
    assert "main_process_ip: node-a" + line_end in new
    assert "    # the end of the block" in new


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        ("{num_processes: 2} # c", {"shardkit.seed": "1"}, "{num_processes: 2, shardkit: {seed: 1}} # c"),
        ("fsdp_config: {fsdp_version: 2} # c", {"fsdp.offload_params": "yes"}, ": 2, fsdp_offload_params: true} # c"),
        ("shardkit: {} # c\ndebug: no", {"shardkit.seed": "1"}, "shardkit: # c\n  # *\n  seed: 1\ndebug: no"),
        ("shardkit: # c\ndebug: no", {"shardkit.seed": "1"}, "shardkit: # c\n  # *\n  seed: 1\ndebug: no"),
        ("fsdp_config:\n fsdp_version: 2 # c\n", {"fsdp.offload_params": "yes"}, " # *\n fsdp_offload_params: true\n"),
        (
            "fsdp_config:\n  fsdp_reshard_after_forward: true # c\n  fsdp_sharding_strategy: 1 # d\n",
            {"fsdp.sharding_strategy": "2"},
            "fsdp_reshard_after_forward: false # c\n  fsdp_sharding_strategy: SHARD_GRAD_OP # d\n",
        ),
        ("num_machines: &n 2\nnum_processes: *n # c\n", {"num_processes": "4"}, "&n 2\nnum_processes: 4 # c\n"),
        (
            "num_machines: &n 2 # c\nnum_processes: *n\n",
            {"num_machines": "1"},
            "num_machines: &n 1 # c\nnum_processes: 2\n",
        ),
        ("tpu_vm: # c\n- a\n- b # d\n", {"tpu_vm": "x"}, 'tpu_vm: ["x"] # c # d\n'),
    ],
)  # fmt: skip
def test_an_edit_keeps_comments_in_every_way_of_writing_a_block(before, changes, after):
    """`fsdp_config: {}` is what Accelerate writes; an edit of such a file wrote it anew, without its comments."""
    config = files.overlaid(config_of(before), changes)
    new = edited_by_line(before, config)
    assert new is not None and config_of(new) == config
    assert after in re.sub(r"# [A-Z].*", "# *", new)


def test_a_file_that_cannot_be_changed_by_line_is_written_anew():
    text = "fsdp_config:\n  fsdp_offload_params: true\nparallelism_config: {dp_replicate_size: 2, dp_shard_size: 4}\n"
    after = files.overlaid(
        config_of(f"num_processes: 8\n{text}"), {"shardkit.mesh.replicate_size": "4", "shardkit.mesh.shard_size": "2"}
    )
    assert edited_by_line(f"num_processes: 8\n{text}", after) is None
    assert config_of(edited(f"num_processes: 8\n{text}", after)) == after


def test_the_digest_leaves_out_what_differs_from_machine_to_machine():
    config = Config(num_machines=2, num_processes=2)
    assert files.digest(config) == files.digest(
        config.model_copy(update={"machine_rank": 1, "gpu_ids": "1", "main_process_ip": "localhost"})
    )
    own = {"show": "0", "start": "exec", "threads_per_rank": "3", "log_dir": "logs"}  # of its screen, cores, disks
    here = files.overlaid(config, {f"shardkit.launch.{name}": value for name, value in own.items()})
    assert files.digest(config) == files.digest(here)
    assert files.digest(config) != files.digest(config.model_copy(update={"mixed_precision": "bf16"}))
    assert len(files.digest(config)) == len(hashlib.sha256().hexdigest())


THEIRS = "dynamo_config: {dynamo_backend: INDUCTOR}\nparallelism_config: {}\ndeepspeed_config: {}\n"


def test_editors_accept_what_we_write_and_refuse_what_we_refuse():
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(json_schema())
    validator.check_schema(json_schema())
    for text in [
        files.dump(Config(num_processes=2, shardkit={"seed": 1})),
        (DATA / "example.yaml").read_text(),
        THEIRS,
    ]:
        assert validator.is_valid(yaml.safe_load(text))
    refused = ["num_procesess: 2", "fsdp_config: {fsdp_offload_parms: yes}", "mixed_precision: fp9"]
    for text in [*refused, "shardkit: {launch: {hang_timeout_s: 10m}}"]:
        assert not validator.is_valid(yaml.safe_load(text))
    described = validator.schema["properties"]["fsdp_config"]["properties"]["fsdp_offload_params"]
    assert described["description"] == text_of(FsdpConfig, "offload_params")
    assert len(sections()) == 9
    for section, translated in accelerate_keys._TRANSLATIONS.items():
        known = validator.schema["properties"]
        assert translated.keys() <= (known["fsdp_config"]["properties"] if section else known).keys()


def test_a_pipe_is_read_once_and_known_from_then_on():
    """`shardkit plan --config <(...)` asked for its model first, and found it empty after that."""
    reader, writer = os.pipe()
    os.write(writer, b"num_processes: 3\n")
    os.close(writer)
    path = Path(f"/dev/fd/{reader}")
    try:
        assert files.text_of_file(path) == files.text_of_file(path) == "num_processes: 3\n"
    finally:
        os.close(reader)
        files._texts_of_pipes.clear()
