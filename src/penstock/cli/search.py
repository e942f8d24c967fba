"""`penstock search`: the best schedule for given costs and memory, and how far from the best it can be."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from penstock.cli.source import CostsFrom, Memory, StagesPerRank, bytes_from, costs_from
from penstock.errors import FormatError
from penstock.formats import format_of, write
from penstock.search import Progress as Found
from penstock.search import SearchResult
from penstock.search import search as run_search
from penstock.view.terminal import terminal

__all__ = ["Objective", "search", "shown_progress"]


class Objective(str, Enum):
    """What is to be as short as can be."""

    makespan = "makespan"
    span = "span"
    period = "period"


class Shape(str, Enum):
    """Which rank hosts which stage."""

    any = "any"
    loop = "loop"
    v = "v"


def search(
    *,
    ranks: Annotated[int, typer.Option("--ranks", "-p", help="How many ranks.")],
    microbatches: Annotated[int, typer.Option("--microbatches", "-m", help="How many microbatches.")],
    stages_per_rank: StagesPerRank = 1,
    placement: Annotated[
        Shape, typer.Option("--placement", help="Which rank hosts which stage, with several per rank.")
    ] = Shape.any,
    costs: CostsFrom = None,
    memory: Memory = None,
    live: Annotated[
        int | None,
        typer.Option("--live", metavar="N", help="Instead: the most activations a rank may hold at once."),
    ] = None,
    objective: Annotated[
        Objective, typer.Option("--objective", help="What is to be as short as can be.")
    ] = Objective.makespan,
    fused: Annotated[bool, typer.Option("--fused", help="Backwards are whole, not split in I and W.")] = False,
    seconds: Annotated[float, typer.Option("--seconds", help="How long to search at most.")] = 10.0,
    moves: Annotated[
        int | None,
        typer.Option("--moves", help="How long instead, in moves: then the same seed gives the same answer."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Where chance begins.")] = 0,
    noise: Annotated[
        float | None,
        typer.Option(
            "--jitter", metavar="SHARE", help="Rank the best by how they stand steps that vary, as 0.05."
        ),
    ] = None,
    quantile: Annotated[
        float, typer.Option("--quantile", help="With --jitter: the share of runs that counts.")
    ] = 0.95,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the schedule: .csv or .json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Search for the best schedule within a memory limit; Ctrl-C keeps the best found so far.

    No schedule of the same work can be shorter than the bound, so the gap is what is left to find at most.

    Examples:
      penstock search -p 4 -m 8 --live 4 -o best.csv
      penstock search -p 8 -m 24 --costs zb-h2304-p8-m24 --memory 3219456 --objective span
      penstock search -p 4 -m 8 -v 2 --placement v --live 6 --seconds 5
      penstock search -p 4 -m 16 --costs costs.toml --memory 40GiB --jitter 0.05 --json
    """
    if output is not None:
        _refuse_unwritable(output)
    with shown_progress() as told:
        found = run_search(
            ranks=ranks,
            microbatches=microbatches,
            costs=costs_from(costs),
            stages_per_rank=1 if stages_per_rank is None else stages_per_rank,
            placement=placement.value,
            memory_limit=bytes_from(memory),
            live_limit=live,
            objective=objective.value,
            split=not fused,
            seconds=seconds,
            moves=moves,
            seed=seed,
            noise=noise,
            quantile=quantile,
            on_progress=told,
        )
    if as_json:
        typer.echo(json.dumps(_answer(found), indent=2))
    else:
        _print(found)
    if output is not None:  # last: if it fails, the answer is not lost
        write(found.schedule, output)


def _refuse_unwritable(output: Path) -> None:
    """Before the search rather than after it."""
    try:
        format_of(output)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None
    if output.is_dir():
        raise typer.BadParameter(f"{output} is a folder")
    if not os.access(output.parent, os.W_OK):
        raise typer.BadParameter(f"{output}: the folder {output.parent} is not there or cannot be written to")


@contextmanager
def shown_progress() -> Iterator[Callable[[Found], None]]:
    """A line on the terminal with the best so far, the bound and the gap; nothing in a pipe."""
    errors = Console(stderr=True)
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("beginning", total=1.0)

        def told(now: Found) -> None:
            text = f"{now.phase}: best {now.best:g}, bound {now.bound:g}, gap {now.gap:.2%}"
            bar.update(task, completed=now.fraction, description=text)

        yield told


def _answer(found: SearchResult) -> dict[str, Any]:
    return {
        "objective": found.objective,
        "value": found.value,
        "bound": found.bound.seconds,
        "binding": found.bound.name,
        "because": found.bound.because,
        "gap": found.gap if math.isfinite(found.gap) else None,
        "proved": found.proved,
        "found_by": found.found_by,
        "peak_memory": max(found.timeline.peak_memory),
        "placement": found.schedule.placement.style,
        "quantile": found.quantile,
        "families": dict(found.families),
        "too_large": dict(found.too_large),
        "runs": found.runs,
        "seconds": found.seconds,
        "interrupted": found.interrupted,
        "missing": list(found.missing),
        "schedule": [[str(step) for step in row] for row in found.schedule.ranks],
    }


def _print(found: SearchResult) -> None:
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    console.print(terminal(found.timeline, width), soft_wrap=True)
    console.print()
    how = "proved best" if found.proved else f"at most {found.gap:.2%} from the best there is"
    lines = [
        (found.objective, f"{found.value:g}", how),
        ("bound", f"{found.bound.seconds:g}", f"{found.bound.name}: {found.bound.because}"),
        ("memory", f"{max(found.timeline.peak_memory):g}", "the most bytes that a rank holds"),
    ]
    if found.quantile is not None:
        lines.insert(1, ("quantile", f"{found.quantile:g}", "what this share of runs stays within"))
    for name, value, text in lines:
        console.print(f"{name:<9} {value:<12} {text}", soft_wrap=True)
    console.print(f"found by  {found.found_by} ({found.runs:,} orders run)", soft_wrap=True)
    console.print()
    console.print(_families(found))
    if found.interrupted:
        console.print("\nstopped by hand: this is the best found until then")
    for each in found.missing:
        console.print(
            f"\nnot installed, and so not used: {each}; pip install 'penstock[search]'", soft_wrap=True
        )


def _families(found: SearchResult) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    table.add_column(found.objective, justify="right")
    table.add_column("against this", justify="right")
    for name, value in sorted(found.families.items(), key=lambda item: item[1]):
        table.add_row(name, f"{value:g}", f"{value / found.value - 1:+.2%}" if found.value else "")
    for name, size in found.too_large.items():
        table.add_row(name, f"holds {size:g}", "too large")
    return table
