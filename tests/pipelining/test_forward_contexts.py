"""Promise: a context registered with a stage (torch 2.15) is entered around each forward, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn import functional

from tests.oracles import torch_schedules as oracle
from tests.support.pipelining_overrides import Case
from tests.support.pipelining_scripts import OURS, ROWS, TORCH, batch
from tests.support.pool import Pools

M = 4

pytestmark = pytest.mark.skipif(oracle.RELEASE < (2, 15), reason="torch has contexts from 2.15 on")


def observe(package: str, name: str) -> tuple[list[list[str]], list[float]]:
    """Per call of step and eval: what happens in which order on this rank; and the losses of the step."""
    case = Case(package, name)
    log: list[str] = []

    @contextmanager
    def entered(info: Any) -> Iterator[None]:
        assert isinstance(info, case.pipelining.PipelineStageInfo)
        if info.is_metadata_inference:  # only torch has a trial forward
            yield
            return
        log.append(f"enter {info.stage_index}F{info.microbatch_index}")
        yield
        log.append(f"exit {info.stage_index}F{info.microbatch_index}")

    def loss(output: Any, target: Any) -> Any:
        log.append("loss")
        return functional.mse_loss(output, target)

    schedule = case.schedule()
    schedule._loss_fn = loss
    handles = [stage.register_forward_context(entered) for stage in case.stages]
    with pytest.raises(RuntimeError, match="already registered"):
        case.stages[0].register_forward_context(entered)
    logs = []
    for call in ("step", "eval", "step"):
        x, y = batch(0, ROWS * M)
        last = {"target": y} if case.count - 1 in case.parts else {}
        getattr(schedule, call)(*((x,) if 0 in case.parts else ()), **last)
        logs.append(log.copy())
        log.clear()
        if len(logs) == 2:
            for handle in handles:
                handle.remove()
    case.losses.clear()
    case.step(schedule)
    return logs, [float(each) for each in case.losses]


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "InterleavedZeroBubble"])
def test_contexts_are_entered_around_each_forward_as_by_torch(pools: Pools, name: str) -> None:
    yours, mine = (pools(2).run(observe, package, name) for package in (TORCH, OURS))
    for (wanted, their_losses), (found, losses) in zip(yours, mine):
        for their_call, call in zip(wanted, found):  # torch's trial forward computes a loss as well
            assert _without_trial(call) == _without_trial(their_call)
        assert len([text for text in found[0] if text.startswith("enter")]) in (M, 2 * M)
        assert {text.split()[0] for text in found[2]} <= {"loss"}, "the contexts were removed"
        assert losses == their_losses


def _without_trial(log: list[str]) -> list[str]:
    entered = [nth for nth, text in enumerate(log) if text != "loss"]
    return log[entered[0] :] if entered else log[-M:]


@contextmanager
def _swallowing(_info: Any) -> Iterator[None]:
    with suppress(ZeroDivisionError):
        yield


def failures(how: str) -> str:
    """The error of a step on each rank, with a context on the last one."""
    case = Case(OURS, "GPipe")
    schedule = case.schedule()
    last = dist.get_rank() == 1
    if how == "late":
        case.step(schedule)
    dist.barrier()
    if last and how == "swallowed":
        case.parts[1].register_forward_pre_hook(lambda *_: 1 // 0)
    if last:
        case.stages[0].register_forward_context(_swallowing)
    try:
        case.step(schedule)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("swallowed", "must not suppress exceptions"),
        ("late", "got a context of its forward after"),
    ],
)
def test_what_a_context_cannot_do_is_refused_on_every_rank(pools: Pools, how: str, message: str) -> None:
    for error in pools(2).run(failures, how):
        assert message in error
