"""Tests of traces against the trace-event format (`tests.support.trace_format`), and of what they say."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import Costs, Kind, Placement, Schedule, StageGraph, Timeline
from penstock.simulation.gaps import gaps
from penstock.view.perfetto import _us, trace
from tests.support.grids import small
from tests.support.timelines import COSTS, timeline
from tests.support.trace_format import Entry, check, check_arrows, of

GOLDENS = Path(__file__).parents[1] / "goldens"
UGLY = Costs(
    forward=0.0103331, backward_input=0.0111117, backward_weight=0.0090909, latency=0.0300001, unshard=0.001
)


def entries(*timelines: Timeline) -> list[Entry]:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    document = json.loads(trace(timelines), parse_constant=refuse)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert document["displayTimeUnit"] == "ms"
    found: list[Entry] = document["traceEvents"]
    return found


# --- every trace keeps to the format ---------------------------------------------------------------


@pytest.mark.parametrize("costs", [Costs(), COSTS, UGLY], ids=["unit", "latency", "ugly"])
@pytest.mark.parametrize("family", penstock.families())
@small(lambda family, costs: costs is UGLY or family == "dualpipev")
def test_every_family_lowered_or_not_keeps_to_the_format(family: str, costs: Costs) -> None:
    built = penstock.build(family, ranks=4, microbatches=6)
    for schedule in (built, penstock.lower(built)):
        check(entries(penstock.simulate(schedule, costs)))


@pytest.mark.parametrize("sends", ["buffered", "rendezvous"])
def test_every_send_model_keeps_to_the_format(sends: str) -> None:
    schedule = penstock.lower(penstock.build("1f1b", ranks=4, microbatches=6))
    costs = Costs(latency=0.25, bandwidth=100, activation_message=30, gradient_message=70)
    check(entries(penstock.simulate(schedule, costs, send_model=sends, blocking_receives=True)))


def test_actions_of_zero_duration_keep_to_the_format() -> None:
    schedule = penstock.build("zbv", ranks=3, microbatches=4)
    check(entries(penstock.simulate(schedule, Costs(forward=0, backward_weight=0, latency=0.5))))


def test_uneven_placements_keep_to_the_format() -> None:
    placement = Placement.custom({0: [0, 1, 4], 1: [2, 3]})
    schedule = Schedule.parse("0F0 1F0 4F0 4B0 1B0 0B0 | 2F0 3F0 3B0 2B0", placement)
    check(entries(penstock.simulate(penstock.lower(schedule), COSTS)))


def test_no_steps_at_all_leave_names_and_empty_memory() -> None:
    nothing = np.empty(0)
    empty = Timeline(Schedule([[], []], Placement.loop(2), 1), Costs(), nothing, nothing)
    found = entries(empty)
    check(found)
    assert {entry["ph"] for entry in found} == {"M", "C"}
    assert entries() == []


def test_truncating_microseconds_loses_no_nanosecond() -> None:
    for time in [*range(5000), *(10**k * 7 + 1 for k in range(4, 15))]:
        assert int(_us(time) * 1000) == time
        assert round(_us(time) * 1000) == time


# --- what it says ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"])
def test_every_step_and_message_is_there_with_its_time(family: str) -> None:
    shown = timeline(family)
    slices = of("X", entries(shown))
    steps = {(event.rank, str(event.step), event.start * 1e6) for event in shown.events}
    found = {(entry["name"], entry["ts"]) for entry in slices if entry["cat"] != "communication"}
    assert found == {(name, ts) for _, name, ts in steps if "SEND" not in name and "RECV" not in name}
    named = Counter(entry["name"] for entry in slices if entry["cat"] == "communication")
    assert named == Counter(str(e.step) for e in shown.events if e.step.kind.is_communication)
    assert sum(entry["dur"] for entry in slices if entry["cat"] == "compute") == sum(shown.busy) * 1e6


def test_steps_have_their_all_to_all_and_what_of_it_is_exposed() -> None:
    costs = penstock.Costs(forward_all_to_all=1, backward_input_all_to_all=0.5)
    shown = penstock.simulate(penstock.build("interleaved-overlap", ranks=2, microbatches=2), costs)
    found = {entry["name"]: entry["args"] for entry in of("X", entries(shown)) if entry["cat"] == "compute"}
    keys = ("all_to_all_us", "exposed_all_to_all_us")
    assert [found["0F0"][key] for key in keys] == [1e6, 1e6]
    assert [found["(3F1;3B0)OVERLAP_F_B"][key] for key in keys] == [1.5e6, 0]
    assert not any("all_to_all_us" in entry["args"] for entry in of("X", entries(timeline("1f1b"))))


def test_arrows_go_from_the_producer_through_the_message_to_the_consumer() -> None:
    shown = timeline("zbv")
    found = entries(shown)
    assert len(of("s", found)) == len(of("t", found)) == len(of("f", found)) == len(shown.messages)
    open_on: dict[int, str] = {}
    ways = defaultdict(list)
    for entry in found:
        if entry["ph"] == "X":
            open_on[entry["tid"]] = entry["name"]
        if entry["ph"] in "stf":
            ways[entry["id"]].append(open_on[entry["tid"]])
    assert sorted(ways.values()) == sorted(
        [
            str(shown.event(m.producer).step),
            f"{m.stage}{Kind.SEND_F if m.kind == 'activation' else Kind.SEND_B}{m.microbatch}",
            str(shown.event(m.consumer).step),
        ]
        for m in shown.messages
    )


def test_arrows_follow_the_edges_of_a_stage_graph() -> None:
    graph = StageGraph(4, ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3)))
    built = penstock.build("1f1b", ranks=3, microbatches=2, graph=graph, placement=Placement((0, 1, 1, 2)))
    for schedule in (built, penstock.lower(built)):
        shown = penstock.simulate(schedule, COSTS)
        found = entries(shown)
        check_arrows(found)
        ways = defaultdict(list)
        open_on: dict[int, str] = {}
        for entry in found:
            if entry["ph"] == "X":
                open_on[entry["tid"]] = entry["name"]
            if entry["ph"] in "sf":
                ways[entry["id"]].append(open_on[entry["tid"]])
        wanted = [[f"{s}F{k}", f"{t}F{k}"] for s, t in graph.edges for k in range(2)]
        wanted += [[f"{t}B{k}", f"{s}B{k}"] for s, t in graph.edges for k in range(2)]
        assert sorted(ways.values()) == sorted(wanted)
        named = Counter(entry["name"] for entry in of("X", found) if entry["cat"] == "communication")
        lowered = penstock.lower(built).ranks
        assert named == Counter(str(step) for row in lowered for step in row if step.kind.is_communication)


def test_a_gap_is_explained_by_the_step_after_it() -> None:
    shown = timeline("1f1b")
    explained = [entry["args"] for entry in of("X", entries(shown)) if "reason" in entry["args"]]
    wanted = [gap for gap in gaps(shown) if gap.next_step is not None]
    assert Counter(args["reason"] for args in explained) == Counter(gap.reason for gap in wanted)
    assert sum(args["waited_us"] for args in explained) == sum(gap.length for gap in wanted) * 1e6
    assert any(args["waits_for"] == "gradient of stage 1, microbatch 0 (1B0, rank 1)" for args in explained)


def test_a_pair_names_both_stages_and_microbatches() -> None:
    pairs = [entry for entry in of("X", entries(timeline("dualpipev"))) if "OVERLAP" in entry["name"]]
    assert pairs[0]["args"]["kind"] == "OVERLAP_F_B"
    assert len(pairs[0]["args"]["stage"]) == len(pairs[0]["args"]["microbatch"]) == 2


def test_counters_reach_the_peak_and_come_back() -> None:
    costs = Costs(activation=5, parameters=7, unsharded_parameters=3)
    shown = timeline("zbv", costs=costs)
    by_process = defaultdict(list)
    for entry in of("C", entries(shown)):
        by_process[entry["pid"]].append(sum(entry["args"].values()))
    assert tuple(max(values) for values in by_process.values()) == shown.peak_memory
    assert {values[-1] for values in by_process.values()} == {14}


def test_concurrent_messages_are_on_separate_threads() -> None:
    shown = timeline("gpipe", ranks=2, microbatches=3, costs=Costs(latency=1.5))
    names = [entry["args"]["name"] for entry in of("M", entries(shown)) if entry["name"] == "thread_name"]
    assert names[:4] == ["compute", "from rank 1", "to rank 1", "to rank 1 (2)"]


def test_several_timelines_have_distinct_names_and_ids() -> None:
    names = [
        entry["args"]["name"]
        for entry in of("M", entries(timeline("1f1b", 2, 2), timeline("gpipe", 2, 2)))
        if entry["name"] == "process_name"
    ]
    assert names == ["1f1b: rank 0", "1f1b: rank 1", "gpipe: rank 0", "gpipe: rank 1"]
    alone = [entry["args"].get("name") for entry in of("M", entries(timeline("1f1b", 2, 2)))]
    assert "rank 0" in alone


def test_hostile_names_stay_one_text() -> None:
    hostile = '"},{"ph":"X\x00\n\ud800</script>'
    schedule = penstock.build("1f1b", ranks=2, microbatches=2).renamed(hostile)
    shown = penstock.simulate(schedule)
    found = entries(shown, shown)
    check(found)
    assert found[0]["args"]["name"] == f"{hostile}: rank 0"


def test_the_same_timeline_gives_the_same_bytes() -> None:
    assert trace([timeline("zbv")]) == trace([timeline("zbv")])
    golden = GOLDENS / "1f1b_2x2.trace.json"
    assert trace([timeline("1f1b", 2, 2)]) == golden.read_text(encoding="utf-8")
