"""Running `penstock`: inside this process, which is fast, or in one of its own, as a shell does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from penstock.cli import main

COLOUR = ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "GITHUB_ACTIONS")
COMMAND = Path(sysconfig.get_path("scripts")) / "penstock"


@dataclass(frozen=True)
class Answer:
    """What a command said and how it ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What it said on stderr, without the boxes, line breaks and colours that typer puts around it."""
        return " ".join(re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│─]", " ", self.err).split())

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Answer]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in an empty folder, on a terminal 80 wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in COLOUR:
        monkeypatch.delenv(name, raising=False)

    def answer(*words: object) -> Answer:
        monkeypatch.setattr("sys.argv", ["penstock", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Answer(int(ended.value.code or 0), out, err)

    return answer


def in_a_process(
    *words: str, cwd: Path, stdout: int = subprocess.PIPE, environment: Mapping[str, str] = MappingProxyType({})
) -> Answer:
    """Run the installed command; `environment` is added to ours, which says nothing about colour."""
    ours = {name: value for name, value in os.environ.items() if name not in COLOUR}
    done = subprocess.run(  # noqa: S603 -- our own command
        [COMMAND, *words],
        cwd=cwd,
        env={**ours, "COLUMNS": "80", **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    return Answer(done.returncode, done.stdout or "", done.stderr)
