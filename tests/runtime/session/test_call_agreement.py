"""Promise: ranks that make different calls are told at once, with both calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from penstock import StageGraph, build
from penstock.runtime import GradScaler, Pipeline
from penstock.runtime.session import agreement as call_agreement
from penstock.runtime.session.agreement import COMPLETED
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.faults import FaultyPipeline, faulty_pipeline
from tests.support.grids import small
from tests.support.pool import Pool
from tests.support.slowness import slowness

Call = Callable[[FaultyPipeline], Any]


def step_in_accumulate(one: FaultyPipeline) -> None:
    with one.pipeline.accumulate():
        one.step()


def step_in_profile(one: FaultyPipeline) -> None:
    with one.pipeline.profile():
        one.step()


def step_with_scaler(one: FaultyPipeline) -> None:
    GradScaler(one.pipeline, init_scale=1024.0)
    try:
        one.step()
    finally:
        one.pipeline.scaler = None


CALLS: dict[str, Call] = {
    "step": FaultyPipeline.step,
    "eval": FaultyPipeline.evaluate,
    "clip": lambda one: one.pipeline.clip_grad_norm_(1.0),
    "clip at 2": lambda one: one.pipeline.clip_grad_norm_(2.0),
    "clip the maximum": lambda one: one.pipeline.clip_grad_norm_(1.0, torch.inf),
    "clip strictly": lambda one: one.pipeline.clip_grad_norm_(1.0, error_if_nonfinite=True),
    "unscale": lambda one: one.pipeline.all_reduce_max(lambda: torch.ones(1)),
    "accumulate": step_in_accumulate,
    "profile": step_in_profile,
    "scaler": step_with_scaler,
}


def mix(family: str, odd: int, own: str, others: str) -> CallOutcome:
    """One rank makes another call than the others; then all make the same."""
    with faulty_pipeline(family, 4, timeout=120) as one:
        one.step()
        dist.barrier()
        call = CALLS[own if dist.get_rank() == odd else others]
        outcome = attempt(lambda: call(one))
        dist.barrier()
        one.assert_correct()
    return outcome


CASES = [
    ("1f1b", 0, "step", "eval", "call: rank 0: step(); rank 1: eval()"),
    ("1f1b", 0, "eval", "step", "call: rank 0: eval(); rank 1: step()"),
    ("zbv", 3, "eval", "step", "call: rank 2: step(); rank 3: eval()"),
    (
        "1f1b",
        2,
        "clip",
        "step",
        "rank 2: clip_grad_norm_()",
    ),
    ("1f1b", 3, "step", "clip", "call: rank 2: clip_grad_norm_(); rank 3: step()"),
    ("1f1b", 0, "clip at 2", "clip", "max_norm: rank 0: 2.0; rank 1: 1.0"),
    ("zbv", 3, "clip the maximum", "clip", "norm_type: rank 2: 2.0; rank 3: inf"),
    ("1f1b", 2, "clip strictly", "clip", "error_if_nonfinite: rank "),
    ("1f1b", 0, "unscale", "clip", "call: rank 0: unscale_() of a GradScaler; rank 1: clip_grad_norm_()"),
    ("1f1b", 0, "profile", "step", "call: rank 0: profile(); rank 1: step()"),
    (
        "zbv",
        0,
        "accumulate",
        "step",
        "gradients: rank 0: not reduced yet, inside accumulate(); rank 1",
    ),
    ("1f1b", 3, "scaler", "step", "loss scale: rank 2: 1.0; rank 3: 1024.0"),
]
SMALL = {("step", "eval"), ("clip", "step"), ("clip at 2", "clip"), ("scaler", "step")}


@pytest.mark.parametrize(("family", "odd", "own", "others", "said"), CASES)
@small(lambda own, others: (own, others) in SMALL)
def test_different_calls_are_told_at_once(
    failing_pool: Pool, family: str, odd: int, own: str, others: str, said: str
) -> None:
    outcomes = failing_pool.run(mix, family, odd, own, others)
    print_report("\n".join(each.text for each in outcomes))
    assert {each.error for each in outcomes} <= {"StepFailedError", "PipelineError"}, outcomes
    assert max(each.seconds for each in outcomes) < SOON * slowness()
    texts = [each.text for each in outcomes if "do not make the same call" in each.text]
    assert texts
    assert any(said in text for text in texts)


def step_without_messages(odd: int) -> CallOutcome:
    """Four stages that exchange nothing; one rank calls eval."""
    rank = dist.get_rank()
    schedule = build("gpipe", graph=StageGraph(4, ()), ranks=4, microbatches=2)
    x = torch.ones(4, 2)
    with Pipeline({rank: nn.Linear(2, 2)}, schedule, loss=mse_loss, timeout=120) as pipeline:
        pipeline.step(x, x, x, x, target=x)
        call = pipeline.eval if rank == odd else pipeline.step
        outcome = attempt(lambda: call(x, x, x, x, target=x))
        dist.barrier()
        pipeline.step(x, x, x, x, target=x)
    return outcome


@pytest.mark.parametrize("odd", [0, 2])
def test_ranks_that_exchange_no_messages_compare_their_calls_too(failing_pool: Pool, odd: int) -> None:
    outcomes = failing_pool.run(step_without_messages, odd)
    assert {each.error for each in outcomes} == {"StepFailedError"}
    assert {f"rank {odd}: eval()" in each.text for each in outcomes} == {True}


def test_the_longest_announcement_fits_and_a_longer_one_is_never_sent() -> None:
    call: dict[str, object] = {
        "call": "unscale_() of a GradScaler",
        COMPLETED: 10**15,
        "inside profile()": False,
        "gradients": "not reduced yet, inside accumulate()",
        "loss scale": -sys.float_info.max,
    }
    clip: dict[str, object] = {
        "call": "clip_grad_norm_()",
        COMPLETED: 10**15,
        "inside profile()": False,
        "max_norm": -sys.float_info.max,
        "norm_type": -sys.float_info.max,
        "error_if_nonfinite": False,
    }
    assert len(call_agreement.announcement(call)) == call_agreement._BYTES
    assert len(call_agreement.announcement(clip)) == call_agreement._BYTES
    with pytest.raises(AssertionError, match="the peers receive 256 bytes"):
        call_agreement.announcement(call | {"more": "x" * 100})
