"""The flags of launch, ours and those of other launchers, up to what every rank would run."""

import json
import re
from dataclasses import replace

import pytest

from shardkit.cli import main as command_line
from shardkit.config import files, hardware
from shardkit.config.command import settings_from
from shardkit.config.layers import flag_layer
from shardkit.config.schema import Config
from shardkit.errors import ConfigError, UsageError
from shardkit.launch import (
    flags,
    other_launchers,
)

# flags


@pytest.mark.requirement("A11")
@pytest.mark.parametrize(
    ("text", "strategy", "wraps", "offloads"),
    [
        ("full shard", "FULL_SHARD", False, False),
        ("full_shard auto_wrap", "FULL_SHARD", True, False),
        ("FULL-SHARD, offload", "FULL_SHARD", False, True),
        ("hybrid_shard_zero2 auto_wrap offload", "HYBRID_SHARD_ZERO2", True, True),
        ("hybrid shard", "HYBRID_SHARD", False, False),
        ("no_shard", "NO_SHARD", False, False),
        ("shard_grad_op auto_wrap", "SHARD_GRAD_OP", True, False),
    ],
)
def test_fsdp_in_the_trainers_words(text, strategy, wraps, offloads):
    settings = flags.fsdp_settings(text)
    assert settings.pop("distributed_type") == "FSDP"
    assert settings.pop("fsdp_config.fsdp_sharding_strategy") == strategy
    assert settings.pop("fsdp_config.fsdp_auto_wrap_policy", None) == ("TRANSFORMER_BASED_WRAP" if wraps else None)
    assert settings.pop("fsdp_config.fsdp_offload_params", None) == ("true" if offloads else None)
    assert not settings


@pytest.mark.parametrize("text", ["full shrad", "full_shard no_shard", "full_shard autowrap"])
def test_fsdp_with_an_unknown_word_is_refused(text):
    with pytest.raises(UsageError, match="--fsdp: is not a strategy and options"):
        flags.fsdp_settings(text)


@pytest.mark.requirement("A11")
def test_fsdp_config_is_a_file_or_the_folder_that_holds_it(tmp_path):
    content = {
        "min_num_params": 2000,
        "fsdp_offload_params": True,
        "transformer_layer_cls_to_wrap": ["A", "B"],
        "xla": False,
    }
    (tmp_path / "fsdp.json").write_text(json.dumps(content))
    settings = flags.fsdp_file_settings(tmp_path)
    assert settings == {
        "fsdp_config.fsdp_min_num_params": "2000",
        "fsdp_config.fsdp_offload_params": "true",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap": "A,B",
        "xla": "false",
    }
    read = files.overlaid(Config(), settings).fsdp
    assert (read.min_num_params, read.offload_params, read.transformer_layer_cls_to_wrap) == (2000, True, ["A", "B"])
    (tmp_path / "other.yaml").write_text("fsdp_config:\n  fsdp_offload_params: true\n  min_num_params: 0\n")
    assert flags.fsdp_file_settings(tmp_path / "other.yaml") == {"fsdp_config.fsdp_offload_params": "true"}
    with pytest.raises(ConfigError, match=r"should hold one JSON or YAML file \(got 2: fsdp.json, other.yaml\)"):
        flags.fsdp_file_settings(tmp_path)
    for name, text in {"empty.json": "\n", "empty.yaml": "# fsdp_offload_params: true\n"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=rf"^--fsdp-config: .*{name} is empty; write settings into it, or leave"):
            flags.fsdp_file_settings(tmp_path / name)


def test_addresses_and_settings():
    assert flags.main_settings("node-a:29501") == {"main_process_ip": "node-a", "main_process_port": "29501"}
    assert flags.main_settings("node-a") == {"main_process_ip": "node-a"}
    assert flags.main_settings(":29501") == {"main_process_port": "29501"}
    assert flags.main_settings("[fd00::1]:29501") == {"main_process_ip": "fd00::1", "main_process_port": "29501"}
    assert flags.main_settings("[fd00::1]") == flags.main_settings("fd00::1") == {"main_process_ip": "fd00::1"}
    with pytest.raises(UsageError, match="HOST:PORT"):
        flags.main_settings("node-a:port")
    assert settings_from(["a=1", "b=c=d"]) == {"a": "1", "b": "c=d"}
    with pytest.raises(UsageError, match="--set: is not KEY=VALUE"):
        settings_from(["a"])


