"""Writes the reference pages that are made from the code: `make docs`. A test holds the pages against it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from shardkit.compat.reference import migration_page
from shardkit.config.reference import configuration_page
from shardkit.wizard.reference import questions_page

REFERENCE = Path(__file__).parent / "reference"
SCRIPT = Path(__file__).parent.parent / "tests" / "scripts" / "theirs.py"
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "questions.md": questions_page,
    "../migrating-from-accelerate.md": partial(migration_page, SCRIPT),
}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
