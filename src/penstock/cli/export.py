"""`penstock export`: write the files and flags with which another trainer runs a schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from penstock.arguments import plural
from penstock.cli.estimate import config_from
from penstock.cli.options import ScheduleSource, Sizes, choice, completing, one_of, schedule_from
from penstock.cli.rendering import require_folder
from penstock.cost.estimate.model_config import ModelConfig, known_models
from penstock.planning.layout import PipelineLayout, even_layout, layout_of_counts, parse_layout
from penstock.trainers import export_megatron, export_torchtitan
from penstock.trainers.torchtitan import VERSIONS

_TRAINERS = ("torchtitan", "megatron")


def export(
    trainer: Annotated[
        str,
        typer.Argument(metavar="|".join(_TRAINERS), help="The trainer.", **one_of("TRAINER", _TRAINERS)),
    ],
    schedule: ScheduleSource,
    *,
    sizes: Sizes,
    layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="The model's layers, distributed evenly over the stages."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", metavar="TEXT", help="The layers of each stage, e.g. 'Et*3|t*4L'.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FILE|NAME",
            help="The model's config.json, or its name, such as llama-3-8b, for the number of its layers.",
            autocompletion=completing(known_models),
        ),
    ] = None,
    microbatch_size: Annotated[
        int, typer.Option("--microbatch-size", min=1, help="The samples of a microbatch.")
    ] = 1,
    version: Annotated[
        str | None,
        choice(
            "--trainer-version",
            list(VERSIONS),
            "The version of torchtitan; by default the installed one, else the newest of these.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write the files to this directory.")
    ] = None,
) -> None:
    """
    Examples:
      penstock export torchtitan mine.csv --layers 32 -o out
      penstock export torchtitan mine.csv --model llama-3-8b -o out
      penstock export torchtitan mine.csv --model config.json -o out
      penstock export torchtitan zbv -p 4 -m 8 --layout 'Et*3|(t*4|)*6,t*5L' --trainer-version 0.2.2
      penstock export megatron interleaved-1f1b -p 4 -m 16 -v 2 --group 8 --layers 30
    """
    if version is not None and trainer != "torchtitan":
        raise typer.BadParameter(f"--trainer-version is a version of torchtitan; leave it out for {trainer}")
    require_folder(output)
    chosen = schedule_from(schedule, sizes)
    config = None if model is None else config_from(model)
    notes = []
    if trainer == "torchtitan" and config is not None and config.mtp_layers:
        notes.append(f"torchtitan runs no MTP layers in pipelines: left out of {config.name}")
        config = replace(config, mtp_layers=0)
    parts = _layout(layers, layout, config, chosen.num_stages)
    if trainer == "torchtitan":
        made = export_torchtitan(chosen, parts, microbatch_size, str(output or ""), config, version)
    else:
        made = export_megatron(chosen, parts, microbatch_size)
    if output is not None:
        made.write(output)
    typer.echo("\n".join(made.flags))
    for note in [*made.notes, *notes]:
        typer.echo(f"# {note}")
    if output is not None:
        typer.echo(f"# wrote {', '.join(str(output / name) for name in made.files)}")


def _layout(layers: int | None, layout: str | None, config: ModelConfig | None, stages: int) -> PipelineLayout:
    if layers is None and layout is None and config is None:
        raise typer.BadParameter("give --layers, the number of layers of the model, or --model or --layout")
    predictions = None
    if config is not None:
        if layers not in (None, config.layers):
            raise typer.BadParameter(
                f"--layers is {layers}, but {config.name} has {plural(config.layers, 'layer')}"
            )
        layers, predictions = config.layers, config.mtp_layers
    if layout is not None:
        return parse_layout(layout, layers, mtp_layers=predictions)
    assert layers is not None
    even = even_layout(layers, stages)
    counts = [len(stage.layers) for stage in even]
    return layout_of_counts(counts, [0] * (stages - 1) + [predictions]) if predictions else even
