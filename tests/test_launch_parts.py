"""The parts of a launch that need no rank: flags, checks, variables, output lines, diagnosis, hangs, restarts."""

import errno
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from shardkit import env
from shardkit.cli import main as command_line
from shardkit.config import files, hardware
from shardkit.config.command import settings_from
from shardkit.config.layers import FlagValue, flag_layer
from shardkit.config.schema import Config
from shardkit.errors import EXIT_MACHINE, ConfigError, HangError, MachineError, Preempted, RankFailure, UsageError
from shardkit.launch import (
    attempts,
    diagnosis,
    environment,
    failure,
    flags,
    folders,
    ports,
    preflight,
    stacks,
)
from shardkit.launch.diagnosis import RankOutcome
from shardkit.launch.hang_texts import render, rows_of, warning_of_slow
from shardkit.launch.hangs import Rank, Seen, Verdict, is_due, judge, stands_still
from shardkit.launch.output import Lines, Output
from shardkit.launch.preflight import Machine
from shardkit.launch.rank_files import ProgressWriter, RankError, RankProgress
from shardkit.launch.restarts import Restarts
from shardkit.launch.spec import launch_spec, rank_command

NO_GPU = Machine((), 2)
EIGHT = Machine(("H200",) * 8, 16, installed=8)


def config(**settings) -> Config:
    return files.overlaid(Config(), {name.replace("__", "."): str(value) for name, value in settings.items()})


def texts(problems) -> str:
    return "\n".join(problem.text for problem in problems)


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
    assert " ".join(flags.in_our_words(given.split(), with_value)) == read


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
    words = flags.in_our_words(["--nnodes=2", f"--nproc-per-node={word}", "train.py"], set())
    assert words == ["-n", str(2 * ranks), "--num-machines", "2", "train.py"]
    monkeypatch.setattr(hardware, "detect", lambda: replace(found, devices=()))
    with pytest.raises(UsageError, match=r"--nproc-per-node: this machine has no GPU \(got gpu\); write a number"):
        flags.in_our_words(["--nproc-per-node", "gpu"], set())


def test_keys_of_accelerates_files_are_settings_of_a_command_too():
    given = "--dynamo_backend inductor --fsdp_activation_checkpointing_offload true"
    given += " --parallelism_config_dp_replicate_size 2 --parallelism_config_dp_shard_size 2"
    words = flags.in_our_words(given.split(" "), {"--set"})
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


# checks before the start


