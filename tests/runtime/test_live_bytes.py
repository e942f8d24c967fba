"""Promise: the bytes that a run holds after each action are those of the simulated memory."""

from __future__ import annotations

from contextlib import closing
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from penstock import Costs, Kind, Placement, Schedule, StageGraph, build, families, lower, simulate
from penstock.cost.memory import memory_over_time
from penstock.ir.encoding import Ints
from penstock.lowering import DEFAULT_PASSES, Offload, Pass, Policy, Recompute, SplitBackward
from penstock.runtime import Pipeline
from tests.support.grids import is_full, small
from tests.support.pool import Pools
from tests.support.reference import TIMEOUT, first_ranks

ROWS, WIDTH, HIDDEN = 2, 8, 48
MESSAGE = 64 + ROWS * WIDTH * 4
"""Bytes of a message: its header and the output of a stage."""
WAYS: dict[str, list[Pass]] = {
    "plain": [],
    "recompute": [Recompute()],
    "recompute-one": [Recompute(stages=(1,))],
    "recompute-alternating": [Recompute(policy=Policy(every=2))],
    "offload": [Offload(ahead=0)],
    "offload-ahead": [Offload(stages=(0,), ahead=1)],
    "both": [Recompute(stages=(0,)), Offload(ahead=0)],
    "recomputed-is-offloaded": [Recompute(), Offload(ahead=0)],
}


def stage() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))


def costs_of(schedule: Schedule) -> Costs:
    """From the definition of the model: what each stage saves, and the messages between ranks."""
    graph, output = schedule.graph, ROWS * WIDTH * 4
    inputs = [input_bytes(schedule, s) for s in range(schedule.num_stages)]
    loss = [0 if graph.outputs(s) else output for s in range(schedule.num_stages)]  # it saves its input
    return Costs(
        activation=tuple(own + ROWS * HIDDEN * 4 + last for own, last in zip(inputs, loss)),
        activation_freed_by_input=tuple(loss),
        checkpoint=tuple(inputs),
        activation_message=MESSAGE,
        gradient_message=MESSAGE,
    )


def input_bytes(schedule: Schedule, stage: int) -> int:
    """Of the batch nothing; of another stage a message or, on the same rank, a tensor.

    Of the stages of a rank that use a message, the last one has the message, and the others have copies.
    """
    hosts, graph = schedule.placement.stage_to_rank, schedule.graph
    for source in graph.inputs(stage):
        last = max(each for each in graph.outputs(source) if hosts[each] == hosts[stage])
        return MESSAGE if hosts[source] != hosts[stage] and last == stage else ROWS * WIDTH * 4
    return 0


def simulated(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """Per rank: bytes held after each step of its list, if each step follows the end of the one before it."""
    table, place = schedule.table, np.arange(len(schedule.table.rank), dtype=np.float64)
    found = []
    memories = memory_over_time(table, schedule.messages, costs, place, place + 0.5)
    for rank, memory in enumerate(memories):
        ends = place[table.rank == rank] + 0.5
        last = np.searchsorted(memory.times, ends, side="right") - 1
        found.append([float(memory.total[at]) if at >= 0 else 0.0 for at in last])
    return found


def live_bytes(schedules: list[Schedule]) -> list[tuple[list[Ints], Costs] | None]:
    """Of the second step of each schedule, the bytes on all ranks and the costs."""
    found: list[tuple[list[Ints], Costs] | None] = []
    for schedule in schedules:
        group = first_ranks(schedule.num_ranks)
        if group is None:
            found.append(None)
            continue
        modules = {index: stage() for index in range(schedule.num_stages)}
        batch = torch.randn(ROWS * schedule.microbatches, WIDTH)
        with closing(
            Pipeline(modules, schedule, loss=nn.functional.mse_loss, group=group, timeout=TIMEOUT)
        ) as pipeline:
            pipeline.step(batch, target=torch.zeros_like(batch))
            with pipeline.profile(memory=True) as profile:
                pipeline.step(batch, target=torch.zeros_like(batch))
            found.append((profile.live_bytes[0], profile.costs))
    return found


TWO_HEADS = lower(
    Schedule.parse(
        "0F0 0F1 0B0 0B1 | 1F0 1F1 2F0 2B0 2F1 1B0 2B1 1B1",
        graph=StageGraph(3, ((0, 1), (0, 2))),
        placement=Placement((0, 1, 1)),
    ),
    [Recompute(stages=(1,)), Offload(ahead=0), *DEFAULT_PASSES],
)
"""Two stages of a rank use the same message."""


@pytest.mark.parametrize("p", [2, 4])
@small(lambda p: p == 2)
def test_each_action_holds_and_frees_what_the_simulation_says(pools: Pools, p: int) -> None:
    chosen = tuple(families()) if p == 4 else ("1f1b", "zbv", "dualpipev", "po-h")
    step = 5 if p == 4 else 3 if is_full() else 7
    grid = list(product((family for family in chosen if family != "forward-only"), WAYS.items()))[::step]
    schedules = [
        lower(build(family, ranks=p, microbatches=4), [*way, *DEFAULT_PASSES]).renamed(f"{family} {name}")
        for family, (name, way) in grid
    ]
    split = lower(build("gpipe", ranks=p, microbatches=3), [SplitBackward(), *WAYS["both"], *DEFAULT_PASSES])
    schedules += [split.renamed("gpipe split both"), TWO_HEADS]
    for rank, found in enumerate(pools(p).run(live_bytes, schedules)):
        for schedule, measured in zip(schedules, found, strict=True):
            if measured is None:
                assert rank >= schedule.num_ranks
                continue
            held, costs = measured
            wanted = costs_of(schedule)
            assert held[rank].tolist() == simulated(schedule, wanted)[rank], (schedule.name, rank)
            if schedule.name.startswith(("1f1b", "gpipe", "zb")) and not schedule.table.has(Kind.OFFLOAD):
                # others hold most within a pair, or receive at the instant at which a copy to the host ends
                assert max(held[rank]) == simulate(schedule, wanted).peak_memory[rank], schedule.name
            assert costs.activation == wanted.activation
            assert costs.checkpoint == wanted.checkpoint


def test_bytes_are_counted_where_asked_for_and_where_the_schedule_offloads() -> None:
    batch = torch.randn(4, WIDTH)
    orders = ("0F0 0F1 0B0 0B1", "0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0")
    for order, memory, steps in ((orders[0], False, 0), (orders[0], True, 1), (orders[1], False, 1)):
        with closing(Pipeline({0: stage()}, Schedule.parse(order), loss=nn.functional.mse_loss)) as pipeline:
            with pipeline.profile(memory=memory) as profile:
                pipeline.step(batch, target=batch)
                pipeline.eval(batch, target=batch)
            assert len(profile.live_bytes) == steps
            assert profile.timelines[0].costs.activation == ((ROWS * (HIDDEN + WIDTH) * 4,) if steps else 1)
