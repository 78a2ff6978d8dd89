"""A plan as a picture: the kind of file follows from its name."""

from pathlib import Path

from shardkit.errors import UsageError
from shardkit.plan.answer import Answer
from shardkit.plan.page import page
from shardkit.plan.plot import save_png, svg, title


def save(answer: Answer, path: Path) -> None:
    """Write the picture to the file; its suffix says how: .svg, .html or .png."""
    match path.suffix.lower():
        case ".svg":
            path.write_text(svg(answer), encoding="utf-8")
        case ".html":
            path.write_text(page(answer, title(answer)), encoding="utf-8")
        case ".png":
            save_png(answer, path)
        case _:
            raise UsageError(f"--plot: what kind of file? (got {path.name!r}); end it with .svg, .html or .png.")
