"""What commands write: reports, tables, JSON, progress; and checks of the files before the work."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from penstock.cost.units import Units
from penstock.formats.files import open_stream
from penstock.search import Progress as SearchProgress

# Checks of the files and directories that a command writes: before its work, not after it.


def require_writable(output: Path | None) -> None:
    """Raise a usage error if a file cannot be written there; without one, nothing is checked."""
    if output is None or open_stream(output) is not None:
        return
    target = Path(os.path.realpath(output))
    if target.is_dir():
        raise typer.BadParameter(f"{output} is a directory; give the name of a file")
    if target.exists() and not target.is_file():  # a pipe or a device
        return
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise typer.BadParameter(f"{output}: the directory {output.parent} does not exist or is not writable")


def require_folder(folder: Path | None) -> None:
    """Raise a usage error if files cannot be written to a directory, which is created if it does not exist."""
    if folder is None:
        return
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not existing.is_dir():
        raise typer.BadParameter(f"{existing} is a file; give a directory")
    if not os.access(existing, os.W_OK):
        raise typer.BadParameter(f"{folder}: the directory {existing} is not writable")


def require_suffix(output: Path | None, suffixes: tuple[str, ...], advice: str = "") -> None:
    """Raise a usage error if an output file has none of these suffixes, or cannot be written."""
    if output is None:
        return
    suffix = output.suffix.lower()
    if suffix not in suffixes:
        *others, last = suffixes
        expected = f"{', '.join(others)} or {last}" if others else last
        raise typer.BadParameter(f"{output} does not end in {expected}{advice}")
    require_writable(output)
    if suffix == ".png":
        import_module("penstock.view.png").require_pillow()


# Reports, records and tables.


def report_console(least: int = 0) -> Console:
    """Return a console for plain text as wide as the terminal, which wraps longer lines itself."""
    width = max(shutil.get_terminal_size().columns, least)
    return Console(highlight=False, markup=False, soft_wrap=True, width=width)


def print_json(record: object) -> None:
    """Print a record that is not long."""
    typer.echo(json.dumps(record, indent=2))


def write_json(record: Mapping[str, object], wrote: Callable[[int], None] = lambda _: None) -> None:
    """Print a record that can have millions of elements, with a line for each element of a list or an iterator.

    `wrote` is called with the number of each element in its list.
    """
    separator = "{\n"
    for name, value in record.items():
        sys.stdout.write(f"{separator}  {json.dumps(name)}: ")
        if isinstance(value, Iterator | list):
            i = -1
            for i, each in enumerate(value):
                sys.stdout.write(f"{',' if i else '['}\n    {json.dumps(each)}")
                wrote(i)
            sys.stdout.write("\n  ]" if i >= 0 else "[]")
        else:
            sys.stdout.write(json.dumps(value))
        separator = ",\n"
    sys.stdout.write("\n}\n")


_WIDEST = 1000
"""Columns of a table, at most."""


def empty_table(*columns: str, left: int = 0, no_wrap: bool = False) -> Table:
    """Return a table with these columns: the first `left` are text, the others numbers."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=no_wrap)
    return table


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


def say_written(*paths: Path | None, as_json: bool = False, more: str = "") -> None:
    """Say which files were written, if any; on stderr if stdout has JSON."""
    if written := [str(path) for path in paths if path is not None]:
        typer.echo(f"wrote {', '.join(written)}{more}", err=as_json)


# Progress on stderr while a command runs; nothing is shown when stderr is not a terminal.


def progress_bar(*columns: ProgressColumn) -> Progress:
    """Return a bar that vanishes at the end; output meanwhile, such as JSON in a pipe, stays as it is."""
    stderr = Console(stderr=True)
    return Progress(
        *columns,
        console=stderr,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not stderr.is_terminal,
    )


@contextmanager
def phase_progress() -> Iterator[Callable[[str, float], None]]:
    """A bar with the phase; yields the function that updates it."""
    with progress_bar(BarColumn(bar_width=20), TextColumn("{task.description}")) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda phase, fraction: bar.update(task, completed=fraction, description=phase)


@contextmanager
def search_progress(units: Units) -> Iterator[Callable[[SearchProgress], None]]:
    """A bar with the best value so far, the bound and the gap; yields the function that updates it."""
    with phase_progress() as show:
        yield lambda now: show(
            f"{now.phase}: best {units.time(now.best)}, bound {units.time(now.bound)}, gap {now.gap:.2%}",
            now.fraction,
        )


@contextmanager
def file_progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes that were read; yields the function that is called with how many more."""
    with progress_bar(TextColumn("reading"), BarColumn(bar_width=20), DownloadColumn()) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.update(task, advance=count)


def spinner(text: str) -> AbstractContextManager[object]:
    """Return a spinner with a text."""
    stderr = Console(stderr=True)
    return stderr.status(text) if stderr.is_terminal else nullcontext()
