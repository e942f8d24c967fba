"""Promise: clocks that are ahead of each other are found from messages, to within what the messages allow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.encoding import Floats
from penstock.traces.read.clocks import align_clocks
from tests.support.grids import examples

INF = np.inf


def bounds_of(ahead: list[float], delays: dict[tuple[int, int], float]) -> Floats:
    """The least times on the clocks of messages that take so long."""
    found = np.full((len(ahead), len(ahead)), INF)
    for (a, b), delay in delays.items():
        found[a, b] = delay + ahead[b] - ahead[a]
    return found


def test_equal_delays_both_ways_give_the_exact_offset() -> None:
    ahead = [0.0, 5.0, -2.0]
    delays = {(0, 1): 0.25, (1, 0): 0.25, (1, 2): 0.125, (2, 1): 0.125}
    aligned = align_clocks(bounds_of(ahead, delays), ["a", "b", "c"])
    assert aligned.offsets == pytest.approx(ahead)
    assert aligned.uncertainty == pytest.approx([0.0, 0.25, 0.375])
    assert aligned.residual == 0
    assert not aligned.shared_clock


@settings(max_examples=examples(200))
@given(st.data())
def test_the_truth_is_within_the_uncertainty_and_messages_are_in_order(
    data: st.DataObject,
) -> None:
    ranks = data.draw(st.integers(2, 6))
    numbers = st.floats(-10, 10)
    ahead = [0.0, *data.draw(st.lists(numbers, min_size=ranks - 1, max_size=ranks - 1))]
    pairs = [(a, (a + 1) % ranks) for a in range(ranks)]
    delays = {pair: data.draw(st.floats(0, 1)) for a, b in pairs if a != b for pair in ((a, b), (b, a))}
    bounds = bounds_of(ahead, delays)
    aligned = align_clocks(bounds, [f"host{rank}" for rank in range(ranks)])
    for rank in range(ranks):
        assert abs(aligned.offsets[rank] - ahead[rank]) <= aligned.uncertainty[rank] + 1e-9
    for a, b in delays:
        assert aligned.offsets[b] - aligned.offsets[a] <= bounds[a, b] + 1e-8


def test_ranks_of_one_host_have_one_clock() -> None:
    delays = {(0, 1): 0.5, (1, 0): 0.1, (1, 2): 0.5, (2, 1): 0.5}
    same = align_clocks(bounds_of([0, 0, 3], delays), ["a", "a", "b"])
    assert same.offsets == pytest.approx([0, 0, 3])
    assert align_clocks(bounds_of([0, 0], {(0, 1): 0.5, (1, 0): 0.1}), ["a", "a"]).shared_clock
    contradicted = align_clocks(bounds_of([0, 7], {(0, 1): 0.5, (1, 0): 0.5}), ["a", "a"])
    assert contradicted.offsets == pytest.approx([0, 7])
    assert not contradicted.shared_clock


def test_messages_in_one_direction_bound_the_offset_from_one_side() -> None:
    aligned = align_clocks(bounds_of([0, 2], {(0, 1): 0.5}), ["a", "b"])
    assert aligned.offsets == pytest.approx([0, 2.5])
    assert aligned.uncertainty[1] == INF
    assert align_clocks(np.full((2, 2), INF), ["a", "b"]).offsets == (0, 0)


def test_contradicting_messages_leave_a_residual() -> None:
    aligned = align_clocks(np.array([[INF, 1.0], [-3.0, INF]]), ["a", "b"])
    assert aligned.residual == pytest.approx(1.0)
    assert aligned.offsets == pytest.approx([0, 2])
