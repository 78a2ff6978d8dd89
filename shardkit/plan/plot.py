"""The chart: memory over one step by category with its peak, and the peaks of all strategies; the limit in both.

SVG is written here, without any package; HTML has it inside; PNG is drawn with matplotlib. Every category has a
pattern of its own, and its name, so that the picture reads without colour.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shardkit.plan.answer import Answer, Row
from shardkit.plan.rank_memory import CATEGORIES
from shardkit.sizes import UNITS, in_words

NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "gathered": "gathered parameters",
    "reduction": "gradients in reduction",
    "activations": "activations",
}
# Colours of Okabe and Ito (https://jfly.uni-koeln.de/color), distinguishable for the colour-blind; the pattern of each
# distinguishes them in print.
COLOURS = ["#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"]
_PATTERNS = [
    "",
    "M0 4H8",
    "M4 0V8",
    "M0 8L8 0",
    "M0 0L8 8",
    "M0 4H8M4 0V8",
]

_WIDTH, _LEFT, _RIGHT, _TOP = 960, 170, 30, 96
_TIMELINE_HEIGHT = 250
_BAR_HEIGHT, _BAR_GAP = 26, 12


@dataclass(frozen=True)
class Axis:
    """A linear scale: bytes to pixels."""

    start: float
    length: float
    maximum: float

    def at(self, value: float) -> float:
        return self.start + self.length * value / self.maximum


def svg(answer: Answer) -> str:
    """The chart as one SVG element."""
    bars_height = len(answer.rows) * (_BAR_HEIGHT + _BAR_GAP) + 96
    height = _TOP + _TIMELINE_HEIGHT + 60 + bars_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="13" role="img" '
        f'aria-label="{escape(title(answer), quote=True)}">',
        _definitions(),
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(20, 28, title(answer), size=17, weight="bold"),
        _text(20, 48, subtitle(answer)),
        *_legend(),
        *_timeline(answer, _TOP, _TIMELINE_HEIGHT),
        *_bars(answer, _TOP + _TIMELINE_HEIGHT + 84),
        "</svg>",
    ]
    return "\n".join(parts)


def title(answer: Answer) -> str:
    request = answer.request
    return f"{request.description.name} on {request.world_size:,} x {request.device.name}"


def subtitle(answer: Answer) -> str:
    row = answer.chosen_row
    how = "simulated" if row.simulated else "closed form"
    text = f"Memory of one rank over one step, {row.strategy.value} ({how}); below, the peak of every strategy"
    return text if row.memory.activations_known else text + "; not all activations counted"


def _definitions() -> str:
    patterns = [
        f'<pattern id="{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" fill="{colour}"/>'
        + (f'<path d="{path}" stroke="white" stroke-width="1.4"/>' if path else "")
        + "</pattern>"
        for name, colour, path in zip(CATEGORIES, COLOURS, _PATTERNS, strict=True)
    ]
    return f"<defs>{''.join(patterns)}</defs>"


def _text(x: float, y: float, text: str, size: int = 13, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def _legend() -> list[str]:
    parts, x = [], 20.0
    for name in CATEGORIES:
        parts.append(f'<rect x="{x:.1f}" y="62" width="16" height="16" fill="url(#{name})" stroke="black"/>')
        parts.append(_text(x + 22, 75, NAMES[name]))
        x += 40 + 7.2 * len(NAMES[name])
    return parts


def maximum(answer: Answer) -> float:
    """The timeline's maximum: its peak, or the device's limit if that is not far above."""
    peak = answer.chosen_row.memory.peak.total
    limit = answer.request.device.memory_bytes or 0
    return 1.12 * max(peak, limit if limit < 4 * peak else 0, 1)


def bars_maximum(answer: Answer) -> float:
    """The bars' end: the largest peak, but never so far that the limit and the chosen strategy become too small.

    Longer bars are cut off there, with a mark.
    """
    largest = max(row.memory.peak.total for row in answer.rows)
    matters = max(answer.chosen_row.memory.peak.total, answer.request.device.memory_bytes or 0)
    return float(max(1, min(largest, 3 * matters)))


def _timeline(answer: Answer, top: float, height: float) -> list[str]:
    row = answer.chosen_row
    moments = row.memory.timeline
    vertical = Axis(top + height, -height, maximum(answer))
    step = (_WIDTH - _LEFT - _RIGHT) / len(moments)
    parts = _ruler(vertical, top)
    base = [0.0] * len(moments)
    for name in CATEGORIES:
        above = [low + getattr(m.memory, name) for low, m in zip(base, moments, strict=True)]
        if above != base:
            parts.append(_area(base, above, step, vertical, name))
        base = above
    parts += _phases(answer, step, top + height)
    parts += _limit_across(answer, vertical)
    peak = max(range(len(moments)), key=lambda index: moments[index].memory.total)
    return parts + _peak_mark(row, peak, step, vertical)


def _area(low: Sequence[float], high: Sequence[float], step: float, vertical: Axis, name: str) -> str:
    """The area of one category over time, as a step function."""

    def corners(values: Sequence[float]) -> list[tuple[float, float]]:
        edges = []
        for index, value in enumerate(values):
            y = vertical.at(value)
            edges += [(_LEFT + index * step, y), (_LEFT + (index + 1) * step, y)]
        return edges

    outline = corners(high) + corners(low)[::-1]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
    most = max(top - bottom for bottom, top in zip(low, high, strict=True))
    hover = f"<title>{NAMES[name]}: up to {in_words(int(most))}</title>"
    return f'<polygon points="{points}" fill="url(#{name})" stroke="black" stroke-width="0.5">{hover}</polygon>'


def _ruler(vertical: Axis, top: float) -> list[str]:
    """Ticks and their numbers on the left."""
    tick, unit, scale = ticks(vertical.maximum)
    parts = [_text(20, top + 10, f"{unit} a rank")]
    value = 0.0
    while value <= vertical.maximum:
        y = vertical.at(value)
        parts.append(f'<line x1="{_LEFT - 5}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 10, y + 4, f"{value / scale:,.4g}", anchor="end"))
        value += tick
    return parts


def ticks(maximum: float) -> tuple[float, str, int]:
    """Distance of ticks in bytes (about five of them, 1, 2 or 5 times a power of ten), unit, and the unit's bytes."""
    unit, scale = next(((unit, size) for unit, size in UNITS if maximum >= size), UNITS[-1])
    raw = maximum / scale / 5
    power = 10.0 ** len(str(int(raw))) / 10 if raw >= 1 else 0.1
    factor = next(f for f in (1, 2, 5, 10, 20, 50, 100) if f * power >= raw)
    return factor * power * scale, unit, scale