def test_the_script_that_was_meant_is_named(tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    (tmp_path / "tools" / "deep").mkdir(parents=True)
    (tmp_path / "tools" / "deep" / "run.py").touch()
    monkeypatch.chdir(tmp_path)
    for typed in ("trian.py", "train"):
        assert "did you mean train.py?" in texts(preflight.script_problems(typed, False))
    assert "is a folder without __main__.py" in texts(preflight.script_problems("tools", False))
    assert not preflight.script_problems("train.py", False)
    assert not preflight.script_problems("tools.deep.run", True)
    assert "module tools.deep.walk was not found" in texts(preflight.script_problems("tools.deep.walk", True))
    assert "give the script alone, without python3" in texts(preflight.script_problems("python3", False))
    Path("train.ipynb").write_text('{"cells": [], "nbformat": 4}')
    assert "train.ipynb is a notebook; call notebook_launcher" in texts(preflight.script_problems("train.ipynb", False))
    Path("a b.yaml").touch()
    assert "give it so: --config 'a b.yaml' SCRIPT.py." in texts(preflight.script_problems("a b.yaml", False))


@pytest.mark.parametrize(
    ("settings", "machine", "says"),
    [
        ({"num_processes": 8}, NO_GPU, "num_processes is 8 but this machine has no GPU; pass --cpu"),
        ({"num_processes": 16}, EIGHT, "this machine has 8 GPUs; set it to 8, or pass --cpu"),
        ({"num_processes": 32, "num_machines": 2, "main_process_ip": "a"}, EIGHT, "16 of them on each machine, but"),
        (
            {"num_processes": 2, "gpu_ids": "7, 8"},
            EIGHT,
            "gpu_ids: there is no GPU 8 (got 7, 8; this machine has 8 GPUs",
        ),
        ({"num_processes": 2, "num_machines": 2}, EIGHT, "need the address of machine 0; give --main HOST:PORT"),
        ({"use_cpu": True, "shardkit": {"launch": {"show": "0,1"}}}, NO_GPU, "there is no rank 1 (got"),
        ({"distributed_type": "XLA"}, NO_GPU, "needs the package torch_xla"),
        (
            {"use_cpu": True, "shardkit": {"checkpoint": {"resume": "latest"}}},
            NO_GPU,
            "launch: resume: latest: no such folder; give the folder of a checkpoint, or auto for the newest one.",
        ),
    ],
)
def test_what_the_machine_cannot_run_is_said_before_the_start(settings, machine, says):
    if settings.get("distributed_type") == "XLA" and preflight.find_spec("torch_xla"):
        pytest.skip("torch_xla is here")
    assert says in texts(preflight.run_problems(Config.model_validate(settings), machine, {}))


def test_enough_devices_and_too_few_cores():
    assert not preflight.run_problems(config(num_processes=8), EIGHT, {})
    assert not preflight.run_problems(config(num_processes=4, use_cpu=True), NO_GPU, {})
    assert not preflight.run_problems(
        config(num_processes=2, gpu_ids="6,7"), Machine(("H200",) * 2, 4, installed=8), {}
    )
    assert "4 ranks share 2 CPU cores" in str(preflight.core_warning(config(num_processes=4, use_cpu=True), NO_GPU))
    assert preflight.core_warning(config(num_processes=2, use_cpu=True), NO_GPU) is None
    one_core = Machine(("H200",) * 8, 1, installed=8)
    assert "8 ranks share 1 CPU core" in str(preflight.core_warning(config(num_processes=8), one_core))
    assert preflight.core_warning(config(num_processes=8), EIGHT) is None
    hidden = texts(preflight.device_problems(config(num_processes=2), NO_GPU, {"CUDA_VISIBLE_DEVICES": ""}))
    assert 'check CUDA_VISIBLE_DEVICES (now "")' in hidden


def test_devices_of_other_kinds_are_counted_and_named():
    four = Machine(("Max 1550",) * 4, 16, installed=4, kind="xpu")
    assert not preflight.run_problems(config(num_processes=4), four, {})
    assert "this machine has 4 xpu devices; set it to 4" in texts(
        preflight.device_problems(config(num_processes=5), four, {})
    )
    of_ids = texts(preflight.device_problems(config(num_processes=2, gpu_ids="0,1"), four, {}))
    assert "gpu_ids: chooses among GPUs of NVIDIA and AMD (got 0,1; this machine has 4 xpu devices)" in of_ids
    assert launch_spec(config(num_processes=4), "train.py", kind="xpu").backend == "xpu"
    assert launch_spec(config(num_processes=4, use_cpu=True), "train.py", kind="xpu").backend == "gloo"


@pytest.mark.fault_row(34)
def test_a_port_in_use_names_its_owner():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert ports.obstacle(port).startswith("is in use by pid ")
        said = texts(preflight.port_problems(config(main_process_port=port, use_cpu=True)))
        assert f"port {port} is in use by pid {os.getpid()} (" in said
        assert "or omit the port to use a free one" in said
        assert not preflight.port_problems(config(main_process_port=0, use_cpu=True))
        second = Config(num_machines=2, num_processes=2, main_process_ip="127.0.0.1", main_process_port=port)
        assert texts(preflight.port_problems(second)).endswith(
            "; if that is machine 0 of this run, give this one its own number with --machine-rank, else choose another "
            "port with --main 127.0.0.1:PORT."
        )
        on_another = Config(
            num_machines=2, num_processes=2, main_process_ip="localhost", main_process_port=port, machine_rank=1
        )
        assert not preflight.port_problems(on_another)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")
def test_a_port_that_this_user_may_not_have_is_not_called_in_use():
    socket.getaddrinfo("localhost", 81)  # imports a codec, whose file another user may not be allowed to read
    os.seteuid(65534)
    try:
        said = texts(preflight.port_problems(config(main_process_port=81, use_cpu=True)))
    finally:
        os.seteuid(0)
    if not said and int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 81:
        pytest.skip("every user may have every port here")
    assert said.startswith("launch: port 81 may not be used by this user, as most ports below 1024; choose ")


def test_a_process_that_ends_while_it_is_looked_up_is_named_by_its_number(tmp_path):
    (tmp_path / "net").mkdir()
    columns = ["0:", "0100007F:1F90", "00000000:0000", ports.LISTENING, "0:0", "0:0", "0", "0", "0", "77"]
    (tmp_path / "net" / "tcp").write_text(f"head\n{' '.join(columns)}\n")
    (tmp_path / "812" / "fd").mkdir(parents=True)
    (tmp_path / "812" / "fd" / "3").symlink_to("socket:[77]")
    assert ports.owner(0x1F90, tmp_path) == "pid 812"
    (tmp_path / "812" / "comm").write_bytes(CUT)
    assert ports.owner(0x1F90, tmp_path) == "pid 812 (\ufffd)"


CUT = "é".encode()[:1]
"""The name of a process whose 15th byte is in the middle of a letter."""


def test_a_machine_without_loopback_is_told_before_the_start(monkeypatch):
    """torch's store tried to connect for five minutes."""

    class Unreachable(socket.socket):
        def connect(self, address):
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    assert not preflight.loopback_problems(config(use_cpu=True))
    monkeypatch.setattr(preflight.socket, "socket", Unreachable)
    assert "127.0.0.1 cannot be reached" in texts(preflight.run_problems(config(use_cpu=True), NO_GPU, {}))
    assert not preflight.loopback_problems(Config(num_machines=2, num_processes=2, main_process_ip="a"))


def test_a_machine_without_a_number_is_machine_0_only_at_its_own_address(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    flags = ["launch", "--cpu", "-n", "2", "--num-machines", "2", "--main", "192.0.2.1:29500"]  # RFC 5737: nobody's
    assert command_line.run([*flags, "train.py"]) == 2
    says = "launch: machine_rank is missing, and 192.0.2.1 is not an address of this machine"
    assert says in capsys.readouterr().err
    assert command_line.run([*flags, "--dry-run", "train.py"]) == 0
    for known in ("127.0.0.1", socket.gethostname(), "no-such-name.invalid"):
        assert not preflight.number_problems(config(num_machines=2, num_processes=2, main_process_ip=known))
    elastic = {"num_machines": 2, "num_processes": 2, "main_process_ip": "192.0.2.1"}
    assert not preflight.number_problems(config(**elastic, shardkit__launch__min_machines=1))


def test_machine_problems_alone_have_their_own_exit_code():
    with pytest.raises(MachineError, match="1 error"):
        preflight.raise_all(preflight.device_problems(config(num_processes=8), NO_GPU, {}))
    with pytest.raises(ConfigError, match="2 errors"):
        preflight.raise_all(preflight.run_problems(Config(num_processes=8, num_machines=2), NO_GPU, {}))


# variables


@pytest.mark.requirement("A12")
def test_accelerate_gets_the_same_settings():
    chosen = config(
        num_processes=8,
        mixed_precision="bf16",
        fsdp__sharding_strategy=2,
        fsdp__transformer_layer_cls_to_wrap="A,B",
        fsdp__offload_params=True,
        shardkit__gradient_accumulation_steps=4,
    )
    variables = environment.accelerate_variables(chosen, "cuda")
    expected = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_CPU": "false",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "FSDP_VERSION": "2",
        "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    assert expected.items() <= variables.items()
    assert not any(name.startswith("PARALLELISM") for name in variables)
    fp8 = environment.accelerate_variables(config(num_processes=8, mixed_precision="fp8"), "cuda")
    assert (fp8["ACCELERATE_MIXED_PRECISION"], fp8["ACCELERATE_FP8_BACKEND"]) == ("fp8", "AO")


@pytest.mark.requirement("A12")
def test_accelerate_on_the_cpu_ddp_and_hybrid():
    assert "ACCELERATE_USE_FSDP" not in environment.accelerate_variables(config(num_processes=2, use_cpu=True), "cpu")
    ddp = environment.accelerate_variables(config(num_processes=2, fsdp__sharding_strategy=3), "cuda")
    assert "ACCELERATE_USE_FSDP" not in ddp
    hybrid = Config(num_processes=8, num_machines=2, fsdp={"sharding_strategy": 4}, main_process_ip="a")
    mesh = environment.accelerate_variables(hybrid, "cuda")
    assert (mesh["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"], mesh["PARALLELISM_CONFIG_DP_SHARD_SIZE"]) == ("2", "4")
    assert mesh["FSDP_RESHARD_AFTER_FORWARD"] == "true"


@pytest.mark.requirement("A12")
@pytest.mark.parametrize(("strategy", "sizes"), [(1, ("1", "4", "2")), (4, ("2", "2", "2"))])
def test_ranks_that_share_sequences_are_accelerates_context_axis(strategy, sizes):
    shared = {"mesh": {"context_size": 2}}
    fsdp = Config(num_processes=8, num_machines=2, fsdp={"sharding_strategy": strategy}, shardkit=shared)
    mesh = environment.mesh_variables(fsdp)
    assert tuple(mesh[f"PARALLELISM_CONFIG_{axis}_SIZE"] for axis in ("DP_REPLICATE", "DP_SHARD", "CP")) == sizes
    assert environment.mesh_variables(fsdp.changed(fsdp={"version": 1})) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["-n", "3", "--set", "num_processes=4"],
            "--set num_processes: sets the same as --num-processes (got 4 and 3)",
        ),
        (
            ["--set", "num_processes=4", "-n", "3"],
            "--set num_processes: sets the same as --num-processes (got 4 and 3)",
        ),
        (
            ["--cpu", "--set", "use_cpu=no"],
            "--set use_cpu: sets the same as --cpu (got no and true); keep one of them.",
        ),
        (["--fsdp", "no_shard", "--set", "distributed_type=NO"], "sets the same as --fsdp (got NO and FSDP); keep one"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(monkeypatch, tmp_path, capsys, given, words):
    """No order says which of them is meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert command_line.run(["launch", *given, "--dry-run", "train.py"]) != 0
    assert words in capsys.readouterr().err


def test_a_flag_may_be_repeated_or_say_the_same_as_another():
    settings, problems = flags.read_all(
        {"num_processes": FlagValue("3", "--num-processes")},
        *((settings_from, [word]) for word in ("num_processes=3", "debug=no", "debug=yes")),
    )
    assert (settings, problems.lines) == ({"num_processes": "3", "debug": "yes"}, [])


def test_weights_are_loaded_on_rank_0_alone_only_where_they_are_copied_to_the_others():
    for syncs in ("true", "false"):
        chosen = config(num_processes=2, fsdp__sync_module_states=syncs == "true")
        variables = environment.accelerate_variables(chosen, "cuda")
        found = (variables["FSDP_CPU_RAM_EFFICIENT_LOADING"], variables["FSDP_SYNC_MODULE_STATES"])
        assert found == (syncs, syncs)


def test_threads_are_chosen_given_or_shared_out():
    two = config(num_processes=2, use_cpu=True)
    assert environment.threads_of(two, 2, 16, {}) == 8
    assert environment.threads_of(two, 2, 1, {}) == 1
    assert environment.threads_of(two, 2, 16, {"OMP_NUM_THREADS": "3"}) == 3
    assert environment.threads_of(config(shardkit__launch__threads_per_rank=5), 2, 16, {"OMP_NUM_THREADS": "3"}) == 5


def test_the_note_on_the_cpu_is_for_scripts_on_accelerate():
    two = config(num_processes=2, use_cpu=True)
    said = environment.cpu_note(two, "cpu", "from accelerate import Accelerator")
    assert "runs as DDP (on GPUs: FULL_SHARD); with --as-accelerate" in str(said)
    assert environment.cpu_note(two, "cpu", "from shardkit import Accelerator\nimport transformers") is None
    assert environment.cpu_note(two, "cuda", "import accelerate") is None


@pytest.mark.parametrize(
    ("device", "settings", "is_told"),
    [("cpu", {}, True), ("cuda", {}, False), ("cuda", {"version": 1}, True), ("cuda", {"sharding_strategy": 3}, True)],
)
def test_ranks_that_share_no_sequences_in_accelerate_are_noted(device, settings, is_told):
    four = Config(num_processes=4, fsdp=settings, shardkit={"mesh": {"context_size": 2}})
    said = environment.context_note(four, device, "from transformers import Trainer")
    assert (said is not None and "context_size: 2: Accelerate and the Transformers Trainer share" in said) == is_told
    assert environment.context_note(four, device, "from shardkit import Accelerator") is None
    assert environment.context_note(Config(num_processes=4, fsdp=settings), device, "import accelerate") is None


def test_a_script_that_spawns_ranks_is_noted_and_one_that_mentions_it_is_not():
    for call in ("mp.spawn", "torch.multiprocessing.spawn", "mp.start_processes"):
        said = environment.spawn_note(f"if True:\n    {call}(main, nprocs=2)\n")
        assert said.startswith(
            f"note: the script calls {call.removeprefix('torch.')}, and launch starts the ranks already"
        )
    for source in ("# was mp.spawn(main)", "mp.Process(target=f)", "spawn = 1", ""):
        assert environment.spawn_note(source) is None


def test_devices_are_hidden_or_chosen():
    assert launch_spec(config(use_cpu=True), "a.py").environment["CUDA_VISIBLE_DEVICES"] == ""
    assert launch_spec(config(gpu_ids="0, 3"), "a.py").environment["CUDA_VISIBLE_DEVICES"] == "0,3"
    assert "CUDA_VISIBLE_DEVICES" not in launch_spec(config(gpu_ids="all"), "a.py").environment
    assert launch_spec(config(debug=True), "a.py").environment["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"


# output


def test_lines_are_whole_and_bars_are_known():
    lines = Lines()
    assert lines.feed(b"ab") == []
    assert lines.feed(b"c\nde\n\nf") == [("abc", False), ("de", False), ("", False)]
    assert lines.close() == [("f", False)]
    assert lines.feed(b"10%\r") == [] and lines.unfinished() == ("10%", True)  # no prompt, however long it stays
    assert lines.feed(b"20%\r") == []
    assert lines.unfinished() == ("20%", True)
    assert lines.feed(b"100%\nnext\r\n") == [("100%", True), ("next", False)]
    assert lines.feed(b"\xff\xfe\n") == [("\\xff\\xfe", False)]


def test_of_a_line_that_is_very_long_the_beginning_is_taken_between_characters():
    lines = Lines()
    text = "\u20ac" * 500_000
    assert lines.feed(text.encode()[:-1]) == []
    beginning = lines.beginning()
    assert beginning == text[:-1]
    assert lines.beginning() is None
    assert lines.feed(text.encode()[-1:] + b"!\n") == [("\u20ac!", False)]
    assert lines.feed(b"10%\r" * 500_000 + b"20%\r") == []  # a bar: what it was before is over
    assert lines.beginning() is None
    assert lines.unfinished() == ("20%", True)


def test_what_the_screens_encoding_lacks_is_shown_escaped(tmp_path, monkeypatch):
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    ProgressWriter(tmp_path, 0, 0).post("starting", 0)
    output = Output(tmp_path, tmp_path, 1, 1, None, has_prefix=True)
    (tmp_path / "out-0").write_text("loss \u2193\nend\n", encoding="utf-8")
    output.start()
    output.close()
    assert screen.buffer.getvalue() == b"[0] loss \\u2193\n[0] end\n"


def test_nothing_of_a_progress_bar_stays_behind_the_line_after_it(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen, file = Terminal(), io.StringIO()
    for rank in (0, 1):
        ProgressWriter(tmp_path, rank, rank).post("starting", 0)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", file)
    output = Output(tmp_path, tmp_path, 2, 1, None, has_prefix=True)
    (tmp_path / "err-0").write_text("\r50% and more\r", encoding="utf-8")
    output.start()
    deadline = time.monotonic() + 60
    while "50%" not in screen.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "out-1").write_text("in a file\n", encoding="utf-8")
    (tmp_path / "err-1").write_text("short\n", encoding="utf-8")
    output.close()
    assert file.getvalue() == "[1] in a file\n"
    bar = "[0] 50% and more"
    rest = screen.getvalue().replace(f"{bar}\r{' ' * len(bar)}\r", "")  # it may have been shown again
    assert rest.startswith("[1] short\n")


# folders


def test_folders_for_logs_are_private_and_what_stands_in_the_way_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = [folders.make_log_dir(None), folders.make_log_dir(None), folders.make_log_dir("given/deep")]
    assert len(set(made)) == 3
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="log folder file is a file; give another one with --logs DIR"):
        folders.make_log_dir("file")
    (tmp_path / "given" / "config.yaml").symlink_to("/dev/full")
    says = r"log folder given cannot be written \(No space left on device\); give another one with --logs DIR"
    with pytest.raises(MachineError, match=says), folders.writable(Path("given")):
        folders.write(tmp_path / "given" / "config.yaml", "x")


def test_a_log_folder_takes_one_launch_at_a_time(tmp_path):
    code = f"""if 1:
        from pathlib import Path
        from shardkit.launch import folders
        with folders.held(Path({str(tmp_path)!r}), 0): print(flush=True); input()"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        says = rf"log folder .* is in use by another launch \(pid {other.pid} on .*\), and the lines of both"
        with pytest.raises(MachineError, match=says), folders.held(tmp_path, 0):
            pass
        with folders.held(tmp_path, 1):  # another machine of the run
            pass
        other.kill()
    with folders.held(tmp_path, 0):
        pass


def test_a_log_folder_on_a_full_disk_is_told_as_that(tmp_path):
    """It was said that "the output" has no space: the text of the lock file failed again when the file was closed."""
    allowed = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, allowed[1]))
    try:
        with pytest.raises(MachineError, match=r"log folder .* cannot be written .*; give another one with --logs DIR"):
            folders.held(tmp_path, 0).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, allowed)


