"""`penstock check`: validate the schedule in a file, or of a family, and report every error."""

from __future__ import annotations

import json
from typing import Annotated, TypeAlias

import typer

from penstock.arguments import plural
from penstock.cli.inputs import GraphSizes, Lowering, schedule_from
from penstock.cli.options import (
    SEND_MODELS,
    AsJson,
    Lowered,
    ScheduleSource,
    parse_send_model,
)
from penstock.errors import FormatError
from penstock.ir.schedule import Schedule
from penstock.records import check_record, order_of
from penstock.validation import SendModel, report, validate

StrictestSendModel: TypeAlias = Annotated[
    SendModel,
    typer.Option(
        help=f"The strictest send model to check: {SEND_MODELS}.",
        metavar="MODEL",
        parser=parse_send_model,
    ),
]


def check(
    schedule: ScheduleSource,
    *,
    sizes: GraphSizes,
    lowered: Lowered = False,
    send_model: StrictestSendModel = SendModel.RENDEZVOUS,
    as_json: AsJson = False,
) -> None:
    """Exit code 0: valid. 1: invalid, or not a schedule. 2: no such file, or wrong usage.

    Examples:
      penstock check mine.csv
      penstock check mine.json --json
      penstock check deferred.csv --send-model edge-streams
      penstock check zbv -p 4 -m 8 --lowered
    """
    try:
        checked = schedule_from(schedule, sizes, Lowering(lowered))
    except FormatError as error:
        if not as_json:
            raise
        answer = {"file": schedule, "valid": False, "unreadable": error.problems, "violations": []}
        typer.echo(json.dumps(answer))
        raise typer.Exit(1) from None
    violations = validate(checked, send_model)
    if as_json:
        typer.echo(json.dumps({"file": schedule, **check_record(checked, violations)}, indent=2))
    elif violations:
        typer.echo(report(checked, violations))
        typer.echo(f"\n{schedule}: {plural(len(violations), 'error')}")
    else:
        models = ", ".join(str(model) for model in SendModel if model <= send_model)
        typer.echo(f"{schedule}: valid ({_sizes(checked)}); no deadlock under send models {models}")
        typer.echo(f"order: {order_of(checked)}")
    raise typer.Exit(1 if violations else 0)


def _sizes(schedule: Schedule) -> str:
    return (
        f"{plural(schedule.num_ranks, 'rank')}, {plural(schedule.num_stages, 'stage')}, "
        f"{plural(schedule.microbatches, 'microbatch')}, "
        f"{plural(schedule.num_steps, 'step')}, {schedule.level}"
    )
