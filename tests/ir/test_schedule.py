from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Action, Kind, Overlap, Placement, Schedule, StageGraph
from penstock.errors import ActionError, PenstockError, ScheduleError
from penstock.ir.encoding import MICROBATCH_SHIFT, encode
from tests.ir.test_placement import little_memory

F, B = Kind.F, Kind.B


# --- making one ------------------------------------------------------------------------------------


def test_texts_actions_and_one_text_make_the_same_schedule() -> None:
    of_texts = Schedule([["0F0", "0B0"], ["1F0", "1B0"]])
    of_actions = Schedule([[Action(F, 0, 0), Action(B, 0, 0)], [Action(F, 1, 0), Action(B, 1, 0)]])
    of_both = Schedule([["0F0", Action(B, 0, 0)], iter(["1F0", "1B0"])])
    assert of_texts == of_actions == of_both == Schedule.parse("0F0 0B0 | 1F0 1B0")


@pytest.mark.parametrize(
    "text",
    ["0F0 0B0|1F0 1B0", "0F0 0B0\n1F0 1B0", "\n  0F0   0B0\n\t1F0 1B0\n\n", "0F0 0B0\r\n1F0 1B0\r\n"],
    ids=repr,
)
def test_ranks_are_separated_by_bars_or_line_breaks(text: str) -> None:
    assert Schedule.parse(text) == Schedule([["0F0", "0B0"], ["1F0", "1B0"]])


def test_ranks_gives_the_steps_back_and_str_their_texts() -> None:
    schedule = Schedule.parse("0F0 (0F1;1B0)OVERLAP_F_B | 2RECV_F0 2UNSHARD")
    pair = Overlap(Action(F, 0, 1), Action(B, 1, 0))
    assert schedule.ranks == (
        (Action(F, 0, 0), pair),
        (Action(Kind.RECV_F, 2, 0), Action(Kind.UNSHARD, 2)),
    )
    assert str(schedule) == "0F0 (0F1;1B0)OVERLAP_F_B\n2RECV_F0 2UNSHARD"
    assert Schedule.parse(str(schedule)) == schedule


def test_an_overlapped_pair_counts_as_one_step() -> None:
    assert Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1").num_steps == 3


def test_the_integer_form_makes_the_same_schedule() -> None:
    schedule = penstock.build("zbv", ranks=2, microbatches=3)
    rows = [list(encode(row)) for row in schedule.ranks]
    assert Schedule.from_codes(rows, schedule.placement, 3, "again") == schedule
    assert schedule.with_rows(rows) == schedule


@pytest.mark.parametrize("family", penstock.families())
def test_every_family_prints_what_parses_back(family: str) -> None:
    built = penstock.build(family, ranks=3, microbatches=4)
    for schedule in (built, penstock.lower(built)):
        assert Schedule.parse(str(schedule)) == schedule


# --- what is not given is inferred -----------------------------------------------------------------


def test_a_stage_is_on_the_rank_with_most_of_its_actions() -> None:
    schedule = Schedule.parse("0F0 1F0 0B0 | 1F0 1B0 2F0")
    assert schedule.placement == Placement((0, 1, 1))


def test_a_tie_goes_to_the_first_rank_and_a_stage_without_actions_to_the_rank_of_the_stage_before_it() -> None:
    assert Schedule.parse("0F0 1F0 | 1F0 2F0").placement == Placement((0, 0, 1))
    assert Schedule.parse("0F0 0B0 | 1F0 3F0").placement == Placement((0, 1, 1, 1))


def test_the_placement_of_every_family_is_found_again_from_the_steps() -> None:
    for family in penstock.families():
        schedule = penstock.build(family, ranks=4, microbatches=4)
        assert Schedule(schedule.ranks).placement == schedule.placement


def test_microbatches_are_one_more_than_the_highest_number() -> None:
    assert Schedule.parse("0F0 0F2 0F1").microbatches == 3
    assert Schedule.parse("0UNSHARD").microbatches == 1
    assert Schedule.parse("0F0", microbatches=7).microbatches == 7


def test_what_is_given_is_not_inferred() -> None:
    schedule = Schedule.parse("1F0 | 0F0", Placement((0, 1)), 2, "mine")
    assert (schedule.placement, schedule.microbatches, schedule.name) == (Placement((0, 1)), 2, "mine")