def test_launches_of_one_second_have_logs_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "runs/now")
    with ThreadPoolExecutor(8) as several:
        made = list(several.map(folders.make_log_dir, [None] * 32))
    assert len(set(made)) == 32


def test_the_temporary_folders_of_killed_launches_are_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from shardkit.launch import folders\nwith folders.temporary() as path: print(path, flush=True); input()"
    words, variables = [sys.executable, "-c", code], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        with folders.temporary() as ours:
            assert left.is_dir() and ours.is_dir() and left.parent == ours.parent == tmp_path
        assert not ours.exists()
        other.kill()
    assert left.is_dir()
    (tmp_path / "shardkit-somebody").mkdir()
    with folders.temporary():
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shardkit-somebody"]


# diagnosis


def error(rank: int, kind: str = "ValueError", lost: bool = False, time_s: float = 1.0, code: int = 1) -> RankError:
    return RankError(rank, kind, "words", "train.py:4 in step", "Traceback", code, lost, time_s)


def test_an_abort_after_a_timeout_of_nccl_is_known_by_the_log(tmp_path):
    log = tmp_path / "rank0.log"
    assert not failure.tells_of_timeout(log)
    said = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE)\n"
    log.write_text("step\n" * 20_000 + said + "  File x\n" * 1000)
    assert failure.tells_of_timeout(log)
    log.write_text(said + "step\n" * 20_000)
    assert not failure.tells_of_timeout(log)
    ended = [
        RankOutcome(0, exit_code=-6, ended_s=9.0, step=4, is_timed_out=True),
        RankOutcome(1, exit_code=-9, was_killed=True, phase="data", step=4),
    ]
    said = diagnosis.render(diagnosis.diagnose(ended), 0.0, "runs/x")
    assert said.startswith("launch: rank 1 failed first: did not arrive: the other ranks timed out waiting for"), said
    assert "  then     rank 0 waited for it until a collective timed out, and aborted\n" in said


