"""Changes of schedules and stages of torch.distributed.pipelining that would be ignored, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.support.pipelining_overrides import Case
from tests.support.pipelining_scripts import OURS, ROWS, batch

__all__ = ["forward_orders", "refusals"]

M = 4


def _refusal(
    change: Callable[[Case, Any], None],
    stage_class: Callable[[Any], Any] | None = None,
    schedule_class: Callable[[Any], Any] = lambda base: base,
) -> str:
    """The error of a step after a change on the last rank, or of a first step with this class."""
    case = Case(OURS, "GPipe", stage_class or (lambda base: base))
    schedule = case.schedule(schedule_class)
    dist.barrier()
    if stage_class is None and change is not _nothing:
        case.step(schedule)
        dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        change(case, schedule)
    try:
        case.step(schedule)
    except ValueError as error:
        return str(error)
    return "no error"


def _silent(base: Any) -> Any:
    class Silent(base):  # type: ignore[misc]
        def forward_one_chunk(self, *_: Any, **__: Any) -> Any:
            return torch.zeros(2, 8)

    return Silent


def _scaling(base: Any) -> Any:
    class Scaling(base):  # type: ignore[misc]
        def scale_grads(self, grad_scale_factor: int) -> None:
            pass

    return Scaling


def _reducing(base: Any) -> Any:
    class Reducing(base):  # type: ignore[misc]
        def start_gradient_reduction(self) -> None:
            pass

        def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
            pass

    return Reducing


def refusals() -> list[str]:
    """What each rank says of changes that would be ignored."""

    def replace_submodule(case: Case, _schedule: Any) -> None:
        case.stages[0].submod = nn.Linear(8, 8)

    def patch(case: Case, _schedule: Any) -> None:
        case.stages[0].forward_one_chunk = lambda *_, **__: None

    def remove_loss(_case: Case, schedule: Any) -> None:
        schedule._loss_fn = None

    def change_scale(_case: Case, schedule: Any) -> None:
        schedule.scale_grads = False

    def defer(case: Case, _schedule: Any) -> None:
        case.stages[0].dw_builder = lambda: lambda: None

    return [
        _refusal(replace_submodule),
        _refusal(patch),
        _refusal(remove_loss),
        _refusal(change_scale),
        _refusal(defer),
        _refusal(_nothing, _silent),
        _refusal(_nothing, _scaling),
        _refusal(_nothing, schedule_class=_computing),
        _refusal(_nothing, _reducing),
    ]


def _nothing(_case: Case, _schedule: Any) -> None:
    pass


def _computing(base: Any) -> Any:
    class Computing(base):  # type: ignore[misc]
        def _maybe_compute_loss(self, *_: Any) -> None:
            pass

    return Computing


def forward_orders() -> tuple[str, str]:
    """A step of an order without backwards that has a loss; then an evaluation."""
    from penstock.pipelining.schedules import F, PipelineScheduleMulti, _Action  # noqa: PLC0415

    case = Case(OURS, "Interleaved1F1B")
    schedule: Any = PipelineScheduleMulti(case.stages, M, loss_fn=functional.mse_loss)
    schedule.pipeline_order = {
        rank: [_Action(stage, F, k) for stage in (rank, rank + 2) for k in range(M)] for rank in range(2)
    }
    message = ""
    try:
        case.step(schedule)
    except AssertionError as error:
        message = str(error)
    x, _ = batch(0, ROWS * M)
    output = schedule.eval(*((x,) if 0 in case.parts else ()))
    return message, "" if output is None else str(tuple(output.shape))
