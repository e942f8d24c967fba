"""Promise: a schedule is lowered and validated once, and it is known whether blocking sends are safe."""

from __future__ import annotations

from unittest import mock

import pytest
from torch import nn

import penstock
from penstock.errors import ScheduleError
from penstock.lowering import DeferReceives
from penstock.runtime import Pipeline
from penstock.runtime import config as verified_schedule
from penstock.runtime.config import verify_schedule


def test_a_compute_schedule_is_lowered_and_safe_with_blocking_sends() -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=4)
    verified = verify_schedule(schedule)
    assert verified.schedule == penstock.lower(schedule)
    assert verified.safe_with_blocking_sends


def test_a_lowered_schedule_is_kept() -> None:
    schedule = penstock.lower(penstock.build("1f1b", ranks=2, microbatches=4))
    verified = verify_schedule(schedule)
    assert verified.schedule is schedule
    assert verified.safe_with_blocking_sends


def test_a_deadlock_of_blocking_sends_alone_is_no_error() -> None:
    lowered = penstock.lower(penstock.build("1f1b", ranks=2, microbatches=4))
    verified = verify_schedule(DeferReceives(past_sends=True)(lowered))
    assert not verified.safe_with_blocking_sends


@pytest.mark.parametrize("text", ["0B0 0F0", "0F0 0B0 0F1 0B1 | 1F1 1B1 1F0 1B0", "0F0 0SEND_F0 0B0 | 1F0 1B0"])
def test_an_invalid_schedule_is_rejected(text: str) -> None:
    with pytest.raises(ScheduleError):
        verify_schedule(penstock.Schedule.parse(text))


def test_a_pipeline_validates_a_lowered_schedule_once() -> None:
    schedule = penstock.lower(penstock.build("1f1b", ranks=1, microbatches=4))
    with mock.patch.object(verified_schedule, "validate", wraps=penstock.validate) as validate:
        Pipeline([nn.Linear(2, 2)], schedule).close()
    assert validate.call_count == 1
