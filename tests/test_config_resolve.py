"""Which file is used, which source wins, and the hardware defaults for unset settings."""

import os
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardkit import env, new_process
from shardkit.cli.main import run
from shardkit.config import files, hardware, hardware_defaults, other_devices
from shardkit.config.command import command_for, settings_of
from shardkit.config.hardware import Device, Hardware, parse_nvidia_smi
from shardkit.config.scheduler import Scheduler, first_host, scheduler
from shardkit.config.schema import Config, ShardingStrategy
from shardkit.errors import EXIT_MACHINE, ConfigError, UsageError
from shardkit.launch.preflight import Machine


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A project's folder with a folder in it, and a home without a configuration."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    folder = tmp_path / "project"
    (folder / ".git").mkdir(parents=True)
    (folder / "src" / "deep").mkdir(parents=True)
    return folder


def put(path: Path, text: str = "num_processes: 3\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.requirement("A11")
def test_the_file_is_found_from_the_nearest_folder_up_to_the_projects_root(project):
    deep = project / "src" / "deep"
    assert files.find(deep) is None
    put(project.parent / "shardkit.yaml")
    assert files.find(deep) is None, "above the project's root nothing is looked at"
    root = put(project / "shardkit.yaml")
    assert files.find(deep) == root
    near = put(project / "src" / "shardkit.yml")
    assert files.find(deep) == near


@pytest.mark.requirement("A11")
def test_an_accelerate_file_the_users_own_and_the_variable(project, monkeypatch):
    own = put(files.user_path())
    assert files.find(project) == own
    theirs = put(project / "default_config.yaml", "lr: 0.1\n")
    assert files.find(project) == own, "another tool's file of that name is left alone"
    put(theirs, '{\n  "distributed_type": "MULTI_GPU"\n}\n')
    assert files.find(project) == theirs
    ours = put(project / "shardkit.yaml")
    assert files.find(project) == ours
    monkeypatch.setenv("SHARDKIT_CONFIG", str(project / "other.yaml"))
    with pytest.raises(ConfigError, match=r"other\.yaml: there is no such file"):
        files.resolve(folder=project)
    monkeypatch.setenv("HOME", str(project))
    monkeypatch.setenv("SHARDKIT_CONFIG", "~/shardkit.yaml")
    assert files.find(project / "elsewhere") == ours


def test_without_a_project_only_the_folder_itself_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    put(tmp_path / "shardkit.yaml")
    (tmp_path / "inner").mkdir()
    assert files.find(tmp_path / "inner") is None
    put(tmp_path / "pyproject.toml", "")
    assert files.find(tmp_path / "inner") == tmp_path / "shardkit.yaml"


def test_a_home_that_is_not_there_is_no_problem(project, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert files.find(project) is None
    with pytest.raises(UsageError, match="--user needs a home folder"):
        files.user_path()


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(project, monkeypatch):
    path = put(project / "shardkit.yaml", "num_processes: 2\nmixed_precision: fp16\ndebug: yes\n")
    monkeypatch.setenv("SHARDKIT_SET_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("SHARDKIT_SET_DEBUG", "no")
    monkeypatch.setenv("SHARDKIT_SET_FSDP__SHARDING_STRATEGY", "hybrid_shard")
    loaded = files.resolve(settings={"debug": "yes", "fsdp_config.fsdp_offload_params": "1"}, folder=project)
    config, origins = loaded.config, loaded.origins
    assert (config.num_processes, config.mixed_precision, config.debug) == (2, "bf16", True)
    assert config.fsdp.offload_params and config.fsdp.sharding_strategy.value == "HYBRID_SHARD"
    assert loaded.path == path
    assert (origins["num_processes"].kind, origins["num_processes"].where) == ("file", f"{path}:1:16")
    assert (origins["mixed_precision"].kind, origins["mixed_precision"].where) == (
        "environment",
        "$SHARDKIT_SET_MIXED_PRECISION",
    )
    assert (origins["debug"].kind, origins["debug"].where) == ("flag", "--set debug")
    assert origins["fsdp.offload_params"].where == "--set fsdp_config.fsdp_offload_params"
    assert origins["rdzv_backend"].kind == "default"


@pytest.mark.parametrize(
    "name", ["fsdp_sharding_strategy", "fsdp_config.fsdp_sharding_strategy", "fsdp.sharding_strategy"]
)
def test_a_setting_is_set_by_the_name_that_it_has_in_the_file(project, name):
    resolved = files.resolve(settings={"distributed_type": "FSDP", name: "2"}, folder=project)
    assert resolved.config.fsdp.sharding_strategy == ShardingStrategy.SHARD_GRAD_OP


def test_problems_of_all_sources_are_told_at_once(project, monkeypatch):
    put(project / "shardkit.yaml", "num_procesess: 2\n")
    monkeypatch.setenv("SHARDKIT_SET_FSDP__OFFLOAD_PARMS", "yes")
    with pytest.raises(ConfigError) as raised:
        files.resolve(settings={"mixed_precision": "bf17", "sharding_strategy": "1", "fsdp": "1"}, folder=project)
    assert sorted(line.replace(f"{project}/", "") for line in raised.value.problems) == [
        "$SHARDKIT_SET_FSDP__OFFLOAD_PARMS: unknown setting (got fsdp.offload_parms); "
        "did you mean fsdp.offload_params?",
        "--set fsdp: fsdp is a block of settings; set one of them, such as fsdp.fsdp_version.",
        "--set mixed_precision: is not one of the choices (got 'bf17'); did you mean bf16?",
        "--set sharding_strategy: unknown setting (got sharding_strategy); did you mean fsdp.sharding_strategy?",
        "shardkit.yaml:1:1: num_procesess: unknown key; did you mean num_processes?",
    ]


def test_a_strategy_by_flag_wins_over_reshard_after_forward_in_the_file(project):
    put(project / "shardkit.yaml", "num_processes: 2\nfsdp_config: {fsdp_reshard_after_forward: false}\n")
    assert files.resolve(folder=project).config.fsdp.sharding_strategy.value == "SHARD_GRAD_OP"
    loaded = files.resolve(settings={"fsdp.sharding_strategy": "1"}, folder=project)
    assert loaded.config.fsdp.sharding_strategy.value == "FULL_SHARD"
    loaded = files.resolve(settings={"fsdp.reshard_after_forward": "yes"}, folder=project)
    assert loaded.config.fsdp.sharding_strategy.value == "FULL_SHARD"


def test_ranks_read_what_the_launcher_resolved(project, monkeypatch):
    config = Config(num_processes=5, mixed_precision="bf16")
    files.write(config, project / "resolved.yaml")
    put(project / "shardkit.yaml")
    monkeypatch.setenv("SHARDKIT_RESOLVED_CONFIG", str(project / "resolved.yaml"))
    monkeypatch.chdir(project)
    assert files.load_config() == config
    assert files.load_config(settings={"debug": "1"}) == config.model_copy(update={"debug": True})
    assert files.load_config(project / "shardkit.yaml").num_processes == 3


def machine(*devices: Device, **more) -> Hardware:
    return Hardware(tuple(devices), cores=8, memory_bytes=2**34, **more)


def gpus(count: int, capability: float = 9.0) -> list[Device]:
    return [Device("NVIDIA H200", 2**37, "cuda", capability)] * count


def suggestion(found: Hardware, **given) -> dict[str, object]:
    entries = {
        tuple(name.split("__")): hardware_defaults.SettingEntry(value, hardware_defaults.Origin("flag", ""), name)
        for name, value in given.items()
    }
    values = hardware_defaults.for_hardware(found, entries)
    return {".".join(path): value for path, value in values.items()}


def test_what_suits_a_machine():
    assert suggestion(machine(*gpus(8))) == {
        "num_processes": 8,
        "use_cpu": False,
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
    }
    assert suggestion(machine(*gpus(1)))["distributed_type"] == "NO"
    assert suggestion(machine(*gpus(1)), fsdp__offload_params="yes")["distributed_type"] == "FSDP"
    alone = hardware_defaults.for_hardware(machine(*gpus(8)), ranks=1)
    assert (alone[("num_processes",)], alone[("distributed_type",)]) == (1, "NO")
    assert hardware_defaults.for_hardware(machine(*gpus(1)), ranks=2)[("distributed_type",)] == "FSDP"
    assert suggestion(machine(*gpus(2, 7.0)))["mixed_precision"] == "fp16"
    assert suggestion(machine(*gpus(2)), num_machines="4")["num_processes"] == 8
    on_cpu = suggestion(machine())
    assert (on_cpu["num_processes"], on_cpu["use_cpu"], on_cpu["mixed_precision"]) == (2, True, "no")
    assert suggestion(machine(*gpus(4)), use_cpu="yes")["num_processes"] == 2


def test_a_job_of_several_machines():
    job = Scheduler("SLURM", machines=4, machine_rank=2, main_address="node03")
    values = suggestion(machine(*gpus(8), scheduler=job))
    assert (values["num_machines"], values["num_processes"], values["machine_rank"]) == (4, 32, 2)
    assert values["main_process_ip"] == "node03"
    assert "main_process_ip" not in suggestion(machine(*gpus(8), scheduler=job), num_machines="2")


def test_a_file_for_several_machines_takes_address_and_number_from_the_scheduler(project, monkeypatch):
    put(project / "shardkit.yaml", "num_machines: 2\nnum_processes: 4\nuse_cpu: true\n")
    for name, value in {"JOB_ID": "7", "NNODES": "2", "NODEID": "1", "JOB_NODELIST": "gpu[07-08]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    config = files.resolve(folder=project).config
    assert (config.machine_rank, config.main_process_ip) == (1, "gpu07")
    assert files.resolve(folder=project, settings={"machine_rank": "0"}).config.machine_rank == 0


def test_what_the_tools_and_schedulers_say_is_understood():
    text = "NVIDIA H200, 143771 MiB, 9.0\nNVIDIA A100-SXM4-40GB, 40960 MiB, [N/A]\nNo devices were found\n"
    text += "NVIDIA GB10, [N/A], 12.1\nOrin, [Not Supported], [Unknown Error]\n"
    found = parse_nvidia_smi(text)
    assert [(device.name, device.memory_bytes // 2**20, device.capability) for device in found] == [
        ("NVIDIA H200", 143771, 9.0),
        ("NVIDIA A100-SXM4-40GB", 40960, None),
        ("NVIDIA GB10", 0, 12.1),
        ("Orin", 0, None),
    ]
    lists = ("node[03-05,9],b", "a,b", "gpu7-ib", "n[1]-x", "rack[0-1]node[03-05],b", "")
    assert [first_host(hosts) for hosts in lists] == ["node03", "a", "gpu7-ib", "n1-x", "rack0node03", None]
    job = scheduler({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "1", "NNODES": "2"})
    assert job is not None and (job.name, job.machines, job.machine_rank) == ("Kubernetes", 2, 1)
    assert scheduler({}) is None


def test_ranks_that_run_are_counted_without_a_look_at_the_hardware(project, monkeypatch):
    path = put(project / "shardkit.yaml", "distributed_type: FSDP\n")
    monkeypatch.setattr(hardware_defaults, "detect", lambda: pytest.fail("the hardware is asked for"))
    found = files.resolve(path, ranks=3)
    assert found.config.num_processes == 3
    assert str(found.origins["num_processes"]) == "found here: 3 ranks running"
    assert files.resolve(path, {"num_processes": "2"}, defaults_for_hardware=False).config.num_processes == 2


def test_a_missing_file_that_the_environment_names_is_told_with_the_variable(project, monkeypatch):
    monkeypatch.setenv("SHARDKIT_CONFIG", str(project / "gone.yaml"))
    with pytest.raises(ConfigError, match=r"gone.yaml: there is no such file \(named by \$SHARDKIT_CONFIG\); write"):
        files.resolve()


def test_this_machine_is_detected_within_its_limits():
    found = hardware.detect()
    assert found.cores >= 1 and found.memory_bytes > 2**20
    assert all(device.name for device in found.devices)


def test_hidden_gpus_are_not_counted(monkeypatch):
    devices = gpus(4)
    for chosen, count in [("0,2", 2), ("", 0), ("1,9,2", 1), ("GPU-abc", 1), ("-1", 0)]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert len(hardware._visible(devices)) == count
    assert env.get("CUDA_VISIBLE_DEVICES") == "-1"


def test_a_part_of_a_gpu_has_its_own_memory_not_that_of_the_whole(monkeypatch, tmp_path):
    listed = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1d2)\n"
    listed += "  MIG 3g.40gb     Device  0: (UUID: MIG-aa-1)\n  MIG 1g.10gb+me  Device  1: (UUID: MIG-bb-2)\n"
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncase $1 in\n-L) echo '{listed}';;\n*) echo 'NVIDIA H100, 81559 MiB, 9.0';;\nesac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bb-2,MIG-aa-1,MIG-cc-3")
    found = [(device.name, device.memory_bytes, device.capability) for device in hardware.detect().devices]
    assert found == [
        ("NVIDIA H100 MIG 1g.10gb+me", 10 * 10**9, 9.0),
        ("NVIDIA H100 MIG 3g.40gb", 40 * 10**9, 9.0),
        ("NVIDIA H100", 0, 9.0),
    ]


@pytest.mark.parametrize(
    ("prints", "problem"),
    [
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; echo more; exit 18",
            "Failed to initialize",
        ),
        ("exit 9", "exit code 9"),
        ("sleep 60", "no answer within 0.1 s"),
        ("echo 'No devices were found'; exit 6", ""),
        ("echo 'NVIDIA H100, 81559 MiB, 9.0'", ""),
    ],
)
def test_a_driver_that_does_not_work_is_told_where_the_ranks_would_train_on_the_cpu(
    prints, problem, monkeypatch, tmp_path, capsys
):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{prints}\n")
    tool.chmod(0o755)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(hardware, "TOOL_S", 0.1 if "sleep" in prints else 20)
    found = hardware.detect().driver_problem
    assert found.startswith(problem) and bool(found) == bool(problem)
    for flags, is_told in ([], bool(problem)), (["--cpu"], False):
        assert run(["launch", *flags, "--dry-run", "train.py"]) == 0
        assert ("nvidia-smi fails here (got '" in capsys.readouterr().err) == is_told
    assert run(["launch", "--set", "use_cpu=false", "-n", "2", "train.py"]) == EXIT_MACHINE
    assert (f"no GPU (nvidia-smi fails: {problem}" in capsys.readouterr().err) == bool(problem)


@pytest.fixture
def only_torch_knows(monkeypatch):
    """A machine without GPUs of NVIDIA or AMD, where torch has answered with two devices of a third kind."""
    monkeypatch.setattr(hardware, "_nvidia", lambda: ([], "fails"))
    monkeypatch.setattr(hardware, "_nvidia_without_tool", list)
    monkeypatch.setattr(hardware, "_rocm", list)
    monkeypatch.setattr(other_devices, "_may_exist", lambda: True)
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout='[["Max 1550", 137438953472, "xpu"], ["Max 1550", 137438953472, "xpu"]]')

    monkeypatch.setattr(subprocess, "run", run)
    other_devices.found.cache_clear()
    yield asked
    other_devices.found.cache_clear()


