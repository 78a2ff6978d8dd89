"""What goes wrong with the configuration files and flags of others: the same input gives the right thing here.

The numbers are those of the study of 21 failures of a widely used wizard and launcher; those that belong to launching
and to asking questions are tested where launching and asking are.
"""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shardkit.cli.main import run
from shardkit.config import files
from shardkit.config.schema import Config, ShardingStrategy
from shardkit.convert.to_accelerate import to_accelerate
from shardkit.errors import ConfigError


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """An empty folder, no terminal, and a home that we own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as raised:
        files.read_text(text)
    return str(raised.value)


@pytest.mark.parametrize("strategy", list(ShardingStrategy))
def test_1_the_strategy_that_was_answered_is_the_one_that_runs(strategy):
    theirs = f"distributed_type: FSDP\nfsdp_config: {{fsdp_version: 1, fsdp_reshard_after_forward: {strategy.value}}}\n"
    assert files.read_text(theirs).config.fsdp.sharding_strategy is strategy
    written = yaml.safe_load(files.dump(Config(fsdp={"sharding_strategy": strategy})))
    assert written["fsdp_config"]["fsdp_sharding_strategy"] == strategy.value


def test_2_two_cpu_processes_are_two():
    loaded = files.read_text("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n")
    assert (loaded.config.mode, loaded.config.num_processes) == ("ddp", 2)


def test_4_a_typing_error_inside_a_block_is_refused_with_line_and_suggestion():
    text = "fsdp_config:\n  fsdp_offload_param: true\n"
    assert refused(text) == (
        "shardkit.yaml:2:3: fsdp_config.fsdp_offload_param: unknown key; did you mean fsdp_offload_params?"
    )
    assert "num_procesess: unknown key; did you mean num_processes?" in refused("num_procesess: 2\n")


def test_5_a_conversion_changes_no_meaning_silently():
    text, lost = to_accelerate(Config(num_processes=2, fsdp={"sharding_strategy": "NO_SHARD"}))
    assert yaml.safe_load(text)["distributed_type"] == "MULTI_GPU"
    assert len(lost) == 1 and "NO_SHARD is written as distributed_type MULTI_GPU (DDP)" in lost[0]
    hybrid = Config(num_machines=2, num_processes=4, main_process_ip="a", fsdp={"sharding_strategy": "HYBRID_SHARD"})
    text, lost = to_accelerate(hybrid)
    sizes = yaml.safe_load(text)["parallelism_config"]
    assert (sizes["parallelism_config_dp_replicate_size"], sizes["parallelism_config_dp_shard_size"]) == (2, 2)
    assert lost == []


def test_6_what_can_fail_is_checked_before_anything_is_lost(capsys):
    assert run(["config", "--defaults", "-o", "missing/shardkit.yaml"]) == 2
    assert "there is no folder missing; create it" in capsys.readouterr().err
    assert run(["config", "--defaults", "--set", "mixed_precision=fp8", "--set", "use_cpu=true"]) == 2
    assert "fp8 needs a GPU (got a run on the CPU); write bf16." in capsys.readouterr().err


def test_7_what_people_type_is_understood():
    for word in ("y", "Y", "1", "yes"):
        assert files.suggest({"use_cpu": word, "num_processes": "2"}).config.use_cpu is True
    for word in ("1e8", "100M", "100_000_000", "100,000,000", "100,000K"):
        assert files.suggest({"fsdp.min_num_params": word}).config.fsdp.min_num_params == 10**8


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("num_machines=0", "num_machines: is too small (got '0'); write 1 or more."),
        ("num_processes=-5", "num_processes: is too small (got '-5'); write 1 or more."),
        ("num_processes=two", "num_processes: is not a whole number (got 'two'); write one such as 1."),
        ("num_processes=0,1", "num_processes: is not a whole number (got '0,1'); write one such as 1."),
        ("shardkit.launch.hang_timeout_s=2,5", "hang_timeout_s: is not a number (got '2,5'); write one such as"),
        ("num_processes=2000000", "num_processes: is too large (got '2000000'); write 1000000 or less."),
        ("main_process_port=99999", "main_process_port: is too large (got '99999'); write 65535 or less."),
        ("rdzv_backend=bogus", "rdzv_backend: is not one of the choices (got 'bogus'); write static, c10d, etcd-v2 or"),
        ("fsdp.transformer_layer_cls_to_wrap=a b", "is not the name of a class (got 'a b'); write names with commas"),
    ],
)
def test_7_what_cannot_be_is_refused_in_words(setting, words, capsys):
    assert run(["config", "--defaults", "--set", setting]) == 2
    message = capsys.readouterr().err
    assert words in message and len(message.splitlines()) == 1
    assert not Path("shardkit.yaml").exists()


@pytest.mark.slow
def test_9_without_a_terminal_it_ends_at_once_and_names_the_flags():
    command = [sys.executable, "-m", "shardkit", "config"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--defaults" in done.stderr and "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2


def test_11_answers_about_tpus_are_real_values():
    config = files.read_text("distributed_type: XLA\ntpu_use_sudo: 'no'\ntpu_env: ['']\ntpu_vm: ['']\n").config
    assert (config.tpu_use_sudo, config.tpu_env, config.tpu_vm) == (False, [], [])
    assert "tpu_" not in files.dump(config, comments=False)


def test_12_words_of_yaml_and_empty_files():
    assert files.read_text("mixed_precision: no\n").config.mixed_precision == "no"
    assert refused("") == "shardkit.yaml: is empty; write one with: shardkit config --defaults --force -o shardkit.yaml"
    assert refused("distributed_type: FSPD\n") == (
        "shardkit.yaml:1:19: distributed_type: is not one of the choices (got 'FSPD'); did you mean FSDP?"
    )


def test_13_a_tab_is_told_in_one_line_with_its_place():
    text = refused("distributed_type: FSDP\nfsdp_config:\n\tfsdp_version: 2\n")
    assert text == "shardkit.yaml:3:1: indented with a tab; indent with spaces."


def test_16_without_a_file_it_needs_no_warnings():
    loaded = files.resolve(folder=Path.cwd())
    assert loaded.notes == [] and loaded.path is None
    assert loaded.config.num_processes >= 1 and loaded.origins["num_processes"].kind == "hardware"


def test_17_a_default_file_is_yaml_and_an_existing_one_is_an_error(capsys):
    assert run(["config", "--defaults"]) == 0
    assert yaml.safe_load(Path("shardkit.yaml").read_text())["num_processes"] >= 1
    assert not Path("shardkit.yaml").read_text().startswith("{")
    assert run(["config", "--defaults"]) == 2
    assert run(["config", "validate", "missing.yaml"]) == 2
    assert "missing.yaml: there is no such file" in capsys.readouterr().err


def test_20_nothing_is_taken_from_a_cache_in_the_home_folder(tmp_path, monkeypatch):
    cache = tmp_path / ".cache" / "huggingface" / "accelerate"
    cache.mkdir(parents=True)
    (cache / "default_config.yaml").write_text("distributed_type: FSDP\nnum_processes: 64\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / ".cache" / "huggingface"))
    assert files.find(Path.cwd()) is None
    assert files.resolve(folder=Path.cwd()).config.num_processes != 64


def test_21_no_class_has_to_be_guessed():
    config = files.suggest({"num_processes": "2"}).config
    assert config.fsdp.auto_wrap_policy.value == "TRANSFORMER_BASED_WRAP"
    assert config.fsdp.transformer_layer_cls_to_wrap == [], "empty: the repeated classes of the model itself"
