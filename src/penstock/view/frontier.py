"""The options of a plan by memory and time, as a plot and as an HTML page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from math import floor
from typing import Any, TypeAlias

from rich.text import Text

from penstock.cost.units import Scale
from penstock.ir.kinds import Kind
from penstock.planning import Option, Plan
from penstock.view.kinds import style_of
from penstock.view.marks import (
    GREY,
    PALE,
    Box,
    Group,
    Label,
    Line,
    Mark,
    Picture,
    Style,
    round_step,
    styles,
    text_width,
)
from penstock.view.svg import svg_of

# Pareto-optimal options have their number in the ranking.
#
# time, s
#  13.27 │1                  ·
#  13.02 │          ·
#  12.75 │                          2        3
#        └────────────────────────────────────
#         35 GiB                         41 GiB


AnyPlan: TypeAlias = Plan[Any, Any, Any]

_ROWS = 11

# --- terminal --------------------------------------------------------------------------------------


def frontier_text(plan: AnyPlan, width: int = 80) -> Text:
    """A plot `width` characters wide; numbers are places in the ranking, dots are dominated options."""
    seconds, memory = ([getattr(option, name) for option in plan.options] for name in ("seconds", "memory"))
    low, high, left, right = min(seconds), max(seconds), min(memory), max(memory)
    scale = plan.units.time_scale(high)
    labels = [scale.number(high - row * (high - low) / (_ROWS - 1)) for row in range(_ROWS)]
    title = f"time, {scale.name}"
    margin = max(map(len, (title, *labels))) + 1
    columns = min(max(width - margin - 2, 20), 70)
    canvas: list[list[str]] = [[" "] * columns for _ in range(_ROWS)]
    for place, option in reversed(list(enumerate(plan.options, 1))):
        row = round((high - option.seconds) / (high - low) * (_ROWS - 1)) if high > low else _ROWS - 1
        sign = str(place) if option in plan.frontier else "·"
        column = round((option.memory - left) / (right - left) * (columns - 1)) if right > left else 0
        _put(canvas[row], min(column, columns - len(sign)), sign)
    lines = [Text(title.rjust(margin - 1))]
    for row, letters in enumerate(canvas):
        label = labels[row] if row % 5 == 0 else ""
        text = Text(f"{label:>{margin - 1}} │")
        text.append("".join(letters).rstrip(), style="bold")
        lines.append(text)
    ends = (plan.units.memory(left), plan.units.memory(right) if right > left else "")
    lines.append(Text(" " * margin + "└" + "─" * columns))
    lines.append(Text(" " * (margin + 1) + f"{ends[0]}{ends[1]:>{columns - len(ends[0])}}".rstrip()))
    return Text("\n").join(lines)


def _put(row: list[str], start: int, sign: str) -> None:
    """Write a sign; worse options that it touches become dots, because digits side by side are one number."""
    end = start + len(sign)
    touched = [
        each for each in re.finditer(r"\d+", "".join(row)) if each.start() <= end and each.end() >= start
    ]
    if sign == "·" and any(each.start() <= start < each.end() for each in touched):
        return
    for each in touched if sign != "·" else ():
        row[each.start() : each.end()] = "·".ljust(each.end() - each.start())
    row[start:end] = sign


# --- picture ---------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 940, 400
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 50, 640, 340
_MAX_NAMES = 16
_BLUE = style_of(Kind.F).colour


def frontier_picture(plan: AnyPlan, *, names: bool = True) -> Picture:
    """The same plot as marks, with the memory limit and the lower bound where they are in range.

    `names`: with a title, and with the options behind the numbers to the right of the plot.
    """
    own = {
        "point": Style(_BLUE),
        "dominated": Style(PALE, GREY, 0.5),
        "staircase": Style(stroke=_BLUE, stroke_width=1),
        "limit": Style(stroke="#d55e00", stroke_width=1),
        "seconds": Style(GREY, size=10, anchor="end"),
        "note": Style(GREY, size=10),
    }
    title, plot = plan.request.title, _Plot(plan)
    named = list(_names(plan)) if names else []
    room = max((text_width(label.text, 10) for label in named), default=0.0)
    width = max(_WIDTH, _RIGHT + 32 + room) if named else _RIGHT + 16
    groups = [
        Group("title", [Label("name", _LEFT, 24, title)] if names else []),
        Group("axes", list(plot.axes())),
        Group("frontier", list(plot.staircase())),
        Group("options", list(plot.points())),
        Group("names", [*named]),
    ]
    return Picture(title, round(width), _HEIGHT, {**styles(1), **own}, groups)


def option_points(plan: AnyPlan) -> list[tuple[Option, float, float]]:
    """Every option with its coordinates in the picture."""
    plot = _Plot(plan)
    return [(option, *plot.at(option)) for option in plan.options]


class _Plot:
    """Maps memory and time to coordinates."""

    def __init__(self, plan: AnyPlan) -> None:
        self.plan, limit = plan, plan.request.memory_limit
        memory = [option.memory for option in plan.options]
        self.limit = limit if limit is not None and limit < 1.25 * max(memory) else None
        self.left, self.right = _widened([*memory, *([] if self.limit is None else [self.limit])])
        self.low, self.high = _widened([plan.bound, *(option.seconds for option in plan.options)])

    def x(self, memory: float) -> float:
        return _LEFT + (memory - self.left) / (self.right - self.left) * (_RIGHT - _LEFT)

    def y(self, seconds: float) -> float:
        return _BOTTOM - (seconds - self.low) / (self.high - self.low) * (_BOTTOM - _TOP)

    def axes(self) -> Iterator[Mark]:
        units = self.plan.units
        times, sizes = units.time_scale(self.high), units.memory_scale(self.right)
        for seconds in _ticks(self.low, self.high, times):
            yield Line("grid", _LEFT, self.y(seconds), _RIGHT, self.y(seconds))
            yield Label("seconds", _LEFT - 6, self.y(seconds) + 3, times.number(seconds))
        for memory in _ticks(self.left, self.right, sizes):
            yield Line("axis", self.x(memory), _BOTTOM, self.x(memory), _BOTTOM + 4)
            yield Label("tick", self.x(memory), _BOTTOM + 16, sizes.number(memory))
        yield Line("axis", _LEFT, _BOTTOM, _RIGHT, _BOTTOM)
        yield Line("axis", _LEFT, _TOP, _LEFT, _BOTTOM)
        yield Label("key", _LEFT, _TOP - 8, f"time per step in {times.name} ({self.plan.request.time_name})")
        yield Label("key", _LEFT, _BOTTOM + 34, f"peak memory of any rank in {sizes.name}")
        yield Line("at-peak", _LEFT, self.y(self.plan.bound), _RIGHT, self.y(self.plan.bound))
        yield Label("note", _LEFT + 4, self.y(self.plan.bound) - 4, "lower bound")
        if self.limit is not None:
            yield Line("limit", self.x(self.limit), _TOP, self.x(self.limit), _BOTTOM)
            yield Label("seconds", self.x(self.limit) - 4, _TOP + 8, "memory limit")

    def staircase(self) -> Iterator[Mark]:
        """The Pareto frontier as a staircase."""
        for (x, y), (to_x, to_y) in pairwise(map(self.at, self.plan.frontier)):
            yield Line("staircase", x, y, x, to_y)
            yield Line("staircase", x, to_y, to_x, to_y)

    def points(self) -> Iterator[Mark]:
        front = self.plan.frontier
        for option in (each for each in self.plan.options if each not in front):
            x, y = self.at(option)
            yield Box("dominated", x - 3, y - 3, 6, 6)
        for option in front:
            x, y = self.at(option)
            yield Box("point", x - 4, y - 4, 8, 8)
        yield from self._numbers()

    def _numbers(self) -> Iterator[Label]:
        """Places of the frontier in the ranking, best first, each where it covers no point and no number."""
        points = [self.at(option) for option in self.plan.frontier]
        taken = [(x, y, 4.0) for x, y in points]
        for option, (x, y) in zip(self.plan.frontier, points):
            place = str(self.plan.options.index(option) + 1)
            half = text_width(place, 10) / 2
            for to_x, to_y in ((x - 5 - half, y + 9), (x + 5 + half, y - 9), (x, y + 12), (x, y - 12)):
                if not any(abs(to_x - a) < half + b + 1 and abs(to_y - c) < 8 for a, c, b in taken):
                    taken.append((to_x, to_y, half))
                    yield Label("number", round(to_x, 2), round(to_y + 3.5, 2), place)
                    break

    def at(self, option: Option) -> tuple[float, float]:
        """Coordinates of an option."""
        return round(self.x(option.memory), 2), round(self.y(option.seconds), 2)


def _facts(plan: AnyPlan, place: int, option: Option) -> str:
    return f"{place}  {option}: {plan.units.time(option.seconds, 4)}, {plan.units.memory(option.memory)}"


def _names(plan: AnyPlan) -> Iterator[Label]:
    """The options behind the numbers."""
    for line, option in enumerate(plan.frontier[:_MAX_NAMES]):
        facts = _facts(plan, plan.options.index(option) + 1, option)
        yield Label("key", _RIGHT + 16, _TOP + 8 + 17 * line, facts)
    if len(plan.frontier) > _MAX_NAMES:
        rest = f"and {len(plan.frontier) - _MAX_NAMES} more"
        yield Label("note", _RIGHT + 16, _TOP + 8 + 17 * _MAX_NAMES, rest)


def _widened(values: list[float]) -> tuple[float, float]:
    """Their range with a margin, so that no point lies on an axis."""
    low, high = min(values), max(values)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _ticks(low: float, high: float, scale: Scale) -> list[float]:
    """About five round multiples of the unit."""
    step = round_step((high - low) / scale.size / 6) * scale.size
    first = floor(low / step) + 1
    return [n * step for n in range(first, floor(high / step) + 1)]


# The plot of a plan as one self-contained HTML page: the picture, and a table of all options.
#
# A point has its option as a tooltip and leads to its row. The page has no script and loads nothing.


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


def frontier_html(plan: AnyPlan) -> str:
    """The page."""
    title, bound = _text(plan.request.title), plan.units.time(plan.bound, 4)
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
        f"<p>time: of a step ({_text(plan.request.time_name)}), lower bound {bound}; {_COLUMNS}.</p>",
        f"<p>{_LEGEND}</p>",
        "<table>\n<thead><tr><th></th><th>plan</th><th>time</th><th>slower</th><th>memory</th></tr></thead>",
        "<tbody>",
        *_rows(plan),
        "</tbody>\n</table>\n</body>\n</html>",
    ]
    return "\n".join(lines) + "\n"


def _links(plan: AnyPlan) -> Iterator[str]:
    """A place to hover and click for each point."""
    for place, (option, x, y) in enumerate(option_points(plan), 1):
        facts = _facts(plan, place, option)
        box = f'x="{x - 6:g}" y="{y - 6:g}" width="12" height="12"'
        yield f'<a href="#plan-{place}"><rect {box}><title>{_text(facts)}</title></rect></a>'


def _rows(plan: AnyPlan) -> Iterator[str]:
    best = plan.options[0].seconds
    for place, option in enumerate(plan.options, 1):
        slower = f"{option.seconds / best - 1:.1%}" if best else ""
        kind = ' class="frontier"' if option in plan.frontier else ""
        time, memory = plan.units.time(option.seconds, 4), plan.units.memory(option.memory)
        cells = (str(place), str(option), time, slower, memory)
        yield f'<tr id="plan-{place}"{kind}>' + "".join(f"<td>{_text(each)}</td>" for each in cells) + "</tr>"


def _text(text: str) -> str:
    return escape(text).encode("ascii", "xmlcharrefreplace").decode()
