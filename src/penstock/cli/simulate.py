"""`penstock simulate`, `compare` and `trace`: times, bubbles and memory of schedules at given costs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from penstock.arguments import plural
from penstock.cli.options import (
    AsJson,
    CostsSource,
    FamilyStages,
    GraphOption,
    GraphSizes,
    JitterShare,
    Lowering,
    Ranks,
    ScheduleSource,
    ScheduleSources,
    SendModelOption,
    costs_from,
    schedule_from,
    schedules_from,
)
from penstock.cli.rendering import (
    empty_table,
    phase_progress,
    print_json,
    print_table,
    progress_bar,
    report_console,
    require_suffix,
    say_written,
    write_json,
)
from penstock.cost.costs import Costs
from penstock.families import families
from penstock.formats import write_bytes
from penstock.service import (
    add_messages,
    collectives_of,
    comparison_record,
    jitter_quantiles,
    render,
    simulation_record,
)
from penstock.simulation.comparison import comparison_of, rank_costs
from penstock.simulation.gaps import REASONS, Gaps, gaps
from penstock.simulation.simulator import simulate as run_simulation
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel
from penstock.view.kinds import stage_unit_text
from penstock.view.tables import comparison_notes, comparison_table
from penstock.view.terminal import terminal

_LONGEST_GAPS = 5
_SHOWN_EVERY = 10_000  # lines between two updates of the progress bar


def simulate(
    schedule: ScheduleSource,
    *,
    sizes: GraphSizes,
    lowering: Lowering,
    send_model: SendModelOption = SendModel.BUFFERED,
    blocking_receives: Annotated[
        bool, typer.Option("--blocking-receives", help="A receive blocks its rank until the message arrives.")
    ] = False,
    jitter: JitterShare = None,
    as_json: AsJson = False,
) -> None:
    """
    Examples:
      penstock simulate 1f1b -p 4 -m 8
      penstock simulate zb-h1 -p 8 -m 24 --costs zb-h4096-p8-m24
      penstock simulate looped-bfs -p 4 -m 8 -c costs.toml --lowered --sharding cost --memory 40GiB
      penstock simulate mine.csv --costs costs.toml --send-model rendezvous --json
    """
    messages: Any = {"send_model": send_model, "blocking_receives": blocking_receives}
    with phase_progress() as show:
        show("building", 0.0)
        simulated = add_messages(schedule_from(schedule, sizes, lowering, send_model), **messages)
        known = costs_from(lowering.costs)
        show("simulating", 0.2)
        timeline = run_simulation(simulated, known, **messages, with_period=True)
        unlimited = None
        if lowering.send_budget is not None:
            free = schedule_from(schedule, sizes, replace(lowering, send_budget=None), send_model)
            unlimited = run_simulation(free, known, **messages).makespan
        quantiles = None
        if jitter is not None:
            show("simulating with jitter", 0.5)
            quantiles = jitter_quantiles(simulated, known, jitter, **messages)
        show("finding the causes of idle time", 0.6)
        idle = gaps(timeline)
        record = simulation_record(timeline, idle, quantiles, streamed=True) if as_json else None
        if record and not sys.stdout.isatty():  # on a terminal, the bar would be written into the output

            def wrote(count: int) -> None:
                if count % _SHOWN_EVERY == 0:
                    show("writing", 0.7 + 0.3 * min(count / max(len(idle), 1), 1.0))

            return write_json(record, wrote)
    return write_json(record) if record else _print(timeline, idle, quantiles, unlimited)


def _print(timeline: Timeline, idle: Gaps, quantiles: dict[str, float] | None, unlimited: float | None) -> None:
    console = report_console()
    units = timeline.costs.units
    console.print(terminal(timeline, console.width))
    console.print()
    for name in ("makespan", "span", "period"):
        time = units.time(getattr(timeline, name))
        console.print(f"{name:<9} {time:<12} {timeline.bubble(name):.1%} idle")
    bound = timeline.bound
    verdict = bound.verdict(timeline.makespan)
    console.print(f"bound     {units.time(bound.seconds):<12} {verdict}")
    if timeline.costs == Costs() and (note := stage_unit_text(timeline.schedule)):
        console.print(f"units     {note.removeprefix('units are ')}")
    if collectives := collectives_of(timeline):
        console.print("sharding  " + ", ".join(f"{count} {name}" for name, count in collectives.items()))
    if unlimited is not None:
        more = (timeline.makespan - unlimited) / unlimited if unlimited else 0.0
        console.print(f"budget    {units.time(unlimited):<12} without a send budget: {more:+.1%} with it")
    if quantiles is not None:
        values = ", ".join(f"{name} {units.time(value)}" for name, value in quantiles.items())
        console.print(f"jitter    {values}")
    console.print()
    print_table(_table(timeline, idle), console)
    longest = np.argsort(-idle.length, kind="stable")[:_LONGEST_GAPS].tolist()
    if longest:
        console.print("\nlongest idle gaps:")
    scale = units.time_scale(timeline.makespan)
    for each in longest:
        console.print(f"  {idle[each].text(scale)}")


def _table(timeline: Timeline, idle: Gaps) -> Table:
    """Per rank: busy time, how much of it is all-to-all alone, idle time by cause, peak memory."""
    waits, units = idle.seconds_by_rank, timeline.costs.units
    named, first = np.unique(idle.reason, return_index=True)
    causes = [REASONS[number] for number in named[np.argsort(first)].tolist()]
    scale = units.time_scale(timeline.makespan)
    exposed = ["exposed all-to-all"] if any(timeline.exposed_all_to_all) else []
    busy_name = units.column("busy", timeline.makespan)
    table = empty_table("rank", busy_name, *exposed, *causes, "peak memory")
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory)):
        by_cause = (scale.number(waits[rank, REASONS.index(cause)]) for cause in causes)
        alone = [scale.number(timeline.exposed_all_to_all[rank])] * len(exposed)
        table.add_row(str(rank), scale.number(busy), *alone, *by_cause, units.memory(peak))
    return table


def compare(
    schedules: ScheduleSources = None,
    *,
    ranks: Ranks = None,
    microbatches: Annotated[
        list[int] | None,
        typer.Option("--microbatches", "-m", help="Number of microbatches; may be repeated."),
    ] = None,
    stages_per_rank: FamilyStages = None,
    group: Annotated[
        list[int] | None,
        typer.Option("--group", help="Group of interleaved families, see show; may be repeated."),
    ] = None,
    graph: GraphOption = None,
    costs: CostsSource = None,
    send_model: SendModelOption = SendModel.BUFFERED,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Draw all on one time axis: .svg, .png or .html."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Without names: all families. Without --costs, all rows do the same work per microbatch: with v
    stages per rank, a stage costs 1/v of the unit costs. Given costs are per stage, so more stages per rank are
    more work, and the table says so.

    Examples:
      penstock compare 1f1b zb-h1 zb-h2 -p 8 -m 24 --costs zb-h4096-p8-m24
      penstock compare -p 4 -m 8 -m 16 -m 32
      penstock compare 1f1b zb-h1 -p 4 -m 8 -o both.html
      penstock compare interleaved-1f1b -p 4 -m 16 --group 4 --group 8 --group 16
      penstock compare mine.csv other.csv --json
    """
    require_suffix(output, (".svg", ".png", ".html"))
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
    priced = None if costs is None else costs_from(costs)
    with progress_bar() as bar:
        timelines = [
            run_simulation(
                add_messages(schedule, send_model),
                priced or rank_costs(schedule),
                send_model=send_model,
                with_period=True,
            )
            for schedule in bar.track(compared, description="simulating")
        ]
    if output is not None:
        write_bytes(render(output.suffix.lower()[1:], timelines), output)
    if as_json:
        print_json(list(map(comparison_record, timelines)))
    else:
        rows = [comparison_of(timeline) for timeline in timelines]
        print_table(comparison_table(rows))
        typer.echo("\n".join(["", *comparison_notes(rows, unit_costs=costs is None)]))
    say_written(output, as_json=as_json)


def trace(
    schedule: ScheduleSource,
    *,
    sizes: GraphSizes,
    lowering: Lowering,
    send_model: SendModelOption = SendModel.BUFFERED,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Output file, .json.")] = Path(
        "trace.json"
    ),
) -> None:
    """
    Examples:
      penstock trace zbv -p 4 -m 8 -o zbv.trace.json
      penstock trace mine.csv --costs costs.toml --lowered
    """
    require_suffix(output, (".json",))
    chosen = schedule_from(schedule, sizes, lowering, send_model)
    costs = costs_from(lowering.costs)
    timeline = run_simulation(add_messages(chosen, send_model), costs, send_model=send_model)
    write_bytes(render("trace", [timeline]), output)
    steps, on = plural(chosen.num_steps, "step"), plural(chosen.num_ranks, "rank")
    say_written(output, more=f": {steps} on {on}; open it at ui.perfetto.dev")
