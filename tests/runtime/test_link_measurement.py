"""Promise: edges between stages of one rank cost nothing."""

from __future__ import annotations

from penstock import build
from penstock.runtime.session.profile import measure_links


def test_edges_of_a_single_rank_have_no_latency_and_no_limit() -> None:
    schedule = build("looped-bfs", ranks=1, microbatches=2, stages_per_rank=3)
    assert measure_links(None, schedule, 0).tolist() == [[0, 0], [0, 0]]
