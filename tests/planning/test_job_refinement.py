"""Promises of a refined job plan: memory policies, searched orders, jitter, collectives of replicas, Ctrl-C."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.cost.estimate import device
from penstock.cost.estimate.estimate import Estimator
from penstock.errors import PlanError
from penstock.ir.kinds import Kind
from penstock.planning import JobRequest, plan
from penstock.planning.estimated_model import stage_costs
from penstock.planning.jobs import slowest
from penstock.search import Progress
from penstock.simulation.jitter import Spread
from tests.support.model_configs import gpt_config

GPT = gpt_config(2048, 8, 16, vocab_size=64_000)
SIZES: dict[str, Any] = {"tensor": 1, "pipeline": 4, "microbatch_size": 1, "recompute_granularity": "none"}


def request(**changes: Any) -> JobRequest:
    given = {"config": GPT, "device": device("h100"), "devices": 4, "batch": 16, "sequence": 2048, **SIZES}
    return JobRequest(**{**given, "search": False, **changes})


# --- memory policies --------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "config": gpt_config(2048, 8, 16, vocab_size=8192),
    "sequence": 4096,
    "device": replace(device("h100"), host_link=1e12),
}
"""Most memory is for activations, and the host is near."""


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_what_fits_only_with_a_memory_policy_is_planned_with_it(policy: str) -> None:
    with pytest.raises(PlanError, match=r"fits no layout.*what would fit: .*(recompute|offload)=True"):
        plan(request(**FULL, memory_limit=3.4e9))
    made = plan(request(**FULL, memory_limit=3.4e9, **{policy: True}))
    assert all(policy in each.memory_policy for each in made.options)
    assert max(each.memory for each in made.options) <= 3.4e9
    assert policy in str(made.best)
    assert made.to_keys(made.best)["memory_policy"] == made.best.memory_policy
    penstock.validate(made.best.schedule)


def test_memory_policies_never_make_a_plan_slower() -> None:
    policies: list[dict[str, Any]] = [{}, {"recompute": True}, {"recompute": True, "offload": True}]
    seconds = [plan(request(**FULL, memory_limit=4.2e9, **t)).best.seconds for t in policies]
    assert seconds[2] < seconds[1] == seconds[0]  # what waits on a near host costs nothing


# --- searched orders --------------------------------------------------------------------------------


def test_searched_orders_are_never_worse_and_are_written(tmp_path: Any) -> None:
    families, searched = (plan(request(memory_limit=5.5e9, search=each)) for each in (False, True))
    assert searched.best.seconds <= families.best.seconds
    assert searched.best.memory <= 5.5e9
    paths = searched.write(tmp_path)
    assert penstock.read(paths[0]) == searched.best.schedule
    again = plan(request(memory_limit=5.5e9, search=True))
    assert [each.seconds for each in again.options] == [each.seconds for each in searched.options]


# --- replicas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 3])
def test_collectives_of_replicas_are_where_the_schedule_places_them(zero: int) -> None:
    made = plan(request(devices=16, batch=64, zero=zero))
    best = made.best
    found = Estimator(GPT, made.request.device)(best.layout.parallel)
    costs = stage_costs(found, best.configuration.placement, best.configuration.counts)
    lowered = best.configuration.as_run(best.schedule)
    assert lowered.table.has(Kind.REDUCE_GRAD)
    assert best.makespan == pytest.approx(penstock.simulate(lowered, costs).makespan)
    free = replace(costs, reduce_grad=0.0, unshard=0.0)
    without = penstock.simulate(best.schedule, free).makespan
    stages = best.configuration.placement.num_stages
    every = sum(costs.per_stage("reduce_grad", stages)) + sum(costs.per_stage("unshard", stages))
    assert every > 0
    assert without < best.makespan < without + every * best.layout.microbatches  # some are hidden, not all
    if zero == 3:
        assert lowered.table.has(Kind.UNSHARD)


def test_reductions_that_nothing_hides_cost_their_whole_time() -> None:
    """The last reduction of a rank starts when its last gradient is there."""
    made = plan(request(devices=16, batch=64))
    best = made.best
    found = Estimator(GPT, made.request.device)(best.layout.parallel)
    costs = stage_costs(found, best.configuration.placement, best.configuration.counts)
    late = replace(costs, reduce_grad=10.0)
    makespan = penstock.simulate(best.schedule, replace(costs, reduce_grad=0.0)).makespan
    assert penstock.simulate(best.configuration.as_run(best.schedule), late).makespan == pytest.approx(
        makespan + 10, rel=0.1
    )


# --- jitter -----------------------------------------------------------------------------------------


def test_jitter_ranks_by_the_quantile() -> None:
    made = plan(request(devices=8, batch=32, jitter=0.1, quantile=0.9))
    assert [each.seconds for each in made.options] == sorted(each.seconds for each in made.options)
    assert all(each.seconds > each.seconds_without_jitter > 0 for each in made.options)
    assert made.best.seconds == plan(request(devices=8, batch=32, jitter=0.1, quantile=0.9)).best.seconds
    calm = plan(request(devices=8, batch=32, jitter=0.0))
    assert calm.best.seconds == pytest.approx(calm.best.seconds_without_jitter)


def test_a_step_waits_for_the_slowest_replica() -> None:
    spread = Spread(np.sort(np.random.default_rng(0).normal(10, 1, 20_000)))
    assert slowest(spread, 1, 0.9) == spread.quantile(0.9)
    groups = np.random.default_rng(1).normal(10, 1, (5_000, 64)).max(axis=1)
    assert slowest(spread, 64, 0.5) == pytest.approx(float(np.quantile(groups, 0.5)), rel=0.01)
    few = Spread(spread.makespans[::1000])
    assert slowest(few, 64, 0.5) == pytest.approx(float(np.quantile(groups, 0.5)), rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"jitter": 2.0}, "jitter must be a share from 0 to 1 .given 2.0."),
        ({"quantile": 1.0}, "quantile must be between 0 and 1"),
    ],
)
def test_wrong_values_name_the_option(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        request(**changes)


# --- Ctrl-C -----------------------------------------------------------------------------------------


def test_an_interrupted_plan_has_what_was_found_until_then() -> None:
    phases = []

    def interrupt(now: Progress) -> None:
        phases.append(now.phase)
        if now.phase.startswith("exactly"):
            raise KeyboardInterrupt

    made = plan(request(), on_progress=interrupt)
    assert made.interrupted
    assert made.options
    assert phases[0] == "bounds"


def test_a_plan_interrupted_before_its_first_quantile_is_one_without_jitter() -> None:
    def interrupt(now: Progress) -> None:
        if now.phase.startswith("simulating jitter"):
            raise KeyboardInterrupt

    made = plan(request(jitter=0.1), on_progress=interrupt)
    assert made.interrupted
    assert made.request.jitter is None
    assert all(each.seconds == each.seconds_without_jitter for each in made.options)
    record = made.to_record()
    assert (record["jitter"], record["quantile"], record["interrupted"]) == (None, None, True)


def test_a_plan_interrupted_after_a_quantile_keeps_only_options_with_one() -> None:
    phases = []

    def interrupt(now: Progress) -> None:
        phases.append(now.phase)
        if sum(phase.startswith("simulating jitter") for phase in phases) > 1:
            raise KeyboardInterrupt

    made = plan(request(jitter=0.1, devices=8, batch=32, pipeline=None), on_progress=interrupt)
    assert (made.interrupted, made.request.jitter, len(made.options)) == (True, 0.1, 1)
    assert made.best.seconds > made.best.seconds_without_jitter
