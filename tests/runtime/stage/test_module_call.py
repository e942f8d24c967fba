"""Promise: what ranks split into microbatches has the same number of rows, or the step is refused."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import Placement, StageGraph, build
from penstock.errors import PenstockError
from penstock.runtime import Pipeline
from tests.support.pool import Pools

WIDTH = 2


class Scaled(nn.Linear):
    """A layer whose output is multiplied by a column, which broadcasts."""

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if factor is None else y * factor


def step_with_keyword(odd: int, rows: int) -> str:
    """A step of three ranks with a keyword argument, of which one rank has another number of rows."""
    x = torch.ones(8, WIDTH)
    factor = torch.ones(rows if dist.get_rank() == odd else 8, 1)
    stages: dict[int, nn.Module] = {stage: Scaled(WIDTH, WIDTH) for stage in range(3)}
    with closing(Pipeline(stages, "1f1b", microbatches=4, loss=mse_loss)) as pipeline:
        try:
            pipeline.step(x, target=x, factor=factor)
        except PenstockError as error:
            return str(error)
    return ""


def test_a_keyword_argument_with_other_rows_on_a_rank_in_the_middle_is_rejected(pools: Pools) -> None:
    assert pools(3).run(step_with_keyword, 1, 8) == ["", "", ""]
    for message in pools(3).run(step_with_keyword, 1, 4):
        assert "step 1 failed on rank 1, stage 1, microbatch 0, in 1F0" in message
        assert 'but there are 8 in args[0], 4 in kwargs["factor"]' in message


class Product(nn.Module):
    """The product of two inputs, which broadcasts."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * y


def step_with_two_sources(rows: int) -> str:
    """A step in which each of two ranks splits the argument of its own source."""
    rank = dist.get_rank()
    graph = StageGraph(3, ((0, 2), (1, 2)))
    schedule = build("gpipe", graph=graph, ranks=2, microbatches=4, placement=Placement((0, 1, 1)))
    stages: dict[int, nn.Module] = {0: Scaled(WIDTH, WIDTH), 1: Scaled(WIDTH, WIDTH), 2: Product()}
    x, y = torch.ones(8, WIDTH), torch.ones(rows, WIDTH)
    with closing(Pipeline(stages, schedule, loss=lambda output: output.mean())) as pipeline:
        try:
            pipeline.step(*((x, None) if rank == 0 else (None, y)))
        except PenstockError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("rows", "expected"), [(8, ""), (4, "there are 8 in args[0], 4 in args[1]")])
def test_arguments_of_sources_on_different_ranks_have_the_same_rows(
    pools: Pools, rows: int, expected: str
) -> None:
    for message in pools(2).run(step_with_two_sources, rows):
        assert expected in message
        assert bool(message) == bool(expected)
