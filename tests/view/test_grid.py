"""Tests of the grid of characters."""

from __future__ import annotations

from textwrap import dedent

import pytest
from rich.console import Console

import penstock
from penstock import Placement, Schedule
from penstock.view import grid
from penstock.view.grid import unit_time
from tests.support.grids import small


def lines(schedule: Schedule, width: int = 80) -> list[str]:
    return grid(schedule, width).plain.split("\n")


def drawn(picture: str) -> list[str]:
    return dedent(picture).strip("\n").split("\n")


# --- over time -------------------------------------------------------------------------------------


def test_1f1b_on_two_ranks_with_two_microbatches() -> None:
    assert lines(penstock.build("1f1b", ranks=2, microbatches=2)) == drawn("""
        time    0              5
        rank 0  F0 F1 ·  ·  B0─── ·  B1───
        rank 1  ·  F0 B0─── F1 B1─── ·  ·
    """)


def test_stages_are_named_where_a_rank_has_several() -> None:
    assert lines(Schedule.parse("0F0 3F0 3I0 3W0 0B0 | 1F0 2F0 2I0 1I0 2W0 1W0")) == drawn("""
        time    0                   5
        rank 0  0F0 ·   ·   3F0 3I0 3W0 ·   0B0────
        rank 1  ·   1F0 2F0 ·   ·   2I0 1I0 2W0 1W0
    """)


def test_an_overlapped_pair_is_one_step_as_long_as_both() -> None:
    assert lines(Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")) == drawn("""
        time    0              5
        rank 0  F0 F1+B0─── B1───
    """)


def test_units_of_time_are_one_for_f_i_w_and_two_for_b() -> None:
    schedule = Schedule.parse("0F0 0B0 | 1F0 1I0 1W0")
    assert unit_time(schedule) == ([0, 3, 1, 2, 3], [1, 5, 2, 3, 4])


def test_what_does_not_fit_continues_below_in_panels_that_start_with_their_time() -> None:
    assert lines(penstock.build("1f1b", ranks=2, microbatches=2), width=20) == drawn("""
        time    0
        rank 0  F0 F1 ·  ·
        rank 1  ·  F0 B0───

        time    4  5
        rank 0  B0─── ·  B1─
        rank 1  F1 B1─── ·

        time    8
        rank 0  ──
        rank 1  ·
    """)


# --- list by list ----------------------------------------------------------------------------------

LOWERED = penstock.lower(penstock.build("1f1b", ranks=2, microbatches=1))


def test_a_lowered_schedule_has_one_column_per_rank() -> None:
    assert lines(LOWERED) == drawn("""
        step  rank 0        rank 1
           0  0UNSHARD      1UNSHARD
           1  0F0           1RECV_F0
           2  0SEND_F0      1F0
           3  0RECV_B0      1B0
           4  0B0           1SEND_B0
           5  0REDUCE_GRAD  1REDUCE_GRAD
           6  0RESHARD      1RESHARD
    """)


def test_columns_that_do_not_fit_continue_below() -> None:
    upper, lower = lines(LOWERED, width=20)[:8], lines(LOWERED, width=20)[9:]
    assert upper[:3] == ["step  rank 0", "   0  0UNSHARD", "   1  0F0"]
    assert lower[:3] == ["step  rank 1", "   0  1UNSHARD", "   1  1RECV_F0"]
    assert lines(LOWERED, width=20)[8] == ""


def test_a_rank_with_fewer_steps_leaves_its_column_empty() -> None:
    assert lines(Schedule.parse("0F0 0UNSHARD 0B0 | 1F0")) == drawn("""
        step  rank 0    rank 1
           0  0F0       1F0
           1  0UNSHARD
           2  0B0
    """)


def test_a_compute_schedule_that_deadlocks_is_shown_as_lists() -> None:
    schedule = Schedule.parse("0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0")
    assert unit_time(schedule) is None
    assert lines(schedule) == drawn("""
        step  rank 0  rank 1
           0  0F0     1F1
           1  0B0     1B1
           2  0F1     1F0
           3  0B1     1B0
    """)


# --- promises for every picture --------------------------------------------------------------------


@pytest.mark.parametrize("width", [30, 47, 80, 133])
@pytest.mark.parametrize("family", penstock.families())
@small(lambda width: width in {30, 80})
def test_no_line_is_wider_than_asked_or_ends_in_blanks(family: str, width: int) -> None:
    built = penstock.build(family, ranks=4, microbatches=12)
    for schedule in (built, penstock.lower(built)):
        for line in lines(schedule, width):
            assert len(line) <= width
            assert line == line.rstrip()


@pytest.mark.parametrize("width", [-5, 0, 1, 9])
def test_a_width_that_is_not_possible_gives_one_column_at_a_time(width: int) -> None:
    built = penstock.build("1f1b", ranks=2, microbatches=2)
    assert len(lines(built, width)) == 9 * 4 - 1  # nine units of time, one in each panel
    assert len(lines(LOWERED, width)) == 2 * 9 - 1  # two ranks, one in each panel


@pytest.mark.parametrize("family", [name for name in penstock.families() if name != "po-h"])
def test_every_step_is_in_the_picture_of_its_rank(family: str) -> None:
    schedule = penstock.build(family, ranks=3, microbatches=4)
    several = schedule.num_stages > schedule.num_ranks
    for row, line in zip(schedule.ranks, lines(schedule, 1000)[1:]):
        words = line.replace("─", "").replace("·", "").split()[2:]
        parts = [[str(p) if several else f"{p.kind}{p.microbatch}" for p in step.parts] for step in row]
        assert words == ["+".join(part) for part in parts]


def test_the_picture_is_as_readable_without_colour() -> None:
    picture = grid(penstock.build("zbv", ranks=2, microbatches=2))
    console = Console(width=80, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(picture)
    assert captured.get() == picture.plain + "\n"
    assert picture.spans


def test_ranks_without_any_step_are_still_shown() -> None:
    picture = lines(Schedule([[], []], Placement.loop(2), 1))
    assert any("rank 0" in line for line in picture)
    assert any("rank 1" in line for line in picture)
