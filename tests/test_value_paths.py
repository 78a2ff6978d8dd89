"""A setting's way from the file to torch is short: those files name it that `docs/contributing.md` lists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What stands between a configuration and torch. (Reading is the same for all settings: `config/files.py`.)
TRAINING = ("config/schema.py", "config/meaning.py", "distributed", "sharding", "optim", "checkpoint", "runtime")
MOST = 5


def files_that_name(setting: str) -> set[str]:
    package = ROOT / "shardkit"
    files = [
        path for place in TRAINING for path in [package / place, *(package / place).rglob("*.py")] if path.is_file()
    ]
    return {
        path.relative_to(package).as_posix()
        for path in files
        if re.search(rf"\b{setting}\b", re.sub(r'"""[\s\S]*?"""', "", path.read_text()))
    }


@pytest.mark.parametrize("setting", ["sharding_strategy", "backward_prefetch", "state_dict_type"])
def test_a_value_passes_few_files_and_keeps_its_name(setting):
    text = (ROOT / "docs" / "contributing.md").read_text()
    (line,) = re.findall(rf"^\| `fsdp_{setting}` \|(.*)\|$", text, re.MULTILINE)
    listed = set(re.findall(r"`([\w/]+\.py)`", line))
    assert listed == files_that_name(setting)
    assert len(listed) <= MOST
