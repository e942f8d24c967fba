"""Real hangs on gloo: a rank that stops, runs another schedule or skips a send, in torch's runtime or ours."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import build
from penstock.runtime import Pipeline, record_state
from penstock.runtime.session import step_runner
from penstock.runtime.transport.channels import SendChannel

__all__ = ["CULPRIT", "FAULTS", "MICROBATCHES", "RANKS", "RUNTIMES", "hang"]

RANKS, MICROBATCHES, CULPRIT = 3, 4, 1
RUNTIMES = ("penstock", "torch with lists", "torch 1F1B")
FAULTS = {"stop": ("stopped", "no-state"), "another schedule": ("another-schedule",), "skip": ("skipped-send",)}
"""Each fault with the kinds of finding that name it."""
SKIPPED = 2
"""The microbatch whose activation the culprit does not send."""


class Stage(nn.Module):
    """A linear layer; its process stops at this forward, counted from 0."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls, self.stop_at = 0, stop_at

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == self.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.calls += 1
        output: Tensor = self.inner(x)
        return output


def hang(runtime: str, fault: str, folder: str, seconds: float) -> str:
    """Two steps, of which the second hangs (with another schedule the first): gives the error's first line."""
    rank = dist.get_rank()
    at_fault = fault if rank == CULPRIT else ""
    torch.manual_seed(0)
    stop_at = MICROBATCHES + SKIPPED if at_fault == "stop" else None
    stage = Stage(stop_at)
    step = _penstock_step if runtime == "penstock" else _torch_step
    try:
        with ExitStack() as patches:
            call = step(stage, runtime, at_fault, folder, seconds, patches)
            for _ in range(2):
                call()
    except Exception as error:  # noqa: BLE001 -- the test looks at the states that it left
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


def _family(at_fault: str) -> str:
    return "gpipe" if at_fault == "another schedule" else "1f1b"


def _batch() -> Tensor:
    return torch.ones(MICROBATCHES, 4)


def _penstock_step(
    stage: nn.Module, _runtime: str, at_fault: str, folder: str, seconds: float, patches: ExitStack
) -> Callable[[], Any]:
    # a run whose ranks have different schedules is refused when they connect, unless it is not noticed
    patches.enter_context(mock.patch.object(step_runner, "check_agreement"))
    steps = [0]
    send = SendChannel.send

    def skipping(channel: SendChannel, microbatch: int, *value: Any) -> None:
        if steps[0] < 2 or microbatch != SKIPPED or channel.peer != CULPRIT + 1:
            send(channel, microbatch, *value)

    if at_fault == "skip":
        patches.enter_context(mock.patch.object(SendChannel, "send", skipping))
    schedule = build(_family(at_fault), ranks=RANKS, microbatches=MICROBATCHES)
    pipeline = Pipeline([stage], schedule, loss=mse_loss, timeout=seconds, state_dir=folder)

    def call() -> None:
        steps[0] += 1
        pipeline.step(_batch(), target=_batch())

    return call


def _torch_step(
    module: nn.Module, runtime: str, at_fault: str, folder: str, seconds: float, _patches: ExitStack
) -> Callable[[], Any]:
    from torch.distributed.pipelining import PipelineStage, schedules  # noqa: PLC0415 -- takes seconds

    class SkippingStage(PipelineStage):
        """Forgets to send one activation in the second step."""

        steps = 0

        def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
            self.steps += fwd_chunk_id == 0
            operations = super().get_fwd_send_ops(fwd_chunk_id)
            return [] if self.steps == 2 and fwd_chunk_id == SKIPPED else operations

    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    kind = SkippingStage if at_fault == "skip" else PipelineStage
    stage = kind(module, rank, RANKS, torch.device("cpu"), group=group)
    schedule: Any
    if runtime == "torch 1F1B":
        single = schedules.ScheduleGPipe if _family(at_fault) == "gpipe" else schedules.Schedule1F1B
        schedule = single(stage, MICROBATCHES, loss_fn=mse_loss)
    else:
        runtime_class: Any = schedules._PipelineScheduleRuntime
        schedule = runtime_class([stage], MICROBATCHES, loss_fn=mse_loss)
        with tempfile.TemporaryDirectory() as place:
            file = Path(place, "order.csv")
            build(_family(at_fault), ranks=RANKS, microbatches=MICROBATCHES).write(file)
            schedule._load_csv(str(file))
    record_state(schedule, folder)
    arguments = (_batch(),) if rank == 0 else ()
    options = {"target": _batch(), "losses": []} if rank == RANKS - 1 else {}
    return lambda: schedule.step(*arguments, **options)
