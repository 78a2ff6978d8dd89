"""Converts a configuration of any supported tool."""

from pathlib import Path

from shardkit.config import document
from shardkit.config.files import text_of_file
from shardkit.convert import accelerate, nemo
from shardkit.convert.report import Conversion


def convert(path: Path) -> Conversion:
    """The converted file, with a report on every key. Raises ConfigError where it cannot be read."""
    text = text_of_file(path)
    root = document.compose(text, str(path))
    if nemo.is_nemo(document.raw(root)):
        return nemo.from_nemo(text, str(path))
    return accelerate.from_accelerate(text, str(path))
