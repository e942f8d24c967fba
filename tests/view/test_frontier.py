"""Tests of the plot of memory against time."""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

from penstock import Costs
from penstock.cost.units import Units
from penstock.planning import Model, plan
from penstock.planning.planner import LayerPlan
from penstock.view.frontier import frontier_html, frontier_picture, frontier_text, option_points
from penstock.view.marks import Label
from penstock.view.svg import svg_of
from tests.support.planning_models import decoder


@cache
def planned(limit: float | None = 250) -> LayerPlan:
    return plan(decoder(10, latency=0.1), memory_limit=limit, seconds=0)


def test_the_plot_has_every_option_of_the_frontier_by_its_number() -> None:
    made = planned()
    text = frontier_text(made, 80).plain
    assert max(map(len, text.splitlines())) <= 80
    body = "\n".join(line.split("│", 1)[1] for line in text.splitlines() if "│" in line)
    for place, option in enumerate(made.options, 1):
        if option in made.frontier:
            assert str(place) in body.replace("·", " ").split()
    assert "·" in body
    first = text.splitlines()[1]
    assert first.startswith(f"{max(option.seconds for option in made.options):>7.5g}")


def test_the_fastest_is_at_the_bottom_and_the_smallest_at_the_left() -> None:
    made = planned()
    rows = [line.split("│", 1)[1] for line in frontier_text(made, 80).plain.splitlines() if "│" in line]
    assert "1" in rows[-1].split()
    smallest = str(made.options.index(made.frontier[-1]) + 1)
    assert any(row.startswith(smallest) for row in rows)


def test_numbers_that_would_touch_give_way_to_the_better_one() -> None:
    places = [SimpleNamespace(seconds=1.0, memory=0.5 if i == 11 else i / 3e3) for i in range(12)]
    made: Any = SimpleNamespace(options=places, frontier=places, units=Units())
    bottom = frontier_text(made, 80).plain.splitlines()[-3]
    assert bottom.split("│")[1].split() == ["1", "12"]


def test_one_option_alone_can_be_drawn() -> None:
    made = plan(decoder(1), ranks=1, samples=1, seconds=0)
    assert len(made.options) == 1
    assert "1" in frontier_text(made, 40).plain
    ET.fromstring(svg_of(frontier_picture(made)))  # noqa: S314 -- our own text


def test_the_picture_names_the_frontier_the_limit_and_the_bound() -> None:
    made = planned()
    drawn = svg_of(frontier_picture(made))
    assert drawn == svg_of(frontier_picture(made))
    root = ET.fromstring(drawn)  # noqa: S314 -- our own text
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for option in made.frontier:
        assert any(str(option) in text for text in texts)
    assert "memory limit" in texts
    assert "lower bound" in texts
    assert "memory limit" not in [
        element.text
        for element in ET.fromstring(svg_of(frontier_picture(planned(None)))).iter()  # noqa: S314
    ]


def test_numbers_of_the_picture_cover_neither_points_nor_each_other() -> None:
    crowded = [SimpleNamespace(seconds=1 + i / 100, memory=1 - i / 100) for i in range(12)]
    options = [*crowded, SimpleNamespace(seconds=9.0, memory=2.0)]
    asked = SimpleNamespace(title="", time_name="", memory_limit=None)
    made: Any = SimpleNamespace(options=options, frontier=crowded, units=Units(), request=asked, bound=0.5)
    marks = next(group for group in frontier_picture(made, names=False).groups if group.name == "options").marks
    numbers = [mark for mark in marks if isinstance(mark, Label)]
    assert numbers[0].text == "1"
    assert 1 < len(numbers) < 12
    for one, other in combinations(numbers, 2):
        assert abs(one.x - other.x) > 5 or abs(one.y - other.y) >= 8
    for one, (_, x, y) in product(numbers, option_points(made)[:12]):
        assert abs(one.x - x) > 6 or abs(one.y - 3.5 - y) >= 8


def test_the_page_has_one_title_and_explains_its_columns() -> None:
    page = frontier_html(planned())
    assert (
        page.count(f">{planned().request.title}<") == 3
    )  # of the page, its heading, the tooltip of the picture
    for name in ("slower: than plan 1", "Pareto frontier", "data parallel size"):
        assert name in page


def test_relative_costs_are_drawn_in_units_and_activations() -> None:
    stages = Costs(forward=(1, 1, 1, 2), time_unit="units", memory_unit="activations")
    made = plan(Model.of_stages(stages), ranks=2, samples=4, seconds=0)
    drawn = frontier_text(made, 80).plain + svg_of(frontier_picture(made)) + frontier_html(made)
    assert "time, units" in frontier_text(made, 80).plain
    assert "time per step in units" in drawn
    assert "peak memory of any rank in activations" in drawn
    assert f"<td>{made.best.seconds:g} units</td>" in drawn
    for real in (r"\d s\b", r"\d m?s,", r"\d (B|KiB)\b"):
        assert not re.search(real, drawn)
