"""Promise: a rank holds as many activations as simulated, and its number of buffers is bounded."""

from __future__ import annotations

import random
from contextlib import closing
from unittest import mock

import pytest
import torch

from penstock import Costs, build, simulate
from penstock.runtime import Pipeline
from penstock.runtime.transport import channels
from tests.support.families import FAMILIES
from tests.support.grids import small
from tests.support.models import TASKS
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT, Case, problems_of, run_cases
from tests.support.runnable_schedules import random_schedule


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_peak_activations_are_those_of_the_simulator(pools: Pools, p: int) -> None:
    cases = [Case(build(family, ranks=p, microbatches=m), steps=1) for family in FAMILIES for m in (p + 1,)]
    cases += [Case(random_schedule(random.Random(seed), p), steps=1) for seed in range(4)]
    found = pools(p).run(run_cases, cases)
    assert not problems_of(cases, found)
    for place, case in enumerate(cases):
        simulated = simulate(case.schedule, Costs(activation=1)).peak_memory
        assert [rank[place].peak_live for rank in found] == list(simulated), case


def peak_buffers_of_long_messages(family: str, microbatches: tuple[int, ...]) -> list[int]:
    """The same if messages of any length are long."""
    with mock.patch.object(channels, "UNLIMITED_BYTES", 0):
        return peak_buffers(family, microbatches)


def peak_buffers(family: str, microbatches: tuple[int, ...]) -> list[int]:
    """The most buffers at once in the second step, for each number of microbatches."""
    found = []
    for m in microbatches:
        schedule = build(family, ranks=torch.distributed.get_world_size(), microbatches=m)
        task = TASKS["mlp"]
        stages = dict(enumerate(task.stages(schedule.num_stages, torch.float32)))
        with closing(Pipeline(stages, schedule, loss=task.loss, timeout=TIMEOUT)) as pipeline:
            for step in range(2):
                batch = task.batch(step, m, torch.float32)
                pipeline.step(*batch.args, target=batch.target)
            found.append(pipeline.peak_buffers)
    return found


@pytest.mark.parametrize("family", ["1f1b", "zb-h1", "zbv", "v-half", "interleaved-1f1b"])
@pytest.mark.parametrize("p", [2, 4])
@small(lambda p, family: (p, family) == (2, "1f1b"))
def test_buffers_do_not_grow_with_the_number_of_microbatches(pools: Pools, p: int, family: str) -> None:
    for rank, found in enumerate(pools(p).run(peak_buffers, family, (16, 64))):
        few, many = found
        assert many <= few, f"rank {rank}: {few} buffers for 16 microbatches, {many} for 64"


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_gpipe_has_buffers_for_its_live_activations_and_few_more(pools: Pools, p: int) -> None:
    for rank, (found,) in enumerate(pools(p).run(peak_buffers_of_long_messages, "gpipe", (64,))):
        held = 64 if rank else 0
        assert found <= held + 16, f"rank {rank}"
