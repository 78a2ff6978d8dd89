"""The plan as one HTML page without scripts: a tab per strategy with its chart, the table, and the report."""

from dataclasses import replace
from html import escape

from shardkit.plan.answer import Answer, Row, yes_no
from shardkit.plan.plot import NAMES, svg
from shardkit.plan.rank_memory import CATEGORIES
from shardkit.plan.report import render
from shardkit.sizes import in_words

_STYLE = """
body { font: 14px Helvetica, Arial, sans-serif; margin: 24px; max-width: 1000px }
table { border-collapse: collapse; margin: 16px 0 } td, th { padding: 4px 10px; border-bottom: 1px solid #ccc }
td { text-align: right; white-space: nowrap }
td:first-child, th:first-child { text-align: left } tr:hover, tr.chosen { background: #eef4fa }
input.tab { position: absolute; opacity: 0 } .picture { display: none } svg { max-width: 100%; height: auto }
label.tab { display: inline-block; padding: 6px 12px; border: 1px solid #aaa; cursor: pointer }
input.tab:focus + label.tab { outline: 2px solid #0072B2 } pre { background: #f6f6f6; padding: 12px; overflow: auto }
"""


def page(answer: Answer, title: str) -> str:
    """The whole page."""
    return "\n".join(
        [
            f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>",
            f"<style>{_STYLE}{_shown(answer)}</style></head><body>",
            *_tabs(answer),
            *_table(answer),
            f"<pre>{escape(render(answer))}</pre>",
            "</body></html>\n",
        ]
    )


def _shown(answer: Answer) -> str:
    """CSS rules that show the chart of the selected tab."""
    rules = [
        f"#tab{row.strategy.number}:checked ~ #picture{row.strategy.number} {{ display: block }}\n"
        f"#tab{row.strategy.number}:checked + label {{ background: #0072B2; color: white }}"
        for row in answer.rows
    ]
    return "\n".join(rules)


def _tabs(answer: Answer) -> list[str]:
    parts = []
    for row in answer.rows:
        number = row.strategy.number
        checked = " checked" if row.strategy is answer.chosen else ""
        parts.append(f"<input class='tab' type='radio' name='tab' id='tab{number}'{checked}>")
        parts.append(f"<label class='tab' for='tab{number}'>{row.label}</label>")
    for row in answer.rows:
        picture = _with_own_patterns(svg(replace(answer, chosen=row.strategy)), row.strategy.number)
        parts.append(f"<div class='picture' id='picture{row.strategy.number}'>{picture}</div>")
    return ["<div>", *parts, "</div>"]


def _with_own_patterns(picture: str, number: int) -> str:
    """The chart with names of patterns that no other chart has: of equal ones browsers take the first, and draw nothing
    with it while its tab is hidden."""
    return picture.replace('<pattern id="', f'<pattern id="tab{number}-').replace("url(#", f"url(#tab{number}-")


def _table(answer: Answer) -> list[str]:
    heads = ["strategy", *(NAMES[name] for name in CATEGORIES), "peak", "fits", "sent in a step"]
    return [
        "<table>",
        f"<tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>",
        *(_line(answer, row) for row in answer.rows),
        "</table>",
    ]


def _line(answer: Answer, row: Row) -> str:
    peak = row.memory.peak
    cells = [row.label, *(in_words(getattr(peak, name)) for name in CATEGORIES)]
    cells += [in_words(peak.total), yes_no(row.fits)]
    cells.append(in_words(row.estimate.traffic.sent_bytes))
    mark = " class='chosen'" if row.strategy is answer.chosen else ""
    return f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
