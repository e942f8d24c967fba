"""Random schedules for real runs, and other valid positions of their receives."""

from __future__ import annotations

import random

from penstock import Action, Kind, Overlap, Placement, Schedule, lower
from penstock.ir.action import Step
from penstock.lowering import AddCommunication, DeferReceives, Pass
from tests.support.random_schedules import _inputs_done

__all__ = ["early", "late", "random_schedule", "randomly_lowered"]


def random_schedule(rng: random.Random, p: int) -> Schedule:
    """Random placement and order, backwards split or not, some pairs overlapped."""
    hosts = list(range(p)) + [rng.randrange(p) for _ in range(rng.randint(0, 3))]
    rng.shuffle(hosts)
    placement, stages, m = Placement(tuple(hosts)), len(hosts), rng.randint(1, 5)
    waiting = {Action(Kind.F, s, k) for s in range(stages) for k in range(m)}
    share = rng.choice((0, 0.5, 1))
    for s in range(stages):
        for k in range(m):
            kinds = (Kind.I, Kind.W) if rng.random() < share else (Kind.B,)
            waiting |= {Action(kind, s, k) for kind in kinds}
    done: set[Action] = set()
    rows: list[list[Step]] = [[] for _ in range(p)]
    while waiting:
        ready = sorted((a for a in waiting if _inputs_done(a, done, stages)), key=str)
        first = rng.choice(ready)
        rank = hosts[first.stage]
        step: Step = first
        partners = [b for b in ready if b.kind in (Kind.B, Kind.I) and hosts[b.stage] == rank]
        if first.kind is Kind.F and partners and rng.random() < 0.3:
            step = Overlap(first, rng.choice(partners))
        rows[rank].append(step)
        done |= set(step.parts)
        waiting -= set(step.parts)
    return Schedule(rows, placement, m, "random")


def randomly_lowered(rng: random.Random, schedule: Schedule) -> Schedule:
    how = rng.choice(("not", "default", "communication", "deferred", "far deferred", "early", "late"))
    if how == "not":
        return schedule
    if how == "default":
        return lower(schedule)
    passes: list[Pass] = [AddCommunication()]
    if how.endswith("deferred"):
        passes.append(DeferReceives(past_sends=how == "far deferred"))
    schedule = lower(schedule, passes)
    return early(schedule) if how == "early" else late(schedule) if how == "late" else schedule


def early(schedule: Schedule) -> Schedule:
    """All receives in front of everything else."""
    rows = [sorted(row, key=lambda step: not step.kind.is_receive) for row in schedule.ranks]
    return Schedule(rows, schedule.placement, schedule.microbatches, f"{schedule.name} early")


def late(schedule: Schedule) -> Schedule:
    """Each receive right before the step that uses it."""
    uses = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    rows = []
    for row in schedule.ranks:
        receives = {step for step in row if step.kind.is_receive}
        moved: list[Step] = []
        for step in row:
            if step in receives:
                continue
            wanted = [Action(uses[a.kind], a.stage, a.microbatch) for a in step.parts if a.kind in uses]
            moved += [receive for receive in wanted if receive in receives]
            moved.append(step)
        rows.append(moved)
    return Schedule(rows, schedule.placement, schedule.microbatches, f"{schedule.name} late")
