"""`penstock list`, `show` and `check`: families, and schedules drawn, written and validated."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.arguments import plural, printable
from penstock.cli.options import (
    PARSE_SEND_MODEL,
    SEND_MODELS,
    AsJson,
    GraphSizes,
    Lowered,
    Lowering,
    ScheduleSource,
    SendBudgetOption,
    TorchVersion,
    choice,
    costs_from,
    schedule_from,
)
from penstock.cli.rendering import print_json, require_writable, say_written
from penstock.errors import FormatError
from penstock.families import families
from penstock.formats import dumps, write_bytes
from penstock.ir.schedule import Schedule
from penstock.service import TIMELINE_FORMATS, check_record, family_records, is_file, order_of, render
from penstock.simulation.simulator import simulate
from penstock.validation import SendModel, report, validate
from penstock.view.grid import grid, unit_time
from penstock.view.kinds import sizes_text, stage_unit_text
from penstock.view.terminal import terminal


def list_families(*, as_json: AsJson = False) -> None:
    """
    Examples:
      penstock list
      penstock list --json
    """
    if as_json:
        return print_json(family_records())
    known = families().values()
    width = max(len(family.name) for family in known)
    typer.echo(f"{'name':<{width}}  stages per rank  description")
    for family in known:
        stages = "any" if family.stages_per_rank is None else str(family.stages_per_rank)
        typer.echo(f"{family.name:<{width}}  {stages:<15}  {family.summary}")
    return None


_SUFFIXES = ("csv", "json", "svg", "png", "html")
_FORMATS = ("grid", *_SUFFIXES, "trace")


def show(
    schedule: ScheduleSource,
    *,
    sizes: GraphSizes,
    lowering: Lowering,
    output_format: Annotated[
        str | None,
        choice("--format", _FORMATS, "Output format; by default from the suffix of -o, else grid.", short="-f"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Output file; written completely or not at all."),
    ] = None,
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
    require_writable(output)
    shown = schedule_from(schedule, sizes, lowering)
    width = shutil.get_terminal_size().columns
    if chosen == "grid" and output is None:
        Console(highlight=False, width=width).print(_grid(shown, lowering.costs, width), soft_wrap=True)
    elif output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(_content(shown, chosen, lowering.costs, width))
    else:
        write_bytes(_content(shown, chosen, lowering.costs, width), output)
        say_written(output, more=f": {printable(shown.name)}, {sizes_text(shown)}")
    if not is_file(schedule):
        return
    if errors := validate(shown):
        count = plural(len(errors), "error")
        typer.echo(f"penstock: {schedule} has {count}; run: penstock check {schedule}", err=True)
        raise typer.Exit(1)
    if chosen == "grid" and output is None:
        typer.echo(f"order: {order_of(shown)}")


def _choose_format(requested: str | None, output: Path | None) -> str:
    suffix = output.suffix.lower()[1:] if output is not None else ""
    by_suffix = suffix if suffix in _SUFFIXES else None
    if requested and by_suffix and requested != by_suffix and (requested, by_suffix) != ("trace", "json"):
        raise typer.BadParameter(f"--format {requested} does not match the file {output}")
    if output is not None and not (requested or by_suffix):
        suffixes = ".csv, .json, .svg, .png or .html"
        raise typer.BadParameter(f"{output} does not end in {suffixes}; give --format, or change the suffix")
    return requested or by_suffix or "grid"


def _content(schedule: Schedule, chosen: str, costs: str | None, width: int) -> bytes:
    if chosen in TIMELINE_FORMATS:
        return render(chosen, [simulate(schedule, costs_from(costs), with_period=True)])
    if chosen == "grid":
        return f"{_grid(schedule, costs, width).plain}\n".encode()
    return dumps(schedule, chosen).encode()


def _grid(schedule: Schedule, costs: str | None, width: int) -> Text:
    counts = _counts(schedule, f" ({schedule.placement.style})")
    header = f"{printable(schedule.name)}: {counts}, {schedule.level}"
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


def _counts(schedule: Schedule, style: str = "") -> str:
    stages = f"{plural(schedule.num_stages, 'stage')}{style}"
    return f"{plural(schedule.num_ranks, 'rank')}, {stages}, {plural(schedule.microbatches, 'microbatch')}"


def check(
    schedule: ScheduleSource,
    *,
    sizes: GraphSizes,
    lowered: Lowered = False,
    torch: TorchVersion = None,
    send_budget: SendBudgetOption = None,
    send_model: Annotated[
        SendModel,
        typer.Option(
            "--send-model",
            help=f"The strictest send model to check: {SEND_MODELS}.",
            metavar="MODEL",
            **PARSE_SEND_MODEL,
        ),
    ] = SendModel.RENDEZVOUS,
    as_json: AsJson = False,
) -> None:
    """Exit code 0: valid. 1: invalid, or not a schedule. 2: no such file, or wrong usage.

    Examples:
      penstock check mine.csv
      penstock check mine.json --json
      penstock check deferred.csv --send-model edge-streams
      penstock check zbv -p 4 -m 8 --lowered --torch 2.15 --send-budget 2
    """
    try:
        checked = schedule_from(schedule, sizes, Lowering(lowered, torch, send_budget))
    except FormatError as error:
        if not as_json:
            raise
        print_json({"file": schedule, "valid": False, "unreadable": error.problems, "violations": []})
        raise typer.Exit(1) from None
    violations = validate(checked, send_model)
    if as_json:
        print_json({"file": schedule, **check_record(checked, violations)})
    elif violations:
        typer.echo(report(checked, violations))
        typer.echo(f"\n{schedule}: {plural(len(violations), 'error')}")
    else:
        models = ", ".join(str(model) for model in SendModel if model <= send_model)
        counts = f"{_counts(checked)}, {plural(checked.num_steps, 'action')}, {checked.level}"
        typer.echo(f"{schedule}: valid ({counts}); no deadlock under send models {models}")
        typer.echo(f"order: {order_of(checked)}")
    raise typer.Exit(1 if violations else 0)
