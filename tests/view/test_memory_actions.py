"""Promises of views about RECOMPUTE, OFFLOAD and RELOAD: a colour, a track and a legend entry each."""

from __future__ import annotations

import json

from penstock import Costs, Schedule, Timeline, simulate
from penstock.view import grid, terminal
from penstock.view.html import html
from penstock.view.perfetto import trace
from penstock.view.svg import svg

SCHEDULE = Schedule.parse("0F0 0OFFLOAD0 0F1 0RECOMPUTE1 0B1 0RELOAD0 0B0")


def shown() -> Timeline:
    return simulate(SCHEDULE, Costs(host_latency=2))


def test_a_trace_has_a_track_for_each_direction_of_the_host_link() -> None:
    entries = json.loads(trace([shown()]))["traceEvents"]
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    steps = {entry["name"]: names[entry["tid"]] for entry in entries if entry["ph"] == "X"}
    assert steps["0OFFLOAD0"] == "offload"
    assert steps["0RELOAD0"] == "reload"
    assert steps["0RECOMPUTE1"] == "compute"
    (waiting,) = (entry for entry in entries if entry["name"] == "0B0")
    assert (waiting["args"]["reason"], waiting["args"]["waited_us"]) == ("reload", 2e6)


def test_a_picture_has_their_boxes_and_legend_and_room_for_the_host_link() -> None:
    text = svg([shown()])
    for meaning in ("RECOMPUTE: recompute forward", "offload to the host", "reload from the host"):
        assert meaning in text
    plain = svg([simulate(Schedule.parse("0F0 0F1 0B1 0B0"))])
    assert "host" not in plain
    assert 'class="penstock-OFFLOAD"' in text


def test_a_page_has_their_steps_and_the_reason_of_the_gap() -> None:
    page = html([shown()])
    start = page.index(">", page.index('id="data"')) + 1
    data = json.loads(page[start : page.index("</script>", start)])
    (record,) = data["timelines"]
    assert record["gaps"]["reason"] == ["reload"]
    assert len(record["steps"]["kind"]) == SCHEDULE.num_steps


def test_recompute_has_a_short_name_in_cells() -> None:
    compute = Schedule.parse("0F0 0F1 0RECOMPUTE1 0B1 0B0")
    assert "F0 F1 R1 B1─── B0───" in grid(compute).plain
    assert "R1" in terminal(simulate(compute), 60).plain
