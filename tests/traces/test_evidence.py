"""Promise: malformed dumps give clear errors for all files at once, and nothing in them is run."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from penstock import build
from penstock.errors import FormatError, ScheduleError
from penstock.lowering import lower
from penstock.traces.diagnose.diagnosis import read_evidence
from penstock.traces.diagnose.flight_recorder import PickleRefusedError, unpickle_plain
from penstock.traces.diagnose.rank_state import LostRank, RankState, Wait, WaitKind, dump_state, state_file_name
from tests.support.flight_records import dump_of, operations_of

SCHEDULE = lower(build("1f1b", ranks=2, microbatches=4))
DUMP = dump_of(0, 2, operations_of(SCHEDULE, 0))


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def message_of(folder: Path) -> str:
    with pytest.raises(FormatError) as caught:
        read_evidence(folder, SCHEDULE)
    return str(caught.value)


def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "created"
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps(DUMP | {"version": Evil(target)}, protocol=2))
    assert "is not allowed; nothing in it was run" in message_of(folder)
    assert not target.exists()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read_from_every_protocol(protocol: int) -> None:
    assert unpickle_plain(pickle.dumps(DUMP, protocol=protocol)) == DUMP


def test_a_damaged_pickle_is_refused_wherever_it_ends_or_changes() -> None:
    whole = pickle.dumps(DUMP, protocol=2)
    for end in range(0, len(whole) - 1, 97):
        with pytest.raises(PickleRefusedError):
            unpickle_plain(whole[:end])
    with pytest.raises(PickleRefusedError, match="more after the end"):
        unpickle_plain(whole + b"x")


def test_keys_whose_hash_takes_for_ever_are_refused() -> None:
    nested: Any = ()
    for _ in range(60):
        nested = (nested, nested)
    with pytest.raises(PickleRefusedError):
        unpickle_plain(b"\x80\x02}" + pickle.dumps(nested, protocol=2)[2:-1] + b"K\x01s.")


DAMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": "9.0"}, "version '9.0' is unknown"),
    "groups": ({"pg_config": {"0": {"ranks": "import os"}}}, "group '0' has no list of ranks"),
    "entries": ({"entries": {}}, "entries: expected a list"),
    "entry": ({"entries": [3]}, "entries[0]: expected an object"),
    "name": (
        {"entries": [{**DUMP["entries"][0], "profiling_name": "nccl:send 0->"}]},
        "'nccl:send 0->' is not",
    ),
    "state": ({"entries": [{**DUMP["entries"][0], "state": "lost"}]}, "state 'lost' is not one of"),
    "rank": ({"entries": [{**DUMP["entries"][0], "profiling_name": "nccl:send 1->0"}]}, "the file name says 0"),
    "peer": ({"entries": [{**DUMP["entries"][0], "profiling_name": "nccl:send 0->7"}]}, "has no ranks 0 and 7"),
    "sizes": ({"entries": [{**DUMP["entries"][0], "input_sizes": 3}]}, "input_sizes and input_dtypes are not"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_malformed_dump_is_named_with_its_place(tmp_path: Path, damage: str) -> None:
    changes, expected = DAMAGES[damage]
    (tmp_path / "trace_0.json").write_text(json.dumps(DUMP | changes))
    assert expected in message_of(tmp_path)


def test_the_problems_of_all_files_are_listed_and_capped(tmp_path: Path) -> None:
    for rank in range(30):
        (tmp_path / f"rank{rank}.json").write_text("no json")
    text = message_of(tmp_path)
    assert "rank0.json: neither JSON nor a pickle" in text
    assert "and 10 more problems" in text


STATE = RankState(
    *((0, 1), 1, SCHEDULE),
    step_number=3,
    call_number=5,
    position=4,
    awaits="1RECV_F1",
    waiting_for=Wait(WaitKind.COMMIT, "the end of the step", 0),
    lost={0: LostRank(is_silent=False, text="gone")},
    job="a",
)


def write_state(folder: Path, state: RankState, **changes: Any) -> None:
    text = json.dumps(json.loads(dump_state(state)) | changes)
    (folder / state_file_name(state)).write_text(text)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_state(tmp_path, STATE)
    (pipeline,) = read_evidence(tmp_path, None).pipelines
    (state,) = pipeline.states
    assert state.source == "rank1.json"
    assert dump_state(state) == dump_state(STATE)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"version": 1}, "version: expected 4"),
        ({"position": "x"}, "position: expected a number"),
        ({"members": [0]}, "members: expected 2 ranks as in the schedule"),
        ({"world_rank": 5}, "and world_rank among them"),
        (
            {"waiting_for": {"kind": "nap", "what": "", "peer": None}},
            "waiting_for: expected null, or",
        ),
        ({"waiting_for": {"kind": "receive"}}, "waiting_for: expected null, or"),
        ({"lost": {"x": {"is_silent": True, "text": ""}}}, "lost: expected objects with is_silent and text"),
        ({"lost": {"0": "gone"}}, "lost: expected objects with is_silent and text"),
        ({"schedule": {"ranks": 3}}, "schedule"),
        ({"more": 1}, "more: unknown key"),
        ({"error": "x" * 20_000}, "error: expected a text of at most"),
    ],
)
def test_a_malformed_state_is_named_with_its_key(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    write_state(tmp_path, STATE, **changes)
    assert expected in message_of(tmp_path)


def test_states_of_an_earlier_launch_are_left_out(tmp_path: Path) -> None:
    write_state(tmp_path, STATE, written_at=2.0)
    write_state(tmp_path, RankState((0, 1), 0, SCHEDULE, job="b", written_at=1.0))
    evidence = read_evidence(tmp_path, None)
    assert [state.rank for state in evidence.pipelines[0].states] == [1]
    assert "left out, from another launch of the job: rank0.json" in evidence.notes


def test_a_state_that_is_much_older_than_the_others_is_named(tmp_path: Path) -> None:
    write_state(tmp_path, STATE, written_at=1000.0)
    write_state(tmp_path, RankState((0, 1), 0, SCHEDULE, job="a", written_at=1.0))
    (note,) = read_evidence(tmp_path, None).notes
    assert note == "more than 300 s older than the newest state, and perhaps outdated: rank0.json"


def test_other_files_are_not_read_and_a_folder_without_states_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("step 1")
    assert "no state files" in message_of(tmp_path)
    write_state(tmp_path, STATE)
    assert "not read: train.log" in read_evidence(tmp_path, None).notes
    (tmp_path / "rank1.json").unlink()
    (tmp_path / "trace_0.json").write_text(json.dumps(DUMP))
    with pytest.raises(ScheduleError, match="give the schedule of the run as schedule"):
        read_evidence(tmp_path, None)
