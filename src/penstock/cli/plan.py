"""`penstock plan`: choose partition, placement, microbatches and schedule for a model and its devices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.arguments import printable
from penstock.cli.options import (
    AsJson,
    FamilyStages,
    JitterShare,
    MemoryLimit,
    Objective,
    ObjectiveOption,
    Quantile,
    Ranks,
    Seed,
    parse_stages,
)
from penstock.cli.plan_job import (
    DeviceCount,
    JobArguments,
    JobBudget,
    JobContext,
    JobDevice,
    JobExpert,
    JobMicrobatchSize,
    JobPrecision,
    JobRecompute,
    JobSequence,
    JobTensor,
    JobZero,
    is_job,
    job_plan,
)
from penstock.cli.plan_job_report import JobOutput, render_frontier, report_job
from penstock.cli.progress import search_progress
from penstock.cli.rendering import require_suffix
from penstock.cost.costs import size_text
from penstock.errors import FormatError
from penstock.formats import write_bytes
from penstock.planning import Model, Plan, Rejected, read_model
from penstock.planning import plan as make_plan
from penstock.planning.configuration import stages_text
from penstock.planning.explanation import Explanation, explain
from penstock.view.frontier import frontier_text

__all__ = ["plan"]


ModelFile: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="Costs of the layers, or of profiled stages: .toml or .json; or a model's config.json.",
    ),
]
BatchSize: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--batch", metavar="SAMPLES", help="Samples per step of this pipeline; with a config: of the whole job."
    ),
]
TimeLimit: TypeAlias = Annotated[
    float, typer.Option("--seconds", help="Time limit of the search; 0 evaluates families only.")
]
Explained: TypeAlias = Annotated[
    bool, typer.Option("--explain", help="Explain why the best plan wins, and what would improve it.")
]
RowCount: TypeAlias = Annotated[int, typer.Option("--top", min=1, help="Number of rows to print.")]
PlotFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Plot memory against time: .svg or .png."),
]
PlanDirectory: TypeAlias = Annotated[
    Path | None,
    typer.Option("--write", metavar="DIR", help="Write schedule, costs and layout of the best plan."),
]


def plan(
    model: ModelFile,
    *,
    ranks: Ranks = None,
    memory: MemoryLimit = None,
    batch: BatchSize = None,
    stages_per_rank: FamilyStages = None,
    objective: ObjectiveOption = Objective.makespan,
    seconds: TimeLimit = 10.0,
    seed: Seed = 0,
    jitter: JitterShare = None,
    quantile: Quantile = 0.95,
    explained: Explained = False,
    top: RowCount = 10,
    output: PlotFile = None,
    folder: PlanDirectory = None,
    as_json: AsJson = False,
    devices: DeviceCount = None,
    device_name: JobDevice = None,
    sequence: JobSequence = None,
    tensor: JobTensor = None,
    context: JobContext = None,
    expert: JobExpert = None,
    microbatch_size: JobMicrobatchSize = None,
    precision: JobPrecision = None,
    zero: JobZero = None,
    recompute: JobRecompute = None,
    budget: JobBudget = None,
) -> None:
    """Plan a run: partition layers into stages, place them, choose microbatches and schedule, rank by time.

    From a model config: also tensor, context, expert, pipeline and data parallel sizes for all devices.
    Ctrl-C stops the search and keeps the best plan found so far.

    Examples:
      penstock plan examples/models/llama-8b.toml
      penstock plan model.toml -p 16 --memory 80GB --batch 128 --explain
      penstock plan model.toml --jitter 0.05 --quantile 0.95 --json
      penstock plan model.toml -o frontier.svg --write best/
      penstock plan config.json --devices 512 --device h100 --batch 1024 --seq 8192 --explain
    """
    if output is not None:
        require_suffix(output, (".svg", ".png"), advice="; --write DIR writes the schedule")
    job = JobArguments(
        *(devices, device_name, sequence, tensor, context, expert),
        *(microbatch_size, precision, zero, recompute, budget),
    )
    if is_job(model, job):
        unused = {"--stages-per-rank": stages_per_rank, "--jitter": jitter}
        unused |= {"--objective": None if objective is Objective.makespan else objective}
        made_job = job_plan(model, job, ranks=ranks, memory=memory, batch=batch, unused=unused)
        report_job(made_job, JobOutput(explained, top, output, folder, as_json))
        return
    known = _read_model(model)
    with search_progress() as on_progress:
        made = make_plan(
            known,
            ranks=ranks,
            memory_limit=memory,
            samples=batch,
            stages_per_rank=None if stages_per_rank is None else parse_stages(stages_per_rank),
            objective=objective.value,
            seconds=seconds,
            seed=seed,
            jitter=jitter,
            quantile=quantile,
            on_progress=on_progress,
        )
        why = explain(made, on_progress) if explained else None
    if output is not None:
        write_bytes(render_frontier(made, output), output)
    written = made.write(folder) if folder is not None else []
    if as_json:
        typer.echo(json.dumps(_record(made, why), indent=2))
    else:
        _print(made, why, top, written)


def _read_model(source: str) -> Model:
    try:
        return read_model(source)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None


# --- output ----------------------------------------------------------------------------------------


def _record(made: Plan, why: Explanation | None) -> dict[str, Any]:
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
        "ranked": [made.to_keys(option) for option in made.options],
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


def _print(made: Plan, why: Explanation | None, top: int, written: list[Path]) -> None:
    width = shutil.get_terminal_size().columns
    console = Console(highlight=False, markup=False, width=max(width, 100))
    console.print(_table(made, top))
    if len(made.options) > top:
        console.print(f"and {len(made.options) - top} more: --top {len(made.options)}")
    console.print()
    console.print(frontier_text(made, width), soft_wrap=True)
    console.print()
    for line in _notes(made):
        console.print(line, soft_wrap=True)
    if why is not None:
        console.print("\nwhy it wins:")
        for line in why.why:
            console.print(f"  {line}", soft_wrap=True)
        console.print("\nwhat would help, largest gain first:")
        for each in why.what_ifs:
            change = f"{each.gain:.1%} faster" if each.gain >= 0 else f"{-each.gain:.1%} slower"
            console.print(f"  {change:>13}  {each.change}: {each.seconds:.4g} s by {each.best}", soft_wrap=True)
    if written:
        console.print(f"\nwritten: {', '.join(map(str, written))}", soft_wrap=True)


def _table(made: Plan, top: int) -> Table:
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
            Text(printable(option.name)),
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


def _notes(made: Plan) -> list[str]:
    """The best plan in full, and what was left out."""
    best, request = made.best, made.request
    layout = request.model.layout(best.configuration.counts)
    cut = f"layers per stage {list(best.configuration.counts)}" if layout is None else f"layout {layout}"
    extra = best.configuration.costs.optimizer_step
    with_step = f" plus {extra:g} s of optimizer step" if extra else ""
    found = [f"time: {request.objective}{with_step}"]
    found.append(f"best: {best}, {cut}")
    if best.found_by:
        found.append(f"found by: {best.found_by}")
    bound = f"lower bound over all combinations: {made.bound:.4g} s; gap <= {made.gap:.1%}"
    found.append(bound if request.jitter is None else f"{bound}, without jitter")
    if made.too_large:
        limit = "" if request.memory_limit is None else f" of {size_text(request.memory_limit)}"
        some = "; ".join(f"{each} needs {size_text(each.memory)}" for each in made.too_large[:3])
        rest = "; ..." if len(made.too_large) > 3 else ""
        found.append(f"over the memory limit{limit}: {len(made.too_large)} ({some}{rest})")
    if made.pruned:
        names = ", ".join(dict.fromkeys(each.name for each in made.pruned))
        found.append(f"pruned by their lower bounds: {len(made.pruned)} ({names})")
    if made.not_evaluated:
        found.append(f"too large to evaluate: {made.not_evaluated} combinations of stages and microbatches")
    if made.missing:
        found.append(f"not installed, so not used by the search: {', '.join(made.missing)}")
    if made.interrupted:
        found.append("interrupted: this is the best plan found so far")
    return found
