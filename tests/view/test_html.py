"""Tests of the HTML page as text."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

import penstock
from penstock import Costs, Kind, Placement, Schedule, StageGraph, Timeline
from penstock.simulation.gaps import critical_path, gaps
from penstock.view.html import html
from tests.support.timelines import timeline


class Page(HTMLParser):
    """The texts of a page by the path of tags they are in, and the attributes of every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = "" if tag == self._open else self._open

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open][-1] += data

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts["script"][0])
        return found


def record(t: Timeline) -> dict[str, Any]:
    (found,) = Page(html([t])).data["timelines"]
    assert isinstance(found, dict)
    return found


# --- the page --------------------------------------------------------------------------------------


def test_the_same_timelines_give_the_same_bytes() -> None:
    assert html([timeline("zbv"), timeline("1f1b")]) == html([timeline("zbv"), timeline("1f1b")])


def test_nothing_is_loaded_from_anywhere() -> None:
    page = html([timeline("zbv")])
    for sign in ("http://", "https://", "url(", "@import", "import(", "fetch(", "XMLHttpRequest"):
        assert sign not in page
    for tag, attributes in Page(page).tags:
        assert not {"src", "href", "style", "onclick", "onload"} & set(attributes), tag


def test_the_policy_allows_this_script_and_this_style_and_nothing_else() -> None:
    page = Page(html([timeline("1f1b")]))
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    hashes = [
        b64encode(sha256(text.encode()).digest()).decode()
        for text in (page.texts["script"][1], page.texts["style"][0])
    ]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )


HOSTILE = "</script><script>alert(1)</script><!-- & \u2028 \ud800 ${x} $data $$ \"quoted\" 'too'"


def test_names_and_titles_are_escaped() -> None:
    schedule = penstock.build("1f1b", ranks=2, microbatches=2).renamed(HOSTILE)
    plain = Page(html([penstock.simulate(schedule.renamed("plain"))]))
    page = Page(html([penstock.simulate(schedule)], title=HOSTILE))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert page.data["timelines"][0]["name"] == HOSTILE
    assert page.texts["title"] == page.texts["h1"] == [HOSTILE.replace("\ud800", "\ufffd")]
    html([penstock.simulate(schedule)], title=HOSTILE).encode()


def test_without_a_timeline_there_is_still_a_page() -> None:
    assert Page(html([])).data["timelines"] == []


# --- the data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lowered", [False, True], ids=["compute", "lowered"])
@pytest.mark.parametrize("family", penstock.families())
def test_every_step_is_there_with_its_text_and_its_times(family: str, lowered: bool) -> None:  # noqa: FBT001 -- a parameter
    t = timeline(family, lowered=lowered)
    found = record(t)
    drawn = [e for e in t.events if not e.step.kind.is_communication]
    assert texts(found) == [str(event.step) for event in drawn]
    assert found["steps"]["start"] == [event.start for event in drawn]
    assert found["steps"]["end"] == [event.end for event in drawn]
    per_rank = np.bincount([event.rank for event in drawn], minlength=t.schedule.num_ranks)
    assert np.diff(found["bounds"]).tolist() == per_rank.tolist()


def texts(found: dict[str, Any]) -> list[str]:
    """The texts of the steps, as the page puts them together."""
    kinds = list(Kind)

    def part(columns: dict[str, list[int]], i: int, kind: Kind) -> str:
        return f"{columns['stage'][i]}{kind}{columns['microbatch'][i] if kind.has_microbatch else ''}"

    steps, pairs = found["steps"], found["pairs"]
    pair_of = {step: i for i, step in enumerate(pairs["step"])}
    written = []
    for i, number in enumerate(steps["kind"]):
        if i in pair_of:
            second = part(pairs, pair_of[i], kinds[pairs["kind"][pair_of[i]]])
            written.append(f"({part(steps, i, Kind.F)};{second})OVERLAP_F_B")
        else:
            written.append(part(steps, i, kinds[number]))
    return written


@pytest.mark.parametrize("family", ["1f1b", "zbv", "dualpipev"])
def test_messages_name_their_ends_and_their_arrival(family: str) -> None:
    t = timeline(family)
    found = record(t)
    action, sent = texts(found), found["messages"]
    assert len(sent["arrival"]) == len(t.messages) > 0
    for i, message in enumerate(t.messages):
        assert action[sent["producer"][i]] == str(t.event(message.producer).step)
        assert action[sent["consumer"][i]] == str(t.event(message.consumer).step)
        assert (sent["begin"][i], sent["arrival"][i]) == (message.begin, message.arrival)


def test_steps_have_their_all_to_all_where_there_is_any() -> None:
    schedule = penstock.Schedule.parse("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    steps = record(penstock.simulate(schedule, Costs(forward_all_to_all=1, backward_input_all_to_all=1)))[
        "steps"
    ]
    assert (steps["all_to_all"], steps["exposed"]) == ([1, 2, 1], [1, 0, 1])
    steps = record(penstock.simulate(schedule))["steps"]
    assert (steps["all_to_all"], steps["exposed"]) == ([], [])


