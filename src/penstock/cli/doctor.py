"""`penstock doctor`: check Python, torch, backends, ports, name resolution and clocks."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from penstock import __version__
from penstock.cli.options import AsJson
from penstock.diagnostics import (
    Check,
    Verdict,
    core_checks,
    extra_checks,
    machine_checks,
    name_checks,
    torch_checks,
)

__all__ = ["doctor"]

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(*, as_json: AsJson = False) -> None:
    """Check this machine: Python, torch and its backends, ports, name resolution, clocks, extras.

    One line per check: ok, warn (something is slow or unavailable) or fail. Exit code 1 if a check fails.
    With torch, two processes exchange a tensor; this takes a few seconds, at most two minutes.

    Examples:
      penstock doctor
      penstock doctor --json
    """
    extras = extra_checks()
    checks = [*core_checks(__version__), *machine_checks(), *name_checks(), *extras]
    if {check.name: check.verdict for check in extras}["extra torch"] == "ok":
        checks += torch_checks()
    worst = _worst(checks)
    if as_json:
        typer.echo(json.dumps({"verdict": worst, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print(checks)
    raise typer.Exit(1 if worst == "fail" else 0)


def _worst(checks: list[Check]) -> Verdict:
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next(verdict for verdict in order if any(check.verdict == verdict for check in checks))


def _print(checks: list[Check]) -> None:
    console = Console(highlight=False, markup=False)
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = (f"{check.verdict:<4}", STYLES[check.verdict])
        console.print(Text.assemble(verdict, f"  {check.name:<{width}}  {check.message}"), soft_wrap=True)
