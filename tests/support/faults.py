"""Faults to put into running pipelines, and what every rank tells of them, for the failure tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import penstock
from penstock.errors import StepFailedError
from penstock.ir.action import Kind
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.runtime import Custom, Pipeline
from penstock.runtime.transport.channels import Inbox, Outbox
from tests.support.slowness import slowness

__all__ = [
    "SOON",
    "Bench",
    "Fault",
    "Told",
    "assert_one_report",
    "attempt",
    "bench",
    "children",
    "descriptors",
    "live_tensors",
    "resident",
    "schedule_of",
    "settled",
    "show",
    "strikes",
    "watchers",
]

WIDTH = 4
ROWS = 2  # of a microbatch
_STAGES: Mapping[str, Mapping[str, int]] = {"interleaved-1f1b": {"stages_per_rank": 2}}

SOON = 5  # seconds


@dataclass(frozen=True)
class Fault:
    """Something that happens on one rank in place of one action, as the schedule writes it."""

    rank: int
    action: str
    effect: str = "raise"
    """`raise`, `raise badly`, `interrupt`, `kill`, or `nap`: go on."""
    seconds: float = 0
    """How long the rank computes before that."""


@dataclass(frozen=True)
class Told:
    """How a call ended on one rank."""

    rank: int
    error: str
    """The name of the exception's type; empty if there was none."""
    text: str
    seconds: float
    calls: int = 1
    """How many calls it took until one failed."""
    where: tuple[Any, ...] = ()
    """`rank`, `action`, `stage`, `microbatch` and `kind` of a StepFailedError."""
    details: str = ""
    cause: str = ""
    """The exception that it was raised from."""
    loss: float | None = None
    at: float = 0
    """When it ended, on the clock that all processes share."""
    struck: float = 0
    """When the fault happened, on the rank where it did."""


class StruckError(Exception):
    """What a fault raises."""


class UnspeakableError(Exception):
    """An exception that has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class NotFiniteBack(torch.autograd.Function):
    """Leaves numbers alone on the way forward and spoils them on the way back."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


def schedule_of(family: str, ranks: int, microbatches: int) -> Schedule:
    """A family, lowered."""
    return lower(
        penstock.build(family, ranks=ranks, microbatches=microbatches, **dict(_STAGES.get(family, {})))
    )


