from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlacementError
from penstock.ir.placement import Placement


@contextmanager
def little_memory(limit: int = 10_000_000) -> Iterator[None]:
    """What happens inside never holds more than `limit` bytes at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


# --- loop and V ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placement", "stages_of_rank"),
    [
        (Placement.loop(1), ((0,),)),
        (Placement.loop(3), ((0,), (1,), (2,))),
        (Placement.loop(4, 2), ((0, 4), (1, 5), (2, 6), (3, 7))),
        (Placement.loop(2, 3), ((0, 2, 4), (1, 3, 5))),
        (Placement.v(4), ((0, 7), (1, 6), (2, 5), (3, 4))),
        (Placement.v(3, 1), ((0,), (1,), (2,))),
        (Placement.loop(4, [1, 2, 2, 1]), ((0,), (1, 3), (2, 4), (5,))),
        (Placement.loop(2, [3, 1]), ((0, 1, 2), (3,))),
        (Placement.loop(3, (2, 2, 2)), ((0, 3), (1, 4), (2, 5))),
        (Placement.v(4, [1, 2, 2, 1]), ((0,), (1, 5), (2, 4), (3,))),
        (Placement.v(3, 3), ((0, 5, 6), (1, 4, 7), (2, 3, 8))),
        (Placement.v(2, 4), ((0, 3, 4, 7), (1, 2, 5, 6))),
        (Placement.v(1, 5), ((0, 1, 2, 3, 4),)),
    ],
    ids=str,
)
def test_loop_and_v_put_stages_where_the_pictures_say(
    placement: Placement, stages_of_rank: tuple[tuple[int, ...], ...]
) -> None:
    assert placement.stages_of_rank == stages_of_rank
    assert placement.num_ranks == len(stages_of_rank)
    assert placement.num_stages == sum(map(len, stages_of_rank))


@given(st.integers(1, 9), st.integers(1, 6))
def test_loop_puts_stage_s_on_rank_s_mod_p(ranks: int, stages_per_rank: int) -> None:
    placement = Placement.loop(ranks, stages_per_rank)
    assert placement.stage_to_rank == tuple(s % ranks for s in range(ranks * stages_per_rank))
    assert placement.style == "loop"


@given(st.integers(1, 9), st.integers(1, 6))
def test_neighbours_on_a_v_are_on_the_same_or_the_next_rank(ranks: int, legs: int) -> None:
    hosts = Placement.v(ranks, legs).stage_to_rank
    turns = [s for s in range(1, len(hosts)) if hosts[s] == hosts[s - 1]]
    assert all(abs(a - b) <= 1 for a, b in pairwise(hosts))
    assert turns == (list(range(ranks, ranks * legs, ranks)) if ranks > 1 else list(range(1, legs)))


@pytest.mark.parametrize(
    ("placement", "style"),
    [
        (Placement((0, 1, 0, 1)), "loop"),
        (Placement((0, 1, 1, 0)), "v"),
        (Placement((0, 1, 1, 0, 0, 1)), "v"),
        (Placement((0, 1)), "loop"),
        (Placement((0, 0, 0)), "loop"),
        (Placement((1, 0)), "custom"),
        (Placement((0, 0, 1, 1)), "custom"),
        (Placement((0, 0, 1, 1, 0)), "custom"),
    ],
    ids=str,
)
def test_the_style_is_the_shape_however_the_placement_was_created(placement: Placement, style: str) -> None:
    assert placement.style == style


@pytest.mark.parametrize(
    ("ranks", "many", "messages"),
    [
        (0, 1, ["ranks must be at least 1 (given 0)"]),
        (-3, 0, ["ranks must be at least 1 (given -3)", "must be at least 1 (given 0)"]),
    ],
)
def test_loop_and_v_reject_numbers_below_1_all_at_once(ranks: int, many: int, messages: list[str]) -> None:
    for make in (Placement.loop, Placement.v):
        with pytest.raises(PlacementError) as caught:
            make(ranks, many)
        assert all(message in str(caught.value) for message in messages)


# --- custom ----------------------------------------------------------------------------------------

UNEVEN = Placement((0, 0, 1, 1, 0))


def test_uneven_stages_can_be_given_as_a_mapping_or_as_a_list() -> None:
    assert Placement.custom({0: [0, 1, 4], 1: [2, 3]}) == UNEVEN
    assert Placement.custom({1: [3, 2], 0: [4, 1, 0]}) == UNEVEN
    assert Placement.custom([[0, 1, 4], [2, 3]]) == UNEVEN
    assert Placement.custom([(0, 1, 4), range(2, 4)]) == UNEVEN
    assert UNEVEN.stages_of_rank == ((0, 1, 4), (2, 3))


@given(st.lists(st.integers(0, 5), min_size=1).filter(lambda ranks: set(ranks) == set(range(max(ranks) + 1))))
def test_the_stages_of_each_rank_say_the_same_as_the_rank_of_each_stage(ranks: list[int]) -> None:
    placement = Placement(tuple(ranks))
    assert Placement.custom(placement.stages_of_rank) == placement
    assert Placement.custom(dict(enumerate(placement.stages_of_rank))) == placement


def test_all_problems_of_a_custom_placement_are_reported_at_once() -> None:
    with pytest.raises(PlacementError) as caught:
        Placement.custom({0: [0, 1, 6], 1: [1, 6, 4], 2: [3]})
    message = str(caught.value)
    assert "stage 1 is on ranks [0, 1]" in message
    assert "stage 6 is on ranks [0, 1]" in message
    assert "2 are on no rank" in message


@pytest.mark.parametrize(
    "stages_of_rank",
    [{0: [0], 1: []}, {0: [], 1: [0]}, {0: [0], 1: [], 2: [1]}, {0: [0, -1], 1: [1]}, {-1: [0]}, {}, {0: []}],
    ids=str,
)
def test_a_rank_without_a_stage_and_numbers_below_0_are_rejected(stages_of_rank: dict[int, list[int]]) -> None:
    with pytest.raises(PlacementError):
        Placement.custom(stages_of_rank)


# --- the mapping itself ----------------------------------------------------------------------------


def test_a_placement_is_a_value_that_does_not_change() -> None:
    assert len({Placement((0, 1)), Placement.loop(2), Placement.custom([[0], [1]])}) == 1
    with pytest.raises(FrozenInstanceError):
        UNEVEN.stage_to_rank = (0,)  # type: ignore[misc]


def test_a_placement_can_be_made_from_any_sequence_and_keeps_a_tuple() -> None:
    given_as_list: list[int] = [0, 1]
    placement = Placement(given_as_list)  # type: ignore[arg-type]
    given_as_list.append(7)
    assert placement.stage_to_rank == (0, 1)


@pytest.mark.parametrize(
    ("stage_to_rank", "message"),
    [
        ((), "at least one stage"),
        ((-1, 0), r"ranks are numbered from 0: stages \[0\]"),
        ((0, 2), r"ranks 1 of 0\.\.2 host none"),
        ((3,), r"ranks 0, 1, 2 of 0\.\.3 host none"),
        ((9, 0, 1), r"ranks 2, 3, 4, 5, \.\.\. of 0\.\.9 host none"),
    ],
    ids=str,
)
def test_an_invalid_mapping_is_rejected_with_its_problem(stage_to_rank: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement(stage_to_rank)


@pytest.mark.parametrize("stage_to_rank", [(0.5, 1), "01", ("0", "1")], ids=repr)
def test_ranks_that_are_not_whole_numbers_are_rejected(stage_to_rank: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError):
        Placement(stage_to_rank)


# --- implausible numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("huge", [10**9, 10**12, 10**30])
def test_a_huge_rank_or_stage_number_is_rejected_in_little_memory(huge: int) -> None:
    for faulty in ({huge: [0]}, {0: [huge]}, {0: [0], huge: [huge]}):
        with little_memory(), pytest.raises(PlacementError) as caught:
            Placement.custom(faulty)
        assert len(str(caught.value)) < 300
    with little_memory(), pytest.raises(PlacementError):
        Placement((0, huge))


@pytest.mark.parametrize("huge", [10**18, 10**30])
def test_more_stages_than_can_be_numbered_are_rejected_in_little_memory(huge: int) -> None:
    with little_memory(), pytest.raises(PlacementError):
        Placement.loop(huge)
    with little_memory(), pytest.raises(PlacementError):
        Placement.loop(2, huge)
    with little_memory(), pytest.raises(PlacementError):
        Placement.v(huge)


@pytest.mark.parametrize("counts", [[1, 2], [1, 0, 2], [], [1, 2.0, 1]])
def test_a_list_has_a_number_of_stages_for_each_rank(counts: list[int]) -> None:
    with pytest.raises(
        PlacementError, match=r"stages_per_rank (has . numbers for 3 ranks|must be .* at least 1)"
    ):
        Placement.loop(3, counts)
    with pytest.raises(PlacementError, match=r"legs (has . numbers for 3 ranks|must be .* at least 1)"):
        Placement.v(3, counts)
