"""What is checked and chosen before ranks start: the machine, the script, the variables of ranks."""

import errno
import os
import socket
from pathlib import Path

import pytest

from shardkit.cli import main as command_line
from shardkit.config import files
from shardkit.config.command import settings_from
from shardkit.config.layers import FlagValue
from shardkit.config.schema import Config
from shardkit.errors import ConfigError, MachineError
from shardkit.launch import (
    environment,
    flags,
    ports,
    preflight,
)
from shardkit.launch.preflight import Machine
from shardkit.launch.spec import launch_spec

NO_GPU = Machine((), 2)
EIGHT = Machine(("H200",) * 8, 16, installed=8)


def config(**settings) -> Config:
    return files.overlaid(Config(), {name.replace("__", "."): str(value) for name, value in settings.items()})


def texts(problems) -> str:
    return "\n".join(problem.text for problem in problems)


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
