"""`penstock trace`: write a simulated timeline for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.arguments import plural
from penstock.cli.inputs import GraphSizes, Lowering, costs_from, for_send_model, schedule_from
from penstock.cli.options import ScheduleSource, SendModelOption
from penstock.cli.rendering import render, require_suffix, say_written
from penstock.formats import write_bytes
from penstock.simulation.simulator import simulate
from penstock.validation import SendModel

TraceFile: TypeAlias = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="Output file, .json.")
]


def trace(
    schedule: ScheduleSource,
    *,
    sizes: GraphSizes,
    lowering: Lowering,
    send_model: SendModelOption = SendModel.BUFFERED,
    output: TraceFile = Path("trace.json"),
) -> None:
    """
    Examples:
      penstock trace zbv -p 4 -m 8 -o zbv.trace.json
      penstock trace mine.csv --costs costs.toml --lowered
    """
    require_suffix(output, (".json",))
    chosen = schedule_from(schedule, sizes, lowering, send_model)
    costs = costs_from(lowering.costs)
    timeline = simulate(for_send_model(chosen, send_model), costs, send_model=send_model)
    write_bytes(render("trace", [timeline]), output)
    steps, on = plural(chosen.num_steps, "step"), plural(chosen.num_ranks, "rank")
    say_written(output, more=f": {steps} on {on}; open it at ui.perfetto.dev")
