"""Promise: every edge between ranks has a channel each way, with the same numbers on all ranks."""

from __future__ import annotations

import torch

from penstock import build
from penstock.runtime.dtensors import Meshes
from penstock.runtime.execution.channel_ends import ChannelEnds, channels_between_ranks
from penstock.runtime.transport.buffer_pool import BufferPool


def test_channels_are_numbered_by_edge_and_direction() -> None:
    chain = build("1f1b", ranks=3, microbatches=2)
    assert channels_between_ranks(chain) == [(0, 0, 1), (1, 1, 0), (2, 1, 2), (3, 2, 1)]


def test_stages_that_share_a_rank_have_no_channel() -> None:
    assert channels_between_ranks(build("zbv", ranks=2, microbatches=2)) == [
        (0, 0, 1),
        (1, 1, 0),
        (4, 1, 0),
        (5, 0, 1),
    ]


def test_a_single_rank_has_no_ends() -> None:
    schedule = build("zbv", ranks=1, microbatches=2)
    ends = ChannelEnds(schedule, 0, None, BufferPool(torch.device("cpu")), Meshes(()))
    assert (ends.sends, ends.receives) == ({}, {})