def strikes(family: str, ranks: int, microbatches: int, *, everywhere: bool) -> list[Fault]:
    """A fault for each kind of action, in the midst of its like: on every rank, or each on one."""
    found = []
    for rank, row in enumerate(schedule_of(family, ranks, microbatches).ranks):
        by_kind: dict[Kind, list[str]] = {}
        for step in row:
            by_kind.setdefault(step.kind, []).append(str(step))
        for kind, steps in by_kind.items():
            if everywhere or kind.number % ranks == rank:
                found.append(Fault(rank, steps[len(steps) // 2]))
    return found


class Bench:
    """A small model in a pipeline that faults can be put into, and the numbers it should give."""

    def __init__(self, family: str, microbatches: int, **options: Any) -> None:
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.faults: tuple[Fault, ...] = ()
        self.action = ""
        """What this rank is doing."""
        self.poison = ""
        """The forward or backward, such as 2F1, whose numbers shall not be finite."""
        self.struck = 0.0
        schedule = schedule_of(family, ranks, microbatches)
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(schedule.num_stages)]
        self.x, self.y = torch.randn(2, microbatches * ROWS, WIDTH)
        self.loss = 0.0
        self.gradients: dict[int, list[Tensor]] = {}
        self._reckon(stages, microbatches)
        self._patches = [
            mock.patch.object(Outbox, "send", self._watched(Outbox.send, Kind.SEND_F, Kind.SEND_B)),
            mock.patch.object(Inbox, "post", self._watched(Inbox.post, Kind.RECV_F, Kind.RECV_B)),
        ]
        for patch in self._patches:
            patch.start()
        functions: dict[Kind | str, Callable[[Custom], None]] = {
            kind: self._act for kind in Kind if not kind.is_communication
        }
        for stage in stages:
            stage.register_forward_hook(lambda _module, _x, output: self._poisoned(output))
        self.pipeline = Pipeline(
            dict(enumerate(stages)),
            schedule,
            **{"loss": mse_loss, "functions": functions, "timeout": 60, **options},
        )

    def _reckon(self, stages: list[nn.Sequential], microbatches: int) -> None:
        """The loss and the gradients of one process alone."""
        whole = nn.Sequential(*stages)
        for x, y in zip(self.x.chunk(microbatches), self.y.chunk(microbatches)):
            loss = mse_loss(whole(x), y) / microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            self.loss += loss.item()
        for index, stage in enumerate(stages):
            self.gradients[index] = [p.grad for p in stage.parameters() if p.grad is not None]
        whole.zero_grad()

    def _act(self, custom: Custom) -> None:
        self.strike(str(custom.action))
        self.action = str(custom.action)
        custom.run()

    def _poisoned(self, output: Tensor) -> Tensor:
        """The output of a forward, or one whose gradient will not be finite."""
        if self.poison == self.action:
            return output * torch.nan
        if self.poison == self.action.replace("F", "B"):
            return NotFiniteBack.apply(output)  # type: ignore[no-untyped-call, no-any-return]
        return output

    def _watched(self, usual: Any, forward: Kind, backward: Kind) -> Callable[[Any, int], None]:
        def watched(end: Any, microbatch: int) -> None:
            below, back = divmod(end.number, 2)
            kind = backward if back else forward
            stage = below + (kind in (Kind.SEND_B, Kind.RECV_F))
            self.strike(f"{stage}{kind.value}{microbatch}")
            usual(end, microbatch)

        return watched

    def strike(self, action: str) -> None:
        """Let the fault happen if it belongs here."""
        fault = next((each for each in self.faults if (each.rank, each.action) == (self.rank, action)), None)
        if fault is None:
            return
        time.sleep(fault.seconds)
        self.struck = time.monotonic()
        if fault.effect == "raise":
            raise StruckError(f"struck at {action}")
        if fault.effect == "raise badly":
            raise UnspeakableError
        if fault.effect == "interrupt":
            raise KeyboardInterrupt
        if fault.effect == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self) -> float | None:
        """One training step from gradients of zero."""
        for parameter in self.pipeline.parameters():
            parameter.grad = None
        return self.pipeline.step(self.x, target=self.y).loss

    def evaluate(self) -> float | None:
        """The same batch without gradients."""
        return self.pipeline.eval(self.x, target=self.y).loss

    def assert_right(self) -> None:
        """A step gives the loss and the gradients of one process alone."""
        assert self.step() == self.loss
        for index, module in self.pipeline.modules.items():
            for parameter, wanted in zip(module.parameters(), self.gradients[index], strict=True):
                torch.testing.assert_close(parameter.grad, wanted)

    def suffer(self, *faults: Fault, call: Callable[[], Any] | None = None, hold: bool = False) -> Told:
        """How a call with these faults ends; who had finished before the fault is asked once more."""
        dist.barrier()
        self.faults, self.struck = faults, 0.0
        told = attempt(call or self.step, calls=2, hold=hold)
        self.faults = ()
        return replace(told, struck=self.struck)

    def close(self) -> None:
        """Hang up, and leave no patch behind."""
        self.pipeline.close()
        for patch in self._patches:
            patch.stop()


def attempt(call: Callable[[], Any], calls: int = 1, *, hold: bool = False) -> Told:
    """How the call ends; with `hold` the error is handled until every rank has one."""
    rank = dist.get_rank()
    loss = None
    begin = time.monotonic()
    for count in range(1, calls + 1):
        begin = time.monotonic()
        try:
            loss = call()
        except StepFailedError as error:
            told = Told(
                rank,
                type(error).__name__,
                str(error),
                time.monotonic() - begin,
                count,
                (error.rank, error.action, error.stage, error.microbatch, error.kind),
                error.details,
                repr(error.__cause__) if error.__cause__ is not None else "",
                at=time.monotonic(),
            )
            if hold:
                dist.barrier()
            return told
        except BaseException as error:  # noqa: BLE001 -- the test looks at it
            return Told(
                rank, type(error).__name__, str(error), time.monotonic() - begin, count, at=time.monotonic()
            )
    shown = loss if isinstance(loss, float) else None
    return Told(rank, "", "", time.monotonic() - begin, calls, loss=shown, at=time.monotonic())


@contextmanager
def bench(family: str, microbatches: int, **options: Any) -> Iterator[Bench]:
    """A bench that is closed at the end."""
    made = Bench(family, microbatches, **options)
    try:
        yield made
    finally:
        made.close()


# --- what is left behind ------------------------------------------------------------------------------


def watchers() -> int:
    """How many watching threads live, after those that are to end had time for it."""
    return settled(lambda: sum(thread.name == "penstock-watch" for thread in threading.enumerate()))


def settled(count: Callable[[], int], seconds: float = 2) -> int:
    """A count that threads may still be lowering: what it is at 0, or when the time is over."""
    end = time.monotonic() + seconds
    while (left := count()) and time.monotonic() < end:
        time.sleep(0.02)
    return left


def descriptors() -> int:
    """How many files and sockets this process has open, once all ranks had time to let go of theirs."""
    gc.collect()
    dist.barrier()
    time.sleep(0.3)
    return len(list(Path("/proc/self/fd").iterdir()))


def resident() -> int:
    """The bytes of memory this process uses."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    """How many tensors Python knows of."""
    gc.collect()
    return sum(torch.is_tensor(each) for each in gc.get_objects())


def children() -> list[str]:
    """The processes that this one started and has not taken leave of."""
    return [
        child
        for task in Path("/proc/self/task").iterdir()
        for child in (task / "children").read_text(encoding="ascii").split()
    ]


def show(report: str) -> None:
    """Put a report into what pytest shows of a test."""
    sys.stdout.write(report + "\n")


def assert_one_report(told: list[Told]) -> None:
    """All ranks raised the same, and soon after the fault."""
    assert [each.error for each in told] == ["StepFailedError"] * len(told), told
    assert len({each.where for each in told}) == 1, [each.where for each in told]
    assert len({each.text for each in told}) == 1, [each.text for each in told]
    struck = max(each.struck for each in told)
    for each in told:
        assert each.calls > 1 or (each.at - struck if struck else each.seconds) < SOON * slowness(), each
