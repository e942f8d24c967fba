"""Promises of the exports: files that read back, and lines that give the same numbers."""

from __future__ import annotations

import json
import shlex
from base64 import b64decode
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.families import build
from penstock.formats import dumps, reads
from penstock.ir.graph import StageGraph
from penstock.web.answers import REQUESTS
from tests.support.grids import small
from tests.support.schedule_rows import rows_of

SOURCE = {"family": "interleaved-1f1b", "ranks": 4, "microbatches": 8, "group": 6}
QUESTION: dict[str, Any] = {
    "schedules": [SOURCE],
    "costs": {"forward_seconds": 0.5, "latency_seconds": 0.1},
    "weights": [1, 1, 1, 2],
    "same_model": True,
}


def export(wanted: str, **more: Any) -> Any:
    return REQUESTS["export"]({**QUESTION, "format": wanted, **more})


@pytest.mark.parametrize(
    ("wanted", "begins"),
    [("svg", b"<svg"), ("png", b"\x89PNG"), ("html", b"<!doctype html>"), ("trace", b"{")],
)
def test_pictures(wanted: str, begins: bytes) -> None:
    made = export(wanted)
    assert b64decode(made["base64"]).startswith(begins)
    assert made["file"].startswith("interleaved-1f1b")


@pytest.mark.parametrize("wanted", ["csv", "json"])
def test_files_read_back(wanted: str) -> None:
    read = reads(b64decode(export(wanted)["base64"]).decode(), wanted)
    (entry,) = REQUESTS["compare"](QUESTION)["schedules"]
    assert rows_of(read) == entry["steps"]


def numbers_of_lines(question: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[tuple[float, float]]:
    """Run the command and the Python in this directory; return makespan and peak memory of both."""
    lines = REQUESTS["export"](question | {"format": "lines"})
    Path("costs.toml").write_text(lines["costs"])
    program, *words = shlex.split(lines["command"])
    assert program == "penstock"
    if "family" not in question["schedules"][0]:
        wanted = Path(words[1]).suffix[1:]
        made = REQUESTS["export"](question | {"format": wanted})
        assert made["file"] == words[1]
        Path(words[1]).write_bytes(b64decode(made["base64"]))
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, (words, done.output, done.exception)
    printed = json.loads(done.stdout)
    capsys.readouterr()
    exec(lines["python"], {})  # noqa: S102 -- our own lines
    makespan, _, peak = map(float, capsys.readouterr().out.split())
    return [(printed["makespan"], printed["peak_memory"]), (makespan, peak)]


def check_lines(question: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> float:
    (entry,) = REQUESTS["compare"](question)["schedules"]
    shown = entry["row"]["makespan"], entry["row"]["peak_memory"]
    assert numbers_of_lines(question, capsys) == [shown, shown]
    return float(shown[0])


FAMILIES = (
    {"family": "1f1b"},
    {"family": "zbv"},
    {"family": "interleaved-1f1b", "group": 3},
    {"family": "looped-bfs"},
)
COSTS: tuple[dict[str, Any], ...] = (
    {},
    {"unshard_seconds": 5.0, "latency_seconds": 0.25, "parameters_bytes": 4.0},
    {"bandwidth_bytes_per_second": 2.0, "activation_message_bytes": 1.0, "backward_weight_seconds": 0.5},
)

ONE_OF_EACH = {
    ("1f1b", "buffered"),
    ("zbv", "edge-streams"),
    ("interleaved-1f1b", "rendezvous"),
    ("looped-bfs", "rendezvous"),
}
"""Each source, and each send model."""


@pytest.mark.parametrize("source", FAMILIES, ids=lambda source: source["family"])
@pytest.mark.parametrize("send_model", ["buffered", "edge-streams", "rendezvous"])
@small(lambda source, send_model: (source["family"], send_model) in ONE_OF_EACH)
def test_the_command_and_the_python_lines_give_the_numbers_of_the_page(
    source: dict[str, Any],
    send_model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"ranks": 2, "microbatches": 4}
    for costs, lowered, recompute in product(COSTS, (False, True), (None, "0:every=2")):
        schedule = source | sizes | ({"recompute": recompute} if recompute else {})
        question = {"schedules": [schedule], "costs": costs, "send_model": send_model, "lowered": lowered}
        check_lines(question, capsys)


def test_lines_of_a_model_with_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check_lines(QUESTION, capsys)
    check_lines(QUESTION | {"schedules": [SOURCE | {"stages_per_rank": [1, 2, 2, 1], "group": None}]}, capsys)


def test_a_send_model_adds_messages_and_no_sharding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = {"family": "looped-bfs", "ranks": 2, "microbatches": 2}
    question = {"schedules": [source], "costs": {"unshard_seconds": 5}, "send_model": "rendezvous"}
    assert check_lines(question, capsys) == 21
    assert check_lines(question | {"lowered": True}, capsys) == 27


@pytest.mark.parametrize("lowered", [False, True])
@pytest.mark.parametrize("recompute", [None, "all"])
def test_lines_of_an_uploaded_file_use_the_file_of_the_page(
    *,
    lowered: bool,
    recompute: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    branched = build("1f1b", ranks=3, microbatches=2, graph=StageGraph.parse("0>1,1>2,0>2"))
    texts = {"csv": dumps(build("zbv", ranks=2, microbatches=3), "csv"), "json": dumps(branched, "json")}
    for key, text in texts.items():
        source = {key: text, "name": "mine"} | ({"recompute": recompute} if recompute else {})
        for send_model in ("buffered", "rendezvous"):
            question = {"schedules": [source], "costs": COSTS[2], "send_model": send_model, "lowered": lowered}
            check_lines(question, capsys)


def test_torchtitan_gets_flags_or_a_reason() -> None:
    assert "--parallelism.pipeline_parallel_degree=4" in export("lines", layers=16)["torchtitan"]["flags"]
    few = export("lines", schedules=[{**SOURCE, "stages_per_rank": [1, 2, 2, 1], "group": None}])
    assert "torchtitan takes the placement" in few["torchtitan"]["error"]
