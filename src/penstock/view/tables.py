"""The tables of results, as the command line prints them and notebooks show them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from penstock.arguments import printable
from penstock.cost.costs import size_text
from penstock.planning.configuration import stages_text
from penstock.planning.job.planner import JobPlan
from penstock.planning.planner import Plan
from penstock.search.result import SearchResult
from penstock.simulation.comparison import Comparison

__all__ = ["comparison_table", "family_table", "job_table", "plan_table", "result_lines"]


def comparison_table(rows: Sequence[Comparison]) -> Table:
    """Compared schedules, one per row."""
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for name in ("p", "v", "m", "makespan", "span", "period", "bubble", "memory", "sent", "bound", "gap"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (row.ranks, f"{row.stages / row.ranks:g}", row.microbatches)
        times = (f"{value:g}" for value in (row.makespan, row.span, row.period))
        rest = (
            f"{row.bubble:.1%}",
            f"{row.peak_memory:g}",
            f"{row.sent:g}",
            f"{row.bound:g}",
            f"{row.gap:.1%}",
        )
        table.add_row(Text(printable(row.name)), *map(str, sizes), *times, *rest)
    return table


def result_lines(result: SearchResult) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each number of a search result; how good it is and why nothing is better."""
    quality = "proved optimal" if result.proved else f"gap <= {result.gap:.2%}"
    lines = [
        (result.objective, f"{result.value:g}", quality),
        ("bound", f"{result.bound.seconds:g}", f"{result.bound.name}: {result.bound.because}"),
        ("memory", f"{max(result.timeline.peak_memory):g}", "peak of any rank, in bytes"),
    ]
    if result.quantile is not None:
        lines.insert(1, ("quantile", f"{result.quantile:g}", f"of the {result.objective} under jitter"))
    return lines


def family_table(result: SearchResult) -> Table:
    """The families that a search compared its result with."""
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    table.add_column(result.objective, justify="right")
    table.add_column("vs. result", justify="right")
    for name, value in sorted(result.families.items(), key=lambda item: item[1]):
        table.add_row(name, f"{value:g}", f"{value / result.value - 1:+.2%}" if result.value else "")
    for name, size in result.too_large.items():
        table.add_row(name, f"needs {size:g}", "over limit")
    return table


def plan_table(made: Plan, top: int) -> Table:
    """The first options of a plan."""
    table = Table(box=None, pad_edge=False)
    jitter = made.request.jitter
    time = "time" if jitter is None else f"p{made.request.quantile * 100:g}"
    table.add_column("", justify="right")
    table.add_column("schedule")
    for name in ("v", "placement", "m", "mbs", time, "samples/s", "bubble", "memory", "gap"):
        table.add_column(name, justify="right")
    for place, option in enumerate(made.options[:top], 1):
        configuration = option.configuration
        table.add_row(
            str(place),
            Text(printable(f"{option.name}, {option.technique}" if option.technique else option.name)),
            stages_text(configuration.stages_per_rank),
            configuration.style,
            str(configuration.microbatches),
            str(configuration.samples),
            f"{option.seconds:.4g} s",
            f"{option.samples_per_second:.4g}",
            f"{option.timeline.bubble(made.request.objective):.1%}",
            size_text(option.memory),
            f"{option.gap:.1%}",
        )
    return table


def job_table(made: JobPlan, top: int) -> Table:
    """The first options of a job's plan."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right")
    for name in ("TP", "CP", *(["EP"] if made.request.config.experts else []), "PP", "DP", "mbs", "m"):
        table.add_column(name, justify="right")
    table.add_column("schedule")
    time = "time" if made.request.jitter is None else f"p{made.request.quantile * 100:g}"
    for name in ("v", "recompute", time, "tokens/s", "MFU", "idle", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, option in enumerate(made.options[:top], 1):
        layout = option.layout
        expert = [layout.expert] if made.request.config.experts else []
        table.add_row(
            str(place),
            *map(str, (layout.tensor, layout.context, *expert, layout.pipeline, layout.data)),
            *(str(layout.microbatch_size), str(layout.microbatches), option.order),
            *(str(option.stages_per_rank), layout.recompute),
            f"{option.seconds:.4g} s{'' if option.is_exact else ' *'}",
            *(f"{option.tokens_per_second:.0f}", f"{option.mfu:.1%}", f"{option.bubble:.1%}"),
            size_text(option.memory),
        )
    return table
