"""Writes the plan as a chart, in the format given by the file name."""

from importlib.util import find_spec
from pathlib import Path

from shardkit.errors import MachineError, UsageError
from shardkit.plan.answer import Answer
from shardkit.plan.page import page
from shardkit.plan.plot import svg, title
from shardkit.plan.png import save_png


def check(path: Path) -> None:
    """Raises UsageError or MachineError if no chart can be written there, before a plan that may take minutes."""
    if path.suffix.lower() not in {".svg", ".html", ".png"}:
        raise UsageError(f"--plot: unknown file type (got {path.name!r}); use .svg, .html or .png.")
    if path.suffix.lower() == ".png" and find_spec("matplotlib") is None:
        raise MachineError(
            "--plot: a .png needs matplotlib, which is not installed; pip install matplotlib, or use .svg or .html."
        )
    if path.is_dir():
        raise UsageError(f"--plot: {path} is a folder; give a file.")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: {path}: there is no folder {path.parent}; create it, or give another file.")


def save(answer: Answer, path: Path) -> None:
    """Writes the chart; the suffix selects the format: .svg, .html or .png."""
    check(path)
    try:
        match path.suffix.lower():
            case ".svg":
                path.write_text(svg(answer), encoding="utf-8")
            case ".html":
                path.write_text(page(answer, title(answer)), encoding="utf-8")
            case ".png":
                save_png(answer, path)
    except PermissionError as error:
        raise UsageError(f"--plot: {path}: cannot be written ({error.strerror}); give another file.") from None
