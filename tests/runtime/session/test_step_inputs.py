"""Promise: a rank splits what its stages use, and weights losses by microbatches or by tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import build
from penstock.errors import PipelineError
from penstock.runtime.batch import Batcher
from penstock.runtime.session.step_runner import StepInputBuilder
from penstock.runtime.stage.microbatch import StepInputs

X, Y = torch.ones(8, 3), torch.ones(8)


def step_input_builder(rank: int, *, replicas: int = 1, **options: Any) -> StepInputBuilder:
    """That of a rank of two for four microbatches, without processes."""
    schedule = build("1f1b", ranks=2, microbatches=4)
    replication = SimpleNamespace(count=replicas, total=lambda local, _device: local * replicas)
    config: Any = SimpleNamespace(
        schedule=schedule, modules={rank: None}, losses={1: torch.sum}, device=None, replication=replication
    )
    given: dict[str, Any] = {"tokens": None, "average": True, **options}
    return StepInputBuilder(config, Batcher(4), **given)


def inputs(rank: int, target: Tensor | None = Y, *, replicas: int = 1, **options: Any) -> StepInputs:
    """The inputs of one step."""
    builder = step_input_builder(rank, replicas=replicas, **options)
    return builder.build((X,), {"mask": X}, target, scale=1.0, training=True, keep_outputs=False)


def test_a_rank_splits_only_what_its_stages_use() -> None:
    first, last = inputs(0), inputs(1)
    assert ([len(args) for args in first.args[0]], last.args) == ([1] * 4, {})
    assert [part["mask"].shape[0] for part in last.kwargs] == [2] * 4
    assert (first.targets, len(last.targets or ())) == (None, 4)


def test_rows_are_kept_for_the_last_stage_to_compare() -> None:
    first, last = inputs(0), inputs(1)
    assert (first.rows, first.target_rows) == ({"args[0]": 8, 'kwargs["mask"]': 8}, {})
    assert (last.rows, last.target_rows) == ({'kwargs["mask"]': 8}, {"target": 8})


def test_losses_are_weighted_by_microbatches_or_tokens() -> None:
    target = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1])
    assert inputs(1).weights == [1 / 4] * 4
    assert inputs(1, average=False).weights == [1] * 4
    assert inputs(1, target, tokens=torch.sum).weights == [0.4, 0.2, 0, 0.4]
    assert inputs(1, target, tokens=torch.sum, replicas=2).weights == [0.4, 0.2, 0, 0.4]


def test_microbatches_of_different_sizes_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(10, 3)
    for options in ({}, {"tokens": len}, {"average": False}):
        builder = step_input_builder(1, **options)
        for _ in range(2):
            builder.build((), {}, x, scale=1.0, training=True, keep_outputs=False)
        builder.build((), {}, x[:8], scale=1.0, training=True, keep_outputs=False)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("10 rows are split into 4 microbatches of 3 and 2 rows, and each microbatch counts")
    assert "tokens=len" in text


@pytest.mark.parametrize("target", [torch.zeros(8), torch.tensor([9, 1, 1, 1, 1, 1, -2, 1])])
def test_token_counts_must_give_a_mean(target: Tensor) -> None:
    with pytest.raises(PipelineError, match="a positive total and no negative count"):
        inputs(1, target, tokens=torch.sum)


def test_a_step_needs_gradients() -> None:
    with torch.no_grad(), pytest.raises(PipelineError, match="gradients are disabled here: use eval"):
        inputs(0)
