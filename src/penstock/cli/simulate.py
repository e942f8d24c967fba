"""`penstock simulate`: makespan, bubbles and their causes, and peak memory of a schedule at given costs."""

from __future__ import annotations

import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from penstock.cli.inputs import Lowering, Sizes, costs_from, for_send_model, schedule_from
from penstock.cli.options import (
    AsJson,
    CostsSource,
    FamilyStages,
    GraphOption,
    Group,
    JitterShare,
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
from penstock.records import QUANTILES, collectives_of, simulation_record
from penstock.simulation.attribution import Gap, gaps
from penstock.simulation.jitter import simulate_with_jitter
from penstock.simulation.simulator import simulate as run_simulation
from penstock.simulation.timeline import Timeline
from penstock.validation import SendModel
from penstock.view.terminal import terminal

__all__ = ["simulate"]

_LONGEST_GAPS = 5


BlockingReceives: TypeAlias = Annotated[
    bool,
    typer.Option("--blocking-receives", help="A receive blocks its rank until the message arrives."),
]


def simulate(
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
    blocking_receives: BlockingReceives = False,
    jitter: JitterShare = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a schedule: time, bubbles and their causes, peak memory, and the gap to the lower bound.

    Examples:
      penstock simulate 1f1b -p 4 -m 8
      penstock simulate zb-h1 -p 8 -m 24 --costs zb-h4096-p8-m24
      penstock simulate looped-bfs -p 4 -m 8 -c costs.toml --lowered --sharding cost --memory 40GiB
      penstock simulate mine.csv --costs costs.toml --send-model rendezvous --json
    """
    given = schedule_from(
        schedule,
        Sizes(ranks, microbatches, stages_per_rank, group, graph),
        Lowering(lowered, sharding, memory, costs, send_model, recompute=recompute, offload=offload),
    )
    simulated = for_send_model(given, send_model, blocking_receives=blocking_receives)
    messages: Any = {"send_model": send_model, "blocking_receives": blocking_receives}
    known = costs_from(costs)
    timeline = run_simulation(simulated, known, **messages, with_period=True)
    quantiles = None
    if jitter is not None:
        runs = simulate_with_jitter(simulated, known, jitter=jitter, **messages)
        quantiles = {f"p{q}": runs.quantile(q / 100) for q in QUANTILES}
    idle = gaps(timeline)
    if as_json:
        for part in _as_text(simulation_record(timeline, idle, quantiles)):
            sys.stdout.write(part)
    else:
        _print(timeline, idle, quantiles)


def _as_text(record: dict[str, Any]) -> Iterator[str]:
    """JSON with a line for each entry and for each gap, piece by piece: there can be very many."""
    separator = "{\n"
    for name, value in record.items():
        yield f"{separator}  {json.dumps(name)}: "
        if isinstance(value, list) and value:
            yield from (f"{',' if i else '['}\n    {json.dumps(each)}" for i, each in enumerate(value))
            yield "\n  ]"
        else:
            yield json.dumps(value)
        separator = ",\n"
    yield "\n}\n"


def _print(timeline: Timeline, idle: Sequence[Gap], quantiles: dict[str, float] | None) -> None:
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    console.print(terminal(timeline, width), soft_wrap=True)
    console.print()
    for name, value in (("makespan", timeline.makespan), ("span", timeline.span), ("period", timeline.period)):
        console.print(f"{name:<9} {value:<12g} {timeline.bubble(name):.1%} idle")
    bound = timeline.bound
    gap = f"gap <= {timeline.gap:.1%} ({bound.name}: {bound.because})"
    console.print(f"bound     {bound.seconds:<12g} {gap}", soft_wrap=True)
    if collectives := collectives_of(timeline):
        console.print("sharding  " + ", ".join(f"{count} {name}" for name, count in collectives.items()))
    if quantiles is not None:
        console.print("jitter    " + ", ".join(f"{name} {value:g}" for name, value in quantiles.items()))
    console.print()
    console.print(_table(timeline, idle))
    longest = sorted(idle, key=lambda gap: -gap.length)[:_LONGEST_GAPS]
    if longest:
        console.print("\nlongest idle gaps:")
    for each in longest:
        console.print(f"  {each}", soft_wrap=True)


def _table(timeline: Timeline, idle: Sequence[Gap]) -> Table:
    """Per rank: busy time, how much of it is all-to-all alone, idle time by cause, peak memory."""
    waits: dict[tuple[int, str], float] = defaultdict(float)
    for gap in idle:
        waits[gap.rank, gap.reason] += gap.length
    causes = list(dict.fromkeys(gap.reason for gap in idle))
    table = Table(box=None, pad_edge=False)
    exposed = ["exposed all-to-all"] if any(timeline.exposed_all_to_all) else []
    for name in ("rank", "busy", *exposed, *causes, "peak memory"):
        table.add_column(name, justify="right")
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory)):
        by_cause = (f"{waits[rank, cause]:g}" for cause in causes)
        alone = [f"{timeline.exposed_all_to_all[rank]:g}"] * len(exposed)
        table.add_row(str(rank), f"{busy:g}", *alone, *by_cause, f"{peak:g}")
    return table
