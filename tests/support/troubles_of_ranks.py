"""The troubles of docs/troubleshooting.md that need four ranks: each function returns the text on its rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from penstock.runtime import Pipeline
from penstock.runtime.session.agreement import StepCommit
from tests.support.call_outcomes import attempt
from tests.support.faults import Fault, faulty_pipeline
from tests.support.troubles import model, step

__all__ = ["TOGETHER"]

TOGETHER: dict[str, Callable[[], Any]] = {}
"""Troubles that four ranks have together; each returns the text on its rank."""


def finish_and_interrupt(exchange: StepCommit, weights: Any, finish: Any = StepCommit.finish) -> None:
    finish(exchange, weights)
    dist.barrier()  # the other ranks have their results
    raise KeyboardInterrupt


def together(trouble: Callable[[], Any]) -> Callable[[], Any]:
    TOGETHER[trouble.__name__] = trouble
    return trouble


@together
def timeout() -> str:
    with faulty_pipeline("1f1b", 4, timeout=5) as one:
        return one.run_with_faults(Fault(1, "1F1", "nap", 8)).text


@together
def one_rank_stays_away() -> str:
    with faulty_pipeline("1f1b", 4, timeout=5) as one:
        dist.barrier()
        outcome = attempt(one.step).text if dist.get_rank() != 3 else ""
        dist.barrier()
        return outcome or attempt(one.step).text


@together
def step_and_eval() -> str:
    with faulty_pipeline("1f1b", 4) as one:
        return attempt(one.evaluate if dist.get_rank() else one.step).text


@together
def one_rank_is_behind() -> str:
    interrupted = mock.patch.object(StepCommit, "finish", finish_and_interrupt)
    with faulty_pipeline("1f1b", 4) as one:
        with interrupted if dist.get_rank() == 0 else nullcontext():
            attempt(one.step)
        if dist.get_rank():
            dist.barrier()
            attempt(one.step)
        return attempt(one.step).text


@together
def ranks_disagree() -> str:
    family = "1f1b" if dist.get_rank() else "gpipe"
    stages = dict(enumerate(model(4)))
    return attempt(lambda: Pipeline(stages, family, microbatches=4, loss=mse_loss, timeout=120)).text


@together
def wrong_shape() -> str:
    stages = dict(enumerate([*model(2), nn.Linear(5, 4), nn.Linear(4, 4)]))
    with Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, timeout=120) as made:
        return attempt(lambda: step(made)).text


class Huge(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.empty(10**15)[:1]


@together
def out_of_memory() -> str:
    stages = dict(enumerate([*model(1), Huge(4, 4), *model(2)]))
    with Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, timeout=120) as made:
        return attempt(lambda: step(made)).text


@together
def one_rank_makes_no_pipeline() -> str:
    dist.barrier()
    if dist.get_rank() == 3:
        return ""
    return attempt(lambda: Pipeline(dict(enumerate(model(4))), "1f1b", microbatches=4, timeout=5)).text


@together
def tied_weights_drift() -> str:
    stages = dict(enumerate(nn.Linear(4, 4, bias=False) for _ in range(4)))
    torch.manual_seed(dist.get_rank())
    own = stages[dist.get_rank()]
    nn.init.normal_(own.weight)
    tie = {0: "weight", 3: "weight"}
    with Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, tied=[tie], timeout=120) as made:
        return attempt(lambda: step(made)).text


@together
def one_rank_clips() -> str:
    with Pipeline(dict(enumerate(model(4))), "1f1b", microbatches=4, loss=mse_loss, timeout=5) as made:
        step(made)
        outcome = attempt(lambda: made.clip_grad_norm_(1.0)).text if dist.get_rank() == 0 else ""
        dist.barrier()
        return outcome


@together
def replicas_differ() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    stages = dict(enumerate(model(2)))
    for parameter in stages[0].parameters():
        parameter.data += dist.get_rank(mesh.get_group("dp"))
    made = Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, group=mesh["pp"], replicas=mesh["dp"])
    with made:
        return attempt(lambda: step(made)).text


@together
def value_that_cannot_be_sent() -> str:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, object]:
            return x, lambda: None

    stages = {0: Odd(), 1: nn.Identity(), 2: nn.Identity(), 3: nn.Linear(4, 4)}
    with Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss, timeout=120) as made:
        return attempt(lambda: step(made)).text


@together
def stopped_rank() -> str:
    with faulty_pipeline("1f1b", 4, timeout=5) as one:
        return one.run_with_faults(Fault(1, "1F2", "stop")).text


@together
def lost_rank() -> str:
    with faulty_pipeline("1f1b", 4) as one:
        return one.run_with_faults(Fault(1, "1F2", "kill", 0.8)).text
