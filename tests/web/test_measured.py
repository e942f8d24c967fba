"""Promises of traces on the page: what `penstock read-trace --json` says, drawn over the prediction."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock import Costs, TraceError, build, simulate
from penstock.cli import app
from penstock.errors import FormatError
from penstock.web.answers import REQUESTS
from tests.support.kineto_files import write_kineto_files


def uploaded(paths: list[Path]) -> list[dict[str, str]]:
    return [{"name": path.name, "base64": b64encode(path.read_bytes()).decode()} for path in paths]


def test_the_page_and_the_command_line_read_the_same_run(tmp_path: Path) -> None:
    costs = Costs(forward=(0.1, 0.2), backward=(0.2, 0.3), latency=0.01)
    paths = write_kineto_files(tmp_path, simulate(build("1f1b", ranks=2, microbatches=4), costs))
    answer: Any = json.loads(json.dumps(REQUESTS["trace"]({"files": uploaded(paths)})))
    words = ["read-trace", *map(str, paths), "--search", "0", "--json"]
    printed = json.loads(CliRunner().invoke(app, words).stdout)
    for key in printed.keys() - {"files"}:
        assert answer[key] == printed[key], key
    assert [each["name"] for each in answer["data"]["timelines"]] == ["measured", "predicted"]
    assert answer["schedule"][0][0] == "0F0"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([], "from 1 to 64"),
        ([{"name": "a.json", "base64": "***"}], "not base64"),
        ([{"name": "a.json", "base64": b64encode(b'{"traceEvents": [').decode()}], "a.json"),
        ([{"name": "a.gz", "base64": b64encode(b"\x1f\x8bjunk").decode()}], "a.gz"),
    ],
)
def test_junk_is_explained(files: list[dict[str, str]], problem: str) -> None:
    with pytest.raises((FormatError, TraceError), match=problem):
        REQUESTS["trace"]({"files": files})
