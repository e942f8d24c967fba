"""Tests of `penstock trace`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command_line import Run


def test_it_writes_a_file_and_says_how_to_open_it(run: Run, tmp_path: Path) -> None:
    result = run("trace", "1f1b", "-p", 2, "-m", 2, "-o", "t.json", "--lowered")
    assert result.code == 0
    assert result.out.startswith("wrote t.json: ")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
