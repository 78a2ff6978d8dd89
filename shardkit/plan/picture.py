"""Writes the plan as a chart, in the format given by the file name."""

from pathlib import Path

from shardkit.errors import UsageError
from shardkit.plan.answer import Answer
from shardkit.plan.page import page
from shardkit.plan.plot import save_png, svg, title


def save(answer: Answer, path: Path) -> None:
    """Writes the chart; the suffix selects the format: .svg, .html or .png."""
    match path.suffix.lower():
        case ".svg":
            path.write_text(svg(answer), encoding="utf-8")
        case ".html":
            path.write_text(page(answer, title(answer)), encoding="utf-8")
        case ".png":
            save_png(answer, path)
        case _:
            raise UsageError(f"--plot: unknown file type (got {path.name!r}); use .svg, .html or .png.")
