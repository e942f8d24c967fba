"""Tests of `penstock simulate`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import Costs, build, lower
from penstock.lowering import AddCommunication
from tests.support.command_line import Run


def test_it_prints_times_bound_and_causes(run: Run) -> None:
    result = run("simulate", "1f1b", "-p", 4, "-m", 8)
    assert result.code == 0
    assert "makespan  33 units     27.3% idle" in result.out
    assert "proved optimal: rank 3's own work already takes" in result.out
    assert "0B0 waits for the gradient of stage 1, microbatch 0 (1B0, rank 1)" in result.out


def test_json_output(run: Run) -> None:
    result = run("simulate", "zbv", "-p", 2, "-m", 4, "--jitter", 0.05, "--json").json
    assert (result["makespan"], result["span"], result["period"]) == (25, 24, 24)
    assert set(result["jitter"]) == {"p5", "p50", "p95"}
    assert result["gaps"][0]["reason"] == "drain"
    assert result["critical_path"][0] == "0F0"


def test_exposed_all_to_all_is_printed_where_there_is_any(run: Run, tmp_path: Path) -> None:
    costs = tmp_path / "experts.toml"
    costs.write_text("forward_all_to_all_seconds = 1\nbackward_input_all_to_all_seconds = 1\n")
    sizes = ("interleaved-overlap", "-p", 2, "-m", 4)
    assert "exposed all-to-all" not in run("simulate", *sizes).out
    assert "exposed all-to-all" in run("simulate", *sizes, "-c", costs).out
    assert run("simulate", *sizes, "-c", costs, "--json").json["exposed_all_to_all"] == [10, 6]


def test_costs_come_from_a_file_or_a_preset(run: Run, tmp_path: Path) -> None:
    Costs(forward=10).write(tmp_path / "costs.toml")
    assert run("simulate", "gpipe", "-p", 1, "-m", 1, "--costs", "costs.toml", "--json").json["makespan"] == 12
    result = run("simulate", "zb-h1", "-p", 8, "-m", 24, "-c", "zb-h4096-p8-m24", "--json").json
    assert round(result["makespan"] * 1e6) == 2187537


def test_sharding_is_placed_by_cost_within_the_memory_limit(run: Run, tmp_path: Path) -> None:
    Costs(unshard=0.8, unsharded_parameters=4).write(tmp_path / "costs.toml")
    sizes = ("interleaved-1f1b", "-p", 2, "-m", 4, "-v", 3, "-c", "costs.toml", "--lowered")
    placed = [run("simulate", *sizes, "--sharding", "cost", "--memory", n, "--json").json for n in (12, 17)]
    assert [each["collectives"]["UNSHARD"] for each in placed] == [28, 9]
    assert [max(each["peak_memory_by_rank"]) for each in placed] == [12, 17]
    assert "6 UNSHARD, 6 RESHARD, 6 REDUCE_GRAD" in run("simulate", *sizes, "--sharding", "cost").out
    assert run("show", *sizes, "--sharding", "cost", "--memory", 12, "-f", "csv").out.count("UNSHARD") == 28
    lower(build("gpipe", ranks=2, microbatches=2), [AddCommunication()]).write(tmp_path / "sends.csv")
    assert run("simulate", "sends.csv", "--lowered", "--sharding", "cost", "--json").json["collectives"]
    refused = run("simulate", *sizes, "--sharding", "cost", "--memory", 4)
    assert refused.code == 2
    assert "the memory limit of 4 B per rank: rank 0 needs 11 B; rank 1 needs 9 B" in refused.message


def test_options_of_sharding_need_each_other(run: Run) -> None:
    for arguments, expected in (
        (["--sharding", "cost"], "--sharding cost places actions that --lowered adds"),
        (["--memory", "4", "--lowered"], "--memory needs one of --sharding cost"),
    ):
        result = run("simulate", "1f1b", "-p", 2, "-m", 2, *arguments)
        assert result.code == 2
        assert expected in result.message


def test_recompute_and_offload_change_time_and_memory(run: Run, tmp_path: Path) -> None:
    (tmp_path / "costs.toml").write_text(
        "activation_bytes = 8\ncheckpoint_bytes = 1\nhost_latency_seconds = 3\n"
    )
    found = {}
    for options in ((), ("--recompute", "all"), ("--offload", "0:longer=1"), ("--recompute", "0", "--lowered")):
        result = run("simulate", "1f1b", "-p", 2, "-m", 4, "-c", "costs.toml", "--json", *options)
        assert result.code == 0, result.err
        answer = json.loads(result.out)
        found[options] = answer["makespan"], answer["peak_memory"]
    assert found[()] == (15, 16)
    assert found["--recompute", "all"] == (19, 9)
    assert found["--recompute", "0", "--lowered"][1] == 9
    assert found["--offload", "0:longer=1"][0] > 15


def test_fit_recomputes_what_the_memory_limit_needs(run: Run) -> None:
    sizes = ("1f1b", "-p", 3, "-m", 6, "--json")
    plain, fitted = (
        json.loads(run("simulate", *sizes, *options).out)
        for options in ((), ("--recompute", "fit", "--memory", "2"))
    )
    assert (plain["peak_memory"], fitted["peak_memory"]) == (3, 2)
    recomputed = json.loads(run("simulate", *sizes, "--recompute", "all").out)
    assert plain["makespan"] <= fitted["makespan"] < recomputed["makespan"]
    result = run("simulate", *sizes, "--offload", "fit")
    assert (result.code, "--offload fit needs --memory, the limit to fit" in result.message) == (2, True)
    assert "fits the memory limit of 0" in run("simulate", *sizes, "--recompute", "fit", "--memory", "0").err


def test_a_wrong_policy_is_a_usage_error(run: Run) -> None:
    for option in ("--recompute", "--offload"):
        result = run("simulate", "1f1b", "-p", 2, "-m", 2, option, "some")
        assert (result.code, result.out) == (2, "")
        assert f"{option}: unknown policy 'some'; policies are all, every=N" in result.message


@pytest.mark.parametrize("command", ["simulate", "show", "trace"])
@pytest.mark.parametrize("option", ["--recompute", "--offload"])
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("0-9", "stages must be from 0 to 3 (given 0-9)"),
        ("1,4:every=2", "stages must be from 0 to 3 (given 1,4)"),
        ("0-999999999", "stages must be from 0 to 3 (given 0-999999999)"),
        ("3-1", "the stages 3-1 are none; write 1-3"),
    ],
)
def test_stages_that_a_schedule_does_not_have_are_a_usage_error(
    run: Run, tmp_path: Path, command: str, option: str, given: str, problem: str
) -> None:
    result = run(command, "1f1b", "-p", 4, "-m", 8, option, given)
    assert (result.code, result.out, result.err) == (2, "", f"penstock: {option}: {problem}\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--lowered"], "--lowered: add-sharding: the schedule already has UNSHARD, RESHARD actions; "),
        (
            ["--recompute", "fit", "--memory", "4"],
            "--recompute: fit-memory: the schedule already has RECOMPUTE",
        ),
    ],
)
def test_an_option_for_what_a_file_has_already_is_a_usage_error(
    run: Run, options: list[str], problem: str
) -> None:
    assert run("show", "1f1b", "-p", 2, "-m", 4, "--recompute", "all", "--lowered", "-o", "low.csv").code == 0
    result = run("simulate", "low.csv", *options)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"penstock: {problem}")


def test_invalid_costs_and_send_models_are_usage_errors(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"forward": 1}')
    for arguments, expected, code in (
        (["--costs", "fast"], "--costs is a .json or .toml file, or a preset (given fast)", 2),
        (["--costs", "missing.json"], "missing.json: No such file or directory", 2),
        (["--costs", "bad.json"], "bad.json: forward: not a key of costs; did you mean forward_seconds?", 2),
        (["--send-model", "pigeons"], "--send-model is one of buffered", 2),
        (["--jitter", "7"], "jitter must be a share from 0 to 1", 2),
    ):
        result = run("simulate", "1f1b", "-p", 2, "-m", 2, *arguments)
        assert (result.code, result.out) == (code, "")
        assert expected in result.message


def test_an_invalid_schedule_is_rejected_with_its_report(run: Run, tmp_path: Path) -> None:
    (tmp_path / "dead.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    result = run("simulate", "dead.csv")
    assert (result.code, result.out) == (1, "")
    assert "error[deadlock]" in result.err


def test_a_progress_bar_on_a_terminal_leaves_the_json_in_a_pipe_alone() -> None:
    terminal, device = pty.openpty()
    command = [sys.executable, "-m", "penstock", "simulate", "1f1b", "-p", "4", "-m", "8", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=device, check=True, timeout=300)  # noqa: S603
    os.close(device)
    assert json.loads(done.stdout)["makespan"] == 33
    assert b"writing" in os.read(terminal, 1 << 20)
    os.close(terminal)


# --- waits -----------------------------------------------------------------------------------------


def test_a_send_budget_says_what_it_costs(run: Run) -> None:
    given = ("simulate", "dualpipev", "-p", 3, "-m", 8, "--lowered", "--torch", "2.15", "-c", "sends.toml")
    costs = ("activation_message_bytes", "gradient_message_bytes", "bandwidth_bytes_per_second")
    Path("sends.toml").write_text("".join(f"{name} = 1\n" for name in costs))
    printed = run(*given, "--send-budget", 1, "--send-model", "edge-streams").out
    assert "makespan  80 units" in printed
    assert "budget    77 units     without a send budget: +3.9% with it" in printed
    assert "budget" not in run(*given).out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--torch", "2.15"), "--torch names whose actions --lowered adds"),
        (("--lowered", "--torch", "2.15", "--sharding", "cost"), "--torch and --sharding cost: give one"),
        (("--lowered", "--torch", "2.12"), "--torch is one of 2.13, 2.14, 2.15 (given 2.12)"),
        (("--lowered", "--send-budget", 1), "--send-budget needs waits for sends: add --lowered --torch 2.15"),
    ],
)
def test_options_of_waits_that_do_not_fit_are_wrong_usage(
    options: tuple[str | int, ...], text: str, run: Run
) -> None:
    result = run("simulate", "1f1b", "-p", 2, "-m", 2, *options)
    assert result.code == 2
    assert text in result.err


def test_a_send_budget_that_cannot_be_met_is_an_error(run: Run) -> None:
    result = run("simulate", "1f1b", "-p", 2, "-m", 2, "--lowered", "--torch", "2.15", "--send-budget", 0)
    assert result.code == 2
    assert "--send-budget: send-budget: rank 0 cannot keep to 0 pending sends: " in result.err
    assert "the smallest limit is 1" in result.err
