"""`penstock verify-grads`: train a model in one process and in pipelines, and compare the gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from penstock.arguments import printable
from penstock.cli.options import AsJson, GraphSizes, ScheduleSources, schedules_from
from penstock.cli.rendering import empty_table, print_json, print_table, progress_bar
from penstock.families import families
from penstock.ir.schedule import Schedule
from penstock.service import verification_record

if TYPE_CHECKING:
    from penstock.runtime.verification import Verdict


def verify_grads(
    function: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="Returns model or stages, loss, inputs, target; as by python -m."
        ),
    ],
    schedules: ScheduleSources = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All families that have a backward.")] = False,
    sizes: GraphSizes,
    steps: Annotated[int, typer.Option("--steps", "-k", min=1, help="Number of training steps.")] = 2,
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", metavar="SHARE", help="Largest allowed relative error, e.g. 1e-4."),
    ] = None,
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
    if every and schedules:
        raise typer.BadParameter("--all selects every family: remove it, or the names")
    names = [name for name in families() if name != "forward-only"] if every else schedules
    if not names:
        raise typer.BadParameter("name the schedules, e.g. 1f1b zbv, or give --all")
    found = _verify(function, list(schedules_from(names, sizes)), steps, tolerance)
    if as_json:
        print_json(verification_record(found))
    else:
        _print(found)
    if all(verdict.rejected for verdict in found):
        raise typer.Exit(2)
    raise typer.Exit(0 if all(verdict.equal for verdict in found) else 1)


def _verify(function: str, schedules: list[Schedule], steps: int, tolerance: float | None) -> list[Verdict]:
    from penstock.runtime.verification import verdicts  # noqa: PLC0415 -- torch, which is an extra

    found: list[Verdict] = []
    with progress_bar() as bar:
        task = bar.add_task("starting", total=len(schedules))
        for verdict in verdicts(function, schedules, steps=steps, tolerance=tolerance):
            found.append(verdict)
            bar.update(task, advance=1, description=f"{printable(verdict.schedule)} done")
    return found


def _print(found: list[Verdict]) -> None:
    table = empty_table("schedule", "loss", "gradient", "norm", "parameters", left=1)
    table.add_column("")
    table.add_column("worst gradient", overflow="fold")
    for verdict in found:
        outcome = "equal" if verdict.equal else "rejected" if verdict.rejected else "NOT EQUAL"
        gradient, parameter = (each.error if each else 0.0 for each in (verdict.gradient, verdict.parameter))
        errors = (verdict.loss, gradient, verdict.norm, parameter)
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


def _worst(verdict: Verdict) -> str:
    schedule, allowed = printable(verdict.schedule), f"allowed: {verdict.tolerance:g}"
    if verdict.gradient is None:
        return f"the loss with {schedule}, error {verdict.loss:.2g}; {allowed}"
    name, stage, step = printable(verdict.gradient.name), verdict.gradient.stage, verdict.gradient.step
    where = f"the gradient of {name} (stage {stage} of {schedule}, step {step})"
    return f"{where}, relative error {verdict.gradient.error:.2g}; {allowed}"
