"""`penstock simulate`: how long a schedule takes at given costs, what it holds, and where the time goes."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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
from penstock.lowering import lower
from penstock.simulation.attribution import critical_path, gaps
from penstock.simulation.comparison import row_of
from penstock.simulation.jitter import jitter
from penstock.simulation.simulator import simulate as run_simulation
from penstock.simulation.timeline import Timeline
from penstock.validation import MODELS
from penstock.view.terminal import terminal

__all__ = ["simulate"]


def simulate(
    schedule: Source,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    lowered: Lowered = False,
    costs: CostsFrom = None,
    sends: Sends = MODELS[0],
    blocking_receives: Annotated[
        bool,
        typer.Option("--blocking-receives", help="A receive holds up its rank until the message is there."),
    ] = False,
    noise: Annotated[
        float | None, typer.Option("--jitter", metavar="SHARE", help="Vary every step by this share, as 0.05.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Simulate a schedule: time, bubbles and their reasons, memory, and how far from the best possible.

    Examples:
      penstock simulate 1f1b -p 4 -m 8
      penstock simulate zb-h1 -p 8 -m 24 --costs zb-h4096-p8-m24
      penstock simulate mine.csv --costs costs.toml --sends rendezvous --json
    """
    made = schedule_from(schedule, ranks, microbatches, stages_per_rank)
    made = lower(made) if lowered else made
    timeline = run_simulation(
        made, costs_from(costs), sends=checked_sends(sends), blocking_receives=blocking_receives
    )
    spread = None
    if noise is not None:
        found = jitter(made, costs_from(costs), noise=noise, sends=sends, blocking_receives=blocking_receives)
        spread = {f"p{q}": found.quantile(q / 100) for q in (5, 50, 95)}
    if as_json:
        typer.echo(json.dumps(_answer(timeline, spread), indent=2))
    else:
        _print(timeline, spread)


def _answer(timeline: Timeline, spread: dict[str, float] | None) -> dict[str, Any]:
    row = asdict(row_of(timeline))
    return row | {
        "busy": timeline.busy,
        "idle": timeline.idle,
        "peak_memory_by_rank": timeline.peak_memory,
        "critical_path": [str(event.step) for event in critical_path(timeline)],
        "gaps": [
            {"rank": g.rank, "start": g.start, "end": g.end, "reason": g.reason, "why": str(g)}
            for g in gaps(timeline)
        ],
        "jitter": spread,
    }


def _print(timeline: Timeline, spread: dict[str, float] | None) -> None:
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    console.print(terminal(timeline, width), soft_wrap=True)
    console.print()
    for name, value in (("makespan", timeline.makespan), ("span", timeline.span), ("period", timeline.period)):
        console.print(f"{name:<9} {value:<12g} {timeline.bubble(name):.1%} idle")
    bound = timeline.bound
    because = f"{timeline.gap:.1%} from it at most ({bound.name}: {bound.because})"
    console.print(f"bound     {bound.seconds:<12g} {because}", soft_wrap=True)
    if spread is not None:
        console.print("jitter    " + ", ".join(f"{name} {value:g}" for name, value in spread.items()))
    console.print()
    console.print(_by_rank(timeline))
    longest = sorted(gaps(timeline), key=lambda gap: -gap.length)[:5]
    if longest:
        console.print("\nthe longest gaps:")
    for each in longest:
        console.print(f"  {each}", soft_wrap=True)


def _by_rank(timeline: Timeline) -> Table:
    reasons: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for gap in gaps(timeline):
        reasons[gap.rank][gap.reason] += gap.length
    names = list(dict.fromkeys(gap.reason for gap in gaps(timeline)))
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "busy", *names, "peak memory"):
        table.add_column(name, justify="right")
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory)):
        waits = (f"{reasons[rank][name]:g}" for name in names)
        table.add_row(str(rank), f"{busy:g}", *waits, f"{peak:g}")
    return table
