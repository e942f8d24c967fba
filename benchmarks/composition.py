"""Pipelines of FSDP stages, pp2 x fsdp2: Penstock and torch.distributed.pipelining.

    python -m benchmarks.composition [family ...]

Both run the same transformer with the same fully_shard in the same processes. Times are medians over steps; the
time of a step is that of its slowest rank. All-gathers and reduce-scatters are counted in FSDP2 and compared
with the UNSHARD and REDUCE_GRAD actions of the schedule; every block is its own parameter group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed.pipelining as torch_pipelining
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import penstock
from benchmarks.modules import Block
from benchmarks.processes import on_ranks
from benchmarks.runtime import SINGLE, TORCH_SCHEDULES, schedule_of, seconds
from penstock.runtime import Pipeline

MICROBATCHES, WIDTH, BLOCKS, STEPS = 8, 256, 8, 15
GATHER, REDUCE = "foreach_all_gather", "foreach_reduce"
_COUNT_COLUMNS = ("all-gathers: penstock, schedule, torch", "reduce-scatters")


def sharded_stage(schedule: penstock.Schedule, mesh: DeviceMesh) -> Any:
    stage = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS // schedule.num_stages)))
    for block in stage:
        fully_shard(block, mesh=mesh["fsdp"], reshard_after_forward=False)
    return fully_shard(stage, mesh=mesh["fsdp"], reshard_after_forward=False)


def penstock_step(schedule: penstock.Schedule, mesh: DeviceMesh, x: Tensor, y: Tensor) -> Callable[[], Any]:
    own = schedule.placement.stages_of_rank[mesh.get_local_rank("pp")]
    stages = [sharded_stage(schedule, mesh) for _ in own]
    pipeline = Pipeline(stages, schedule, loss=nn.functional.mse_loss, group=mesh["pp"])
    return lambda: pipeline.step(x, target=y)


def torch_step(
    name: str, schedule: penstock.Schedule, mesh: DeviceMesh, x: Tensor, y: Tensor
) -> Callable[[], Any]:
    own = schedule.placement.stages_of_rank[mesh.get_local_rank("pp")]
    count, group = schedule.num_stages, mesh.get_group("pp")
    stages: Any = [
        torch_pipelining.PipelineStage(
            sharded_stage(schedule, mesh), stage, count, torch.device("cpu"), group=group
        )
        for stage in own
    ]
    runner: Any = TORCH_SCHEDULES[name](
        stages[0] if name in SINGLE else stages, schedule.microbatches, loss_fn=nn.functional.mse_loss
    )
    last = count - 1 in own

    def step() -> None:
        options = {"target": y, "losses": []} if last else {}
        runner.step(*((x,) if 0 in own else ()), **options)

    return step


@contextmanager
def counted(found: Counter[str]) -> Iterator[None]:
    """Count the collectives of FSDP in this context."""

    def count_calls(name: str) -> Any:
        real = getattr(_fsdp_param_group, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return real(*args, **kwargs)

        return patch.object(_fsdp_param_group, name, call)

    with count_calls(GATHER), count_calls(REDUCE):
        yield


def scheduled(schedule: penstock.Schedule, rank: int) -> Counter[str]:
    """Count the collectives that the schedule has on this rank."""
    names = {penstock.Kind.UNSHARD: GATHER, penstock.Kind.REDUCE_GRAD: REDUCE}
    kinds = [step.parts[0].kind for step in penstock.lower(schedule).ranks[rank]]
    groups = BLOCKS // schedule.num_stages
    return Counter(names[kind] for kind in kinds for _ in range(groups) if kind in names)


def measure(names: list[str], print_row: Callable[..., None]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    x, y = (torch.randn(MICROBATCHES * 2, 64, WIDTH) for _ in range(2))
    print_row("schedule", "penstock s", "torch s", "torch / penstock", *_COUNT_COLUMNS)
    for name in names or TORCH_SCHEDULES:
        schedule = schedule_of(name, 2, MICROBATCHES)
        runners = [penstock_step(schedule, mesh, x, y), torch_step(name, schedule, mesh, x, y)]
        penstock_seconds, torch_seconds = seconds(*runners, steps=STEPS)
        counts: list[Counter[str]] = [Counter(), Counter()]
        for runner, count in zip(runners, counts):
            with counted(count):
                runner()
        expected = scheduled(schedule, mesh.get_local_rank("pp"))
        print_row(
            name,
            penstock_seconds,
            torch_seconds,
            torch_seconds / penstock_seconds,
            *(f"{counts[0][each]}, {expected[each]}, {counts[1][each]}" for each in (GATHER, REDUCE)),
        )


def main() -> None:
    print("pp2 x fsdp2, 8 transformer blocks, 8 microbatches of 2 x 64 tokens (4 ranks, one thread each)")
    on_ranks(4, measure, sys.argv[1:])


if __name__ == "__main__":
    main()
