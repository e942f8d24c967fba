"""torch's schedules as text, created without processes: the oracle for the families and the lowering."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import schedules

from penstock import Placement, Schedule, parse_action
from penstock.lowering import TORCH_PASSES

torch_schedules: Any = schedules  # private functions, used without types
Rows = list[list[str]]

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
VERSION = "{}.{}".format(*RELEASE) if RELEASE < (2, 15) else "2.15"
"""What `lower(torch=)` calls the installed torch; the lists have been the same since 2.15."""

PASSES = TORCH_PASSES[VERSION]
HAS_WAITS = RELEASE >= (2, 15)


class Recorder:
    """A stage that computes nothing and records the calls of a schedule."""

    def __init__(self, stage: int, stages: int, ranks: int, log: list[str]) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.group_size, self.group_rank = ranks, stage % ranks
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.submod, self.has_backward = None, True
        self.log = log

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.log.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.log.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


def running_order(name: str, ranks: int, microbatches: int) -> Rows:
    """Return the actions that a single-stage schedule of torch executes, per rank."""
    rows: Rows = []
    for rank in range(ranks):
        log: list[str] = []
        stage = Recorder(rank, ranks, ranks, log)
        schedule = torch_schedules.get_schedule_class(name)(stage, microbatches)
        schedule._has_backward = True
        schedule._initialize_stage = lambda *_, **__: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches, None, None)
        rows.append(log)
    return rows


def built(name: str, ranks: int, stages_per_rank: int, microbatches: int, **options: Any) -> Any:
    """Create a schedule of torch; raises ValueError if torch rejects the arguments."""
    stages = [Recorder(i * ranks, ranks * stages_per_rank, ranks, []) for i in range(stages_per_rank)]
    return torch_schedules.get_schedule_class(name)(stages, microbatches, loss_fn=lambda *_: None, **options)


def built_schedule(theirs: Any, microbatches: int) -> Schedule:
    """The lowered lists of a schedule of torch."""
    hosts = theirs.stage_index_to_group_rank
    placement = Placement(tuple(hosts[stage] for stage in range(len(hosts))))
    rows = [list(map(parse_action, row)) for row in as_rows(theirs.pipeline_order_with_comms)]
    return Schedule(rows, placement, microbatches)


def as_rows(order: dict[int, list[Any]]) -> Rows:
    """Convert actions to text, without idle slots."""
    return [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]


def as_order(rows: Rows) -> dict[int, list[Any]]:
    """Convert text to torch's actions."""
    return {rank: [torch_schedules._Action.from_str(text) for text in row] for rank, row in enumerate(rows)}


UNKNOWN_TO_ITS_SIMULATOR = ("UNSHARD", "RESHARD", "REDUCE_GRAD")


def dry_run(schedule: Any) -> int:
    """Return the number of unit steps in torch's simulator, without the kinds it does not know."""
    known = {
        rank: [action for action in actions if not str(action).endswith(UNKNOWN_TO_ITS_SIMULATOR)]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }
    steps = torch_schedules._simulate_comms_compute(
        known, lambda stage: schedule.stage_index_to_group_rank[stage], schedule._num_stages
    )
    return max(map(len, steps.values()))


def merged(rows: Rows) -> Rows:
    """Apply torch's pass that merges adjacent I and W."""
    return as_rows({rank: torch_schedules._merge_bw(row) for rank, row in as_order(rows).items()})


def lowered(rows: Rows, stage_to_rank: dict[int, int], microbatches: int, *, defer: bool = False) -> Rows:
    """Lower a compute order with torch's passes."""
    num_stages = len(stage_to_rank)
    order = {
        rank: torch_schedules._add_reduce_grad(torch_schedules._add_unshard_reshard(actions), microbatches)
        for rank, actions in as_order(rows).items()
    }
    order = torch_schedules._add_send_recv(order, lambda stage: stage_to_rank[stage], num_stages)
    if HAS_WAITS:
        order = torch_schedules._add_wait_send(order)
    if defer:
        order = torch_schedules._defer_recv_ops(order, lambda stage: stage_to_rank[stage])
    return as_rows(order)
