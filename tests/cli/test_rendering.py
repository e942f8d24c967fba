"""Promise: a table has every cell in full, also where the terminal is narrower, or stdout is a pipe."""

from __future__ import annotations

import pytest
from rich.console import Console
from rich.table import Table

from penstock.cli.rendering import print_table


@pytest.mark.parametrize("columns", ["40", "80", "300"])
def test_every_row_of_a_table_is_one_line_in_full(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table = Table(box=None, pad_edge=False)
    cells = [f"interleaved-zero-bubble group={n}" for n in range(4)]
    for n in range(len(cells)):
        table.add_column(f"schedule {n}")
    table.add_row(*cells)
    print_table(table)
    head, row = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "schedule 0"
    assert row.split("  ") == cells


@pytest.mark.parametrize("console", [None, Console(width=40)], ids=["full", "narrow"])
def test_no_line_of_a_table_ends_with_blanks(
    console: Console | None, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("schedule", "found by", box=None, pad_edge=False)
    table.add_row("1f1b", "a family with a long name")
    table.add_row("zb-h1", "")
    print_table(table, console)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["schedule", "1f1b", "zb-h1"]
    assert lines == [line.rstrip() for line in lines]
