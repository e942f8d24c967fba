"""Promise: the loss is the mean over the tokens of the batch, and a batch that requires a gradient gets it."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch

import penstock
from penstock import Schedule, build
from tests.support.families import FAMILIES
from tests.support.grids import small
from tests.support.models import TASKS, Batch
from tests.support.pipelines import batch_of, gradients, pipeline_of
from tests.support.pool import Pools
from tests.support.reference import (
    Case,
    Outcome,
    differences,
    forward,
    gradients_of,
    problems_of,
    run_cases,
    step_plainly,
)

# --- losses --------------------------------------------------------------------------------------


def weighted(schedule: Schedule) -> Outcome:
    """The loss of targets with unequal numbers of tokens is the mean over all tokens of the batch."""
    outcome, task = Outcome(), TASKS["padded"]
    case = Case(schedule, "padded", dtype=torch.float64)
    batch = batch_of(case)
    stages = task.stages(schedule.num_stages, case.dtype)
    with closing(pipeline_of(case, stages)) as pipeline:
        result = pipeline.step(*batch.args, target=batch.target)
        evaluated = pipeline.eval(*batch.args, target=batch.target)
        outcome.losses += [result.loss, evaluated.loss]
        found = gradients(pipeline)
    plain = task.stages(schedule.num_stages, case.dtype)
    whole = task.loss(forward(plain, batch.args, {}), batch.target)
    whole.backward()  # type: ignore[no-untyped-call]
    for loss in outcome.losses:
        if loss is None or abs(loss - float(whole)) > 1e-12:
            outcome.problems.append(f"loss {loss}, not {float(whole)}")
    wanted = {
        f"{stage}.{name}": g for stage in pipeline.modules for name, g in gradients_of(plain[stage]).items()
    }
    outcome.problems += differences("gradient of the whole batch", found, wanted, exact=False)
    return outcome


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_losses_weighted_by_tokens_are_the_mean_over_the_whole_batch(pools: Pools, p: int) -> None:
    cases = [build(family, ranks=p, microbatches=5) for family in ("1f1b", "zbv", "looped-bfs", "gpipe")]
    assert not problems_of(cases, pools(p).run(run_cases, cases, weighted))


def run_without_tokens(schedule: Schedule) -> Outcome:
    """One microbatch has nothing but padding."""
    outcome, task = Outcome(), TASKS["padded"]
    case = Case(schedule, "padded", dtype=torch.float64)
    batch = batch_of(case)
    batch.target[:2] = -100
    plain = task.stages(schedule.num_stages, case.dtype)
    whole = task.loss(forward(plain, batch.args, {}), batch.target)
    whole.backward()  # type: ignore[no-untyped-call]
    with closing(pipeline_of(case)) as pipeline:
        result = pipeline.step(*batch.args, target=batch.target)
        found = gradients(pipeline)
    if result.loss is None or not abs(result.loss - float(whole)) < 1e-12:
        outcome.problems.append(f"loss {result.loss}, not {float(whole)}")
    wanted = {
        f"{stage}.{name}": g for stage in pipeline.modules for name, g in gradients_of(plain[stage]).items()
    }
    outcome.problems += differences("gradient", found, wanted, exact=False)
    return outcome


def test_a_microbatch_without_tokens_has_no_weight(pools: Pools) -> None:
    cases = [build(family, ranks=2, microbatches=4) for family in ("1f1b", "zbv")]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_without_tokens))


# --- inputs that want gradients ------------------------------------------------------------------


def run_input_gradient(case: Case) -> Outcome:
    outcome, batch, m = Outcome(), batch_of(case), case.schedule.microbatches
    x, plain_x = (batch.args[0].clone().requires_grad_() for _ in range(2))
    with closing(pipeline_of(case)) as pipeline:
        for _ in range(2):
            pipeline.step(x, target=batch.target)
        stages = TASKS[case.task].stages(case.schedule.num_stages, case.dtype)
        for _ in range(2):
            step_plainly(stages, TASKS[case.task], Batch((plain_x,), batch.target), m)
        wanted = plain_x.grad if 0 in pipeline.modules else None
        outcome.problems += differences("x", {"grad": x.grad}, {"grad": wanted}, exact=True)
    return outcome


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_a_batch_that_requires_grad_gets_its_gradient(pools: Pools, p: int) -> None:
    cases = [
        Case(build(family, ranks=p, microbatches=5), task)
        for family, task in (("1f1b", "mlp"), ("zb-h1", "uneven"), ("zbv", "nested"), ("looped-bfs", "mlp"))
    ]
    assert not problems_of(cases, pools(p).run(run_cases, cases, run_input_gradient))


# --- the end of a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "zbv"])
def test_the_rank_that_ends_last_has_the_first_or_the_last_stage(family: str) -> None:
    """So no rank could start its next step earlier if it did not wait for all ranks."""
    schedule = build(family, ranks=4, microbatches=8)
    timeline = penstock.simulate(schedule, penstock.Costs(forward=1, backward_input=1, backward_weight=1))
    ends = np.split(timeline.end, np.cumsum([len(row) for row in schedule.ranks])[:-1])
    hosts = schedule.placement.stage_to_rank
    assert max(ends[hosts[0]].max(), ends[hosts[-1]].max()) == timeline.makespan
