"""Promise: wrong arguments raise the same error on every rank; unusual valid uses work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from penstock import Placement, Schedule, build
from penstock.errors import PenstockError
from penstock.runtime import Pipeline
from tests.support.evaluation import run_eval
from tests.support.models import TASKS, WIDTH
from tests.support.pipelines import batch_of, pipeline_of
from tests.support.pool import Pools
from tests.support.reference import (
    Case,
    problems_of,
    run_cases,
)


def message_of(make: Callable[[], object]) -> str:
    try:
        made = make()
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(made, Pipeline):
        made.close()
    return ""


def layers(count: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def wrong_pipelines() -> dict[str, str]:
    rank = dist.get_rank()
    two = build("1f1b", ranks=2, microbatches=4)
    short: dict[str, Any] = {"timeout": 10.0}
    return {
        "modules": message_of(lambda: Pipeline(layers(3), two, **short)),
        "mapping": message_of(lambda: Pipeline(dict.fromkeys((5, 6), layers(1)[0]), two, **short)),
        "ranks": message_of(lambda: Pipeline(layers(1), build("1f1b", ranks=4, microbatches=4), **short)),
        "microbatches": message_of(lambda: Pipeline(layers(1), two, microbatches=5, **short)),
        "no microbatches": message_of(lambda: Pipeline(layers(1), "1f1b", **short)),
        "uneven": message_of(lambda: Pipeline(dict(enumerate(layers(3))), "1f1b", microbatches=4, **short)),
        "other schedules": message_of(
            lambda: Pipeline(layers(1), build(("1f1b", "gpipe")[rank], ranks=2, microbatches=4), **short)
        ),
        "other microbatches": message_of(
            lambda: Pipeline(layers(1), build("1f1b", ranks=2, microbatches=4 + rank), **short)
        ),
        "other placements": message_of(
            lambda: Pipeline(
                dict(enumerate(layers(4))),
                (build("zbv", ranks=2, microbatches=4), build("interleaved-1f1b", ranks=2, microbatches=4))[
                    rank
                ],
                **short,
            )
        ),
    }


WRONG_PIPELINES = {
    "modules": ("PipelineError", "3 stage modules", "has 1 stage of"),
    "mapping": ("5, 6", "never run"),
    "ranks": ("PipelineError", "for 4 ranks", "has 2"),
    "microbatches": ("PipelineError", "for 4 microbatches", "microbatches=5"),
    "no microbatches": ("PipelineError", "microbatches="),
    "uneven": ("PipelineError", "3 stages", "2 ranks"),
    "other schedules": ("PipelineError", "do not agree", "schedule: rank 0", "rank 0", "rank 1"),
    "other microbatches": ("PipelineError", "do not agree", "microbatches: rank 0: 4; rank 1: 5"),
    "other placements": ("PipelineError", "do not agree"),
}


def test_invalid_pipelines_are_rejected_on_every_rank(pools: Pools) -> None:
    for rank, messages in enumerate(pools(2).run(wrong_pipelines)):
        for name, words in WRONG_PIPELINES.items():
            assert all(word in messages[name] for word in words), f"rank {rank}, {name}: {messages[name]!r}"


def wrong_step(name: str) -> tuple[str, float | None]:
    """The error message of the step, and the loss of a correct step of a new pipeline after it."""
    schedule = build("1f1b", ranks=2, microbatches=4)
    x, y = torch.ones(8, WIDTH), torch.zeros(8, WIDTH)
    options: dict[str, Any] = {"loss": TASKS["mlp"].loss, "timeout": 5.0}
    if name == "no loss":
        options["loss"] = None
    elif name == "many losses":
        options["loss"] = lambda output, target: (output - target).sum(1)
    elif name == "loss is no tensor":
        options["loss"] = lambda _output, _target: 1.0
    elif name == "no tokens":
        options["tokens"] = lambda _target: 0
    pipeline = pipeline_of(Case(schedule), None, **options)
    with closing(pipeline), torch.set_grad_enabled(name != "no grad"):
        message = message_of(
            {
                "few rows": lambda: pipeline.step(x[:3], target=y[:3]),
                "few targets": lambda: pipeline.step(x, target=y[:3]),
                "short list": lambda: pipeline.step([x, x], target=y),
                "module fails": lambda: pipeline.step(x[:, :3], target=y),
            }.get(name, lambda: pipeline.step(x, target=y))
        )
    with closing(pipeline_of(Case(schedule))) as pipeline:
        return message, pipeline.step(x, target=y).loss


WRONG_STEPS = {
    "no grad": ("use eval()",),
    "many losses": ("one element", "shape [2]", "step 1 failed on rank 1"),
    "loss is no tensor": ("one element", "float"),
    "module fails": ("step 1 failed on rank 0", "shapes"),
    "no loss": ("needs a loss",),
    "few rows": ("has 3 along dimension 0 for 4 microbatches",),
    "few targets": ("has 3 along dimension 0 for 4 microbatches",),
    "short list": ("has 2 entries for 4 microbatches",),
    "no tokens": ("needs a positive total",),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_a_wrong_step_is_rejected_on_every_rank_with_the_same_message(pools: Pools, name: str) -> None:
    answers = pools(2).run(wrong_step, name)
    for rank, (message, loss) in enumerate(answers):
        assert all(word in message for word in WRONG_STEPS[name]), f"rank {rank}: {message!r}"
        assert loss is not None


def test_a_closed_pipeline_connects_and_runs_again(pools: Pools) -> None:
    assert pools(2).run(closed_and_used) == [True, True]


def closed_and_used() -> bool:
    case = Case(build("zbv", ranks=2, microbatches=4))
    pipeline, batch = pipeline_of(case), batch_of(case)
    losses = []
    for _ in range(3):
        losses.append(pipeline.step(*batch.args, target=batch.target).loss)
        pipeline.close()
        pipeline.close()
    return len(set(losses)) == 1


def test_several_pipelines_run_side_by_side(pools: Pools) -> None:
    assert pools(2).run(side_by_side) == [True, True]


def side_by_side() -> bool:
    cases = [Case(build(family, ranks=2, microbatches=4)) for family in ("1f1b", "zbv")]
    pipelines = [pipeline_of(case) for case in cases]
    batches = [batch_of(case) for case in cases]
    found = [
        [each.step(*batch.args, target=batch.target).loss for each, batch in zip(pipelines, batches)]
        for _ in range(3)
    ]
    for each in pipelines:
        each.close()
    return all(losses == found[0] for losses in found)


def test_a_custom_placement_with_neighbours_on_one_rank_evaluates(pools: Pools) -> None:
    placement = Placement((1, 1, 0, 0, 1))
    rows = ["2F0 3F0 2F1 3F1 3B0 2B0 3B1 2B1", "0F0 1F0 0F1 1F1 4F1 4F0 4B1 4B0 1B1 0B1 1B0 0B0"]
    cases = [Case(Schedule(rows, placement, 2), "mlp")]
    assert not problems_of(cases, pools(2).run(run_cases, cases, run_eval))
