"""`penstock trace`: write a simulated timeline for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.arguments import plural
from penstock.cli.inputs import Lowering, Sizes, costs_from, for_send_model, schedule_from
from penstock.cli.options import (
    CostsSource,
    FamilyStages,
    GraphOption,
    Group,
    Lowered,
    MemoryLimit,
    Microbatches,
    OffloadOption,
    Ranks,
    RecomputeOption,
    ScheduleSource,
    SendModelOption,
    Sharding,
    ShardingOption,
)
from penstock.cli.rendering import render, say_written
from penstock.formats import write_bytes
from penstock.simulation.simulator import simulate
from penstock.validation import SendModel

__all__ = ["trace"]


TraceFile: TypeAlias = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file.")]


def trace(
    schedule: ScheduleSource,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: FamilyStages = None,
    group: Group = None,
    graph: GraphOption = None,
    lowered: Lowered = False,
    sharding: ShardingOption = Sharding.look_ahead,
    memory: MemoryLimit = None,
    recompute: RecomputeOption = None,
    offload: OffloadOption = None,
    costs: CostsSource = None,
    send_model: SendModelOption = SendModel.BUFFERED,
    output: TraceFile = Path("trace.json"),
) -> None:
    """Simulate a schedule and write the timeline as a trace for Perfetto.

    Examples:
      penstock trace zbv -p 4 -m 8 -o zbv.trace.json
      penstock trace mine.csv --costs costs.toml --lowered
    """
    chosen = schedule_from(
        schedule,
        Sizes(ranks, microbatches, stages_per_rank, group, graph),
        Lowering(lowered, sharding, memory, costs, send_model, recompute=recompute, offload=offload),
    )
    timeline = simulate(for_send_model(chosen, send_model), costs_from(costs), send_model=send_model)
    write_bytes(render("trace", [timeline]), output)
    steps, on = plural(chosen.num_steps, "step"), plural(chosen.num_ranks, "rank")
    say_written(output, more=f": {steps} on {on}; open it at ui.perfetto.dev")
