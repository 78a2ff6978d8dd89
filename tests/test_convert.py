"""Other tools' files: every key is accounted for, and what cannot be had is refused by name."""

from pathlib import Path

import pytest
import yaml

from shardkit.config import files
from shardkit.config.meaning import mesh_sizes
from shardkit.config.schema import Config
from shardkit.convert.read import convert
from shardkit.convert.report import Conversion, in_words
from shardkit.convert.to_accelerate import to_accelerate

DATA = Path(__file__).parent / "data" / "config"

FSDP1 = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_reshard_after_forward: SHARD_GRAD_OP
  fsdp_transformer_layer_cls_to_wrap: [BertLayer, BertEmbeddings]
  fsdp_wrap_polcy: NO_WRAP
  fsdp_version: 1
num_processes: 2
tpu_env: []
deepspeed_config: {}
"""

FSDP2 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_backward_prefetch: BACKWARD_POST
  fsdp_activation_checkpointing: true
num_processes: 8
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 1
dynamo_config:
  dynamo_backend: INDUCTOR
"""


def converted(text: str, tmp_path: Path) -> Conversion:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    return convert(path)


def account(conversion: Conversion) -> dict[str, tuple[str, str]]:
    return {line.key: (line.verdict, line.text) for line in conversion.lines}


def test_every_key_of_a_version_1_file_is_accounted_for(tmp_path):
    conversion = converted(FSDP1, tmp_path)
    lines = account(conversion)
    written = yaml.safe_load(FSDP1)
    fsdp = written.pop("fsdp_config")
    assert list(lines) and set(lines) == {*written, *(f"fsdp_config.{key}" for key in fsdp)}
    assert lines["num_processes"] == ("kept", "num_processes: 2")
    assert lines["fsdp_config.fsdp_reshard_after_forward"] == (
        "changed",
        "is read as fsdp_sharding_strategy: SHARD_GRAD_OP; Accelerate ignores it and runs FULL_SHARD",
    )
    assert lines["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] == (
        "kept",
        'fsdp_transformer_layer_cls_to_wrap: "BertLayer,BertEmbeddings"; Accelerate reads the whole list as one name',
    )
    assert lines["fsdp_config.fsdp_wrap_polcy"][0] == "refused"
    assert "Accelerate ignores it silently" in lines["fsdp_config.fsdp_wrap_polcy"][1]
    assert lines["deepspeed_config"] == ("left out", "sets nothing here")
    assert conversion.config.fsdp.sharding_strategy.value == "SHARD_GRAD_OP"
    assert "8 kept, 1 changed, 1 left out, 1 refused" in in_words(conversion)


def test_a_version_2_file_with_a_mesh_and_compile(tmp_path):
    conversion = converted(FSDP2, tmp_path)
    lines = account(conversion)
    assert conversion.refused == []
    assert conversion.config.fsdp.sharding_strategy.value == "HYBRID_SHARD"
    assert (conversion.config.shardkit.mesh.replicate_size, conversion.config.shardkit.compile) == (2, True)
    assert lines["parallelism_config"][0] == lines["dynamo_config"][0] == "changed"
    assert lines["fsdp_config.fsdp_backward_prefetch"] == (
        "kept",
        "fsdp_backward_prefetch: BACKWARD_POST; Accelerate does not use it with fsdp_version 2",
    )


def test_keys_without_fsdp_in_front_are_read_by_accelerate_too(tmp_path):
    text = "distributed_type: FSDP\nfp8_config:\n  fp8_backend: AO\nfsdp_config:\n  version: 2\n"
    text += "  sharding_strategy: 2\n  fsdp_transformer_cls_to_wrap: A\n  backward_prefetch: BACKWARD_POST\n"
    lines = account(converted(text, tmp_path))
    assert lines["fp8_config"][0] == "left out"
    silent = {key for key, (_, text) in lines.items() if "ignores this spelling" in text}
    assert silent == {"fsdp_config.fsdp_transformer_cls_to_wrap"}
    assert "does not use it with fsdp_version 2" in lines["fsdp_config.backward_prefetch"][1]


def test_settings_of_an_axis_with_one_rank_are_left_out(tmp_path):
    sizes = "  parallelism_config_sp_size: 1\n  parallelism_config_sp_seq_length_is_variable: true\n"
    sizes += "  parallelism_config_tp_size: 1\n  parallelism_config_cp_comm_strategy: alltoall\n"
    text = f"distributed_type: FSDP\nnum_processes: 4\nparallelism_config:\n{sizes}"
    assert converted(text, tmp_path).refused == []
    used = converted(text.replace("sp_size: 1", "sp_size: 2"), tmp_path)
    assert account(used)["parallelism_config"] == ("changed", "sp_size is read as shardkit.mesh.context_size: 2")
    assert used.config.shardkit.mesh.context_size == 2
    used = converted(text.replace("tp_size: 1", "tp_size: 2"), tmp_path)
    assert "tp_size is not supported (got 2)" in account(used)["parallelism_config"][1]


