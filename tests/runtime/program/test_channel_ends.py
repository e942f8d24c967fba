"""Promise: every edge between ranks has a channel each way, with the same numbers on all ranks."""

from __future__ import annotations

import torch

from penstock import Placement, StageGraph, build
from penstock.runtime.dtensors import Meshes
from penstock.runtime.program.channel_ends import ChannelEnds, channels_between_ranks, peers_of, receiving_stage
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


def test_an_activation_that_several_stages_of_a_rank_use_has_one_channel() -> None:
    graph = StageGraph(4, ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3)))  # edges 0 to 4
    schedule = build("gpipe", graph=graph, ranks=2, microbatches=1, placement=Placement((0, 1, 1, 0)))
    assert channels_between_ranks(schedule) == [(0, 0, 1), (1, 1, 0), (3, 1, 0), (8, 1, 0), (9, 0, 1)]
    assert [receiving_stage(schedule, 0, stage) for stage in (1, 2, 3)] == [1, 1, 3]
    assert receiving_stage(schedule, 2, 3) == 3


def test_calls_are_compared_along_messages_and_between_parts_of_a_graph() -> None:
    chain = build("1f1b", ranks=3, microbatches=2)
    assert [peers_of(chain, rank) for rank in range(3)] == [[1], [0, 2], [1]]
    graph = StageGraph(5, ((1, 4), (0, 2)))
    parts = build("gpipe", graph=graph, ranks=5, microbatches=1, placement=Placement((0, 1, 2, 3, 4)))
    assert [peers_of(parts, rank) for rank in range(5)] == [[1, 2, 3], [0, 4], [0], [0], [1]]
