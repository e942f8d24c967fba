"""Promise: with data and tensor parallelism, all ranks learn which rank failed, and none stays blocked."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from typing import Any

import pytest
import torch.distributed as dist

from penstock import build
from penstock.errors import StepFailedError
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.composed_model import Composed, batch_of
from tests.support.composition import pipeline_of, replica_index
from tests.support.grids import small
from tests.support.pool import Pool, Pools
from tests.support.slowness import slowness

TIMEOUT = 6
EFFECTS = {"raise": "ValueError: on purpose", "kill": "has ended", "stop": "does not answer"}


class Fault:
    """A hook that raises, kills or stops its process when it is called for the third time."""

    def __init__(self, effect: str) -> None:
        self.effect, self.calls = effect, 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == 3:
            if self.effect == "raise":
                raise ValueError("on purpose")
            os.kill(os.getpid(), signal.SIGKILL if self.effect == "kill" else signal.SIGSTOP)


def fail_in_a_mesh(
    data: str, replicas: int, tp: int, victim: int, effect: str
) -> tuple[CallOutcome, int | None, CallOutcome]:
    case = Composed(build("1f1b", ranks=2, microbatches=4), data, replicas, tp)
    dist.barrier()  # some processes start late
    pipeline, mesh = pipeline_of(case, timeout=TIMEOUT * 10 if effect == "raise" else TIMEOUT)
    x, y = (all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, 0, 0))
    failures: list[StepFailedError] = []

    def step() -> None:
        try:
            pipeline.step(x, target=y)
        except StepFailedError as error:
            failures.append(error)
            raise

    with closing(pipeline):
        step()
        if dist.get_rank() == victim:
            for module in pipeline.modules.values():
                module.register_forward_pre_hook(Fault(effect))
        return attempt(step), failures[0].world_rank if failures else None, attempt(step)


def assert_named(results: list[Any], victim: int, effect: str) -> None:
    if effect != "raise":
        assert results.pop(victim) is None
    limit = TIMEOUT + SOON if effect == "stop" else SOON
    for outcome, world_rank, _ in results:
        print_report(outcome.text)
        assert outcome.error == "StepFailedError"
        assert world_rank == victim
        assert outcome.seconds < limit * slowness()
        assert EFFECTS[effect] in outcome.text
        if victim:
            assert f"world rank {victim}" in outcome.text
    texts = {outcome.text for outcome, _, _ in results}
    assert len(texts) <= 4  # one for each pipeline


MESHES = [("replicas", 2, 1), ("ddp", 2, 1), ("fsdp", 2, 1), ("", 1, 2)]
CASES = [
    (*mesh, effect, 3 * ((place + turn) % 2))
    for place, mesh in enumerate(MESHES)
    for turn, effect in enumerate(EFFECTS)
]
"""The first or the last rank fails, in turn."""
SMALL = {("fsdp", "raise"), ("", "stop")}


@pytest.mark.parametrize(("data", "replicas", "tp", "effect", "victim"), CASES)
@small(lambda data, effect: (data, effect) in SMALL)
def test_all_ranks_of_a_mesh_learn_which_rank_failed(
    failing_pool: Pool, data: str, replicas: int, tp: int, effect: str, victim: int
) -> None:
    lost = () if effect == "raise" else (victim,)
    results = failing_pool.run(fail_in_a_mesh, data, replicas, tp, victim, effect, lost=lost)
    failing_pool.stop()  # their process groups are aborted
    assert_named(results, victim, effect)


@pytest.mark.parametrize("effect", ["raise", "stop"])
@pytest.mark.full
def test_all_ranks_of_three_dimensions_learn_which_rank_failed(pools: Pools, effect: str) -> None:
    lost = () if effect == "raise" else (5,)
    results = pools(8).run(fail_in_a_mesh, "fsdp", 2, 2, 5, effect, lost=lost)
    pools(8).stop()
    assert_named(results, 5, effect)


def fail_after_a_reduction_began() -> tuple[CallOutcome, CallOutcome]:
    """World rank 0 fails when it waits for its reduction, which the other pipeline has not begun."""
    case = Composed(build("1f1b", ranks=2, microbatches=4), "replicas", 2)
    dist.barrier()  # some processes start late
    pipeline, mesh = pipeline_of(case, timeout=30)
    x, y = (all_.chunk(case.replicas)[replica_index(case, mesh)] for all_ in batch_of(case, 0, 0))

    def fail(**_: object) -> None:
        raise ValueError("on purpose")

    def nap(*_: object) -> None:
        time.sleep(0.3)

    with closing(pipeline):
        pipeline.step(x, target=y)
        if dist.get_rank() == 0:
            pipeline._replication.finish = fail  # type: ignore[method-assign]
        if replica_index(case, mesh) == 1:
            for module in pipeline.modules.values():
                module.register_forward_pre_hook(nap)
        failed = attempt(lambda: pipeline.step(x, target=y))
        return failed, attempt(lambda: pipeline.step(x, target=y))


def test_a_reduction_that_only_some_replicas_began_is_never_mixed_with_the_next(failing_pool: Pool) -> None:
    results = failing_pool.run(fail_after_a_reduction_began)
    failing_pool.stop()
    for failed, retried in results:
        assert "on purpose" in failed.text
        assert retried.error == "PipelineError"
        assert "was in a collective when a step failed, and has aborted its process groups" in retried.text
