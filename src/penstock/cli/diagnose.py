"""`penstock diagnose`: from what the ranks of a hung run left behind, find the rank that others wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock.arguments import listed
from penstock.cli.options import AsJson, GivenSchedule, Sizes, given_schedule_from
from penstock.cli.rendering import print_json, report_console
from penstock.cli.usage_errors import with_options
from penstock.ir.kinds import PASS_KINDS
from penstock.service import diagnosis_record, order_of
from penstock.traces.diagnose.diagnosis import Diagnosis, read_evidence
from penstock.traces.diagnose.diagnosis import diagnose as diagnose_pipeline
from penstock.traces.diagnose.rank_state import RankState, excerpt
from penstock.view.grid import grid

_WHERE = {
    "missing": "which left no state",
    "behind": "which has not begun this step",
    "there": "which is there too",
    "passed": "which is past its {counterpart}",
    "not in its list": "whose list has no {counterpart}",
}
_MAX_GRID_STEPS = 4000
"""Steps; the grid of a longer schedule is left out."""


def diagnose(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="The folder with the state files of the ranks, or with dumps of torch's flight recorder.",
        ),
    ],
    *,
    schedule: GivenSchedule = None,
    sizes: Sizes,
    as_json: AsJson = False,
) -> None:
    """Set PENSTOCK_STATE_DIR when you start the run: each rank then writes its state there when a step fails or
    makes no progress, and on SIGUSR1. State files have the schedules of ranks, flight records need --schedule.

    Exit code 0: the files were read. 1: a file is damaged. 2: no such folder, or wrong usage.

    Examples:
      penstock diagnose states/
      penstock diagnose states/ --schedule mine.csv
      penstock diagnose /tmp/nccl_traces --schedule 1f1b -p 4 -m 8
      penstock diagnose states/ --json
    """
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder}: {'not a directory' if folder.exists() else 'no such directory'}")
    given = given_schedule_from(schedule, sizes)
    evidence = read_evidence(folder, given)
    found = [diagnose_pipeline(pipeline, given) for pipeline in evidence.pipelines]
    if as_json:
        print_json({"pipelines": [diagnosis_record(each) for each in found], "notes": list(evidence.notes)})
        return
    console = report_console()
    for number, each in enumerate(found):
        if len(found) > 1:
            typer.echo("\n" * bool(number) + f"pipeline of world ranks {listed(each.members)}")
        _print(each, console)
    for note in evidence.notes:
        typer.echo(f"note: {note}")


def _print(diagnosis: Diagnosis, console: Console) -> None:
    schedule = diagnosis.schedule
    typer.echo(f"schedule: {order_of(schedule)}")
    if diagnosis.culprit is None:
        typer.echo("culprit: none found; no rank waits for a message of another rank")
    else:
        typer.echo(f"culprit: {diagnosis.culprit}\n  {diagnosis.culprit.message}")
    for finding in diagnosis.findings[1:]:
        typer.echo(f"also: {finding}\n  {finding.message}")
    typer.echo("\nwhere each rank is:")
    for rank in range(schedule.num_ranks):
        world_rank = diagnosis.members[rank]
        name = f"rank {rank}" if world_rank == rank else f"rank {rank} (world rank {world_rank})"
        typer.echo(f"  {name}  {_where(diagnosis, rank)}")
    if schedule.num_steps <= _MAX_GRID_STEPS:
        typer.echo()
        console.print(grid(schedule.only(PASS_KINDS), console.width, _marked(diagnosis)))
        typer.echo("[..]: the next action of a rank, or the one that it is in")
    for each in diagnosis.notes:
        typer.echo(f"note: {with_options(each)}")


def _where(diagnosis: Diagnosis, rank: int) -> str:
    state = diagnosis.states.get(rank)
    if state is None:
        return "no state"
    if not state.runs:
        where = "connecting" if state.mode == "connecting" else f"in {state.mode}"
        return f"{'outside of steps' if state.mode == 'outside' else where}, after step {state.step_number}"
    step = f"{state.name}: " if state.step_number or state.mode == "eval" else ""
    return f"{step}{excerpt(state.steps, state.position)}   {_doing(diagnosis, state)}".rstrip()


def _doing(diagnosis: Diagnosis, state: RankState) -> str:
    wait = diagnosis.waits.get(state.rank)
    if wait is None:
        if state.waiting_for:
            return f"waits for {state.waiting_for}"
        return "" if state.position < 0 or not state.action else "waits for no message"
    peer = diagnosis.states.get(wait.for_rank)
    where = _WHERE.get(wait.peer, "")
    if wait.peer == "on its way" and peer is not None:
        where = f"which is at {peer.action}" if peer.action else "which has not begun"
    of = "from" if wait.is_receive else "to be received by"
    return f"waits for {wait.message} {of} rank {wait.for_rank}, {where.format(counterpart=wait.counterpart)}"


def _marked(diagnosis: Diagnosis) -> dict[int, int]:
    """Per rank: the number of its current or next computation; none if unknown, or if it has finished."""
    marked = {}
    for rank, state in diagnosis.states.items():
        row = diagnosis.schedule.ranks[rank]
        if not state.runs or state.position < 0 or state.steps != tuple(map(str, row)):
            continue
        computes = [step.parts[0].kind in PASS_KINDS for step in row]
        if (number := sum(computes[: state.position])) < sum(computes):
            marked[rank] = number
    return marked
