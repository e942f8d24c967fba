"""Promise: results show themselves in notebooks, small even when they are large, and give their tables."""

from __future__ import annotations

import re
import sys
from base64 import b64decode
from functools import cache
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree as ET

import nbformat
import pytest
from nbclient import NotebookClient

import penstock
from penstock import Costs, MissingExtraError, Schedule
from penstock.display import Displayed
from penstock.simulation.comparison import compare
from penstock.view.marks import Area
from penstock.view.notebook import MAX_STEPS
from penstock.view.picture import ROW, SummaryScales, summary

COSTS = Costs(forward=1, backward_input=1, backward_weight=1, activation=1)
ONE_F = penstock.build("1f1b", ranks=2, microbatches=4)
ZB = penstock.build("zb-h1", ranks=2, microbatches=4)
DEADLOCK = Schedule.parse("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0", name="<b>mine</b>")

CELLS = {
    "schedule": "import penstock\nschedule = penstock.build('1f1b', ranks=2, microbatches=4)\nschedule",
    "timeline": "timeline = penstock.simulate(schedule)\ntimeline",
    "comparison": "from penstock.simulation.comparison import compare\ncompare(schedule, schedule)",
    "search": "penstock.search(ranks=2, microbatches=2, seconds=0)",
    "validation": "penstock.validate(schedule)",
    "frame": "timeline.to_pandas().groupby('rank')['end'].max()",
    "plan": "penstock.plan(penstock.Costs(forward=(1, 1, 2, 1)), ranks=2, samples=4, seconds=0)",
}


class Tags(HTMLParser):
    """The tags and the text of a piece of HTML; every tag that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "img":
            self.open.append(tag)
        assert tag != "img" or dict(attrs)["alt"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def pictures(html: str) -> list[ET.Element]:
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', html)
    return [ET.fromstring(b64decode(each)) for each in found]  # noqa: S314 -- our own


@pytest.mark.full
def test_a_notebook_shows_each_result() -> None:
    v4: Any = nbformat.v4  # its functions have no types
    notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in CELLS.values()])
    NotebookClient(notebook, kernel_name="python3", timeout=600).execute()
    shown = {name: cell.outputs[-1]["data"] for name, cell in zip(CELLS, notebook.cells)}
    for name in ("schedule", "timeline", "comparison", "search", "plan"):
        assert len(pictures(shown[name]["text/html"])) == 1, name
    assert "valid; no deadlock" in shown["validation"]["text/html"]
    ends = [penstock.simulate(ONE_F).end[first:last].max() for first, last in ((0, 8), (8, 16))]
    assert re.findall(r"^\d +([\d.]+)$", shown["frame"]["text/plain"], re.MULTILINE) == [str(e) for e in ends]


@cache  # not at import: every worker collects this module, and one runs it
def results() -> dict[str, Displayed]:
    return {
        "schedule": ONE_F,
        "lowered": penstock.lower(ONE_F),
        "deadlock": DEADLOCK,
        "timeline": penstock.simulate(ZB, COSTS),
        "comparison": compare(ONE_F, ZB, costs=COSTS),
        "search": penstock.search(ranks=2, microbatches=2, live_limit=2, seconds=0),
        "valid": penstock.validate(ONE_F),
        "violations": penstock.validate(DEADLOCK),
        "plan": penstock.plan(Costs(forward=(1, 1, 2, 1)), ranks=2, samples=4, seconds=0),
    }


@pytest.mark.parametrize(
    "name",
    ["schedule", "lowered", "deadlock", "timeline", "comparison", "search", "valid", "violations", "plan"],
)
def test_html_is_well_formed_and_rows_are_plain_values(name: str) -> None:
    value = results()[name]
    Tags(value._repr_html_())
    rows = value.to_rows()
    assert all(row.keys() == rows[0].keys() for row in rows)
    frame = value.to_pandas()
    assert len(frame) == len(rows)
    assert list(frame.columns) == list(rows[0] if rows else [])


def test_an_invalid_schedule_shows_its_steps_and_what_is_wrong() -> None:
    html = DEADLOCK._repr_html_()
    text = Tags(html).text
    assert not pictures(html)
    assert "error[deadlock]" in text
    assert "rank 0" in text
    assert "<b>" not in penstock.simulate(ONE_F.renamed("<b>mine</b>"))._repr_html_()


@pytest.mark.parametrize(("ranks", "microbatches"), [(16, 80), (200, 400)])
def test_a_large_schedule_is_a_small_summary_that_says_so(ranks: int, microbatches: int) -> None:
    timeline = penstock.simulate(penstock.build("1f1b", ranks=ranks, microbatches=microbatches))
    assert timeline.schedule.num_steps > MAX_STEPS
    html = timeline._repr_html_()
    assert len(html) < 300_000
    assert f"Summary: {timeline.schedule.num_steps:,} steps" in Tags(html).text
    assert len(pictures(html)) == 1


def test_a_schedule_of_the_largest_size_is_drawn_step_by_step() -> None:
    timeline = penstock.simulate(penstock.build("1f1b", ranks=4, microbatches=MAX_STEPS // 8))
    html = timeline._repr_html_()
    assert len(html) < 300_000
    (picture,) = pictures(html)
    boxes = [box for box in picture.iter("{http://www.w3.org/2000/svg}rect") if box.get("x")]
    assert len(boxes) >= MAX_STEPS


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_the_areas_of_a_summary_are_the_busy_seconds(name: str) -> None:
    timeline = penstock.simulate(penstock.build(name, ranks=4, microbatches=50), COSTS)
    scales = SummaryScales((timeline,))
    rows = [group for group in summary([timeline]).groups if group.name.startswith("rank")]
    for group, busy in zip(rows, timeline.busy, strict=True):
        pixels = sum(_enclosed(mark.points) for mark in group.marks if isinstance(mark, Area))
        assert pixels / (scales.width * ROW) * timeline.makespan == pytest.approx(busy, rel=0.01)


def _enclosed(points: list[tuple[float, float]]) -> float:
    """The area of a polygon, by the shoelace formula."""
    return abs(sum(x * to_y - to_x * y for (x, y), (to_x, to_y) in zip(points, points[1:] + points[:1]))) / 2


def test_without_pandas_the_message_names_the_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install pandas; to_rows\(\)"):
        ONE_F.to_pandas()


def test_rows_of_a_timeline_are_its_events() -> None:
    timeline = penstock.simulate(penstock.build("dualpipev", ranks=2, microbatches=4), COSTS)
    rows = timeline.to_rows()
    assert [(r["rank"], r["index"], r["action"], r["start"], r["end"]) for r in rows] == [
        (e.rank, e.index, str(e.step), e.start, e.end) for e in timeline.events
    ]
    assert {"F", "OVERLAP_F_B"} < {row["kind"] for row in rows}


def test_many_compared_schedules_are_a_table() -> None:
    compared = compare(*[ONE_F] * 7)
    assert not pictures(compared._repr_html_())
    assert "no picture of 7 schedules" in compared._repr_html_()
    assert len(compared) == 7
    assert compared[0] == compared[-1]
