"""`penstock list`: the schedule families that can be built."""

from __future__ import annotations

import json

import typer

from penstock.cli.options import AsJson
from penstock.families import families


def list_families(*, as_json: AsJson = False) -> None:
    """
    Examples:
      penstock list
      penstock list --json
    """
    known = families().values()
    if as_json:
        records = [
            {
                "name": family.name,
                "summary": family.summary,
                "stages_per_rank": family.stages_per_rank,
                "aliases": list(family.aliases),
                "group": family.smallest_group is not None,
            }
            for family in known
        ]
        typer.echo(json.dumps(records, indent=2))
        return
    width = max(len(family.name) for family in known)
    typer.echo(f"{'name':<{width}}  stages per rank  description")
    for family in known:
        stages = "any" if family.stages_per_rank is None else str(family.stages_per_rank)
        typer.echo(f"{family.name:<{width}}  {stages:<15}  {family.summary}")
