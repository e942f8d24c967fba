"""The report of `penstock read-trace`: what was run, what it took, why ranks were idle, what could be saved."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from penstock.cli.rendering import print_table
from penstock.records import idle_by_reason, order_of
from penstock.search import SearchResult
from penstock.simulation.attribution import gaps
from penstock.simulation.calibration import errors_by_kind
from penstock.simulation.timeline import Timeline
from penstock.traces.clock_alignment import ClockAlignment
from penstock.traces.measured_run import MeasuredRun
from penstock.view.terminal import terminal

__all__ = ["pictures", "print_run"]

_LONGEST_GAPS = 3


def pictures(run: MeasuredRun, found: SearchResult | None) -> list[Timeline]:
    """The measured timeline, the predicted one, and that of the order found."""
    shown = [(f"measured: {order_of(run.schedule)}", run.timeline), ("predicted", run.predicted)]
    if found is not None:
        shown.append(("found by search", found.timeline))
    return [replace(timeline, schedule=timeline.schedule.renamed(name)) for name, timeline in shown]


def print_run(run: MeasuredRun, found: SearchResult | None) -> None:
    """Print the report."""
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    timeline = run.timeline
    how = "of median makespan" if run.step == run.median_step else "as given"
    steps = f"{len(run.timelines)} complete step{'s' * (len(run.timelines) > 1)}"
    console.print(f"order     {order_of(run.schedule)}", soft_wrap=True)
    console.print(f"steps     {steps}; step {run.step}, {how}, is shown", soft_wrap=True)
    if run.replicas:
        console.print(f"replicas  {_replicas(run)}", soft_wrap=True)
    console.print(f"clocks    {_clocks(run.clocks)}\n", soft_wrap=True)
    console.print(terminal(timeline, width), soft_wrap=True)
    period = "" if timeline.period is None else f"; a step every {_ms(timeline.period)} ms"
    console.print(f"\nmakespan  {_ms(timeline.makespan)} ms, {timeline.bubble_rate:.1%} idle{period}")
    idle = gaps(timeline)
    whole = timeline.makespan * run.schedule.num_ranks
    reasons = (f"{reason} {seconds / whole:.1%}" for reason, seconds in idle_by_reason(idle).items())
    console.print(f"idle      {', '.join(reasons)}", soft_wrap=True)
    scale = run.costs.units.time_scale(timeline.makespan)
    for gap in sorted(idle, key=lambda gap: -gap.length)[:_LONGEST_GAPS]:
        console.print(f"          {gap.text(scale)}", soft_wrap=True)
    console.print(f"search    {_search_text(run, found)}\n", soft_wrap=True)
    print_table(_predictions(run), console)
    console.print()
    print_table(_stages(run), console)


def _replicas(run: MeasuredRun) -> str:
    """All pipelines of the job, and which one is shown."""
    each = ", ".join(_ms(seconds) for seconds in run.replicas)
    how = "the slowest" if run.replicas[run.replica] == max(run.replicas) else "as given"
    return f"{len(run.replicas)}, of {each} ms; replica {run.replica}, {how}, is shown"


def _clocks(clocks: ClockAlignment) -> str:
    if clocks.shared_clock:
        return "all ranks on one host, one clock"
    offsets = ", ".join(f"{each * 1e3:+.3g}" for each in clocks.offsets)
    finite = [each for each in clocks.uncertainty if math.isfinite(each)]
    text = f"ahead of rank 0 by {offsets} ms, each to within {max(finite) * 1e3:.3g} ms"
    if len(finite) < len(clocks.uncertainty):
        text += "; some ranks have no messages in both directions"
    if any(clocks.drift):
        drift = ", ".join(f"{each * 1e6:+.3g}" for each in clocks.drift)
        text += f"; they drift by {drift} microseconds per second"
    if clocks.residual:
        text += f"; some message still arrives {clocks.residual * 1e3:.3g} ms before it was sent"
    return text


def _search_text(run: MeasuredRun, found: SearchResult | None) -> str:
    if found is None:
        return "not run"
    saved = 1 - found.value / run.predicted.makespan
    live = f"with at most {run.live} live activations per rank, as now"
    if saved < 0.001:
        return f"no better order found {live} ({found.found_by})"
    better = f"{_ms(found.value)} ms, {saved:.1%} less than predicted for this order"
    return f"{better}, {live}: {found.found_by}, gap <= {found.gap:.1%}"


def _predictions(run: MeasuredRun) -> Table:
    """Mean time of each kind of action and of the step, predicted and measured."""
    table = Table(box=None, pad_edge=False)
    for name in ("kind", "predicted ms", "measured ms", "error"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for row in errors_by_kind(run.predicted, run.alike):
        times = (_ms(seconds) for seconds in (row.predicted, row.measured))
        table.add_row(row.kind, *times, f"{row.error:+.1%}")
    return table


def _stages(run: MeasuredRun) -> Table:
    """The derived costs of each stage, in ms."""
    costs, count = run.costs, run.schedule.num_stages
    edges = costs.per_edge("latency", len(run.schedule.graph.edges))
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "F ms", "I ms", "W ms", "B ms", "message to the next, ms"):
        table.add_column(name, justify="right")
    columns = [
        costs.per_stage("forward", count),
        costs.per_stage("backward_input", count),
        costs.per_stage("backward_weight", count),
        costs.full_backward(count),
    ]
    chain = run.schedule.graph.is_chain
    for stage, seconds in enumerate(zip(*columns)):
        latency = _ms(edges[stage]) if chain and stage < len(edges) else ""
        table.add_row(str(stage), *map(_ms, seconds), latency)
    return table


def _ms(seconds: float) -> str:
    """Milliseconds with four digits."""
    return f"{seconds * 1e3:.4g}" if seconds < 10 else f"{seconds * 1e3:,.0f}"
