"""`penstock verify-grads`: train a model in one process and in pipelines, and compare the gradients."""

from __future__ import annotations

import json
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from penstock.arguments import printable
from penstock.cli.options import AsJson, GraphSizes, complete_family, schedules_from
from penstock.cli.rendering import print_table
from penstock.families import families
from penstock.ir.schedule import Schedule

if TYPE_CHECKING:
    from penstock.runtime.verification import Deviation, Verdict


ModelFunction: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION", help="Returns model or stages, loss, inputs, target; as by python -m."
    ),
]
ScheduleSources: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME|FILE...", help="Families, or .csv or .json files.", autocompletion=complete_family
    ),
]
AllFamilies: TypeAlias = Annotated[bool, typer.Option("--all", help="All families that have a backward.")]
StepCount: TypeAlias = Annotated[int, typer.Option("--steps", "-k", min=1, help="Number of training steps.")]
Tolerance: TypeAlias = Annotated[
    float | None,
    typer.Option("--tolerance", metavar="SHARE", help="Largest allowed relative error, e.g. 1e-4."),
]


def verify_grads(
    function: ModelFunction,
    schedules: ScheduleSources = None,
    *,
    every: AllFamilies = False,
    sizes: GraphSizes,
    steps: StepCount = 2,
    tolerance: Tolerance = None,
    as_json: AsJson = False,
) -> None:
    """The function returns the model (an nn.Sequential, a decoder of transformers, or a list of stages of your
    own), the loss, the inputs and the target of one batch; or a dict with these, kwargs and tokens. Exit code
    0: all equal. 1: something differs. 2: nothing could be compared.

    Examples:
      penstock verify-grads examples.train:parts 1f1b zbv -p 2 -m 4
      penstock verify-grads my_model:parts --all -p 2 -m 8 --steps 3
      penstock verify-grads my_model:parts mine.csv --tolerance 1e-6 --json
    """
    if tolerance is not None and not tolerance > 0:
        raise typer.BadParameter(
            f"--tolerance must be a relative error above 0, e.g. 1e-4 (given {tolerance:g})"
        )
    verified = list(schedules_from(_names(schedules or [], every=every), sizes))
    found = _verify(function, verified, steps, tolerance)
    if as_json:
        typer.echo(json.dumps(_record(found), indent=2, allow_nan=False))
    else:
        _print(found)
    if all(verdict.rejected for verdict in found):
        raise typer.Exit(2)
    raise typer.Exit(0 if all(verdict.equal for verdict in found) else 1)


def _verify(function: str, schedules: list[Schedule], steps: int, tolerance: float | None) -> list[Verdict]:
    from penstock.runtime.verification import verdicts  # noqa: PLC0415 -- torch, which is an extra

    found: list[Verdict] = []
    stderr = Console(stderr=True)
    with Progress(console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("starting", total=len(schedules))
        for verdict in verdicts(function, schedules, steps=steps, tolerance=tolerance):
            found.append(verdict)
            bar.update(task, advance=1, description=f"{printable(verdict.schedule)} done")
    return found


def _names(names: list[str], *, every: bool) -> list[str]:
    if every and names:
        raise typer.BadParameter("--all selects every family: remove it, or the names")
    if every:
        return [name for name in families() if name != "forward-only"]
    if not names:
        raise typer.BadParameter("name the schedules, e.g. 1f1b zbv, or give --all")
    return names


# --- output ----------------------------------------------------------------------------------------


def _record(found: list[Verdict]) -> dict[str, Any]:
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
                "rejected": verdict.rejected or None,
                "cause": verdict.cause or None,
            }
            for verdict in found
        ],
    }


def _number(error: float) -> float | None:
    """None where the error is not finite, which JSON cannot represent."""
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
        outcome = "equal" if verdict.equal else "rejected" if verdict.rejected else "NOT EQUAL"
        errors = (verdict.loss, _error(verdict.gradient), verdict.norm, _error(verdict.parameter))
        numbers = ["-" if verdict.rejected else f"{error:.1e}" for error in errors]
        name = "" if verdict.gradient is None else printable(verdict.gradient.name)
        table.add_row(
            Text(printable(verdict.schedule)),
            *map(Text, numbers),
            Text(outcome, "green" if verdict.equal else "bold red"),
            Text(name),
        )
    print_table(table)
    reasons: dict[str, list[str]] = {}
    for verdict in found:
        if reason := verdict.rejected or verdict.cause:
            reasons.setdefault(reason, []).append(verdict.schedule)
    for reason, names in reasons.items():
        typer.echo(f"\n{', '.join(map(printable, names))}: {reason}")
    unequal = [verdict for verdict in found if not verdict.equal and not verdict.rejected]
    if unequal:
        worst = max(unequal, key=lambda verdict: verdict.worst)
        typer.echo(f"\n{len(unequal)} of {len(found)} differ from one process; worst: {_worst(worst)}")


def _error(worst: Deviation | None) -> float:
    return 0.0 if worst is None else worst.error


def _worst(verdict: Verdict) -> str:
    schedule, allowed = printable(verdict.schedule), f"allowed: {verdict.tolerance:g}"
    if verdict.gradient is None:
        return f"the loss with {schedule}, error {verdict.loss:.2g}; {allowed}"
    name, stage, step = printable(verdict.gradient.name), verdict.gradient.stage, verdict.gradient.step
    where = f"the gradient of {name} (stage {stage} of {schedule}, step {step})"
    return f"{where}, relative error {verdict.gradient.error:.2g}; {allowed}"
