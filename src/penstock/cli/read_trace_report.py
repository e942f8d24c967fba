"""The report of `penstock read-trace`: what was run, what it took, why ranks were idle, what could be saved."""

from __future__ import annotations

import math
import shutil
from collections import defaultdict
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli.inputs import order_of
from penstock.search import SearchResult
from penstock.simulation.attribution import Gap, gaps
from penstock.simulation.calibration import errors_by_kind
from penstock.simulation.timeline import Timeline
from penstock.traces.clock_alignment import ClockAlignment
from penstock.traces.measured_run import MeasuredRun
from penstock.view.terminal import terminal

__all__ = ["pictures", "print_run", "record_of"]

_LONGEST_GAPS = 3


def pictures(run: MeasuredRun, found: SearchResult | None) -> list[Timeline]:
    """The measured timeline, the predicted one, and that of the order found."""
    shown = [(f"measured: {order_of(run.schedule)}", run.timeline), ("predicted", run.predicted)]
    if found is not None:
        shown.append(("found by search", found.timeline))
    return [replace(timeline, schedule=timeline.schedule.renamed(name)) for name, timeline in shown]


def record_of(run: MeasuredRun, found: SearchResult | None) -> dict[str, Any]:
    """Everything as JSON values: times in seconds."""
    timeline, order = run.timeline, order_of(run.schedule)
    idle = gaps(timeline)
    clocks = run.clocks
    return {
        "files": list(run.sources),
        "ranks": run.schedule.num_ranks,
        "stages": run.schedule.num_stages,
        "microbatches": run.schedule.microbatches,
        "order": str(order),
        "families": [] if isinstance(order, str) else list(order.families),
        "steps": [each.makespan for each in run.timelines],
        "step": run.step,
        "period": timeline.period,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble_rate,
        "busy": list(timeline.busy),
        "idle_by_reason": _by_reason(idle),
        "clocks": {
            "offsets": list(clocks.offsets),
            "uncertainty": [each if math.isfinite(each) else None for each in clocks.uncertainty],
            "residual": clocks.residual,
            "shared_clock": clocks.shared_clock,
        },
        "costs": run.costs.to_keys(),
        "predicted": [
            {"kind": row.kind, "predicted": row.predicted, "measured": row.measured, "error": row.error}
            for row in errors_by_kind(run.predicted, run.alike)
        ],
        "search": None if found is None else _found(run, found),
    }


def _found(run: MeasuredRun, found: SearchResult) -> dict[str, Any]:
    return {
        "makespan": found.value,
        "saved": 1 - found.value / run.predicted.makespan,
        "live_limit": run.live,
        "found_by": found.found_by,
        "gap": found.gap if math.isfinite(found.gap) else None,
        "schedule": [[str(step) for step in row] for row in found.schedule.ranks],
    }


def _by_reason(idle: tuple[Gap, ...]) -> dict[str, float]:
    """Seconds of all ranks together, longest first."""
    total: dict[str, float] = defaultdict(float)
    for gap in idle:
        total[gap.reason] += gap.length
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def print_run(run: MeasuredRun, found: SearchResult | None) -> None:
    """Print the report."""
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    timeline = run.timeline
    how = "of median makespan" if run.step == run.median_step else "as given"
    steps = f"{len(run.timelines)} complete step{'s' * (len(run.timelines) > 1)}"
    console.print(f"order     {order_of(run.schedule)}", soft_wrap=True)
    console.print(f"steps     {steps}; step {run.step}, {how}, is shown", soft_wrap=True)
    console.print(f"clocks    {_clocks(run.clocks)}\n", soft_wrap=True)
    console.print(terminal(timeline, width), soft_wrap=True)
    period = "" if timeline.period is None else f"; a step every {timeline.period * 1e3:.4g} ms"
    console.print(f"\nmakespan  {timeline.makespan * 1e3:.4g} ms, {timeline.bubble_rate:.1%} idle{period}")
    idle = gaps(timeline)
    whole = timeline.makespan * run.schedule.num_ranks
    reasons = (f"{reason} {seconds / whole:.1%}" for reason, seconds in _by_reason(idle).items())
    console.print(f"idle      {', '.join(reasons)}", soft_wrap=True)
    for gap in sorted(idle, key=lambda gap: -gap.length)[:_LONGEST_GAPS]:
        console.print(f"          {gap}", soft_wrap=True)
    console.print(f"search    {_search_text(run, found)}\n", soft_wrap=True)
    console.print(_predictions(run))
    console.print()
    console.print(_stages(run))


def _clocks(clocks: ClockAlignment) -> str:
    if clocks.shared_clock:
        return "all ranks on one host, one clock"
    offsets = ", ".join(f"{each * 1e3:+.3g}" for each in clocks.offsets)
    finite = [each for each in clocks.uncertainty if math.isfinite(each)]
    text = f"ahead of rank 0 by {offsets} ms, each to within {max(finite) * 1e3:.3g} ms"
    if len(finite) < len(clocks.uncertainty):
        text += "; some ranks have no messages in both directions"
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
    better = f"{found.value * 1e3:.4g} ms, {saved:.1%} less than predicted for this order"
    return f"{better}, {live}: {found.found_by}, gap <= {found.gap:.1%}"


def _predictions(run: MeasuredRun) -> Table:
    """Mean time of each kind of action and of the step, predicted and measured."""
    table = Table(box=None, pad_edge=False)
    for name in ("kind", "predicted ms", "measured ms", "error"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for row in errors_by_kind(run.predicted, run.alike):
        times = (f"{seconds * 1e3:.4g}" for seconds in (row.predicted, row.measured))
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
        latency = f"{edges[stage] * 1e3:.4g}" if chain and stage < len(edges) else ""
        table.add_row(str(stage), *(f"{each * 1e3:.4g}" for each in seconds), latency)
    return table
