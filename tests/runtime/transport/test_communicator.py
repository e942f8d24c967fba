"""Promise: the protocol for devices, one group per edge and flags sent separately, gives the same gradients.

Tests run without a GPU, so the groups are gloo's; NCCL itself is not tested.
"""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store

import penstock
from penstock.errors import PipelineError
from penstock.runtime import Pipeline
from penstock.runtime.transport import communicator
from penstock.runtime.transport import communicator as device_groups
from tests.support.grids import small
from tests.support.pool import Pools


def gloo_edge(_device: torch.device, store: Store, rank: int, timeout: timedelta, size: int) -> Any:
    made: Any = dist.ProcessGroupGloo
    return made(store, rank, size, timeout)


def trained(family: str, *, as_a_device: bool) -> list[torch.Tensor]:
    """Gradients of three steps of different batch sizes, with an eval after each."""
    schedule = penstock.build(family, ranks=dist.get_world_size(), microbatches=4)
    torch.manual_seed(0)
    stages = {i: nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for i in range(schedule.num_stages)}
    suffices = device_groups.single_group_suffices
    with (
        patch.object(communicator, "single_group_suffices", (lambda _: False) if as_a_device else suffices),
        patch.object(communicator, "device_group", gloo_edge),
        closing(Pipeline(stages, schedule, loss=nn.functional.mse_loss, timeout=120)) as pipeline,
    ):
        for rows in (8, 8, 7):
            pipeline.step(torch.randn(rows, 8), target=torch.randn(rows, 8))
            pipeline.eval(torch.randn(rows, 8))
        return [parameter.grad for parameter in pipeline.parameters() if parameter.grad is not None]


def both(family: str) -> bool:
    on_cpu, on_device = (trained(family, as_a_device=as_a_device) for as_a_device in (False, True))
    return len(on_cpu) > 0 and all(map(torch.equal, on_cpu, on_device))


@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
@small(lambda family: family in {"1f1b", "zbv"})
def test_a_group_per_edge_and_separate_flags_give_the_same_gradients(pools: Pools, family: str) -> None:
    assert pools(2).run(both, family) == [True, True]


def are_equal(turns: list[int | None]) -> list[bool]:
    """Of each turn: whether all ranks have the same bytes, where this rank, if any, has others."""
    ranks, own = range(dist.get_world_size()), dist.get_rank()
    connected = communicator.Communicator(ranks, own, (), 1, torch.device("cpu"), timedelta(seconds=60))
    with closing(connected):
        return [connected.all_equal(torch.tensor([7, int(own == other)])) for other in turns]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_know_whether_their_bytes_are_equal(pools: Pools, ranks: int) -> None:
    turns = [each for rank in range(1, ranks) for each in (rank, None, None)]
    assert pools(ranks).run(are_equal, turns) == [[each is None for each in turns]] * ranks


def test_a_device_without_nccl_is_rejected() -> None:
    with pytest.raises(PipelineError, match=r"CPUs \(gloo\) and CUDA devices \(NCCL\), not on mps"):
        device_groups.device_group(torch.device("mps"), Store(), 0, timedelta(seconds=1))