def test_a_block_that_sets_nothing_is_left_out_with_the_reason(tmp_path):
    text = "distributed_type: FSDP\nnum_processes: 4\nfp8_config: {backend: AO}\n"
    lines = account(converted(text + "parallelism_config: {parallelism_config_dp_shard_size: 4}\n", tmp_path))
    assert lines["fp8_config"] == ("left out", "sets nothing here")
    reason = "one replica over all ranks needs no mesh; its size is num_processes"
    assert lines["parallelism_config"] == ("left out", reason)


def test_a_mac_in_an_older_file_is_one_process(tmp_path):
    config = converted("distributed_type: MPS\nnum_processes: 1\nuse_cpu: false\n", tmp_path).config
    assert (config.distributed_type.value, config.use_cpu) == ("NO", False)


def test_the_documents_example_is_kept_but_for_two_spellings():
    conversion = convert(DATA / "example.yaml")
    changed = {line.key: line.text for line in conversion.lines if line.verdict != "kept"}
    assert changed == {
        "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_backward_prefetch: BACKWARD_PRE; "
        "Accelerate ignores this spelling silently",
        "fsdp_config.fsdp_sharding_strategy": "fsdp_sharding_strategy: FULL_SHARD",
    }


def test_several_cpu_processes_without_mpirun_are_said_to_have_been_one(tmp_path):
    lines = account(converted("distributed_type: MULTI_CPU\nnum_processes: 4\n", tmp_path))
    assert lines["num_processes"] == (
        "kept",
        "num_processes: 4; Accelerate starts one process, not 4, unless mpirun is configured",
    )


def test_problems_without_a_key_of_their_own_are_refused_too(tmp_path):
    conversion = converted("num_processes: 2\nnum_processes: 4\nnum_machines: 3\n", tmp_path)
    texts = " ".join(line.text for line in conversion.refused)
    assert "is given twice (first in line 1)" in texts and "is not divisible by the number of machines" in texts


@pytest.mark.requirement("N1")
@pytest.mark.requirement("N2")
def test_a_nemo_model_configuration():
    conversion = convert(DATA / "nemo.yaml")
    config = conversion.config
    assert conversion.refused == []
    assert (config.mode, config.fsdp.sharding_strategy.value) == ("fsdp", "FULL_SHARD")
    assert config.shardkit.precision.reduce_dtype == "bf16"
    assert (config.fsdp.state_dict_type.value, config.fsdp.use_orig_params) == ("FULL_STATE_DICT", False)
    assert account(conversion)["optim.name"] == (
        "left out",
        "your script creates the optimizer: torch.optim.AdamW(..., fused=True)",
    )
    assert files.read_text(files.dump(config)).config == config


@pytest.mark.requirement("N1")
@pytest.mark.parametrize(
    ("written", "strategy"), [("full", "FULL_SHARD"), ("hybrid", "HYBRID_SHARD"), ("grad", "SHARD_GRAD_OP")]
)
def test_a_whole_nemo_file(written, strategy, tmp_path):
    conversion = converted(
        "trainer:\n  devices: 8\n  num_nodes: 2\n  precision: bf16-mixed\n  max_steps: 100\n"
        f"model:\n  fsdp: True\n  fsdp_sharding_strategy: {written}\n  fsdp_sharded_checkpoint: True\n"
        "  activations_checkpoint_granularity: full\n  hidden_size: 4096\n  seed: 5\n  tensor_model_parallel_size: 1\n",
        tmp_path,
    )
    config = conversion.config
    assert conversion.refused == []
    assert (config.fsdp.sharding_strategy.value, config.mixed_precision) == (strategy, "bf16")
    assert (config.num_machines, config.num_processes, config.shardkit.seed) == (2, 16, 5)
    assert config.fsdp.state_dict_type.value == "SHARDED_STATE_DICT" and config.fsdp.activation_checkpointing
    assert account(conversion)["trainer.max_steps, model.hidden_size"][0] == "left out"


