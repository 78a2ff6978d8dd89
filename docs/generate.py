"""Writes the pages and the picture that are made from the code: `make docs`. A test holds them against it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from docs.public_names import public_names_page
from shardkit.compat.reference import migration_page
from shardkit.config.reference import configuration_page
from shardkit.config.schema import Config, FsdpConfig
from shardkit.model.sources import describe
from shardkit.plan.answer import PlanRequest
from shardkit.plan.answering import answer
from shardkit.plan.devices import DEVICES
from shardkit.plan.plot import svg
from shardkit.wizard.reference import questions_page

REFERENCE = Path(__file__).parent / "reference"
SCRIPT = Path(__file__).parent.parent / "tests" / "scripts" / "theirs.py"


def picture() -> str:
    """The plan that README.md and docs/how-to/plan.md show, as `shardkit plan --plot` draws it."""
    config = Config(
        num_processes=128, num_machines=16, mixed_precision="bf16", fsdp=FsdpConfig(activation_checkpointing=True)
    )
    return svg(answer(PlanRequest(describe("gpt-175b"), config, 128, 8, DEVICES["h100-80"], batch_size=1)))


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "questions.md": questions_page,
    "accelerator.md": public_names_page,
    "../migrating-from-accelerate.md": partial(migration_page, SCRIPT),
    "../pictures/plan.svg": picture,
}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
