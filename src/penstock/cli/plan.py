"""`penstock plan`: choose partition, placement, microbatches and schedule for a model and its devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

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
    CommonArguments,
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
    job_request,
)
from penstock.cli.plan_job_report import JobOutput, render_frontier, report_job
from penstock.cli.plan_report import plan_record, print_plan
from penstock.cli.progress import search_progress
from penstock.cli.rendering import require_suffix, say_written
from penstock.errors import FormatError
from penstock.formats import write_bytes
from penstock.planning import Model, read_model
from penstock.planning import plan as make_plan
from penstock.planning.explanation import explain
from penstock.planning.technique_text import TECHNIQUES

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
Techniques: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--techniques",
        metavar="LIST",
        help="Also offer plans with these: recompute (stages), offload (activations to the host), or both: "
        "recompute,offload.",
    ),
]
RowCount: TypeAlias = Annotated[int, typer.Option("--top", min=1, help="Number of rows to print.")]
PlotFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Plot memory against time: .svg, .png or .html."),
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
    techniques: Techniques = None,
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
      penstock plan config.json --devices 64 --batch 256 --techniques offload --jitter 0.05 -o frontier.html
      penstock plan examples/models/llama-70b.toml --memory 28GB --techniques recompute,offload
    """
    if output is not None:
        require_suffix(output, (".svg", ".png", ".html"), advice="; --write DIR writes the schedule")
    job = JobArguments(
        *(devices, device_name, sequence, tensor, context, expert),
        *(microbatch_size, precision, zero, recompute, budget),
    )
    chosen = _parse_techniques(techniques)
    if is_job(model, job):
        unused = {"--stages-per-rank": stages_per_rank}
        unused |= {"--objective": None if objective is Objective.makespan else objective}
        common = CommonArguments(
            *(ranks, memory, batch, jitter, quantile, seed),
            techniques=tuple(chosen),
            search=seconds > 0,
        )
        output_of = JobOutput(explained, top, output, folder, as_json)
        report_job(job_request(model, job, common, unused), output_of)
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
            recompute="recompute" in chosen,
            offload="offload" in chosen,
            on_progress=on_progress,
        )
        why = explain(made, on_progress) if explained else None
    if output is not None:
        write_bytes(render_frontier(made, output), output)
    written = made.write(folder) if folder is not None else []
    if as_json:
        typer.echo(json.dumps(plan_record(made, why), indent=2))
    else:
        print_plan(made, why, top)
    say_written(*([output] if output is not None else []), *written, as_json=as_json)


def _parse_techniques(text: str | None) -> list[str]:
    names = [] if text is None else text.split(",")
    if unknown := [name for name in names if name not in TECHNIQUES]:
        raise typer.BadParameter(f"--techniques are {', '.join(TECHNIQUES)} (given {printable(unknown[0])})")
    return names


def _read_model(source: str) -> Model:
    try:
        return read_model(source)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None
