"""Input that no person writes but machines do: every command answers it in words, and reads no more than it must."""

import json
import re
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shardkit.cli.main import run
from shardkit.compat import migrate, scan
from shardkit.config import files, tasks
from shardkit.config.scheduler import scheduler
from shardkit.convert.to_accelerate import to_accelerate
from shardkit.digits import number_in
from shardkit.errors import EXIT_CONFIG, ConfigError, ModelError, UsageError
from shardkit.launch import flags, other_launchers
from shardkit.model import sources
from shardkit.model.sources import describe
from shardkit.submit import reading
from shardkit.wizard import draft
from shardkit.wizard.review import why_not_writable
from tests import wizard_talk

LONG = "9" * 5000
NO_NUMBERS = ["", "x", "-1", "1.5", "1e3", "²", "①", "٣", LONG, "1 2"]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_only_ascii_digits_that_fit_64_bits_are_a_number(text):
    assert number_in(text) is None
    assert (number_in("08"), number_in(" 7\n"), number_in("9" * 18)) == (8, 7, 10**18 - 1)


JOBS = [
    {"SLURM_JOB_ID": "{}", "SLURM_NNODES": "{}", "SLURM_NODEID": "{}", "SLURM_STEP_TASKS_PER_NODE": "4(x{})"},
    {"SKYPILOT_NODE_RANK": "{}", "SKYPILOT_NUM_NODES": "{}", "SKYPILOT_TASK_ID": "{}"},
    {"KUBERNETES_SERVICE_HOST": "h", "WORLD_SIZE": "{}", "RANK": "{}", "MASTER_ADDR": "a", "MASTER_PORT": "{}"},
    {"PET_NNODES": "2", "PET_NODE_RANK": "{}", "PET_NPROC_PER_NODE": "{}", "PET_MASTER_PORT": "{}"},
    {"AWS_BATCH_JOB_NUM_NODES": "{}", "AWS_BATCH_JOB_NODE_INDEX": "{}", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "{}"},
    {"LWS_GROUP_SIZE": "{}", "LWS_WORKER_INDEX": "{}"},
    {"OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_SIZE": "{}", "OMPI_COMM_WORLD_LOCAL_RANK": "{}"},
    {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "{}", "LOCAL_WORLD_SIZE": "{}"},
]


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize("job", JOBS, ids=lambda job: next(iter(job)))
def test_variables_of_schedulers_that_are_no_numbers_are_unknown_or_refused(job, text):
    variables = {name: value.format(text) for name, value in job.items()}
    for read in (scheduler, tasks.world_of, tasks.left_alone, tasks.launch_left_alone, tasks.launch_problem):
        with suppress(ConfigError):
            read(variables)


