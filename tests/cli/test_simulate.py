"""Promises of `penstock simulate`, `compare` and `trace`."""

from __future__ import annotations

import json
from pathlib import Path

import penstock
from penstock import Costs
from tests.cli.conftest import Run


def test_simulate_prints_lengths_bound_and_reasons(run: Run) -> None:
    answer = run("simulate", "1f1b", "-p", 4, "-m", 8)
    assert answer.code == 0
    assert "makespan  33           27.3% idle" in answer.out
    assert "0.0% from it at most (one-machine:" in answer.out
    assert "0B0 waits for the gradient of stage 1, microbatch 0 (1B0, rank 1)" in answer.out


def test_simulate_answers_in_json(run: Run) -> None:
    answer = run("simulate", "zbv", "-p", 2, "-m", 4, "--jitter", 0.05, "--json").json
    assert (answer["makespan"], answer["span"], answer["period"]) == (25, 24, 24)
    assert set(answer["jitter"]) == {"p5", "p50", "p95"}
    assert answer["gaps"][0]["reason"] == "drain"
    assert answer["critical_path"][0] == "0F0"


def test_costs_come_from_a_file_or_a_preset(run: Run, tmp_path: Path) -> None:
    Costs(forward=10).write(tmp_path / "costs.toml")
    assert run("simulate", "gpipe", "-p", 1, "-m", 1, "--costs", "costs.toml", "--json").json["makespan"] == 12
    answer = run("simulate", "zb-h1", "-p", 8, "-m", 24, "-c", "zb-h4096-p8-m24", "--json").json
    assert round(answer["makespan"] * 1e6) == 2187537


def test_bad_costs_and_ways_of_sending_are_bad_usage(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"forward": 1}')
    for words, says, code in (
        (["--costs", "fast"], "--costs is a .json or .toml file, or one of zb-h2304-p8-m24", 2),
        (["--costs", "missing.json"], "missing.json: No such file or directory", 2),
        (["--costs", "bad.json"], "bad.json: forward: not a key of costs; they are forward_seconds", 2),
        (["--sends", "pigeons"], "--sends is one of buffered", 2),
        (["--jitter", "7"], "noise: it must be from 0 to 1", 2),
    ):
        answer = run("simulate", "1f1b", "-p", 2, "-m", 2, *words)
        assert (answer.code, answer.out) == (code, "")
        assert says in answer.said


def test_a_schedule_with_faults_is_refused_with_its_report(run: Run, tmp_path: Path) -> None:
    (tmp_path / "dead.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    answer = run("simulate", "dead.csv")
    assert (answer.code, answer.out) == (1, "")
    assert "error[deadlock]" in answer.err


def test_compare_has_a_row_for_each_schedule_and_count(run: Run, tmp_path: Path) -> None:
    penstock.build("zb-h1", ranks=2, microbatches=3).write(tmp_path / "mine.json")
    rows = run("compare", "1f1b", "mine.json", "-p", 2, "-m", 2, "-m", 4, "--json").json
    assert [(row["name"], row["microbatches"], row["makespan"]) for row in rows] == [
        ("1f1b", 2, 9),
        ("1f1b", 4, 15),
        ("zb-h1", 3, 10),
    ]
    table = run("compare", "1f1b", "zb-h1", "-p", 2, "-m", 2).out.splitlines()
    head = " ".join(table[0].split())
    assert head == "schedule p v m makespan span period bubble memory sent bound gap"
    assert table[1].split()[:5] == ["1f1b", "2", "1", "2", "9"]


def test_compare_without_names_takes_all_families(run: Run) -> None:
    rows = run("compare", "-p", 2, "-m", 4, "-v", 3, "--json").json
    assert len(rows) == 12
    assert {row["name"]: row["stages"] for row in rows}["interleaved-1f1b"] == 6
    rows = run("compare", "Interleaved1F1B", "1F1B", "-p", 2, "-m", 4, "-v", 3, "--json").json
    assert [row["stages"] for row in rows] == [6, 2]


def test_compare_of_files_alone_takes_no_numbers(run: Run, tmp_path: Path) -> None:
    penstock.build("1f1b", ranks=2, microbatches=2).write(tmp_path / "a.csv")
    answer = run("compare", "a.csv", "-p", 4)
    assert (answer.code, answer.out) == (2, "")
    assert "files have their own numbers" in answer.said


def test_compare_draws_all_on_one_axis(run: Run, tmp_path: Path) -> None:
    assert run("compare", "1f1b", "zb-h1", "-p", 2, "-m", 2, "-o", "both.html").code == 0
    page = (tmp_path / "both.html").read_text()
    assert '"name":"1f1b"' in page
    assert '"name":"zb-h1"' in page
    answer = run("compare", "1f1b", "-p", 2, "-m", 2, "-o", "both.txt")
    assert (answer.code, answer.out) == (2, "")


def test_compare_needs_numbers_for_families(run: Run) -> None:
    answer = run("compare", "1f1b")
    assert answer.code == 2
    assert "to build 1f1b, say --ranks and --microbatches" in answer.said


def test_trace_writes_a_file_and_says_how_to_open_it(run: Run, tmp_path: Path) -> None:
    answer = run("trace", "1f1b", "-p", 2, "-m", 2, "-o", "t.json", "--lowered")
    assert answer.code == 0
    assert answer.out.startswith("t.json: ")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_show_draws_every_kind_of_picture(run: Run, tmp_path: Path) -> None:
    for name, begin in (("a.svg", b"<"), ("a.png", b"\x89PNG"), ("a.html", b"<!")):
        assert run("show", "1f1b", "-p", 2, "-m", 2, "-o", name).code == 0
        assert (tmp_path / name).read_bytes().startswith(begin)
    assert run("show", "1f1b", "-p", 2, "-m", 2, "-f", "trace", "-o", "a.json").code == 0
    assert "traceEvents" in json.loads((tmp_path / "a.json").read_text())


def test_show_with_costs_is_scaled_to_the_width(run: Run) -> None:
    answer = run("show", "1f1b", "-p", 2, "-m", 2, "--costs", "zb-h4096-p8-m24")
    assert "0.238321 seconds, 33.6% of it idle" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80
