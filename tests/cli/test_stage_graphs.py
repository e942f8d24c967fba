"""Promise: the commands work on files with any stage graph, CSV and JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock import Costs, encoder_decoder, simulate
from penstock.simulation.comparison import rank_costs
from tests.support.command_line import Run

GRAPH = encoder_decoder((2, 1), 3, feeds=(0, 2), mtp=True)
BUILT = penstock.build("1f1b", ranks=4, microbatches=6, graph=GRAPH)
SCHEDULES = {"compute": BUILT, "lowered": penstock.lower(BUILT)}


@pytest.mark.parametrize("level", SCHEDULES)
@pytest.mark.parametrize("suffix", ["csv", "json"])
def test_every_command_reads_the_graph(run: Run, tmp_path: Path, level: str, suffix: str) -> None:
    name, schedule = f"graph.{suffix}", SCHEDULES[level]
    schedule.write(tmp_path / name)
    Costs(latency=0.25).write(tmp_path / "costs.toml")
    assert "valid" in run("check", name).out
    expected = simulate(schedule, Costs(latency=0.25)).makespan
    assert run("simulate", name, "-c", "costs.toml", "--json").json["makespan"] == expected
    shown = run("show", name)
    assert (shown.code, "7 stages" in shown.out) == (0, True)
    compared = run("compare", name, "1f1b", "-p", 4, "-m", 6, "--json")
    times = [simulate(schedule, rank_costs(schedule)).makespan, 27]
    assert [row["makespan"] for row in compared.json] == pytest.approx(times)
    for picture in ("out.svg", "out.html", "out.png"):
        assert run("show", name, "-o", picture).code == 0
        assert (tmp_path / picture).stat().st_size > 1000
    assert run("trace", name, "-o", "trace.json").code == 0


def test_a_lowered_file_is_written_and_read_again(run: Run, tmp_path: Path) -> None:
    BUILT.write(tmp_path / "graph.csv")
    assert run("show", "graph.csv", "--lowered", "-o", "lowered.csv").code == 0
    assert penstock.read(tmp_path / "lowered.csv") == SCHEDULES["lowered"]
    assert run("check", "lowered.csv", "--send-model", "rendezvous").code == 0
    text = (tmp_path / "lowered.csv").read_text().replace("1RECV_B0<3", "", 1)
    (tmp_path / "lowered.csv").write_text(text)
    assert run("check", "lowered.csv").code == 1


def test_families_are_built_over_the_edges_of_an_option_or_a_file(run: Run, tmp_path: Path) -> None:
    graph = penstock.StageGraph.parse("0>1,1>2,0>2")
    sizes = ("-p", 3, "-m", 4, "--graph")
    assert run("show", "1f1b", *sizes, "0>1,1>2,0>2", "-o", "skip.csv").code == 0
    expected = penstock.build("1f1b", ranks=3, microbatches=4, graph=graph)
    assert penstock.read(tmp_path / "skip.csv") == expected
    assert run("simulate", "1f1b", *sizes, "skip.csv", "--json").json["makespan"] == simulate(expected).makespan
    over_graphs = [name for name, family in penstock.families().items() if family.graph_builder is not None]
    assert [row["name"] for row in run("compare", *sizes, "skip.csv", "--json").json] == over_graphs
    assert run("trace", "zb-h1", *sizes, "skip.csv", "-o", "trace.json").code == 0
    for arguments, message in (
        (("show", "zbv", *sizes, "skip.csv"), "zbv needs stages in a chain"),
        (("show", "1f1b", *sizes, "0>1;1>2"), "'0>1;1>2' is not an edge"),
        (("show", "skip.csv", "--graph", "0>1"), "skip.csv is a file with its own sizes; remove --graph"),
    ):
        result = run(*arguments)
        assert result.code == 2
        assert message in result.message


def test_search_takes_graphs_placements_and_unequal_stages(run: Run, tmp_path: Path) -> None:
    found = ("--moves", 200, "-o", "best.csv")
    assert run("search", "-p", 2, "-m", 3, "--graph", "0>1,1>2,0>2", "--placement", "0,1,0", *found).code == 0
    best = penstock.read(tmp_path / "best.csv")
    assert (best.graph.edges, best.placement.stage_to_rank) == (((0, 1), (0, 2), (1, 2)), (0, 1, 0))
    assert run("search", "-p", 2, "-m", 3, "-v", "1,2", "--placement", "loop", *found).code == 0
    assert penstock.read(tmp_path / "best.csv").placement == penstock.Placement.loop(2, [1, 2])
    for arguments, message in (
        (("--placement", "0,2"), "every rank must host a stage"),
        (("--placement", "zigzag"), "--placement is any, loop, v, or the rank of each stage"),
        (("--placement", "0,1,0", "-v", "2"), "remove --stages-per-rank"),
        (("-v", "1,2,1"), "--stages-per-rank has 3 numbers for 2 ranks"),
    ):
        result = run("search", "-p", 2, "-m", 3, *arguments)
        assert result.code == 2
        assert message in result.message
