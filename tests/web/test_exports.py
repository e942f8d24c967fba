"""Promises of the exports: files that read back, and lines that give the same numbers."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli import app
from penstock.formats import reads
from penstock.web.api import REQUESTS
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


def test_the_command_and_the_python_lines_give_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = export("lines")
    (entry,) = REQUESTS["compare"](QUESTION)["schedules"]
    monkeypatch.chdir(tmp_path)
    Path("costs.toml").write_text(lines["costs"])
    program, *words = lines["command"].split()
    assert program == "penstock"
    printed = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert printed["makespan"] == entry["row"]["makespan"]
    exec(lines["python"], {})  # noqa: S102 -- our own lines
    assert capsys.readouterr().out.split()[0] == str(entry["row"]["makespan"])


def test_torchtitan_gets_flags_or_a_reason() -> None:
    assert "--parallelism.pipeline_parallel_degree=4" in export("lines", layers=16)["torchtitan"]["flags"]
    few = export("lines", schedules=[{**SOURCE, "stages_per_rank": [1, 2, 2, 1], "group": None}])
    assert "torchtitan takes the placement" in few["torchtitan"]["error"]
