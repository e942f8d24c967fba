"""Promise: `penstock read-trace` says what ran, why it was idle and what it costs, and writes each of these."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

import penstock
from penstock.simulation.timeline import Timeline
from tests.support.command_line import MEGATRON_LOG, Run, stderr_on_terminal
from tests.support.kineto_files import write_kineto_files


@pytest.fixture
def timeline() -> Timeline:
    costs = penstock.Costs(forward=0.1, backward_input=0.1, backward_weight=0.1, latency=0.01)
    return penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=4), costs)


@pytest.fixture
def files(tmp_path: Path, timeline: Timeline) -> list[str]:
    return [path.name for path in write_kineto_files(tmp_path, timeline, steps=3, compressed=True)]


def test_the_report(run: Run, files: list[str], timeline: Timeline) -> None:
    result = run("read-trace", *files, "--search", 0.2)
    assert result.code == 0
    for part in (
        "order     1f1b (p=2, v=1, m=4)",
        "steps     3 complete steps; step ",
        "clocks    all ranks on one host, one clock",
        f"makespan  {timeline.makespan * 1e3:.4g} ms",
        "idle      gradient ",
        "live activations per rank, as now",
        "predicted ms",
        "message to the next, ms",
    ):
        assert part in result.out, part
    assert re.search(r"\n          rank 1, [\d.]+ to [\d.]+ (m?s): drain\n", result.out)


def test_json_and_the_chosen_step(run: Run, files: list[str], timeline: Timeline) -> None:
    record = run("read-trace", *files, "--search", 0, "--step", 2, "--json").json
    assert record["order"]["families"][0] == "1f1b"
    assert (record["step"], len(record["steps"]), record["search"]) == (2, 3, None)
    assert record["makespan"] == pytest.approx(timeline.makespan, rel=1e-6)
    assert record["costs"]["forward_seconds"] == pytest.approx([0.1, 0.1], rel=1e-6)
    assert record["predicted"][-1]["error"] == pytest.approx(0, abs=1e-3)


def test_the_files_it_writes(run: Run, files: list[str], tmp_path: Path, timeline: Timeline) -> None:
    outputs = ["report.html", "costs.toml", "order.csv", "order.json", "both.svg"]
    options = [part for name in outputs for part in ("-o", name)]
    result = run("read-trace", *files, "--search", 0, *options)
    assert (result.code, result.out.splitlines()[-1]) == (0, f"wrote {', '.join(outputs)}")
    assert penstock.read(tmp_path / "order.csv").ranks == timeline.schedule.ranks
    assert penstock.read(tmp_path / "order.json").ranks == timeline.schedule.ranks
    costs = penstock.Costs.read(tmp_path / "costs.toml")
    assert costs.per_stage("forward", 2) == pytest.approx([0.1, 0.1])
    page = (tmp_path / "report.html").read_text()
    assert "measured: 1f1b (p=2, v=1, m=4)" in page
    assert "predicted" in page


@pytest.mark.full
def test_progress_is_shown_on_a_terminal(files: list[str], tmp_path: Path) -> None:
    assert b"reading" in stderr_on_terminal("read-trace", *files, "--search", "0", cwd=tmp_path)


def test_a_swap_is_named(run: Run, tmp_path: Path) -> None:
    rows = [list(row) for row in penstock.build("1f1b", ranks=2, microbatches=4).ranks]
    rows[0][3:5] = reversed(rows[0][3:5])
    changed = penstock.simulate(penstock.Schedule(rows))
    files = [path.name for path in write_kineto_files(tmp_path, changed)]
    out = run("read-trace", *files, "--search", 0).out
    assert out.startswith("order     no known family; nearest is 1f1b (p=2, v=1, m=4): ")
    assert "first at rank 0, step 3: 0B1 instead of " in out


def test_timers_of_megatron(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(MEGATRON_LOG)
    result = run("read-trace", "train.log", "-p", 2, "-m", 4, "-o", "costs.toml")
    assert result.code == 0
    assert "measured 170.00 ms, predicted 170.00 ms with free messages" in result.out
    assert penstock.Costs.read(tmp_path / "costs.toml").forward == pytest.approx((0.01, 0.015))
    record = run("read-trace", "train.log", "-p", 2, "-m", 4, "--json").json
    assert record["predicted"] == pytest.approx(0.17)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["train.log"],
            2,
            "train.log is not JSON, so it is read as a log of Megatron-LM: give its --ranks and",
        ),
        (["train.log", "-p", 2, "-m", 4, "-o", "x.html"], 2, "only costs: x.html must be .toml or .json"),
        (["rank0.json.gz", "rank1.json.gz", "-p", 2], 2, "traces have their own sizes"),
        (["rank0.json.gz", "rank1.json.gz", "-o", "x.pdf"], 2, "x.pdf does not end in .html"),
        (["rank0.json.gz", "rank1.json.gz", "-o", "no/x.csv"], 2, "does not exist"),
        (["rank0.json.gz", "rank1.json.gz", "--search", -1], 2, "--search is a number of seconds"),
        (
            ["rank0.json.gz", "rank1.json.gz", "--step", 9],
            2,
            "--step must be from 0 to 2: there are 3 complete steps (given 9)",
        ),
        (
            ["rank0.json.gz", "rank1.json.gz", "--replica", 3],
            2,
            "--replica must be 0: there is 1 pipeline (given 3)",
        ),
        (
            ["rank0.json.gz", "rank1.json.gz", "--graph", "0>1,1>2"],
            2,
            "--graph must have the 2 stages of the traces",
        ),
        (["simulated.json", "--step", 5], 2, "--step must be 0: there is 1 timeline (given 5)"),
        (["rank1.json.gz"], 1, "no file has stage 0"),
        (["missing.json"], 2, "missing.json: No such file"),
        (["empty.json"], 1, "empty.json: the file is empty"),
    ],
)
def test_mistakes_are_explained(
    arguments: list[object], code: int, message: str, run: Run, files: list[str], tmp_path: Path
) -> None:
    assert files
    (tmp_path / "train.log").write_text(MEGATRON_LOG)
    (tmp_path / "empty.json").write_text("")
    run("trace", "1f1b", "-p", 2, "-m", 4, "-o", "simulated.json")
    result = run("read-trace", *arguments)
    assert message in result.message
    assert (result.code, result.out) == (code, "")


def job_of(first: int, rank: int) -> dict[str, int]:
    return {"rank": first + rank}


def test_of_several_replicas_one_is_shown(run: Run, tmp_path: Path) -> None:
    paths = []
    for replica in range(2):
        costs = penstock.Costs(forward=0.1 + 0.01 * replica, backward=0.2, latency=0.01)
        timeline = penstock.simulate(penstock.build("1f1b", ranks=2, microbatches=4), costs)
        paths += write_kineto_files(tmp_path, timeline, job=partial(job_of, 2 * replica))
    assert "replica 1, the slowest, is shown" in run("read-trace", *paths, "--search", 0).out
    record = run("read-trace", *paths, "--replica", 0, "--search", 0, "--json").json
    assert record["replica"] == 0
    assert record["replicas"][0] < record["replicas"][1]
