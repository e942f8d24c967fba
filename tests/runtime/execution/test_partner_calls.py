"""Promise: replicas that make different calls, or are trained differently, are told at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.optim import SGD

from penstock.runtime import GradScaler, Pipeline
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.grids import small
from tests.support.pool import Pools
from tests.support.slowness import slowness

X = torch.arange(32.0).reshape(8, 4) / 32


def pipeline_of(pp: int, **options: Any) -> tuple[Pipeline, int]:
    """One of two replicas of a pipeline, and its number."""
    mesh = init_device_mesh("cpu", (2, pp), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    stages: dict[int, nn.Module] = {stage: nn.Linear(4, 4) for stage in range(pp)}
    given: dict[str, Any] = {"loss": mse_loss, "timeout": 60, "group": mesh["pp"], "replicas": mesh["dp"]}
    return Pipeline(stages, "1f1b", microbatches=4, **given, **options), mesh.get_local_rank("dp")


def step(pipeline: Pipeline) -> object:
    return pipeline.step(X, target=X).loss


def step_in_accumulate(pipeline: Pipeline) -> object:
    with pipeline.accumulate():
        return step(pipeline)


def scaled_step(pipeline: Pipeline) -> object:
    GradScaler(pipeline, init_scale=8.0)
    try:
        return step(pipeline)
    finally:
        pipeline.scaler = None


CALLS: dict[str, Callable[[Pipeline], object]] = {
    "step": step,
    "eval": lambda pipeline: pipeline.eval(X, target=X).loss,
    "clip": lambda pipeline: pipeline.clip_grad_norm_(1.0),
    "clip at 2": lambda pipeline: pipeline.clip_grad_norm_(2.0),
    "accumulate": step_in_accumulate,
    "scaled": scaled_step,
}


def make_different_calls(pp: int, first: str, second: str) -> tuple[CallOutcome, list[Any]]:
    """The two replicas make these calls; then both make a step again."""
    pipeline, replica = pipeline_of(pp)
    with closing(pipeline):
        losses = [step(pipeline)]
        outcome = attempt(lambda: CALLS[second if replica else first](pipeline))
        losses.append(step(pipeline))
    return outcome, losses


CASES = [
    ("step", "eval", "call: rank "),
    ("accumulate", "step", "not reduced yet, inside accumulate(); rank "),
    ("clip", "clip at 2", "max_norm: rank 0: 1.0; rank "),
    ("step", "clip", "call: rank "),
    ("scaled", "step", "loss scale: rank 0: 8.0; rank "),
]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(("first", "second", "said"), CASES)
@small(lambda pp, first: (pp, first) in {(1, "accumulate"), (2, "step"), (2, "clip")})
def test_different_calls_of_replicas_are_told_at_once(
    pools: Pools, pp: int, first: str, second: str, said: str
) -> None:
    outcomes = pools(2 * pp).run(make_different_calls, pp, first, second)
    for outcome, losses in outcomes:
        print_report(outcome.text)
        assert outcome.error in {"StepFailedError", "PipelineError"}
        assert "train the same stages" in outcome.text
        assert outcome.seconds < SOON * slowness()
        assert losses[0] == losses[1]
    assert any(said in outcome.text for outcome, _ in outcomes)


def diverge() -> list[CallOutcome]:
    pipeline, replica = pipeline_of(2)
    with closing(pipeline):
        optimizer = SGD(pipeline.parameters(), lr=0.1 * (1 + replica))
        outcomes = [attempt(lambda: step(pipeline))]
        optimizer.step()
        return [*outcomes, attempt(lambda: step(pipeline))]


def test_replicas_that_are_trained_differently_are_noticed(pools: Pools) -> None:
    for before, after in pools(4).run(diverge):
        assert before.error == ""
        assert "values of " in after.text
        assert "replicas must be trained alike" in after.text


def evaluate_one_replica() -> list[Any]:
    """Only one of two replicas evaluates without a target, and is profiled."""
    pipeline, replica = pipeline_of(2)
    with closing(pipeline):
        found: list[Any] = [step(pipeline)]
        if replica:
            pipeline.eval(X)
            with pipeline.profile():
                found.append(step(pipeline))
        else:
            found.append(step(pipeline))
        dist.barrier()
        return [*found, step(pipeline)]


def test_one_replica_may_evaluate_without_a_target_and_be_profiled(pools: Pools) -> None:
    for losses in pools(4).run(evaluate_one_replica):
        assert losses == [losses[0]] * 3


def weight_differently(options: dict[str, Any]) -> CallOutcome:
    own = options if dist.get_rank() < 2 else {}
    return attempt(partial(pipeline_of, 2, **own))


@pytest.mark.parametrize("options", [{"average": False}, {"tokens": len}])
def test_replicas_weight_their_losses_alike(pools: Pools, options: dict[str, Any]) -> None:
    (name,) = options
    for outcome in pools(4).run(weight_differently, options):
        assert outcome.error == "PipelineError"
        assert f"{name}=: rank 1: " in outcome.text
