"""Promise: hooks fire once a microbatch, and weights may be shared, frozen, cast and compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Schedule, build
from penstock.lowering import SplitBackward
from tests.support.grids import small
from tests.support.models import TASKS
from tests.support.pipelines import batch_of, gradient_problems, pipeline_of
from tests.support.pool import Pools
from tests.support.reference import (
    Case,
    Outcome,
    problems_of,
    run_cases,
    step_plainly,
)

# --- hooks ---------------------------------------------------------------------------------------


def run_hooks(case: Case) -> Outcome:
    """How often the hooks of each parameter fire in two steps."""
    outcome, fired = Outcome(), Counter[str]()
    m = case.schedule.microbatches
    with closing(pipeline_of(case)) as pipeline:
        wanted: Counter[str] = Counter()
        for stage, module in pipeline.modules.items():
            for name, parameter in module.named_parameters():
                key = f"{stage}.{name}"
                hooked: Any = parameter
                hooked.register_post_accumulate_grad_hook(_counting(fired, key))
                wanted[key] = 2 * m
        for step in range(2):
            batch = batch_of(case, step)
            pipeline.step(*batch.args, target=batch.target, **batch.kwargs)
    if fired != wanted:
        outcome.problems.append(f"fired {fired - wanted} too often, {wanted - fired} too seldom")
    return outcome


def _counting(fired: Counter[str], key: str) -> Callable[[Tensor], None]:
    def count(_: Tensor) -> None:
        fired[key] += 1

    return count


def schedules_for_hooks() -> list[Schedule]:
    built = [build(family, ranks=2, microbatches=3) for family in ("1f1b", "zb-h1", "zbv", "dualpipev")]
    return [*built, SplitBackward()(built[0])]


@pytest.mark.parametrize("task", ["mlp", "transformer", "repeated", "checkpointed", "batch-norm"])
@small(lambda task: task in {"mlp", "repeated", "checkpointed"})
def test_hooks_of_parameters_fire_once_for_each_microbatch(pools: Pools, task: str) -> None:
    cases = [Case(schedule, task) for schedule in schedules_for_hooks()]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_hooks))


def test_hooks_of_a_weight_used_outside_its_layer_fire_once_for_each_microbatch(pools: Pools) -> None:
    cases = [Case(schedule, "tied") for schedule in schedules_for_hooks()]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_hooks))


def test_weights_used_outside_their_layer_get_the_same_bits(pools: Pools) -> None:
    cases = [Case(schedule, "tied thrice", steps=1, demands_bits=True) for schedule in schedules_for_hooks()]
    assert not problems_of(cases, pools(2).run(run_cases, cases))


# --- weights that change their part --------------------------------------------------------------


def run_shared_by_stages(case: tuple[str, Schedule]) -> Outcome:
    """The first and the last stage are on one rank and share a weight, or a whole layer."""
    what, schedule = case
    outcome, task, m = Outcome(), TASKS["mlp"], schedule.microbatches
    made: list[list[Any]] = [task.stages(schedule.num_stages, torch.float64) for _ in range(2)]
    for stages in made:
        if what == "weight":
            stages[-1][0].weight = stages[0][0].weight
        else:
            stages[-1][0] = stages[0][0]
    stages, plain = made
    with closing(pipeline_of(Case(schedule), stages)) as pipeline:
        if len(list(pipeline.parameters())) != len({id(weight) for weight in pipeline.parameters()}):
            outcome.problems.append("a weight appears twice")
        for step in range(2):
            batch = task.batch(step, m, torch.float64)
            pipeline.step(*batch.args, target=batch.target)
            step_plainly(plain, task, batch, m)
        outcome.problems += gradient_problems(pipeline, stages, plain, exact=False, slack=10)
    return outcome


def test_stages_of_one_rank_may_share_weights(pools: Pools) -> None:
    built = [build(family, ranks=2, microbatches=5) for family in ("zbv", "v-min", "dualpipev")]
    cases = [(what, schedule) for what in ("weight", "layer") for schedule in built]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_shared_by_stages))


def run_thawing(schedule: Schedule) -> Outcome:
    """Other stages are frozen in every step."""
    outcome, task, m = Outcome(), TASKS["transformer"], schedule.microbatches
    stages, plain = (task.stages(schedule.num_stages, torch.float32) for _ in range(2))
    with closing(pipeline_of(Case(schedule, "transformer"), stages)) as pipeline:
        for step in range(4):
            for made in (stages, plain):
                for index, stage in enumerate(made):
                    stage.requires_grad_((index + step) % 2 == 0 or step == 3)
                    stage.zero_grad()
            batch = task.batch(step, m, torch.float32)
            pipeline.step(*batch.args, target=batch.target)
            step_plainly(plain, task, batch, m)
            outcome.problems += gradient_problems(pipeline, stages, plain, f"step {step} ", exact=True)
    return outcome


def test_stages_may_be_frozen_and_unfrozen_between_steps(pools: Pools) -> None:
    cases = [build(family, ranks=2, microbatches=3) for family in ("1f1b", "zb-h1", "zbv", "dualpipev")]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_thawing))


def run_autocast(schedule: Schedule) -> Outcome:
    outcome, task, m = Outcome(), TASKS["transformer"], schedule.microbatches
    stages, plain = (task.stages(schedule.num_stages, torch.float32) for _ in range(2))
    with closing(pipeline_of(Case(schedule, "transformer"), stages)) as pipeline:
        for step in range(2):
            batch = task.batch(step, m, torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                pipeline.step(*batch.args, target=batch.target)
            with torch.autocast("cpu", torch.bfloat16):
                step_plainly(plain, task, batch, m)
        outcome.problems += gradient_problems(pipeline, stages, plain, exact=False, slack=1e4)
    return outcome


def test_steps_run_under_autocast(pools: Pools) -> None:
    cases = [build(family, ranks=2, microbatches=3) for family in ("1f1b", "zb-h1", "zbv")]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_autocast))


# --- compiled stages -----------------------------------------------------------------------------


def run_compiled(case: tuple[str, Schedule]) -> Outcome:
    backend, schedule = case
    outcome, task = Outcome(), TASKS["mlp"]
    stages = task.stages(schedule.num_stages, torch.float32)
    compiled: list[Any] = [
        torch.compile(stage, backend=backend) if index % 2 else stage for index, stage in enumerate(stages)
    ]
    plain = task.stages(schedule.num_stages, torch.float32)
    with closing(pipeline_of(Case(schedule), compiled)) as pipeline:
        for step in range(2):
            batch = task.batch(step, schedule.microbatches, torch.float32)
            pipeline.step(*batch.args, target=batch.target)
            step_plainly(plain, task, batch, schedule.microbatches)
        outcome.problems += gradient_problems(pipeline, stages, plain, exact=False)
    torch._dynamo.reset()
    return outcome


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.full
def test_compiled_stages_train_with_split_backwards(pools: Pools, backend: str) -> None:
    cases = [(backend, build(family, ranks=2, microbatches=3)) for family in ("zbv", "1f1b")]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_compiled))
