"""Promises of data parallel sizes: an excluded one has its rule, and the batches named allow more."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cost.estimate import device
from penstock.planning.jobs import JobRequest, data_sizes, job_layouts
from tests.support.model_configs import config, gpt_config

GPT = gpt_config(2048, 64, 16)


def request(**changes: Any) -> JobRequest:
    given = {"config": GPT, "device": device("h100"), "devices": 64, "batch": 63, "sequence": 4096, **changes}
    return JobRequest(**given)


def sizes_of_layouts(asked: JobRequest) -> set[int]:
    return {layout.parallel.data_parallel for layout in job_layouts(asked)}


def test_a_batch_with_few_divisors_names_the_rule_and_the_nearest_batches() -> None:
    assert str(data_sizes(request())) == (
        "DP 2, 4, 8, 16, 32, 64 are left out: the batch of 63 must be divisible by DP x microbatch size; "
        "a batch of 62 also allows DP 2, a batch of 64 also allows DP 2, 4, 8, 16, 32, 64"
    )


def test_a_fixed_microbatch_size_is_a_part_of_the_rule() -> None:
    found = data_sizes(request(batch=32, microbatch_size=2, devices=32))
    assert found.excluded == (32,)
    assert str(found) == (
        "DP 32 is left out: the batch of 32 must be divisible by DP x microbatch size 2; "
        "a batch of 64 also allows DP 32"
    )


def test_a_batch_that_allows_every_size_has_nothing_to_say() -> None:
    found = data_sizes(request(batch=128))
    assert found.allowed == (1, 2, 4, 8, 16, 32, 64)
    assert str(found) == ""
    assert found.nearest_batches == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": 1},
        {"batch": 7},
        {"batch": 63},
        {"batch": 100},
        {"batch": 12, "devices": 96},
        {"batch": 30, "devices": 60, "microbatch_size": 2},
        {"batch": 48, "devices": 48, "tensor": 2, "pipeline": 4},
        {"batch": 20, "config": config("mixtral-8x7b"), "expert": 8},
    ],
)
def test_allowed_sizes_have_layouts_and_each_batch_named_adds_what_it_says(changes: dict[str, Any]) -> None:
    asked = request(**changes)
    found = data_sizes(asked)
    assert set(found.allowed) == sizes_of_layouts(asked)
    for batch, added in found.nearest_batches.items():
        assert added
        assert sizes_of_layouts(request(**{**changes, "batch": batch})) == {*found.allowed, *added}
    smaller = max((batch for batch in found.nearest_batches if batch < asked.batch), default=0)
    larger = max(found.nearest_batches, default=asked.batch)
    for batch in range(smaller + 1, larger):  # none that is nearer has them all and more
        assert not sizes_of_layouts(request(**{**changes, "batch": batch})) > set(found.allowed)