def test_a_list_of_tasks_is_counted_without_making_it():
    here = {"SLURM_STEP_TASKS_PER_NODE": "4(x999999999999),3"}
    assert "starts 4 tasks" in tasks.launch_problem(here | {"SLURM_NODEID": "7"})
    assert "starts 3 tasks" in tasks.launch_problem({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"})
    assert tasks.launch_problem({"SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "3"}) is None


@pytest.mark.parametrize("text", ['"ab"', "{}", "[1, 2]", "[null]", "[" * 100_000, "["])
def test_the_hosts_of_sagemaker_are_a_list_of_names(text):
    for here in ({}, {"SM_CURRENT_HOST": "a"}):
        with pytest.raises(ConfigError, match="SM_HOSTS: is not a list of hosts"):
            scheduler({"SM_HOSTS": text, **here})
    assert scheduler({"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"}).machine_rank == 1


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_a_list_of_hosts_that_is_no_file_is_not_read(path):
    assert scheduler({"PBS_JOBID": "1", "PBS_NODEFILE": path}) is None


def test_hosts_in_another_encoding_are_counted(tmp_path):
    (tmp_path / "hosts").write_bytes(b"a\nb\xff\nb\xff\n")
    assert scheduler({"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "hosts")}).machines == 2


@pytest.mark.parametrize("text", ["²", LONG])
def test_flags_that_are_no_numbers_are_refused(text):
    for read, value in (
        (flags.main_settings, f"host:{text}"),
        (flags.machines_settings, f"1:{text}"),
        (reading.seconds, f"{text}h"),
        (reading.seconds, f"{text}-00:00:01"),
    ):
        with pytest.raises(UsageError):
            read(value)
    assert other_launchers.in_our_words(["--nproc-per-node", text], set())[:2] == ["-n", text]


def test_numbers_that_overflow_are_refused_in_the_file():
    with pytest.raises(ConfigError) as caught:
        files.read_text("shardkit:\n  checkpoint:\n    timeout_s: 1e300\n    keep_last: 1e30\n")
    assert caught.value.problems == [
        "shardkit.yaml:3:16: shardkit.checkpoint.timeout_s: is too large (got '1e300'); write 1000000000 or less.",
        "shardkit.yaml:4:16: shardkit.checkpoint.keep_last: is too large (got '1e30'); write 1000000000000000 or less.",
    ]
    with pytest.raises(ConfigError, match="is not yes or no"):
        files.read_text("fsdp_config:\n  fsdp_reshard_after_forward: ²\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("xla_fsdp_settings: {a: 2024-13-45}\n", "1:1: xla_fsdp_settings: has a value that YAML does not read (month"),
        ("xla_fsdp_settings: {a: =}\n", "1:1: xla_fsdp_settings: has a value that YAML does not read (could not"),
        (f"xla_fsdp_settings: {{a: {LONG}}}\n", "1:1: xla_fsdp_settings: has a value that YAML does not read (Exceeds"),
        ("fsdp_config: {fsdp_ignored_modules: 'a{99999999999999999999}'}\n", "the repetition number is too large)"),
        (
            f"fsdp_config: {{fsdp_ignored_modules: '{'(' * 3000}{')' * 3000}'}}\n",
            "is not a regular expression (got '(((",
        ),
        (f"shardkit: {{launch: {{show: '{LONG}'}}}}\n", "show: is not all, nor ranks with commas (got '"),
        (f"gpu_ids: '{LONG}'\n", "gpu_ids: is not numbers with commas (got '"),
        ("gpu_ids: '\u0661'\n", "gpu_ids: is not numbers with commas (got '"),
        ("shardkit: {seed: 99999999999999999999}\n", "'99999999999999999999'); write less than 18446744073709551616."),
    ],
)
def test_values_that_libraries_fail_on_are_problems_of_the_file(text, problem):
    with pytest.raises(ConfigError) as caught:
        files.read_text(text)
    assert problem in str(caught.value)


def test_a_flag_with_a_value_that_yaml_fails_on_is_refused():
    with pytest.raises(ConfigError, match="--set xla_fsdp_settings: has a value that YAML does not read"):
        files.resolve(None, {"xla_fsdp_settings": "{a: 2024-13-45}"})


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
FSDP_FILES = {
    "aliases.yaml": (ALIASES, "too many nested values or aliases"),
    "deep.json": ("[" * 100_000, "is not JSON"),
    "deep.yaml": ("[" * 3000, "nested too deeply"),
    "date.yaml": ("a: 2001-99-99\n", "date.yaml: has a value that YAML does not read (month must be in 1..12)"),
    "tag.yaml": ("a: !!python/object/apply:os.getcwd []\n", "has a value that YAML does not read (could not"),
    "bool.yaml": ("a: !!bool b\n", "has a value that YAML does not read ('b')"),
    "long.json": (f'{{"a": {LONG}}}', "is not JSON"),
    "nul.json": ("\0", "NUL bytes"),
    "list.json": ("[]", "is not a block of keys"),
}


@pytest.mark.parametrize("name", FSDP_FILES)
def test_a_file_of_fsdp_settings_is_read_within_limits(tmp_path, name):
    text, words = FSDP_FILES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(words)):
        flags.fsdp_file_settings(tmp_path / name)


def test_a_file_of_fsdp_settings_may_have_any_keys_and_ends(tmp_path):
    (tmp_path / "numbers.yaml").write_text("1: 2\n")
    assert flags.fsdp_file_settings(tmp_path / "numbers.yaml") == {"fsdp_config.fsdp_1": "2"}
    with pytest.raises(ConfigError, match="too large for a configuration"):
        flags.fsdp_file_settings(Path("/dev/zero"))


def weights(path, header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return str(path)


@pytest.mark.parametrize(
    "header",
    [
        {"a": 5},
        {"a": {"shape": [2]}},
        {"a": {"dtype": "F32"}},
        {"a": {"dtype": [], "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [-2]}},
        {"a": {"dtype": "F32", "shape": ["x"]}},
        {"a": {"dtype": "F32", "shape": [10**9] * 40}},
        {"a": {"dtype": "F32", "shape": [2]}, "a.b": {"dtype": "F32", "shape": [2]}},
        {".".join("a" * 3000): {"dtype": "F32", "shape": [2]}},
        b"[" * 50_000,
    ],
    ids=lambda header: str(header)[:40],
)
def test_the_header_of_weights_to_plan_for_is_checked(tmp_path, header):
    with pytest.raises(ModelError, match=r"not a readable safetensors file|lies inside another tensor"):
        describe(weights(tmp_path / "m.safetensors", header))


def test_names_with_digits_that_are_no_numbers_are_names(tmp_path):
    entry = {"dtype": "F32", "shape": [2]}
    found = describe(weights(tmp_path / "m.safetensors", {f"layers.²{tail}": entry for tail in ("", LONG)}))
    assert found.numel == 4


@pytest.mark.parametrize("sizes", ["layers=1e9,hidden=8,heads=2", "layers=2,hidden=8,heads=2,vocab=1e300"])
def test_sizes_beyond_any_model_are_refused(sizes):
    with pytest.raises(ModelError, match="not a whole number from 1 to") as caught:
        describe(f"gpt:{sizes}")
    assert caught.value.exit_code == EXIT_CONFIG


def test_a_file_without_a_count_is_not_written_with_one_for_accelerate():
    text = "distributed_type: FSDP\nnum_machines: 2\nmain_process_ip: a\nfsdp_config:\n  fsdp_sharding_strategy: 4\n"
    mesh = "shardkit:\n  mesh:\n    shard_size: 8\n"
    for given in (text, text + mesh):
        written, lost = to_accelerate(files.read_text(given).config)
        assert "num_processes" not in written and "parallelism_config" not in written
        assert lost[-1].startswith("num_processes: the file does not say it")
        files.read_text(written)


# ---- scripts ----

ATTRIBUTES = pytest.param(
    "x" + ".a" * 50_000 + "\n",
    id="attributes",
    marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 reads it"),
)
DEEP = [
    pytest.param("x = " + "-" * 200_000 + "1\n", id="minus"),
    ATTRIBUTES,
    pytest.param("x = " + "(" * 5000, id="parentheses"),
    pytest.param("\0", id="nul"),
]


@pytest.mark.parametrize("text", DEEP)
def test_a_script_that_python_cannot_read_is_refused_by_migrate_and_told_by_a_scan(text):
    with pytest.raises(UsageError, match="correct the file"):
        migrate.change_in(text)
    found = scan.scan_text(text, "train.py")
    assert found == scan.Found(unread=found.unread) and len(found.unread) == 1


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/dev/zero", "cannot be read"),
        ("nosuch.py", "no such file or folder; check the path"),
        ("/", "cannot be read .not a regular file"),
    ],
)
def test_migrate_reads_regular_files_only(path, says):
    with pytest.raises(UsageError, match=says):
        migrate.change_of(Path(path))


@pytest.mark.parametrize("before", ["", "\ufeff", "# \x0c\n", "x = '\u2028'\r\n", "# é\r\n"], ids=repr)
def test_migrate_changes_the_line_that_python_means_and_no_line_end(tmp_path, before, capsys):
    script = tmp_path / "train.py"
    script.write_bytes(f"{before}from accelerate import Accelerator\r\nprint(1)\n".encode())
    script.chmod(0o755)
    assert run(["migrate", str(script), "--write"]) == 0
    assert script.read_bytes() == f"{before}from shardkit.compat import Accelerator\r\nprint(1)\n".encode()
    assert script.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_migrate_of_a_plain_script_says_where_its_change_is_described(tmp_path, capsys):
    script, advice = tmp_path / "train.py", "docs/how-to/training-script.md"
    script.write_text("import torch\n")
    assert run(["migrate", str(script)]) == 0
    said = capsys.readouterr()
    assert "does not import accelerate; nothing to change" in said.out and advice in said.err
    assert (Path(__file__).parent.parent / advice).exists()
    for text in "from shardkit import Accelerator\n", "from accelerate import Accelerator\n":
        script.write_text(text)
        assert run(["migrate", str(script)]) == 0
        assert advice not in capsys.readouterr().err


# ---- the wizard ----


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        *(
            f'{{"target": "T", "given": {{"model": "x"}}, "time_s": {time_s}}}'
            for time_s in ("NaN", "1e999", LONG[:400])
        ),
        *(
            f'{{"target": "T", "given": {given}, "time_s": 1}}'
            for given in ('{"model": [1]}', '{"model": {}}', "[[1]]")
        ),
    ],
    ids=lambda text: text[:40],
)
def test_a_damaged_draft_is_no_draft(tmp_path, monkeypatch, text):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    place = draft.path(tmp_path / "shardkit.yaml")
    place.parent.mkdir(parents=True)
    place.write_text(text.replace('"T"', json.dumps(str(tmp_path / "shardkit.yaml"))))
    assert draft.find(tmp_path / "shardkit.yaml") is None
    draft.keep(tmp_path / "shardkit.yaml", {"model": None, "machines": 2, "names": ["A"]})
    assert draft.find(tmp_path / "shardkit.yaml").text(time.time()) == "3 answers, just now"


def test_two_keys_at_once_that_both_leave_a_question(tmp_path, monkeypatch):
    wizard_talk.project(tmp_path, monkeypatch)
    assert wizard_talk.talk("\x1b" + wizard_talk.STOP) == 130


@pytest.mark.parametrize("name", ["a\0b", "a" * 256, "x" * 300 + "/y"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    assert why_not_writable(tmp_path / name)
    assert not why_not_writable(tmp_path / "a.yaml")


@pytest.mark.parametrize("spec", ["a" * 5000, "a" * 300, "x/" * 3000])
def test_the_name_of_a_model_may_be_longer_than_paths_are(tmp_path, spec):
    assert sources.has_form(spec + "+", tmp_path) is False
    with pytest.raises(ModelError) as caught:
        describe(spec + "+", folder=tmp_path)
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize("flag", ["--batch-size", "--seq-len", "--per-machine", "--world"])
def test_counts_beyond_any_run_are_refused_by_plan(flag, capsys):
    assert run(["plan", "gpt:layers=2,hidden=64,heads=2", flag, "1" + "0" * 330]) == EXIT_CONFIG
    assert flag in capsys.readouterr().err


def test_plan_tells_of_a_file_in_another_encoding_once(tmp_path, capsys):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"num_processes: 2 # \xe9\n")
    assert run(["plan", "--config", str(path)]) == EXIT_CONFIG
    assert capsys.readouterr().err.count("is not a UTF-8 text file (got byte 0xe9 at 19)") == 1
    path.write_bytes(b"\xef\xbb\xbf# model: gpt:layers=2,hidden=64,heads=2\nnum_processes: 2\n")
    assert run(["plan", "--config", str(path)]) == 0, "a byte order mark hides no line"


@pytest.mark.parametrize("size", ["null", '"1e3"', "NaN", "1.5"])
def test_a_measurement_without_numbers_is_none(tmp_path, capsys, size):
    names = ("peak_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes")
    text = ", ".join(f'"{name}": {size}' for name in names)
    (tmp_path / "rank0.memory.json").write_text(f'{{"rank": 0, "device": "cpu", {text}}}')
    assert run(["plan", "gpt:layers=2,hidden=64,heads=2", "--measured", str(tmp_path)]) == EXIT_CONFIG
    assert "peak_bytes is no number of bytes" in capsys.readouterr().err
