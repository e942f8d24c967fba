"""`penstock check`: validate the schedule in a file and report every error."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from penstock.cli.inputs import order_of, read_schedule
from penstock.cli.options import SEND_MODELS, AsJson, parse_send_model
from penstock.errors import FormatError
from penstock.ir.schedule import Schedule
from penstock.validation import SendModel, Violation, report, validate

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
        typer.echo(json.dumps(_record(file, schedule, violations), indent=2))
    elif violations:
        typer.echo(report(schedule, violations))
        typer.echo(f"\n{file}: {len(violations)} error{'s' * (len(violations) > 1)}")
    else:
        models = ", ".join(str(model) for model in SendModel if model <= send_model)
        typer.echo(f"{file}: valid ({_sizes(schedule)}); no deadlock under send models {models}")
        typer.echo(f"order: {order_of(schedule)}")
    raise typer.Exit(1 if violations else 0)


def _sizes(schedule: Schedule) -> str:
    return (
        f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.microbatches} microbatches, "
        f"{schedule.num_steps} steps, {schedule.level}"
    )


def _order_record(schedule: Schedule) -> dict[str, Any] | None:
    order = order_of(schedule)
    return None if isinstance(order, str) else asdict(order)


def _record(file: Path, schedule: Schedule, violations: list[Violation]) -> dict[str, Any]:
    return {
        "file": str(file),
        "valid": not violations,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.microbatches,
        "level": schedule.level,
        "order": None if violations else _order_record(schedule),
        "violations": [
            {
                "code": v.code,
                "rank": v.rank,
                "step": v.step,
                "action": None if v.action is None else str(v.action),
                "message": v.message,
                "suggestion": v.suggestion,
                "send_models": [str(model) for model in v.send_models],
                "cycle": [
                    {
                        "rank": w.rank,
                        "step": w.step,
                        "action": str(w.action),
                        "waits_for": {"rank": w.for_rank, "step": w.for_step, "action": str(w.for_action)},
                        "why": w.why,
                    }
                    for w in v.cycle
                ],
            }
            for v in violations
        ],
    }