def test_an_invalid_schedule_can_be_created_and_validated() -> None:
    schedule = Schedule.parse("9F9 0F0 | 0B0", Placement.loop(2), 1)
    assert {"stage-out-of-range", "wrong-rank"} <= {violation.code for violation in penstock.validate(schedule)}


def test_a_schedule_without_steps_can_be_validated() -> None:
    schedule = Schedule([[], []], Placement.loop(2), 1)
    assert {violation.code for violation in penstock.validate(schedule)} == {"missing-forward"}


# --- a value ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["placement", "microbatches", "name", "table", "ranks", "other"])
def test_a_schedule_does_not_change(name: str) -> None:
    with pytest.raises(AttributeError, match="does not change"):
        setattr(Schedule.parse("0F0"), name, None)


@pytest.mark.parametrize("name", ["placement", "microbatches", "name", "table"])
def test_attributes_of_a_schedule_cannot_be_deleted(name: str) -> None:
    with pytest.raises(AttributeError):
        delattr(Schedule.parse("0F0"), name)


def test_its_arrays_cannot_be_written_to() -> None:
    schedule = Schedule.parse("0F0 | 1F0")
    for column in (schedule.table.code, schedule.table.slot, schedule.table.rank):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1


def test_the_rows_it_was_made_from_can_change_without_it() -> None:
    row = np.array(list(encode([Action(F, 0, 0)])))
    schedule = Schedule.from_codes([row], Placement.loop(1), 1, "mine")
    row[0] += 1 << MICROBATCH_SHIFT
    assert str(schedule) == "0F0"


def test_equality_and_hash_ignore_the_name() -> None:
    schedule = Schedule.parse("0F0 0B0 | 1F0 1B0", name="a")
    renamed = schedule.renamed("b")
    assert renamed.name == "b"
    assert renamed == schedule
    assert len({schedule, renamed}) == 1


@pytest.mark.parametrize(
    "other",
    [
        Schedule.parse("0F0 0B0 | 1B0 1F0"),
        Schedule.parse("0F0 0B0 | 1F0 1B0", microbatches=2),
        Schedule.parse("0F0 0B0 | 1F0 1B0", Placement((0, 1, 1))),
        Schedule.parse("0F0 | 0B0 1F0 1B0", Placement.loop(2)),
        "0F0 0B0\n1F0 1B0",
        None,
    ],
    ids=repr,
)
def test_other_steps_numbers_or_placements_are_other_schedules(other: object) -> None:
    assert Schedule.parse("0F0 0B0 | 1F0 1B0") != other


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])  # noqa: S301
def test_a_copy_is_the_same_schedule(duplicate: Any) -> None:
    schedule = penstock.build("zbv", ranks=2, microbatches=2)
    again = duplicate(schedule)
    assert again == schedule
    assert again.name == schedule.name
    assert again.ranks == schedule.ranks


# --- what it says about itself ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("0F0 0I0 0W0", "compute"),
        ("(0F1;0B0)OVERLAP_F_B", "compute"),
        ("0F0 0UNSHARD", "lowered"),
        ("0F0 0REDUCE_GRAD", "lowered"),
        ("0F0 0SEND_F0", "lowered"),
    ],
)
def test_the_level_is_compute_if_all_actions_are(text: str, level: str) -> None:
    assert Schedule.parse(text).level == level


def test_repr_has_name_and_numbers_without_the_steps() -> None:
    schedule = penstock.build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2)
    assert repr(schedule) == (
        "<Schedule interleaved-1f1b: 2 ranks, 4 stages, 4 microbatches, 32 steps, compute>"
    )


# --- what cannot be made ---------------------------------------------------------------------------


def test_a_row_may_be_one_text() -> None:
    assert Schedule(["0F0 0B0", "1F0 1B0"]) == Schedule.parse("0F0 0B0 | 1F0 1B0")


def test_a_text_that_is_no_action_is_rejected() -> None:
    with pytest.raises(ActionError, match="'1F0x' is not an action"):
        Schedule.parse("0F0 0B0 | 1F0x")


