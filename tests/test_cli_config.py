"""`shardkit config` by flags, and its commands; `shardkit env`."""

import io
import json
import shlex
from pathlib import Path

import pytest
import yaml

from shardkit.cli.main import run
from shardkit.config import files

DATA = Path(__file__).parent / "data" / "config"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    """Every command runs in an empty folder, for a user without a file of their own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())


def shardkit(capsys, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Output and messages of one command line, which must end with that code."""
    result = run(list(arguments))
    output = capsys.readouterr()
    assert result == code, output.err
    return output.out, output.err


@pytest.mark.requirement("D1")
def test_defaults_and_settings_write_a_file_and_print_the_command_for_it(capsys):
    settings = ["fsdp.sharding_strategy=HYBRID_SHARD", "mixed_precision=bf16", "num_processes=4"]
    settings += ["fsdp_config.fsdp_transformer_layer_cls_to_wrap=A,B", "shardkit.seed=3"]
    words = [word for setting in settings for word in ("--set", setting)]
    out, _ = shardkit(capsys, "config", "--defaults", *words, "-o", "run.yaml")
    path, again = out.splitlines()
    assert path == "run.yaml"
    config = files.read(Path("run.yaml")).config
    assert (config.num_processes, config.mixed_precision, config.shardkit.seed) == (4, "bf16", 3)
    assert config.fsdp.transformer_layer_cls_to_wrap == ["A", "B"]
    text = Path("run.yaml").read_text()
    command = shlex.split(again.removeprefix("to repeat this: "))
    assert command[:3] == ["shardkit", "config", "--defaults"]
    Path("run.yaml").unlink()
    shardkit(capsys, *command[1:])
    assert Path("run.yaml").read_text() == text


def test_without_a_terminal_nothing_is_asked_and_the_flags_are_named(capsys):
    _, error = shardkit(capsys, "config", code=2)
    assert error.startswith("config: cannot ask its questions (stdin is not a terminal); give flags: --defaults, --set")
    assert "for example: shardkit config --defaults --set mixed_precision=bf16" in error
    _, error = shardkit(capsys, "config", "--no-input", code=2)
    assert "--no-input was given" in error
    shardkit(capsys, "config", "--set", "num_processes=2", "--no-input")
    assert files.read(Path("shardkit.yaml")).config.num_processes == 2


def test_a_file_is_not_replaced_unless_forced_and_then_kept(capsys):
    Path("shardkit.yaml").write_text("num_processes: 7\n")
    _, error = shardkit(capsys, "config", "--defaults", code=2)
    assert error == (
        "shardkit.yaml: exists; replace it with --force (the old one is kept), or choose another --output.\n"
    )
    shardkit(capsys, "config", "--defaults", "--force")
    assert Path("shardkit.yaml.bak").read_text() == "num_processes: 7\n"
    assert "num_processes: 7" not in Path("shardkit.yaml").read_text()


def test_a_dry_run_prints_the_file_and_writes_nothing(capsys):
    out, _ = shardkit(capsys, "config", "--defaults", "--set", "num_processes=2", "--dry-run", "--model", "m:build")
    assert yaml.safe_load(out)["num_processes"] == 2 and "# model: m:build" in out
    assert list(Path.cwd().iterdir()) == []


def test_a_file_for_all_projects_is_found_and_named(capsys):
    out, _ = shardkit(capsys, "config", "--defaults", "--user", "--set", "num_processes=3")
    assert out.splitlines()[0] == str(files.user_path())
    out, error = shardkit(capsys, "config", "show", "num_processes")
    assert out == "3\n" and error == f"configuration: {files.user_path()}\n"


def test_a_template_by_name_by_path_and_one_that_is_not_there(capsys):
    shardkit(capsys, "config", "--template", "fsdp", "--set", "num_processes=2", "-o", "a.yaml")
    assert files.read(Path("a.yaml")).config.num_processes == 2
    shardkit(capsys, "config", "--template", "a.yaml", "-o", "b.yaml")
    assert files.read(Path("b.yaml")).config == files.read(Path("a.yaml")).config
    _, error = shardkit(capsys, "config", "--template", "fsdpp", code=2)
    assert "template: no such template or file (got 'fsdpp'); did you mean fsdp?" in error


