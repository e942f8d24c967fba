"""`penstock list`: what can be built."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from penstock.families import families

__all__ = ["list_families"]


def list_families(*, as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False) -> None:
    """List the families of schedules that can be built.

    Examples:
      penstock list
      penstock list --json
    """
    known = families().values()
    if as_json:
        answer = [
            {
                "name": family.name,
                "summary": family.summary,
                "stages_per_rank": family.stages_per_rank,
                "aliases": list(family.aliases),
            }
            for family in known
        ]
        typer.echo(json.dumps(answer, indent=2))
        return
    width = max(len(family.name) for family in known)
    typer.echo(f"{'name':<{width}}  stages per rank  what it is")
    for family in known:
        stages = "any" if family.stages_per_rank is None else str(family.stages_per_rank)
        typer.echo(f"{family.name:<{width}}  {stages:<15}  {family.summary}")
