"""Stages trained by a pipeline of one rank, compared with the same microbatches one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock import Schedule
from penstock.lowering import SplitBackward
from penstock.runtime import Pipeline
from tests.support.reference import differences, forward, gradients_of, split_plainly

__all__ = ["WIDTH", "M", "batch", "schedules", "train_both"]

WIDTH, M = 6, 4

Loss = Callable[..., Tensor]
MakeStage = Callable[[int, int], nn.Module]
"""Makes stage `index` of `count`."""


def schedules(*names: str) -> list[Schedule]:
    """The families, with several stages on the rank where they can, as they are and split."""
    built = []
    for name in names:
        per_rank = 2 if name.startswith(("interleaved", "looped")) else None
        schedule = penstock.build(name, ranks=1, microbatches=M, stages_per_rank=per_rank)
        split = SplitBackward()(schedule).renamed(f"{name} split")
        built += [schedule] if split == schedule else [schedule, split]
    return built


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * M, WIDTH, generator=generator), torch.randn(2 * M, WIDTH, generator=generator)


def made(make: MakeStage, count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make(index, count) for index in range(count)]


def train_plainly(stages: Sequence[nn.Module], x: Tensor, y: Tensor, loss: Loss) -> list[float]:
    losses = []
    for rows, target in zip(split_plainly(x, M), split_plainly(y, M)):
        value = loss(forward(stages, (rows,), {}), target)
        (value / M).backward()  # type: ignore[no-untyped-call]
        losses.append(float(value.detach()))
    return losses


def train_both(
    make: MakeStage,
    schedule: Schedule,
    *,
    steps: int = 2,
    loss: Loss = mse_loss,
    **options: Any,
) -> list[str]:
    """Train in both ways; gives what differs in losses, gradients and buffers."""
    stages, plain = made(make, schedule.num_stages), made(make, schedule.num_stages)
    problems = []
    with closing(Pipeline(stages, schedule, loss=loss, **options)) as pipeline:
        for step in range(steps):
            x, y = batch(step)
            torch.manual_seed(step)
            wanted = train_plainly(plain, x.clone(), y, loss)
            torch.manual_seed(step)
            found = pipeline.step(x, target=y).losses
            assert found is not None
            if not torch.allclose(found, torch.tensor(wanted, dtype=found.dtype), rtol=1e-5):
                problems.append(f"{schedule.name} step {step}: losses {found.tolist()}, not {wanted}")
    for index, (stage, right) in enumerate(zip(stages, plain)):
        where = f"{schedule.name} stage {index}"
        problems += differences(where, gradients_of(stage), gradients_of(right), exact=False, slack=10)
        buffers, right_buffers = dict(stage.named_buffers()), dict(right.named_buffers())
        problems += differences(where, buffers, right_buffers, exact=False)
    return problems