def test_from_an_accelerate_file_with_an_account_and_in_place_with_comments_kept(capsys):
    _, account = shardkit(capsys, "config", "--from", str(DATA / "example.yaml"))
    assert "fsdp_config.fsdp_backward_prefetch_policy" in account
    Path("shardkit.yaml").write_text("# mine\nnum_processes: 2   # two\n")
    shardkit(capsys, "config", "--from", "shardkit.yaml", "--set", "num_processes=4", "--force")
    assert Path("shardkit.yaml").read_text() == "# mine\nnum_processes: 4   # two\n"


def test_from_a_file_that_names_its_model_names_it_in_the_new_file(capsys):
    Path("shardkit.yaml").write_text("num_processes: 2\n# model: llama-3.1-8b\n")
    out, _ = shardkit(capsys, "config", "--from", "shardkit.yaml", "--set", "mixed_precision=bf16", "-o", "new.yaml")
    assert "\n# model: llama-3.1-8b\n" in Path("new.yaml").read_text() and "--model llama-3.1-8b" in out
    shardkit(capsys, "config", "--from", "new.yaml", "--model", "qwen2.5-7b", "-o", "other.yaml")
    assert "\n# model: qwen2.5-7b\n" in Path("other.yaml").read_text(), "a given model replaces it"


def test_from_a_file_of_one_rank_a_device_is_one_again(capsys):
    Path("open.yaml").write_text("mixed_precision: bf16\n")
    for more in ([], ["--set", "shardkit.seed=3"]):
        out, _ = shardkit(capsys, "config", "--from", "open.yaml", *more, "-o", "made.yaml", "--force")
        assert out == "made.yaml\n", "no command with --defaults, which counts the devices of this machine"
        assert "num_processes" not in yaml.safe_load(Path("made.yaml").read_text())
        out, _ = shardkit(capsys, "config", "validate", "made.yaml")
        assert "valid. one process per device" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "num_processes"], "--set: is not KEY=VALUE (got 'num_processes'); write --set KEY=VALUE."),
        (
            ["--set", "num_proceses=2"],
            "--set num_proceses: unknown setting (got num_proceses); did you mean num_processes?",
        ),
        (
            ["--defaults", "-o", "missing/x.yaml"],
            "missing/x.yaml: there is no folder missing; create it, or choose another",
        ),
        (["--defaults", "-o", "."], ".: is a folder; name a file in it."),
        (["--from", "no.yaml"], "no.yaml: there is no such file"),
        (
            ["--defaults", "--user", "-o", "x"],
            "config: --user and --output exclude each other (got both); give one of them.",
        ),
        (["--defaults", "--model", "nope"], "--model: not a model (got 'nope'); give module:function,"),
        (["--defaults", "--model", ""], "--model: not a model (got ''); give module:function,"),
        (["--template", ""], "template: no such template or file (got '');"),
        (["--user", "-o", "x"], "config: --user and --output exclude each other (got both); give one of them."),
    ],
)
def test_wrong_flags_are_named_in_one_line(capsys, words, message):
    _, error = shardkit(capsys, "config", *words, code=2)
    assert error.startswith(message) and len(error.splitlines()) == 1
    assert list(Path.cwd().iterdir()) == []


def test_all_wrong_flags_are_named_at_once(capsys):
    Path("x").write_text("mine")
    words = ["--from", "a", "--template", "b", "--set", "c", "--model", "d", "-o", "x"]
    _, error = shardkit(capsys, "config", *words, code=2)
    starts = ["config: --from and --template exclude each other", "--model: ", "--set: ", "a: there is no", "x: exists"]
    assert [line.startswith(start) for line, start in zip(error.splitlines(), starts, strict=True)] == [True] * 5
    assert Path("x").read_text() == "mine"
    words = ["nothing", "--config", "a", "--diff", "b", "--set", "c"]
    _, error = shardkit(capsys, "config", "show", *words, code=2)
    starts = ["--set: ", "a: there is no", "config show: unknown setting", "b: there is no"]
    assert [line.startswith(start) for line, start in zip(error.splitlines(), starts, strict=True)] == [True] * 4