def test_messages_follow_the_edges_of_a_stage_graph() -> None:
    graph = StageGraph(4, ((0, 1), (0, 2), (0, 3), (1, 3), (2, 3)))
    built = penstock.build("1f1b", ranks=3, microbatches=2, graph=graph, placement=Placement((0, 1, 1, 2)))
    t = penstock.simulate(penstock.lower(built), Costs(latency=(0.5, 0.5, 9, 0.5, 0.5)))
    found = record(t)
    action, sent, further = texts(found), found["messages"], found["further_uses"]
    ways = {(action[a], action[b]) for a, b in zip(sent["producer"], sent["consumer"])}
    ways |= {(action[sent["producer"][m]], action[b]) for m, b in zip(further["message"], further["consumer"])}
    wanted = {(f"{s}F{k}", f"{t}F{k}") for s, t in graph.edges for k in range(2)}
    wanted |= {(f"{t}B{k}", f"{s}B{k}") for s, t in graph.edges for k in range(2)}
    assert ways == wanted
    # a gap names the message along its own edge, not another one of the same stage
    waits = [(m, step) for m, step in zip(found["gaps"]["message"], found["gaps"]["before"]) if m >= 0]
    assert all(sent["consumer"][m] == step for m, step in waits)
    assert {action[step] for _, step in waits} >= {"1F0", "3F0"}


def test_needs_are_what_a_step_waits_for_on_its_own_rank() -> None:
    found = record(penstock.simulate(Schedule.parse("0F0 1F0 1I0 0I0 1W0 0W0")))
    action, needs = texts(found), found["needs"]
    pairs = {(action[a], action[b]) for a, b in zip(needs["producer"], needs["consumer"])}
    assert pairs == {
        ("0F0", "1F0"),
        ("1F0", "1I0"),
        ("0F0", "0I0"),
        ("1I0", "0I0"),
        ("1I0", "1W0"),
        ("0I0", "0W0"),
    }


def test_gaps_and_the_critical_path_are_those_of_attribution() -> None:
    t = timeline("zbv")
    found = record(t)
    action, idle = texts(found), found["gaps"]
    assert idle["reason"] == [gap.reason for gap in gaps(t)]
    assert idle["start"] == [gap.start for gap in gaps(t)]
    names = [action[step] if step >= 0 else None for step in idle["before"]]
    assert names == [str(gap.next_step.step) if gap.next_step else None for gap in gaps(t)]
    shown = [e for e in critical_path(t) if not e.step.kind.is_communication]
    assert [action[step] for step in found["path"]] == [str(event.step) for event in shown]


def test_memory_has_every_change_and_the_peak() -> None:
    t = timeline("1f1b")
    for found, memory in zip(record(t)["memory"], t.memory):
        assert max(found["total"]) == found["peak"] == memory.peak
        at = np.searchsorted(found["times"], memory.times, side="right") - 1
        last = np.searchsorted(memory.times, memory.times, side="right") - 1
        assert [found["total"][i] for i in at] == memory.total[last].tolist()


def test_the_header_shows_the_metrics_of_the_timeline() -> None:
    t = timeline("zbv")
    found = record(t)
    assert (found["makespan"], found["span"], found["period"]) == (t.makespan, t.span, t.period)
    assert found["bubble"] == t.bubble_rate


def test_a_receive_that_blocked_its_rank_is_a_step() -> None:
    built = penstock.build("1f1b", ranks=2, microbatches=2)
    t = penstock.simulate(penstock.lower(built), Costs(latency=1), blocking_receives=True)
    assert any(re.search("RECV", text) for text in texts(record(t)))


def test_times_that_are_not_whole_are_exact() -> None:
    t = penstock.simulate(penstock.build("1f1b", ranks=3, microbatches=5), Costs(forward=0.1, latency=1 / 3))
    assert record(t)["steps"]["end"] == t.end.tolist()


def test_several_timelines_keep_their_order_and_their_own_sizes() -> None:
    shown = [timeline("zbv"), timeline("1f1b", ranks=3), timeline("gpipe", microbatches=2)]
    found = Page(html(shown)).data["timelines"]
    assert [each["name"] for each in found] == ["zbv", "1f1b", "gpipe"]
    assert [(each["ranks"], each["microbatches"]) for each in found] == [(4, 8), (3, 8), (4, 2)]


def test_a_timeline_without_steps_is_shown_empty() -> None:
    nothing = np.empty(0)
    schedule = Schedule([[], []], Placement.loop(2), 1)
    found = record(Timeline(schedule, Costs(), nothing, nothing))
    assert found["bounds"] == [0, 0, 0]
    assert found["steps"]["kind"] == found["path"] == found["gaps"]["rank"] == []
