"""Promises of send models: ordered by what they block, known by name, each with its streams."""

from __future__ import annotations

import numpy as np
import pytest

from penstock import ScheduleError
from penstock.validation import SendModel


def test_they_are_ordered_from_the_most_permissive_to_the_strictest() -> None:
    assert sorted(SendModel) == list(SendModel)
    assert SendModel.BUFFERED < SendModel.PAIR_STREAMS <= SendModel.RENDEZVOUS
    assert SendModel.SHARED_STREAM >= SendModel.SHARED_STREAM > SendModel.EDGE_STREAMS
    assert SendModel.SHARED_STREAM.and_stricter == (SendModel.SHARED_STREAM, SendModel.RENDEZVOUS)


def test_a_name_or_the_model_itself_is_accepted_and_anything_else_rejected_with_the_names() -> None:
    assert SendModel.of("pair-streams") is SendModel.of(SendModel.PAIR_STREAMS) is SendModel.PAIR_STREAMS
    with pytest.raises(
        ScheduleError, match="unknown send model 'tcp'; the send models are buffered, edge-streams"
    ):
        SendModel.of("tcp")


def test_only_rendezvous_blocks_a_rank_and_only_buffered_ignores_the_receive() -> None:
    assert [model for model in SendModel if model.blocks_rank] == [SendModel.RENDEZVOUS]
    assert [model for model in SendModel if model.is_buffered] == [SendModel.BUFFERED]


@pytest.mark.parametrize(("model", "streams"), list(zip(SendModel, (8, 8, 4, 3, 3))))
def test_messages_share_streams_as_the_model_says(model: SendModel, streams: int) -> None:
    # between ranks 0 and 1, and 1 and 2, both ways
    source, target = np.array([0, 1, 1, 2]), np.array([1, 0, 2, 1])
    assert len({*np.concatenate(model.streams(source, target, 3)).tolist()}) == streams
