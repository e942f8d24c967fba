"""`penstock trace`: write a simulated timeline for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cli.inputs import costs_from, schedule_from
from penstock.cli.options import (
    CostsSource,
    Lowered,
    Microbatches,
    Ranks,
    ScheduleSource,
    SendModelName,
    StagesPerRank,
)
from penstock.cli.rendering import render
from penstock.formats import write_bytes
from penstock.simulation.simulator import simulate
from penstock.validation import MODELS

__all__ = ["trace"]


TraceFile: TypeAlias = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file.")]


def trace(
    schedule: ScheduleSource,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    lowered: Lowered = False,
    costs: CostsSource = None,
    sends: SendModelName = MODELS[0],
    output: TraceFile = Path("trace.json"),
) -> None:
    """Simulate a schedule and write the timeline as a trace for Perfetto.

    Examples:
      penstock trace zbv -p 4 -m 8 -o zbv.trace.json
      penstock trace mine.csv --costs costs.toml --lowered
    """
    chosen = schedule_from(schedule, ranks, microbatches, stages_per_rank, lowered=lowered)
    timeline = simulate(chosen, costs_from(costs), sends=sends)
    write_bytes(render("trace", [timeline]), output)
    typer.echo(f"{output}: {chosen.num_steps} steps on {chosen.num_ranks} ranks; open it at ui.perfetto.dev")