@pytest.mark.parametrize(
    ("code", "message", "kills", "is_told"),
    [
        (-9, "", 1, True),
        (-9, "", 0, False),
        (1, "DataLoader worker (pid(s) 7) exited unexpectedly", 2, True),
        (1, "DataLoader worker (pid(s) 7) exited unexpectedly", 0, False),
        (1, "module 'torch' has no attribute 'xla'", 1, False),
    ],
)
def test_what_the_kernel_has_ended_for_lack_of_memory_is_named(code, message, kills, is_told):
    own = RankError(0, "RuntimeError", message, "", "", 1, False, 1.0) if message else None
    found = diagnosis.diagnose([RankOutcome(0, exit_code=code, error=own, memory_kills=kills), RankOutcome(1)])
    said = diagnosis.render(found, 0.0, "runs/x")
    assert ("the kernel has ended" in said) == is_told
    assert ("killed by SIGKILL (by the kernel, for lack of memory)" in said) == (is_told and not message)


@pytest.mark.fault_row(26)
@pytest.mark.fault_row(27)
@pytest.mark.parametrize(
    ("outcomes", "rank", "code"),
    [
        (
            [
                RankOutcome(0, exit_code=1, error=error(0, lost=True)),
                RankOutcome(1, exit_code=1, error=error(1, time_s=2)),
            ],
            1,
            1,
        ),
        ([RankOutcome(0, exit_code=-6, ended_s=1.0), RankOutcome(1, exit_code=1, error=error(1, time_s=2))], 1, 1),
        ([RankOutcome(0, exit_code=-6, ended_s=1.0), RankOutcome(1, exit_code=-9, was_killed=True)], 0, 134),
        (
            [
                RankOutcome(0, exit_code=-6, ended_s=1.0, step=4, is_timed_out=True),
                RankOutcome(1, exit_code=-9, was_killed=True, step=4, since_s=3.0),
                RankOutcome(2, exit_code=-9, was_killed=True, step=3, since_s=5.0),
            ],
            2,
            4,
        ),
        ([RankOutcome(0, exit_code=0, ended_s=3.0), RankOutcome(1, exit_code=1, error=error(1, lost=True))], 0, 1),
        (
            [
                RankOutcome(0, exit_code=0),
                RankOutcome(1, error=error(1, lost=True)),
                RankOutcome(2, exit_code=-15, was_killed=True),
            ],
            0,
            1,
        ),
        ([RankOutcome(0, exit_code=0), RankOutcome(1, exit_code=1, error=error(1))], 1, 1),
        (
            [RankOutcome(0, exit_code=1, error=error(0, lost=True)), RankOutcome(1, exit_code=-15, was_killed=True)],
            1,
            143,
        ),
        ([RankOutcome(0, exit_code=-15, was_killed=True), RankOutcome(1, exit_code=7, ended_s=1.0)], 1, 7),
        (
            [RankOutcome(0, exit_code=3, error=error(0, code=3, time_s=2)), RankOutcome(1, error=error(1, time_s=1))],
            1,
            1,
        ),
    ],
)
def test_the_cause_is_the_first_end_that_is_no_consequence(outcomes, rank, code):
    found = diagnosis.diagnose(outcomes)
    assert (found.rank, found.exit_code) == (rank, code)


