"""The part of `penstock read-trace` for Megatron-LM's timers: costs of stages, predicted against measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from penstock.arguments import plural
from penstock.cli.progress import file_progress
from penstock.cli.rendering import print_table, say_written
from penstock.formats import write_bytes
from penstock.traces.megatron_timers import MegatronTimers, read_megatron_timers
from penstock.traces.trace_files import size_of

__all__ = ["show_timers"]


def show_timers(
    path: Path, sizes: tuple[int | None, int | None, int | None], outputs: list[Path], *, as_json: bool
) -> None:
    """Print the timers of a log, and write the costs."""
    ranks, microbatches, stages = sizes
    if ranks is None or microbatches is None:
        raise typer.BadParameter(
            f"{path} is not JSON, so it is read as a log of Megatron-LM: give its --ranks and --microbatches"
        )
    if wrong := [str(each) for each in outputs if each.suffix.lower() not in (".toml", ".json")]:
        raise typer.BadParameter(
            f"timers have no order and no timeline, only costs: {', '.join(wrong)} must be .toml or .json"
        )
    with file_progress("reading", size_of(path)) as on_read:
        timers = read_megatron_timers(
            path, ranks=ranks, microbatches=microbatches, stages_per_rank=stages or 1, on_read=on_read
        )
    if as_json:
        typer.echo(json.dumps(_record(timers), indent=2))
    else:
        _print(timers)
    for output in outputs:
        write_bytes(timers.costs.dumps(output.suffix.lower()).encode(), output)
    say_written(*outputs, as_json=as_json)


def _record(timers: MegatronTimers) -> dict[str, Any]:
    return {
        "file": timers.source,
        "schedule": timers.schedule.name,
        "logged": timers.steps,
        "timers": {name: list(times) for name, times in timers.seconds.items()},
        "step": timers.step_seconds,
        "idle": list(timers.idle),
        "costs": timers.costs.to_keys(),
        "predicted": timers.predicted.makespan,
    }


def _print(timers: MegatronTimers) -> None:
    console = Console(highlight=False, markup=False)
    schedule, measured = timers.schedule, timers.step_seconds
    sizes = f"p={schedule.num_ranks}, v={schedule.num_stages // schedule.num_ranks}, m={schedule.microbatches}"
    console.print(f"order     {schedule.name} ({sizes}), as given; timers have none", soft_wrap=True)
    console.print(f"logged    {plural(timers.steps, 'time')}; means per step\n")
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "forward ms", "backward ms", "neither ms", "F ms", "B ms"):
        table.add_column(name, justify="right")
    count = schedule.num_stages
    costs = list(zip(timers.costs.per_stage("forward", count), timers.costs.full_backward(count)))
    for rank, own in enumerate(schedule.placement.stages_of_rank):
        sums = (timers.seconds["forward-compute"][rank], timers.seconds["backward-compute"][rank])
        cells = (*sums, timers.idle[rank], *costs[own[0]])
        table.add_row(str(rank), *(f"{seconds * 1e3:.2f}" for seconds in cells))
    print_table(table, console)
    predicted = timers.predicted.makespan
    console.print(
        f"\nstep      measured {measured * 1e3:.2f} ms, predicted {predicted * 1e3:.2f} ms with free messages "
        f"({predicted / measured - 1:+.1%})",
        soft_wrap=True,
    )
