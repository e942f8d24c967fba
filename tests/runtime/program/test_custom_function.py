"""Promise: user functions run in place of every kind of action but sends and receives."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from penstock import Kind, Overlap, Schedule, build, lower
from penstock.errors import PipelineError
from penstock.lowering import SplitBackward
from penstock.runtime import ActionCall, Pipeline
from tests.support.grids import small, thinned
from tests.support.pool import Pools
from tests.support.reference import (
    TIMEOUT,
    Case,
    Outcome,
    differences,
    gradients_of,
    problems_of,
    run_cases,
    train_in_pipeline,
    train_plainly,
)
from tests.support.runnable_schedules import random_schedule

COUNTED = ("F", "I", "W", "B", "UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B")


def run_with_functions(case: Case) -> Outcome:
    """Functions for all kinds that count themselves; overlapped pairs run their backward first."""
    counts: Counter[str] = Counter()
    problems: list[str] = []
    wanted = train_plainly(
        case.task, case.optimizer, case.dtype, 1, case.schedule.num_stages, case.schedule.microbatches
    )

    def count(custom: ActionCall) -> None:
        counts[str(custom.action)] += 1
        if custom.action.kind is Kind.REDUCE_GRAD:
            stage = custom.action.parts[0].stage
            got = gradients_of(custom.stages[stage].module)
            problems.extend(differences("when reduced", got, wanted.gradients[0][stage], exact=False))
        custom.run()

    def swap(custom: ActionCall) -> None:
        counts[str(custom.action)] += 1
        if [part.action for part in custom.parts] != list(custom.action.parts):
            problems.append(f"{custom.action} has the parts {custom.parts}")
        for part in reversed(custom.parts):
            part.run()

    outcome = train_in_pipeline(case, {**dict.fromkeys(COUNTED[:-1], count), "OVERLAP_F_B": swap})
    rank = torch.distributed.get_rank()
    right: Counter[str] = Counter()
    for step in (
        lower(case.schedule).ranks[rank] if case.schedule.level == "compute" else case.schedule.ranks[rank]
    ):
        if step.kind.spec.other_end is None:
            right.update({str(step), *map(str, step.parts)})
    if counts != right:
        outcome.problems.append(f"called {counts - right} too often and {right - counts} too seldom")
    outcome.problems += problems
    return outcome


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 4)
def test_functions_replace_every_kind_of_action_also_inside_overlaps(pools: Pools, p: int) -> None:
    built = [build(family, ranks=p, microbatches=2 * p) for family in ("dualpipev", "zbv", "1f1b", "zb-h1")]
    built += [lower(SplitBackward()(built[0])), random_schedule(random.Random(p), p)]
    cases = [Case(schedule, steps=1) for schedule in thinned(built, 2)]
    assert any(isinstance(step, Overlap) for step in built[0].ranks[0])
    assert not problems_of(cases, pools(p).run(run_cases, cases, run_with_functions))


def run_one_function(case: tuple[str, Schedule]) -> Outcome:
    kind, schedule = case
    called = []

    def function(custom: ActionCall) -> None:
        called.append(custom.action)
        custom.run()

    outcome = train_in_pipeline(Case(schedule, steps=1), {kind: function})
    if not called:
        outcome.problems.append("not called")
    return outcome


def test_a_function_for_a_single_kind_is_called(pools: Pools) -> None:
    cases = [(kind, build("dualpipev", ranks=2, microbatches=5)) for kind in COUNTED]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_one_function))


def error_messages() -> list[str]:
    messages = []
    for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "G"):
        with pytest.raises(PipelineError) as caught:
            Pipeline(
                {0: torch.nn.Identity(), 1: torch.nn.Identity()},
                "1f1b",
                microbatches=2,
                functions={kind: lambda _: None},
                timeout=TIMEOUT,
            ).close()
        messages.append(str(caught.value))
    return messages


def test_sends_and_receives_cannot_be_replaced(pools: Pools) -> None:
    for messages in pools(2).run(error_messages):
        assert len(messages) == 5
        assert all("a function cannot replace" in text and "REDUCE_GRAD" in text for text in messages)
