"""Tests of the process group of a `group=` argument: its timeout."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from penstock import build
from penstock.runtime import Pipeline
from penstock.runtime.transport.process_groups import group_timeout

CPU = torch.device("cpu")


@pytest.fixture
def world() -> Iterator[None]:
    """This process alone, with a timeout of its own."""
    timeout = timedelta(seconds=77)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
    yield
    dist.destroy_process_group()


def test_the_default_timeout_is_that_of_the_group(world: None) -> None:  # noqa: ARG001
    group = dist.new_group([0], timeout=timedelta(seconds=44))
    schedule = build("gpipe", ranks=1, microbatches=1)
    for chosen, seconds in ((None, 77), (group, 44)):
        assert group_timeout(chosen, CPU) == timedelta(seconds=seconds)
        with Pipeline([nn.Linear(1, 1)], schedule, group=chosen) as pipeline:
            assert pipeline._config.timeout == timedelta(seconds=seconds)
        with Pipeline([nn.Linear(1, 1)], schedule, group=chosen, timeout=3) as pipeline:
            assert pipeline._config.timeout == timedelta(seconds=3)


def test_a_backend_without_a_timeout_has_torchs_default(world: None) -> None:  # noqa: ARG001
    assert group_timeout(None, torch.device("meta")) == timedelta(minutes=30)


def test_without_a_group_the_timeout_is_torchs_default() -> None:
    assert group_timeout(None, CPU) == timedelta(minutes=30)
