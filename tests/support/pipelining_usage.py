"""Evaluating, accumulating and unusual batches with torch's schedules, as functions that run on every rank."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.support.pipelining_scripts import (
    CPU,
    OURS,
    ROWS,
    SINGLE,
    batch,
    gradients_of,
    modules,
    own_stages,
    stages_of,
)


def made(name: str, m: int, package: str = OURS, **options: Any) -> tuple[Any, dict[int, nn.Module]]:
    """A schedule object and the modules of this rank."""
    pipelining: Any = importlib.import_module(package)
    schedules: Any = importlib.import_module(f"{package}.schedules")
    count = stages_of(name, dist.get_world_size())
    parts = {index: modules(count)[index] for index in own_stages(package, name)}
    stages = [pipelining.PipelineStage(part, index, count, CPU) for index, part in parts.items()]
    make = schedules.get_schedule_class(name)
    given = stages[0] if name in SINGLE else stages
    return make(given, m, loss_fn=functional.mse_loss, **options), parts


def evaluate(name: str) -> tuple[list[float], Tensor | None, list[bool]]:
    """A step, an evaluation, and whether gradients, modes and random state stayed."""
    schedule, parts = made(name, 4)
    x, y = batch(0, ROWS * 4)
    last = stages_of(name, 4) - 1
    target = {"target": y} if last in parts else {}
    args = (x,) if 0 in parts else ()
    schedule.step(*args, **target)
    before, state = gradients_of(parts.items()), torch.random.get_rng_state()
    losses: list[Tensor] = []
    output = schedule.eval(*args, **target, losses=losses)
    after = gradients_of(parts.items())
    stayed = [
        all(torch.equal(before[key], after[key]) for key in before),
        torch.equal(state, torch.random.get_rng_state()),
        all(part.training for part in parts.values()),
        schedule._has_backward,
    ]
    with torch.no_grad():
        schedule.eval(*args, **target, losses=[])
    return [float(loss) for loss in losses], output, stayed


def accumulate(name: str) -> bool:
    """Whether two steps give twice the gradient of one."""
    schedule, parts = made(name, 4)
    x, y = batch(0, ROWS * 4)
    for step in range(2):
        schedule.step(
            *((x,) if 0 in parts else ()), **({"target": y} if stages_of(name, 4) - 1 in parts else {})
        )
        if not step:
            once = gradients_of(parts.items())
    twice = gradients_of(parts.items())
    return all(torch.allclose(2 * once[key], twice[key]) for key in once)


def forward_only() -> tuple[Any, list[str]]:
    """A schedule without losses, and what it says when it is given some."""
    from penstock.pipelining import PipelineStage, ScheduleGPipe, _ScheduleForwardOnly  # noqa: PLC0415

    rank = dist.get_rank()
    messages: list[str] = []
    outputs = []
    for make in (_ScheduleForwardOnly, ScheduleGPipe):
        stage = PipelineStage(modules(4)[rank], rank, 4, CPU)
        schedule = make(stage, 4)
        x, y = batch(0, 8)
        args = (x,) if rank == 0 else ()
        outputs.append(schedule.step(*args))
        if make is _ScheduleForwardOnly:
            try:
                schedule.step(*args, target=y)
            except RuntimeError as error:
                messages.append(str(error))
    return outputs, messages


class Shifted(nn.Module):
    """Takes a keyword that is split along dimension 1, and one that is not split; gives two values."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.last = nn.Linear(8, 8), last

    def forward(self, x: Tensor, *, shift: Tensor, factor: float = 1.0) -> Any:
        y = self.inner(x) + shift.t() * factor
        return (y, y.mean()) if self.last else [y]


def with_specs() -> tuple[Any, list[float]]:
    """Chunk specs, merge specs, keyword arguments, keyword arguments of the loss."""
    from penstock.pipelining import PipelineStage, ScheduleGPipe, sum_reducer  # noqa: PLC0415
    from penstock.pipelining import microbatch as untyped  # noqa: PLC0415

    microbatch: Any = untyped
    rank, losses, along = dist.get_rank(), list[Tensor](), microbatch.TensorChunkSpec
    merge: Any = (along(0), sum_reducer)

    def loss_fn(output: Any, target: Tensor, *, weight: float = 1.0) -> Tensor:
        return functional.mse_loss(output[0], target) * weight

    schedule = ScheduleGPipe(
        PipelineStage(Shifted(last=rank == 3), rank, 4, CPU),
        4,
        loss_fn=loss_fn,
        args_chunk_spec=along.from_tuple((0,)),
        kwargs_chunk_spec={"shift": along(1), "factor": microbatch._Replicate()},
        output_merge_spec=merge,
    )
    x, y = batch(0, 8)
    named: dict[str, Any] = {"shift": torch.arange(8.0).reshape(1, 8), "factor": 0.5}
    given: dict[str, Any] = {"target": y, "losses": losses, "loss_kwargs": {"weight": 3.0}} if rank == 3 else {}
    output = schedule.step(*((x,) if rank == 0 else ()), **named, **given)
    return output, [float(loss) for loss in losses]


def failures_on_all_ranks() -> list[str]:
    """A batch that only the first rank knows to be wrong, and then a right one."""
    schedule, parts = made("1F1B", 4)
    x, y = batch(0, 8)
    rank = dist.get_rank()
    messages = []
    for bad in ((x[:3],), (x, "not a tensor")):
        try:
            schedule.step(*(bad if rank == 0 else ()), **({"target": y} if rank == 3 else {}))
        except (ValueError, RuntimeError) as error:  # noqa: PERF203 -- two of them
            messages.append(f"{type(error).__name__}: {error}")
    try:
        schedule.step(*((x,) if rank == 0 else ()))
    except ValueError as error:
        messages.append(f"{type(error).__name__}: {error}")
    with torch.no_grad():
        try:
            schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == 3 else {}))
        except RuntimeError as error:
            messages.append(f"{type(error).__name__}: {error}")
    try:
        schedule.step(*((x,) if rank == 0 else ()), target=y, losses=() if rank == 3 else None)
    except (TypeError, ValueError) as error:
        messages.append(f"{type(error).__name__}: {error}")
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == 3 else {}))
    assert gradients_of(parts.items())
    return messages
