"""Promise: gradients accumulate from step to step, and eval changes nothing."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

from penstock import Schedule, build
from tests.support.evaluation import run_eval
from tests.support.families import FAMILIES
from tests.support.grids import small, thinned
from tests.support.models import TASKS, WIDTH
from tests.support.pipelines import batch_of, gradients, pipeline_of
from tests.support.pool import Pools
from tests.support.reference import (
    Case,
    Outcome,
    backwards_in_order,
    differences,
    gradients_of,
    problems_of,
    run_cases,
    step_plainly,
)

# --- accumulation --------------------------------------------------------------------------------


def run_twice(case: Case) -> Outcome:
    """Two steps on the same batch without zero_grad."""
    outcome, batch = Outcome(), batch_of(case)
    with closing(pipeline_of(case)) as pipeline:
        pipeline.step(*batch.args, target=batch.target, **batch.kwargs)
        once = gradients(pipeline)
        for parameter in pipeline.parameters():
            parameter.grad = None
        for _ in range(2):
            pipeline.step(*batch.args, target=batch.target, **batch.kwargs)
        stages = TASKS[case.task].stages(case.schedule.num_stages, case.dtype)
        for _ in range(2):
            step_plainly(stages, TASKS[case.task], batch, case.schedule.microbatches)
        found = gradients(pipeline)
        wanted = {
            f"{stage}.{name}": value
            for stage in pipeline.modules
            for name, value in gradients_of(stages[stage]).items()
        }
        outcome.problems += differences(
            "as one process", found, wanted, exact=backwards_in_order(case.schedule)
        )
        doubled = {name: None if value is None else 2 * value for name, value in once.items()}
        # one microbatch: the sum of two equal numbers is exact, and no other number comes in between
        exact = case.schedule.microbatches == 1
        outcome.problems += differences("twice", found, doubled, exact=exact, slack=10)
    return outcome


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_two_steps_without_zero_grad_give_twice_the_gradient(pools: Pools, p: int) -> None:
    cases = [
        Case(build(family, ranks=p, microbatches=m), task)
        for family in ("gpipe", "interleaved-1f1b", "zb-h1", "zbv", "dualpipev")
        for m, task in ((1, "mlp"), (4, "transformer"))
    ]
    cases = thinned(cases, 3)
    assert not problems_of(cases, pools(p).run(run_cases, cases, run_twice))


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_eval_is_correct_and_changes_nothing(pools: Pools, p: int) -> None:
    tasks = ("transformer", "batch-norm", "dropout", "nested", "mlp", "uneven")
    cases = [
        Case(build(family, ranks=p, microbatches=p + 1), tasks[place % len(tasks)])
        for place, family in enumerate(FAMILIES)
    ]
    cases = thinned(cases, 3)
    assert not problems_of(cases, pools(p).run(run_cases, cases, run_eval))


class Drawing(nn.Module):
    """Draws random numbers, training or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y + torch.rand_like(y)


def drawn() -> bool:
    stages = [Drawing() for _ in range(4)]
    with closing(pipeline_of(Case(build("zbv", ranks=2, microbatches=3)), list(stages))) as pipeline:
        before = torch.get_rng_state()
        pipeline.eval(torch.ones(6, WIDTH))
        return torch.equal(before, torch.get_rng_state())


def test_eval_restores_the_random_state(pools: Pools) -> None:
    assert pools(2).run(drawn) == [True, True]


# --- one rank ------------------------------------------------------------------------------------


def alone(family: str, stages: int | None) -> Schedule:
    return build(family, ranks=1, microbatches=3, stages_per_rank=stages)


@pytest.mark.parametrize(
    ("family", "stages"),
    [("1f1b", None), ("gpipe", None), ("interleaved-1f1b", 3), ("zbv", None), ("interleaved-zero-bubble", 4)],
)
@small(lambda family: family in {"1f1b", "zbv"})
def test_one_rank_needs_no_process_group(family: str, stages: int | None) -> None:
    schedule = alone(family, stages)
    for task in ("transformer", "nested", "batch-norm"):
        case = Case(schedule, task)
        assert not run_twice(case).problems
        assert not run_eval(case).problems
