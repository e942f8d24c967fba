"""Promise: `schedule=` is a family, a file or a Schedule, and an error says what it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from penstock import build
from penstock.errors import PipelineError
from penstock.ir.graph import StageGraph
from penstock.runtime.config import resolve_schedule

TWO = build("1f1b", ranks=2, microbatches=4)


def layers(count: int) -> dict[int, nn.Module]:
    return {stage: nn.Linear(2, 2) for stage in range(count)}


def test_a_name_a_file_and_a_schedule_give_the_same(tmp_path: Path) -> None:
    TWO.write(tmp_path / "two.csv")
    for given in ("1f1b", tmp_path / "two.csv", str(tmp_path / "two.csv"), TWO):
        resolved = resolve_schedule(given, layers(2), 2, 4)
        assert resolved.renamed(TWO.name) == TWO


def test_a_family_has_as_many_stages_per_rank_as_there_are_modules() -> None:
    assert resolve_schedule("interleaved-1f1b", layers(6), 2, 4).num_stages == 6
    assert resolve_schedule("interleaved-1f1b", list(layers(3).values()), 2, 4).num_stages == 6


def test_a_family_takes_the_graph_of_split_stages() -> None:
    graph = StageGraph.parse("0>2,1>2")
    stages = layers(3)
    vars(stages[0])["stage_graph"] = graph
    resolved = resolve_schedule("gpipe", stages, 3, 2)
    assert resolved.graph == graph
    with pytest.raises(PipelineError, match="feed each other as 0 -> 2, 1 -> 2, but the schedule"):
        resolve_schedule(build("gpipe", ranks=3, microbatches=2), stages, 3, 2)


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "message"),
    [
        (TWO, 3, None, "is for 2 ranks, but the process group has 3"),
        (TWO, 2, 5, "is for 4 microbatches, but microbatches=5 is given"),
        ("1f1b", 2, None, "is the name of a family: give microbatches= as well"),
        (4, 2, 4, r"or a Schedule \(given int\)"),
    ],
)
def test_an_argument_that_does_not_fit_is_an_error(
    schedule: Any, ranks: int, microbatches: int | None, message: str
) -> None:
    with pytest.raises(PipelineError, match=message):
        resolve_schedule(schedule, layers(2), ranks, microbatches)
