"""The `run` fixture: runs a command in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer.rich_utils  # noqa: F401 -- reads the colour variables when it is loaded, so not in a test that sets them

from penstock.cli import main
from tests.support.command_line import COLOUR_VARIABLES, CommandResult, Run


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command in an empty directory, on a terminal 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__package__", "", raising=False)  # a script, not a module
    monkeypatch.setenv("COLUMNS", "80")
    for name in COLOUR_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run_command(*arguments: object) -> CommandResult:
        monkeypatch.setattr("sys.argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as exited:
            main()
        out, err = capsys.readouterr()
        return CommandResult(int(exited.value.code or 0), out, err)

    return run_command
