"""Promises of timelines on a terminal: whole names, panels, regular steps, shares where there is no room."""

from __future__ import annotations

import re

import pytest

import penstock
from penstock import Costs, Timeline
from penstock.cost.presets import preset
from penstock.view import terminal


def timeline(family: str, ranks: int, microbatches: int, costs: Costs | None = None) -> Timeline:
    return penstock.simulate(penstock.build(family, ranks=ranks, microbatches=microbatches), costs)


def names(text: str, rank: int) -> list[str]:
    rows = [line.split(maxsplit=2)[2] for line in text.splitlines() if line.startswith(f"rank {rank} ")]
    found = re.findall(r"\d*[FIWB]\d+", " ".join(rows))
    return list(dict.fromkeys(found))  # a panel may begin with what ends the one before


@pytest.mark.parametrize("costs", [None, preset("zb-h4096-p8-m24")], ids=["unit", "measured"])
@pytest.mark.parametrize(
    ("family", "microbatches"), [("1f1b", 8), ("1f1b", 24), ("interleaved-1f1b", 8), ("zbv", 12)]
)
def test_every_step_has_its_whole_name_within_80_columns(
    family: str, microbatches: int, costs: Costs | None
) -> None:
    shown = timeline(family, 4, microbatches, costs)
    text = terminal(shown, 80).plain
    assert max(map(len, text.splitlines())) <= 80
    with_stage = shown.schedule.num_stages > shown.schedule.num_ranks
    for rank, row in enumerate(shown.schedule.ranks):
        assert names(text, rank) == [
            str(step) if with_stage else str(step).lstrip("0123456789") for step in row
        ]


def test_equal_steps_are_equally_wide() -> None:
    assert terminal(timeline("1f1b", 2, 3), 60).plain == (
        "time    0                   5                   10\n"
        "rank 0  F0──F1──········B0──────F2──B1──────····B2──────\n"
        "rank 1  ····F0──B0──────F1──B1──────F2──B2──────········"
    )


def test_panels_are_about_equally_long() -> None:
    lines = terminal(timeline("zbv", 4, 8), 80).plain.splitlines()
    widths = [len(line) for line in lines if line.startswith("rank 1")]
    assert len(widths) == 3
    assert min(widths) > 60


def test_the_axis_has_round_times_in_their_unit() -> None:
    first = terminal(timeline("zb-h1", 4, 8, preset("zb-h4096-p8-m24")), 120).plain.splitlines()[0]
    assert first.split() == ["time", *map(str, range(0, 800, 100)), "ms"]


def test_a_very_long_timeline_has_kinds_in_proportion_to_their_time_and_no_names() -> None:
    text = terminal(timeline("1f1b", 16, 512), 80).plain
    row = next(line for line in text.splitlines() if line.startswith("rank 8"))
    assert not re.search(r"\d", row.removeprefix("rank 8"))
    assert row.count("B") == pytest.approx(2 * row.count("F"), abs=2)
    assert "each letter is 22.3 units; every step: penstock show -o FILE.html" in text
    assert len(text.splitlines()) < 24


def test_nothing_at_all_can_be_drawn() -> None:
    empty = penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=1), Costs(0, 0, 0))
    assert terminal(empty, 40).plain.startswith("time    0")
