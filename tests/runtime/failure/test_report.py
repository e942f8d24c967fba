"""Promise: a report names the rank that is the cause, its place and its reason, also outside of actions."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import SGD

from penstock.runtime import GradScaler, Pipeline, grad_scaler
from penstock.runtime.data_parallel import gradient_norm
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.faults import faulty_pipeline
from tests.support.pool import Pool
from tests.support.slowness import slowness

# --- calls outside of steps ----------------------------------------------------------------------


def fail_in_collective(name: str, odd: int) -> list[CallOutcome]:
    """One rank fails in a call that all ranks make; then all make it again, and a step."""
    with faulty_pipeline("1f1b", 4, timeout=120) as one:
        one.step()
        scaler, optimizer = GradScaler(one.pipeline), SGD(one.pipeline.parameters(), lr=0.0)
        owner, part = {"clip": (gradient_norm, "_norms"), "unscale": (grad_scaler, "local")}[name]

        def call() -> None:
            if name == "clip":
                one.pipeline.clip_grad_norm_(1.0)
            else:
                scaler.unscale_(optimizer)

        broken = mock.Mock(side_effect=LookupError("no such gradient"))
        dist.barrier()
        with mock.patch.object(owner, part, broken if dist.get_rank() == odd else getattr(owner, part)):
            failed = attempt(call)
        dist.barrier()
        again = attempt(lambda: one.pipeline.clip_grad_norm_(1.0))
        one.pipeline.scaler = None
        one.assert_correct()
        return [failed, again]


@pytest.mark.parametrize(("name", "odd"), [("clip", 0), ("clip", 2), ("unscale", 3)])
def test_an_exception_in_a_collective_is_named_by_all_ranks(failing_pool: Pool, name: str, odd: int) -> None:
    outcomes = failing_pool.run(fail_in_collective, name, odd)
    for rank, (failed, again) in enumerate(outcomes):
        print_report(failed.text)
        assert again.error == ""
        if rank == odd:
            assert failed.error == "LookupError"
        else:
            assert failed.error == "PipelineError"
            assert f"failed on rank {odd}\n  LookupError: no such gradient" in failed.text
        assert failed.seconds < SOON * slowness()


# --- after the last action -----------------------------------------------------------------------


def fail_after_actions() -> CallOutcome:
    stages = {stage: nn.Linear(4, 4) for stage in range(4)}
    rows = [torch.ones(1, 2, 4), torch.ones(1, 3, 4)]
    with Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, timeout=20) as pipeline:
        return attempt(lambda: pipeline.step(rows, target=rows, return_outputs=True))


def test_a_failure_after_the_last_action_is_not_blamed_on_it(failing_pool: Pool) -> None:
    for outcome in failing_pool.run(fail_after_actions):
        assert outcome.text.startswith("step 1 failed on rank 3, after its last action\n")
        assert outcome.where == (3, None, None, None, "exception")
