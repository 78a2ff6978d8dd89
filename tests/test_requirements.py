"""Every requirement has a test that carries its id, and the docs page lists them all."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent


def marked() -> set[str]:
    """Ids in all `@pytest.mark.requirement(...)` of all test files."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requirement":
                found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def listed() -> set[str]:
    page = (TESTS.parent / "docs/reference/requirements.md").read_text()
    return set(re.findall(r"^\| ([A-Z]\d+) \|", page, re.MULTILINE))


def test_every_requirement_is_shown_by_a_test():
    assert listed() - marked() == set()


def test_every_mark_is_a_listed_requirement():
    assert marked() - listed() == set()
