"""`penstock export`: write the files and flags with which another trainer runs a schedule."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.cli.inputs import Sizes, schedule_from
from penstock.cli.options import FamilyStages, Group, Microbatches, Ranks, ScheduleSource
from penstock.cost.estimate.config_files import read_config
from penstock.integrations import export_megatron, export_torchtitan
from penstock.planning.layout import PipelineLayout, even_layout, layout_of_counts
from penstock.planning.layout_text import parse_layout

__all__ = ["export"]


class Trainer(str, Enum):
    """The trainers that schedules are exported to."""

    torchtitan = "torchtitan"
    megatron = "megatron"


TrainerName: TypeAlias = Annotated[Trainer, typer.Argument(metavar="TRAINER", help="torchtitan or megatron.")]
Layers: TypeAlias = Annotated[
    int | None, typer.Option("--layers", min=1, help="The model's layers, distributed evenly over the stages.")
]
LayoutText: TypeAlias = Annotated[
    str | None, typer.Option("--layout", metavar="TEXT", help="The layers of each stage, e.g. 'Et*3|t*4L'.")
]
ModelFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--model", metavar="FILE", help="The model's config.json, which has its number of layers."),
]
MicrobatchSize: TypeAlias = Annotated[
    int, typer.Option("--microbatch-size", min=1, help="The samples of a microbatch.")
]
Directory: TypeAlias = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write the files to this directory.")
]


def export(
    trainer: TrainerName,
    schedule: ScheduleSource,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: FamilyStages = None,
    group: Group = None,
    layers: Layers = None,
    layout: LayoutText = None,
    model: ModelFile = None,
    microbatch_size: MicrobatchSize = 1,
    output: Directory = None,
) -> None:
    """Export a schedule to torchtitan or Megatron: its files, its flags, or why the trainer cannot run it.

    Examples:
      penstock export torchtitan mine.csv --layers 32 -o out
      penstock export torchtitan mine.csv --model config.json -o out
      penstock export torchtitan zbv -p 4 -m 8 --layout 'Et*3|(t*4|)*6,t*5L'
      penstock export megatron interleaved-1f1b -p 4 -m 16 -v 2 --group 8 --layers 30
    """
    chosen = schedule_from(schedule, Sizes(ranks, microbatches, stages_per_rank, group))
    parts = _layout(layers, layout, model, chosen.num_stages)
    if trainer is Trainer.torchtitan:
        made = export_torchtitan(chosen, parts, microbatch_size, str(output or ""))
    else:
        made = export_megatron(chosen, parts, microbatch_size)
    typer.echo("\n".join(made.flags))
    for note in made.notes:
        typer.echo(f"# {note}")
    if output is not None:
        made.write(output)
        typer.echo(f"# wrote {', '.join(str(output / name) for name in made.files)}")


def _layout(layers: int | None, layout: str | None, model: Path | None, stages: int) -> PipelineLayout:
    if layers is None and layout is None and model is None:
        raise typer.BadParameter("give --layers, the number of layers of the model, or --model or --layout")
    predictions = None
    if model is not None:
        config = read_config(model)
        if layers not in (None, config.layers):
            raise typer.BadParameter(f"--layers is {layers}, but {model} has {config.layers} layers")
        layers, predictions = config.layers, config.mtp_layers
    if layout is not None:
        return parse_layout(layout, layers, mtp_layers=predictions)
    assert layers is not None
    even = even_layout(layers, stages)
    counts = [len(stage.layers) for stage in even]
    return layout_of_counts(counts, [0] * (stages - 1) + [predictions]) if predictions else even
