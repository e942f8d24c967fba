"""Tests of user-defined schedules: all ways to write them train, and torch runs them from our files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist
from torch.nn import functional

import penstock
from penstock import Costs
from tests.oracles.torch_schedules import VERSION
from tests.support.grids import small
from tests.support.pipelining_schedules import OWN, OneByOne
from tests.support.pipelining_scripts import (
    CPU,
    OURS,
    TORCH,
    Run,
    assert_alike,
    loop,
    modules,
    train_alone,
    train_custom,
)
from tests.support.pool import Pools


def train_own(place: int) -> Run | None:
    own: Any = OWN[place]

    def make(stages: list[Any]) -> Any:
        given = stages[0] if own is OneByOne else stages
        return own(given, own.microbatches, loss_fn=functional.mse_loss)

    return train_custom(make, own.stages_on_ranks, own.microbatches)


@pytest.mark.parametrize("place", range(len(OWN)), ids=[own.__name__ for own in OWN])
@small(lambda place: place < 4)
def test_a_custom_schedule_trains_as_one_process(pools: Pools, place: int) -> None:
    own: Any = OWN[place]
    assert_alike(pools(4).run(train_own, place), train_alone(len(own.stages_on_ranks), own.microbatches))


# --- files -----------------------------------------------------------------------------------------


def train_from_file(package: str, path: str, form: str, m: int, hosts: tuple[int, ...]) -> Run:
    """A schedule object that has nothing but a file."""
    schedules: Any = importlib.import_module(f"{package}.schedules")
    pipelining: Any = importlib.import_module(package)
    own = [stage for stage, rank in enumerate(hosts) if rank == dist.get_rank()]
    parts = {stage: modules(len(hosts))[stage] for stage in own}
    stages = [pipelining.PipelineStage(part, stage, len(hosts), CPU) for stage, part in parts.items()]
    schedule = schedules._PipelineScheduleRuntime(stages, m, loss_fn=functional.mse_loss)
    schedule._load_csv(path, format=form)
    return loop(schedule, parts, len(hosts) - 1, 2 * m)


def searched(ranks: int, m: int) -> penstock.Schedule:
    costs = Costs(forward=1, backward_input=1.5, backward_weight=0.7)
    return penstock.search(
        ranks=ranks, microbatches=m, stages_per_rank=2, costs=costs, live_limit=5, moves=5000
    ).schedule


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["zb-h1", "v-half", "interleaved-1f1b", "interleaved-overlap", "search"])
@small(lambda name, form: (name, form) == ("v-half", "compute_comms"))
def test_torch_trains_the_same_from_our_files(pools: Pools, tmp_path: Path, name: str, form: str) -> None:
    m = 4
    schedule = searched(4, m) if name == "search" else penstock.build(name, ranks=4, microbatches=m)
    if form == "compute_comms":
        schedule = penstock.lower(schedule, torch=VERSION)
    schedule.write(tmp_path / "schedule.csv")
    wanted = train_alone(schedule.num_stages, m)
    # with the sends and receives that torch adds to these pairs, its step does not end
    blocks = (name, form) == ("interleaved-overlap", "compute_only")
    for package in (OURS,) if blocks else (TORCH, OURS):
        path, hosts = str(tmp_path / "schedule.csv"), schedule.placement.stage_to_rank
        assert_alike(pools(4).run(train_from_file, package, path, form, m, hosts), wanted)
