"""Promise: a dropped schedule is freed without a collector: models, stages, tensors, threads, descriptors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from penstock.errors import PenstockError
from penstock.pipelining import PipelineStage
from penstock.pipelining.schedules import FORWARD, get_schedule_class
from tests.support.grids import thinned
from tests.support.lifetimes import NOTHING, Left, Loss, left_behind, references
from tests.support.pipelining_scripts import CPU, NAMES, OURS, SINGLE, batch, modules, own_stages, stages_of
from tests.support.pool import Pools

ROWS = 8


class Trainer:
    """Owns a schedule object; `fails` is whether its loss raises."""

    def __init__(self, name: str, *, functions: bool = False) -> None:
        self.last = stages_of(name, dist.get_world_size()) - 1
        made = modules(self.last + 1)
        indices = own_stages(OURS, name)
        self.has_first, self.has_last = 0 in indices, self.last in indices
        self.stages = [PipelineStage(made[index], index, self.last + 1, CPU) for index in indices]
        make: Any = get_schedule_class(name)
        self.loss = Loss()
        self.schedule: Any = make(
            self.stages[0] if name in SINGLE else self.stages, 4, loss_fn=self.loss.compute
        )
        if functions:
            self.schedule.register_custom_function(FORWARD, _forward)

    def step(self, rows: int = ROWS) -> None:
        dist.barrier()  # so that every rank has the same steps that fail
        x, y = batch(0, rows)
        target = {"target": y, "losses": []} if self.has_last else {}
        self.schedule.step(*((x,) if self.has_first else ()), **target)

    def references(self) -> Any:
        stages = {f"stage {stage.stage_index}": stage for stage in self.stages}
        modules = {f"module {stage.stage_index}": stage.submod for stage in self.stages}
        return references(schedule=self.schedule, runner=self.schedule._runner, **stages, **modules)


def _forward(action: Any, context: Any) -> None:
    stage = next(s for s in context.schedule_ref._stages if s.stage_index == action.stage_index)
    k = action.microbatch_index
    stage.forward_one_chunk(k, context.arg_mbs[k] if stage.is_first else (), context.kwarg_mbs[k])


def train_and_drop(name: str, *, functions: bool = False) -> Any:
    """A step, steps that fail in the batch and in the loss, a step."""
    trainer = Trainer(name, functions=functions)
    trainer.step()
    with pytest.raises((PenstockError, ValueError, AssertionError)):
        trainer.step(rows=3)
    trainer.loss.fails = True
    with pytest.raises((PenstockError, ValueError, AssertionError)):
        trainer.step()
    trainer.loss.fails = False
    trainer.step()
    return trainer.references()


def drop_each(names: list[str]) -> Left:
    uses = {name: partial(train_and_drop, name) for name in names}
    return left_behind({**uses, "functions": partial(train_and_drop, "DualPipeV", functions=True)})


def test_a_dropped_schedule_leaves_nothing_behind(pools: Pools) -> None:
    assert pools(2).run(drop_each, thinned(NAMES, 3), seconds=60) == [NOTHING] * 2


def hooks_of_shared_modules() -> int:
    """The hooks of a module after many schedules."""
    rank = dist.get_rank()
    module = modules(2)[rank]
    for _ in range(3):
        make: Any = get_schedule_class("GPipe")
        schedule = make(PipelineStage(module, rank, 2, CPU), 4, loss_fn=mse_loss)
        schedule.step(*((torch.ones(8, 8),) if rank == 0 else ()), target=torch.ones(8, 8))
        del schedule
    return len(module._forward_hooks)


def test_a_dropped_schedule_leaves_no_hook_on_its_modules(pools: Pools) -> None:
    assert pools(2).run(hooks_of_shared_modules) == [0, 0]
