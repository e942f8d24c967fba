"""Promise: the protocol for devices, one group per edge and flags from host to host, gives the same gradients.

There is no GPU here, so the groups are gloo's; what NCCL does beyond that is not tested.
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
from penstock.runtime.transport import links
from tests.support.pool import Pools

pytestmark = pytest.mark.xdist_group("profile")


def gloo_edge(_device: torch.device, store: Store, side: int, timeout: timedelta) -> Any:
    made: Any = dist.ProcessGroupGloo
    return made(store, side, 2, timeout)


def trained(family: str, *, as_a_device: bool) -> list[torch.Tensor]:
    """Gradients of three steps, the rows of which differ in number, and an eval in between."""
    schedule = penstock.build(family, ranks=dist.get_world_size(), microbatches=4)
    torch.manual_seed(0)
    stages = {i: nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for i in range(schedule.num_stages)}
    enough = links.one_group_is_enough
    with (
        patch.object(links, "one_group_is_enough", (lambda _: False) if as_a_device else enough),
        patch.object(links, "edge_group", gloo_edge),
        closing(Pipeline(stages, schedule, loss=nn.functional.mse_loss, timeout=120)) as pipeline,
    ):
        for rows in (8, 8, 7):
            pipeline.step(torch.randn(rows, 8), target=torch.randn(rows, 8))
            pipeline.eval(torch.randn(rows, 8))
        return [parameter.grad for parameter in pipeline.parameters() if parameter.grad is not None]


def both(family: str) -> bool:
    here, there = (trained(family, as_a_device=way) for way in (False, True))
    return len(here) > 0 and all(map(torch.equal, here, there))


@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
def test_a_group_per_edge_and_flags_by_host_give_the_same_gradients(pools: Pools, family: str) -> None:
    assert pools(2).run(both, family) == [True, True]


def test_a_device_without_nccl_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"CPUs \(gloo\) and CUDA devices \(NCCL\), not on mps"):
        links.edge_group(torch.device("mps"), Store(), 0, timedelta(seconds=1))
