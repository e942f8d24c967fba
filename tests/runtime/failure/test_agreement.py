"""Promise: ranks that do not agree, or do not all connect, get an error instead of a pipeline."""

from __future__ import annotations

import re
import time
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import penstock
from penstock import StageGraph, build
from penstock.runtime import Pipeline
from tests.support.call_outcomes import SOON, CallOutcome, attempt, print_report
from tests.support.pool import Pool
from tests.support.slowness import slowness


def disagree(what: str) -> CallOutcome:
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
def test_ranks_that_disagree_raise_one_message(failing_pool: Pool, what: str, said: str) -> None:
    outcomes = failing_pool.run(disagree, what)
    print_report(outcomes[0].text)
    assert [each.error for each in outcomes] == ["PipelineError"] * 4
    assert len({each.text for each in outcomes}) == 1
    assert re.search(said, outcomes[0].text)
    assert max(each.seconds for each in outcomes) < (SOON + 5) * slowness()


def disagree_on_losses(options: dict[str, Any], *odd: int) -> CallOutcome:
    """Two of four stages have a loss, 2 and 3; the odd ranks are given other options."""
    graph = StageGraph(4, ((0, 1), (1, 2), (1, 3)))
    schedule = build("gpipe", graph=graph, ranks=4, microbatches=2)
    rank = dist.get_rank()
    own = options if rank in odd else {}
    return attempt(
        lambda: Pipeline({rank: nn.Linear(4, 4)}, schedule, loss=mse_loss, timeout=10, **own).close()
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"average": False}, "average=: rank 2: True; rank 3: False"),
        ({"tokens": len}, "tokens=: rank 2: none; rank 3: given"),
    ],
)
def test_ranks_with_losses_weight_them_alike(failing_pool: Pool, options: dict[str, Any], said: str) -> None:
    outcomes = failing_pool.run(disagree_on_losses, options, 3)
    assert [each.error for each in outcomes] == ["PipelineError"] * 4
    assert said in outcomes[0].text
    assert len({each.text for each in outcomes}) == 1
    assert {each.error for each in failing_pool.run(disagree_on_losses, options, 0, 1)} == {""}


def connect(timeout: float) -> None:
    stages = {stage: nn.Linear(4, 4) for stage in range(4)}
    Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, timeout=timeout).close()


def connect_alone(rank: int) -> CallOutcome | None:
    return attempt(lambda: connect(1)) if dist.get_rank() == rank else None


def connect_later(rank: int) -> CallOutcome:
    connect_alone(rank)
    dist.barrier()
    time.sleep(0.3 if dist.get_rank() == 0 else 0)
    return attempt(lambda: connect(10))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_connects_alone_fails_after_the_timeout(failing_pool: Pool, rank: int) -> None:
    failing_pool.stop()  # for a store that nobody has met at
    outcomes = failing_pool.run(connect_alone, rank)[rank]
    failing_pool.stop()
    print_report(outcomes.text)
    assert outcomes.seconds < SOON * slowness()
    assert outcomes.error == "PipelineError"


@pytest.mark.parametrize(
    "rank",
    [
        0,
        1,
    ],
)
def test_after_a_rank_connected_alone_all_connect_together(failing_pool: Pool, rank: int) -> None:
    failing_pool.stop()
    outcomes = failing_pool.run(connect_later, rank)
    assert [each.error for each in outcomes] == [""] * 4, outcomes