def test_validate(capsys):
    Path("shardkit.yaml").write_text("num_processes: 2\nfsdp_config: {fsdp_use_orig_params: no}\n")
    out, _ = shardkit(capsys, "config", "validate")
    assert "shardkit.yaml: valid. 2 processes, FULL_SHARD, mixed precision no.\nnote: " in out
    Path("open.yaml").write_text("mixed_precision: bf16\n")
    out, _ = shardkit(capsys, "config", "validate", "open.yaml")
    assert out == "open.yaml: valid. one process per device, FULL_SHARD, mixed precision bf16.\n"
    Path("bad.yaml").write_text("num_procesess: 2\nmixed_precision: bf17\n")
    _, error = shardkit(capsys, "config", "validate", "bad.yaml", code=2)
    assert error == (
        "bad.yaml:1:1: num_procesess: unknown key; did you mean num_processes?\n"
        "bad.yaml:2:18: mixed_precision: is not one of the choices (got 'bf17'); did you mean bf16?\n"
    )
    out, _ = shardkit(capsys, "config", "validate", "bad.yaml", "--json", code=2)
    _, named = shardkit(capsys, "config", "validate", "--config", "bad.yaml", code=2)
    assert named == error
    _, both = shardkit(capsys, "config", "validate", "bad.yaml", "--config", "open.yaml", code=2)
    assert both == "config validate: two files (got bad.yaml and --config open.yaml); give one.\n"
    assert json.loads(out)["valid"] is False and len(json.loads(out)["problems"]) == 2
    out, _ = shardkit(capsys, "config", "validate", "--json")
    assert json.loads(out)["valid"] is True
    Path("shardkit.yaml").unlink()
    _, error = shardkit(capsys, "config", "validate", code=2)
    assert error == "config validate: no shardkit.yaml in this folder or its parents; give the file.\n"


def test_show_prints_dates_of_xla_settings_as_json(capsys):
    Path("shardkit.yaml").write_text("distributed_type: XLA\nxla_fsdp_settings: {a: 2024-01-01}\n")
    for words in ([], ["--origin"], ["--diff", "other.yaml"]):
        Path("other.yaml").write_text("num_processes: 4\n")
        out, _ = shardkit(capsys, "config", "show", "xla_fsdp_settings", "--json", *words)
        assert '"a": "2024-01-01"' in out and json.loads(out)


def test_show_proves_where_each_value_comes_from(capsys, monkeypatch):
    Path("shardkit.yaml").write_text("num_processes: 2\nmixed_precision: fp16\n")
    monkeypatch.setenv("SHARDKIT_SET_MIXED_PRECISION", "bf16")
    out, _ = shardkit(capsys, "config", "show", "--origin", "--set", "fsdp.offload_params=yes")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["num_processes"][0] == "2" and rows["num_processes"][1].endswith("shardkit.yaml:1:16")
    assert rows["mixed_precision"] == ["bf16", "$SHARDKIT_SET_MIXED_PRECISION"]
    assert rows["fsdp.offload_params"] == ["true", "--set", "fsdp.offload_params"]
    assert rows["fsdp.sharding_strategy"] == ["FULL_SHARD", "default"]
    out, _ = shardkit(capsys, "config", "show", "fsdp_config.fsdp_offload_params", "--json", "--origin")
    assert json.loads(out) == {"fsdp.offload_params": {"value": False, "origin": "default", "where": "default"}}
    out, _ = shardkit(capsys, "config", "show")
    assert yaml.safe_load(out)["mixed_precision"] == "bf16"
    out, _ = shardkit(capsys, "config", "show", "shardkit.mesh")
    assert out == "shardkit.mesh.replicate_size: 0\nshardkit.mesh.shard_size: 0\nshardkit.mesh.context_size: 1\n"
    Path("other.yaml").write_text("num_processes: 4\nmixed_precision: bf16\n")
    out, _ = shardkit(capsys, "config", "show", "--diff", "other.yaml", "--json")
    assert set(json.loads(out)["num_processes"]) == {"here", "other"}
    out, _ = shardkit(capsys, "config", "show", "--diff", "other.yaml")
    assert out == "num_processes: 2 -> 4\n"
    out, _ = shardkit(capsys, "config", "show", "--diff", "other.yaml", "--origin")
    assert out.startswith("num_processes: 2 (") and out.endswith("shardkit.yaml:1:16) -> 4 (other.yaml:1:16)\n")
    out, _ = shardkit(capsys, "config", "show", "--diff", "other.yaml", "--origin", "--json")
    assert json.loads(out)["num_processes"]["other"] == {"value": 4, "origin": "file", "where": "other.yaml:1:16"}
    out, _ = shardkit(capsys, "config", "show", "mixed_precision", "--diff", "other.yaml")
    assert out == "", "differences of this setting only"
    _, error = shardkit(capsys, "config", "show", "nothing", "--diff", "other.yaml", code=2)
    assert "unknown setting (got nothing)" in error
    _, error = shardkit(capsys, "config", "show", "fsdp.nothing", code=2)
    assert "config show: unknown setting (got fsdp.nothing)" in error
    for typed, meant in {
        "fsdp.shardin": "fsdp.sharding_strategy",
        "fsdp_config.fsdp_shard": "fsdp_config.fsdp_sharding_strategy",
        "sharding": "fsdp.sharding_strategy",
        "shardkit.chekpoint": "shardkit.checkpoint",
        "chekpoint.keep": "shardkit.checkpoint.keep_last",
        "fsdp.kep_last": "shardkit.checkpoint.keep_last",
    }.items():
        _, error = shardkit(capsys, "config", "show", typed, code=2)
        assert error.endswith(f"unknown setting (got {typed}); did you mean {meant}?\n")
        shardkit(capsys, "config", "show", meant)
    _, error = shardkit(capsys, "config", "show", "other.yaml", code=2)
    assert "config show: a file is not a setting (got other.yaml); write --config other.yaml." in error


