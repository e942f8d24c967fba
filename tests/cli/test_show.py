"""Tests of `penstock show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import penstock
from tests.support.command_line import Run

SMALL = ("show", "1f1b", "--ranks", 2, "--microbatches", 2)
CSV = "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
DEADLOCK = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n"

PICTURE = """\
1f1b: 2 ranks, 2 stages (loop), 2 microbatches, compute

time    0              5
rank 0  F0 F1 ·  ·  B0─── ·  B1───
rank 1  ·  F0 B0─── F1 B1─── ·  ·

makespan 9 units (F, I, W: 1, B: 2, communication: 0), 33.3% idle
"""
ORDER = "order: 1f1b (p=2, v=1, m=2), the same as eager-1f1b, interleaved-1f1b, gis, gis-h, po-h\n"


# --- printed output --------------------------------------------------------------------------------


def test_a_family_is_shown_over_time_with_its_numbers(run: Run) -> None:
    result = run(*SMALL)
    assert (result.code, result.out, result.err) == (0, PICTURE, "")


@pytest.mark.parametrize(("command", "word"), [("show", "units are"), ("simulate", "units    ")])
def test_units_of_several_stages_per_rank_are_said_to_be_per_stage(run: Run, command: str, word: str) -> None:
    note = f"{word} per stage, a rank has 2: penstock compare gives equal work"
    assert note in run(command, "zbv", "-p", 2, "-m", 2).out.splitlines()
    assert "per stage" not in run(command, "1f1b", "-p", 2, "-m", 2).out


def test_a_lowered_schedule_is_shown_as_lists(run: Run) -> None:
    result = run(*SMALL, "--lowered")
    assert result.code == 0
    assert "2 microbatches, lowered\n\nstep  rank 0        rank 1\n" in result.out
    assert "   2  0SEND_F0      1F0\n" in result.out


@pytest.mark.parametrize("family", penstock.families())
def test_every_family_can_be_shown(family: str, run: Run) -> None:
    for more in ((), ("--lowered",)):
        result = run("show", family, "-p", 3, "-m", 4, *more)
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith(f"{family}: 3 ranks")


def test_stages_per_rank_can_be_chosen_where_the_family_leaves_it_open(run: Run) -> None:
    assert "2 ranks, 6 stages" in run("show", "interleaved-1f1b", "-p", 2, "-m", 4, "-v", 3).out
    result = run(*SMALL, "-v", 3)
    assert result.code == 2
    assert "1f1b has 1 stage per rank (given 3)" in result.err


def test_csv_and_json_are_printed_as_they_would_be_written(run: Run, tmp_path: Path) -> None:
    for form in ("csv", "json"):
        printed = run(*SMALL, "--format", form).out
        assert run(*SMALL, "-o", f"small.{form}").code == 0
        assert (tmp_path / f"small.{form}").read_bytes().decode() == printed
    assert run(*SMALL, "-f", "csv").out == CSV
    assert set(run(*SMALL, "-f", "json").json) == {
        "format",
        "version",
        "name",
        "microbatches",
        "level",
        "stage_to_rank",
        "ranks",
    }


def test_the_picture_is_as_wide_as_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("list")
    monkeypatch.setenv("COLUMNS", "40")
    picture = run("show", "1f1b", "-p", 4, "-m", 8).out.split("\n\n", 1)[1].rpartition("\n\n")[0]
    assert max(map(len, picture.splitlines())) in range(36, 41)


# --- files -----------------------------------------------------------------------------------------


def test_a_file_is_shown_and_made_into_another_format(run: Run, tmp_path: Path) -> None:
    assert run(*SMALL, "-o", "mine.csv").out.startswith("wrote mine.csv: ")
    assert run("show", "mine.csv").out == PICTURE.replace("1f1b:", "mine:") + ORDER
    assert run("show", "mine.csv", "-o", "mine.json").code == 0
    assert json.loads((tmp_path / "mine.json").read_text())["name"] == "mine"
    assert run("show", "mine.json", "--format", "csv").out == CSV


def test_a_picture_goes_to_a_file_without_colour(run: Run, tmp_path: Path) -> None:
    assert run(*SMALL, "-o", "picture.txt", "--format", "grid").code == 0
    assert (tmp_path / "picture.txt").read_text(encoding="utf-8") == PICTURE


def test_an_invalid_file_is_shown_and_exits_with_1(run: Run, tmp_path: Path) -> None:
    (tmp_path / "dead.csv").write_text(DEADLOCK)
    result = run("show", "dead.csv")
    assert result.code == 1
    assert "   1  0B0     1B1\n" in result.out
    assert result.message == "penstock: dead.csv has 1 error; run: penstock check dead.csv"


def test_an_invalid_file_is_not_lowered(run: Run, tmp_path: Path) -> None:
    (tmp_path / "dead.csv").write_text(DEADLOCK)
    result = run("show", "dead.csv", "--lowered", "-o", "lowered.csv")
    assert result.code == 1
    assert "error[deadlock]" in result.err
    assert not (tmp_path / "lowered.csv").exists()


def test_a_file_without_any_step_is_shown_like_any_other(run: Run, tmp_path: Path) -> None:
    empty = penstock.Schedule([[]], penstock.Placement.loop(1), 1)
    empty.write(tmp_path / "empty.json")
    assert run("show", "empty.json").code == 1


def test_the_name_in_a_file_cannot_inject_terminal_escapes(run: Run, tmp_path: Path) -> None:
    penstock.build("1f1b", ranks=1, microbatches=1).renamed("\x1b[2J\n").write(tmp_path / "x.json")
    assert "\x1b" not in run("show", "x.json").out


# --- timelines -------------------------------------------------------------------------------------


def test_every_picture_format_is_drawn(run: Run, tmp_path: Path) -> None:
    for name, begin in (("a.svg", b"<"), ("a.png", b"\x89PNG"), ("a.html", b"<!")):
        assert run("show", "1f1b", "-p", 2, "-m", 2, "-o", name).code == 0
        assert (tmp_path / name).read_bytes().startswith(begin)
    assert run("show", "1f1b", "-p", 2, "-m", 2, "-f", "trace", "-o", "a.json").code == 0
    assert "traceEvents" in json.loads((tmp_path / "a.json").read_text())


def test_with_costs_the_timeline_is_scaled_to_the_width(run: Run) -> None:
    result = run("show", "1f1b", "-p", 2, "-m", 2, "--costs", "zb-h4096-p8-m24")
    assert "makespan 238.32 ms, 33.6% idle" in result.out
    assert max(map(len, result.out.splitlines())) <= 80


# --- wrong usage -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["1f1c", "-p", 2, "-m", 2], "unknown family '1f1c'; did you mean 1f1b?"),
        (["interleaved", "-p", 2, "-m", 2], "did you mean interleaved-1f1b?"),
        (["zebra-horse", "-p", 2, "-m", 2], "known: gpipe, looped-bfs,"),
        (["1f1b"], "1f1b needs --ranks and --microbatches, e.g. 1f1b --ranks 4 --microbatches 8"),
        (["1f1b", "-p", 2], "1f1b needs --microbatches,"),
        (["1f1b", "-m", 2], "1f1b needs --ranks,"),
        (
            ["1f1b", "-p", 0, "-m", -1],
            "--ranks must be a whole number of at least 1 (given 0); --microbatches must",
        ),
        (["1f1b", "-p", "two", "-m", 2], "--ranks must be an integer (given two)"),
        (["1f1b", "-p", 2, "-m", 2, "-f", "xml"], "--format is one of grid, csv, json"),
        (
            ["1f1b", "-p", 2, "-m", 2, "-o", "x.csv", "-f", "json"],
            "--format json does not match the file x.csv",
        ),
        (["1f1b", "-p", 2, "-m", 2, "-o", "x.json", "-f", "grid"], "--format grid does not match"),
        (["1f1b", "-p", 2, "-m", 2, "-o", "x.txt"], "x.txt does not end in .csv, .json, .svg, .png or .html;"),
        (["x.csv", "-p", 2, "-m", 2], "is a file with its own sizes; remove --ranks and --microbatches"),
        (["x.csv", "-v", 2], "is a file with its own sizes; remove --stages-per-rank"),
        (["x.csv"], "x.csv: No such file or directory"),
        (["folder/x"], "unknown file extension (none); use .csv or .json"),
        (["folder/x.xml"], "unknown file extension .xml; use .csv or .json"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(arguments: list[object], expected: str, run: Run) -> None:
    result = run("show", *arguments)
    assert result.code == 2
    assert expected in result.message
    assert result.out == ""


def test_a_file_that_is_there_is_taken_for_a_file_whatever_its_ending(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text(CSV)
    assert "use .csv or .json" in run("show", "notes.txt").message


def test_absurd_sizes_are_usage_errors(run: Run) -> None:
    assert run("show", "interleaved-1f1b", "-p", 2, "-m", 2, "-v", 10**18).code == 2


def test_a_missing_directory_is_named(run: Run) -> None:
    result = run(*SMALL, "-o", "folder/mine.csv")
    assert result.code == 2
    assert "folder/mine.csv: the directory folder does not exist or is not writable" in result.message


def test_a_directory_in_place_of_a_file_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for arguments, problem in (
        ((*SMALL, "-o", "folder.csv"), "folder.csv is a directory; give the name of a file"),
        (("show", "folder.csv"), "folder.csv: Is a directory"),
    ):
        result = run(*arguments)
        assert result.code == 2
        assert problem in result.message


def test_a_group_is_for_families_that_have_one(run: Run, tmp_path: Path) -> None:
    sizes = ("--ranks", 2, "--microbatches", 4, "--group", 4)
    for command in ("show", "simulate"):
        shown = run(command, "interleaved-1f1b", *sizes)
        assert shown.code == 0
    assert (
        run("show", "interleaved-1f1b", *sizes, "--format", "json").json["name"] == "interleaved-1f1b group=4"
    )
    assert run("trace", "interleaved-1f1b", *sizes, "-o", "t.json").code == 0
    assert "interleaved-1f1b group=4" in (tmp_path / "t.json").read_text()
    penstock.build("1f1b", ranks=2, microbatches=2).write(tmp_path / "a.csv")
    assert "a file with its own sizes; remove --group" in run("show", "a.csv", "--group", 2).message
    assert "must be from 2 to 4" in run("show", "interleaved-1f1b", *sizes[:-1], 1).message


def test_stages_per_rank_can_be_a_list(run: Run) -> None:
    shown = run("show", "zbv", "-p", 3, "-m", 2, "-v", "1,2,1")
    assert shown.out.startswith("zbv: 3 ranks, 4 stages (custom), 2 microbatches, compute")
    rows = run("compare", "zbv", "interleaved-1f1b", "1f1b", "-p", 3, "-m", 2, "-v", "1,2,1", "--json").json
    assert [row["stages"] for row in rows] == [4, 4, 3]
    assert "has 2 numbers for 3 ranks" in run("show", "zbv", "-p", 3, "-m", 2, "-v", "1,2").message
    wrong = run("show", "zbv", "-p", 3, "-m", 2, "-v", "1,x,1")
    assert wrong.code == 2
    assert "(given 1,x,1)" in wrong.err


def test_a_written_file_has_the_waits_of_the_torch_version(run: Run, tmp_path: Path) -> None:
    options = ("--lowered", "--torch", "2.15", "--send-budget", 1)
    assert run(*SMALL, *options, "-o", "waits.csv").code == 0
    text = (tmp_path / "waits.csv").read_text()
    assert text.startswith("0UNSHARD,0F0,0SEND_F0,0F1,0WAIT_SEND_F0,0SEND_F1,0RECV_B0,")
    assert run("check", "waits.csv").code == 0
    assert run("check", "1f1b", "-p", 2, "-m", 2, *options).code == 0
