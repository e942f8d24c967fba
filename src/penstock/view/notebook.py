"""What notebooks show of each value: HTML with a picture, a table, or both.

A picture is an `<img>` with its SVG inside, so that the styles of several outputs do not mix; it scrolls where
it is wider than the page. Above `MAX_STEPS` steps it is a summary, and says so.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from functools import singledispatch
from html import escape
from typing import Any

import numpy as np
from rich.table import Table

from penstock.display import Displayed
from penstock.errors import PenstockError
from penstock.ir.schedule import Schedule
from penstock.planning.planner import Plan
from penstock.search.request import SearchResult
from penstock.simulation.comparison import Comparisons, rank_costs
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel, Violations, report, validate
from penstock.view.frontier import frontier_picture
from penstock.view.grid import grid
from penstock.view.marks import Picture
from penstock.view.picture import picture, summary
from penstock.view.svg import svg_of
from penstock.view.tables import (
    comparison_notes,
    comparison_table,
    family_table,
    plan_table,
    result_lines,
)

MAX_STEPS = 2000
"""Pictures with more steps than this are summaries."""

_MAX_PANELS = 6
_MAX_OPTIONS = 10
_MAX_CHARACTERS = 20_000  # of a grid or a report


@singledispatch
def notebook_html(value: Displayed) -> str:
    """The HTML of a value; each type has its own function below."""
    raise TypeError(f"no HTML for {type(value).__name__}")


@notebook_html.register
def _(value: Timeline) -> str:
    return _timelines([value])


@notebook_html.register
def _(value: Schedule) -> str:
    """At unit costs; the steps in their order and what is wrong, if it cannot be simulated."""
    if not value.num_steps:
        return _line(repr(value))
    try:
        timeline = simulate(value)
    except PenstockError:
        drawn = _text(str(grid(value, 100)) if value.num_steps <= MAX_STEPS else repr(value))
        return drawn + notebook_html(validate(value))
    return _timelines([timeline]) + _line("at unit costs: F, I and W take 1, B takes 2, messages nothing")


@notebook_html.register
def _(value: Violations) -> str:
    if value:
        count = f"{len(value)} violation{'s' * (len(value) != 1)}"
        return _line(f"invalid: {count}") + _text(report(value.schedule, value))
    models = ", ".join(str(model) for model in SendModel if model <= value.send_model)
    return _line(f"{value.schedule.name}: valid; no deadlock under send models {models}")


@notebook_html.register
def _(value: Comparisons) -> str:
    unit = all(timeline.costs == rank_costs(timeline.schedule) for timeline in value.timelines)
    notes = "".join(map(_line, comparison_notes(value.rows, unit_costs=unit)))
    return _table(comparison_table(value.rows)) + notes + _timelines(value.timelines)


@notebook_html.register
def _(value: SearchResult) -> str:
    lines = [f"{name} {number}: {meaning}" for name, number, meaning in result_lines(value)]
    if value.interrupted:
        lines.append("interrupted: this is the best schedule found so far")
    words = "".join(map(_line, [*lines, f"found by {value.origin}"]))
    return _timelines([value.timeline]) + words + _table(family_table(value))


@notebook_html.register(Plan)
def _(value: Plan[Any, Any, Any]) -> str:
    more = len(value.options) - _MAX_OPTIONS
    rest = _line(f"and {more} more: .to_rows() has all") if more > 0 else ""
    title, picture_of_plan = _line(value.request.title), _image(frontier_picture(value))
    return title + _table(plan_table(value, _MAX_OPTIONS)) + rest + picture_of_plan


# --- pictures, tables and text ----------------------------------------------------------------------


def _timelines(timelines: Sequence[Timeline]) -> str:
    """A picture of each step, or a summary with a statement."""
    if not timelines:
        return ""
    if len(timelines) > _MAX_PANELS:
        return _line(f"no picture of {len(timelines)} schedules: .timelines has each of them")
    steps = sum(int(np.count_nonzero(~timeline.schedule.table.is_point)) for timeline in timelines)
    if steps <= MAX_STEPS:
        return _image(picture(timelines))
    statement = (
        f"Summary: {steps:,} steps are too many to draw each. Each column is a short time; its colours are the "
        "shares of it that the rank computes, what is left to the top is idle. "
        "penstock.view.html.html([timeline]) makes a page with every step."
    )
    return _image(summary(timelines)) + _line(statement)


def _image(drawn: Picture) -> str:
    source = b64encode(svg_of(drawn).encode()).decode()
    size = f'width="{drawn.width}" height="{drawn.height}"'
    image = f'<img src="data:image/svg+xml;base64,{source}" alt="{escape(drawn.title)}" {size}'
    return f'<div style="overflow-x:auto">{image} style="max-width:none"></div>'


def _table(table: Table) -> str:
    sides = ["right" if column.justify == "right" else "left" for column in table.columns]

    def row(tag: str, cells: Iterable[object]) -> str:
        shown = (
            f'<{tag} style="text-align:{side}">{escape(str(cell))}</{tag}>' for side, cell in zip(sides, cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    head = row("th", (column.header for column in table.columns))
    body = "".join(row("td", cells) for cells in zip(*(column.cells for column in table.columns)))
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _line(text: str) -> str:
    return f'<div style="white-space:normal">{escape(text)}</div>'


def _text(text: str) -> str:
    shown = text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "\n..."
    return f'<pre style="line-height:1.2">{escape(shown)}</pre>'
