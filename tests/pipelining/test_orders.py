"""Tests of torch's functions on orders: they return what torch's do, and more where torch's fail."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock
from tests.oracles import torch_schedules as oracle
from tests.support.pipelining_orders import NAMES, action, made, order, ours, texts

theirs: Any = oracle.torch_schedules


# --- actions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["2F0", "1UNSHARD", "3SEND_F1", "0REDUCE_GRAD", "(1F0;2B1)OVERLAP_F_B", "1I3"])
def test_an_action_is_torchs_named_tuple(text: str) -> None:
    found, wanted = action(text), theirs._Action.from_str(text)
    assert found == wanted
    assert isinstance(found, theirs._Action)
    assert hash(found) == hash(wanted)
    assert str(found) == repr(found) == text
    assert found.is_compute_op == wanted.is_compute_op
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301 -- our own bytes
    assert tuple(found) == (
        found.stage_index,
        found.computation_type,
        found.microbatch_index,
        found.sub_actions,
    )
    assert found._replace(stage_index=7).stage_index == 7


def test_an_action_is_parsed_strictly() -> None:
    assert action("  ") is None
    for text in ("1F0junk", "1F", "1UNSHARD3", "()OVERLAP_F_B", "(1F0;2B1)F", "F0"):
        with pytest.raises(RuntimeError, match="Invalid action string"):
            action(text)


# --- passes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_order_and_its_lowering_are_torchs(name: str) -> None:
    mine, yours = made(name, 2, 4), oracle.built(name, 2, 2, 4)
    assert texts(mine.pipeline_order) == oracle.as_rows(yours.pipeline_order)
    found, wanted = texts(mine.pipeline_order_with_comms), oracle.as_rows(yours.pipeline_order_with_comms)
    if oracle.RELEASE >= (2, 15):  # before, torch took reshards from a set
        assert found == wanted
    assert list(map(sorted, found)) == list(map(sorted, wanted))
    assert mine.stage_index_to_group_rank == yours.stage_index_to_group_rank


@pytest.mark.parametrize("name", NAMES)
def test_each_pass_gives_what_torchs_gives(name: str) -> None:
    yours = oracle.built(name, 2, 2, 4)
    hosts = yours.stage_index_to_group_rank.__getitem__
    rows = oracle.as_order(oracle.as_rows(yours.pipeline_order))
    for rank in rows:
        sharded = [str(a) for a in ours._add_unshard_reshard(rows[rank])]
        wanted = [str(a) for a in theirs._add_unshard_reshard(rows[rank])]
        assert sorted(sharded) == sorted(wanted)
        assert ours._add_reduce_grad(rows[rank], 4) == theirs._add_reduce_grad(rows[rank], 4)
        assert ours._add_reduce_grad(rows[rank], 5) == theirs._add_reduce_grad(rows[rank], 5)
        assert ours._merge_bw(list(rows[rank])) == theirs._merge_bw(list(rows[rank]))
    sent = ours._add_send_recv(rows, hosts, 4)
    assert sent == theirs._add_send_recv({rank: list(row) for rank, row in rows.items()}, hosts, 4)
    deferred = ours._defer_recv_ops(sent, hosts)
    assert sorted(map(str, deferred[0])) == sorted(map(str, sent[0]))
    assert rows == oracle.as_order(oracle.as_rows(yours.pipeline_order)), "the arguments are not changed"


def test_a_pass_takes_one_rank_with_any_stages() -> None:
    row = order("9F0 9I0 9W0 5F0 5B0")[0]
    assert texts({0: ours._merge_bw(row)}) == [["9F0", "9B0", "5F0", "5B0"]]
    assert str(ours._add_unshard_reshard(row)[0]) == "9UNSHARD"
    assert ours._get_1f1b_rank_ops(1, 2, 1, 2, 1, 0, lambda _: 0, lambda _: 0)[0] == action("0F0")


def test_an_order_that_deadlocks_is_rejected() -> None:
    with pytest.raises(AssertionError, match="0B0"):
        ours._add_send_recv(order("0B0 0F0", "1F0 1B0"), lambda stage: stage, 2)


# --- validation ------------------------------------------------------------------------------------

VALID = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_a_valid_order_returns_its_stage_mapping() -> None:
    assert ours._validate_schedule(order(*VALID), 2, 2, 2) == {0: 0, 1: 1}
    spaced = order(*VALID)
    spaced[1].insert(0, None)
    assert ours._validate_schedule(spaced, 2, 2, 2) == {0: 0, 1: 1}


@pytest.mark.parametrize(
    ("rows", "counts", "code"),
    [
        (("0F0 0F0 0B0",), (1, 1, 1), "duplicate-action"),
        (("0F0 0B0 0B0",), (1, 1, 1), "duplicate-action"),
        (("0F7 0B7",), (1, 1, 1), "microbatch-out-of-range"),
        (("0F0 0B0", "1F0 1B0 0F1 0B1"), (2, 2, 2), "wrong-rank"),
        (("0F0 0B0", "1F0 1B0"), (2, 2, 2), "missing-forward"),
        (("0F0 0B0 2F0 2B0", "1F0 1B0"), (2, 2, 1), "used-before-computed|deadlock|3 stages"),
        (("0F0 0B0",), (2, 2, 1), "the pipeline has 2 ranks"),
        (("0F0 0W0",), (1, 1, 1), "missing-input-gradient"),
        (("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0"), (2, 2, 1), "missing-message"),
        (("0F0 0B0",), (1, 2, 1), "1 stage, but the pipeline has 2"),
    ],
)
def test_an_invalid_order_raises_as_in_torch_and_with_our_report(
    rows: tuple[str, ...], counts: tuple[int, int, int], code: str
) -> None:
    with pytest.raises(AssertionError, match=code) as caught:
        ours._validate_schedule(order(*rows), *counts)
    assert isinstance(caught.value, penstock.ScheduleError)


def test_a_value_that_is_not_an_action_is_rejected() -> None:
    with pytest.raises(AssertionError, match="'0F0' is not an _Action"):
        ours._validate_schedule({0: ["0F0"]}, 1, 1, 1)


# --- dry runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES[:4])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 6), (4, 8)])
def test_a_dry_run_is_torchs_where_torch_has_one(name: str, ranks: int, microbatches: int) -> None:
    yours = oracle.built(name, ranks, 2, microbatches)
    hosts = yours.stage_index_to_group_rank.__getitem__
    rows = oracle.as_order(oracle.as_rows(yours.pipeline_order))
    sent = ours._add_send_recv(rows, hosts, 2 * ranks)
    if oracle.HAS_WAITS:
        sent = theirs._add_wait_send(sent)
    assert ours._simulate_comms_compute(sent, hosts, 2 * ranks) == theirs._simulate_comms_compute(
        sent, hosts, 2 * ranks
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_dry_run_sharding_reductions_and_overlaps_included(name: str) -> None:
    mine = made(name, 2, 4)
    steps = mine._simulate()
    for rank, row in steps.items():
        assert [each for each in row if each is not None] == mine.pipeline_order_with_comms[rank]
    with pytest.raises((ValueError, KeyError)):
        oracle.built(name, 2, 2, 4)._simulate()


def test_a_dry_run_without_messages_waits_a_step_for_each_value() -> None:
    found = ours._simulate_comms_compute(order("0F0 0B0", "1F0 1B0"), lambda stage: stage, 2)
    assert texts(found) == [["0F0", "", "", "0B0"], ["", "1F0", "1B0"]]


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        (("0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "deadlock"),
        (("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "send-before-compute"),
    ],
)
def test_a_dry_run_that_deadlocks_names_the_cycle(rows: tuple[str, str], code: str) -> None:
    with pytest.raises(ValueError, match=code):
        ours._simulate_comms_compute(order(*rows), int, 2)


def test_a_trace_has_every_compute_action_at_its_step(tmp_path: Path) -> None:
    steps = made("DualPipeV", 2, 4)._simulate()
    ours._dump_chrometrace(steps, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    for row in steps.values():
        for step, each in enumerate(row):
            if each is not None and each.is_compute_op:
                assert spans[str(each)]["ts"] == step
                assert spans[str(each)]["cat"] != "communication"


def test_a_table_has_a_line_per_step_and_marks_the_wrong_one() -> None:
    table = ours._format_pipeline_order({0: [action("0F0"), None], 1: [None, action("1F0")]}, 1)
    lines = table.splitlines()
    assert "Rank 0" in lines[0]
    assert "0F0" in lines[1]
    assert "1F0" in lines[2]
    assert lines[2].endswith("<-- ERROR HERE")


# --- constructors ----------------------------------------------------------------------------------


def test_sizes_that_torch_rejects_are_accepted_and_invalid_ones_rejected() -> None:
    assert texts(made("1F1B", 4, 2).pipeline_order)[0] == ["0F0", "0F1", "0B0", "0B1"]
    for name, microbatches in (("DualPipeV", 3), ("Interleaved1F1B", 9), ("InterleavedZeroBubble", 11)):
        assert made(name, 4, microbatches)._simulate()
        with pytest.raises(ValueError):
            oracle.built(name, 4, 2, microbatches)
    for name in ("ZBVZeroBubble", "DualPipeV"):
        with pytest.raises(ValueError, match="2 stages per rank"):
            made(name, 2, 4, stages_per_rank=3)
    for name in ("GPipe", "LoopedBFS"):
        with pytest.raises(ValueError, match="microbatches must be"):
            made(name, 2, 0)


def test_inconsistent_numbers_of_stages_are_rejected() -> None:
    about = {"num_stages": 7, "group_size": 2, "group_rank": 0, "submod": None}
    stages = [SimpleNamespace(stage_index=index, **about) for index in (0, 2)]
    with pytest.raises(ValueError, match="2 ranks of 2 stages have 4 stages, not 7"):
        ours.ScheduleLoopedBFS(stages, 4)


def test_receives_are_deferred_by_an_option() -> None:
    early, late = (made("Interleaved1F1B", 2, 4, defer_pp_recv=defer) for defer in (False, True))
    rows = [texts(each.pipeline_order_with_comms)[1] for each in (early, late)]
    assert rows[0] != rows[1]
    assert sorted(rows[0]) == sorted(rows[1])


def test_an_order_in_which_a_rank_has_no_stage_is_rejected() -> None:
    rows = {0: [action(text) for text in ("0F0", "1F0", "1B0", "0B0")], 1: []}
    assert theirs._validate_schedule(rows, 2, 2, 1) == {0: 0, 1: 0}
    with pytest.raises(AssertionError, match="rank 1: no stage; every rank must have at least one"):
        ours._validate_schedule(rows, 2, 2, 1)
