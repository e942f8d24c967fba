"""`penstock compare`: several schedules, and several microbatch counts, under one cost model."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from penstock.arguments import printable
from penstock.cli.show import draw
from penstock.cli.source import (
    CostsFrom,
    Ranks,
    Sends,
    StagesPerRank,
    checked_sends,
    costs_from,
    families_beginning,
    is_file,
    schedule_from,
)
from penstock.families import families, find
from penstock.formats import write_bytes
from penstock.simulation.comparison import Row, row_of
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import MODELS

__all__ = ["compare"]


def compare(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|FILE...",
            help="Families or files; all families if none.",
            autocompletion=families_beginning,
        ),
    ] = None,
    *,
    ranks: Ranks = None,
    microbatches: Annotated[
        list[int] | None,
        typer.Option("--microbatches", "-m", help="How many microbatches; may be given again."),
    ] = None,
    stages_per_rank: StagesPerRank = None,
    costs: CostsFrom = None,
    sends: Sends = MODELS[0],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Draw them on one axis: .svg, .png or .html."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Compare schedules: makespan, span, period, bubble, memory, communication, gap to the bound.

    Costs are per stage: a family with two stages per rank does twice the stages of one with one, so compare
    those with the same number, or give costs for each in turn.

    Examples:
      penstock compare 1f1b zb-h1 zb-h2 -p 8 -m 24 --costs zb-h4096-p8-m24
      penstock compare -p 4 -m 8 -m 16 -m 32
      penstock compare 1f1b zb-h1 -p 4 -m 8 -o both.html
      penstock compare mine.csv other.csv --json
    """
    picture = _picture_of(output)
    names = schedules or [name for name in families() if name != "forward-only"]
    if all(map(is_file, names)) and (ranks or microbatches or stages_per_rank):
        raise typer.BadParameter(
            "files have their own numbers; drop --ranks, --microbatches and --stages-per-rank"
        )
    counts: list[int | None] = list(microbatches) if microbatches else [None]
    wanted = [(name, m) for name in names for m in ([None] if is_file(name) else counts)]
    known, how, timelines = costs_from(costs), checked_sends(sends), list[Timeline]()
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        for name, m in bar.track(wanted, description="simulating"):
            # a family with its own number of stages goes beside those that take the number asked for
            own_legs = is_file(name) or find(name).stages_per_rank is not None
            legs = None if own_legs and len(names) > 1 else stages_per_rank
            made = schedule_from(name, None if is_file(name) else ranks, m, legs)
            timelines.append(simulate(made, known, sends=how))
    if output is not None and picture is not None:
        write_bytes(draw(picture, timelines), output)
    rows = [row_of(timeline) for timeline in timelines]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console(highlight=False, width=max(shutil.get_terminal_size().columns, 100)).print(_table(rows))


def _picture_of(output: Path | None) -> str | None:
    ending = output.suffix.lower()[1:] if output is not None else ""
    if output is not None and ending not in ("svg", "png", "html"):
        raise typer.BadParameter(f"{output} does not end in .svg, .png or .html")
    return ending or None


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for name in ("p", "v", "m", "makespan", "span", "period", "bubble", "memory", "sent", "bound", "gap"):
        table.add_column(name, justify="right")
    for row in rows:
        numbers = (row.ranks, f"{row.stages / row.ranks:g}", row.microbatches)
        times = (f"{value:g}" for value in (row.makespan, row.span, row.period))
        rest = (
            f"{row.bubble:.1%}",
            f"{row.peak_memory:g}",
            f"{row.sent:g}",
            f"{row.bound:g}",
            f"{row.gap:.1%}",
        )
        table.add_row(Text(printable(row.name)), *map(str, numbers), *times, *rest)
    return table
