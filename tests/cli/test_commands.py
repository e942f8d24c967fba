"""Tests of the list of commands: one line of help for each, and nothing is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.cli import SUMMARIES, load_command
from tests.support.command_line import Run


def test_help_lists_the_one_line_help_of_every_command_which_also_heads_its_own_help(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    listed = run("--help").out
    for command, summary in SUMMARIES.items():
        assert summary in listed
        assert load_command(command).help.splitlines()[:2] == [summary, ""]


def test_help_loads_no_command_and_nothing_heavy() -> None:
    code = """
import sys
from penstock.cli import command
sys.argv = ["penstock", "--help"]
try:
    command()
finally:
    print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)  # noqa: S603
    loaded = set(done.stderr.split())
    ours = {name for name in loaded if name.partition(".")[0] == "penstock"}
    assert "Start with: penstock show" in done.stdout
    assert ours == {
        "penstock",
        "penstock.arguments",
        "penstock.cli",
        "penstock.cli.usage_errors",
        "penstock.errors",
    }
    assert not loaded & {"numpy", "scipy", "numba", "ortools", "torch"}


@pytest.mark.parametrize("command", ["list", "check", "show", "simulate", "compare"])
def test_a_command_loads_no_compiler_no_solver_and_no_torch(command: str) -> None:
    code = f"import sys, penstock.cli as cli; cli.load_command({command!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)  # noqa: S603
    assert not set(done.stdout.split()) & {"scipy", "numba", "ortools", "torch"}