@pytest.mark.requirement("A11")
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("-n 2 -m pkg -n 3 --a_b 4", "-n 2 -m pkg -- -n 3 --a_b 4"),
        ("train.py -m x --num_processes 2", "train.py -m x --num_processes 2"),
        ("--cpu train.py -m x", "--cpu train.py -m x"),
        ("--num_processes=2 --config_file a.yaml --use_cpu t.py", "--num-processes=2 --config a.yaml --cpu t.py"),
        ("--use_fsdp --debug t.py --debug", "--set distributed_type=FSDP --set debug=true t.py --debug"),
        ("--fsdp_sharding_strategy 2 t.py", "--set fsdp_config.fsdp_sharding_strategy=2 t.py"),
        ("--fsdp-offload-params=true t.py", "--set fsdp_config.fsdp_offload_params=true t.py"),
        ("--fsdp full_shard --fsdp_config c t.py", "--fsdp full_shard --fsdp-config c t.py"),
        ("--main_process_port 0 t.py", "--set main_process_port=0 t.py"),
        ("--set a_b=1 --max_restarts 3 -- t.py -x", "--set a_b=1 --restarts 3 -- t.py -x"),
        ("--num_processes", "--num-processes"),
        ("--deepspeed c.json t.py", '--set deepspeed_config={"deepspeed": "c.json"} t.py'),
        ("--dynamo_backend=no t.py", '--set dynamo_config={"dynamo_backend": "no"} --set shardkit.compile=false t.py'),
        (
            "--zero_stage 2 -q --use_deepspeed --zero3_init_flag=false t.py",
            '--set deepspeed_config={"zero_stage": "2", "zero3_init_flag": "false"} '
            "--set distributed_type=DEEPSPEED t.py",
        ),
        (
            "--fp8_backend AO --dynamo_use_dynamic t.py --fp8_backend",
            '--set fp8_config={"backend": "AO"} --set dynamo_config={"dynamo_use_dynamic": "true"} t.py --fp8_backend',
        ),
        (
            "--nnodes 1 --rdzv-id=7 --rdzv_conf timeout=9 --tee 3 -r 1 --monitor_interval 5 --mps t.py --tee 3",
            "--num-machines 1 t.py --tee 3",
        ),
        (
            "--local-addr 10.0.0.2 --start_method spawn --shutdown-timeout=9 --tpu_cluster t.py --no_python",
            "--set shardkit.launch.stop_timeout_s=9 --set tpu_use_cluster=true t.py --no_python",
        ),
    ],
)
def test_accelerates_flags_and_where_the_script_begins(given, read):
    with_value = {
        "-n",
        "--num-processes",
        "--set",
        "-m",
        "--module",
        "--config",
        "--fsdp",
        "--fsdp-config",
        "--restarts",
    }
    assert " ".join(other_launchers.in_our_words(given.split(), with_value)) == read


@pytest.mark.parametrize(
    "flag", ["--no_python", "--no-python", "--run-path", "--virtual_local_rank", "--numa-binding=node"]
)
def test_flags_that_change_what_runs_are_refused_with_what_to_do(flag, capsys):
    assert command_line.run(["launch", flag, "train.py"]) == 2
    name = flag.partition("=")[0].replace("_", "-")
    assert re.match(rf"{name}: .*; \w+ .*\.$", capsys.readouterr().err)


@pytest.mark.parametrize(("word", "devices", "ranks"), [("gpu", 4, 4), ("auto", 4, 4), ("auto", 0, 6), ("cpu", 4, 6)])
def test_torchruns_words_for_the_ranks_of_a_machine_count_what_is_here(monkeypatch, word, devices, ranks):
    found = hardware.Hardware((hardware.Device("H100", 2**36, "cuda"),) * devices, 6, 2**40)
    monkeypatch.setattr(hardware, "detect", lambda: found)
    words = other_launchers.in_our_words(["--nnodes=2", f"--nproc-per-node={word}", "train.py"], set())
    assert words == ["-n", str(2 * ranks), "--num-machines", "2", "train.py"]
    monkeypatch.setattr(hardware, "detect", lambda: replace(found, devices=()))
    with pytest.raises(UsageError, match=r"--nproc-per-node: this machine has no GPU \(got gpu\); write a number"):
        other_launchers.in_our_words(["--nproc-per-node", "gpu"], set())


def test_keys_of_accelerates_files_are_settings_of_a_command_too():
    given = "--dynamo_backend inductor --fsdp_activation_checkpointing_offload true"
    given += " --parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2"
    words = other_launchers.in_our_words(given.split(" "), {"--set"})
    layer = flag_layer(settings_from(words[1::2]))
    assert layer.problems == [] and {".".join(path): entry.value for path, entry in layer.entries.items()} == {
        "shardkit.compile": "true",
        "shardkit.mesh.replicate_size": "2",
        "shardkit.mesh.shard_size": "2",
        "shardkit.offload_activations": "true",
    }
    refused = flag_layer({"megatron_lm_config": '{"megatron_lm_tp_degree": "2"}', "dynamo_backend": "ipex"})
    assert refused.problems == [
        "--set megatron_lm_config: Megatron-LM is not run here (got {'megatron_lm_tp_degree': '2'}); use fsdp_config.",
        "--set dynamo_backend: this backend is not supported (got ipex); use INDUCTOR.",
    ]


# the command line up to the ranks


