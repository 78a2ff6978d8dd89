"""The reference pages are those that the code writes, and maps of folders name every file."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from docs.generate import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_is_up_to_date(name):
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "write it anew: make docs"


@pytest.mark.parametrize("name", ["checkpoint", "config", "data", "launch", "plan", "runtime", "sharding"])
def test_the_map_of_a_large_folder_names_its_files(name):
    package = import_module(f"shardkit.{name}")
    files = {path.stem for path in Path(str(package.__file__)).parent.glob("*.py")} - {"__init__"}
    named = {*re.findall(r"\w+", str(package.__doc__))}
    assert not files - named