def test_the_words_for_a_failure():
    found = diagnosis.diagnose(
        [
            RankOutcome(0, exit_code=1, error=error(0, lost=True, time_s=12.0)),
            RankOutcome(1, exit_code=1, error=error(1, time_s=11.5), phase="backward", step=7),
        ]
    )
    first, *rest = diagnosis.render(found, 10.0, "runs/x").splitlines()
    assert first == (
        "launch: rank 1 failed first: ValueError: words (train.py:4 in step), after 1.5 s, at step 7 in backward."
    )
    assert rest[0] == "  then     rank 0 lost its peer (train.py:4 in step)"
    assert rest[1].startswith("  logs     runs/x/rank1.log")
    saved = diagnosis.render(found, 10.0, "runs/x", saved_step=5)
    assert "  saved    step 5; resume with --resume auto" in saved
    on_the_host = replace(error(0, kind="RuntimeError"), message="DefaultCPUAllocator: can't allocate memory")
    on_a_tpu = replace(on_the_host, message="RESOURCE_EXHAUSTED: Attempting to allocate 4.00G. That was not possible.")
    for lack in (error(0, kind="OutOfMemoryError"), on_the_host, on_a_tpu):
        out_of_memory = diagnosis.diagnose([RankOutcome(0, exit_code=1, error=lack)])
        text = diagnosis.render(out_of_memory, 0.0, "runs/x")
        assert "builds the model: shardkit plan --model MODULE:FUNCTION" in text
    message = "aten.mm: got mixed torch.Tensor and DTensor, need to convert all"
    mixed = RankOutcome(0, exit_code=1, error=replace(error(0), message=message))
    text = diagnosis.render(diagnosis.diagnose([mixed]), 0.0, "runs/x")
    assert "accelerator.register_forward_method(model, name)" in text
    assert "raise fsdp_min_num_params" in text
    written = RankOutcome(0, exit_code=1, error=replace(error(0), message="data pointer on an invalid python storage."))
    text = diagnosis.render(diagnosis.diagnose([written]), 0.0, "runs/x")
    assert "state_dict = accelerator.get_state_dict(model)" in text
    for message, advice in (
        ("Encountered gradient which is undefined, but still allreduced by DDP reducer.", "call backward once"),
        ("Could not resolve the process group registered under the name 0", "end_training() after the last save"),
        ("Expected to mark a variable ready only once. This error is caused by", "use_reentrant=False"),
        ("Expected to mark a variable ready only once. This error is caused by", "out of a penalty on the weights"),
        ("Trying to backward an extra time. You are only allowed", "shardkit.recompute: blocks"),
        ("Expected XLA tensor. Got: torch.FloatTensor", "prepare the loader, or send what"),
        ("Expected all tensors to be on the same device, but found", "copied.to(accelerator.device)"),
        ("attempted relative import with no known parent package", "shardkit launch -m package.train"),
        ("KeyError: 'xla'\n\nSet TORCHDYNAMO_VERBOSE=1", "XLA compiles every step by itself"),
        ("LoweringException: AssertionError: \n FixedLayout('xla:0', torch", "torch.compile's compilers do not train"),
        ("Default process group has not been initialized, please", "`if accelerator.num_processes > 1:`"),
    ):
        twice = RankOutcome(0, exit_code=1, error=replace(error(0), message=message))
        assert advice in diagnosis.render(diagnosis.diagnose([twice]), 0.0, "runs/x")
    aborted = diagnosis.diagnose([RankOutcome(0, exit_code=-6, ended_s=1.0)])
    said = 'if the log says "collective mismatch" (gloo) or "collective operation timeout" (NCCL): a call'
    assert said in diagnosis.render(aborted, 0.0, "runs/x")
    for rank, kind in ((0, "BdbQuit"), (1, "BdbQuit"), (1, "ValueError")):  # a debugger, without a terminal on rank 1
        debugged = RankOutcome(rank, exit_code=1, error=error(rank, kind))
        text = diagnosis.render(diagnosis.diagnose([debugged]), 0.0, "runs/x")
        assert ("if accelerator.is_main_process: breakpoint()" in text) == (rank == 1 and kind == "BdbQuit")
    assert diagnosis.signal_name(9) == "SIGKILL"
    assert diagnosis.signal_name(77) == "signal 77"


def raised(function) -> BaseException:
    try:
        function()
    except BaseException as problem:
        return problem
    raise AssertionError("nothing was raised")


def lose_peer():
    raise RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4711"
    )


@pytest.mark.parametrize(
    "message",
    [
        "NCCL communicator was aborted on rank 1.",
        "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.28.9\n"
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ],
)
def test_what_nccl_says_of_a_lost_peer_is_no_cause(message):
    assert failure.is_lost_peer(RuntimeError(message))


def lose_peer_after_an_error():
    try:
        raise ValueError("the cause")
    except ValueError:
        lose_peer()


def fail_because_of_a_lost_peer():
    try:
        lose_peer()
    except RuntimeError as problem:
        raise ValueError("saving failed") from problem


class WithoutText(Exception):
    def __str__(self) -> str:
        raise AttributeError("text")


def test_an_exception_becomes_a_record():
    lost = failure.describe(0, raised(lose_peer), set())
    assert lost.is_lost_peer
    assert lost.where.startswith("tests/test_launch_parts.py:")
    assert lost.where.endswith("in lose_peer")
    hidden = failure.describe(0, raised(lose_peer_after_an_error), set())
    assert (hidden.is_lost_peer, hidden.kind, hidden.message) == (False, "ValueError", "the cause")
    assert failure.describe(0, raised(fail_because_of_a_lost_peer), set()).is_lost_peer
    assert "test_launch_parts" not in failure.describe(0, raised(lose_peer), {__file__}).traceback
    assert failure.message_of(ConfigError(["one", "two", "three", "four"])).splitlines()[-1] == "four"
    assert failure.message_of(ValueError("one\ntwo\n\nthree\nfour")) == "one\ntwo\nthree"
    assert failure.message_of(WithoutText()) == "<exception str() failed>"
    assert failure.exit_code_of(SystemExit(5)) == 5
    assert failure.exit_code_of(SystemExit("words")) == 1
    assert failure.exit_code_of(SystemExit()) == 0
    assert failure.exit_code_of(Preempted("")) == 75
    assert failure.exit_code_of(KeyboardInterrupt()) == 130


