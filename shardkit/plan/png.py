"""The plan's chart by matplotlib: the two panels of `plot.svg`."""

from pathlib import Path
from textwrap import wrap
from typing import Any

from shardkit.plan.answer import Answer
from shardkit.plan.plot import (
    COLOURS,
    NAMES,
    bars_maximum,
    fits_mark,
    limit_text,
    maximum,
    peak_text,
    phases,
    subtitle,
    ticks,
    title,
)
from shardkit.plan.rank_memory import CATEGORIES
from shardkit.sizes import in_words

_HATCHES = ["", "--", "||", "//", "\\\\", "++"]
# Part of the width below which a phase has no room for its name.
_NARROW = 0.06


def save_png(answer: Answer, path: Path) -> None:
    """Writes the chart to the file."""
    figure_of(answer).savefig(path, dpi=120)


def figure_of(answer: Answer) -> Any:
    """The chart as a figure of matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.5), layout="constrained")
    over_time, side_by_side = figure.subplots(2, 1)
    figure.suptitle("\n".join(wrap(title(answer), 100)))
    _draw_timeline(answer, over_time)
    _draw_bars(answer, side_by_side)
    return figure


def _draw_timeline(answer: Answer, axes: Any) -> None:
    row, end = answer.chosen_row, maximum(answer)
    _, unit, scale = ticks(end)
    moments = [*row.memory.timeline, row.memory.timeline[-1]]
    series = [[getattr(m.memory, name) / scale for m in moments] for name in CATEGORIES]
    areas = axes.stackplot(range(len(moments)), series, colors=COLOURS, step="post", labels=list(NAMES.values()))
    for area, hatch in zip(areas, _HATCHES, strict=True):
        area.set(hatch=hatch, edgecolor="white", linewidth=0)  # an outline would cover a peak of one moment
    axes.set_title("\n".join(wrap(subtitle(answer), 130)), fontsize="medium")
    axes.set(ylabel=f"{unit} a rank", xlim=(0, len(moments) - 1), ylim=(0, end / scale))
    wide = [(name, (start + stop) / 2) for name, start, stop in phases(answer) if stop - start > _NARROW * len(moments)]
    axes.set_xticks([place for _, place in wide], [name for name, _ in wide])
    at = max(range(len(moments)), key=lambda index: moments[index].memory.total)
    peak = row.memory.peak.total / scale
    axes.plot([at + 0.5], [peak], marker="v", color="black")
    is_left = at < len(moments) / 2
    shift, side = (8, "left") if is_left else (-8, "right")
    _write(axes, peak_text(row), (at + 0.5, peak), (shift, 2), va="bottom", ha=side)
    limit = answer.request.device.memory_bytes
    if limit and limit <= end:
        axes.axhline(limit / scale, color="black", linestyle="--")
        text = limit_text(answer, limit)
        _write(axes, text, (0, limit / scale), (4, 2), va="bottom", ha="left", fontweight="bold")
    axes.figure.legend(loc="outside lower center", ncols=len(CATEGORIES), fontsize="small")


def _draw_bars(answer: Answer, axes: Any) -> None:
    names = [row.label for row in answer.rows]
    _, unit, scale = ticks(bars_maximum(answer))
    most = bars_maximum(answer) / scale
    left = [0.0] * len(names)
    for name, colour, hatch in zip(CATEGORIES, COLOURS, _HATCHES, strict=True):
        sizes = [getattr(row.memory.peak, name) / scale for row in answer.rows]
        sizes = [min(size, most - start) for size, start in zip(sizes, left, strict=True)]
        axes.barh(names, sizes, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    limit = answer.request.device.memory_bytes
    shows_limit = bool(limit and limit <= 1.25 * bars_maximum(answer))
    if limit and shows_limit:
        axes.axvline(limit / scale, color="black", linestyle="--")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * most)  # room for the longest text
    for row, name in zip(answer.rows, names, strict=True):
        end = min(row.memory.peak.total / scale, most)
        cut = " (cut off)" if row.memory.peak.total > bars_maximum(answer) else ""
        _write(axes, f"{in_words(row.memory.peak.total)}{cut}{fits_mark(row)}", (end, name), (6, 0), va="center")
    axes.set(xlabel=f"{unit} a rank; dashed line: {answer.request.device.name}" if shows_limit else f"{unit} a rank")


def _write(axes: Any, text: str, place: tuple[Any, Any], shift: tuple[int, int], **style: Any) -> None:
    """A text beside a place, with a white outline, readable on any background."""
    from matplotlib.patheffects import withStroke

    written = axes.annotate(text, place, xytext=shift, textcoords="offset points", **style)
    written.set_path_effects([withStroke(linewidth=4, foreground="white")])
