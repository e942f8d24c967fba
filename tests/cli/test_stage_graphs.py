"""Promise: the commands work on files with any stage graph, CSV and JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock import Costs, encoder_decoder, simulate
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
    assert [row["makespan"] for row in compared.json] == [simulate(schedule).makespan, 27]
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
