"""Tests that scripts written for torch.distributed.pipelining train the same with only their import changed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import pipelining_tutorial
from tests.support.grids import small
from tests.support.pipelining_scripts import (
    NAMES,
    OURS,
    TORCH,
    Run,
    assert_alike,
    stages_of,
    train,
    train_alone,
)
from tests.support.pool import Pools


def case(package: str, name: str, m: int, rows: int | None, options: dict[str, Any]) -> Run:
    return train(package, name, m, rows, **options)


@pytest.mark.parametrize("name", NAMES)
@small(lambda name: name in {"1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"})
def test_every_schedule_trains_as_torchs_and_as_one_process(pools: Pools, name: str) -> None:
    m = 8 if name == "DualPipeV" else 4
    wanted = train_alone(stages_of(name, 4), m)
    for package in (TORCH, OURS):
        assert_alike(pools(4).run(case, package, name, m, None, {}), wanted)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
@small(lambda name: name == "ZBVZeroBubble")
def test_losses_are_summed_without_scale_grads(pools: Pools, name: str) -> None:
    wanted = train_alone(stages_of(name, 4), 4, scale_grads=False)
    for package in (TORCH, OURS):
        assert_alike(pools(4).run(case, package, name, 4, None, {"scale_grads": False}), wanted)


@pytest.mark.parametrize("name", NAMES)
@small(lambda name: name in {"Interleaved1F1B", "DualPipeV"})
def test_uneven_batches_and_few_microbatches_train(pools: Pools, name: str) -> None:
    """Torch refuses them or breaks."""
    for m, rows in ((3, 7), (1, 2)):
        assert_alike(pools(4).run(case, OURS, name, m, rows, {}), train_alone(stages_of(name, 4), m, rows))


def test_receives_may_be_deferred(pools: Pools) -> None:
    wanted = train_alone(8, 4)
    assert_alike(pools(4).run(case, OURS, "Interleaved1F1B", 4, None, {"defer_pp_recv": True}), wanted)


@pytest.mark.parametrize("package", [TORCH, OURS])
def test_the_tutorials_decoder_trains(pools: Pools, package: str) -> None:
    assert_alike(pools(4).run(pipelining_tutorial.follow, package), pipelining_tutorial.alone())
