"""Promises of messages: one order for a schedule with and without communication, and both ends of each."""

from __future__ import annotations

import numpy as np
import pytest

import penstock
from penstock import Schedule


@pytest.mark.parametrize("family", ["1f1b", "zbv", "interleaved-1f1b"])
def test_a_schedule_and_its_lowering_have_the_same_messages_in_the_same_order(family: str) -> None:
    plain = penstock.build(family, ranks=4, microbatches=4)
    lowered = penstock.lower(plain)
    for name in ("edge", "microbatch", "is_gradient", "source", "target", "stage"):
        assert np.array_equal(getattr(plain.messages, name), getattr(lowered.messages, name))
    assert (plain.messages.send == -1).all()
    assert lowered.messages.used.all()


def test_an_activation_goes_along_its_edge_and_a_gradient_against_it() -> None:
    messages = Schedule.parse("0F0 0B0 | 1F0 1B0").messages
    assert messages.edge.tolist() == [0, 0]
    assert messages.is_gradient.tolist() == [False, True]
    assert (messages.stage.tolist(), messages.source.tolist(), messages.target.tolist()) == (
        [0, 1],
        [0, 1],
        [1, 0],
    )


def test_stages_of_one_rank_need_no_message() -> None:
    assert len(Schedule.parse("0F0 1F0 1B0 0B0").messages.send) == 0


def test_a_missing_receive_is_minus_one_and_not_paired() -> None:
    messages = Schedule.parse("0F0 0SEND_F0 | 1F0").messages
    assert (messages.send.tolist(), messages.receive.tolist()) == ([1, -1], [-1, -1])
    assert not messages.paired.any()
