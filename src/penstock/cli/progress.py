"""Progress on stderr while a command runs; nothing is shown when stderr is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from penstock.cost.units import Units, seconds_text
from penstock.search import Progress as SearchProgress


@contextmanager
def search_progress(units: Units) -> Iterator[Callable[[SearchProgress], None]]:
    """A bar with the best value so far, the bound and the gap; yields the function that updates it."""
    with phase_progress() as show:
        yield lambda now: show(
            f"{now.phase}: best {units.time(now.best)}, bound {units.time(now.bound)}, gap {now.gap:.2%}",
            now.fraction,
        )


@contextmanager
def phase_progress() -> Iterator[Callable[[str, float], None]]:
    """A bar with the phase; yields the function that updates it."""
    stderr = Console(stderr=True)
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
    with Progress(
        *columns,
        console=stderr,
        transient=True,
        redirect_stdout=False,  # what is printed meanwhile, such as JSON in a pipe, must not go to the terminal
        redirect_stderr=False,
        disable=not stderr.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=1.0)

        def update(phase: str, fraction: float) -> None:
            bar.update(task, completed=fraction, description=phase)

        yield update


@contextmanager
def file_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar of the bytes that were read; yields the function that is called with how many more."""
    stderr = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), DownloadColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(description, total=total)
        yield lambda count: bar.update(task, advance=count)


@contextmanager
def job_progress() -> Iterator[Callable[[str, float, float], None]]:
    """A bar with the phase and the best step time so far; yields the function that updates it."""
    with phase_progress() as show:
        yield lambda phase, fraction, best: show(
            f"{phase}: best {seconds_text(best)}" if isfinite(best) else phase, fraction
        )


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """A spinner with a text."""
    stderr = Console(stderr=True)
    if stderr.is_terminal:
        with stderr.status(text):
            yield
    else:
        yield
