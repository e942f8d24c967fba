"""Promise: a dropped pipeline is freed without a collector: modules, tensors, threads, descriptors."""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.errors import PenstockError
from penstock.runtime import GradScaler, Pipeline
from tests.support.faults import schedule_of
from tests.support.grids import thinned
from tests.support.lifetimes import NOTHING, Left, Loss, left_behind, references
from tests.support.pool import Pools

FAMILIES = [family for family in penstock.families() if family != "forward-only"]


def pipeline_of(family: str, loss: Any) -> Pipeline:
    schedule = schedule_of(family, dist.get_world_size(), 4)
    stages = {stage: nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for stage in range(schedule.num_stages)}
    return Pipeline(stages, schedule, loss=loss, timeout=60)


def references_of(pipeline: Pipeline) -> Any:
    runner = pipeline._runner
    stages = {f"stage {index}": module for index, module in pipeline.modules.items()}
    return references(pipeline=pipeline, runner=runner, connection=runner.connect(), **stages)


def train_and_drop(family: str) -> Any:
    """A step, steps that fail in the batch and in the loss, a step."""
    loss = Loss()
    pipeline = pipeline_of(family, loss.compute)
    x, y = torch.randn(2, 8, 4)
    pipeline.step(x, target=y)
    dist.barrier()  # so that every rank has the same steps that fail
    with pytest.raises((PenstockError, TypeError)):
        pipeline.step(x)
    loss.fails = True
    dist.barrier()
    with pytest.raises((PenstockError, ValueError)):
        pipeline.step(x, target=y)
    loss.fails = False
    dist.barrier()
    pipeline.step(x, target=y)
    return references_of(pipeline)


def drop_each(families: list[str]) -> Left:
    return left_behind({family: partial(train_and_drop, family) for family in families})


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dropped_pipeline_leaves_nothing_behind(pools: Pools, ranks: int) -> None:
    assert pools(ranks).run(drop_each, thinned(FAMILIES, 4)) == [NOTHING] * ranks


class Trainer:
    """Owns a pipeline whose loss is a method of its own."""

    def __init__(self) -> None:
        self.pipeline = pipeline_of("zbv", self.loss)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target)


def train_with_own_method() -> Any:
    trainer = Trainer()
    trainer.pipeline.step(torch.ones(8, 4), target=torch.ones(8, 4))
    found = references_of(trainer.pipeline)
    del trainer
    gc.collect()  # the trainer has the pipeline, which has the trainer's method
    return found


def train_with_scaler() -> Any:
    pipeline = pipeline_of("1f1b", mse_loss)
    scaler, optimizer = GradScaler(pipeline), torch.optim.SGD(pipeline.parameters())
    pipeline.step(torch.ones(8, 4), target=torch.ones(8, 4))
    scaler.step(optimizer)
    scaler.update()
    return {**references_of(pipeline), **references(scaler=scaler)}


def refuse_and_drop() -> Any:
    """Ranks that do not agree do not connect."""
    schedule = schedule_of("1f1b", dist.get_world_size(), 4 + dist.get_rank())
    module = nn.Linear(4, 4)
    with suppress(PenstockError):
        Pipeline([module], schedule, loss=mse_loss, timeout=60)
    return references(module=module)


def drop_others() -> Left:
    return left_behind(
        {"own method": train_with_own_method, "scaler": train_with_scaler, "not connected": refuse_and_drop}
    )


def test_a_pipeline_that_is_collected_or_not_connected_leaves_nothing_behind(pools: Pools) -> None:
    assert pools(2).run(drop_others) == [NOTHING] * 2
