"""How calls on a pipeline end, and that all ranks report one failure."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from penstock.errors import StepFailedError
from tests.support.slowness import slowness

__all__ = ["SOON", "CallOutcome", "assert_one_report", "attempt", "print_report"]


SOON = 5  # seconds


@dataclass(frozen=True)
class CallOutcome:
    """How a call ended on one rank."""

    rank: int
    error: str
    """The name of the exception's type; empty if there was none."""
    text: str
    seconds: float
    where: tuple[Any, ...] = ()
    """`rank`, `action`, `stage`, `microbatch` and `kind` of a StepFailedError."""
    details: str = ""
    cause: str = ""
    """The exception that it was raised from."""
    loss: float | None = None
    at: float = 0
    """When it ended, on the clock of the machine."""
    injected_at: float = 0
    """When the fault happened, on the rank where it did."""


def attempt(call: Callable[[], Any], *, hold: bool = False) -> CallOutcome:
    """How the call ends; with `hold` the error is handled until every rank has one."""
    rank = dist.get_rank()
    begin = time.monotonic()
    try:
        loss = call()
    except StepFailedError as error:
        outcome = CallOutcome(
            rank,
            type(error).__name__,
            str(error),
            time.monotonic() - begin,
            (error.rank, error.action, error.stage, error.microbatch, error.kind),
            error.details,
            repr(error.__cause__) if error.__cause__ is not None else "",
            at=time.monotonic(),
        )
        if hold:
            dist.barrier()
        return outcome
    except BaseException as error:  # noqa: BLE001 -- the test checks it
        return CallOutcome(
            rank, type(error).__name__, str(error), time.monotonic() - begin, at=time.monotonic()
        )
    shown = loss if isinstance(loss, float) else None
    return CallOutcome(rank, "", "", time.monotonic() - begin, loss=shown, at=time.monotonic())


def print_report(report: str) -> None:
    """Print a report, which pytest shows if the test fails."""
    sys.stdout.write(report + "\n")


def assert_one_report(outcomes: list[CallOutcome]) -> None:
    """All ranks raised the same, and soon after the fault."""
    assert [each.error for each in outcomes] == ["StepFailedError"] * len(outcomes), outcomes
    assert len({each.where for each in outcomes}) == 1, [each.where for each in outcomes]
    assert len({each.text for each in outcomes}) == 1, [each.text for each in outcomes]
    injected_at = max(each.injected_at for each in outcomes)
    for each in outcomes:
        assert (each.at - injected_at if injected_at else each.seconds) < SOON * slowness(), each
