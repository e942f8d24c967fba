"""`penstock compare`: several schedules, and several microbatch counts, under one cost model."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from penstock.cli.source import (
    CostsFrom,
    Ranks,
    Sends,
    StagesPerRank,
    checked_sends,
    costs_from,
    is_file,
    schedule_from,
)
from penstock.comparison import Row
from penstock.comparison import compare as compare_all
from penstock.families import families
from penstock.validation import MODELS

__all__ = ["compare"]


def compare(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|FILE...", help="Families or files; all families if none."),
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
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Compare schedules: makespan, span, period, bubble, memory, communication, gap to the bound.

    Costs are per stage: a family with two stages per rank does twice the stages of one with one, so compare
    those with the same number, or give costs for each in turn.

    Examples:
      penstock compare 1f1b zb-h1 zb-h2 -p 8 -m 24 --costs zb-h4096-p8-m24
      penstock compare -p 4 -m 8 -m 16 -m 32
      penstock compare mine.csv other.csv --json
    """
    names = schedules or [name for name in families() if name != "forward-only"]
    counts: list[int | None] = list(microbatches) if microbatches else [None]
    wanted = [(name, m) for name in names for m in ([None] if is_file(name) else counts)]
    known, rows = costs_from(costs), list[Row]()
    with Progress(
        console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal
    ) as bar:
        for name, m in bar.track(wanted, description="simulating"):
            own_legs = is_file(name) or (name in families() and families()[name].stages_per_rank is not None)
            legs = None if own_legs and len(names) > 1 else stages_per_rank
            made = schedule_from(name, None if is_file(name) else ranks, m, legs)
            rows += compare_all(made, costs=known, sends=checked_sends(sends))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console(highlight=False, width=max(shutil.get_terminal_size().columns, 100)).print(_table(rows))


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
        table.add_row(row.name, *map(str, numbers), *times, *rest)
    return table
