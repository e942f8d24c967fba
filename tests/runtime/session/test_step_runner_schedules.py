"""Promise: any valid schedule trains as one process does, in whatever order it is."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
import torch

from penstock import build, lower, validate
from penstock.lowering import AddCommunication, AddGradReduction, AddReduceWaits, AddSendWaits, DeferReceives
from penstock.runtime import Pipeline
from tests.support.families import FAMILIES
from tests.support.grids import repetitions, small, thinned
from tests.support.models import TASKS
from tests.support.pool import Pools
from tests.support.random_schedules import with_waits
from tests.support.reference import (
    TIMEOUT,
    Case,
    Outcome,
    forward,
    problems_of,
    run_cases,
    split_plainly,
)
from tests.support.runnable_schedules import early, late, random_schedule, randomly_lowered

TASKS_OF_ANY_ORDER = ("mlp", "nested", "transformer", "dropout", "uneven")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("p", [2, 4])
@small(lambda p, seed: p == 4 and seed == 0)
def test_random_valid_schedules_train_as_one_process(pools: Pools, p: int, seed: int) -> None:
    rng = random.Random(100 * p + seed)
    cases = []
    for place in range(repetitions(8, 4)):
        while True:
            schedule = randomly_lowered(rng, random_schedule(rng, p - 1 if p == 4 and place % 2 else p))
            if not validate(schedule, "edge-streams"):
                break
        task = TASKS_OF_ANY_ORDER[place % len(TASKS_OF_ANY_ORDER)]
        cases.append(Case(schedule, task, dtype=rng.choice((torch.float32, torch.float64)), steps=2))
    assert not problems_of(cases, pools(p).run(run_cases, cases))


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_lists_with_waits_train_as_one_process(pools: Pools, p: int) -> None:
    """With those of torch 2.15, with deferred reductions, and with waits anywhere after their sends."""
    rng, cases = random.Random(p), []
    for family in ("1f1b", "interleaved-1f1b", "zbv", "dualpipev"):
        compute = build(family, ranks=p, microbatches=2 * p)
        deferred = lower(compute, (AddGradReduction(), AddReduceWaits(deferred=True), AddCommunication()))
        changed = [lower(compute, torch="2.15"), AddSendWaits()(deferred), with_waits(rng, lower(compute))]
        cases += [Case(schedule, "mlp", steps=2) for schedule in changed]
    assert not problems_of(cases, pools(p).run(run_cases, cases))


# --- orders of communication -----------------------------------------------------------------------


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_receives_may_be_posted_early_or_late(pools: Pools, p: int) -> None:
    cases = []
    for family in ("1f1b", "interleaved-1f1b", "dualpipev"):
        plain = lower(build(family, ranks=p, microbatches=2 * p))
        orders = (early, late, DeferReceives(), DeferReceives(past_sends=True))
        changed = [order(plain) for order in orders]
        cases += [Case(schedule, steps=2) for schedule in changed if not validate(schedule, "edge-streams")]
    assert len(cases) > 9
    cases = thinned(cases, 3)
    assert not problems_of(cases, pools(p).run(run_cases, cases))


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 4)
def test_schedules_that_deadlock_with_blocking_sends_run(pools: Pools, p: int) -> None:
    plain = [lower(build(family, ranks=p, microbatches=m)) for family in FAMILIES for m in (p, 2 * p)]
    changed = [order(schedule) for schedule in plain for order in (late, DeferReceives(past_sends=True))]
    cases = [
        Case(schedule, steps=2)
        for schedule in changed
        if validate(schedule) and not validate(schedule, "edge-streams")
    ][:8]
    assert len(cases) > 3
    cases = thinned(cases, 3)
    assert not problems_of(cases, pools(p).run(run_cases, cases))


def run_forwards_only(case: Case) -> Outcome:
    task, schedule, outcome = TASKS[case.task], case.schedule, Outcome()
    m = schedule.microbatches
    stages = task.stages(schedule.num_stages, case.dtype)
    batch = task.batch(0, m, case.dtype)
    parts = zip(split_plainly(batch.args[0], m), split_plainly(batch.target, m))
    losses = [float(task.loss(forward(stages, (x,), {}), y)) for x, y in parts]
    with closing(Pipeline(dict(enumerate(stages)), schedule, loss=task.loss, timeout=TIMEOUT)) as pipeline:
        for call in (pipeline.step, pipeline.eval, pipeline.step):
            result = call(*batch.args, target=batch.target)
            outcome.losses.append(result.loss)
            if result.losses is None or result.losses.tolist() != losses:
                outcome.problems.append(f"{call.__name__}: {result.losses} is not {losses}")
            if pipeline.step(*batch.args).loss is not None:
                outcome.problems.append("a loss without a target")
        if any(parameter.grad is not None for stage in stages for parameter in stage.parameters()):
            outcome.problems.append("there are gradients")
    return outcome


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_forward_only_schedules_run_by_step_and_by_eval(pools: Pools, p: int) -> None:
    cases = [
        Case(build("forward-only", ranks=p, microbatches=m, stages_per_rank=v), task)
        for m, v, task in ((1, 1, "mlp"), (5, 2, "transformer"), (8, 3, "mlp"))
    ]
    cases.append(Case(lower(cases[1].schedule), "transformer"))
    assert not problems_of(cases, pools(p).run(run_cases, cases, run_forwards_only))
