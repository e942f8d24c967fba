"""`penstock trace`: a simulated timeline for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.show import draw
from penstock.cli.source import (
    CostsFrom,
    Lowered,
    Microbatches,
    Ranks,
    Sends,
    Source,
    StagesPerRank,
    checked_sends,
    costs_from,
    schedule_from,
)
from penstock.formats import write_bytes
from penstock.lowering import lower
from penstock.simulation.simulator import simulate
from penstock.validation import MODELS

__all__ = ["trace"]


def trace(
    schedule: Source,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    lowered: Lowered = False,
    costs: CostsFrom = None,
    sends: Sends = MODELS[0],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write it.")] = Path(
        "trace.json"
    ),
) -> None:
    """Write a trace of a simulated schedule, to be opened in Perfetto.

    Examples:
      penstock trace zbv -p 4 -m 8 -o zbv.trace.json
      penstock trace mine.csv --costs costs.toml --lowered
    """
    made = schedule_from(schedule, ranks, microbatches, stages_per_rank)
    timeline = simulate(lower(made) if lowered else made, costs_from(costs), sends=checked_sends(sends))
    write_bytes(draw("trace", [timeline]), output)
    typer.echo(f"{output}: {made.num_steps} steps on {made.num_ranks} ranks; open it at ui.perfetto.dev")
