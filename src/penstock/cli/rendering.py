"""Renders timelines in the formats that have a time axis; a view is imported only when it is used."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.cli.outputs import require_writable
from penstock.simulation.timeline import Timeline

__all__ = ["TIMELINE_FORMATS", "print_table", "render", "require_suffix", "say_written"]

TIMELINE_FORMATS = {"svg": "svg", "png": "png", "html": "html", "trace": "perfetto"}
"""The module of `penstock.view` for each format; its function has the format's name."""
_WIDEST = 1000
"""Columns of a table, at most."""


def render(name: str, timelines: list[Timeline]) -> bytes:
    """The timelines in one of these formats."""
    view = getattr(import_module(f"penstock.view.{TIMELINE_FORMATS[name]}"), name)
    content: str | bytes = view(timelines)
    return content.encode() if isinstance(content, str) else content


def require_suffix(output: Path, suffixes: tuple[str, ...], advice: str = "") -> str:
    """The suffix of an output file without its dot; an error if it is none of these, or cannot be written."""
    suffix = output.suffix.lower()
    if suffix not in suffixes:
        *others, last = suffixes
        expected = f"{', '.join(others)} or {last}" if others else last
        raise typer.BadParameter(f"{output} does not end in {expected}{advice}")
    require_writable(output)
    if suffix == ".png":  # before the work, not after it
        import_module("penstock.view.png").require_pillow()
    return suffix[1:]


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table without trailing blanks.

    Within the width of `console`; without one, with every cell in full on one line, which a terminal that is
    narrower wraps.
    """
    if console is None:
        console = Console(highlight=False, markup=False)
        needed = Measurement.get(console, console.options.update(max_width=_WIDEST), table).maximum
        console.width = max(console.width, needed)
    for line in console.render_lines(table, pad=False):
        text = Text.assemble(*((part.text, part.style or "") for part in line))
        text.rstrip()
        console.print(text, soft_wrap=True)


def say_written(*paths: Path, as_json: bool = False, more: str = "") -> None:
    """Say which files were written, if any; on stderr if stdout has JSON."""
    if paths:
        typer.echo(f"wrote {', '.join(map(str, paths))}{more}", err=as_json)