@pytest.mark.parametrize(("ranks", "text"), [(1, "1 rank"), (3, "3 ranks")])
def test_as_many_lists_as_ranks_are_needed(ranks: int, text: str) -> None:
    with pytest.raises(ScheduleError, match=f"has {text}, but 2 lists of steps are given"):
        Schedule.parse("0F0 | 1F0", Placement.loop(ranks))


@pytest.mark.parametrize("microbatches", [0, -1, -(10**30)])
def test_at_least_one_microbatch_is_needed(microbatches: int) -> None:
    with pytest.raises(ScheduleError, match="microbatches must be a whole number of at least 1"):
        Schedule.parse("0F0", microbatches=microbatches)


@pytest.mark.parametrize("microbatches", [True, 1.5, "2"], ids=repr)
def test_microbatches_that_are_not_a_whole_number_are_rejected(microbatches: Any) -> None:
    with pytest.raises(ScheduleError):
        Schedule.parse("0F0", microbatches=microbatches)


@pytest.mark.parametrize("step", [None, 1, ("0", "F", "0")], ids=repr)
def test_a_step_that_is_neither_action_nor_text_is_rejected(step: Any) -> None:
    with pytest.raises(PenstockError):
        Schedule([["0F0", step]])


@pytest.mark.parametrize("text", ["0F0 | | 1F0", "0F0 | 0B0", "0F0 | 1F0 |"])
def test_a_rank_without_a_stage_of_its_own_is_rejected(text: str) -> None:
    with pytest.raises(ScheduleError, match="no stage"):
        Schedule.parse(text)


@pytest.mark.parametrize("lists", [[], [""], ["", ""]])
def test_no_actions_at_all_are_rejected(lists: list[str]) -> None:
    with pytest.raises(ScheduleError, match="no actions: a schedule is a list of actions for each rank"):
        Schedule(lists)


def test_a_text_that_is_no_action_is_located() -> None:
    with pytest.raises(
        ActionError, match=r"^rank 1, step 2: '1B' is not an action: B needs a microbatch"
    ) as caught:
        Schedule.parse("0F0 0B0 | 1F0 1F1 1B")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)  # noqa: S301 -- our own


def test_parse_takes_a_text() -> None:
    lists: Any = ["0F0 0B0", "1F0 1B0"]
    with pytest.raises(ScheduleError, match=r"takes a text \(given .*\); a list: Schedule\(...\)"):
        Schedule.parse(lists)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("60000F0", "names stage 60000, but 1 action"),
        ("0F0 0B0 60000UNSHARD", "names stage 60000, but 3 actions"),
        ("0F1000000", "names microbatch 1000000, but 1 action"),
        ("0F0 0F1 1F5", "names microbatch 5, but 3 actions"),
        ("3F0 0F0", "names stage 3, but 2 actions"),
    ],
)
def test_one_huge_number_is_rejected_and_takes_no_memory(text: str, message: str) -> None:
    with little_memory(), pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


@pytest.mark.parametrize("microbatches", [10**7, 10**12, 10**30])
def test_more_microbatches_than_the_steps_can_cover_take_no_memory(microbatches: int) -> None:
    with little_memory(), pytest.raises(ScheduleError, match="1 action cannot cover 1 stage"):
        Schedule.parse("0F0", microbatches=microbatches)


def test_a_huge_number_beside_a_given_placement_is_left_to_validation() -> None:
    with little_memory():
        schedule = Schedule.parse("60000F1000000", Placement.loop(1), 1)
        codes = [violation.code for violation in penstock.validate(schedule)]
    assert codes == ["stage-out-of-range", "microbatch-out-of-range", "missing-forward"]


@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
def test_the_order_of_a_chain_is_valid_over_any_graph_whose_edges_go_up(family: str) -> None:
    chain = penstock.build(family, ranks=4, microbatches=6)
    rng = random.Random(family)
    for _ in range(10):
        pairs = [(s, t) for t in range(chain.num_stages) for s in range(t) if rng.random() < 0.3]
        graph = StageGraph(chain.num_stages, tuple(pairs))
        over = penstock.lower(chain).over(graph)
        assert (over.graph, over.ranks, over.name) == (graph, chain.ranks, family)
        assert penstock.validate(penstock.lower(over)) == []
