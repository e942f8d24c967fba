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

M = 4


class WeightedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output * self.weight, target)


def observe(package: str) -> tuple[torch.Tensor | None, torch.Tensor | None, int, list[str]]:
    """The gradients of the batch and of the loss, the outputs kept by the stage, the labels in the profiler."""
    case = Case(package, "GPipe")
    loss = WeightedLoss()
    schedule = case.pipelining.ScheduleGPipe(case.stages[0], M, loss_fn=loss)
    x, y = batch(0, 2 * M)
    x.requires_grad_()
    case.step(schedule)
    loss.zero_grad()
    with torch.profiler.profile(acc_events=True) as profile:
        schedule.step(*((x,) if dist.get_rank() == 0 else ()), **({"target": y} if dist.get_rank() else {}))
    labels = {
        event.name for event in profile.events() if event.name.startswith(("PP:", "Forward", "Backward "))
    }
    return x.grad, loss.weight.grad, len(case.stages[0].output_chunks), sorted(labels)


def test_gradients_of_the_batch_kept_outputs_and_labels_differ_as_documented(pools: Pools) -> None:
    torchs, ours = (pools(2).run(observe, package) for package in (TORCH, OURS))
    torch.testing.assert_close(torchs[0][0], M * ours[0][0])
    torch.testing.assert_close(torchs[1][1], M * ours[1][1])
    assert [kept for _, _, kept, _ in torchs] == [0, M]
    assert [kept for _, _, kept, _ in ours] == [0, 0]
    for rank in range(2):
        assert torchs[rank][3] == [f"{kind} {k}" for kind in ("Backward", "Forward") for k in range(M)]
        assert {f"PP:{rank}{kind}{k}" for kind in "FB" for k in range(M)} <= set(ours[rank][3])


def two_schedules() -> list[list[float]]:
    """The losses of two schedule objects over the same stage, in turn."""
    case, found = Case(OURS, "GPipe"), []
    schedules = [case.pipelining.Schedule1F1B(case.stages[0], m, loss_fn=functional.mse_loss) for m in (4, 2)]
    for schedule in (*schedules, *schedules):
        case.step(schedule)
        found.append([float(loss) for loss in case.losses])
    return found


def test_several_schedules_can_have_the_same_stages(pools: Pools) -> None:
    losses = pools(2).run(two_schedules)[1]
    assert [len(each) for each in losses] == [4, 2, 4, 2]
    assert losses[:2] == losses[2:]
    assert sum(losses[0]) / 4 == pytest.approx(sum(losses[1]) / 2)


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
