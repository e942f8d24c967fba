"""Tests of `penstock plan`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Costs
from penstock.planning import planner
from tests.support.command_line import Run
from tests.support.grids import small
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
    "devices": {"ranks": 2, "memory_bytes": 150},
    "batch": {"samples": 4},
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(planner, "search", stub_search)
    path = tmp_path / "small.json"
    path.write_text(json.dumps(MODEL))
    return path


def test_it_prints_a_ranking_a_plot_and_the_best_plan(run: Run, model: Path) -> None:
    result = run("plan", model, "--seconds", 0, "--top", 3)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split() == [
        *("schedule", "v", "placement", "m", "mbs", "time", "samples/s", "bubble", "memory", "gap"),
    ]
    assert lines[1].split()[0] == "1"
    assert lines[4].endswith("more: --top " + lines[4].rsplit(" ", 1)[-1])
    assert lines[6].strip() == "time, s"
    assert "time: makespan plus 500 ms of optimizer step" in result.out
    assert "layout E" in result.out
    assert "lower bound over all combinations: " in result.out
    assert "over the memory limit of 150 B" in result.out


def test_json_output_has_everything(run: Run, model: Path) -> None:
    result = run("plan", model, "--seconds", 0.2, "--json", "--explain", "-v", 1).json
    best = result["ranked"][0]
    assert best["seconds"] == min(row["seconds"] for row in result["ranked"])
    assert best["on_frontier"]
    assert all(row["peak_memory"] <= 150 for row in result["ranked"])
    assert sum(best["layers_per_stage"]) == 8
    assert best["microbatches"] * best["samples_per_microbatch"] == 4
    assert result["bound"] <= best["seconds"]
    assert all(left["peak_memory"] > 150 for left in result["too_large"])
    assert result["pruned"]
    assert "searched" in {row["schedule"] for row in result["ranked"]}
    assert result["missing"] == ["a solver"]
    assert result["why"][0].startswith(best["schedule"])
    assert {"change", "seconds", "gain", "best"} == set(result["what_ifs"][0])


def test_explain_lists_changes_by_gain(run: Run, model: Path) -> None:
    result = run("plan", model, "--seconds", 0, "--explain", "-v", 1)
    explanation = result.out.split("why it wins:")[1]
    assert "the next, " in explanation
    changes = explanation.split("what would help, largest gain first:")[1].strip().splitlines()
    assert len(changes) >= 4
    assert "faster" in changes[0]


def test_options_override_the_file(run: Run, model: Path) -> None:
    arguments = (
        "--ranks",
        4,
        "--memory",
        "1KB",
        "--batch",
        4,
        "--objective",
        "period",
        "--seconds",
        0,
        "-v",
        1,
        "--json",
    )
    result = run("plan", model, *arguments).json
    assert (result["ranks"], result["memory_limit"], result["samples"]) == (4, 1000, 4)
    assert result["objective"] == "period"
    jittered = run("plan", model, "--jitter", 0.05, "--batch", 2, "-v", 1, "--seconds", 0)
    assert "p95" in jittered.out.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "count"), [("512", 512), ("1.5GiB", 1.5 * 2**30), ("4e10", 4e10), ("2TB", 2e12)]
)
@small(lambda text: text == "1.5GiB")
def test_memory_is_in_bytes_or_has_a_unit(run: Run, model: Path, text: str, count: float) -> None:
    assert run("plan", model, "--memory", text, "-v", 1, "--seconds", 0, "--json").json["memory_limit"] == count


def test_the_best_plan_is_written_with_its_costs_and_layout(run: Run, model: Path, tmp_path: Path) -> None:
    result = run("plan", model, "-v", 2, "--seconds", 0, "--write", "best")
    assert "wrote best/schedule.json, best/costs.toml, best/plan.json" in result.out
    written = json.loads((tmp_path / "best" / "plan.json").read_text())
    schedule = penstock.read(tmp_path / "best" / "schedule.json")
    timeline = penstock.simulate(schedule, Costs.read(tmp_path / "best" / "costs.toml"))
    assert timeline.makespan == written["makespan"]
    assert timeline.makespan + 0.5 == written["seconds"]
    assert penstock.parse_layout(written["layout"], layers=6, stages=schedule.num_stages)
    simulated = run("simulate", "best/schedule.json", "--costs", "best/costs.toml", "--json").json
    assert simulated["makespan"] == written["makespan"]


def test_an_interrupt_keeps_the_best_plan(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "search", stopped)
    result = run("plan", model, "-v", 1)
    assert result.code == 0
    assert "interrupted: this is the best plan found so far" in result.out
    assert "best: " in result.out


def test_the_frontier_is_drawn(run: Run, model: Path, tmp_path: Path) -> None:
    for name, begin in (("a.svg", b"<svg"), ("a.png", b"\x89PNG")):
        assert run("plan", model, "-v", 1, "--seconds", 0, "-o", name).code == 0
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_wrong_usage_exits_with_2(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"layers": [{"forward": 1}]}')
    (tmp_path / "model.yaml").write_text("layers: []")
    for arguments, expected in (
        (
            (model, "-o", "best.csv"),
            "best.csv does not end in .svg, .png or .html; --write DIR writes",
        ),
        ((model, "--memory", "lots"), "--memory is a number of bytes, e.g."),
        ((model, "--objective", "luck"), "--objective is one of makespan, span, period (given luck)"),
        ((model, "--ranks", 9), "9 ranks need at least one layer per stage, but the model has 8 layers"),
        ((model, "--memory", "60B"), "nothing fits the memory limit of 60 B per rank"),
        (("bad.json",), "bad.json: layers[0].forward: unknown key of a layer"),
        (("model.yaml",), "unknown file extension .yaml"),
        (("missing.toml",), "missing.toml: No such file or directory"),
    ):
        result = run("plan", *arguments, "--seconds", 0)
        assert (result.code, result.out) == (2, ""), expected
        assert expected in result.message


def test_the_stages_of_a_profile_are_planned_as_layers(run: Run, tmp_path: Path) -> None:
    Costs(forward=(1, 2, 2, 1), backward=(2, 4, 4, 2), latency=(0.1, 0.0, 0.1)).write(tmp_path / "costs.toml")
    result = run("plan", "costs.toml", "-p", 2, "--batch", 4, "-v", 1, "--seconds", 0)
    assert result.code == 0
    assert "layers per stage [" in result.out
    missing = run("plan", "costs.toml", "--seconds", 0)
    assert missing.code == 2
    assert "give --ranks and --batch: the model" in missing.message


def test_memory_policies_are_offered_with_their_price(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    arguments = ("plan", "model.json", "-v", 1, "--seconds", 0, "--memory", 88)
    assert "or a memory policy: recompute or offload" in run(*arguments).message
    shown = run(*arguments, "--recompute").out
    assert "memory policy  fastest" in shown
    assert re.search(r"fits only with recomputation of (all )?stages?.*more time than the same order", shown)
    record = run(*arguments, "--recompute", "--json").json
    assert record["ranked"][0]["memory_policy"].startswith("recompute")


def test_relative_costs_are_planned_in_units_and_activations(run: Run, tmp_path: Path) -> None:
    Costs(forward=(1, 1, 1, 2), time_unit="units", memory_unit="activations").write(tmp_path / "stages.toml")
    printed = run("plan", "stages.toml", "-p", 2, "--batch", 4, "--seconds", 0, "--explain").out
    assert "samples/unit" in printed
    assert " units" in printed
    assert " activations" in printed
    assert not re.search(r"\d (s|ms|B|KiB)\b", printed)
