"""Tests of `penstock diagnose`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from penstock import build
from penstock.lowering import AddCommunication, lower
from penstock.traces.diagnose.rank_state import LostRank, RankState, dump_state, state_file_name
from tests.support.command_line import Run
from tests.support.flight_records import dump_of, operations_of, write_dumps

SCHEDULE = lower(build("1f1b", ranks=3, microbatches=4), [AddCommunication()])


def write_states(
    folder: Path,
    members: tuple[int, ...] = (0, 1, 2),
    lost: Mapping[int, Mapping[int, LostRank]] = MappingProxyType({}),
) -> None:
    """Rank 0 waits for rank 1, which waits for an activation that rank 0 has passed; rank 2 is missing."""
    folder.mkdir(exist_ok=True)
    for rank, action, awaits in ((0, "0B0", "0RECV_B0"), (1, "1F1", "1RECV_F1")):
        position = list(map(str, SCHEDULE.ranks[rank])).index(action)
        known = lost.get(rank, {})
        state = RankState(
            members, members[rank], SCHEDULE, step_number=7, position=position, awaits=awaits, lost=known
        )
        (folder / state_file_name(state)).write_text(dump_state(state))


def test_the_culprit_the_places_and_the_grid_are_printed(run: Run, tmp_path: Path) -> None:
    write_states(tmp_path / "states")
    result = run("diagnose", "states")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0].startswith("schedule: 1f1b (p=3, v=1, m=4)")
    assert lines[1] == "culprit: rank 0 skipped a send"
    assert "its list has 0SEND_F1 as step 3" in lines[2]
    assert "also: rank 2 left no state" in lines
    (zero,) = (line for line in lines if line.startswith("  rank 0"))
    assert "[0B0]" in zero
    assert zero.endswith("waits for 0RECV_B0 from rank 1, which is at 1F1")
    assert any(line.startswith("rank 1 ") and "[F1]" in line for line in lines)


def test_json_has_the_same(run: Run, tmp_path: Path) -> None:
    write_states(tmp_path / "states")
    (pipeline,) = run("diagnose", "states", "--json").json["pipelines"]
    assert [(each["kind"], each["ranks"]) for each in pipeline["findings"]] == [
        ("skipped-send", [0]),
        ("no-state", [2]),
    ]
    assert pipeline["ranks"][0]["waits_for"]["peer"] == "on its way"
    assert pipeline["ranks"][2] == {"rank": 2, "world_rank": 2, "state": None}


def test_several_pipelines_are_diagnosed_one_after_the_other(run: Run, tmp_path: Path) -> None:
    write_states(tmp_path / "states", (0, 2, 4))
    write_states(tmp_path / "states", (1, 3, 5))
    out = run("diagnose", "states").out
    assert "pipeline of world ranks 0, 2, 4" in out
    assert "pipeline of world ranks 1, 3, 5" in out
    assert "rank 1 (world rank 3)" in out


def test_ranks_that_miss_each_other_are_named_and_no_send_is_blamed(run: Run, tmp_path: Path) -> None:
    silence = LostRank(is_silent=True, text="not heard of for 9 s")
    write_states(tmp_path / "states", lost={0: {1: silence}, 1: {0: silence}})
    lines = run("diagnose", "states").out.splitlines()
    assert lines[1] == "culprit: ranks 0 and 1 do not reach each other"
    text = "each of them has a state, and rank 0 misses rank 1; rank 1 misses rank 0"
    assert lines[2] == f"  {text}: the network between them fails"
    assert not any("skipped a send" in line for line in lines)
    write_states(tmp_path / "states", lost={0: {1: silence}})  # rank 1 was stopped, and goes on
    assert run("diagnose", "states").out.splitlines()[1] == "culprit: rank 0 skipped a send"


def test_flight_records_need_the_schedule(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    write_dumps(folder, {0: dump_of(0, 3, operations_of(SCHEDULE, 0)[:4], pending=1)})
    missing = run("diagnose", "traces")
    assert (missing.code, "give the schedule of the run as --schedule" in missing.err) == (2, True)
    other = run("diagnose", "traces", "--schedule", "1f1b", "-p", 5, "-m", 4)
    assert (other.code, "and the schedule has 5 ranks: give the schedule of this run" in other.err) == (2, True)
    out = run("diagnose", "traces", "--schedule", "1f1b", "-p", 3, "-m", 4).out
    assert "culprit: rank 1 left no state" in out


def test_another_schedule_than_the_given_one_is_said(run: Run, tmp_path: Path) -> None:
    write_states(tmp_path / "states")
    out = run("diagnose", "states", "--schedule", "gpipe", "-p", 3, "-m", 4).out
    assert "note: all ranks run 1f1b, which is not the given schedule gpipe: rank 0, step" in out


def test_mistakes_are_explained(run: Run, tmp_path: Path) -> None:
    assert run("diagnose", "nowhere").code == 2
    (tmp_path / "states").mkdir()
    result = run("diagnose", "states")
    assert (result.code, result.out) == (1, "")
    assert "no state files" in result.err
    assert "give it too" in run("diagnose", "states", "-p", 4).message


def test_ranks_with_different_schedules_ask_for_the_option(run: Run, tmp_path: Path) -> None:
    (tmp_path / "states").mkdir()
    for rank, name in enumerate(("1f1b", "gpipe")):
        schedule = lower(build(name, ranks=2, microbatches=4), [AddCommunication()])
        state = RankState((0, 1), rank, schedule, step_number=1, position=0)
        (tmp_path / "states" / state_file_name(state)).write_text(dump_state(state))
    note = "the ranks run different schedules: give the schedule of this run as "
    assert f"note: {note}--schedule" in run("diagnose", "states").out
    assert run("diagnose", "states", "--json").json["pipelines"][0]["notes"] == [f"{note}schedule"]
