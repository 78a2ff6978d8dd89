"""A configuration of another tool, whichever it is, as one of ours."""

from pathlib import Path

from shardkit.config import document
from shardkit.config.files import text_of_file
from shardkit.convert import accelerate, nemo
from shardkit.convert.report import Conversion


def convert(path: Path) -> Conversion:
    """What the file means for us, with an account of every key. Raises ConfigError where it is not readable at all."""
    text = text_of_file(path)
    root = document.compose(text, str(path))
    if nemo.is_nemo(document.raw(root)):
        return nemo.from_nemo(text, str(path))
    return accelerate.from_accelerate(text, str(path))