def phases(answer: Answer) -> list[tuple[str, int, int]]:
    """(name, start, end) of the phases of the chosen row's timeline, as indices of its moments."""
    moments = answer.chosen_row.memory.timeline
    starts = [i for i in range(len(moments)) if i == 0 or moments[i].phase != moments[i - 1].phase]
    return [(moments[i].phase, i, end) for i, end in zip(starts, [*starts[1:], len(moments)], strict=True)]


def _phases(answer: Answer, step: float, bottom: float) -> list[str]:
    """Names of the phases below the timeline, each in the middle of its moments."""
    parts: list[str] = []
    for name, start, end in phases(answer):
        left, right = _LEFT + start * step, _LEFT + end * step
        if right - left > 7 * len(name):
            parts.append(_text((left + right) / 2, bottom + 18, name, anchor="middle"))
        parts.append(
            f'<line x1="{right:.1f}" x2="{right:.1f}" y1="{bottom:.1f}" y2="{bottom + 6:.1f}" stroke="black"/>'
        )
    return parts


def limit_text(answer: Answer, limit: int) -> str:
    """What stands at the line of the device's memory."""
    return f"{answer.request.device.name}: {in_words(limit)}"


def peak_text(row: Row) -> str:
    """What stands at the peak over time."""
    return f"peak {in_words(row.memory.peak.total)}, {row.memory.moment}"


