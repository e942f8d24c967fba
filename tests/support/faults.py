"""Faults that are injected into running pipelines, and how the calls end on every rank."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.ir.kinds import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.runtime import ActionCall, Pipeline
from penstock.runtime.transport.channels import ReceiveChannel, SendChannel
from tests.support.call_outcomes import CallOutcome, attempt

__all__ = [
    "Fault",
    "FaultyPipeline",
    "faults_of_each_kind",
    "faulty_pipeline",
    "schedule_of",
]

WIDTH = 4
ROWS = 2  # of a microbatch
_STAGES_PER_RANK = {"interleaved-1f1b": 2}


@dataclass(frozen=True)
class Fault:
    """Something that happens on one rank in place of one action, as the schedule writes it."""

    rank: int
    action: str
    effect: str = "raise"
    """`raise`, `raise badly` (an exception whose text raises), `interrupt`, `kill`, `stop` (SIGSTOP), or `nap`:
    only wait."""
    seconds: float = 0
    """How long the rank waits before that."""


class InjectedError(Exception):
    """What a fault raises."""


class TextlessError(Exception):
    """An exception that has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class NanGradient(torch.autograd.Function):
    """Identity in the forward; its backward gives nan."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


def schedule_of(family: str, ranks: int, microbatches: int) -> Schedule:
    """A family, lowered."""
    return lower(
        penstock.build(
            family, ranks=ranks, microbatches=microbatches, stages_per_rank=_STAGES_PER_RANK.get(family)
        )
    )


def faults_of_each_kind(family: str, ranks: int, microbatches: int, *, everywhere: bool) -> list[Fault]:
    """A fault for each kind of action, at the middle one of its kind: on every rank, or each on one."""
    found = []
    for rank, row in enumerate(schedule_of(family, ranks, microbatches).ranks):
        by_kind: dict[Kind, list[str]] = {}
        for step in row:
            by_kind.setdefault(step.kind, []).append(str(step))
        for kind, steps in by_kind.items():
            if everywhere or kind.number % ranks == rank:
                found.append(Fault(rank, steps[len(steps) // 2]))
    return found


class FaultyPipeline:
    """A small model in a pipeline with injected faults, and its correct loss and gradients."""

    def __init__(self, family: str, microbatches: int, **options: Any) -> None:
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.faults: tuple[Fault, ...] = ()
        self.action = ""
        """The current action of this rank."""
        self.nan_at = ""
        """The forward or backward, such as 2F1, whose result is nan."""
        self.injected_at = 0.0
        schedule = schedule_of(family, ranks, microbatches)
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(schedule.num_stages)]
        self.x, self.y = torch.randn(2, microbatches * ROWS, WIDTH)
        self.reference = copy.deepcopy(nn.Sequential(*stages))
        """The whole model."""
        self.loss = 0.0
        self.gradients: dict[int, list[Tensor]] = {}
        self._compute_reference(stages, microbatches)
        self._patches = [
            mock.patch.object(SendChannel, "send", self._patched(SendChannel.send, Kind.SEND_F, Kind.SEND_B)),
            mock.patch.object(
                ReceiveChannel, "post", self._patched(ReceiveChannel.post, Kind.RECV_F, Kind.RECV_B)
            ),
        ]
        for patch in self._patches:
            patch.start()
        functions: dict[Kind | str, Callable[[ActionCall], None]] = {
            kind: self._run_action for kind in Kind if kind.spec.other_end is None
        }
        for stage in stages:
            stage.register_forward_hook(lambda _module, _x, output: self._with_nan(output))
        self.pipeline = Pipeline(
            dict(enumerate(stages)),
            schedule,
            **{"loss": mse_loss, "functions": functions, "timeout": 60, **options},
        )

    def _compute_reference(self, stages: list[nn.Sequential], microbatches: int) -> None:
        """Compute the loss and the gradients in one process."""
        whole = nn.Sequential(*stages)
        for x, y in zip(self.x.chunk(microbatches), self.y.chunk(microbatches)):
            loss = mse_loss(whole(x), y) / microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            self.loss += loss.item()
        for index, stage in enumerate(stages):
            self.gradients[index] = [p.grad for p in stage.parameters() if p.grad is not None]
        whole.zero_grad()

    def _run_action(self, custom: ActionCall) -> None:
        self.inject(str(custom.action))
        self.action = str(custom.action)
        custom.run()

    def _with_nan(self, output: Tensor) -> Tensor:
        """The output of a forward, made nan itself or in its gradient."""
        if self.nan_at == self.action:
            return output * torch.nan
        if self.nan_at == self.action.replace("F", "B"):
            return NanGradient.apply(output)  # type: ignore[no-untyped-call, no-any-return]
        return output

    def _patched(self, method: Any, forward: Kind, backward: Kind) -> Callable[..., None]:
        def with_fault(channel: Any, microbatch: int, *value: Any) -> None:
            below, back = divmod(channel.number, 2)
            kind = backward if back else forward
            stage = below + (kind in (Kind.SEND_B, Kind.RECV_F))
            self.inject(f"{stage}{kind.value}{microbatch}")
            method(channel, microbatch, *value)

        return with_fault

    def inject(self, action: str) -> None:
        """Let the fault of this action happen, if there is one."""
        fault = next((each for each in self.faults if (each.rank, each.action) == (self.rank, action)), None)
        if fault is None:
            return
        time.sleep(fault.seconds)
        self.injected_at = time.monotonic()
        if fault.effect == "raise":
            raise InjectedError(f"injected at {action}")
        if fault.effect == "raise badly":
            raise TextlessError
        if fault.effect == "interrupt":
            raise KeyboardInterrupt
        if fault.effect == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.effect == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)

    def step(self) -> float | None:
        """One training step from gradients of zero."""
        for parameter in self.pipeline.parameters():
            parameter.grad = None
        return self.pipeline.step(self.x, target=self.y).loss

    def evaluate(self) -> float | None:
        """The same batch without gradients."""
        return self.pipeline.eval(self.x, target=self.y).loss

    def assert_correct(self) -> None:
        """Assert that a step gives the loss and the gradients of one process."""
        assert self.step() == self.loss
        for index, module in self.pipeline.modules.items():
            for parameter, wanted in zip(module.parameters(), self.gradients[index], strict=True):
                torch.testing.assert_close(parameter.grad, wanted)

    def run_with_faults(
        self, *faults: Fault, call: Callable[[], Any] | None = None, hold: bool = False
    ) -> CallOutcome:
        """How a call with these faults ends."""
        dist.barrier()
        self.pipeline._runner.connect()  # after a failure; the call is measured without it
        self.faults, self.injected_at = faults, 0.0
        outcome = attempt(call or self.step, hold=hold)
        self.faults = ()
        return replace(outcome, injected_at=self.injected_at)

    def close(self) -> None:
        """Close the pipeline and remove the patches."""
        self.pipeline.close()
        for patch in self._patches:
            patch.stop()


@contextmanager
def faulty_pipeline(family: str, microbatches: int, **options: Any) -> Iterator[FaultyPipeline]:
    """A faulty pipeline that is closed at the end."""
    pipeline = FaultyPipeline(family, microbatches, **options)
    try:
        yield pipeline
    finally:
        pipeline.close()