def test_an_error_in_a_worker_of_a_data_loader_is_told_with_its_own_line():
    from torch._utils import ExceptionWrapper

    def get_item(error):
        raise error

    def carried(error):
        try:
            get_item(error)
        except Exception:
            wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
        return failure.message_of(raised(wrapper.reraise))

    caught = (
        r"Caught KeyError in DataLoader worker process 0 \(tests/test_launch_parts.py:\d+ in get_item\): KeyError: 'x'"
    )
    assert re.fullmatch(caught, carried(KeyError("x")))
    assert carried(ValueError("one\ntwo")).endswith("in get_item): ValueError: one\ntwo")
    full = "unable to allocate shared memory(shm) for file </torch_1_0>: No space left on device (28)"
    error = replace(failure.describe(1, RuntimeError(), set()), message=carried(RuntimeError(full)))
    said = diagnosis.render(diagnosis.diagnose([RankOutcome(1, exit_code=1, error=error)]), 0.0, "logs")
    assert full in said and "  next     this is often /dev/shm" in said


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("[Errno 28] No space left on device", "this is often /dev/shm"),
        (
            "RuntimeError: [enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth9",
            "GLOO_SOCKET_IFNAME names an interface that this machine does not have",
        ),
        ("[Errno 28] No space left on device: 'a.txt'", ""),
        ("unable to open shared memory object </torch_1_0> in read-write mode: Read-only file system (30)", "workers"),
        ("[/gloo/gloo/transport/tcp/listener.cc:1] bind: Address already in use", "gloo listens on a free port"),
        ("[/gloo/transport/tcp/pair.cc:1]\nfailed to connect", "gloo could not connect ranks"),
        ("[/gloo/transport/tcp/pair.cc:1] timed out", ""),
        ("grad can be implicitly created only for scalar outputs", "a backward begins at one number"),
        (
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
            "it is the state of an optimizer of other parameters",
        ),
        ("'Gpt' object has no attribute 'module'", "only DDP's wrapper has .module"),
        ("'AcceleratedOptimizer' object is not callable", "prepare returns its arguments in the order"),
        ("EOF when reading a line", "only rank 0 reads the terminal, where the launch has one: make the answer"),
        ("trying to initialize the default process group twice!", "Accelerator() has started the process group"),
        ('iter->isIntList() INTERNAL ASSERT FAILED at "torch/csrc/autograd/TraceTypeManual.cpp":238', "torch.export, "),
        ("'_Entry' object has no attribute '__code__'", "torch.export, "),
        ("unsupported input list type: Tensor[]", "torch.export, "),  # by torch.jit.trace on CPU ranks
        ("can't start new thread", "the system allows no more processes or threads: raise ulimit -u"),
    ],
)
def test_errors_of_libraries_get_advice(message, advice):
    error = replace(failure.describe(1, RuntimeError(), set()), message=message)
    said = diagnosis.render(diagnosis.diagnose([RankOutcome(1, exit_code=1, error=error)]), 0.0, "logs")
    given = re.search(r"  next     (.*)", said)
    assert (given[1] if given else "").startswith(advice)
    assert bool(given) is bool(advice)


def test_an_export_to_onnx_gets_the_advice_on_its_cause():
    said = failure.describe(1, RuntimeError("Failed to export the model"), set())
    error = replace(
        said, kind="TorchExportError", traceback="AttributeError: '_Entry' object has no attribute '__code__'\n"
    )
    report = diagnosis.render(diagnosis.diagnose([RankOutcome(1, exit_code=1, error=error)]), 0.0, "logs")
    assert "  next     torch.export, torch.jit and torch.onnx cannot take a sharded model" in report


# hangs


def rank(number: int, since_s: float, step: int = 1, watched: bool = True, phase: str = "step", **known) -> Rank:
    return Rank(RankProgress(number, number, 100 + number, phase, step, since_s, watched), **known)


@pytest.mark.fault_row(28)
def test_when_ranks_are_looked_at():
    assert is_due({0: rank(0, 10.0), 1: rank(1, 12.0)}, 5.0, 20.0)
    assert not is_due({0: rank(0, 10.0), 1: rank(1, 16.0)}, 5.0, 20.0)  # somebody moves
    assert not is_due({0: rank(0, 10.0), 1: rank(1, 17.0, watched=False, phase="starting")}, 5.0, 20.0)
    assert not is_due({0: rank(0, 10.0), 1: rank(1, 1.0, watched=False, phase="paused")}, 5.0, 20.0)
    assert is_due({0: rank(0, 19.0), 1: rank(1, 19.0, stopped_since_s=14.0)}, 5.0, 20.0)
    assert not is_due({}, 5.0, 20.0)
    plain = {number: rank(number, 1.0, watched=False, phase="starting", worked_s=19.0) for number in (0, 1)}
    assert not is_due(plain, 5.0, 20.0)  # a script that never posts, at work
    plain[1].worked_s = 14.0
    assert is_due(plain, 5.0, 20.0)
    assert is_due({0: plain[1]}, 5.0, 20.0)  # the others have ended
    assert not is_due({0: plain[1]}, 5.0, 20.0, has_peers=False)  # alone, it waits for nobody


WAITS = Seen(stacks.Stack("train.py:1", True), is_in_collective=True)
WORKS = Seen(stacks.Stack("train.py:2", False), uses_cpu=True)
MOVES = Seen(stacks.Stack("train.py:2", False), moves=True)
STANDS = Seen(stacks.Stack("train.py:3", False))
ASKS = Seen(stacks.Stack("train.py:4", True), moves=True, is_in_collective=True)
PASSES = Seen(stacks.Stack("train.py:4", True), moves=True, uses_cpu=True, is_in_collective=True)
NATIVE = Seen(stacks.Stack("train.py:5", False, is_in_backward=True))
DEBUGGED = Seen(stacks.Stack("train.py:6", False, is_debugged=True))
DEVICE = Seen(stacks.Stack("train.py:7", False), uses_cpu=True, waits_for_device=True)
STOPPED = Seen(None)


@pytest.mark.fault_row(28)
@pytest.mark.parametrize(
    ("seen", "posted", "plain"),
    [
        ((WAITS, WORKS), Verdict.SLOW, Verdict.SLOW),
        ((WAITS, MOVES), Verdict.SLOW, Verdict.SLOW),
        ((WAITS, STANDS), Verdict.HANG, Verdict.HANG),
        ((WAITS, STOPPED), Verdict.HANG, Verdict.HANG),
        ((WAITS, WAITS), Verdict.HANG, Verdict.HANG),
        ((WAITS, NATIVE), Verdict.HANG, Verdict.HANG),
        ((WAITS, ASKS), Verdict.HANG, Verdict.HANG),
        ((WAITS, PASSES), Verdict.SLOW, Verdict.SLOW),
        ((WAITS, DEBUGGED), Verdict.WORK, Verdict.WORK),
        ((DEVICE, DEVICE), Verdict.SLOW, Verdict.SLOW),
        ((DEVICE, MOVES), Verdict.SLOW, Verdict.SLOW),
        ((WORKS, WORKS), Verdict.SLOW, Verdict.WORK),
        ((WORKS, STANDS), Verdict.SLOW, Verdict.WORK),
        ((STANDS, STANDS), Verdict.HANG, Verdict.SLOW),
    ],
)
def test_nobody_is_ended_who_works_or_for_whom_nobody_waits(seen, posted, plain):
    by_rank = dict(enumerate(seen))
    watched = {0: rank(0, 10.0), 1: rank(1, 12.0)}
    assert judge(watched, by_rank, 5.0, 20.0) is posted
    silent = {number: rank(number, 1.0, watched=False, phase="starting") for number in (0, 1)}
    assert judge(silent, by_rank, 5.0, 20.0) is plain
    assert stands_still(seen) is (plain is Verdict.HANG)
    out_of_patience = judge(watched, by_rank, 5.0, 28.0)
    assert out_of_patience is (Verdict.HANG if posted is Verdict.SLOW and seen[0] in (WAITS, DEVICE) else posted)


