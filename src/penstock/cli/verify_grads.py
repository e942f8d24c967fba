"""`penstock verify-grads`: train somebody's model in one process and in pipelines, and compare."""

from __future__ import annotations

import json
import shutil
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from penstock.arguments import printable
from penstock.cli.source import (
    Microbatches,
    Ranks,
    StagesPerRank,
    families_beginning,
    is_file,
    schedule_from,
)
from penstock.families import families, find
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from penstock.runtime.verification import Deviation, Verdict

__all__ = ["verify_grads"]


def verify_grads(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="Gives model, loss, inputs, target; found as by python -m."
        ),
    ],
    schedules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME|FILE...", help="Families, or .csv or .json files.", autocompletion=families_beginning
        ),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Every family that has a backward.")] = False,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    steps: Annotated[int, typer.Option("--steps", "-k", help="How many steps to train.")] = 2,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", metavar="SHARE", help="The largest error that is allowed, such as 1e-4."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Verify gradients: train in one process and in pipelines on this machine's processors, and compare.

    The function returns the model (an nn.Sequential, or a decoder of transformers), the loss, the inputs and
    the target of one batch. Exit code 0 when all is equal, 1 when it is not, 2 when nothing can be compared.

    Examples:
      penstock verify-grads examples.train:parts 1f1b zbv -p 2 -m 4
      penstock verify-grads my_model:parts --all -p 2 -m 8 --steps 3
      penstock verify-grads my_model:parts mine.csv --tolerance 1e-6 --json
    """
    wanted = _wanted(schedules or [], ranks, microbatches, stages_per_rank, every=every)
    from penstock.runtime.verification import verdicts  # noqa: PLC0415 -- torch, which is an extra

    found: list[Verdict] = []
    errors = Console(stderr=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("starting", total=len(wanted))
        for verdict in verdicts(function, wanted, steps=steps, tolerance=tolerance):
            found.append(verdict)
            bar.update(task, advance=1, description=f"{printable(verdict.schedule)} done")
    if as_json:
        typer.echo(json.dumps(_answer(found), indent=2, allow_nan=False))
    else:
        _print(found)
    if all(verdict.refused for verdict in found):
        raise typer.Exit(2)
    raise typer.Exit(0 if all(verdict.equal for verdict in found) else 1)


def _wanted(
    names: list[str], ranks: int | None, microbatches: int | None, stages_per_rank: int | None, *, every: bool
) -> list[Schedule]:
    if every and names:
        raise typer.BadParameter("--all is every family: drop it, or the names")
    if every:
        names = [name for name in families() if name != "forward-only"]
    if not names:
        raise typer.BadParameter("say which schedules, as in: 1f1b zbv, or --all")
    if all(map(is_file, names)) and (ranks or microbatches or stages_per_rank):
        raise typer.BadParameter(
            "files have their own numbers; drop --ranks, --microbatches and --stages-per-rank"
        )
    found = []
    for name in names:
        if is_file(name):
            found.append(schedule_from(name, None, None, None))
        else:
            # a family with its own number of stages goes beside those that take the number asked for
            own = find(name).stages_per_rank is not None and len(names) > 1
            found.append(schedule_from(name, ranks, microbatches, None if own else stages_per_rank))
    return found


# --- the answer ------------------------------------------------------------------------------------


def _answer(found: list[Verdict]) -> dict[str, Any]:
    return {
        "equal": all(verdict.equal for verdict in found),
        "schedules": [
            {
                "schedule": verdict.schedule,
                "ranks": verdict.ranks,
                "stages": verdict.stages,
                "microbatches": verdict.microbatches,
                "equal": verdict.equal,
                "tolerance": verdict.tolerance,
                "loss_error": _number(verdict.loss),
                "norm_error": _number(verdict.norm),
                "worst_gradient": _deviation(verdict.gradient),
                "worst_parameter": _deviation(verdict.parameter),
                "refused": verdict.refused or None,
                "cause": verdict.cause or None,
            }
            for verdict in found
        ],
    }


def _number(error: float) -> float | None:
    """JSON has no infinity: null is an error that is no number."""
    return error if isfinite(error) else None


def _deviation(worst: Deviation | None) -> dict[str, Any] | None:
    if worst is None:
        return None
    return {"name": worst.name, "stage": worst.stage, "step": worst.step, "error": _number(worst.error)}


def _print(found: list[Verdict]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("schedule")
    for name in ("loss", "gradient", "norm", "parameters"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("worst gradient", overflow="fold")
    for verdict in found:
        said = "equal" if verdict.equal else "refused" if verdict.refused else "NOT EQUAL"
        errors = (verdict.loss, _error(verdict.gradient), verdict.norm, _error(verdict.parameter))
        numbers = ["-" if verdict.refused else f"{error:.1e}" for error in errors]
        name = "" if verdict.gradient is None else printable(verdict.gradient.name)
        table.add_row(
            Text(printable(verdict.schedule)),
            *map(Text, numbers),
            Text(said, "green" if verdict.equal else "bold red"),
            Text(name),
        )
    Console(highlight=False, width=max(shutil.get_terminal_size().columns, 112)).print(table)
    reasons: dict[str, list[str]] = {}
    for verdict in found:
        if reason := verdict.refused or verdict.cause:
            reasons.setdefault(reason, []).append(verdict.schedule)
    for reason, names in reasons.items():
        typer.echo(f"\n{', '.join(map(printable, names))}: {reason}")
    unequal = [verdict for verdict in found if not verdict.equal and not verdict.refused]
    if unequal:
        worst = max(unequal, key=lambda verdict: verdict.worst)
        typer.echo(f"\n{len(unequal)} of {len(found)} not equal to one process; the worst: {_offender(worst)}")


def _error(worst: Deviation | None) -> float:
    return 0.0 if worst is None else worst.error


def _offender(verdict: Verdict) -> str:
    where = f"with {printable(verdict.schedule)} the loss"
    if verdict.gradient is not None:
        name, stage, step = printable(verdict.gradient.name), verdict.gradient.stage, verdict.gradient.step
        where = f"the gradient of {name} (stage {stage} of {printable(verdict.schedule)}, step {step})"
        return f"{where} is off by {verdict.gradient.error:.2g} of its size; {verdict.tolerance:g} is allowed"
    return f"{where} is off by {verdict.loss:.2g}; {verdict.tolerance:g} is allowed"
