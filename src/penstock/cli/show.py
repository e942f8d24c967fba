"""`penstock show`: build or read a schedule and draw it, print it, or write it to a file."""

from __future__ import annotations

import shutil
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.text import Text

from penstock.arguments import plural, printable
from penstock.cli.inputs import GraphSizes, Lowering, costs_from, is_file, schedule_from
from penstock.cli.options import ScheduleSource
from penstock.cli.rendering import TIMELINE_FORMATS, render, require_writable, say_written
from penstock.formats import dumps, write_bytes
from penstock.ir.schedule import Schedule
from penstock.records import order_of
from penstock.simulation.simulator import simulate
from penstock.validation import validate
from penstock.view.grid import grid, unit_time
from penstock.view.kinds import sizes_text, stage_unit_text
from penstock.view.terminal import terminal


class Format(str, Enum):
    """The output formats."""

    grid = "grid"
    csv = "csv"
    json = "json"
    svg = "svg"
    png = "png"
    html = "html"
    trace = "trace"


_SUFFIXES = ("csv", "json", "svg", "png", "html")


FormatOption: TypeAlias = Annotated[
    Format | None,
    typer.Option("--format", "-f", help="Output format; by default from the suffix of -o, else grid."),
]
OutputFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Output file; written completely or not at all."),
]


def show(
    schedule: ScheduleSource,
    *,
    sizes: GraphSizes,
    lowering: Lowering,
    output_format: FormatOption = None,
    output: OutputFile = None,
) -> None:
    """With --costs, and in the formats svg, png, html and trace, the schedule is simulated and drawn over time.

    Examples:
      penstock show 1f1b --ranks 4 --microbatches 8
      penstock show interleaved-1f1b -p 4 -m 8 -v 2 --lowered
      penstock show interleaved-1f1b -p 4 -m 16 --group 8
      penstock show 1f1b -p 3 -m 8 --graph '0>1,1>2,0>2'
      penstock show zbv -p 4 -m 8 -o zbv.csv
      penstock show zbv.csv --costs costs.toml -o zbv.html
    """
    chosen = _choose_format(output_format, output)
    if output is not None:
        require_writable(output)
    shown = schedule_from(schedule, sizes, lowering)
    width = shutil.get_terminal_size().columns
    if chosen is Format.grid and output is None:
        Console(highlight=False, width=width).print(_grid(shown, lowering.costs, width), soft_wrap=True)
    else:
        _write(_content(shown, chosen, lowering.costs, width), output, shown)
    if not is_file(schedule):
        return
    if errors := validate(shown):
        count = plural(len(errors), "error")
        typer.echo(f"penstock: {schedule} has {count}; run: penstock check {schedule}", err=True)
        raise typer.Exit(1)
    if chosen is Format.grid and output is None:
        typer.echo(f"order: {order_of(shown)}")


def _choose_format(requested: Format | None, output: Path | None) -> Format:
    suffix = output.suffix.lower()[1:] if output is not None else ""
    by_suffix = Format(suffix) if suffix in _SUFFIXES else None
    if requested is Format.trace and by_suffix is Format.json:
        return requested
    if requested and by_suffix and requested is not by_suffix:
        raise typer.BadParameter(f"--format {requested.value} does not match the file {output}")
    if output is not None and not (requested or by_suffix):
        suffixes = ".csv, .json, .svg, .png or .html"
        raise typer.BadParameter(f"{output} does not end in {suffixes}; give --format, or change the suffix")
    return requested or by_suffix or Format.grid


def _content(schedule: Schedule, chosen: Format, costs: str | None, width: int) -> bytes:
    if chosen.value in TIMELINE_FORMATS:
        return render(chosen.value, [simulate(schedule, costs_from(costs), with_period=True)])
    if chosen is Format.grid:
        return f"{_grid(schedule, costs, width).plain}\n".encode()
    return dumps(schedule, chosen.value).encode()


def _write(content: bytes, output: Path | None, schedule: Schedule) -> None:
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
    else:
        write_bytes(content, output)
        say_written(output, more=f": {printable(schedule.name)}, {sizes_text(schedule)}")


def _grid(schedule: Schedule, costs: str | None, width: int) -> Text:
    header = (
        f"{printable(schedule.name)}: {plural(schedule.num_ranks, 'rank')}, "
        f"{plural(schedule.num_stages, 'stage')} ({schedule.placement.style}), "
        f"{plural(schedule.microbatches, 'microbatch')}, {schedule.level}"
    )
    if costs is not None:
        timeline = simulate(schedule, costs_from(costs))
        makespan = timeline.costs.units.time(timeline.makespan)
        footer = f"\n\nmakespan {makespan}, {timeline.bubble_rate:.1%} idle"
        return Text.assemble(f"{header}\n\n", terminal(timeline, width), footer)
    footer = ""
    if schedule.level == "compute" and schedule.num_steps and (times := unit_time(schedule)):
        starts, ends = times
        length, busy = max(ends), sum(ends) - sum(starts)
        idle = 1 - busy / (length * schedule.num_ranks)
        footer = f"\n\nmakespan {plural(length, 'unit')} (F, I, W: 1, B: 2, communication: 0), {idle:.1%} idle"
        footer += f"\n{note}" if (note := stage_unit_text(schedule)) else ""
    return Text.assemble(f"{header}\n\n", grid(schedule, width), footer)
