"""Promises of the CSV format: files of torch are read, and every problem is reported with row and column."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock
from penstock import Placement, Schedule, StageGraph
from penstock.errors import FormatError
from penstock.formats import dumps, read, reads
from tests.support.schedule_files import GOLDENS, SMALL, SMALL_CSV, problems_of


def test_a_file_of_torch_with_idle_cells_is_read() -> None:
    schedule = read(GOLDENS / "torch_interleaved-1f1b_2x4.csv")  # written by torch 2.13.0
    assert schedule == penstock.build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2)


def test_csv_has_a_row_per_rank_a_cell_per_step_and_the_line_ends_of_torch() -> None:
    assert dumps(SMALL, "csv") == SMALL_CSV


def test_the_name_comes_from_the_file_name(tmp_path: Path) -> None:
    path = tmp_path / "my.schedule.CSV"
    SMALL.write(str(path))
    assert read(path).name == "my.schedule"


def test_csv_rejects_a_rank_without_steps_which_it_cannot_represent() -> None:
    schedule = Schedule([["0F0", "0B0"], []], Placement((0, 1)), 1)
    with pytest.raises(FormatError, match=r"a rank without steps \(rank 1\); use JSON"):
        dumps(schedule, "csv")


@pytest.mark.parametrize(
    "text",
    [
        SMALL_CSV.replace("\r\n", "\n"),
        SMALL_CSV.replace("\r\n", "\r"),
        SMALL_CSV.rstrip(),
        SMALL_CSV + "\r\n,,\r\n \r\n",
        SMALL_CSV.replace(",", " , "),
        SMALL_CSV.replace(",", ",,"),
        "," + SMALL_CSV.replace("\r\n", ",,,\r\n", 1),
        re.sub(r"(\w+)", r'"\1"', SMALL_CSV),
    ],
    ids=["lf", "cr", "no end", "blank end", "blanks", "idle", "idle ends", "quoted"],
)
def test_line_ends_idle_cells_blanks_and_quotes_do_not_matter(text: str) -> None:
    assert reads(text, "csv") == SMALL


def test_all_problems_are_reported_with_row_and_column() -> None:
    problems = problems_of("0F0,junk,0B0\n,1F,1B0\n\n(3F0;3B0)F\n", "csv")
    assert [problem.split(":")[0] for problem in problems] == [
        "row 1, column 2",
        "row 2, column 2",
        "row 4, column 1",
        "row 3",
    ]
    assert "'1F' is not an action: F needs a microbatch number" in problems[1]
    assert problems[3] == "row 3: a rank needs at least one step"


@pytest.mark.parametrize("blank", ["", ",,", " ", " , "])
def test_a_blank_row_between_others_is_rejected_with_its_number(blank: str) -> None:
    assert problems_of(f"0F0\n{blank}\n1F0\n", "csv") == ["row 2: a rank needs at least one step"]


@pytest.mark.parametrize("text", ["", "\n", "\r\n\r\n", ",,,\n", " \n , \n"], ids=repr)
def test_an_empty_csv_is_rejected(text: str) -> None:
    assert problems_of(text, "csv") == ["no rows: a schedule has one row per rank"]


@pytest.mark.parametrize(
    "row", ['"1F0', '"1F0"x', '1F0,"'], ids=["never closed", "text after it", "opened at the end"]
)
def test_malformed_quotes_are_rejected_with_their_row(row: str) -> None:
    (problem,) = problems_of(f"0F0\n{row}\n", "csv")
    assert "invalid CSV" in problem
    assert "row 2" in problem


@pytest.mark.parametrize(
    "cell", ["0F0;0B0", "0F0\t0B0", "rank 0", "0F0\x00", "0F\u0660", '"0F0\n0B0"', '"a,""b"', "\ud800"]
)
def test_a_cell_that_is_not_an_action_is_rejected_with_its_location(cell: str) -> None:
    (problem,) = problems_of(f"0F0,{cell}\n", "csv")
    assert problem.startswith("row 1, column 2: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("60000F0\n", "names stage 60000, but"),
        ("0F1000000\n", "names microbatch 1000000, but"),
        ("0F0\n0B0\n", "rank 1: no stage"),
        ("0F0" * 100_000, "invalid CSV"),
    ],
)
def test_a_csv_from_which_no_schedule_can_be_inferred_is_rejected(text: str, says: str) -> None:
    (problem,) = problems_of(text, "csv")
    assert says in problem


def test_a_stage_graph_is_the_first_row() -> None:
    graph = StageGraph(3, ((0, 1), (0, 2)))
    schedule = Schedule.parse("0F0 0B0 | 1F0 1B0 2F0 2B0", graph=graph)
    text = dumps(schedule, "csv")
    assert text.splitlines() == ["edges,0>1,0>2", "0F0,0B0", "1F0,1B0,2F0,2B0"]
    assert reads(text, "csv") == schedule
    assert reads(text.replace("0>1,0>2", " 0>1 ,,0>2,"), "csv") == schedule
    apart = Schedule.parse("0F0 | 1F0", graph=StageGraph(2, ()))
    assert reads(dumps(apart, "csv"), "csv") == apart


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ("edges,0>1,1-2", "row 1, column 3: '1-2' is not an edge; write 0>2 for stage 0 that feeds 2"),
        ("edges,0>7", "row 1: edge 0 -> 7: stages are 0 to 2"),
        ("edges,0>1,1>0", "row 1: stages feed each other in a cycle"),
        ("edges,0>1\nedges,0>1", "row 2, column 1: 'edges' is not an action"),
    ],
)
def test_invalid_edges_are_reported_with_their_place(first: str, reason: str) -> None:
    with pytest.raises(FormatError, match=re.escape(reason)):
        reads(f"{first}\n0F0\n1F0,2F0\n", "csv")


def test_edges_alone_are_no_schedule() -> None:
    with pytest.raises(FormatError, match="no rows: a schedule has one row per rank"):
        reads("edges,0>1\n", "csv")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("0F0;0B0\n1F0;1B0\n", "the steps of a row are separated by commas: 0F0,0F1,0B0"),
        ("0F0 0B0\n1F0 1B0\n", "the steps of a row are separated by commas: 0F0,0F1,0B0"),
        (
            "step 0,step 1\n0F0,0B0\n",
            "row 1: remove it: a schedule file has no header, its first row is rank 0",
        ),
        ("F0,B0\nF0,B0\n", "row 1, column 1: 'F0' is not an action"),
    ],
)
def test_the_first_problem_is_that_of_the_whole_file(text: str, hint: str) -> None:
    assert problems_of(text, "csv")[0].startswith(hint)
