"""After a failure all ranks are in step again; ranks that do not fit together never get so far."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import penstock
from penstock.errors import StepFailedError
from penstock.runtime import Custom, Pipeline
from tests.support.faults import SOON, Fault, Told, attempt, bench, show
from tests.support.pool import Pool, Pools
from tests.support.slowness import slowness

pytestmark = pytest.mark.xdist_group("failures")

# --- after the failure ---------------------------------------------------------------------------


def fail_and_look(family: str) -> None:
    with bench(family, 4) as one:
        parts = [part for module in one.pipeline.modules.values() for part in module.modules()]
        parts[-1].eval()
        flags = [part.training for part in parts]
        one.assert_right()
        for call in (one.step, one.step, one.step, one.evaluate):
            assert one.suffer(Fault(2, "2F2"), Fault(1, "1F3"), call=call).error == "StepFailedError"
            assert [part.training for part in parts] == flags
            assert not [part for part in parts if "forward" in part.__dict__]
        one.assert_right()
        assert one.evaluate() == one.loss


@pytest.mark.parametrize("family", ["1f1b", "zbv"])
def test_after_failures_the_modules_are_as_before_and_steps_are_right(failing_pool: Pool, family: str) -> None:
    failing_pool.run(fail_and_look, family)


# --- connecting ----------------------------------------------------------------------------------


def disagree(what: str) -> Told:
    odd = dist.get_rank() == 2
    stages = {stage: nn.Linear(4, 4) for stage in range(4)}
    microbatches = 8 if odd and what == "microbatches" else 4
    family = "gpipe" if odd and what == "schedule" else "1f1b"
    version = "0.0.odd" if odd and what == "version" else penstock.__version__
    with mock.patch.object(penstock, "__version__", version):
        return attempt(lambda: Pipeline(stages, family, microbatches=microbatches, loss=mse_loss, timeout=10))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("microbatches", "microbatches: rank 0, 1, 3: 4; rank 2: 8"),
        ("schedule", r"schedule: rank 0, 1, 3: 1f1b \(\w+\); rank 2: \S+ \(\w+\)"),
        ("version", r"version of penstock: rank 0, 1, 3: \S+; rank 2: 0.0.odd"),
    ],
)
def test_ranks_that_disagree_are_refused_with_one_message(failing_pool: Pool, what: str, said: str) -> None:
    told = failing_pool.run(disagree, what)
    show(told[0].text)
    assert [each.error for each in told] == ["PipelineError"] * 4
    assert len({each.text for each in told}) == 1
    assert re.search(said, told[0].text)
    assert max(each.seconds for each in told) < (SOON + 5) * slowness()


def connect(timeout: float) -> None:
    stages = {stage: nn.Linear(4, 4) for stage in range(4)}
    Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, timeout=timeout).close()


def connect_alone(rank: int) -> Told | None:
    return attempt(lambda: connect(1)) if dist.get_rank() == rank else None


def connect_later(rank: int) -> Told:
    connect_alone(rank)
    dist.barrier()
    time.sleep(0.3 if dist.get_rank() == 0 else 0)
    return attempt(lambda: connect(10))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_connects_alone_is_told_so_after_the_timeout(failing_pool: Pool, rank: int) -> None:
    failing_pool.stop()  # for a store that nobody has met at
    told = failing_pool.run(connect_alone, rank)[rank]
    failing_pool.stop()
    show(told.text)
    assert told.seconds < SOON * slowness()
    assert told.error == "PipelineError"


@pytest.mark.parametrize(
    "rank",
    [
        0,
        1,
    ],
)
def test_after_a_rank_connected_alone_all_connect_together(failing_pool: Pool, rank: int) -> None:
    failing_pool.stop()
    told = failing_pool.run(connect_later, rank)
    assert [each.error for each in told] == [""] * 4, told


# --- Ctrl-C while a message is waited for --------------------------------------------------------


def press_while_waiting() -> str:
    """Rank 0 is interrupted while it waits for rank 1, which takes a nap."""
    x, y = torch.randn(2, 4, 4)
    naps = [0.0]

    def slow(custom: Custom) -> None:
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
            told = type(error).__name__
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        naps[0] = 0.0
        pipeline.step(x, target=y)  # all ranks are in step again
    return told


def test_ctrl_c_while_waiting_is_told_to_all_and_the_next_step_works(pools: Pools) -> None:
    assert pools(2).run(press_while_waiting) == ["KeyboardInterrupt", "StepFailedError"]


def merge_unequal() -> str:
    stages = {stage: nn.Linear(4, 4) for stage in range(2)}
    rows = [torch.ones(1, 2, 4), torch.ones(1, 3, 4)]
    with Pipeline(stages, "1f1b", microbatches=2, loss=mse_loss, timeout=10) as pipeline:
        try:
            pipeline.eval(rows, return_outputs=True)
        except StepFailedError as error:
            return f"{error.rank}: {error}"
    return "nothing"


def test_outputs_that_cannot_be_merged_are_told_to_all(pools: Pools) -> None:
    told = pools(2).run(merge_unequal)
    assert told[0] == told[1]
    assert told[0].startswith("1: ")
    assert "outputs are merged along dimension 0 and agree in all others" in told[0]
