"""`penstock show`: build or read a schedule and draw it, print it, or write it to a file."""

from __future__ import annotations

import shutil
import sys
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.arguments import printable
from penstock.cli.source import (
    CostsFrom,
    Lowered,
    Microbatches,
    Ranks,
    Source,
    StagesPerRank,
    costs_from,
    is_file,
    schedule_from,
)
from penstock.formats import dumps, write_bytes
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.validation import validate
from penstock.view.grid import grid, unit_time
from penstock.view.terminal import terminal

__all__ = ["show"]


class Format(str, Enum):
    """How to show a schedule."""

    grid = "grid"
    csv = "csv"
    json = "json"
    svg = "svg"
    png = "png"
    html = "html"
    trace = "trace"


_PICTURES = (Format.svg, Format.png, Format.html, Format.trace)


def show(
    schedule: Source,
    *,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    lowered: Lowered = False,
    costs: CostsFrom = None,
    output_format: Annotated[
        Format | None,
        typer.Option("--format", "-f", help="How to show it; a grid unless the file of -o says otherwise."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write it to a file, whole or not at all."),
    ] = None,
) -> None:
    """Show a schedule: a family built for these numbers, or a file.

    Pictures other than the grid, and the grid with --costs, have time: the schedule is simulated.

    Examples:
      penstock show 1f1b --ranks 4 --microbatches 8
      penstock show interleaved-1f1b -p 4 -m 8 -v 2 --lowered
      penstock show zbv -p 4 -m 8 -o zbv.csv
      penstock show zbv.csv --costs costs.toml -o zbv.html
    """
    chosen = _format_of(output_format, output)
    made = schedule_from(schedule, ranks, microbatches, stages_per_rank)
    if lowered:
        made = lower(made)
    width = shutil.get_terminal_size().columns
    if chosen is Format.grid and output is None:
        Console(highlight=False, width=width).print(_grid(made, costs, width), soft_wrap=True)
    else:
        _put(_bytes(made, chosen, costs, width), output)
    if is_file(schedule) and (faults := validate(made)):
        typer.echo(f"penstock: {schedule} has faults ({len(faults)}): penstock check {schedule}", err=True)
        raise typer.Exit(1)


def _format_of(asked: Format | None, output: Path | None) -> Format:
    ending = output.suffix.lower()[1:] if output is not None else ""
    by_ending = Format(ending) if ending in ("csv", "json", "svg", "png", "html") else None
    if asked is Format.trace and by_ending is Format.json:
        return asked
    if asked and by_ending and asked is not by_ending:
        raise typer.BadParameter(f"--format {asked.value} does not go with the file {output}")
    if output is not None and not (asked or by_ending):
        endings = ".csv, .json, .svg, .png or .html"
        raise typer.BadParameter(f"{output} does not end in {endings}; say --format, or change the ending")
    return asked or by_ending or Format.grid


def _bytes(schedule: Schedule, chosen: Format, costs: str | None, width: int) -> bytes:
    if chosen in _PICTURES:
        return draw(chosen.value, [simulate(schedule, costs_from(costs))])
    if chosen is Format.grid:
        return f"{_grid(schedule, costs, width).plain}\n".encode()
    return dumps(schedule, chosen.value).encode()


def draw(chosen: str, timelines: list[Timeline]) -> bytes:
    """The picture of timelines in one of the formats that have time."""
    name = "perfetto" if chosen == "trace" else chosen
    module = import_module(f"penstock.view.{name}")  # only when asked for: most commands draw nothing
    drawn: str | bytes = getattr(module, chosen)(timelines)
    return drawn.encode() if isinstance(drawn, str) else drawn


def _put(content: bytes, output: Path | None) -> None:
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
    else:
        write_bytes(content, output)


def _grid(schedule: Schedule, costs: str | None, width: int) -> Text:
    counted = (
        f"{printable(schedule.name)}: {schedule.num_ranks} ranks, {schedule.num_stages} stages "
        f"({schedule.placement.style}), {schedule.microbatches} microbatches, {schedule.level}"
    )
    if costs is not None:
        timeline = simulate(schedule, costs_from(costs))
        below = f"\n\n{timeline.makespan:g} seconds, {timeline.bubble_rate:.1%} of it idle"
        return Text.assemble(f"{counted}\n\n", terminal(timeline, width), below)
    below = ""
    if schedule.level == "compute" and schedule.num_steps and (times := unit_time(schedule)):
        starts, ends = times
        length, work = max(ends), sum(ends) - sum(starts)
        idle = 1 - work / (length * schedule.num_ranks)
        below = f"\n\n{length} units of time (F, I, W: 1, B: 2, hops free), {idle:.1%} of it idle"
    return Text.assemble(f"{counted}\n\n", grid(schedule, width), below)
