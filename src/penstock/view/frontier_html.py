"""The plot of a plan as one self-contained HTML page: the picture, and a table of all options.

A point has its option as a tooltip and leads to its row. The page has no script and loads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from penstock.view.frontier import PlottedPlan, frontier_picture, option_points
from penstock.view.svg import svg_of

__all__ = ["frontier_html"]

_STYLE = """
body { font: 14px/1.5 Helvetica, Arial, sans-serif; margin: 2em auto; max-width: 960px; padding: 0 1em; }
h1 { font-size: 1.5em; }
.plot { overflow-x: auto; }
svg { width: 100%; min-width: 520px; height: auto; }
svg a rect { fill: transparent; }
svg a:hover rect, svg a:focus rect { stroke: #d55e00; stroke-width: 2; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 2px 8px; border-bottom: 1px solid #8884; }
th, td { white-space: nowrap; }
th:nth-child(2), td:nth-child(2) { text-align: left; white-space: normal; }
tr.frontier { font-weight: bold; }
tr:target, tr:hover { background: #0072b222; }
@media (prefers-color-scheme: dark) {
  body { background: #1b1b1b; color: #ddd; }
  svg { filter: invert(.894) hue-rotate(180deg); }
}
"""

_COLUMNS = (
    "slower: than plan 1; memory: of the rank with the most; bold: on the Pareto frontier, no plan is both "
    "faster and smaller"
)
_LEGEND = (
    "TP, CP, EP, PP, DP: tensor, context, expert, pipeline and data parallel size; v: stages per rank; "
    "m: microbatches; mbs: samples per microbatch"
)


def frontier_html(plan: PlottedPlan) -> str:
    """The page."""
    title, bound = _text(plan.title), plan.units.time(plan.bound, 4)
    picture = svg_of(frontier_picture(plan, names=False)).rstrip().removesuffix("</svg>")
    head = f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>'
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    lines = [
        head,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
        f'<div class="plot">{picture}',
        *_links(plan),
        "</svg></div>",
        f"<p>time: of a step ({_text(plan.time_name)}), lower bound {bound}; {_COLUMNS}.</p>",
        f"<p>{_LEGEND}</p>",
        "<table>\n<thead><tr><th></th><th>plan</th><th>time</th><th>slower</th><th>memory</th></tr></thead>",
        "<tbody>",
        *_rows(plan),
        "</tbody>\n</table>\n</body>\n</html>",
    ]
    return "\n".join(lines) + "\n"


def _links(plan: PlottedPlan) -> Iterator[str]:
    """A place to hover and click for each point."""
    for place, (option, x, y) in enumerate(option_points(plan), 1):
        facts = f"{place}  {option}: {plan.units.time(option.seconds, 4)}, {plan.units.memory(option.memory)}"
        box = f'x="{x - 6:g}" y="{y - 6:g}" width="12" height="12"'
        yield f'<a href="#plan-{place}"><rect {box}><title>{_text(facts)}</title></rect></a>'


def _rows(plan: PlottedPlan) -> Iterator[str]:
    best = plan.options[0].seconds
    for place, option in enumerate(plan.options, 1):
        slower = f"{option.seconds / best - 1:.1%}" if best else ""
        kind = ' class="frontier"' if option in plan.frontier else ""
        cells = (
            str(place),
            str(option),
            plan.units.time(option.seconds, 4),
            slower,
            plan.units.memory(option.memory),
        )
        yield f'<tr id="plan-{place}"{kind}>' + "".join(f"<td>{_text(each)}</td>" for each in cells) + "</tr>"


def _text(text: str) -> str:
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()
