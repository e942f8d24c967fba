"""Promise: files of several data-parallel replicas can be given together; all are told, one is shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import Costs, TraceError, build, read_trace, simulate
from penstock.simulation.timeline import Timeline
from tests.support.kineto_files import write_kineto_files

P, REPLICAS = 3, 2


def simulated(replica: int, family: str = "zbv") -> Timeline:
    """The second replica is slower by a tenth."""
    costs = Costs(forward=0.1, backward_input=0.1, backward_weight=0.1, latency=0.01).scaled(1 + 0.1 * replica)
    return simulate(build(family, ranks=P, microbatches=4), costs)


LAYOUTS: dict[str, Callable[[int, int], int]] = {
    "a pipeline's ranks are neighbours": lambda replica, rank: replica * P + rank,
    "a stage's ranks are neighbours": lambda replica, rank: rank * REPLICAS + replica,
}


def write(directory: Path, rank_of: Callable[[int, int], int], *, grouped: bool = False) -> list[Path]:
    paths = []
    for replica in range(REPLICAS):
        groups = [
            {"pg_desc": "default_pg", "ranks": []},
            {"pg_desc": "mesh_dp", "ranks": [0, 1]},
            {"pg_desc": "mesh_pp", "ranks": [rank_of(replica, rank) for rank in range(P)]},
        ]

        def job(rank: int, replica: int = replica, groups: object = groups) -> dict[str, Any]:
            return {"rank": rank_of(replica, rank)} | ({"pg_config": groups} if grouped else {})

        paths += write_kineto_files(directory, simulated(replica), steps=2, job=job)
    return paths


@pytest.mark.parametrize("groups", ["with groups", "without groups"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_slowest_of_several_pipelines_is_shown_and_all_are_told(
    tmp_path: Path, layout: str, groups: str
) -> None:
    paths = write(tmp_path, LAYOUTS[layout], grouped=groups == "with groups")
    run = read_trace(paths)
    expected = [simulated(replica).makespan for replica in range(REPLICAS)]
    assert run.replicas == pytest.approx(expected)
    assert run.replica == 1
    assert run.timeline.makespan == pytest.approx(expected[1])
    first = read_trace(paths, replica=0)
    assert first.replica == 0
    assert first.timeline.makespan == pytest.approx(expected[0])
    assert [Path(source).name for source in first.sources] == [
        f"rank{LAYOUTS[layout](0, rank)}.json" for rank in range(P)
    ]


def test_a_replica_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, LAYOUTS["a pipeline's ranks are neighbours"])
    with pytest.raises(TraceError, match=r"replica must be from 0 to 1: there are 2 pipelines \(given 2\)"):
        read_trace(paths, replica=2)
    with pytest.raises(TraceError, match=r"replica must be 0: there is 1 pipeline \(given 1\)"):
        read_trace(paths[:P], replica=1)


@pytest.mark.parametrize(
    ("groups", "problem"), [("with groups", "no file has stage"), ("without groups", "is also in")]
)
def test_a_file_that_is_missing_is_told(tmp_path: Path, groups: str, problem: str) -> None:
    paths = write(tmp_path, LAYOUTS["a pipeline's ranks are neighbours"], grouped=groups == "with groups")
    with pytest.raises(TraceError, match=problem):
        read_trace(paths[1:])


def test_files_without_stages_are_told_apart_by_their_groups(tmp_path: Path) -> None:
    """Torch's GPipe names no stages: without groups, its files could be those of one long pipeline."""
    timeline = simulate(build("gpipe", ranks=2, microbatches=3), Costs(forward=0.1, backward=0.2, latency=0.01))
    paths = []
    for ranks in ([0, 2], [1, 3]):

        def job(rank: int, ranks: list[int] = ranks) -> dict[str, Any]:
            return {"rank": ranks[rank], "pg_config": [{"pg_desc": "mesh_pp", "ranks": ranks}]}

        paths += write_kineto_files(tmp_path, timeline, job=job)
    for path in paths:
        text = re.sub("PP:[0-9]F", "Forward ", path.read_text())
        path.write_text(re.sub("PP:[0-9]B", "Backward ", text))
    run = read_trace(paths)
    assert (len(run.replicas), run.schedule.num_ranks) == (2, 2)
    assert "gpipe" in run.recognition.families
