"""Tests of `penstock search`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import penstock
from penstock import Costs, simulate
from penstock.cost.units import Units
from penstock.search import Progress
from tests.support.command_line import Run
from tests.support.schedule_rows import rows_of


def test_it_draws_the_best_schedule_and_prints_its_gap(run: Run) -> None:
    result = run("search", "-p", 4, "-m", 8, "--live", 4)
    assert result.code == 0
    assert "rank 3  " in result.out
    assert "makespan  27 units       proved optimal" in result.out
    assert "bound     27 units       " in result.out
    assert "zb-h2 " in result.out
    assert "needs 7 activations  over limit" in result.out
    assert result.err == ""


def test_it_writes_the_schedule_and_prints_json(run: Run, tmp_path: Path) -> None:
    Costs(forward=(3, 1, 2), activation=(4, 2, 2), activation_freed_by_input=1).write(tmp_path / "costs.json")
    arguments = ("search", "-p", 3, "-m", 7, "-c", "costs.json", "--memory", 12, "--moves", 5000, "--seed", 3)
    result = run(*arguments, "-o", "best.csv", "--json").json
    schedule, costs = penstock.read(tmp_path / "best.csv"), Costs.read(tmp_path / "costs.json")
    timeline = simulate(schedule, costs)
    assert timeline.makespan == result["value"] >= result["bound"]
    assert max(timeline.peak_memory) == result["peak_memory"] <= 12
    assert result["value"] <= min(result["families"].values())
    assert rows_of(schedule) == result["schedule"]
    again = run(*arguments, "--json").json
    assert again["schedule"] == result["schedule"]


def test_objective_placement_fused_backward_and_jitter_are_options(run: Run) -> None:
    for arguments in (
        ("--objective", "span", "--fused"),
        ("--objective", "period", "-v", 2, "--placement", "v"),
        ("-v", 2, "--placement", "any", "--jitter", 0.1, "--quantile", 0.8),
    ):
        result = run("search", "-p", 2, "-m", 4, "--moves", 500, *arguments, "--json").json
        assert result["value"] >= result["bound"] > 0
    assert result["quantile"] > result["bound"]


@pytest.mark.parametrize(
    ("arguments", "expected", "code"),
    [
        (["--memory", "lots"], "--memory is a number of bytes, e.g. 80e9, 80GB or 74.5GiB (given lots)", 2),
        (["--memory", "1GB"], "--memory has the unit GB, but memory is counted in activations", 2),
        (
            ["--memory", "0.5"],
            "no schedule fits the memory limit of 0.5 activations per rank: rank 0 needs 1 activation; rank 1",
            2,
        ),
        (["--live", "0"], "--live must be an integer of at least 1 (given 0)", 2),
        (["--objective", "speed"], "--objective is one of makespan, span, period (given speed)", 2),
        (["-o", "no/best.csv"], "no/best.csv: the directory no does not exist or is not writable", 2),
        (["-o", "folder.csv"], "folder.csv is a directory", 2),
        (["-o", "best.txt"], "best.txt: unknown file extension .txt; use .csv or .json", 2),
    ],
)
def test_impossible_searches_are_usage_errors(
    run: Run, tmp_path: Path, arguments: list[str], expected: str, code: int
) -> None:
    (tmp_path / "folder.csv").mkdir()
    result = run("search", "-p", 2, "-m", 2, *arguments)
    assert (result.code, result.out) == (code, "")
    assert expected in result.message


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("2e3", 2000), ("1.5KB", 1500), ("2GiB", 2 * 1024**3)])
def test_memory_may_have_a_unit(run: Run, tmp_path: Path, text: str, size: float) -> None:
    Costs(activation=size).write(tmp_path / "costs.json")
    result = run("search", "-p", 2, "-m", 3, "-c", "costs.json", "--memory", text, "--moves", 10, "--json").json
    assert result["peak_memory"] == size


def test_ctrl_c_keeps_and_writes_the_best(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def pressed_while_moving(_: Units) -> Iterator[Callable[[Progress], None]]:
        yield lambda now: signal.raise_signal(signal.SIGINT) if now.phase == "annealing" else None

    monkeypatch.setattr("penstock.cli.search.search_progress", pressed_while_moving)
    result = run("search", "-p", 8, "-m", 24, "-v", 2, "--live", 13, "--seconds", 600, "-o", "best.json")
    assert (result.code, result.err) == (0, "")
    assert "interrupted: this is the best schedule found so far" in result.out
    assert penstock.read(tmp_path / "best.json").microbatches == 24
