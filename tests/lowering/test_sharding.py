"""Promises of add-sharding, as text in and text out."""

from __future__ import annotations

import pytest

import penstock
from penstock import ScheduleError
from penstock.lowering import (
    AddCommunication,
    AddGradReduction,
    AddSharding,
    lower,
)
from tests.support.passes import FAMILIES, after


def test_sharding_holds_the_next_stages_only() -> None:
    assert after(AddSharding(2), "0F0 1F0 2F0 2B0 1B0 0B0") == (
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD"
    )


def test_sharding_of_five_stages_looks_three_ahead() -> None:
    """The example of torch's behaviour."""
    short = {"UNSHARD": "U", "RESHARD": "R"}
    text = after(AddSharding(), "0F0 1F0 2F0 3F0 4F0 4B0 3B0 2B0 1B0 0B0")
    for long, letter in short.items():
        text = text.replace(long, letter)
    assert text == ("0U 1U 2U 0F0 0R 3U 1F0 1R 4U 2F0 3F0 4F0 4B0 4R 1U 3B0 3R 0U 2B0 2R 1B0 1R 0B0 0R")


def test_both_stages_of_a_pair_are_held_even_beyond_the_look_ahead() -> None:
    lowered = after(AddSharding(1), "0F0 1F0 (0F1;1B0)OVERLAP_F_B 0B0 1F1 1B1 0B1")
    assert "1RESHARD 0UNSHARD 1UNSHARD" not in lowered
    assert "0UNSHARD (0F1;1B0)OVERLAP_F_B" in lowered


def test_a_look_ahead_of_zero_is_rejected() -> None:
    with pytest.raises(ScheduleError, match="max_active_stages must be at least 1"):
        AddSharding(0)


@pytest.mark.parametrize("name", FAMILIES)
def test_sharding_may_come_after_communication(name: str) -> None:
    schedule = penstock.build(name, ranks=2, microbatches=4)
    for most in (1, 2, 3):
        passes = (AddGradReduction(), AddCommunication(), AddSharding(most))
        assert penstock.validate(lower(schedule, passes)) == []
