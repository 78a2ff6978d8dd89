"""The reference pages are those that the code writes, and maps of folders name every file."""

import re
from importlib import import_module

import pytest

from docs.generate import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_is_up_to_date(name):
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "write it anew: make docs"


def test_code_in_a_docstring_is_code_on_its_page():
    page = PAGES["accelerator.md"]()
    assert "<br>`with accelerator.context_parallel(tokens, targets) as (tokens, targets):`<br>`    loss = " in page


PACKAGE = REFERENCE.parent.parent / "shardkit"
FOLDERS = [path.parent.relative_to(PACKAGE.parent).as_posix() for path in sorted(PACKAGE.rglob("__init__.py"))]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_map_of_a_folder_names_what_is_in_it(name):
    folder = PACKAGE.parent / name
    inside = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    named = {*re.findall(r"\w+", str(import_module(name.replace("/", ".")).__doc__))}
    assert not inside - {"__init__"} - named


def test_the_map_of_the_tests_names_what_they_share():
    folder = PACKAGE.parent / "tests"
    shared = {path.stem for path in folder.glob("*.py") if not path.name.startswith("test_")}
    assert not shared - {"__init__", "conftest"} - {*re.findall(r"\w+", str(import_module("tests").__doc__))}


def test_a_file_that_a_text_names_is_there():
    """`name.py`, `folder/name.py`: seen from the text's own folder, or from one around it."""
    gone = []
    for text in (REFERENCE.parent / "contributing.md", *PACKAGE.rglob("*.py")):
        places = [PACKAGE, *(folder for folder in text.parents if folder.is_relative_to(PACKAGE.parent))]
        named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text.read_text(encoding="utf-8"))
        gone += [f"{text}: {name}" for name in named if not any((place / name).is_file() for place in places)]
    assert not gone
