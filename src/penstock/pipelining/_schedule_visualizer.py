"""torch's functions to list and draw a schedule, with our simulator and pictures instead of matplotlib.

ops = get_schedule_ops("InterleavedZeroBubble", 4, 8)
visualize_schedule(ops, "schedule.svg")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

from rich.console import Console
from torch.distributed.pipelining._schedule_visualizer import OpKey

from penstock.formats import write_bytes
from penstock.pipelining._orders import ActionList, action_of, schedule_of
from penstock.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from penstock.runtime.batch import Value
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.view.png import png
from penstock.view.svg import svg
from penstock.view.terminal import terminal

__all__ = ["OpKey", "add_schedule_op_spacing", "get_schedule_ops", "visualize_schedule"]

RankActions: TypeAlias = Sequence[ActionList]


def get_schedule_ops(
    schedule: str | type[_PipelineSchedule],
    pp_degree: int,
    num_microbatches: int,
    num_stages_per_rank: int | None = None,
    add_spacing: bool = False,  # noqa: FBT001, FBT002 -- torch's signature
    with_comms: bool = False,  # noqa: FBT001, FBT002
    defer_pp_recv: bool = False,  # noqa: FBT001, FBT002
) -> list[ActionList]:
    """Return the actions of each rank; with None where a rank is idle, or with communication."""
    if add_spacing and with_comms:
        raise ValueError("add_spacing and with_comms exclude each other: spacing needs compute actions only")
    schedule_class = _schedule_class(schedule)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    count = num_stages_per_rank or (1 if single else 2)
    if single and count != 1:
        raise AssertionError(f"{schedule_class.__name__} has one stage per rank (given {num_stages_per_rank})")
    about = {"num_stages": pp_degree * count, "group_size": pp_degree, "group_rank": 0, "submod": None}
    stages: list[Value] = [SimpleNamespace(stage_index=nth * pp_degree, **about) for nth in range(count)]
    order = schedule_class(stages[0] if single else stages, num_microbatches).pipeline_order
    if order is None:
        raise AssertionError(f"{schedule_class.__name__} has no order")
    if with_comms:
        runtime = _PipelineScheduleRuntime(stages, num_microbatches, defer_pp_recv=defer_pp_recv)  # type: ignore[no-untyped-call]
        runtime._prepare_schedule_with_comms(order)
        order = runtime.pipeline_order_with_comms
    rows = [list(order[rank]) for rank in range(pp_degree)]
    return add_schedule_op_spacing(rows) if add_spacing else rows


def _schedule_class(schedule: Value) -> Value:
    found = get_schedule_class(schedule) if isinstance(schedule, str) else schedule
    if not (isinstance(found, type) and issubclass(found, PipelineScheduleSingle | PipelineScheduleMulti)):
        raise ValueError(f"a schedule is a name or a schedule class (given {schedule!r})")  # noqa: TRY004
    return found


def add_schedule_op_spacing(schedule: RankActions) -> list[ActionList]:
    """Insert None for each time unit a rank is idle; F, I and W take one, B two, an overlapped pair three."""
    rows: list[ActionList] = [[] for _ in schedule]
    ends = [0.0] * len(rows)
    for event in _timeline(schedule).events if schedule else ():
        rows[event.rank] += [None] * round(event.start - ends[event.rank])
        rows[event.rank].append(action_of(event.step))
        ends[event.rank] = event.end
    return rows


def visualize_schedule(schedule: RankActions, filename: str | None = None) -> None:
    """Draw the schedule to an `.svg` or `.png` file, or to the terminal."""
    timeline = _timeline(schedule)
    if filename is None:
        console = Console()
        console.print(terminal(timeline, console.width))
        return
    suffix = Path(filename).suffix.lower()
    if suffix not in (".svg", ".png"):
        raise ValueError(f"a picture is an .svg or .png file (given {filename!r})")
    write_bytes(svg([timeline]).encode() if suffix == ".svg" else png([timeline]), Path(filename))


def _timeline(schedule: RankActions) -> Timeline:
    return simulate(schedule_of(dict(enumerate(schedule))))
