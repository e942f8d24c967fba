"""`penstock check`: validate the schedule in a file and report every error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from penstock.arguments import plural
from penstock.cli.inputs import read_schedule
from penstock.cli.options import SEND_MODELS, AsJson, parse_send_model
from penstock.errors import FormatError
from penstock.ir.schedule import Schedule
from penstock.records import check_record, order_of
from penstock.validation import SendModel, report, validate

__all__ = ["check"]


ScheduleFile: TypeAlias = Annotated[Path, typer.Argument(metavar="FILE", help="A .csv or .json file.")]
StrictestSendModel: TypeAlias = Annotated[
    SendModel,
    typer.Option(
        help=f"The strictest send model to check: {SEND_MODELS}.",
        metavar="MODEL",
        parser=parse_send_model,
    ),
]


def check(
    file: ScheduleFile,
    *,
    send_model: StrictestSendModel = SendModel.RENDEZVOUS,
    as_json: AsJson = False,
) -> None:
    """Check a schedule: every rule, and deadlock under every send model.

    Exit code 0: valid. 1: invalid, or not a schedule. 2: no such file, or wrong usage.

    Examples:
      penstock check mine.csv
      penstock check mine.json --json
      penstock check deferred.csv --send-model edge-streams
    """
    try:
        schedule = read_schedule(file)
    except FormatError as error:
        if not as_json:
            raise
        typer.echo(
            json.dumps({"file": str(file), "valid": False, "unreadable": error.problems, "violations": []})
        )
        raise typer.Exit(1) from None
    violations = validate(schedule, send_model)
    if as_json:
        typer.echo(json.dumps({"file": str(file), **check_record(schedule, violations)}, indent=2))
    elif violations:
        typer.echo(report(schedule, violations))
        typer.echo(f"\n{file}: {plural(len(violations), 'error')}")
    else:
        models = ", ".join(str(model) for model in SendModel if model <= send_model)
        typer.echo(f"{file}: valid ({_sizes(schedule)}); no deadlock under send models {models}")
        typer.echo(f"order: {order_of(schedule)}")
    raise typer.Exit(1 if violations else 0)


def _sizes(schedule: Schedule) -> str:
    return (
        f"{plural(schedule.num_ranks, 'rank')}, {plural(schedule.num_stages, 'stage')}, "
        f"{plural(schedule.microbatches, 'microbatch', 'microbatches')}, "
        f"{plural(schedule.num_steps, 'step')}, {schedule.level}"
    )
