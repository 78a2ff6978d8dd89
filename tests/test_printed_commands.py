"""Every command that shardkit prints works as it is printed.

Those of the wizard and of errors run here as typed; those in the texts of the code and in the docs are read by the
program's own parser (README and docs also run: test_readme.py).
"""

import ast
import re
import shlex
import shutil
from pathlib import Path

import pytest

from shardkit import templates
from shardkit.cli.main import run
from tests.launches import free_port
from tests.printed import ROOT, commands_in, parse, shell
from tests.wizard_talk import CPU_ONLY, EIGHT_GPUS, SMALL_GPT, project, talk_plainly

SCRIPT = "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])\n"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do [[ $1 == --nodes=* ]] && nodes=${1#--nodes=}; shift; done
for ((node = 0; node < nodes; node++)); do
    SLURM_JOB_ID=7 SLURM_NNODES=$nodes SLURM_NODEID=$node SLURM_JOB_NODELIST=127.0.0.1 "$@" &
    tasks+=($!)
done
code=0
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $code
"""
NVIDIA_SMI = "#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8; do echo 'NVIDIA H100 80GB HBM3, 81559 MiB, 9.0'; done\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A project with the starter's model and a script that says who it is."""
    found = project(tmp_path, monkeypatch)
    shutil.copy(templates.folder() / "gpt.py", found)
    (found / "train.py").write_text(SCRIPT)
    (found / ".git").mkdir()
    return found


@pytest.fixture
def programs(tmp_path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def install(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def run_all(commands: list[str], folder: Path, programs: Path, **variables: str) -> list[str]:
    """What they print, all at once as on several machines; every one must end well."""
    started = [shell(command, folder, programs, **variables) for command in commands]
    told = [child.communicate(timeout=200)[0] for child in started]
    for command, child, text in zip(commands, started, told, strict=True):
        assert child.returncode == 0, f"{command}\n{text}"
    return told


def printed(capsys) -> tuple[list[str], list[str], list[str]]:
    """What the wizard printed after saving: launches, plans, and the command without questions."""
    found = commands_in(capsys.readouterr().out.partition("Saved ")[2])
    launches = [command for command in found if " launch" in command]
    plans = [command for command in found if command.startswith("shardkit plan")]
    again = [command for command in found if command.startswith("shardkit config")]
    assert launches and len(plans) == 1 and len(again) == 1
    return launches, plans, again


CPU_PATHS = {
    "one machine": ["", "", "", "", "2", ""],
    "another name": ["", "", "", "", "2", "", "another", "other name.yaml"],
    "one process": ["", "", "1", ""],
    "a model": ["gpt:GPT", "", "", "", "", ""],
    "sizes": [SMALL_GPT, "", "", "", "1", "", "another", "nodes.yaml"],
}


@pytest.mark.requirement("U5")
@pytest.mark.slow
@pytest.mark.parametrize("name", list(CPU_PATHS))
def test_what_the_wizard_prints_works_as_typed(folder, programs, capsys, name):
    asked = CPU_PATHS[name]
    assert talk_plainly([*asked, "save"], CPU_ONLY) == 0
    launches, plans, again = printed(capsys)
    [told] = run_all(launches, folder, programs)
    saved = next(path for path in folder.glob("*.yaml"))
    assert f"| {saved} |" in told or f"| {saved.name} |" in told, "the launch runs what was configured"
    assert f"of {1 if name == 'one process' else 2}" in told
    run_all(plans, folder, programs)
    text = saved.read_text()
    run_all(again, folder, programs)
    assert saved.read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("address", [pytest.param(True, marks=pytest.mark.loops), False])
def test_every_machine_of_several_gets_its_command(folder, programs, capsys, address):
    port = free_port()
    asked = ["", "several", "2", f"127.0.0.1:{port}" if address else "none", "", "CPU", "1", "", "", ""]
    assert talk_plainly([*asked, "save"], CPU_ONLY) == 0
    launches, plans, _ = printed(capsys)
    assert len(launches) == 2
    told = run_all([line.replace(" HOST ", f" 127.0.0.1:{port} ") for line in launches], folder, programs)
    assert "rank 0 of 2" in told[0] and "rank 1 of 2" in told[1]
    run_all(plans, folder, programs)


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_the_slurm_line_finds_machine_0_by_itself(folder, programs, capsys, machines):
    install(programs, "srun", SRUN)
    install(programs, "sbatch", "#!/bin/sh\necho queued $(grep -c 'srun --kill' $1)\n")
    each = str(2 // machines)
    asked = ["", "SLURM", str(machines), *["", ""][: 2 * (machines - 1)], "CPU", each, "", "", "", "save"]
    assert talk_plainly(asked, CPU_ONLY) == 0
    shown = capsys.readouterr().out.partition("Saved ")[2]
    [run, queue, _, again] = commands_in(shown)
    assert run.startswith(f"srun --nodes={machines} --ntasks-per-node=1 --cpus-per-task={each} shardkit launch ")
    assert queue.startswith("shardkit submit ")
    [told] = run_all([run], folder, programs, SHARDKIT_SET_MAIN_PROCESS_PORT=str(free_port()))
    assert "rank 0 of 2" in told and "rank 1 of 2" in told
    assert "queued 1" in run_all([queue], folder, programs)[0]
    run_all([again], folder, programs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        ["", "", "", "", "", ""],
        pytest.param(
            ["gpt:GPT", "several", "4", "node-a", "", "", "", "", "", "another", "nodes.yaml"], marks=pytest.mark.loops
        ),
        ["", "SLURM", "4", "", "", "", "", "", "", ""],
    ],
)
def test_on_gpus_too(folder, programs, capsys, asked):
    """Without the GPUs themselves: a launch stops before it starts the ranks."""
    install(programs, "nvidia-smi", NVIDIA_SMI)
    install(programs, "srun", SRUN)
    assert talk_plainly([*asked, "save"], EIGHT_GPUS) == 0
    launches, plans, again = printed(capsys)
    run_all([line.replace(" launch", " launch --dry-run") for line in launches], folder, programs)
    run_all([*plans, *again], folder, programs)


@pytest.mark.slow
def test_a_gpu_that_is_elsewhere_is_planned_for(folder, programs, capsys):
    asked = ["gpt:layers=32,hidden=4096,heads=32", "another", "GPU", "H200 141 GB", "", "", "", "", "save"]
    assert talk_plainly(asked, CPU_ONLY) == 0
    _, plans, _ = printed(capsys)
    assert "--device h200-141" in plans[0]
    [told] = run_all(plans, folder, programs)
    assert "H200" in told


ERRORS = [
    (["config"], {}),
    (["config", "show", "--config", "missing.yaml"], {}),
    (["config", "validate", "a b.yaml"], {}),
    (["config", "validate", "empty.yaml"], {"empty.yaml": "\n"}),
    (["config", "validate", "nemo.yaml"], {"nemo.yaml": "fsdp_sharded_checkpoint: true\n"}),
    (["config", "validate", "mpi.yaml"], {"mpi.yaml": "mpirun_config: hosts\n"}),
    (["launch"], {}),
]


@pytest.mark.requirement("U5")
@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "texts"), ERRORS, ids=lambda value: " ".join(value))
def test_what_an_error_prints_works_as_typed(folder, programs, capsys, arguments, texts, monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    for name, text in texts.items():
        (folder / name).write_text(text)
    assert run(arguments) == 2
    found = commands_in(capsys.readouterr().err)
    assert found
    run_all(found, folder, programs)


@pytest.mark.slow
def test_the_commands_in_the_head_of_a_file_are_about_that_file(folder, programs, capsys):
    assert run(["config", "--defaults", "-o", "my nodes.yaml"]) == 0
    head = (folder / "my nodes.yaml").read_text().splitlines()[1]
    parts = [part.split(": ", 1)[1] for part in head.removeprefix("# ").split("    ")]
    assert len(parts) == 3 and all("my nodes.yaml" in part for part in parts)
    assert commands_in("\n".join(parts)) == parts
    told = run_all(parts[1:], folder, programs)
    assert "valid" in told[0] and "my nodes.yaml" in told[1]


# --- everything that is written down somewhere: understood by the program ---


def texts_of_code() -> list[tuple[str, str]]:
    """Every text in the package that is not a docstring, with {} for what is filled in."""
    found = []
    for path in sorted((ROOT / "shardkit").rglob("*.py")):
        tree = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        parts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if id(node) in parts:
                continue
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "1" for part in node.values)
                found.append((str(path.relative_to(ROOT)), str(text)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n\n" not in node.value:
                found.append((str(path.relative_to(ROOT)), node.value))
    return found


def in_docs() -> list[tuple[str, str]]:
    """Every command in code spans and code blocks of the docs and the templates."""
    found = []
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        text = page.read_text()
        spans = re.findall(r"(?<!`)`(shardkit [^`]+)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        blocks = re.findall(r"^```(?:sh|shell|text)\n(.*?)^```", text, re.M | re.S)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines = [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?shardkit \w", line)]
        found += [(str(page.relative_to(ROOT)), command) for command in [*spans, *lines]]
    return found


def words(command: str) -> list[str]:
    """The words after `shardkit`, with an example for each placeholder."""
    _, *found = shlex.split(command.rstrip("&").strip(), comments=True)
    example = {"N": "1", "DIR": "runs", "KEY=VALUE": "debug=true", "FILE": "x.yaml"}
    return [example.get(word, word) for word in found if word not in {"...", "[ARGUMENTS]...", "[ARGUMENTS]"}]


@pytest.mark.slow
def test_every_command_in_the_docs_is_understood():
    found = [(page, command) for page, command in in_docs() if not re.match(r"shardkit [\d|]", command)]
    assert len(found) > 60
    for page, command in found:
        verb, *rest = words(command)
        if verb in {"--version", "VERB"}:
            continue
        try:
            parse([verb, *rest])
        except BaseException as error:
            pytest.fail(f"{page}: `{command}` is not understood: {error!r}")


@pytest.mark.slow
def test_every_command_in_the_code_is_understood():
    count = 0
    blanks = re.compile(r"\{(?:output|name|config)\}")  # of the head of a file
    for place, text in texts_of_code():
        for match in re.findall(r"(?:: |`|for )(shardkit (?:config|plan|launch|submit|checkpoint|env)\b[^`\n]*)", text):
            command = re.split(r"   +|, (?=and |with )|; |\.(?:\s|$)|`| shows | takes ", blanks.sub("", match))[0]
            count += 1
            try:
                parse(words(command))
            except BaseException as error:
                pytest.fail(f"{place}: {command!r} is not understood: {error!r}")
    assert count > 8
