"""Promise: norm and scale count empty shards, partial sums and overflows correctly."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from penstock import build
from penstock.runtime import GradScaler, Pipeline
from tests.support.linear_stages import WIDTH, linear, mesh_of_four, numbers, pipeline_of
from tests.support.pool import Pools


def norms_of_uneven_shards() -> list[tuple[float, float]]:
    """The weights of the second stage have one row, so one of two ranks has an empty shard."""
    mesh, x, y = mesh_of_four(), numbers(0, 4, WIDTH), numbers(1, 4, 1)
    module = linear(0) if mesh.get_local_rank("pp") == 0 else linear(1, 1)
    fully_shard(module, mesh=mesh["dp"])
    alone = nn.Sequential(linear(0), linear(1, 1))
    functional.mse_loss(alone(x), y).backward()  # type: ignore[no-untyped-call]
    with closing(pipeline_of(module, mesh)) as pipeline:
        pipeline.step(x, target=y)
        return [
            (
                float(pipeline.clip_grad_norm_(1e9, kind)),
                float(nn.utils.clip_grad_norm_(alone.parameters(), 1e9, kind)),
            )
            for kind in (2.0, torch.inf, -torch.inf, -1.0, 0.0)
        ]


def test_a_rank_with_an_empty_shard_takes_part_in_every_norm(pools: Pools) -> None:
    for answer in pools(4).run(norms_of_uneven_shards):
        for found, right in answer:
            assert found == pytest.approx(right, rel=1e-9)


class Block(nn.Module):
    """A sequence-parallel norm and two tensor-parallel linear layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH).double(), linear(seed, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


class Scattered(nn.Module):
    """Converts plain batches to DTensors."""

    def __init__(self, block: Block, mesh: DeviceMesh) -> None:
        super().__init__()
        self.block, self.mesh = block, mesh

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        result: Tensor = self.block(x)
        return result


def sequence_parallel() -> tuple[float, float]:
    mesh, x = mesh_of_four("tp"), numbers(0, 4, 6, WIDTH)
    alone = nn.Sequential(Block(0), Block(1))
    block = Block(mesh.get_local_rank("pp"))
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(block, mesh["tp"], plan)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(y.full_tensor() if isinstance(y, DTensor) else y, target)

    for part in x.chunk(2):
        (loss(alone(part), part) / 2).backward()  # type: ignore[no-untyped-call]
    with closing(pipeline_of(Scattered(block, mesh["tp"]), mesh, loss=loss)) as pipeline:
        pipeline.step(x, target=x)
        return float(pipeline.clip_grad_norm_(0.1)), float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1))


def test_sequence_parallel_gradients_are_in_the_norm(pools: Pools) -> None:
    for found, right in pools(4).run(sequence_parallel):
        assert found == pytest.approx(right, rel=1e-9)


def test_a_disabled_scaler_replaces_an_earlier_one() -> None:
    module, x = linear(0), numbers(0, 4, WIDTH)
    with closing(
        Pipeline([module], build("1f1b", ranks=1, microbatches=2), loss=functional.mse_loss)
    ) as pipeline:
        pipeline.step(x, target=x)
        assert module.weight.grad is not None
        plain = module.weight.grad.clone()
        module.zero_grad()
        GradScaler(pipeline, init_scale=4.0)
        GradScaler(pipeline, enabled=False)
        pipeline.step(x, target=x)
        assert torch.equal(module.weight.grad, plain)


@pytest.mark.parametrize("finite", [True, False])
def test_a_fused_optimizer_skips_an_overflowing_step(finite: bool) -> None:  # noqa: FBT001 -- a parameter of the test
    module, x = linear(0), numbers(0, 4, WIDTH)
    with closing(
        Pipeline([module], build("1f1b", ranks=1, microbatches=2), loss=functional.mse_loss)
    ) as pipeline:
        scaler = GradScaler(pipeline, init_scale=4.0)
        optimizer = torch.optim.Adam(pipeline.parameters(), fused=True)
        before = module.weight.detach().clone()
        pipeline.step(x, target=x)
        assert module.bias.grad is not None
        if not finite:
            module.bias.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, module.weight) is not finite
        assert scaler.get_scale() == (4.0 if finite else 2.0)
