"""`penstock plan`: choose partition, placement, microbatches and schedule for a model and its devices."""

from __future__ import annotations

import json
from typing import Annotated, TypeAlias

import typer

from penstock.cli.estimate import complete_model
from penstock.cli.options import parse_stages, quantile_from
from penstock.cli.plan_job import JobArguments, is_job, job_request
from penstock.cli.plan_job_report import render_frontier, report_job
from penstock.cli.plan_options import PlanArguments, PlanOutput
from penstock.cli.plan_report import plan_record, print_plan
from penstock.cli.rendering import require_folder, require_suffix, say_written, search_progress
from penstock.errors import FormatError
from penstock.formats import write_bytes
from penstock.planning import Model, read_model
from penstock.planning import plan as make_plan
from penstock.planning.explanation import explain

ModelFile: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="FILE|MODEL",
        help="Costs of layers or of profiled stages (.toml or .json), a model's config.json, or its name.",
        autocompletion=complete_model,
    ),
]


def plan(
    model: ModelFile,
    *,
    arguments: PlanArguments,
    output: PlanOutput,
    job: JobArguments,
) -> None:
    """From a model config: also tensor, context, expert, pipeline and data parallel sizes for all devices.
    Ctrl-C stops the search and keeps the best plan found so far.

    Examples:
      penstock plan examples/models/llama-8b.toml
      penstock plan model.toml -p 16 --memory 80GB --batch 128 --explain
      penstock plan model.toml --jitter 0.05 --quantile 0.95 --json
      penstock plan model.toml -o frontier.svg --write best/
      penstock plan llama-3-70b --devices 512 --device h100 --batch 1024 --seq 8192 --explain
      penstock plan config.json --devices 64 --batch 256 --schedules 1f1b,interleaved-1f1b --write best/
      penstock plan config.json --devices 64 --batch 256 --techniques offload --jitter 0.05 -o frontier.html
      penstock plan examples/models/llama-70b.toml --memory 28GB --techniques recompute,offload
    """
    if output.picture is not None:
        require_suffix(output.picture, (".svg", ".png", ".html"), advice="; --write DIR writes the schedule")
    if output.folder is not None:
        require_folder(output.folder)
    arguments.check()
    if is_job(model, job):
        report_job(job_request(model, job, arguments), output)
    else:
        _plan_model(_read_model(model), arguments, output)


def _plan_model(model: Model, arguments: PlanArguments, output: PlanOutput) -> None:
    """Plan a model with costs of layers or stages, and print and write the plan."""
    stages, techniques = arguments.stages_per_rank, arguments.chosen_techniques
    with search_progress(model.units) as on_progress:
        made = make_plan(
            model,
            ranks=arguments.ranks,
            memory_limit=arguments.memory,
            samples=arguments.batch,
            stages_per_rank=None if stages is None else parse_stages(stages),
            objective=arguments.objective.value,
            seconds=arguments.seconds,
            seed=arguments.seed,
            jitter=arguments.jitter,
            quantile=quantile_from(arguments.quantile, arguments.jitter),
            recompute="recompute" in techniques,
            offload="offload" in techniques,
            on_progress=on_progress,
        )
        why = explain(made, on_progress) if output.explained else None
    if output.picture is not None:
        write_bytes(render_frontier(made, output.picture), output.picture)
    written = made.write(output.folder) if output.folder is not None else []
    if output.as_json:
        typer.echo(json.dumps(plan_record(made, why), indent=2))
    else:
        print_plan(made, why, output.top)
    pictures = [] if output.picture is None else [output.picture]
    say_written(*pictures, *written, as_json=output.as_json)


def _read_model(source: str) -> Model:
    try:
        return read_model(source)
    except FormatError as error:
        raise typer.BadParameter(str(error)) from None
