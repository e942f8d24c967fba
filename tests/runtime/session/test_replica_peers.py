"""Promise: replicas that make different calls, or are trained differently, are told at once."""

from __future__ import annotations

import copy
import os
import sys
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
from penstock.runtime.failure import process_detector
from penstock.runtime.session import replica_peers
from penstock.runtime.session.agreement import announcement
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.grids import small
from tests.support.pool import Pools
from tests.support.slowness import slowness

X = torch.arange(32.0).reshape(8, 4) / 32


def pipeline_of(pp: int, dp: int = 2, **options: Any) -> tuple[Pipeline, int]:
    """One of the replicas of a pipeline, and its number."""
    mesh = init_device_mesh("cpu", (dp, pp), mesh_dim_names=("dp", "pp"))
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


def evaluate_on_one_of_four() -> CallOutcome:
    pipeline, replica = pipeline_of(1, dp=4)
    with closing(pipeline):
        step(pipeline)
        return attempt(lambda: CALLS["eval" if replica == 2 else "step"](pipeline))


def test_all_of_many_replicas_are_told_the_same(pools: Pools) -> None:
    outcomes = pools(4).run(evaluate_on_one_of_four)
    assert {each.error for each in outcomes} == {"PipelineError"}
    assert len({each.text for each in outcomes}) == 1
    assert "call: rank 0, 1, 3: step(); rank 2: eval()" in outcomes[0].text


def freeze(pipeline: Pipeline) -> None:
    for parameter in pipeline.parameters():
        parameter.requires_grad = False
        break


def replace_parameters(pipeline: Pipeline) -> None:
    for module in pipeline.modules.values():
        module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)


CHANGES: dict[str, Callable[[Pipeline], None]] = {"frozen": freeze, "replaced": replace_parameters}


def change_one_replica(change: str) -> list[CallOutcome]:
    """Parameters of one replica are changed, and then those of the other too."""
    pipeline, replica = pipeline_of(2)
    outcomes = []
    with closing(pipeline):
        step(pipeline)
        for changed in (1, 0):
            if replica == changed:
                CHANGES[change](pipeline)
            outcomes.append(attempt(lambda: step(pipeline)))
    return outcomes


@pytest.mark.parametrize(
    ("change", "said"),
    [("frozen", "1 of 2 are trained"), ("replaced", "of stage 0: new or replaced")],
)
@small(lambda change: change == "frozen")
def test_parameters_that_only_one_replica_changes_are_told(pools: Pools, change: str, said: str) -> None:
    outcomes = pools(4).run(change_one_replica, change)
    for changed, both in outcomes:
        print_report(changed.text)
        assert "train the same stages" in changed.text
        assert both.error == ""
    assert any(said in changed.text for changed, _ in outcomes)


def leave(pp: int) -> list[CallOutcome]:
    """The processes of the second replica exit by themselves after the first step, the others go on."""
    pipeline, replica = pipeline_of(pp)
    step(pipeline)
    if replica:
        process_detector._close()  # as at the end of the interpreter
        os._exit(0)
    with closing(pipeline):
        return [attempt(lambda: step(pipeline)) for _ in range(2)]


@pytest.mark.parametrize("pp", [1, 2])
@small(lambda pp: pp == 2)
def test_a_replica_that_has_exited_is_named(pools: Pools, pp: int) -> None:
    lost = tuple(range(pp, 2 * pp))
    for failed, again in pools(2 * pp).run(leave, pp, lost=lost)[:pp]:
        print_report(failed.text + again.text)
        assert failed.error == "StepFailedError"
        assert any(f"step 2 failed: world rank {rank} has ended" in failed.text for rank in lost)
        assert "it has exited" in failed.text
        assert again.error == "PipelineError"
        assert any(f"world rank {rank} has ended" in again.text for rank in lost)
        assert again.seconds < SOON * slowness()


def fail_on_one_replica() -> list[CallOutcome]:
    """One of two pipelines of one rank raises while the other is in the reduction or on its way to it."""
    pipeline, replica = pipeline_of(1)
    with closing(pipeline):
        step(pipeline)
        if replica:
            pipeline.modules[0].register_forward_pre_hook(lambda *_: 1 // 0)
        return [attempt(lambda: step(pipeline)) for _ in range(2)]


def test_a_failure_in_a_pipeline_of_one_rank_reaches_its_replicas(pools: Pools) -> None:
    outcomes = pools(2).run(fail_on_one_replica)
    pools(2).stop()  # their process groups are aborted
    for failed, _ in outcomes:
        print_report(failed.text)
        assert failed.error == "StepFailedError"
        assert "ZeroDivisionError" in failed.text
        assert failed.seconds < SOON * slowness()
    assert {again.error for _, again in outcomes} <= {"PipelineError", "StepFailedError"}


def test_a_long_name_of_a_parameter_fits_into_an_announcement() -> None:
    for name in ("layer." * 50, "\N{GREEK SMALL LETTER BETA}" * 200, '"' * 200):
        short = replica_peers._shortened(name)
        assert name.endswith(short)
        assert short
    call: dict[str, object] = {
        "call": "step()",
        "completed steps": 10**15,
        "gradients": "not reduced yet, inside accumulate()",
        "loss scale": -sys.float_info.max,
        "parameters": f"{10**6} of {10**6} are trained (digest of shapes {'f' * 12})",
        "values of a parameter": f"{short}: checksum {2**62}",
    }
    assert len(announcement(call, replica_peers._BYTES)) == replica_peers._BYTES


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
        assert "values of a parameter: rank " in after.text
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
