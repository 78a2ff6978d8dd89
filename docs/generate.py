"""Writes the reference pages that are made from the code: `make docs`. A test holds the pages against it."""

from collections.abc import Callable
from pathlib import Path

from shardkit.config.reference import configuration_page
from shardkit.wizard.reference import questions_page

REFERENCE = Path(__file__).parent / "reference"
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "questions.md": questions_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
