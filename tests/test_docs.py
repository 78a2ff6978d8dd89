"""The reference pages are those that the code writes, and maps of folders name every file."""

import re
from importlib import import_module

import pytest

from docs.generate import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_is_up_to_date(name):
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "write it anew: make docs"


LARGE = ["checkpoint", "config", "data", "launch", "plan", "runtime", "sharding", "tracking"]
PACKAGE = REFERENCE.parent.parent / "shardkit"
INSIDE = [path.parent.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.glob("*/*/__init__.py"))]


@pytest.mark.parametrize("name", [*LARGE, *INSIDE])
def test_the_map_of_a_large_folder_names_what_is_in_it(name):
    folder = PACKAGE / name
    inside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    named = {*re.findall(r"\w+", str(import_module(f"shardkit.{name}".replace("/", ".")).__doc__))}
    assert not inside - {"__init__"} - named
