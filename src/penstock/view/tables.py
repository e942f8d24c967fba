"""The tables of results, as the command line prints them and notebooks show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from penstock.arguments import listed, printable
from penstock.cost.units import Units, bytes_text, number_text, seconds_text
from penstock.planning.jobs import JobOption, JobRequest
from penstock.planning.layers import LayerOption, stages_text
from penstock.planning.planner import JobPlan, LayerPlan
from penstock.search.request import SearchResult
from penstock.simulation.comparison import Comparison

_ROUNDING = 1e-9


def comparison_table(rows: Sequence[Comparison]) -> Table:
    """Compared schedules, one per row."""
    units = Units.common(Units(row.time_unit == "seconds", row.memory_unit == "bytes") for row in rows)
    longest = max((row.makespan for row in rows), default=0.0)
    scale, sent = units.time_scale(longest), any(row.sent for row in rows)
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    times = [units.column(name, longest) for name in ("makespan", "span", "period")]
    rest = ["bubble", "memory", *(["sent"] if sent else []), units.column("bound", longest), "gap"]
    for name in ("p", "v", "m", *times, *rest):
        table.add_column(name, justify="right")
    for row in rows:
        memory = bytes_text(row.peak_memory) if units.bytes else number_text(row.peak_memory)
        table.add_row(
            Text(printable(row.name)),
            *(str(row.ranks), f"{row.stages / row.ranks:g}", str(row.microbatches)),
            *(scale.number(value) for value in (row.makespan, row.span, row.period)),
            *(f"{row.bubble:.1%}", memory, *([bytes_text(row.sent)] if sent else [])),
            *(scale.number(row.bound), f"{row.gap:.1%}"),
        )
    return table


def comparison_notes(rows: Sequence[Comparison], *, unit_costs: bool) -> list[str]:
    """What the numbers of a comparison are, and which rows do more work than others.

    `unit_costs`: without given costs, so that the stages of a rank share its unit costs.
    """
    notes = ["p: ranks, v: stages per rank, m: microbatches"]
    per_microbatch = " per rank and microbatch" * (len({(row.ranks, row.microbatches) for row in rows}) > 1)
    if any(row.memory_unit == "activations" for row in rows):
        notes[0] += "; memory in activations" + " of a rank" * unit_costs
    if unit_costs:
        notes.append("times in units: F, I and W of a rank take 1, B 2")
        if any(row.stages != row.ranks for row in rows):
            notes[-1] += "; its v stages share that, so all rows do the same work" + per_microbatch
    elif any(row.time_unit == "units" for row in rows):
        notes.append("times in units")
    return [*notes, *_differences(rows)]


def _differences(rows: Sequence[Comparison]) -> Iterator[str]:
    """Rows that do more or less work than the first with the same ranks and microbatches, one line for each."""
    first: dict[tuple[int, int], Comparison] = {}
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        base = first.setdefault((row.ranks, row.microbatches), row)
        if base.work and abs(row.work / base.work - 1) > _ROUNDING:
            other = f"{printable(base.name)} (m={row.microbatches})"
            found.setdefault((f"{row.work / base.work:.3g}", other), []).append(printable(row.name))
    for (times, other), names in found.items():
        verb = "compute" if len(names) > 1 else "computes"
        yield f"{listed(names)} {verb} {times} times as much as {other}, so their times are not comparable"


def result_lines(result: SearchResult) -> list[tuple[str, str, str]]:
    """Name, value and meaning of each number of a search result; how good it is and why nothing is better."""
    units = result.timeline.costs.units
    quality = "proved optimal" if result.proved else f"gap <= {result.gap:.2%}"
    lines = [
        (result.objective, units.time(result.value), quality),
        ("bound", units.time(result.bound.seconds), f"{result.bound.name}: {result.bound.because}"),
        ("memory", units.memory(max(result.timeline.peak_memory)), "peak of any rank"),
    ]
    if result.quantile is not None:
        lines.insert(1, ("quantile", units.time(result.quantile), f"of the {result.objective} under jitter"))
    return lines


def family_table(result: SearchResult) -> Table:
    """The families that a search compared its result with."""
    units, longest = result.timeline.costs.units, max([result.value, *result.families.values()])
    scale = units.time_scale(longest)
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    table.add_column(units.column(result.objective, longest), justify="right")
    table.add_column("vs. result", justify="right")
    for name, value in sorted(result.families.items(), key=lambda item: item[1]):
        table.add_row(name, scale.number(value), f"{value / result.value - 1:+.2%}" if result.value else "")
    for name, size in result.too_large.items():
        table.add_row(name, f"needs {units.memory(size)}", "over limit")
    return table


def plan_table(made: LayerPlan | JobPlan, top: int) -> Table:
    """Return the first options of a plan, one per row."""
    request = made.request
    time = "time" if request.jitter is None else f"p{request.quantile * 100:g}"
    rows: list[dict[str, str]]
    if isinstance(made.request, JobRequest):
        experts = bool(made.request.config.experts)
        rows = [_job_row(option, time, experts=experts) for option in made.options[:top]]
    else:
        rows = [_layer_row(option, time, made.units) for option in made.options[:top]]
    table = Table(box=None, pad_edge=False)
    table.add_column("", justify="right")
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=name != "schedule")
    for place, row in enumerate(rows, 1):
        table.add_row(str(place), *map(Text, row.values()))
    return table


def _layer_row(option: LayerOption, time: str, units: Units) -> dict[str, str]:
    configuration = option.configuration
    return {
        "schedule": printable(option.full_name),
        "v": stages_text(configuration.stages_per_rank),
        "placement": configuration.style,
        "m": str(configuration.microbatches),
        "mbs": str(configuration.samples),
        time: units.time(option.seconds, 4),
        "samples/s" if units.seconds else "samples/unit": f"{option.samples_per_second:.4g}",
        "bubble": f"{option.bubble:.1%}",
        "memory": units.memory(option.memory),
        "gap": f"{option.gap:.1%}",
    }


def _job_row(option: JobOption, time: str, *, experts: bool) -> dict[str, str]:
    layout = option.layout
    sizes = dict(zip(("TP", "CP", "EP", "PP", "DP"), map(str, layout.sizes)))
    return {
        **{name: size for name, size in sizes.items() if experts or name != "EP"},
        "mbs": str(layout.parallel.microbatch_size),
        "m": str(layout.microbatches),
        "schedule": printable(option.full_name),
        "v": str(option.configuration.stages_per_rank),
        "recompute": layout.parallel.recompute_granularity,
        time: f"{seconds_text(option.seconds)}{'' if option.is_exact else ' *'}",
        "tokens/s": f"{option.tokens_per_second:.0f}",
        "MFU": f"{option.mfu:.1%}",
        "idle": f"{option.bubble:.1%}",
        "memory": bytes_text(option.memory),
    }
