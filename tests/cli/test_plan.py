"""Promises of `penstock plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Costs
from penstock.planning import planner
from tests.cli.conftest import Run
from tests.support.planning_models import stub_search

MODEL: dict[str, Any] = {
    "name": "small",
    "layers": [
        {"kind": "embedding", "forward_seconds": 0, "backward_seconds": 0.1, "parameters_bytes": 40},
        {
            "name": "block",
            "count": 6,
            "forward_seconds": 1,
            "backward_input_seconds": 1.1,
            "backward_weight_seconds": 0.9,
            "parameters_bytes": 10,
            "activation_bytes": 8,
            "activation_message_bytes": 2,
        },
        {"kind": "head", "forward_seconds": 1.5, "backward_seconds": 3, "activation_bytes": 9},
    ],
    "links": {"latency_seconds": 0.05, "bandwidth_bytes_per_second": 100},
    "launch_overhead_seconds": 0.01,
    "optimizer_step_seconds": 0.5,
    "devices": {"ranks": 2, "memory_bytes": 200},
    "batch": {"samples": 8},
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(planner, "search", stub_search)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(MODEL))
    return path


def test_plan_prints_a_ranking_a_picture_and_the_winner(run: Run, model: Path) -> None:
    answer = run("plan", model, "--seconds", 0, "--top", 3)
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[0].split() == [
        *("schedule", "v", "placed", "m", "size", "time", "samples/s", "bubble", "memory", "gap"),
    ]
    assert lines[1].split()[0] == "1"
    assert lines[4].endswith("more: --top " + lines[4].rsplit(" ", 1)[-1])
    assert "seconds" in lines[6]
    assert "time is the makespan, with 0.5 s of optimizer step" in answer.out
    assert "layout E" in answer.out
    assert "no order of any of these takes less than" in answer.out
    assert "too large for 200 B" in answer.out


def test_plan_answers_in_json_with_everything(run: Run, model: Path) -> None:
    answer = run("plan", model, "--seconds", 1, "--json", "--explain").json
    best = answer["ranked"][0]
    assert best["seconds"] == min(row["seconds"] for row in answer["ranked"])
    assert best["on_frontier"]
    assert all(row["peak_memory"] <= 200 for row in answer["ranked"])
    assert sum(best["layers_per_stage"]) == 8
    assert best["microbatches"] * best["samples_per_microbatch"] == 8
    assert answer["bound"] <= best["seconds"]
    assert all(left["peak_memory"] > 200 for left in answer["too_large"])
    assert answer["pruned"]
    assert "searched" in {row["schedule"] for row in answer["ranked"]}
    assert answer["missing"] == ["a solver"]
    assert answer["why"][0].startswith(best["schedule"])
    assert {"change", "seconds", "gain", "best"} == set(answer["what_ifs"][0])


def test_plan_explains_with_the_most_helpful_change_first(run: Run, model: Path) -> None:
    answer = run("plan", model, "--seconds", 0, "--explain", "-v", 1)
    told = answer.out.split("why it wins:")[1]
    assert "the next, " in told
    changes = told.split("what would help, most helpful first:")[1].strip().splitlines()
    assert len(changes) >= 4
    assert "faster" in changes[0]


def test_options_go_before_what_the_file_says(run: Run, model: Path) -> None:
    words = ("--ranks", 4, "--memory", "1KB", "--batch", 4, "--objective", "period", "--seconds", 0, "--json")
    answer = run("plan", model, *words).json
    assert (answer["ranks"], answer["memory_limit"], answer["samples"]) == (4, 1000, 4)
    assert answer["objective"] == "period"
    jittered = run("plan", model, "--jitter", 0.05, "--batch", 2, "--seconds", 0)
    assert "p95" in jittered.out.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "count"), [("512", 512), ("40GB", 4e10), ("1.5GiB", 1.5 * 2**30), ("4e10", 4e10), ("2TB", 2e12)]
)
def test_memory_is_said_in_bytes_with_or_without_a_unit(run: Run, model: Path, text: str, count: float) -> None:
    assert run("plan", model, "--memory", text, "--seconds", 0, "--json").json["memory_limit"] == count


def test_the_winner_is_written_with_its_costs_and_layout(run: Run, model: Path, tmp_path: Path) -> None:
    answer = run("plan", model, "--seconds", 0, "--write", "best")
    assert "written: best/schedule.json, best/costs.toml, best/plan.json" in answer.out
    written = json.loads((tmp_path / "best" / "plan.json").read_text())
    schedule = penstock.read(tmp_path / "best" / "schedule.json")
    timeline = penstock.simulate(schedule, Costs.read(tmp_path / "best" / "costs.toml"))
    assert timeline.makespan == written["makespan"]
    assert timeline.makespan + 0.5 == written["seconds"]
    assert penstock.parse_layout(written["layout"], layers=6, stages=schedule.num_stages)
    simulated = run("simulate", "best/schedule.json", "--costs", "best/costs.toml", "--json").json
    assert simulated["makespan"] == written["makespan"]


def test_stopped_by_hand_it_keeps_the_best_so_far(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "search", stopped)
    answer = run("plan", model)
    assert answer.code == 0
    assert "interrupted: this is the best so far" in answer.out
    assert "best: " in answer.out


def test_the_frontier_is_drawn(run: Run, model: Path, tmp_path: Path) -> None:
    for name, begin in (("a.svg", b"<svg"), ("a.png", b"\x89PNG")):
        assert run("plan", model, "--seconds", 0, "-o", name).code == 0
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_bad_usage_is_told(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"layers": [{"forward": 1}]}')
    for words, says in (
        ((model, "-o", "best.csv"), "best.csv does not end in .svg or .png; --write DIR writes the schedule"),
        ((model, "--memory", "lots"), "--memory is a number of bytes, as"),
        ((model, "--objective", "luck"), "'luck' is not one of 'makespan', 'span', 'period'"),
        ((model, "--ranks", 9), "9 ranks need at least one layer per stage, but the model has 8 layers"),
        ((model, "--memory", "60B"), "nothing fits the memory limit of 60 B per rank"),
        (("bad.json",), "bad.json: layers[0].forward: unknown key of a layer"),
        (("model.yaml",), "the ending .yaml is not known"),
        (("missing.toml",), "missing.toml: No such file or directory"),
    ):
        answer = run("plan", *words, "--seconds", 0)
        assert (answer.code, answer.out) == (2, ""), says
        assert says in answer.said


def test_a_profile_is_planned_by_its_stages(run: Run, tmp_path: Path) -> None:
    Costs(forward=(1, 2, 2, 1), backward=(2, 4, 4, 2), latency=(0.1, 0.0, 0.1)).write(tmp_path / "costs.toml")
    answer = run("plan", "costs.toml", "-p", 2, "--batch", 8, "--seconds", 0)
    assert answer.code == 0
    assert "layers per stage [" in answer.out
    missing = run("plan", "costs.toml", "--seconds", 0)
    assert missing.code == 2
    assert "the number of ranks and samples per batch is missing" in missing.said