def test_nemos_batches_give_the_accumulation_and_no_fsdp_is_ddp(tmp_path):
    conversion = converted(
        "trainer: {devices: 4, num_nodes: 2, precision: 16}\n"
        "model: {megatron_amp_O2: False, micro_batch_size: 2, global_batch_size: 64, native_amp_init_scale: 4096}\n",
        tmp_path,
    )
    config = conversion.config
    assert (config.mode, config.num_processes, config.shardkit.gradient_accumulation_steps) == ("ddp", 8, 4)
    assert (config.mixed_precision, config.shardkit.precision.init_scale) == ("fp16", 4096.0)
    assert account(conversion)["fsdp"] == ("changed", "missing: distributed_type: MULTI_GPU (DDP)")


@pytest.mark.parametrize(("size", "steps"), [(1, 4), (2, 8)])
def test_nemos_ranks_that_share_sequences_read_one_batch(size, steps, tmp_path):
    model = f"fsdp: True, micro_batch_size: 2, global_batch_size: 64, context_parallel_size: {size}"
    conversion = converted(f"trainer: {{devices: 4, num_nodes: 2}}\nmodel: {{{model}}}\n", tmp_path)
    found = conversion.config.shardkit
    assert (found.mesh.context_size, found.gradient_accumulation_steps) == (size, steps)
    verdict = ("left out", "not used") if size == 1 else ("changed", "shardkit.mesh.context_size: 2")
    assert account(conversion)["model.context_parallel_size"] == verdict
    tensors = converted("model: {fsdp: True, tensor_model_parallel_size: 2}\n", tmp_path)
    assert "only data and context parallelism are supported" in account(tensors)["model.tensor_model_parallel_size"][1]


@pytest.mark.parametrize(
    ("devices", "count", "gpu_ids", "text"),
    [
        ("[0, 1, 2, 5]", 8, "0,1,2,5", "gpu_ids: 0,1,2,5; counted in num_processes"),
        ("'2,3'", 4, "2,3", "gpu_ids: 2,3; counted in num_processes"),
        ("'4'", 8, None, "counted in num_processes and num_machines"),
        ("-1", None, None, "all of each machine, as without num_processes"),
        ("auto", None, None, "all of each machine, as without num_processes"),
    ],
)
def test_nemos_devices_are_a_number_a_list_or_all(devices, count, gpu_ids, text, tmp_path):
    conversion = converted(f"trainer: {{devices: {devices}, num_nodes: 2}}\nmodel: {{fsdp: True}}\n", tmp_path)
    assert conversion.refused == [] and account(conversion)["trainer.devices"][1] == text
    written = yaml.safe_load(files.dump(conversion.config))
    assert (written.get("num_processes"), written.get("gpu_ids"), written["num_machines"]) == (count, gpu_ids, 2)


@pytest.mark.requirement("N3")
@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("fsdp: True\ntrainer:\n  devices: most\n", "trainer.devices", "not a number of devices, their numbers, -1"),
        ("fsdp: True\ntrainer:\n  devices: []\n", "trainer.devices", "not a number of devices, their numbers, -1"),
        ("megatron_amp_O2: True\nfsdp: True\n", "megatron_amp_O2", "megatron_amp_O2 does not work with FSDP"),
        ("fsdp: True\noptim:\n  name: distributed_fused_adam\n", "optim.name", "use fused_adam"),
        ("fsdp: True\noptim:\nname: distributed_fused_adam\n", "optim.name", "does not work with FSDP"),
        ("fsdp: True\nfsdp_sharding_strategy: most\n", "fsdp_sharding_strategy", "not one of full, hybrid and grad"),
        ("model:\n  fsdp: True\n  tensor_model_parallel_size: 2\n", "model.tensor_model_parallel_size", "write 1"),
    ],
)
def test_what_nemo_has_and_fsdp_has_not_is_refused_by_name(text, key, words, tmp_path):
    refused = converted(text, tmp_path).refused
    assert [line.key for line in refused] == [key] and words in refused[0].text


