"""Promise: a measured timeline shows what happened on all ranks, in the format of a simulated one."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.ir.encoding import Bools
from penstock.runtime import Pipeline, register_layer
from penstock.simulation.gaps import gaps
from penstock.view.html import html
from penstock.view.perfetto import trace
from tests.support.pool import Pools
from tests.support.slowness import slowness

NAP = 0.05
M = 4


class Nap(nn.Module):
    """A layer whose F takes a nap, whose I two and whose W three."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(NAP)
        return x * self.weight


class NapRule:
    weights = ("weight",)

    def forward(self, layer: Nap, x: Tensor, *_weights: Tensor | None) -> Tensor:
        return layer.forward(x) if "forward" not in layer.__dict__ else Nap.forward(layer, x)

    def input_gradient(self, _layer: Nap, _x: Tensor, weights: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * NAP)
        return gradient.mul(weights[0])

    def weight_gradients(
        self, _layer: Nap, x: Tensor, _weights: Any, gradient: Tensor, _wanted: Any
    ) -> tuple[Tensor]:
        time.sleep(3 * NAP)
        return ((gradient * x).sum(0),)


def profiled(family: str) -> dict[str, Any]:
    """Two steps and an eval under the profiler."""
    register_layer(Nap, NapRule())
    schedule = penstock.build(family, ranks=dist.get_world_size(), microbatches=M)
    own = schedule.placement.stages_of_rank[dist.get_rank()]
    x, y = torch.ones(M, 4, requires_grad=True), torch.ones(M, 4)
    with closing(
        Pipeline([Nap() for _ in own], schedule, loss=nn.functional.mse_loss, timeout=120)
    ) as pipeline:
        unprofiled = pipeline.step(x, target=y)
        with pipeline.profile() as profile:
            result = pipeline.step(x, target=y)
            live = pipeline.peak_live_activations
            pipeline.step(x, target=y)
        middle = profile.timeline
        with pipeline.profile() as evaluated:
            pipeline.eval(x)
    assert unprofiled.timeline is None
    assert result.timeline is profile.timelines[0]
    return {
        "timeline": (middle.schedule, middle.start, middle.end),
        "costs": middle.costs,
        "live": live,
        "peak": [int(memory.activations.max()) for memory in middle.memory],
        "steps": len(profile.timelines),
        "predicted": penstock.simulate(middle.schedule, middle.costs).makespan,
        "measured": middle.makespan,
        "views": [len(trace([middle])), len(html([middle])), len(gaps(middle)), middle.bubble("period")],
        "eval": evaluated.timeline.makespan,
        "clocks": profile.clocks,
    }


@pytest.fixture(scope="module", params=["1f1b", "zbv"])
def profiles(request: pytest.FixtureRequest, pools: Pools) -> list[dict[str, Any]]:
    before = slowness()
    found = pools(2).run(profiled, request.param)
    return [each | {"slowness": max(before, slowness())} for each in found]


def test_every_rank_has_the_same_timeline(profiles: list[dict[str, Any]]) -> None:
    (schedule, start, end), (other, its_start, its_end) = (each["timeline"] for each in profiles)
    assert schedule == other
    assert schedule.level == "lowered"
    assert (start == its_start).all()
    assert (end == its_end).all()


def test_nothing_starts_before_what_it_needs_has_ended(profiles: list[dict[str, Any]]) -> None:
    schedule, start, end = profiles[0]["timeline"]
    producer, consumer = schedule.table.crossings
    assert (start[consumer] >= end[producer]).all()
    within: Bools = schedule.table.rank[1:] == schedule.table.rank[:-1]
    assert (start[1:][within] >= end[:-1][within]).all()


def test_the_costs_are_what_the_stages_take(profiles: list[dict[str, Any]]) -> None:
    costs = profiles[0]["costs"]
    split = profiles[0]["timeline"][0].table.has(penstock.Kind.I)
    late = NAP * profiles[0]["slowness"]
    assert all(NAP <= seconds < NAP + late for seconds in costs.forward)
    if split:
        assert all(2 * NAP <= seconds < 2 * NAP + late for seconds in costs.backward_input)
        assert all(3 * NAP <= seconds < 3 * NAP + late for seconds in costs.backward_weight)


def test_latency_and_bandwidth_are_measured_and_messages_have_their_sizes(
    profiles: list[dict[str, Any]],
) -> None:
    costs, (schedule, _, _) = profiles[0]["costs"], profiles[0]["timeline"]
    apart = schedule.table.crosses_ranks.tolist()
    # 0 also between ranks, if a busy machine made the transfers of the link measurement slow
    assert all(0 <= seconds < profiles[0]["slowness"] for seconds, far in zip(costs.latency, apart) if far)
    assert not any(seconds for seconds, far in zip(costs.latency, apart) if not far)
    assert all(speed > 0 for speed in costs.bandwidth)
    assert [size >= 4 * 4 for size in costs.activation_message] == apart
    assert [size >= 4 * 4 for size in costs.gradient_message] == apart


def test_what_the_costs_predict_is_what_was_measured(profiles: list[dict[str, Any]]) -> None:
    # loose, because a machine may be busy with other things; benchmarks/runtime.py measures it
    allowed = 0.25 * profiles[0]["slowness"]
    assert profiles[0]["predicted"] == pytest.approx(profiles[0]["measured"], rel=allowed)


def test_live_activations_are_those_of_the_timeline(profiles: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(profiles):
        assert each["live"] == each["peak"][rank]


def test_each_step_has_a_timeline_and_eval_has_one_too(profiles: list[dict[str, Any]]) -> None:
    assert profiles[0]["steps"] == 2
    assert profiles[0]["eval"] > M * NAP


def test_views_and_metrics_take_a_measured_timeline(profiles: list[dict[str, Any]]) -> None:
    assert all(amount > 0 for amount in profiles[0]["views"])


def test_ranks_of_one_machine_share_a_clock(profiles: list[dict[str, Any]]) -> None:
    assert profiles[1]["clocks"].offsets == (0.0, 0.0)