def test_a_rank_that_asks_its_device_for_a_value_may_wait_for_its_peers(tmp_path):
    train = tmp_path / "train.py"
    lines = ["loss = model(x)", "print(loss.item())", "torch.cuda.synchronize()", "y = torch.linalg.svd(x)"]
    train.write_text("\n".join([*lines, "x = batch.to(device)", "x = go_to(device)", ""]))
    stack = 'Thread 0x1 (most recent call first):\n  File "{}", line {} in step\n  File "{}", line 9 in <module>\n'
    waits = {line: stacks.parse(stack.format(train, line, train)).is_at_device_wait for line in range(1, 7)}
    assert waits == {1: False, 2: True, 3: True, 4: False, 5: True, 6: False}
    backward = stack.format("/lib/torch/autograd/graph.py", 841, train)  # its kernels fill the device's queue
    assert stacks.parse(backward).is_at_device_wait and stacks.parse(backward).is_in_backward
    ranks = {0: rank(0, 10.0), 1: rank(1, 12.0)}
    said = warning_of_slow(ranks, {0: DEVICE, 1: WORKS}, 5.0)
    assert "  Rank 0 waits for its device; the run is ended after 15 s without progress." in said
    table = render(rows_of(ranks, {0: DEVICE, 1: WORKS}, 20.0), 5.0, "logs")
    assert "at train.py:7, waiting for its device" in table
    assert "First to stop: rank 1." in table


def test_what_is_said_of_slow_ranks():
    ranks = {0: rank(0, 10.0), 1: rank(1, 12.0)}
    said = warning_of_slow(ranks, {0: WAITS, 1: WORKS}, 5.0).splitlines()
    assert said[0] == "launch: no progress for 5 s, but rank 1 is at work at train.py:2. The run continues."
    assert said[1].startswith("  Rank 0 waits for its peers in a collective; the run is ended after 15 s without")
    assert "accelerator.pause()" in said[2]
    ranks[2] = rank(2, 11.0)
    said = warning_of_slow(ranks, {0: WAITS, 1: WORKS, 2: WAITS}, 5.0).splitlines()
    assert said[1].startswith("  Ranks 0, 2 wait for their peers in a collective; the run is ended after")


IN_A_COLLECTIVE = """\
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f8 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 20 in step
  File "/home/me/train.py", line 31 in <module>
"""
IN_A_SHARDED_VALUE = """\
Current thread 0x00007f8 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/_ops.py", line 1279 in __call__
  File "/venv/lib/python3.11/site-packages/torch/distributed/_functional_collectives.py", line 142 in wait_tensor
  File "/venv/lib/python3.11/site-packages/torch/distributed/tensor/_api.py", line 774 in full_tensor
  File "/home/me/train.py", line 25 in <module>
"""
IN_PDB = """\
Thread 0x00007f8 (most recent call first):
  File "/usr/lib/python3.11/cmd.py", line 126 in cmdloop
  File "/usr/lib/python3.11/pdb.py", line 383 in _cmdloop
  File "/home/me/train.py", line 20 in step
"""
IN_THE_DATA = """\
Current thread 0x00007f8 (most recent call first):
  File "/venv/lib/python3.11/site-packages/PIL/Image.py", line 3 in open
  File "/home/me/data.py", line 88 in __getitem__
"""


@pytest.mark.fault_row(28)
def test_the_rank_that_the_others_wait_for_is_named():
    waiting, loading = stacks.parse(IN_A_COLLECTIVE), stacks.parse(IN_THE_DATA)
    assert (waiting.where, waiting.waits_for_peers) == ("/home/me/train.py:20 in step", True)
    assert (loading.where, loading.waits_for_peers) == ("/home/me/data.py:88 in __getitem__", False)
    sharded = stacks.parse(IN_A_SHARDED_VALUE)  # `.item()` of a sharded parameter: the innermost line calls an operator
    assert (sharded.where, sharded.waits_for_peers) == ("/home/me/train.py:25 in <module>", True)
    assert stacks.parse(IN_PDB).is_debugged and not loading.is_debugged
    ranks = {0: rank(0, 10.0), 1: rank(1, 11.0, phase="data")}
    found = {0: Seen(waiting, is_in_collective=True), 1: Seen(loading)}
    assert "First to stop: rank 1" in render(rows_of(ranks, found, 20.0), 5.0, "logs")
    left = {**ranks, 2: rank(2, 12.0, step=5, exit_code=0)}
    assert render(rows_of(left, found, 20.0), 5.0, "logs").splitlines() == [
        "launch: HANG, no progress for 5 s",
        "  rank 0  step 1  step  for 10 s  at /home/me/train.py:20 in step, waiting for its peers",
        "  rank 1  step 1  data  for 9 s  at /home/me/data.py:88 in __getitem__",
        "  rank 2  exited with code 0",
        "  First to stop: rank 2. The stacks of all ranks are in logs/rank*.stack.",
    ]
    said = render(rows_of(left, found, 20.0), 5.0, "machine 1 (b): runs/y", "runs/x")
    assert "The stacks of all ranks are in machine 1 (b): runs/y/rank*.stack, runs/x/rank*.stack." in said
    stopped = rows_of({0: rank(0, 10.0), 1: rank(1, 11.0, stopped_since_s=11.0)}, {}, 20.0)
    assert "First to stop: rank 1" in render(stopped, 5.0, "logs")
    two_waiting = rows_of({0: rank(0, 10.0)}, {0: WAITS}, 20.0) + rows_of({1: rank(1, 11.0)}, {1: WAITS}, 20.0)
    said = render(two_waiting, 5.0, "logs")
    assert "Every rank waits for its peers" in said and "at different lines" not in said
    other_folder = Seen(stacks.parse(IN_A_COLLECTIVE.replace("/home/me/", "/b/")), is_in_collective=True)
    both = {0: Seen(waiting, is_in_collective=True), 1: other_folder}
    two_folders = rows_of({0: rank(0, 10.0), 1: rank(1, 11.0)}, both, 20.0)
    assert "/b/" in render(two_folders, 5.0, "logs") and "at different lines" not in render(two_folders, 5.0, "logs")
    elsewhere = Seen(stacks.parse(IN_A_COLLECTIVE.replace("line 20", "line 30")), is_in_collective=True)
    apart = rows_of({0: rank(0, 10.0), 1: rank(1, 11.0)}, {0: Seen(waiting, is_in_collective=True), 1: elsewhere}, 20.0)
    said = render(apart, 5.0, "logs")
    assert "They wait at different lines" in said and "by a value of its own (early stopping)" in said
    assert "one rank has caught an error (`try`, `except`)" in said


def test_where_all_ranks_of_a_machine_wait_another_one_is_judged_first():
    ranks = {0: rank(0, 10.0), 1: rank(1, 12.0)}
    seen = {0: WAITS, 1: WAITS}
    assert judge(ranks, seen, 5.0, 20.0, has_others=True) is Verdict.SLOW
    assert judge(ranks, seen, 5.0, 28.0, has_others=True) is Verdict.HANG
    assert "ranks of another machine may be at work" in warning_of_slow(ranks, seen, 5.0)


# restarts


