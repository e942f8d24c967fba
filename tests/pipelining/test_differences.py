"""Promise: the differences from torch that docs/migrate.md lists are as it says, on both sides."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from penstock.errors import StepFailedError
from tests.support.pipelining_overrides import Case
from tests.support.pipelining_scripts import OURS, TORCH, batch
from tests.support.pool import Pools

pytestmark = [pytest.mark.xdist_group("ranks-2"), pytest.mark.usefixtures("one_thread")]

M = 4


def observe(package: str) -> tuple[torch.Tensor | None, int, list[str]]:
    """The gradient of the batch, the outputs kept by the stage, and the labels in the profiler."""
    case = Case(package, "GPipe")
    schedule = case.schedule()
    x, y = batch(0, 2 * M)
    x.requires_grad_()
    case.step(schedule)
    with torch.profiler.profile(acc_events=True) as profile:
        schedule.step(*((x,) if dist.get_rank() == 0 else ()), **({"target": y} if dist.get_rank() else {}))
    labels = {
        event.name for event in profile.events() if event.name.startswith(("PP:", "Forward", "Backward "))
    }
    return x.grad, len(case.stages[0].output_chunks), sorted(labels)


def test_gradients_of_the_batch_kept_outputs_and_labels_differ_as_documented(pools: Pools) -> None:
    torchs, ours = (pools(2).run(observe, package) for package in (TORCH, OURS))
    torch.testing.assert_close(torchs[0][0], M * ours[0][0])
    assert [kept for _, kept, _ in torchs] == [0, M]
    assert [kept for _, kept, _ in ours] == [0, 0]
    for rank in range(2):
        assert torchs[rank][2] == [f"{kind} {k}" for kind in ("Backward", "Forward") for k in range(M)]
        assert {f"PP:{rank}{kind}{k}" for kind in "FB" for k in range(M)} <= set(ours[rank][2])


def mismatch() -> str:
    pipelining: Any = importlib.import_module(OURS)
    rank = dist.get_rank()
    stage = pipelining.PipelineStage(nn.Linear(8, 8 - 2 * (1 - rank)), rank, 2, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=functional.mse_loss)
    x, y = batch(0, 4)
    with pytest.raises(StepFailedError) as raised:
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {}))
    return str(raised.value)


def test_shapes_that_do_not_match_are_named_on_every_rank(pools: Pools) -> None:
    for message in pools(2).run(mismatch):
        assert "(2x6 and 8x8)" in message
