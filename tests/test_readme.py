"""What README and docs tell the reader to type. Blocks marked `sh` run here, in order, as the reader would type them
(`shardkit launch` as a dry run: the demo's test trains); `shell` blocks need other machines or the network."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from shardkit import Accelerator, ProjectConfiguration, templates
from shardkit.cli.main import run
from shardkit.config.files import read_text

ROOT = Path(__file__).parent.parent
NAMES = [str(page.relative_to(ROOT)) for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.startswith("#")]


def leave_a_checkpoint(folder):
    """What a run of the starter script leaves, of a smaller model."""
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(config={"distributed_type": "NO", "use_cpu": True}, project_config=project)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state()
    accelerator.end_training()


@pytest.fixture
def folder(tmp_path, monkeypatch, ranks):
    """A folder as the pages assume it: the starter script is there, and has run."""
    ranks.run(1, leave_a_checkpoint, str(tmp_path / "runs" / "gpt"))
    for name in ("train.py", "gpt.py"):
        shutil.copy(templates.folder() / name, tmp_path)
    (tmp_path / ".git").mkdir()  # the search for a configuration stops here
    monkeypatch.chdir(tmp_path)
    return tmp_path


PAGES = [
    pytest.param(name, marks=pytest.mark.slow if name.endswith(("how-to/plan.md", "how-to/lora.md")) else ())
    for name in NAMES
    if commands(name)
]


@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page, folder, capsys):
    for command in commands(page):
        assert command[0] == "shardkit", f"{page}: a block that is not shardkit's is marked shell (got {command})"
        arguments = command[1:]
        if arguments[0] == "launch":
            arguments = ["launch", "--dry-run", *arguments[1:]]
        code = run(arguments)
        assert code == 0, f"{shlex.join(command)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", NAMES)
def test_files_and_code_are_valid(page):
    for block in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(block), dict)
        read_text(block)
    for block in blocks(page, "python"):
        compile(block.replace("...", "pass"), page, "exec")


def test_make_targets_exist():
    targets = set(re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
    for page in NAMES:
        used = re.findall(r"^make ([a-z-]+)", "\n".join(blocks(page, "shell")), re.MULTILINE)
        assert set(used) <= targets


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", NAMES)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^)#:]*)\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}#{anchor}"
