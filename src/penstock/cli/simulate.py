"""`penstock simulate`: makespan, bubbles and their causes, and peak memory of a schedule at given costs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from penstock.cli.inputs import GraphSizes, Lowering, costs_from, for_send_model, schedule_from
from penstock.cli.options import AsJson, JitterShare, ScheduleSource, SendModelOption
from penstock.cli.progress import phase_progress
from penstock.cli.rendering import print_table, write_json
from penstock.cost.costs import Costs
from penstock.records import QUANTILES, collectives_of, simulation_record
from penstock.simulation.gaps import REASONS, Gaps, gaps
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.simulator import simulate as run_simulation
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel
from penstock.view.kinds import stage_unit_text
from penstock.view.terminal import terminal

_LONGEST_GAPS = 5
_SHOWN_EVERY = 10_000  # lines between two updates of the progress bar


BlockingReceives: TypeAlias = Annotated[
    bool,
    typer.Option("--blocking-receives", help="A receive blocks its rank until the message arrives."),
]


def simulate(
    schedule: ScheduleSource,
    *,
    sizes: GraphSizes,
    lowering: Lowering,
    send_model: SendModelOption = SendModel.BUFFERED,
    blocking_receives: BlockingReceives = False,
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
        simulated = for_send_model(schedule_from(schedule, sizes, lowering, send_model), **messages)
        known = costs_from(lowering.costs)
        show("simulating", 0.2)
        timeline = run_simulation(simulated, known, **messages, with_period=True)
        quantiles = None
        if jitter is not None:
            show("simulating with jitter", 0.5)
            runs = simulate_with_jitter(simulated, known, jitter=jitter, **messages)
            quantiles = {f"p{q}": runs.quantile(q / 100) for q in QUANTILES}
        show("finding the causes of idle time", 0.6)
        idle = gaps(timeline)
        if as_json and not sys.stdout.isatty():  # on a terminal, the bar would be written into the output
            _write_json(timeline, idle, quantiles, show)
            return
    if as_json:
        _write_json(timeline, idle, quantiles, lambda _, __: None)
    else:
        _print(timeline, idle, quantiles)


def _write_json(
    timeline: Timeline, idle: Gaps, quantiles: dict[str, float] | None, show: Callable[[str, float], None]
) -> None:
    def wrote(count: int) -> None:
        if count % _SHOWN_EVERY == 0:
            show("writing", 0.7 + 0.3 * min(count / max(len(idle), 1), 1.0))

    write_json(simulation_record(timeline, idle, quantiles, streamed=True), wrote)


def _print(timeline: Timeline, idle: Gaps, quantiles: dict[str, float] | None) -> None:
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    units = timeline.costs.units
    console.print(terminal(timeline, width), soft_wrap=True)
    console.print()
    for name in ("makespan", "span", "period"):
        time = units.time(getattr(timeline, name))
        console.print(f"{name:<9} {time:<12} {timeline.bubble(name):.1%} idle")
    bound = timeline.bound
    gap = f"gap <= {timeline.gap:.1%} ({bound.name}: {bound.because})"
    console.print(f"bound     {units.time(bound.seconds):<12} {gap}", soft_wrap=True)
    if timeline.costs == Costs() and (note := stage_unit_text(timeline.schedule)):
        console.print(f"units     {note.removeprefix('units are ')}", soft_wrap=True)
    if collectives := collectives_of(timeline):
        console.print("sharding  " + ", ".join(f"{count} {name}" for name, count in collectives.items()))
    if quantiles is not None:
        console.print(
            "jitter    " + ", ".join(f"{name} {units.time(value)}" for name, value in quantiles.items())
        )
    console.print()
    print_table(_table(timeline, idle), console)
    longest = np.argsort(-idle.length, kind="stable")[:_LONGEST_GAPS].tolist()
    if longest:
        console.print("\nlongest idle gaps:")
    scale = units.time_scale(timeline.makespan)
    for each in longest:
        console.print(f"  {idle[each].text(scale)}", soft_wrap=True)


def _table(timeline: Timeline, idle: Gaps) -> Table:
    """Per rank: busy time, how much of it is all-to-all alone, idle time by cause, peak memory."""
    waits, units = idle.seconds_by_rank, timeline.costs.units
    named, first = np.unique(idle.reason, return_index=True)
    causes = [REASONS[number] for number in named[np.argsort(first)].tolist()]
    scale = units.time_scale(timeline.makespan)
    table = Table(box=None, pad_edge=False)
    exposed = ["exposed all-to-all"] if any(timeline.exposed_all_to_all) else []
    for name in ("rank", units.column("busy", timeline.makespan), *exposed, *causes, "peak memory"):
        table.add_column(name, justify="right")
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory)):
        by_cause = (scale.number(waits[rank, REASONS.index(cause)]) for cause in causes)
        alone = [scale.number(timeline.exposed_all_to_all[rank])] * len(exposed)
        table.add_row(str(rank), scale.number(busy), *alone, *by_cause, units.memory(peak))
    return table
