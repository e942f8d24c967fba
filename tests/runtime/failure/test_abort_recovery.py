"""Promise: after a failed step the next step is correct on all ranks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from penstock.errors import StepFailedError
from penstock.runtime import ActionCall, Pipeline
from penstock.runtime.session import step_runner
from penstock.runtime.session.step_runner import abort_step
from tests.support.faults import Fault, faulty_pipeline
from tests.support.grids import small
from tests.support.pool import Pool, Pools

# --- after the failure ---------------------------------------------------------------------------


def fail_and_check(family: str) -> None:
    with faulty_pipeline(family, 4) as one:
        parts = [part for module in one.pipeline.modules.values() for part in module.modules()]
        parts[-1].eval()
        flags = [part.training for part in parts]
        one.assert_correct()
        for call in (one.step, one.step, one.step, one.evaluate):
            assert one.run_with_faults(Fault(2, "2F2"), Fault(1, "1F3"), call=call).error == "StepFailedError"
            assert [part.training for part in parts] == flags
            assert not [part for part in parts if "forward" in part.__dict__]
        one.assert_correct()
        assert one.evaluate() == one.loss


@pytest.mark.parametrize("family", ["1f1b", "zbv"])
@small(lambda family: family == "zbv")
def test_after_failures_the_modules_are_as_before_and_steps_are_right(failing_pool: Pool, family: str) -> None:
    failing_pool.run(fail_and_check, family)


# --- Ctrl-C while a message is waited for --------------------------------------------------------


def press_while_waiting() -> str:
    """Rank 0 is interrupted while it waits for rank 1, which takes a nap."""
    x, y = torch.randn(2, 4, 4)
    naps = [0.0]

    def slow(custom: ActionCall) -> None:
        time.sleep(naps[0])
        custom.run()

    functions: dict[Any, Any] = {"B": slow} if dist.get_rank() == 1 else {}
    stages = {stage: nn.Linear(4, 4) for stage in range(2)}
    with Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, functions=functions, timeout=10) as pipeline:
        naps[0] = 0.4
        try:
            if dist.get_rank() == 0:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks of the pool ignore it
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            pipeline.step(x, target=y)
            pipeline.step(x, target=y)
        except BaseException as error:  # noqa: BLE001 -- an interrupt is what is looked for
            outcome = type(error).__name__
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        naps[0] = 0.0
        pipeline.step(x, target=y)  # all ranks are connected again
    return outcome


def test_ctrl_c_while_waiting_fails_on_all_ranks_and_the_next_step_works(pools: Pools) -> None:
    assert pools(2).run(press_while_waiting) == ["KeyboardInterrupt", "StepFailedError"]


class SecondInterrupt(KeyboardInterrupt):
    """It can be referred to weakly."""


def test_ctrl_c_while_a_failure_is_handled_leaves_no_cycle() -> None:
    interrupts = [SecondInterrupt()]
    reference = weakref.ref(interrupts[0])

    def press_again(*arguments: Any) -> BaseException:
        if interrupts:
            raise interrupts.pop()
        return abort_step(*arguments)

    pipeline = Pipeline([nn.Linear(4, 4)], "1f1b", microbatches=2, loss=mse_loss)
    raised = ""
    gc.disable()
    try:
        with mock.patch.object(step_runner, "abort_step", press_again):
            pipeline.step(torch.ones(2, 4), target=torch.ones(2, 3))
    except SecondInterrupt as error:
        raised = type(error).__name__
    finally:
        gc.enable()
    assert raised == "SecondInterrupt"
    assert reference() is None


def merge_unequal() -> str:
    stages = {stage: nn.Linear(4, 4) for stage in range(2)}
    rows = [torch.ones(1, 2, 4), torch.ones(1, 3, 4)]
    with Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, timeout=10) as pipeline:
        try:
            pipeline.eval(rows, return_outputs=True)
        except StepFailedError as error:
            return f"{error.rank}: {error}"
    return "nothing"


def test_outputs_that_cannot_be_merged_fail_on_all_ranks(pools: Pools) -> None:
    outcomes = pools(2).run(merge_unequal)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].startswith("1: ")
    assert "outputs are merged along dimension 0 and must agree in all others" in outcomes[0]
