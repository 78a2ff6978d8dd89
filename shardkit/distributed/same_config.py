"""Checks before the first step that all ranks have the same configuration, and the same versions."""

from typing import Any

import torch

from shardkit import __version__, env
from shardkit.config import files
from shardkit.config.schema import Config
from shardkit.distributed.control import ControlGroup, are_equal
from shardkit.errors import ConfigError
from shardkit.launch import names
from shardkit.wording import ranks_text


def compare(config: Config, control: ControlGroup) -> None:
    """Raises ConfigError on all ranks, with what differs, where ranks run or were launched with different
    configurations, or have other versions of shardkit and torch, as machines under torchrun may. Values that may
    differ between machines (see `files.shared_values`) are not compared. Collective."""
    versions = f"{__version__} with torch {torch.__version__}"
    mine = [env.get(names.CONFIG_DIGEST), files.digest(config), versions]
    launched, run, installed = control.decide(mine, are_equal)
    if not installed:
        different = control.decide({"shardkit": versions}, _differences)
        raise ConfigError(
            f"Accelerator: ranks have different versions (got {different}); install the same on every machine."
        )
    if launched and run:
        return
    path = env.resolved_config_path()
    values = files.shared_values(files.read(path).config if path and run else config)
    where = "launch" if run else "Accelerator"
    different = control.decide(values, _differences)
    raise ConfigError(
        f"{where}: ranks have different configurations (got {different}); give every machine the same file, flags and "
        "arguments of Accelerator(...)."
    )


def _differences(answers: list[dict[str, Any]]) -> str:
    """The keys whose values differ, with every value and its ranks."""
    texts = []
    for name in answers[0]:
        ranks_with: dict[str, list[int]] = {}
        for rank, values in enumerate(answers):
            ranks_with.setdefault(str(values[name]), []).append(rank)
        if len(ranks_with) > 1:
            shown = ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_with.items())
            texts.append(f"{name}: {shown}")
    return "; ".join(texts[:5]) or "settings of the launcher alone"