def _limit_across(answer: Answer, vertical: Axis) -> list[str]:
    limit = answer.request.device.memory_bytes
    if not limit or limit > vertical.maximum:
        return []
    y = vertical.at(limit)
    return [
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="black" stroke-width="2" '
        'stroke-dasharray="9 5"/>',
        _over(_text(_LEFT + 8, y - 6, limit_text(answer, limit), weight="bold")),
    ]


def _peak_mark(row: Row, index: int, step: float, vertical: Axis) -> list[str]:
    x, y = _LEFT + (index + 0.5) * step, vertical.at(row.memory.peak.total)
    anchor = "start" if x < _WIDTH / 2 else "end"
    return [
        f'<path d="M{x:.1f} {y:.1f}l-6 -11h12z" fill="black"/>',
        _over(_text(x + (10 if anchor == "start" else -10), y - 12, peak_text(row), anchor=anchor, weight="bold")),
    ]


def _over(text: str) -> str:
    """A text with a white outline, readable on any background. Drawn twice, because some programs do not support
    `paint-order`."""
    return f'<g aria-hidden="true" stroke="white" stroke-width="5">{text}</g>{text}'


def _bars(answer: Answer, top: float) -> list[str]:
    horizontal = Axis(_LEFT, _WIDTH - _LEFT - _RIGHT - 150, bars_maximum(answer))
    parts: list[str] = []
    for index, row in enumerate(answer.rows):
        parts += _bar(row, horizontal, top + index * (_BAR_HEIGHT + _BAR_GAP))
    bottom = top + len(answer.rows) * (_BAR_HEIGHT + _BAR_GAP)
    limit = answer.request.device.memory_bytes
    if limit and limit <= horizontal.maximum:
        x = horizontal.at(limit)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 8:.1f}" y2="{bottom:.1f}" stroke="black" stroke-width="2" '
            'stroke-dasharray="9 5"/>'
        )
        anchor = "middle" if x > _LEFT + 80 else "start"
        parts.append(_text(x, bottom + 16, limit_text(answer, limit), anchor=anchor, weight="bold"))
    for index, row in enumerate(answer.rows):
        parts += _bar_labels(answer, row, horizontal, top + index * (_BAR_HEIGHT + _BAR_GAP))
    return parts


def _bar(row: Row, horizontal: Axis, y: float) -> list[str]:
    parts, done = [], 0
    for name in CATEGORIES:
        size = getattr(row.memory.peak, name)
        x, end = (horizontal.at(min(at, horizontal.maximum)) for at in (done, done + size))
        if end > x:
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{end - x:.1f}" height="{_BAR_HEIGHT}" '
                f'fill="url(#{name})" stroke="black" stroke-width="0.5">'
                f"<title>{NAMES[name]}: {in_words(size)}</title></rect>"
            )
        done += size
    end = horizontal.at(min(done, horizontal.maximum))
    if done > horizontal.maximum:
        parts.append(_cut_mark(end, y))
    return parts


def fits_mark(row: Row) -> str:
    """What stands behind the peak."""
    return "" if row.fits is None else ", fits" if row.fits else ", too big"


def _bar_labels(answer: Answer, row: Row, horizontal: Axis, y: float) -> list[str]:
    """The strategy's name on the left of its bar, the peak on the right, over everything else."""
    peak = row.memory.peak.total
    weight = "bold" if row.strategy is answer.chosen else "normal"
    middle = y + _BAR_HEIGHT / 2 + 5
    end = horizontal.at(min(peak, horizontal.maximum))
    return [
        _text(_LEFT - 8, middle, row.label, size=11, anchor="end", weight=weight),
        _over(_text(end + 8, middle, f"{in_words(peak)}{fits_mark(row)}", weight=weight)),
    ]


def _cut_mark(x: float, y: float) -> str:
    """Two slanted white lines near the end of a bar that is longer than drawn."""
    strokes = "".join(f"M{x - back:.1f} {y + _BAR_HEIGHT + 3:.1f}l8 {-_BAR_HEIGHT - 6}" for back in (26, 16))
    return f'<path d="{strokes}" stroke="white" stroke-width="5"/>'
