"""The report of a job's plan: ranking, frontier, explanation, picture, files or JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from penstock.arguments import plural
from penstock.cli.plan_options import PlanOutput
from penstock.cli.plan_report import print_explanation
from penstock.cli.rendering import job_progress, print_table, say_written
from penstock.cost.units import bytes_text, seconds_text
from penstock.formats import write_bytes
from penstock.planning.explanation import Explanation
from penstock.planning.job import JobPlan, JobRequest, plan_job
from penstock.planning.job.explanation import explain_job
from penstock.view.frontier import PlottedPlan, frontier_picture, frontier_text
from penstock.view.tables import job_table


def render_frontier(made: PlottedPlan, output: Path) -> bytes:
    """The plot of memory against time, .svg, .png or .html."""
    if output.suffix.lower() == ".html":
        from penstock.view.frontier import frontier_html  # noqa: PLC0415 -- loaded only when drawn

        return frontier_html(made).encode()
    picture = frontier_picture(made)
    if output.suffix.lower() == ".svg":
        from penstock.view.svg import svg_of  # noqa: PLC0415 -- loaded only when drawn

        return svg_of(picture).encode()
    from penstock.view.png import png_of  # noqa: PLC0415 -- loaded only when drawn

    return png_of(picture)


def report_job(request: JobRequest, output: PlanOutput) -> None:
    """Make a job's plan, with progress on a terminal, and print and write it."""
    with job_progress() as on_progress:
        made = plan_job(request, on_progress)
        why = explain_job(made, on_progress) if output.explained else None
    if output.picture is not None:
        write_bytes(render_frontier(made, output.picture), output.picture)
    written = made.write(output.folder) if output.folder is not None else []
    if output.picture is not None:
        written = [output.picture, *written]
    if output.as_json:
        typer.echo(json.dumps(_record(made, why), indent=2))
        return say_written(*written, as_json=True)
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=width)
    console.print(f"{made.title} of {plural(made.request.sequence, 'token')}")
    print_table(job_table(made, output.top))
    if len(made.options) > output.top:
        console.print(f"and {len(made.options) - output.top} more: --top {len(made.options)}")
    console.print()
    console.print(frontier_text(made, width), soft_wrap=True)
    console.print()
    for line in _notes(made, output.top, explained=why is not None):
        console.print(line, soft_wrap=True)
    if why is not None:
        print_explanation(console, why, made.units)
    say_written(*written)
    if output.folder is not None:
        sizes = f"--layout '{made.layout}' --microbatch-size {made.best.layout.microbatch_size}"
        typer.echo(f"flags for a trainer: penstock export torchtitan {output.folder}/schedule.json {sizes}")
    return None


def _notes(made: JobPlan, top: int, *, explained: bool) -> list[str]:
    """The best option in full, and what was left out; an explanation has the excluded sizes itself.

    The table has the first `top` options.
    """
    best, counts = made.best, made.evaluation.counts
    found = [
        "tokens/s: of each device; m: microbatches of a pipeline; v: stages per rank; time: of a whole step"
    ]
    if made.request.jitter is not None:
        slowest = "of the slowest data parallel replica"
        quantile = f"the {made.request.quantile:g} quantile {slowest}, steps vary by {made.request.jitter:.0%}"
        steady = seconds_text(made.best.seconds_without_jitter)
        found.append(f"time: {quantile}; {made.best} takes {steady} without")
    if made.interrupted:
        found.append("interrupted: what was found until then")
    if not all(each.is_exact for each in made.options[:top]):
        found.append("*: extended from fewer microbatches, without queues of messages")
    found.append(f"best: {best}, layout {made.layout}")
    limit = f"{bytes_text(made.request.memory_limit)} ({made.request.limit_share})"
    over = f"{counts['too large']} over the memory limit of {limit}"
    simulated = f"{counts['evaluated']} simulated, {counts['pruned']} pruned by their lower bounds"
    found.append(f"{plural(counts['layouts'], 'layout')}; candidates: {simulated}, {over}")
    if made.data_sizes.excluded and not explained:
        found.append(str(made.data_sizes))
    if counts["not evaluated"]:
        least = f"the next has a lower bound of {seconds_text(made.evaluation.next_bound)}"
        found.append(f"not evaluated: {counts['not evaluated']}; {least}: --budget 4 evaluates more")
    return found


def _record(made: JobPlan, why: Explanation | None) -> dict[str, Any]:
    request = made.request
    return {
        "model": request.config.name,
        "device": request.device.name,
        "devices": request.devices,
        "samples": request.batch,
        "sequence": request.sequence,
        "memory_limit": request.memory_limit,
        "jitter": request.jitter,
        "quantile": None if request.jitter is None else request.quantile,
        "bound": made.bound,
        "counts": dict(made.evaluation.counts),
        "excluded_data_parallel_sizes": list(made.data_sizes.excluded),
        "ranked": made.to_rows(),
        "why": None if why is None else list(why.why),
        "what_ifs": None if why is None else [vars(each) for each in why.what_ifs],
    }
