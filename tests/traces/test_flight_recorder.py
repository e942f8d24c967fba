"""Promise: dumps of torch's flight recorder are read as NCCL writes them, and the culprit is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import Schedule, build
from penstock.lowering import AddCommunication, lower
from penstock.traces.diagnose.diagnosis import Diagnosis, diagnose, read_evidence
from penstock.traces.diagnose.flight_recorder import load_flight_record, messages_at_use
from penstock.traces.diagnose.rank_state import Wait, WaitKind
from tests.support.flight_records import dump_of, operations_of, write_dumps

P, M = 4, 8
SCHEDULE = build("1f1b", ranks=P, microbatches=M)
LOWERED = lower(SCHEDULE, [AddCommunication()])


def place(schedule: Schedule, rank: int, action: str) -> int:
    """The number of a message among the messages of a rank's list."""
    texts = [str(part) for row in schedule.ranks[rank] for part in row.parts if part.kind.is_communication]
    return texts.index(action)


def until(schedule: Schedule, rank: int, action: str, *, steps: int = 3, pending: int = 1) -> dict[str, Any]:
    """The dump of a rank that issued all messages up to this one of its last step, which is pending."""
    issued = operations_of(schedule, rank, steps)
    per_step = len(issued) // steps
    count = (steps - 1) * per_step + place(schedule, rank, action) + 1
    return dump_of(rank, P, issued[:count], pending)


def diagnosed(folder: Path, dumps: dict[int, dict[str, Any]], *, as_json: bool = False) -> Diagnosis:
    write_dumps(folder, dumps, as_json=as_json)
    (pipeline,) = read_evidence(folder, SCHEDULE).pipelines
    return diagnose(pipeline, SCHEDULE)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_rank_without_a_dump_is_the_culprit(tmp_path: Path, *, as_json: bool) -> None:
    awaited = {0: "0RECV_B1", 1: "1RECV_B1", 3: "3RECV_F3"}
    dumps = {rank: until(LOWERED, rank, action) for rank, action in awaited.items()}
    found = diagnosed(tmp_path, dumps, as_json=as_json)
    assert {rank: state.awaits for rank, state in found.states.items()} == awaited
    assert {state.step_number for state in found.states.values()} == {0}
    assert found.culprit is not None
    assert (found.culprit.kind, found.culprit.ranks) == ("no-state", (2,))
    assert found.waits[1].for_rank == 2
    assert found.waits[0].peer == "on its way"


def test_the_order_of_the_single_stage_classes_is_known_too(tmp_path: Path) -> None:
    order = messages_at_use(SCHEDULE)
    awaited = {0: "0RECV_B1", 1: "1RECV_B1", 3: "3RECV_F3"}
    found = diagnosed(tmp_path, {rank: until(order, rank, action) for rank, action in awaited.items()})
    assert {rank: state.awaits for rank, state in found.states.items()} == awaited


def test_messages_before_the_first_step_are_left_out(tmp_path: Path) -> None:
    shapes = [("recv", 0), ("send", 2)]
    issued = operations_of(LOWERED, 1)[: place(LOWERED, 1, "1RECV_B0") + 1]
    dump = dump_of(1, P, [*shapes, *issued], pending=1, sizes={0: [1], 1: [1]})
    found = diagnosed(tmp_path, {1: dump})
    assert found.states[1].awaits == "1RECV_B0"


def test_a_rank_that_skipped_a_send(tmp_path: Path) -> None:
    # rank 1 is past 1SEND_F2, and rank 2 never got it
    dumps = {
        0: until(LOWERED, 0, "0RECV_B1"),
        1: until(LOWERED, 1, "1RECV_B1"),
        2: until(LOWERED, 2, "2RECV_F2"),
        3: until(LOWERED, 3, "3RECV_F2"),
    }
    found = diagnosed(tmp_path, dumps)
    assert found.culprit is not None
    assert (found.culprit.kind, found.culprit.ranks) == ("skipped-send", (1,))
    assert "1SEND_F2" in found.culprit.message


def test_a_rank_with_another_schedule(tmp_path: Path) -> None:
    other = lower(build("gpipe", ranks=P, microbatches=M), [AddCommunication()])
    dumps = {rank: until(LOWERED, rank, f"{rank}RECV_B1", steps=1) for rank in (0, 1)}
    dumps[2] = until(other, 2, "2RECV_F6", steps=1)
    dumps[3] = until(LOWERED, 3, "3RECV_F3", steps=1)
    found = diagnosed(tmp_path, dumps)
    assert found.culprit is not None
    assert (found.culprit.kind, found.culprit.ranks) == ("another-schedule", (2,))
    assert "in place of" in found.culprit.message


def test_mismatched_shapes_name_the_rank_that_is_not_as_usual(tmp_path: Path) -> None:
    send, receive = place(LOWERED, 1, "1SEND_F2"), place(LOWERED, 2, "2RECV_F2")
    sent, received = (operations_of(LOWERED, rank)[: n + 1] for rank, n in ((1, send), (2, receive)))
    dumps = {
        1: dump_of(1, P, sent, pending=1, sizes={send: [2, 7]}),
        2: dump_of(2, P, received, pending=1),
    }
    found = diagnosed(tmp_path, dumps)
    assert found.culprit is not None
    assert (found.culprit.kind, found.culprit.ranks) == ("shape-mismatch", (1,))
    assert "Float [2, 7] in 1SEND_F2" in found.culprit.message
    assert "Float [2, 8] in 2RECV_F2" in found.culprit.message


def test_both_ends_in_one_message_is_a_transfer_that_does_not_end(tmp_path: Path) -> None:
    dumps = {1: until(LOWERED, 1, "1SEND_F2"), 2: until(LOWERED, 2, "2RECV_F2")}
    found = diagnosed(tmp_path, dumps)
    assert found.culprit is not None
    assert any(finding.kind == "transfer" and finding.ranks == (1, 2) for finding in found.findings)


def test_a_rank_that_is_a_step_behind(tmp_path: Path) -> None:
    # rank 0 has finished two steps, and computes between them; rank 1 waits in the third
    dumps = {0: dump_of(0, P, operations_of(LOWERED, 0, 2)), 1: until(LOWERED, 1, "1RECV_F0", steps=3)}
    found = diagnosed(tmp_path, dumps)
    assert found.states[0].step_number + 1 == found.states[1].step_number
    assert any(finding.kind == "never-arrived" and finding.ranks == (0,) for finding in found.findings)


def test_operations_of_a_coalesced_launch_have_its_state() -> None:
    dump = dump_of(1, P, [("send", 0), ("recv", 0)], pending=2)
    launch = dict(dump["entries"][-1], profiling_name="nccl:coalesced", record_id=2, state="completed")
    for entry in dump["entries"]:
        entry["p2p_seq_id"] = launch["p2p_seq_id"]
    dump["entries"].append(launch)
    record = load_flight_record(dump, 1, "rank_1")
    assert [operation.state for operation in record.operations] == ["completed", "completed"]


def test_a_pending_collective_is_named(tmp_path: Path) -> None:
    dump = dump_of(1, P, operations_of(LOWERED, 1))
    entry = dict(dump["entries"][0], profiling_name="nccl:all_reduce", state="started", record_id=10_000)
    dump["entries"].append(entry)
    found = diagnosed(tmp_path, {1: dump})
    assert found.states[1].waiting_for == Wait(WaitKind.COLLECTIVE, "the collective all_reduce")
