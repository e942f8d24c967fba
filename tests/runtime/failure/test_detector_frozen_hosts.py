"""Promise: a process that is stopped, also the host of the job's store, is named within the timeout and 5 s."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from penstock.errors import PipelineError
from penstock.runtime import Pipeline
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.faults import Fault, faulty_pipeline
from tests.support.grids import small
from tests.support.pool import Pool
from tests.support.slowness import slowness

TIMEOUT = 4


def survivors(pool: Pool, victim: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of the ranks that are not stopped."""
    results = pool.run(function, *args, lost=(victim,))
    assert results.pop(victim) is None
    return results


def stop_in_a_step(fault: Fault) -> list[CallOutcome]:
    dist.barrier()  # some processes start late
    with faulty_pipeline("1f1b", 4, timeout=TIMEOUT) as one:
        failed = one.run_with_faults(fault)
        return [failed, attempt(one.step)]


@pytest.mark.parametrize("victim", [0, 2])
@small(lambda victim: victim == 0)  # which hosts the store
def test_a_stopped_rank_is_named_by_all_and_no_call_hangs(failing_pool: Pool, victim: int) -> None:
    results = survivors(failing_pool, victim, stop_in_a_step, Fault(victim, f"{victim}F2", "stop"))
    reports = {failed.text for failed, _ in results}
    for failed, retried in results:
        print_report(failed.text)
        assert failed.where == (victim, None, None, None, "timeout")
        assert f"rank {victim} does not answer\n  no heartbeat from its process (pid" in failed.text
        assert failed.seconds < (TIMEOUT + SOON) * slowness()
        assert retried.error == "PipelineError"
        assert retried.seconds < (TIMEOUT + SOON) * slowness()
    assert len(reports) == 1


def stop_between_steps(victim: int) -> list[CallOutcome]:
    dist.barrier()  # some processes start late
    with faulty_pipeline("1f1b", 4, timeout=TIMEOUT) as one:
        one.step()
        dist.barrier()
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)
        return [attempt(one.step), attempt(lambda: one.pipeline.clip_grad_norm_(1.0))]


@pytest.mark.full
def test_a_host_of_the_store_that_stops_between_steps_is_named(failing_pool: Pool) -> None:
    for failed, _ in survivors(failing_pool, 0, stop_between_steps, 0):
        assert "rank 0 does not answer" in failed.text
        assert failed.seconds < (TIMEOUT + SOON) * slowness()


def connect_to_a_stopped_store() -> tuple[str, float]:
    with Pipeline({stage: nn.Linear(4, 4) for stage in range(4)}, "1f1b", microbatches=4, loss=mse_loss) as one:
        one.step(torch.randn(4, 4), target=torch.randn(4, 4))
    dist.barrier()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5)
    begin = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        Pipeline({stage: nn.Linear(4, 4) for stage in range(4)}, "1f1b", microbatches=4, timeout=TIMEOUT)
    return str(caught.value), time.monotonic() - begin


def test_a_pipeline_is_not_created_if_the_store_does_not_answer(failing_pool: Pool) -> None:
    for text, seconds in survivors(failing_pool, 0, connect_to_a_stopped_store):
        assert "rank 0 does not answer: no heartbeat from its process (pid" in text
        assert seconds < (TIMEOUT + SOON) * slowness()