def test_a_file_for_accelerate_says_the_same_in_its_words():
    config = Config(
        num_machines=2,
        num_processes=16,
        mixed_precision="bf16",
        main_process_ip="node-a",
        fsdp={"sharding_strategy": 5, "transformer_layer_cls_to_wrap": ["A", "B"], "forward_prefetch": True},
        shardkit={"seed": 3, "compile": True},
    )
    text, lost = to_accelerate(config)
    data = yaml.safe_load(text)
    assert "shardkit" not in data and data["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert data["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "A,B"
    assert data["parallelism_config"]["parallelism_config_dp_replicate_size"] == 2
    assert lost == [
        "fsdp_config.fsdp_forward_prefetch: true: Accelerate does not use it with fsdp_version 2.",
        "shardkit.seed: 3: Accelerate has no such setting.",
    ]
    back = files.read_text(text).config
    assert back.fsdp.sharding_strategy is config.fsdp.sharding_strategy and back.shardkit.compile
    assert back.fsdp.transformer_layer_cls_to_wrap == ["A", "B"] and back.main_process_ip == "node-a"


@pytest.mark.parametrize("mesh", [{}, {"fsdp": {"sharding_strategy": 4}, "num_machines": 2, "main_process_ip": "a"}])
def test_ranks_that_share_sequences_are_written_for_accelerate(mesh):
    config = Config(num_processes=8, shardkit={"mesh": {"context_size": 2}}, **mesh)
    text, lost = to_accelerate(config)
    assert lost == [
        "shardkit.mesh.context_size: 2: Accelerate's ranks pass keys and values around instead (ring attention): "
        "attention must be causal, and masks are left out."
    ]
    sizes = yaml.safe_load(text)["parallelism_config"]
    assert (sizes["parallelism_config_dp_shard_size"], sizes["parallelism_config_cp_size"]) == (2 if mesh else 4, 2)
    back = files.read_text(text).config
    assert back.shardkit.mesh.context_size == 2
    assert mesh_sizes(back, 8, 4) == mesh_sizes(config, 8, 4)


@pytest.mark.parametrize("other", [{"distributed_type": "MULTI_GPU"}, {"fsdp": {"sharding_strategy": 4}}])
def test_ranks_that_share_sequences_otherwise_than_in_accelerate_are_listed(other):
    mesh = {"context_size": 4, "replicate_size": 4, "shard_size": 2} if "fsdp" in other else {"context_size": 4}
    text, lost = to_accelerate(Config(num_processes=8, shardkit={"mesh": mesh}, **other))
    assert lost == [
        "shardkit.mesh.context_size: 4: Accelerate has it under FSDP only, where the ranks of a shard group share "
        "sequences."
    ]
    assert "cp_size: 4" not in text


def test_no_shard_and_cpu_are_ddp_for_accelerate():
    text, lost = to_accelerate(Config(num_processes=2, use_cpu=True, fsdp={"sharding_strategy": 3}))
    data = yaml.safe_load(text)
    assert data["distributed_type"] == "MULTI_CPU" and "fsdp_config" not in data
    assert len(lost) == 2 and "starts one process" in lost[0] and "is written as distributed_type" in lost[1]
    _, lost = to_accelerate(Config(num_processes=2, use_cpu=True))
    assert lost == ["use_cpu: true: Accelerate has no FSDP on the CPU."]


def test_precisions_in_8_bits_are_written_as_accelerate_has_them():
    text, lost = to_accelerate(Config(num_processes=2, mixed_precision="mxfp8"))
    assert yaml.safe_load(text)["mixed_precision"] == "bf16" and "fp8_config" not in yaml.safe_load(text)
    assert lost == ["mixed_precision: mxfp8: Accelerate has no such precision; bf16 is written."]
    text, lost = to_accelerate(Config(num_processes=2, mixed_precision="fp8"))
    assert yaml.safe_load(text)["fp8_config"] == {"backend": "AO", "enable_fsdp_float8_all_gather": True}
    assert yaml.safe_load(text)["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False
    name = "fsdp_config.fsdp_cpu_ram_efficient_loading"
    assert lost == [f"{name}: true: Accelerate refuses it in fp8; false is written."]
    assert files.read_text(text).config.mixed_precision == "fp8"
    _, lost = to_accelerate(Config(num_processes=2, mixed_precision="fp8", distributed_type="MULTI_GPU"))
    assert lost == []


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_accelerate_itself_reads_what_we_write_for_it(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import PrecisionType

    for name, config in {
        "fsdp": Config(num_processes=2, mixed_precision="bf16", debug=True),
        "hybrid": Config(num_processes=4, num_machines=2, fsdp={"sharding_strategy": 4}, shardkit={"compile": True}),
        "ddp": Config(num_processes=2, distributed_type="MULTI_GPU"),
        "one": Config(distributed_type="NO", tpu_name="t"),
        "fp8": Config(num_processes=2, mixed_precision="fp8"),
        "mxfp8": Config(num_processes=2, mixed_precision="mxfp8"),
    }.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_accelerate(config)[0])
        loaded = load_config_from_file(str(path))
        assert loaded.num_processes == config.num_processes
        assert loaded.mixed_precision in PrecisionType.list()
    path = tmp_path / "ours.yaml"
    files.write(Config(num_processes=2), path)
    assert load_config_from_file(str(path)).fsdp_config["fsdp_sharding_strategy"] == "FULL_SHARD"
