"""Tests of `penstock estimate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Costs
from penstock.cost.prices import action_seconds
from tests.support.command_line import Run
from tests.support.model_configs import CONFIGS, gpt_keys

LLAMA = CONFIGS / "llama-3-8b.json"


def test_it_prints_layers_and_stages_with_units(run: Run) -> None:
    out = run("estimate", LLAMA, "--seq", 8192, "--tp", 2, "--ranks", 4).out
    assert "llama-3-8b: 8.03 billion parameters, 57.9 GFLOPs per token and step" in out
    assert "989 TFLOP/s in bf16" in out
    rows = [line.split() for line in out.splitlines()]
    assert next(row for row in rows if row[:1] == ["block"])[1:4] == ["32", "2.06", "T"]
    assert "8 block, output" in out


def test_the_costs_it_writes_are_those_of_other_commands(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    result = run("estimate", LLAMA, "--seq", 4096, "-p", 4, "-v", 2, "-o", path)
    assert f"wrote {path}" in result.out.replace("\n", "")
    costs = Costs.read(path)
    assert len(costs.per_stage("forward", 8)) == 8
    simulated = run("simulate", "interleaved-1f1b", "-p", 4, "-v", 2, "-m", 8, "--costs", path, "--json").json
    timeline = penstock.simulate(
        penstock.build("interleaved-1f1b", ranks=4, stages_per_rank=2, microbatches=8), costs
    )
    assert simulated["makespan"] == timeline.makespan
    recomputed = run("simulate", "1f1b", "-p", 8, "-m", 8, "--costs", path, "--recompute", "all", "--json")
    plain = run("simulate", "1f1b", "-p", 8, "-m", 8, "--costs", path, "--json")
    assert max(recomputed.json["peak_memory_by_rank"]) < max(plain.json["peak_memory_by_rank"])


def test_json_has_every_number_in_bytes_and_seconds(run: Run) -> None:
    record = run("estimate", CONFIGS / "mixtral-8x7b.json", "--ep", 8, "--dp", 8, "--json").json
    assert record["parameters"] == 46_702_792_704
    block = record["layers"][1]
    assert (block["kind"], block["count"]) == ("expert block", 32)
    assert block["collective_bytes"]["dispatch and combine"]["forward"] > 0
    assert sum(record["layers_per_stage"]) == 34
    assert record["costs"]["forward_seconds"][0] > block["seconds"]["forward"] * 32


def test_explain_lists_operations_saved_tensors_and_the_shares(run: Run) -> None:
    out = run("estimate", LLAMA, "--tp", 2, "--recompute-granularity", "pointwise", "--explain").out
    for text in (
        "queries, keys, values",
        "attention norm (repeated)",
        "input of feed-forward down",
        "recomputed",
        "collective",
        "shares: matmul 0.66",
        "NVIDIA H100 Tensor Core GPU datasheet",
    ):
        assert text in out


def test_balanced_stages_give_the_last_rank_fewer_blocks(run: Run) -> None:
    even, balanced = (
        run("estimate", LLAMA, "-p", 4, "--partition", each, "--json").json["layers_per_stage"]
        for each in ("even", "balanced")
    )
    assert even == [9, 8, 8, 9]
    assert balanced[-1] < 9


def test_fit_scales_each_pass_to_the_measured_stages(run: Run, tmp_path: Path) -> None:
    config, profile = tmp_path / "small.json", tmp_path / "profile.json"
    config.write_text(json.dumps(gpt_keys(64, 4, 4)))
    measured = Costs(forward=(2.0, 4.0), backward_input=(3.0, 5.0), backward_weight=(1.0, 2.0), latency=(0.5,))
    measured.write(profile)
    given = ["estimate", config, "--device", "cpu", "--precision", "fp32", "--seq", 64]
    record = run(*given, "-p", 2, "--fit", profile, "--json").json
    costs = Costs.from_keys(record["costs"])
    assert [sum(row) for row in action_seconds(costs, 2)[:1]] == pytest.approx([6.0])
    assert sum(costs.per_stage("backward_input", 2)) == pytest.approx(8.0)
    assert sum(costs.per_stage("backward_weight", 2)) == pytest.approx(3.0)
    assert (costs.latency, costs.bandwidth) == (0.5, None)  # the latency includes the transfer
    wrong = run(*given, "-p", 4, "--fit", profile)
    assert (wrong.code, "one entry for each of 4 stages" in wrong.message) == (2, True)


@pytest.mark.parametrize(
    ("measured", "whole", "split"),
    [
        ({"backward": (6.0, 6.0), "backward_input": (4.0, 4.0), "backward_weight": (4.0, 4.0)}, 12.0, 16.0),
        ({"backward": (6.0, 6.0), "backward_input": (3.0, 3.0), "backward_weight": (3.0, 3.0)}, 12.0, 12.0),
        ({"backward": (6.0, 6.0)}, 12.0, 12.0),
        ({"backward_input": (4.0, 4.0), "backward_weight": (4.0, 4.0)}, 16.0, 16.0),
    ],
    ids=["B, I and W", "only B, halved", "only B", "only I and W"],
)
def test_fit_tells_a_whole_backward_from_its_two_gradients(
    run: Run, tmp_path: Path, measured: dict[str, Any], whole: float, split: float
) -> None:
    config, profile = tmp_path / "small.json", tmp_path / "profile.json"
    config.write_text(json.dumps(gpt_keys(64, 4, 4)))
    Costs(forward=(2.0, 2.0), **measured).write(profile)
    given = ["estimate", config, "--device", "cpu", "--precision", "fp32", "--seq", 64, "-p", 2]
    record = run(*given, "--fit", profile, "--json").json
    costs = Costs.from_keys(record["costs"])
    apart = [*costs.per_stage("backward_input", 2), *costs.per_stage("backward_weight", 2)]
    assert [sum(costs.full_backward(2)), sum(apart)] == pytest.approx([whole, split])
    assert record["whole_backward_factor"] == pytest.approx(whole / split)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "--tp 3 does not divide 32 (attention heads of llama-3-8b): try --tp 2"),
        (["--ranks", "33"], "33 stages need a block each, but llama-3-8b has 32 blocks"),
        (["--device", "h1000"], "no device is called 'h1000'; did you mean h100?"),
        (["-o", "costs.txt"], "costs.txt does not end in .toml or .json"),
    ],
)
def test_errors_say_what_would_work(run: Run, arguments: list[str], message: str) -> None:
    result = run("estimate", LLAMA, *arguments)
    assert result.code == 2
    assert message in result.message


@pytest.mark.parametrize("command", [("estimate",), ("plan", "--devices", 8, "--batch", 8)])
def test_a_file_that_is_no_device_is_a_usage_error(run: Run, tmp_path: Path, command: tuple[Any, ...]) -> None:
    (tmp_path / "mine.toml").write_text("memory_bytes = 8e10\n")
    result = run(command[0], LLAMA, *command[1:], "--device", "mine.toml")
    assert (result.code, result.out) == (2, "")
    assert "mine.toml: mine: missing memory_bandwidth" in result.message


def test_a_file_that_is_no_config_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text("forward_seconds = 1\n")
    result = run("estimate", path)
    assert result.code == 2
    assert "missing model_type; known are llama" in result.message
