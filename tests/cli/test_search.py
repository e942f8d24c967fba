"""Promises of `penstock search`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import penstock
from penstock import Costs, simulate
from penstock.search import Progress
from tests.cli.conftest import Run


def test_it_draws_the_best_and_says_how_good_it_is(run: Run) -> None:
    answer = run("search", "-p", 4, "-m", 8, "--live", 4)
    assert answer.code == 0
    assert "rank 3  " in answer.out
    assert "makespan  27           proved best" in answer.out
    assert "bound     27           " in answer.out
    assert "zb-h2 " in answer.out
    assert "holds 7     too large" in answer.out
    assert answer.err == ""


def test_it_writes_what_it_found_and_answers_in_json(run: Run, tmp_path: Path) -> None:
    Costs(forward=(3, 1, 2), activation=(4, 2, 2), activation_freed_by_input=1).write(tmp_path / "costs.json")
    words = ("search", "-p", 3, "-m", 7, "-c", "costs.json", "--memory", 12, "--moves", 5000, "--seed", 3)
    answer = run(*words, "-o", "best.csv", "--json").json
    schedule, costs = penstock.read(tmp_path / "best.csv"), Costs.read(tmp_path / "costs.json")
    timeline = simulate(schedule, costs)
    assert timeline.makespan == answer["value"] >= answer["bound"]
    assert max(timeline.peak_memory) == answer["peak_memory"] <= 12
    assert answer["value"] <= min(answer["families"].values())
    assert [[str(step) for step in row] for row in schedule.ranks] == answer["schedule"]
    again = run(*words, "--json").json
    assert again["schedule"] == answer["schedule"]


def test_objectives_placements_whole_backwards_and_noise_can_be_asked_for(run: Run) -> None:
    for words in (
        ("--objective", "span", "--fused"),
        ("--objective", "period", "-v", 2, "--placement", "v"),
        ("-v", 2, "--placement", "any", "--jitter", 0.1, "--quantile", 0.8),
    ):
        answer = run("search", "-p", 2, "-m", 4, "--moves", 500, *words, "--json").json
        assert answer["value"] >= answer["bound"] > 0
    assert answer["quantile"] > answer["bound"]


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["--memory", "lots"], "--memory is a number of bytes, as 80e9, 80GB or 74.5GiB (given lots)", 2),
        (
            ["--memory", "0.5"],
            "no schedule fits the memory limit of 0.5 per rank: rank 0 needs 1; rank 1 needs 1",
            2,
        ),
        (["--live", "0"], "live_limit must be an integer of at least 1 (given 0)", 2),
        (["--objective", "speed"], "'speed' is not one of", 2),
        (["-o", "no/best.csv"], "no/best.csv: the folder no is not there or cannot be written to", 2),
        (["-o", "folder.csv"], "folder.csv is a folder", 2),
        (["-o", "best.txt"], "best.txt: the ending .txt is not known; it is .csv or .json", 2),
    ],
)
def test_what_cannot_be_searched_for_is_bad_usage(
    run: Run, tmp_path: Path, words: list[str], says: str, code: int
) -> None:
    (tmp_path / "folder.csv").mkdir()
    answer = run("search", "-p", 2, "-m", 2, *words)
    assert (answer.code, answer.out) == (code, "")
    assert says in answer.said


@pytest.mark.parametrize(("text", "size"), [("7", 7), ("2e3", 2000), ("1.5KB", 1500), ("2GiB", 2 * 1024**3)])
def test_memory_may_have_a_unit(run: Run, tmp_path: Path, text: str, size: float) -> None:
    Costs(activation=size).write(tmp_path / "costs.json")
    answer = run("search", "-p", 2, "-m", 3, "-c", "costs.json", "--memory", text, "--moves", 10, "--json").json
    assert answer["peak_memory"] == size


def test_ctrl_c_keeps_and_writes_the_best(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def pressed_while_moving() -> Iterator[Callable[[Progress], None]]:
        yield lambda now: signal.raise_signal(signal.SIGINT) if now.phase == "annealing" else None

    monkeypatch.setattr(sys.modules["penstock.cli.search"], "shown_progress", pressed_while_moving)
    answer = run("search", "-p", 8, "-m", 24, "-v", 2, "--live", 10, "--seconds", 600, "-o", "best.json")
    assert (answer.code, answer.err) == (0, "")
    assert "stopped by hand: this is the best found until then" in answer.out
    assert penstock.read(tmp_path / "best.json").microbatches == 24