def test_devices_of_which_only_torch_knows_are_trained_on(only_torch_knows):
    """XPU, MPS, devices of extensions: a run on them was taken for one on the CPU."""
    found = hardware.detect()
    assert hardware.detect() == found and found.in_words == "2 x Max 1550"
    assert only_torch_knows == [new_process.command("shardkit.distributed.device_list")]
    wanted = {"use_cpu": False, "num_processes": 2, "mixed_precision": "bf16", "distributed_type": "FSDP"}
    values = hardware_defaults.for_hardware(found)
    assert {name: values[name,] for name in wanted} == wanted
    assert (Machine.of(found).kind, Machine.of(found).noun) == ("xpu", "xpu device")


def test_torch_is_asked_for_devices_only_where_something_speaks_for_one(monkeypatch):
    monkeypatch.setattr(other_devices.platform, "machine", lambda: "x86_64")
    for version, packages, expected in [
        ("2.13.0+xpu", [], True),
        ("2.13.0", ["npu"], True),
        ("2.13.0+cu130", [], False),
    ]:
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        monkeypatch.setattr(metadata, "entry_points", lambda group, packages=packages: packages)
        assert other_devices._may_exist() is expected


def test_the_command_that_gives_a_configuration_again():
    config = Config(
        num_processes=4,
        mixed_precision="bf16",
        commands=["echo a, b", "x"],
        xla_fsdp_settings={"a": 1},
        fsdp={"transformer_layer_cls_to_wrap": ["A", "B"], "backward_prefetch": "NO_PREFETCH"},
        shardkit={"seed": 3, "precision": {"reduce_dtype": "bf16"}},
    )
    command = command_for(config, None, Path("my run.yaml"), is_user=False)
    assert command.startswith("shardkit config --defaults --set distributed_type=FSDP")
    assert "--set fsdp.transformer_layer_cls_to_wrap=A,B" in command and command.endswith("-o 'my run.yaml' --force")
    assert files.suggest(settings_of(config)).config == config


def test_null_is_nothing_given_and_changes_nothing_below(project, monkeypatch):
    """As with SHARDKIT_SET_MIXED_PRECISION=$PRECISION, where that is not set: the run was in fp32."""
    put(project / "shardkit.yaml", "num_processes: 3\nmixed_precision: bf16\ngpu_ids: '0,1,2'\nuse_cpu:\n")
    monkeypatch.setenv("SHARDKIT_SET_MIXED_PRECISION", "")
    config = files.resolve(folder=project, settings={"num_processes": "null", "gpu_ids": "null"}).config
    assert (config.num_processes, config.mixed_precision, config.gpu_ids) == (3, "bf16", None)
    put(project / "shardkit.yaml", "num_processes:\nuse_cpu: true\n")
    loaded = files.resolve(folder=project)
    assert loaded.origins["num_processes"].kind == "hardware"