@pytest.mark.requirement("N3")
def test_convert(capsys):
    out, account = shardkit(capsys, "config", "convert", str(DATA / "nemo.yaml"))
    assert yaml.safe_load(out)["shardkit"] == {"precision": {"reduce_dtype": "bf16"}}
    assert "changed   fsdp_sharding_strategy   fsdp_sharding_strategy: FULL_SHARD" in account
    Path("nemo.yaml").write_text("megatron_amp_O2: True\nfsdp: True\noptim: {name: distributed_fused_adam}\n")
    out, error = shardkit(capsys, "config", "convert", "nemo.yaml", "-o", "x.yaml", code=2)
    assert "nemo.yaml: megatron_amp_O2: megatron_amp_O2 does not work with FSDP" in error
    assert "nemo.yaml: optim.name: distributed_fused_adam" in error and not Path("x.yaml").exists()
    Path("typo.yaml").write_text("num_procesess: 2\nnum_machines: 2\nnum_processes: 3\n")
    _, error = shardkit(capsys, "config", "--from", "typo.yaml", code=2)
    assert "\ntypo.yaml:1:1: num_procesess: unknown key; did you mean num_processes?" in error
    assert "typo.yaml:3:1: num_processes: is not divisible by the number of machines" in error
    out, _ = shardkit(capsys, "config", "convert", "nemo.yaml", "-o", "x.yaml", "--drop")
    assert out == "x.yaml\n" and files.read(Path("x.yaml")).config.mode == "fsdp"
    out, lost = shardkit(capsys, "config", "convert", "x.yaml", "--to", "accelerate")
    assert yaml.safe_load(out)["fsdp_config"]["fsdp_version"] == 2
    assert lost.startswith("lost: num_processes: the file does not say it") and len(lost.splitlines()) == 1
    _, error = shardkit(capsys, "config", "convert", "x.yaml", "--to", "deepspeed", code=2)
    assert error == "config convert: --to: unknown format (got deepspeed); use accelerate.\n"


def test_schema_prints_a_json_schema(capsys):
    out, _ = shardkit(capsys, "config", "schema")
    assert json.loads(out)["properties"]["num_processes"]["description"]


def test_env(capsys):
    Path("shardkit.yaml").write_text("num_procesess: 2\n")
    out, _ = shardkit(capsys, "env", "--json")
    facts = json.loads(out)
    assert facts["cores"] >= 1 and facts["backends"]["gloo"] is True and facts["versions"]["torch"]
    assert facts["configuration"].endswith("shardkit.yaml (has 1 problem)")
    out, _ = shardkit(capsys, "env")
    assert out.splitlines()[0].split()[0] == "shardkit"
