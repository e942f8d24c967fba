"""Promises of the whole job's plan: bounds hold, options fit, and what fits nowhere says what would."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock import Costs
from penstock.cost.estimate import device, estimate
from penstock.errors import PlanError
from penstock.planning import JobRequest, plan
from penstock.planning.estimated_model import even_blocks
from penstock.planning.explanation import explain, time_shares
from penstock.planning.jobs import (
    EstimatedStages,
    FamilyShape,
    JobEvaluation,
    families_by_shape,
    job_layouts,
    simulated_without_queues,
)
from penstock.planning.planner import JobPlan
from tests.support.grids import small
from tests.support.model_configs import config, gpt_config

H100 = device("h100")
GPT = gpt_config(2048, 10, 16, vocab_size=64_000)


def request(**changes: Any) -> JobRequest:
    return JobRequest(**{"config": GPT, "device": H100, "devices": 8, "batch": 16, "sequence": 1024, **changes})


@pytest.fixture(scope="module")
def made() -> JobPlan:
    return plan(request(memory_limit=12e9, tensor=2))


def test_layouts_use_all_devices_and_the_whole_batch() -> None:
    asked = request(config=config("mixtral-8x7b"), devices=48, batch=96, sequence=32768)
    layouts = list(job_layouts(asked))
    assert len(layouts) == len(set(layouts)) > 50
    for each in layouts:
        own = each.parallel
        assert prod((own.tensor_parallel, own.context_parallel, each.pipeline, own.data_parallel)) == 48
        assert own.data_parallel * own.microbatch_size * each.microbatches == 96
        own.check(asked.config)
    assert {each.parallel.expert_parallel for each in layouts} == {1, 2, 4, 8}
    assert {each.parallel.context_parallel for each in layouts} == {1, 2, 4}


def test_sizes_that_are_given_are_not_searched() -> None:
    fixed = request(tensor=2, pipeline=2, microbatch_size=2, recompute_granularity="full")
    for each in job_layouts(fixed):
        own = each.parallel
        assert (own.tensor_parallel, each.pipeline, own.microbatch_size) == (2, 2, 2)
        assert own.recompute_granularity == "full"


def test_stages_are_no_longer_than_with_blocks_evenly_divided() -> None:
    found = estimate(GPT, next(job_layouts(request())).parallel, H100)
    stages, times = EstimatedStages(found), [each.seconds.compute.total for each in found.layers]
    for number in range(1, 11):
        counts = stages.counts(number)
        assert sum(counts) == 12
        assert min(counts) > 0

        def longest(parts: tuple[int, ...]) -> float:
            ends = [sum(parts[:n]) for n in range(len(parts) + 1)]
            return max(sum(times[i:j]) for i, j in pairwise(ends))

        assert longest(counts) <= longest(even_blocks(found, number)) * (1 + 1e-6)


def test_no_option_is_faster_than_its_bound_and_bounds_come_in_order() -> None:
    asked = request(config=replace(config("mixtral-8x7b"), layers=8), sequence=2048)
    evaluation = JobEvaluation(asked, None, penstock.search)
    ordered = list(evaluation.configurations())
    assert [each.bound for each in ordered] == sorted(each.bound for each in ordered)
    for each in ordered[:: len(ordered) // 30]:
        layout = each.layout
        for family in families_by_shape()[each.shape]:
            sizes = layout.pipeline, layout.microbatches, each.shape.stages_per_rank
            if (built := evaluation.built(family, *sizes)) is not None:
                makespan = simulated_without_queues(built.schedule, each.costs).makespan
                assert makespan >= each.bound * (1 - 1e-9)


def test_families_that_need_the_host_or_do_not_train_take_no_part() -> None:
    names = {name for group in families_by_shape().values() for name in group}
    assert {"1f1b", "interleaved-1f1b", "zbv", "dualpipev", "zb-h1"} <= names
    assert not {"forward-only", "po-h"} & names


def test_options_fit_and_are_sorted(made: JobPlan) -> None:
    assert [each.seconds for each in made.options] == sorted(each.seconds for each in made.options)
    assert max(each.memory for each in made.options) <= 12e9
    assert made.best.is_exact
    assert made.bound <= made.best.makespan
    ranking = made.evaluation.ranked()
    assert set(ranking) <= set(made.options)
    assert len({each.layout.sizes for each in ranking}) == len(ranking)
    memory = [each.memory for each in made.frontier]
    assert memory == sorted(memory, reverse=True)


def test_an_extended_step_is_as_long_as_the_whole_one() -> None:
    asked = request(devices=4, batch=64, tensor=1, pipeline=4, microbatch_size=1, recompute_granularity="none")
    evaluation = JobEvaluation(asked, None, penstock.search)
    for each in evaluation.configurations():
        for option in evaluation.options_of(each):
            if each.shape.stages_per_rank <= 2:
                whole = simulated_without_queues(option.schedule, each.costs)
                assert option.makespan == pytest.approx(whole.makespan, rel=0.01)


def test_the_best_option_is_the_one_that_its_files_simulate(made: JobPlan, tmp_path: Path) -> None:
    paths = made.write(tmp_path)
    schedule, costs = penstock.read(paths[0]), Costs.read(paths[1])
    assert schedule == made.best.schedule
    timeline = penstock.simulate(penstock.lower(schedule), costs)
    assert timeline.makespan + costs.optimizer_step == pytest.approx(made.best.seconds)
    assert max(timeline.peak_memory) <= made.best.memory


def test_a_tenth_of_the_device_is_left_free_unless_a_limit_is_given() -> None:
    default, given = request(), request(memory_limit=H100.memory_bytes)
    assert default.memory_limit == pytest.approx(72e9)
    assert default.limit_share == "90% of 74.5 GiB"
    assert (given.memory_limit, given.limit_share) == (80e9, "100% of 74.5 GiB")


def test_more_memory_is_never_slower(made: JobPlan) -> None:
    assert plan(request(memory_limit=40e9, tensor=2)).best.seconds <= made.best.seconds * (1 + 1e-9)


def test_the_explanation_accounts_for_the_whole_step(made: JobPlan) -> None:
    assert sum(time_shares(made.best).values()) == pytest.approx(1, abs=0.02)
    found = explain(made)
    assert found.why[0].startswith(str(made.best))
    gains = [each.gain for each in found.what_ifs]
    assert gains == sorted(gains, reverse=True)
    assert any(each.change.startswith("twice the bandwidth within") for each in found.what_ifs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "devices must be an integer above 0 .given 0."),
        (
            {"tensor": 3},
            "tensor=3 does not divide devices=8: try devices=6; tensor_parallel=3 does not divide 16",
        ),
        (
            {"tensor": 2, "sequence": 1023},
            "sequence=1023 must be a multiple of 2 for tensor_parallel=2.*try sequence=1022",
        ),
        ({"expert": 2}, "expert_parallel=2: model has no experts"),
        ({"precision": "fp8", "device": device("a100")}, "a100 has no fp8: use precision bf16, fp32"),
        ({"pipeline": 11, "devices": 11}, "pipeline=11: model has 10 blocks"),
        ({"batch": 5, "pipeline": 1, "tensor": 1}, "batch=5 cannot be .* works is batch=8"),
        (
            {"memory_limit": 1e9},
            "fits no layout of 8 h100 with 954 MiB each.*what would fit: memory_limit=.*GB.*, or devices=16",
        ),
        ({"config": config("llama-3-405b"), "devices": 16}, "the smallest, TP8 PP2.* fit: devices=128"),
    ],
)
def test_what_cannot_be_planned_says_what_could(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(request(**changes))


@pytest.mark.parametrize("stages_per_rank", [2, 4])
def test_layers_are_moved_from_the_busiest_rank(stages_per_rank: int) -> None:
    """In a V the first rank has the embedding and the output layer."""
    asked = request(config=gpt_config(1024, 30, 16, vocab_size=256_000))
    found = estimate(asked.config, next(job_layouts(asked)).parallel, H100)
    stages, shape = EstimatedStages(found), FamilyShape(stages_per_rank, is_v=True, split=True, paired=False)
    before = stages.rank_bounds(stages.counts(4 * stages_per_rank), shape, 4, 16).max()
    bound, counts = stages.partition(shape, 4, 16)
    assert bound == stages.rank_bounds(counts, shape, 4, 16).max() < before
    assert (sum(counts), min(counts) > 0) == (32, True)


PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "llama-3-405b": ({"devices": 8192, "batch": 2048, "sequence": 8192, "zero": 2}, (8, 1, 1, 16, 64)),
    "deepseek-v3": (
        {"device": "h800", "devices": 2048, "batch": 15360, "sequence": 4096, "precision": "fp8"},
        (1, 1, 64, 16, 128),
    ),
}
"""Settings, and sizes that were trained with: tensor, context, expert, pipeline, data parallel."""


@pytest.mark.parametrize("name", PUBLISHED)
@small(lambda name: name == "none")
def test_published_layouts_are_among_the_best_ten(name: str) -> None:
    asked, sizes = PUBLISHED[name]
    chosen = device(asked.get("device", "h100"))
    made = plan(request(**{**asked, "config": config(name), "device": chosen}))
    assert sizes in [each.layout.sizes for each in made.evaluation.ranked()[:10]]