@pytest.mark.fault_row(38)
def test_restarts_go_on_while_checkpoints_come():
    restarts, cause = Restarts(allowed=10), RankFailure("launch: rank 0 failed first: X\n more", 1)
    for step in (10, 20, 20, 20):
        restarts.saw_checkpoint(step)
        assert restarts.allows(cause)
        restarts.count(cause)
    restarts.saw_checkpoint(20)
    assert not restarts.allows(cause)
    final = restarts.final(cause)
    assert "given up after 4 restarts (3 in a row without a new checkpoint)" in str(final)
    assert str(final).count("rank 0 failed first: X") == 5
    assert final.exit_code == 1


def test_a_restart_is_announced_with_the_whole_cause():
    """An error may have what is wrong in its second line; the table of a hang has the rank that the others wait for."""
    restarts = Restarts(allowed=3)
    outcome = RankOutcome(
        0, exit_code=3, error=RankError(0, "CheckpointError", "not loaded:\n  no file", "", "", 3, False, 5.0)
    )
    report = RankFailure(diagnosis.render(diagnosis.diagnose([outcome]), 0.0, "logs"), 3)
    hang = HangError("launch: HANG, no progress for 6 s\n  rank 0  step 1\n  First to stop: rank 0.")
    for error, cause in (
        (report, "rank 0 failed first: CheckpointError: not loaded:, after 5.0 s.\n      no file"),
        (hang, str(hang).removeprefix("launch: ")),
    ):
        restarts.count(error)
        said = restarts.announcement(error)
        assert said == f"{cause}\nlaunch: restart {restarts.number} of 3, no checkpoint yet"


def test_one_restart_is_counted_as_one():
    restarts, cause = Restarts(allowed=1), RankFailure("launch: rank 0 failed first: X", 1)
    restarts.count(cause)
    assert "given up after 1 restart (all used)" in str(restarts.final(cause))


def test_what_is_not_worth_a_restart():
    restarts = Restarts(allowed=3)
    assert restarts.allows(HangError(""))
    assert not restarts.allows(Preempted(""))
    assert not restarts.allows(RankFailure("", 2))
    assert not Restarts(allowed=0).allows(RankFailure("", 1))


# a rank's first lines


@pytest.mark.fault_row(37)
def test_a_world_of_another_size_stops_before_the_script(tmp_path):
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    variables = {**os.environ, "SHARDKIT_NUM_PROCESSES": "2", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    variables |= {"SHARDKIT_PROGRESS_DIR": str(tmp_path), "SHARDKIT_LOG_DIR": str(tmp_path)}
    bootstrap = rank_command(["script.py"])
    done = subprocess.run(bootstrap, cwd=tmp_path, env=variables, timeout=60, check=False)
    assert done.returncode == 2
    assert not (tmp_path / "ran").exists()
    record = json.loads((tmp_path / "rank-0.error").read_text())
    assert record["message"].startswith("launch: the world size differs from num_processes 2 (got 1)")
    assert record["exit_code"] == 2


def test_a_script_runs_as_python_would_run_it(tmp_path):
    """Also where files in the working folder have the names of modules that a rank loads before the script."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("json", "types", "shardkit"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the working folder')")
    (scripts / "beside.py").write_text("value = 5\n")
    (scripts / "script.py").write_text(
        "import json, pickle, sys, beside\n"
        "class Thing: pass\n"
        "assert __name__ == '__main__' and __file__.endswith('script.py') and sys.argv == ['scripts/script.py', '-x']\n"
        "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
        "assert 'torch' not in sys.modules\n"
        "print(beside.value)\n"
    )
    variables = {**os.environ, "SHARDKIT_PROGRESS_DIR": str(tmp_path), "SHARDKIT_LOG_DIR": str(tmp_path)}
    bootstrap = rank_command(["scripts/script.py", "-x"])
    done = subprocess.run(
        bootstrap, cwd=tmp_path, env=variables, timeout=60, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr + (tmp_path / "rank0.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(False)"])
def test_what_a_script_has_begun_on_its_device_is_awaited_and_may_fail(tmp_path, end):
    (tmp_path / "script.py").write_text(
        "import sys, torch\n"
        "from shardkit.distributed import accelerators\n"
        "def fail(): raise torch.AcceleratorError('CUDA error: device-side assert triggered')\n"
        f"torch.accelerator.synchronize, accelerators.is_used = fail, lambda: True\n{end}"
    )
    variables = {**os.environ, "SHARDKIT_PROGRESS_DIR": str(tmp_path), "SHARDKIT_LOG_DIR": str(tmp_path)}
    bootstrap = rank_command(["script.py"])
    done = subprocess.run(bootstrap, cwd=tmp_path, env=variables, timeout=60, check=False)
    assert done.returncode == 1
    assert "device-side assert" in json.loads((tmp_path / "rank-0.error").read_text())["message"]


def test_signals_have_their_exit_codes():
    assert diagnosis.exit_code_of(RankOutcome(0, exit_code=-signal.SIGSEGV)) == 139


# bad files


@pytest.mark.fault_row(25)
@pytest.mark.parametrize(
    "text",
    [
        b"num_procesess: 2\n",
        b"fsdp_config:\n  fsdp_offload_param: true\n",
        b"num_processes: two\n",
        b"num_processes: -5\n",
        b"num_processes: 2\nnum_processes: 3\n",
        b"- 1\n- 2\n",
        b"a:\n\tb: 1\n",
        b"\x00\x01\xff\xfe",
        b"a: &a [1]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]\n",
        b"mixed_precision: fp4\n" * 3,
        b"x" * 2_000_000,
    ],
)
def test_a_bad_file_is_refused_in_few_lines(tmp_path, monkeypatch, capsys, text):
    (tmp_path / "shardkit.yaml").write_bytes(text)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    assert command_line.run(["launch", "--cpu", "train.py"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "Nothing was started." in said
    assert len(said.splitlines()) <= 13
    assert "shardkit.yaml" in said
    assert not (tmp_path / "runs").exists()


def test_ranks_that_would_fill_the_memory_are_refused():
    machine = preflight.Machine((), 2, 24 * 2**30)
    (problem,) = preflight.memory_problems(Config(num_processes=500, use_cpu=True), machine)
    assert "500 ranks need about 125.0 GiB for Python and torch alone (got 24.0 GiB on this machine)" in problem.text
    assert "--force" in problem.text and problem.exit_code == EXIT_MACHINE
    assert preflight.memory_problems(Config(num_processes=64, use_cpu=True), machine) == []
    assert preflight.memory_problems(Config(num_processes=500, use_cpu=True), preflight.Machine((), 2)) == []


def test_launches_that_share_a_log_folder_keep_their_own_configuration(tmp_path):
    read = {}
    for precision in ("no", "bf16"):
        (own := tmp_path / precision).mkdir()
        spec = launch_spec(Config(mixed_precision=precision), "train.py")
        spec = replace(spec, chosen={"mixed_precision": precision})
        read[precision] = Path(attempts.run_variables(spec, tmp_path, own)[env.RESOLVED])
    for precision, path in read.items():
        assert files.read(path).config.mixed_precision == precision
        assert json.loads(path.with_suffix(".chosen.json").read_text()) == {"mixed_precision": precision}
