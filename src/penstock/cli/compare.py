"""`penstock compare`: several schedules and microbatch counts under one cost model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress

from penstock.cli.inputs import GraphSizes, costs_from, for_send_model, schedules_from
from penstock.cli.options import (
    AsJson,
    CostsSource,
    FamilyStages,
    GraphOption,
    Ranks,
    SendModelOption,
    complete_family,
)
from penstock.cli.rendering import print_table, render, require_suffix, say_written
from penstock.cost.costs import Costs
from penstock.families import families
from penstock.formats import write_bytes
from penstock.ir.schedule import Schedule
from penstock.simulation.comparison import comparison_of, rank_costs
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel
from penstock.view.tables import comparison_notes, comparison_table

ScheduleSources: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME|FILE...",
        help="Families or files; by default all families.",
        autocompletion=complete_family,
    ),
]
MicrobatchCounts: TypeAlias = Annotated[
    list[int] | None,
    typer.Option("--microbatches", "-m", help="Number of microbatches; may be repeated."),
]
Groups: TypeAlias = Annotated[
    list[int] | None,
    typer.Option("--group", help="Group of interleaved families, see show; may be repeated."),
]
PictureFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Draw all on one time axis: .svg, .png or .html."),
]


def compare(
    schedules: ScheduleSources = None,
    *,
    ranks: Ranks = None,
    microbatches: MicrobatchCounts = None,
    stages_per_rank: FamilyStages = None,
    group: Groups = None,
    graph: GraphOption = None,
    costs: CostsSource = None,
    send_model: SendModelOption = SendModel.BUFFERED,
    output: PictureFile = None,
    as_json: AsJson = False,
) -> None:
    """Without --costs, all rows do the same work per microbatch: with v stages per rank, a stage costs 1/v of
    the unit costs. Given costs are per stage, so more stages per rank are more work, and the table says so.

    Examples:
      penstock compare 1f1b zb-h1 zb-h2 -p 8 -m 24 --costs zb-h4096-p8-m24
      penstock compare -p 4 -m 8 -m 16 -m 32
      penstock compare 1f1b zb-h1 -p 4 -m 8 -o both.html
      penstock compare interleaved-1f1b -p 4 -m 16 --group 4 --group 8 --group 16
      penstock compare mine.csv other.csv --json
    """
    picture = None if output is None else require_suffix(output, (".svg", ".png", ".html"))
    names = schedules or [
        name
        for name, family in families().items()
        if name != "forward-only" and (graph is None or family.graph_builder is not None)
    ]
    if not schedules and (ranks is None or not microbatches):
        example = "penstock compare --ranks 4 --microbatches 8"
        raise typer.BadParameter(f"give --ranks and --microbatches to compare all families, e.g. {example}")
    sizes = GraphSizes(ranks, None, stages_per_rank, graph=graph)
    compared = list(schedules_from(names, sizes, microbatches or [], group or []))
    timelines = _simulate_all(compared, None if costs is None else costs_from(costs), send_model)
    if output is not None and picture is not None:
        write_bytes(render(picture, timelines), output)
    rows = [comparison_of(timeline) for timeline in timelines]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_table(comparison_table(rows))
        typer.echo("\n".join(["", *comparison_notes(rows, unit_costs=costs is None)]))
    if output is not None:
        say_written(output, as_json=as_json)


def _simulate_all(schedules: list[Schedule], costs: Costs | None, send_model: SendModel) -> list[Timeline]:
    stderr = Console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        tracked = bar.track(schedules, description="simulating")
        return [
            simulate(
                for_send_model(schedule, send_model),
                rank_costs(schedule) if costs is None else costs,
                send_model=send_model,
                with_period=True,
            )
            for schedule in tracked
        ]
