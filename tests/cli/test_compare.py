"""Tests of `penstock compare`."""

from __future__ import annotations

from pathlib import Path

import penstock
from tests.support.command_line import Run


def test_it_prints_a_row_for_each_schedule_and_count(run: Run, tmp_path: Path) -> None:
    penstock.build("zb-h1", ranks=2, microbatches=3).write(tmp_path / "mine.json")
    rows = run("compare", "1f1b", "mine.json", "-p", 2, "-m", 2, "-m", 4, "--json").json
    assert [(row["name"], row["microbatches"], row["makespan"]) for row in rows] == [
        ("1f1b", 2, 9),
        ("1f1b", 4, 15),
        ("zb-h1", 3, 10),
    ]
    table = run("compare", "1f1b", "zb-h1", "-p", 2, "-m", 2).out.splitlines()
    head = " ".join(table[0].split())
    assert head == "schedule p v m makespan span period bubble memory bound gap"
    assert table[1].split()[:5] == ["1f1b", "2", "1", "2", "9"]


def test_without_names_it_compares_all_families(run: Run) -> None:
    rows = run("compare", "-p", 2, "-m", 4, "-v", 3, "--json").json
    assert {row["name"] for row in rows} == set(penstock.families()) - {"forward-only"}
    assert {row["name"]: row["stages"] for row in rows}["interleaved-1f1b"] == 6
    rows = run("compare", "Interleaved1F1B", "1F1B", "-p", 2, "-m", 4, "-v", 3, "--json").json
    assert [row["stages"] for row in rows] == [6, 2]


def test_sizes_are_rejected_if_all_schedules_are_files(run: Run, tmp_path: Path) -> None:
    penstock.build("1f1b", ranks=2, microbatches=2).write(tmp_path / "a.csv")
    result = run("compare", "a.csv", "-p", 4)
    assert (result.code, result.out) == (2, "")
    assert "files have their own sizes" in result.message


def test_it_draws_all_schedules_on_one_axis(run: Run, tmp_path: Path) -> None:
    assert run("compare", "1f1b", "zb-h1", "-p", 2, "-m", 2, "-o", "both.html").code == 0
    page = (tmp_path / "both.html").read_text()
    assert '"name":"1f1b"' in page
    assert '"name":"zb-h1"' in page
    result = run("compare", "1f1b", "-p", 2, "-m", 2, "-o", "both.txt")
    assert (result.code, result.out) == (2, "")


def test_families_need_sizes(run: Run) -> None:
    result = run("compare", "1f1b")
    assert result.code == 2
    assert "1f1b needs --ranks and --microbatches" in result.message


def test_groups_are_compared_side_by_side_in_the_families_that_have_them(run: Run, tmp_path: Path) -> None:
    sizes = ("-p", 2, "-m", 4, "--group", 2, "--group", 4)
    rows = run("compare", "interleaved-1f1b", "1f1b", *sizes, "--json").json
    assert [(row["name"], row["peak_memory"]) for row in rows] == [
        ("interleaved-1f1b", 2.5),
        ("interleaved-1f1b group=4", 3.5),
        ("1f1b", 2),
    ]
    penstock.build("1f1b", ranks=2, microbatches=2).write(tmp_path / "a.csv")
    assert "files have their own sizes; remove --group" in run("compare", "a.csv", "--group", 2).message
    assert "1f1b has no --group (given 2)" in run("compare", "1f1b", *sizes).message


def test_without_costs_all_rows_do_the_same_work(run: Run) -> None:
    rows = run("compare", "1f1b", "zbv", "interleaved-1f1b", "-p", 4, "-m", 8, "-v", 2, "--json").json
    assert [row["work"] for row in rows] == [96] * 3
    assert [(row["makespan"], row["peak_memory"]) for row in rows] == [(33, 4), (25.5, 4), (28.5, 5.5)]
    assert {(row["time_unit"], row["memory_unit"]) for row in rows} == {("units", "activations")}
    printed = run("compare", "1f1b", "zbv", "-p", 4, "-m", 8).out
    assert "F, I and W of a rank take 1, B 2; its v stages share that, so all rows do the same work" in printed


def test_with_costs_rows_that_do_more_work_are_named(run: Run) -> None:
    printed = run("compare", "1f1b", "zbv", "-p", 8, "-m", 24, "--costs", "zb-h4096-p8-m24").out
    assert "makespan, s" in printed
    assert "2.31 MiB" in printed
    assert "zbv computes 2 times as much as 1f1b (m=24), so their times are not comparable" in printed
    several = run("compare", "1f1b", "zbv", "v-half", "-p", 4, "-m", 8, "--costs", "zb-h4096-p8-m24").out
    assert "zbv, v-half compute 2 times as much as 1f1b (m=8), so their times are not comparable\n" in several


def test_rows_of_other_sizes_are_not_said_to_do_the_same_work(run: Run, tmp_path: Path) -> None:
    penstock.build("1f1b", ranks=2, microbatches=2).write(tmp_path / "a.csv")
    printed = run("compare", "a.csv", "zbv", "-p", 4, "-m", 8).out
    assert "so all rows do the same work per rank and microbatch" in printed