def dry_run(capsys, *arguments: str) -> dict:
    code = command_line.run(["launch", "--dry-run", "--json", *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


@pytest.mark.requirement("A8")
@pytest.mark.requirement("A9")
def test_accelerates_spelling_and_the_documents_own_example_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "example.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\ndowncast_bf16: 'no'\nfsdp_config:\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_backward_prefetch_policy: BACKWARD_PRE\n"
        "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_forward_prefetch: false\n  fsdp_offload_params: true\n"
        "  fsdp_sharding_strategy: 1\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  fsdp_sync_module_states: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: BertLayer\n  fsdp_use_orig_params: true\nmachine_rank: 0\n"
        "main_training_function: main\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 2\nrdzv_backend: static\n"
        "same_network: true\ntpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nuse_cpu: false\n"
    )
    monkeypatch.chdir(tmp_path)
    launched = dry_run(capsys, "--config_file", "example.yaml", "--cpu", "train.py", "--num_processes", "9")
    assert launched["arguments"] == ["--num_processes", "9"]
    assert (launched["world_size"], launched["device"], launched["backend"]) == (2, "cpu", "gloo")
    assert launched["strategy"] == "FSDP FULL_SHARD, CPU offload, wrap BertLayer"
    assert launched["mixed_precision"] == "bf16"
    fsdp = ["--fsdp=shard_grad_op", "--num_processes", "4"]
    launched = dry_run(capsys, "--config_file", "example.yaml", "--use_cpu", *fsdp, "train.py")
    assert launched["world_size"] == 4
    assert launched["config"]["fsdp_config"]["fsdp_sharding_strategy"] == "SHARD_GRAD_OP"


@pytest.mark.parametrize(
    ("words", "ranks", "machines", "machine"),
    [
        (("--nproc_per_node", "2"), 2, 1, 0),
        (("--standalone", "--nproc-per-node=3"), 3, 1, 0),
        (("--nproc_per_node=2", "--nnodes=2", "--node_rank=1", "--rdzv_endpoint=127.0.0.1:29511"), 4, 2, 1),
        (("--nnodes", "3", "--master_addr", "127.0.0.1", "--master_port", "29511", "--nproc_per_node", "1"), 3, 3, 0),
    ],
)
def test_torchruns_spelling(tmp_path, capsys, monkeypatch, words, ranks, machines, machine):
    (tmp_path / "train.py").touch()
    (tmp_path / "shardkit.yaml").write_text("num_machines: 4\nnum_processes: 8\nuse_cpu: true\n")
    monkeypatch.chdir(tmp_path)
    launched = dry_run(capsys, *words, "train.py", "--nproc_per_node", "9")
    assert launched["arguments"] == ["--nproc_per_node", "9"]
    config = launched["config"]
    found = (launched["world_size"], config["num_machines"], config["machine_rank"])
    assert found == (ranks, machines, machine)
    assert machines == 1 or (config["main_process_ip"], config["main_process_port"]) == ("127.0.0.1", 29511)


def test_a_dry_run_shows_what_every_rank_would_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "shardkit.yaml").write_text("use_cpu: true\n")
    monkeypatch.chdir(tmp_path)
    assert command_line.run(["launch", "--cpu", "-n", "2", "--dry-run", "train.py", "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    assert " | shardkit.yaml | " in shown  # as README prints it, not its whole path
    assert "shardkit/launch/bootstrap.py train.py --lr 1" in shown
    assert "ACCELERATE_MIXED_PRECISION=" in shown
    assert "Nothing was started" in shown
    assert not (tmp_path / "runs").exists()


def test_all_problems_come_at_once_and_nothing_starts(tmp_path, capsys, monkeypatch):
    (tmp_path / "shardkit.yaml").write_text("num_procesess: 2\nfsdp_config:\n  fsdp_offload_param: true\n")
    monkeypatch.chdir(tmp_path)
    assert command_line.run(["launch", "--fsdp", "fully", "trian.py"]) == 2
    said = capsys.readouterr().err
    assert "--fsdp: is not a strategy" in said
    assert "script trian.py does not exist" in said
    assert "shardkit.yaml:1:1: num_procesess: unknown key" in said
    assert "fsdp_offload_param: unknown key" in said
    assert "4 errors. Nothing was started." in said


def test_errors_name_the_flag_that_was_typed(tmp_path, capsys, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "trainer.json").write_text('{"min_num_params": "many"}')
    monkeypatch.chdir(tmp_path)
    wrong = ["-n", "x", "--num-machines", "0", "--mixed-precision", "half", "--restarts=-1", "--main", "a:99999"]
    assert command_line.run(["launch", *wrong, "--fsdp-config", "trainer.json", "--set", "debug=7", "train.py"]) == 2
    *said, _ = capsys.readouterr().err.splitlines()
    flags = ["--main", "--num-processes", "--num-machines", "--mixed-precision", "--restarts", "--set debug"]
    assert sorted(line.split(": ")[0] for line in said) == sorted([*flags, "--fsdp-config trainer.json"])


def test_a_flag_whose_variable_is_not_set_is_told(tmp_path, capsys, monkeypatch):
    """It gave the default in place of the file's value: one rank, fp32, no resume."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    flags = ["--num-processes", "--num-machines", "--main", "--mixed-precision", "--restarts", "--resume", "--logs"]
    assert command_line.run(["launch", "--fsdp", "", *(f"{flag}=" for flag in flags), "train.py"]) == 2
    *said, _ = capsys.readouterr().err.splitlines()
    of_flag = "{}: has no value (got an empty text, as from a variable that is not set); write one."
    assert sorted(said) == sorted(of_flag.format(flag) for flag in flags)
