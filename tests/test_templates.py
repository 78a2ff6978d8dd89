"""What ships in templates/: every configuration loads and launches, the starter script trains."""

import json
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardkit import templates
from shardkit.cli.main import run
from shardkit.config import checks
from shardkit.config.files import read
from shardkit.errors import EXIT_MACHINE, UsageError

EXPECTED = ["cpu", "ddp", "fsdp", "fsdp-hybrid", "multi-node", "slurm", "tpu"]


def test_templates_are_found_by_name_or_path(tmp_path):
    assert templates.names() == EXPECTED
    assert templates.find("cpu").name == "cpu.yaml"
    own = tmp_path / "own.yaml"
    own.write_text("num_processes: 1\n")
    assert templates.find(str(own)) == own
    with pytest.raises(UsageError, match=r"template: no such template or file \(got 'fsdb'\); did you mean fsdp\?"):
        templates.find("fsdb")
    with pytest.raises(UsageError, match="use a file, or one of cpu, ddp"):
        templates.find("zzz")


@pytest.mark.parametrize("name", EXPECTED)
def test_every_configuration_loads_without_a_problem(name):
    loaded = read(templates.find(name))
    assert checks.problems(loaded.config) == []
    text = templates.find(name).read_text()
    assert text.startswith("# ")
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("name", EXPECTED)
def test_every_configuration_launches(name, capsys):
    address = ["--main", "10.0.0.1:29500"] if name == "slurm" else []
    command = ["launch", "--config", str(templates.find(name)), "--cpu", *address, "--dry-run", "--json"]
    code = run([*command, str(templates.folder() / "train.py")])
    output = capsys.readouterr()
    if name == "tpu" and find_spec("torch_xla") is None:
        assert (code, "needs the package torch_xla" in output.err) == (EXIT_MACHINE, True)
        return
    assert code == 0, output.err
    assert json.loads(output.out)


@pytest.mark.requirement("D5")
def test_the_project_is_laid_out_as_asked():
    root = Path(__file__).parent.parent
    for name in ("pyproject.toml", "shardkit", "templates", "tests", "docs", "Makefile", "README.md"):
        assert (root / name).exists()
    project = (root / "pyproject.toml").read_text()
    for package in ("torch", "questionary", "pyyaml", "pydantic", "safetensors"):
        assert f'"{package}>=' in project


def test_templates_travel_to_where_they_are_looked_for():
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '"templates" = "shardkit/_templates"' in project
    assert {"train.py", "gpt.py", "sample.py", "demo.py"} <= {path.name for path in templates.folder().iterdir()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.requirement("D3")
@pytest.mark.requirement("D4")
def test_the_demo_goes_the_whole_way(tmp_path):
    command = [sys.executable, str(templates.folder() / "demo.py"), str(tmp_path / "demo"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All checks passed" in done.stdout


@pytest.mark.parametrize("given", ["notes", "notes/mine.txt"])
def test_the_demo_deletes_no_folder_but_its_own(given, tmp_path):
    kept = tmp_path / "notes" / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    command = [sys.executable, str(templates.folder() / "demo.py"), str(tmp_path / given), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert "is not the folder of an earlier demo (got " in done.stderr
    assert kept.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "got"), [([], "got no folder"), (["runs"], r"got runs: no \*\.safetensors"), (["-h"], "got -h")]
)
def test_the_sample_says_what_it_needs(words, got, tmp_path):
    command = [sys.executable, str(templates.folder() / "sample.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1
    assert re.match(r"sample: the folder of an export is needed \(" + got, done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.requirement("D5")
@pytest.mark.skipif(find_spec("hatchling") is None, reason="hatchling is not installed: no wheel without the network")
def test_templates_travel_in_the_wheel(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, check=True, timeout=120, cwd=Path(__file__).parent.parent)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {f"shardkit/_templates/{path.name}" for path in templates.folder().iterdir() if path.is_file()} <= inside
