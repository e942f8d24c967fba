"""Promises of the API behind the page: the numbers of the command line, and words for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from penstock.cli import app
from penstock.cost.costs import Costs
from penstock.errors import FormatError
from penstock.web.answers import REQUESTS, catalogue, pareto
from tests.support.grids import examples

FAMILIES = ("gpipe", "1f1b", "zb-h1", "zbv", "interleaved-1f1b", "v-half", "dualpipev")
BASIC = {"schedules": [{"family": "1f1b", "ranks": 2, "microbatches": 4}]}


def ask(name: str, **request: Any) -> Any:
    """The answer as the page gets it."""
    return json.loads(json.dumps(REQUESTS[name](request), allow_nan=False))


def printed(*words: object) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


questions = st.fixed_dictionaries(
    {
        "family": st.sampled_from(FAMILIES),
        "ranks": st.integers(1, 5),
        "microbatches": st.integers(1, 7),
        "forward": st.sampled_from([0.5, 1, 1.25]),
        "latency": st.sampled_from([0, 0.25]),
        "bandwidth": st.sampled_from([None, 8.0]),
        "weights": st.lists(st.sampled_from([0.5, 1, 2]), max_size=4),
        "same_model": st.booleans(),
        "lowered": st.booleans(),
        "send_model": st.sampled_from(["buffered", "rendezvous", "shared-stream"]),
    }
)


@given(questions)
@settings(max_examples=examples(60))
def test_page_and_command_line_give_the_same_numbers(tmp_path_factory: Any, asked: dict[str, Any]) -> None:
    costs = {"forward_seconds": asked["forward"], "latency_seconds": asked["latency"]}
    if asked["bandwidth"]:
        costs |= {"bandwidth_bytes_per_second": asked["bandwidth"], "activation_message_bytes": 2}
    sizes = {key: asked[key] for key in ("family", "ranks", "microbatches")}
    shared = {key: asked[key] for key in ("weights", "same_model", "lowered", "send_model")}
    (entry,) = ask("compare", schedules=[sizes], costs=costs, **shared)["schedules"]
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(json.dumps(entry["costs"]))
    words = ["simulate", asked["family"], "-p", asked["ranks"], "-m", asked["microbatches"], "-c", path]
    words += ["--send-model", asked["send_model"], "--json", *(["--lowered"] if asked["lowered"] else [])]
    simulated = json.loads(printed(*words))
    for key in entry["row"].keys() & simulated.keys():
        assert entry["row"][key] == simulated[key], key


def test_a_model_cut_into_more_stages_does_the_same_work() -> None:
    schedules = [{"family": name, "ranks": 4, "microbatches": 8} for name in ("1f1b", "zbv")]
    entries = ask("compare", schedules=schedules, same_model=True, weights=[1, 1, 1, 3])["schedules"]
    work = [sum(Costs.from_keys(each["costs"]).per_stage("forward", each["row"]["stages"])) for each in entries]
    assert work == [6, 6]


def test_a_schedule_that_cannot_be_built_has_its_reason_and_the_others_are_drawn() -> None:
    bad = {"family": "interleaved-1f1b", "ranks": 4, "microbatches": 8, "group": 99}
    answer = ask("compare", schedules=[bad, *BASIC["schedules"]])
    assert "group of interleaved-1f1b must be" in answer["schedules"][0]["error"]
    assert answer["schedules"][1]["panel"] == 0
    assert len(answer["data"]["timelines"]) == 1


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({}, "schedules: missing"),
        ({"schedules": []}, "1 to 8"),
        ({"schedules": [1]}, "objects"),
        ({**BASIC, "other": 1}, "other: unknown key"),
        ({**BASIC, "jitter": 2}, "jitter: it must be a share"),
        ({**BASIC, "weights": [0]}, "weights: expected numbers above 0"),
        ({**BASIC, "costs": {"forward_seconds": -1}}, "forward_seconds"),
        ({**BASIC, "what_if": {"kind": "x", "factor": 0}}, "what_if: kind is one of"),
        ([], "expected an object"),
    ],
)
def test_a_wrong_request_gets_every_problem_in_words(request_: Any, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        REQUESTS["compare"](request_)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"family": "1f1b", "ranks": 100, "microbatches": 10**9}, "can be at most"),
        ({"family": "1f1b", "ranks": 10**12, "microbatches": 1}, "at most"),
        ({"family": "nope", "ranks": 1, "microbatches": 1}, "unknown family"),
        ({"csv": "0F0,junk"}, "is not an action"),
        ({"json": "{"}, "invalid JSON"),
        ({"steps": [["0F0"]], "stage_to_rank": [0]}, "microbatches: missing"),
        ({"steps": [[1]], "stage_to_rank": [0], "microbatches": 1}, "list of texts"),
        ({"name": "x"}, "a schedule has a family"),
        ({"family": "1f1b", "ranks": None, "microbatches": 1}, "ranks: missing"),
    ],
)
def test_a_wrong_schedule_is_explained(source: dict[str, Any], problem: str) -> None:
    (entry,) = ask("compare", schedules=[source])["schedules"]
    assert problem in entry["error"]


def test_what_if_changes_one_thing() -> None:
    schedules = [{"family": "1f1b", "ranks": 4, "microbatches": 8}]
    for change, grows in (
        ({"kind": "slow-rank", "index": 1, "factor": 2}, "makespan"),
        ({"kind": "slow-link", "index": 0, "factor": 3}, "makespan"),
        ({"kind": "larger-microbatch", "factor": 2}, "peak_memory"),
    ):
        answer = ask("compare", schedules=schedules, costs={"latency_seconds": 0.5}, what_if=change)
        (entry,) = answer["schedules"]
        assert entry["row"][grows] > entry["before"][grows], change
        assert answer["what_if"]


def test_twice_the_memory_makes_room() -> None:
    schedules = [{"family": "gpipe", "ranks": 2, "microbatches": 4}]
    tight = ask("compare", schedules=schedules, memory_limit=2)
    roomy = ask("compare", schedules=schedules, memory_limit=2, what_if={"kind": "memory", "factor": 2})
    assert not tight["schedules"][0]["row"]["fits"]
    assert roomy["schedules"][0]["row"]["fits"]


def test_the_pareto_chart_is_bounded_in_time_and_tells_what_is_left_out() -> None:
    reports: list[dict[str, Any]] = []
    whole = pareto(BASIC, reports.append)
    assert whole["left_out"] == []
    assert whole["tried"] == whole["of"] > 20
    part = pareto(BASIC, seconds=0)
    assert len(part["points"]) == part["tried"] == 1
    assert part["tried"] + len(part["left_out"]) == part["of"] == whole["of"]
    assert part["left_out"][-1].startswith(("gis, group", "interleaved"))  # plain families come first


def test_no_pareto_point_is_dominated_by_another() -> None:
    points = ask("pareto", **BASIC, same_model=True)["points"]
    assert len(points) > 10
    best = [(p["makespan"], p["peak_memory"]) for p in points if p["optimal"]]
    assert all(not (a[0] < b[0] and a[1] < b[1]) for a in best for b in best)
    assert any(p["schedule"]["family"] == "zbv" for p in points)


def test_jitter_has_quantiles_in_order() -> None:
    (found,) = ask("robustness", **BASIC, jitter=0.2)["quantiles"]
    assert found["p5"] < found["p50"] < found["p95"]


def test_the_catalogue_names_every_family() -> None:
    names = [family["name"] for family in catalogue()["families"]]
    assert set(FAMILIES) <= set(names)


def test_a_csv_file_is_compared(tmp_path: Path) -> None:
    printed("show", "zb-h1", "-p", "2", "-m", "3", "-o", str(tmp_path / "x.csv"))
    text = (tmp_path / "x.csv").read_text()
    (entry,) = ask("compare", schedules=[{"csv": text, "name": "mine"}])["schedules"]
    assert entry["row"]["name"] == "mine"
