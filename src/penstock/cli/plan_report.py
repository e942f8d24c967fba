"""The output of `penstock plan`: the ranking, the frontier, techniques, notes; or JSON."""

from __future__ import annotations

import shutil
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.arguments import plural
from penstock.cli.rendering import print_table
from penstock.cost.units import Units
from penstock.planning import Plan, Rejected
from penstock.planning.explanation import Explanation
from penstock.view.frontier import frontier_text
from penstock.view.tables import plan_table


def plan_record(made: Plan, why: Explanation | None) -> dict[str, Any]:
    """The plan as values for JSON."""
    request = made.request
    return {
        "model": request.model.name,
        "ranks": request.ranks,
        "samples": request.samples,
        "memory_limit": request.memory_limit,
        "objective": request.objective,
        "jitter": request.jitter,
        "quantile": None if request.jitter is None else request.quantile,
        "interrupted": made.interrupted,
        "missing": list(made.missing),
        "bound": made.bound,
        "gap": made.gap,
        "ranked": made.to_rows(),
        "too_large": [_rejected(each) for each in made.too_large],
        "pruned": [_rejected(each) for each in made.pruned],
        "not_evaluated": made.not_evaluated,
        "why": None if why is None else list(why.why),
        "what_ifs": None if why is None else [vars(each) for each in why.what_ifs],
    }


def _rejected(each: Rejected) -> dict[str, Any]:
    configuration = each.configuration
    return {
        "schedule": each.name,
        "stages_per_rank": configuration.stages_per_rank,
        "placement": configuration.style,
        "microbatches": configuration.microbatches,
        "peak_memory": each.memory,
        "bound": each.bound,
    }


def print_plan(made: Plan, why: Explanation | None, top: int) -> None:
    """Print the ranking, the frontier and what was left out."""
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    print_table(plan_table(made, top))
    if len(made.options) > top:
        console.print(f"and {len(made.options) - top} more: --top {len(made.options)}")
    console.print()
    console.print(frontier_text(made, width), soft_wrap=True)
    console.print()
    if made.request.recompute or made.request.offload:
        print_table(_technique_table(made))
        console.print()
    for line in _notes(made):
        console.print(line, soft_wrap=True)
    if why is not None:
        print_explanation(console, why, made.units)


def print_explanation(console: Console, why: Explanation, units: Units) -> None:
    """Print why the best option wins, and what would help."""
    console.print("\nwhy it wins:")
    for line in why.why:
        console.print(f"  {line}", soft_wrap=True)
    console.print("\nwhat would help, largest gain first:")
    for each in why.what_ifs:
        change = f"{each.gain:.1%} faster" if each.gain >= 0 else f"{-each.gain:.1%} slower"
        console.print(
            f"  {change:>13}  {each.change}: {units.time(each.seconds, 4)} by {each.best}", soft_wrap=True
        )


def _technique_table(made: Plan) -> Table:
    """For each technique, the fastest plan and the one with the least memory."""
    table, units = Table(box=None, pad_edge=False), made.units
    for name in ("technique", "fastest", "memory", "least memory", "time"):
        table.add_column(name, justify="left" if name == "technique" else "right")
    for name, options in made.by_technique.items():
        first, last = options[0], options[-1]
        cells = (units.time(first.seconds, 4), units.memory(first.memory), units.memory(last.memory))
        table.add_row(name, *cells, units.time(last.seconds, 4))
    return table


def _notes(made: Plan) -> list[str]:
    """The best plan in full, and what was left out."""
    best, request, units = made.best, made.request, made.units
    layout = request.model.layout(best.configuration.counts)
    cut = f"layers per stage {list(best.configuration.counts)}" if layout is None else f"layout {layout}"
    extra = best.configuration.costs.optimizer_step
    with_step = f" plus {units.time(extra, 4)} of optimizer step" if extra else ""
    found = [f"time: {request.objective}{with_step}"]
    found.append(f"best: {best}, {cut}")
    if best.technique:
        only = "with" if "none" in made.by_technique else "fits only with"
        words = best.technique.replace("recompute ", "recomputation of ").replace("offload ", "offload of ")
        found.append(f"{only} {words}: {made.price(best):.1%} more time than the same order without it")
    if best.found_by:
        found.append(f"found by: {best.found_by}")
    bound = f"lower bound over all combinations: {units.time(made.bound, 4)}; gap <= {made.gap:.1%}"
    found.append(bound if request.jitter is None else f"{bound}, without jitter")
    if made.too_large:
        limit = "" if request.memory_limit is None else f" of {units.memory(request.memory_limit)}"
        some = "; ".join(f"{each} needs {units.memory(each.memory)}" for each in made.too_large[:3])
        rest = "; ..." if len(made.too_large) > 3 else ""
        found.append(f"over the memory limit{limit}: {len(made.too_large)} ({some}{rest})")
    if made.pruned:
        names = ", ".join(dict.fromkeys(each.name for each in made.pruned))
        found.append(f"pruned by their lower bounds: {len(made.pruned)} ({names})")
    if made.not_evaluated:
        found.append(
            f"too large to evaluate: {plural(made.not_evaluated, 'combination')} of stages and microbatches"
        )
    if made.missing:
        found.append(f"not installed, so not used by the search: {', '.join(made.missing)}")
    if made.interrupted:
        found.append("interrupted: this is the best plan found so far")
    return found
