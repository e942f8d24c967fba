"""`penstock check`: say whether a schedule in a file is right, and if not, everything that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.source import checked_sends, read_schedule
from penstock.errors import FormatError
from penstock.ir.schedule import Schedule
from penstock.validation import MODELS, Violation, report, validate

__all__ = ["check"]


def check(
    file: Annotated[Path, typer.Argument(help="A .csv or .json file.")],
    *,
    sends: Annotated[
        str,
        typer.Option(help=f"The strictest way of sending to prove it for: {', '.join(MODELS)}.", metavar="HOW"),
    ] = MODELS[-1],
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Check a schedule: every rule, and deadlock under every way of sending.

    Exit code 0 when it is right, 1 when it is not or is no schedule, 2 when there is no such file.

    Examples:
      penstock check mine.csv
      penstock check mine.json --json
      penstock check deferred.csv --sends edge-streams
    """
    checked_sends(sends)
    try:
        schedule = read_schedule(file)
    except FormatError as error:
        if not as_json:
            raise
        typer.echo(
            json.dumps({"file": str(file), "valid": False, "unreadable": error.problems, "violations": []})
        )
        raise typer.Exit(1) from None
    violations = validate(schedule, sends)
    if as_json:
        typer.echo(json.dumps(_answer(file, schedule, violations), indent=2))
    elif violations:
        typer.echo(report(schedule, violations))
        typer.echo(f"\n{file}: {len(violations)} fault{'s' * (len(violations) > 1)}")
    else:
        proved = ", ".join(MODELS[: MODELS.index(sends) + 1])
        typer.echo(f"{file}: right ({_counts(schedule)}); no deadlock with sends {proved}")
    raise typer.Exit(1 if violations else 0)


def _counts(schedule: Schedule) -> str:
    return (
        f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.microbatches} microbatches, "
        f"{schedule.num_steps} steps, {schedule.level}"
    )


def _answer(file: Path, schedule: Schedule, violations: list[Violation]) -> dict[str, Any]:
    return {
        "file": str(file),
        "valid": not violations,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.microbatches,
        "level": schedule.level,
        "violations": [
            {
                "code": v.code,
                "rank": v.rank,
                "step": v.step,
                "action": None if v.action is None else str(v.action),
                "message": v.message,
                "suggestion": v.suggestion,
                "models": v.models,
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
