"""Tests of SVG pictures."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import penstock
from penstock import Costs, PenstockError, Placement, Schedule, Timeline
from penstock.view.kinds import kinds_on, style_of
from penstock.view.marks import PALEST, lightness, tint
from penstock.view.picture import LEFT, WIDEST, picture
from penstock.view.svg import svg
from tests.support.timelines import COSTS, timeline

GOLDENS = Path(__file__).parents[1] / "goldens"
COLOURS = [style_of(kind).colour for kind in kinds_on("compute")]
SVG = "{http://www.w3.org/2000/svg}"
BOX = re.compile(r"penstock-([FIWB])(\d+)(-narrow)?")


def uneven() -> Timeline:
    placement = Placement.custom({0: [0, 1, 4], 1: [2, 3]})
    return penstock.simulate(Schedule.parse("0F0 1F0 4F0 4B0 1B0 0B0 | 2F0 3F0 3B0 2B0", placement), COSTS)


def empty() -> Timeline:
    nothing = np.empty(0)
    return Timeline(Schedule([[], []], Placement.loop(2), 1), Costs(), nothing, nothing)


def parsed(*timelines: Timeline) -> ET.Element:
    return ET.fromstring(svg(timelines))  # noqa: S314 -- our own text


def ranks_of(root: ET.Element) -> list[ET.Element]:
    return [group for group in root.findall(f"{SVG}g") if group.findtext(f"{SVG}title", "").startswith("rank ")]


def boxes_of(rank: ET.Element) -> list[tuple[str, int, ET.Element]]:
    """Kind, index of the stage on its rank, element."""
    found = []
    for group in rank.findall(f"{SVG}g"):
        if match := BOX.fullmatch(group.get("class", "")):
            found += [(match[1], int(match[2]), box) for box in group.findall(f"{SVG}rect")]
    return found


def texts(root: ET.Element, style: str) -> list[str]:
    return [
        text.text or ""
        for group in root.iter(f"{SVG}g")
        if re.fullmatch(f"penstock-{style}", group.get("class", ""))
        for text in group.findall(f"{SVG}text")
    ]


def extent(box: ET.Element) -> tuple[float, float, float, float]:
    x, y, width, height = (float(box.get(name, "nan")) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


# --- what is drawn ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("family", penstock.families())
def test_every_part_of_every_compute_step_is_a_box_on_its_rank(family: str, lowered: bool) -> None:  # noqa: FBT001
    schedule = penstock.build(family, ranks=4, microbatches=6)
    shown = penstock.simulate(penstock.lower(schedule) if lowered else schedule, COSTS)
    ranks = ranks_of(parsed(shown))
    assert len(ranks) == 4
    for row, own, rank in zip(schedule.ranks, schedule.placement.stages_of_rank, ranks):
        wanted = Counter(
            (part.kind.value, own.index(part.stage))
            for step in row
            if step.kind.is_compute
            for part in step.parts
        )
        assert Counter((kind, nth) for kind, nth, _ in boxes_of(rank)) == wanted


def test_boxes_are_where_their_times_are() -> None:
    shown = timeline("1f1b")
    for rank, group in enumerate(ranks_of(parsed(shown))):
        found = sorted(extent(box)[:3:2] for _, _, box in boxes_of(group))
        steps = sorted((e.start, e.end) for e in shown.events if e.rank == rank and e.step.kind.is_compute)
        scale = (found[0][1] - found[0][0]) / (steps[0][1] - steps[0][0])
        for (x, to_x), (start, end) in zip(found, steps):
            assert x == pytest.approx(LEFT + start * scale, abs=0.6)
            assert to_x == pytest.approx(LEFT + end * scale, abs=0.6)


def test_boxes_of_a_rank_never_cover_each_other() -> None:
    for shown in (timeline("dualpipev"), timeline("zbv"), uneven()):
        for rank in ranks_of(parsed(shown)):
            boxes = sorted(extent(box) for _, _, box in boxes_of(rank))
            for i, (_, top, right, bottom) in enumerate(boxes):
                for x, y, _, to_y in boxes[i + 1 :]:
                    assert x >= right - 0.011 or y >= bottom or to_y <= top


def test_an_overlapped_pair_is_drawn_as_two_halves() -> None:
    (rank,) = ranks_of(parsed(penstock.simulate(Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1"), COSTS)))
    forward, backward = sorted(
        (kind, extent(box)) for kind, _, box in boxes_of(rank) if box.get("height") == "11"
    )
    (_, (x, y, to_x, to_y)), (_, upper) = forward, backward
    assert (forward[0], backward[0]) == ("B", "F")
    assert (upper[0], upper[2], upper[3]) == (x, to_x, y)
    assert to_y - y == upper[3] - upper[1]


def test_every_box_that_is_wide_enough_has_its_microbatch_in_it() -> None:
    shown = timeline("zbv")
    numbers = texts(parsed(shown), "number(-on-dark)?")
    steps = [
        part for row in shown.schedule.ranks for step in row for part in step.parts if part.kind.is_compute
    ]
    assert Counter(numbers) == Counter(str(part.microbatch) for part in steps)


def test_all_steps_have_numbers_or_none_has() -> None:
    assert texts(parsed(timeline("zbv", 8, 64, costs=Costs())), "number(-on-dark)?") == []
    assert set(texts(parsed(timeline("1f1b", 4, 24)), "number(-on-dark)?")) == set(map(str, range(24)))


def test_the_second_part_of_a_pair_has_a_plus() -> None:
    drawn = parsed(penstock.simulate(Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1"), COSTS))
    assert sorted(texts(drawn, "half(-on-dark)?")) == ["+0", "1"]


def test_the_title_line_says_name_makespan_and_bubble() -> None:
    root = parsed(timeline("1f1b"), timeline("zbv", costs=COSTS.scaled(1e-3)))
    assert texts(root, "name") == ["1f1b", "zbv"]
    first, second = texts(root, "facts")
    assert first == "4 ranks, 8 microbatches, 1 stage per rank  ·  makespan 346 s  ·  bubble 30.6%"
    assert "makespan 0.526 s" in second
    assert root.findtext(f"{SVG}title") == "1f1b, zbv: 4 ranks, 8 microbatches"


@pytest.mark.parametrize(
    ("costs", "unit", "last"),
    [
        (Costs(), "time, units", "15"),
        (COSTS, "time, s", "300"),
        (COSTS.scaled(1e-3), "time, ms", "300"),
        (COSTS.scaled(1e-6), "time, µs", "300"),
        (COSTS.scaled(1e4), "time, s", "3000000"),
    ],
)
def test_the_axis_has_round_ticks_and_a_unit(costs: Costs, unit: str, last: str) -> None:
    root = parsed(timeline("1f1b", ranks=4, microbatches=8 if costs != Costs() else 3, costs=costs))
    assert unit in texts(root, "key")
    assert texts(root, "tick")[0] == "0"
    assert texts(root, "tick")[-1] == last


def test_peaks_of_memory_are_labelled_in_fitting_units() -> None:
    peaks = [*(f"peak {count} activations" for count in (4, 3, 2)), "peak 1 activation"]
    assert texts(parsed(timeline("1f1b")), "peak") == peaks
    costs = Costs(activation=512 * 2**20, parameters=2**30)
    assert texts(parsed(timeline("1f1b", costs=costs)), "peak")[0] == "peak 3 GiB"


def test_without_memory_there_are_no_strips() -> None:
    root = parsed(timeline("1f1b", costs=Costs(activation=0)))
    assert texts(root, "peak") == []
    assert not [key for key in texts(root, "key") if "memory" in key]


def test_the_legend_has_only_what_is_drawn() -> None:
    plain = parsed(penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=2)))
    kinds = ["F: forward", "B: backward"]
    assert texts(plain, "key") == ["time, units", *kinds, "number in a box: microbatch", "memory: activations"]
    keys = texts(parsed(timeline("dualpipev")), "key")
    assert {"overlapped pair", "first to last stage of a rank", "I: input gradient"} <= set(keys)
    assert {style_of(kind).meaning for kind in kinds_on("collective")} <= set(keys)


def test_all_to_all_that_no_compute_hides_is_marked_at_the_end_of_its_step() -> None:
    costs = Costs(forward_all_to_all=1, backward_input_all_to_all=1)
    shown = penstock.simulate(penstock.build("interleaved-overlap", ranks=2, microbatches=4), costs)
    root = parsed(shown)
    assert "exposed all-to-all" in texts(root, "key")
    strips = [box for g in root.iter(f"{SVG}g") if g.get("class") == "penstock-all-to-all" for box in g]
    single = sum(len(event.step.parts) == 1 for event in shown.events)
    assert len(strips) == single + 1  # and the legend's
    hidden = penstock.simulate(shown.schedule)
    assert "exposed all-to-all" not in texts(parsed(hidden), "key")


# --- promises for every picture --------------------------------------------------------------------


@pytest.mark.parametrize("shown", [uneven(), empty(), timeline("gpipe", 1, 1)], ids=["uneven", "empty", "one"])
def test_odd_timelines_have_a_picture(shown: Timeline) -> None:
    assert len(ranks_of(parsed(shown))) == shown.schedule.num_ranks


def test_everything_lies_within_the_picture() -> None:
    for shown in (timeline("dualpipev"), timeline("1f1b", 2, 2), uneven(), empty()):
        root = parsed(shown)
        for box in root.iter(f"{SVG}rect"):
            if box.get("x"):
                x, y, to_x, to_y = extent(box)
                assert 0 <= x <= to_x <= float(root.get("width", "nan"))
                assert 0 <= y <= to_y <= float(root.get("height", "nan"))


@pytest.mark.parametrize(
    "name", ["<script>&\"'</text>]]>", "a\x00b\x1b[31m", "\ud800", "n" * 500, "\ufffe", ""]
)
def test_hostile_names_are_text(name: str) -> None:
    shown = penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=2).renamed(name))
    text = svg([shown])
    root = ET.fromstring(text.encode())  # noqa: S314 -- our own text
    assert not list(root.iter(f"{SVG}script"))
    assert len(texts(root, "name")[0]) < 60
    assert len(ranks_of(root)) == 2


def test_numbers_are_short_and_classes_are_our_own() -> None:
    text = svg([timeline("zbv", costs=Costs(forward=1 / 3, backward_input=0.7, backward_weight=1 / 7))])
    assert not re.search(r"\d\.\d{3}|nan|inf|e-\d", text)
    assert {name.split("-")[0] for name in re.findall(r'class="([^"]+)"', text)} == {"penstock"}
    assert set(re.findall(r'class="([^"]+)"', text)) == set(re.findall(r"^\.(\S+)\{", text, re.MULTILINE))


def test_a_very_large_picture_is_as_wide_as_allowed_and_has_every_box() -> None:
    schedule = penstock.build("interleaved-1f1b", ranks=32, microbatches=256, stages_per_rank=2)
    text = svg([penstock.simulate(penstock.lower(schedule), COSTS)])
    ranks = ranks_of(ET.fromstring(text))  # noqa: S314 -- our own text
    assert [len(boxes_of(rank)) for rank in ranks] == [1024] * 32
    assert picture([penstock.simulate(schedule, COSTS)]).width < WIDEST + 200
    assert len(text) < 2_500_000


def test_no_timelines_have_no_picture() -> None:
    with pytest.raises(PenstockError, match="at least one timeline"):
        svg([])


def test_the_same_timeline_gives_the_same_bytes() -> None:
    assert svg([timeline("zbv")]) == svg([timeline("zbv")])
    golden = GOLDENS / "1f1b_2x2.svg"
    assert svg([timeline("1f1b", 2, 2)]) == golden.read_text(encoding="utf-8")


# --- colours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("white", [0.0, PALEST])
def test_kinds_differ_in_grey(white: float) -> None:
    greys = sorted(lightness(tint(colour, white)) for colour in COLOURS)
    assert min(b - a for a, b in pairwise(greys)) > (3 if white else 9)
    assert [round(lightness(colour)) for colour in COLOURS] == [46, 71, 61, 89, 27]
    assert (lightness("#000000"), round(lightness("#ffffff"), 1)) == (0, 100)


def test_arrows_follow_the_edges_of_a_stage_graph() -> None:
    graph = penstock.StageGraph(4, ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3)))
    built = penstock.build("1f1b", ranks=3, microbatches=2, graph=graph, placement=Placement((0, 1, 1, 2)))
    for schedule in (built, penstock.lower(built)):
        shown = penstock.simulate(schedule, COSTS)
        (group,) = (g for g in picture([shown]).groups if g.name == "edges, microbatch 0")
        shafts = group.marks[::3]  # each arrow is a shaft and the two lines of its head
        assert Counter(mark.style for mark in shafts) == {"edge-activation": 5, "edge-gradient": 5}
        assert "activation of microbatch 0" in svg([shown])
    assert "edge" not in svg([timeline("1f1b")])


def test_boxes_have_numbers_at_8_ranks_and_32_microbatches_and_the_legend_says_whether() -> None:
    for ranks, microbatches, numbered in ((8, 32, True), (32, 256, False)):
        drawn = parsed(penstock.simulate(penstock.build("zbv", ranks=ranks, microbatches=microbatches)))
        words = [element.text or "" for element in drawn.iter(f"{SVG}text")]
        assert ("number in a box: microbatch" in words) == numbered
        assert ("31" in words) == numbered
