"""`penstock show`: build or read a schedule and print it, or write it to a file."""

from __future__ import annotations

import shutil
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock.cli.files import read_schedule
from penstock.families import build
from penstock.formats import dumps, write_text
from penstock.given import printable
from penstock.lowering import lower
from penstock.schedule import Schedule
from penstock.validation import validate
from penstock.view.grid import grid, unit_time

__all__ = ["show"]


class Format(str, Enum):
    """How to print a schedule."""

    grid = "grid"
    csv = "csv"
    json = "json"


def show(
    schedule: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A family (see penstock list), or a .csv or .json file.")
    ],
    *,
    ranks: Annotated[int | None, typer.Option("--ranks", "-p", help="How many ranks.")] = None,
    microbatches: Annotated[
        int | None, typer.Option("--microbatches", "-m", help="How many microbatches.")
    ] = None,
    stages_per_rank: Annotated[
        int | None, typer.Option("--stages-per-rank", "-v", help="How many stages each rank holds.")
    ] = None,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="With communication, sharding and gradient reduction.")
    ] = False,
    output_format: Annotated[
        Format | None,
        typer.Option("--format", "-f", help="How to print it; a grid unless the file of -o says otherwise."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write it to a file, whole or not at all."),
    ] = None,
) -> None:
    """Show a schedule: a family built for these numbers, or a file.

    Examples:
      penstock show 1f1b --ranks 4 --microbatches 8
      penstock show interleaved-1f1b -p 4 -m 8 -v 2 --lowered
      penstock show zbv -p 4 -m 8 -o zbv.csv
      penstock show zbv.csv --format json
    """
    chosen = _format_of(output_format, output)
    numbers = {"--ranks": ranks, "--microbatches": microbatches, "--stages-per-rank": stages_per_rank}
    made = _from_file(schedule, numbers) if _is_file(schedule) else _from_family(schedule, numbers)
    if lowered:
        made = lower(made)
    width = shutil.get_terminal_size().columns
    if chosen is Format.grid and output is None:
        Console(highlight=False, width=width).print(_picture(made, width), soft_wrap=True)
    else:
        text = f"{_picture(made, width).plain}\n" if chosen is Format.grid else dumps(made, chosen.value)
        if output is None:
            sys.stdout.write(text)
        else:
            write_text(text, output)
    if _is_file(schedule) and (faults := validate(made)):
        typer.echo(f"penstock: {schedule} has faults ({len(faults)}): penstock check {schedule}", err=True)
        raise typer.Exit(1)


def _format_of(asked: Format | None, output: Path | None) -> Format:
    ending = output.suffix.lower()[1:] if output is not None else ""
    by_ending = Format(ending) if ending in ("csv", "json") else None
    if asked and by_ending and asked is not by_ending:
        raise typer.BadParameter(f"--format {asked.value} does not go with the file {output}")
    if output is not None and not (asked or by_ending):
        raise typer.BadParameter(
            f"{output} ends neither in .csv nor in .json; say --format, or change the ending"
        )
    return asked or by_ending or Format.grid


def _is_file(schedule: str) -> bool:
    path = Path(schedule)
    return path.suffix.lower() in (".csv", ".json") or "/" in schedule or (path.suffix != "" and path.exists())


def _from_file(path: str, numbers: dict[str, int | None]) -> Schedule:
    if given := [option for option, number in numbers.items() if number is not None]:
        raise typer.BadParameter(f"{path} is a file and has its own numbers; drop {' and '.join(given)}")
    return read_schedule(Path(path))


def _from_family(name: str, numbers: dict[str, int | None]) -> Schedule:
    ranks, microbatches, stages_per_rank = numbers.values()
    if ranks is None or microbatches is None:
        missing = [option for option in ("--ranks", "--microbatches") if numbers[option] is None]
        example = f"penstock show {name} --ranks 4 --microbatches 8"
        raise typer.BadParameter(f"to build {name}, say {' and '.join(missing)}, as in: {example}")
    return build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)


def _picture(schedule: Schedule, width: int) -> Text:
    counted = (
        f"{printable(schedule.name)}: {schedule.num_ranks} ranks, {schedule.num_stages} stages "
        f"({schedule.placement.style}), {schedule.microbatches} microbatches, {schedule.level}"
    )
    below = ""
    if schedule.level == "compute" and schedule.num_steps and (times := unit_time(schedule)):
        starts, ends = times
        length, work = max(ends), sum(ends) - sum(starts)
        idle = 1 - work / (length * schedule.num_ranks)
        below = f"\n\n{length} units of time (F, I, W: 1, B: 2, hops free), {idle:.1%} of it idle"
    return Text.assemble(f"{counted}\n\n", grid(schedule, width), below)
