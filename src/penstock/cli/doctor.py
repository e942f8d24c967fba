"""`penstock doctor`: check Python, torch, backends, ports, names and clocks; or all processes of a launch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from penstock import __version__
from penstock.arguments import install_command
from penstock.cli.options import AsJson, GivenSchedule, Sizes, given_schedule_from
from penstock.cli.rendering import print_json, report_console, require_suffix
from penstock.cost.costs import Costs
from penstock.diagnostics import (
    Check,
    Verdict,
    core_checks,
    extra_checks,
    machine_checks,
    name_checks,
    torch_checks,
)
from penstock.errors import MissingExtraError

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    *,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Check the processes of a launch; run it under torchrun.")
    ] = False,
    schedule: GivenSchedule = None,
    sizes: Sizes,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="With --distributed: write the links as costs."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="With --distributed: seconds that the processes wait.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """One line per check: ok, warn (something is slow or unavailable) or fail. Exit code 1 if a check fails.
    With torch, two processes exchange a tensor; this takes a few seconds, at most two minutes.

    With --distributed, under torchrun, all processes of the launch take part: rendezvous, versions, world size
    against --schedule, clocks, and latency and bandwidth of each edge, which -o writes as costs. Rank 0 prints.

    Examples:
      penstock doctor
      penstock doctor --json
      torchrun --nproc-per-node 4 -m penstock doctor --distributed
      torchrun --nproc-per-node 4 -m penstock doctor --distributed --schedule mine.csv -o links.toml
    """
    if distributed:
        _distributed(schedule, sizes, output, timeout, as_json=as_json)
    given = {"--schedule": schedule, "--output": output, **dict.fromkeys(sizes.given, True)}
    if names := [name for name, value in given.items() if value is not None]:
        raise typer.BadParameter(f"only with --distributed: {', '.join(names)}")
    extras = extra_checks()
    checks = [*core_checks(__version__), *machine_checks(), *name_checks(), *extras]
    if {check.name: check.verdict for check in extras}["extra torch"] == "ok":
        checks += torch_checks()
    _finish(checks, as_json=as_json)


def _distributed(
    source: str | None, sizes: Sizes, output: Path | None, seconds: float, *, as_json: bool
) -> None:
    """Run the checks of a launch in this process of it; only rank 0 prints and writes."""
    require_suffix(output, (".toml", ".json"))
    schedule = given_schedule_from(source, sizes)
    if {check.name: check.verdict for check in extra_checks()}["extra torch"] != "ok":
        raise MissingExtraError(
            "--distributed needs torch, which is not installed: " + install_command("torch")
        )
    from penstock.runtime.doctor import distributed_checks  # noqa: PLC0415 -- needs torch

    report = distributed_checks(schedule, seconds)
    if os.environ.get("RANK", "0") != "0":
        raise typer.Exit(1 if _worst(report.checks) == "fail" else 0)
    if output is not None and report.costs is not None:
        report.costs.write(output)
    if schedule is None and not as_json:
        typer.echo("give --schedule to compare the world size with the ranks of a schedule", err=True)
    _finish(report.checks, report.costs, as_json=as_json)


def _finish(checks: Sequence[Check], costs: Costs | None = None, *, as_json: bool) -> None:
    """Print the checks, and the links as costs; end with the exit code."""
    worst = _worst(checks)
    links = {} if costs is None else costs.to_keys()
    if as_json:
        document: dict[str, Any] = {"verdict": worst, "checks": [asdict(check) for check in checks]}
        print_json(document | ({"costs": links} if costs is not None else {}))
    else:
        console = report_console()
        width = max(len(check.name) for check in checks)
        for check in checks:
            verdict = (f"{check.verdict:<4}", _STYLES[check.verdict])
            console.print(Text.assemble(verdict, f"  {check.name:<{width}}  {check.message}"))
        for key, value in links.items():
            typer.echo(f"{key} = {json.dumps(value)}")
    raise typer.Exit(1 if worst == "fail" else 0)


def _worst(checks: Sequence[Check]) -> Verdict:
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next(verdict for verdict in order if any(check.verdict == verdict for check in checks))
