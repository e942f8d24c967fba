"""Random schedules that are valid by construction, and single changes to them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from penstock import Action, Kind, Overlap, Placement, Schedule, lower
from penstock.ir.action import Step
from penstock.lowering import AddCommunication, AddGradReduction, AddSharding, DeferReceives, Pass


def random_placement(rng: random.Random) -> Placement:
    ranks = rng.randint(1, 3)
    shape = rng.choice(("loop", "v", "custom"))
    if shape == "custom":
        stages = list(range(ranks)) + [rng.randrange(ranks) for _ in range(rng.randint(0, 2))]
        rng.shuffle(stages)
        return Placement(tuple(stages))
    legs = rng.randint(1, 2)
    return Placement.loop(ranks, legs) if shape == "loop" else Placement.v(ranks, legs)


def random_compute(rng: random.Random) -> Schedule:
    """A random legal interleaving: again and again, some rank does something whose inputs are there."""
    placement = random_placement(rng)
    stages, microbatches = placement.num_stages, rng.randint(1, 3)
    trains = rng.random() < 0.9
    waiting = {Action(Kind.F, s, k) for s in range(stages) for k in range(microbatches)}
    if trains:
        for s in range(stages):
            for k in range(microbatches):
                waiting |= (
                    {Action(Kind.I, s, k), Action(Kind.W, s, k)}
                    if rng.random() < 0.5
                    else {Action(Kind.B, s, k)}
                )
    done: set[Action] = set()
    rows: list[list[Step]] = [[] for _ in range(placement.num_ranks)]
    while waiting:
        ready = sorted((a for a in waiting if _inputs_done(a, done, stages)), key=str)
        first = rng.choice(ready)
        rank = placement.stage_to_rank[first.stage]
        step: Step = first
        partners = [b for b in ready if b.kind in (Kind.B, Kind.I) and placement.stage_to_rank[b.stage] == rank]
        if first.kind is Kind.F and partners and rng.random() < 0.5:
            step = Overlap(first, rng.choice(partners))
        rows[rank].append(step)
        done |= set(step.parts)
        waiting -= set(step.parts)
    return Schedule(rows, placement, microbatches)


def _inputs_done(action: Action, done: set[Action], stages: int) -> bool:
    s, k = action.stage, action.microbatch
    if action.kind is Kind.F:
        return s == 0 or Action(Kind.F, s - 1, k) in done
    if action.kind is Kind.W:
        return Action(Kind.I, s, k) in done
    above = s == stages - 1 or bool({Action(Kind.I, s + 1, k), Action(Kind.B, s + 1, k)} & done)
    return Action(Kind.F, s, k) in done and above


def random_valid(rng: random.Random) -> Schedule:
    """Compute only, or with some of the passes that lower it."""
    schedule = random_compute(rng)
    if rng.random() < 0.4 and schedule.table.has(Kind.I, Kind.B):
        schedule = with_memory_actions(rng, schedule)
    passes: list[Pass] = []
    if rng.random() < 0.5:
        passes.append(AddSharding(rng.randint(1, 3)))
    if rng.random() < 0.5:
        passes.append(AddGradReduction())
    if rng.random() < 0.7:
        passes.append(AddCommunication())
        if rng.random() < 0.3 and schedule.num_ranks > 1:
            passes.append(DeferReceives())
    lowered = lower(schedule, passes)
    return with_waits(rng, lowered) if rng.random() < 0.5 else lowered


def with_waits(rng: random.Random, schedule: Schedule) -> Schedule:
    """Waits for all sends, for all reductions, or both, anywhere after what they wait for; it may deadlock."""
    begun: dict[Kind, Kind] = {}
    if rng.random() < 0.8:
        begun |= {Kind.SEND_F: Kind.WAIT_SEND_F, Kind.SEND_B: Kind.WAIT_SEND_B}
    if rng.random() < 0.5:
        begun[Kind.REDUCE_GRAD] = Kind.WAIT_REDUCE_GRAD
    soon = rng.random() < 0.5
    rows = [list(row) for row in schedule.ranks]
    for row in rows:
        for step in [step for step in row if step.kind in begun]:
            assert isinstance(step, Action)
            first = row.index(step) + 1
            last = min(first + 2, len(row)) if soon else len(row)
            row.insert(rng.randint(first, last), Action(begun[step.kind], step.stage, step.microbatch))
    return Schedule(rows, schedule.placement, schedule.microbatches)


def with_memory_actions(rng: random.Random, schedule: Schedule) -> Schedule:
    """Some microbatches of a training schedule recomputed, offloaded or both, anywhere before the backward."""
    rows = [list(row) for row in schedule.ranks]
    for stage, rank in enumerate(schedule.placement.stage_to_rank):
        for k in range(schedule.microbatches):
            kinds = rng.choice(
                (
                    *((), (Kind.RECOMPUTE,), (Kind.OFFLOAD, Kind.RELOAD)),
                    (Kind.OFFLOAD, Kind.RELOAD, Kind.RECOMPUTE),
                )
            )
            own = {Action(kind, stage, k) for kind in (Kind.F, Kind.I, Kind.B)}
            first, last = (i for i, step in enumerate(rows[rank]) if own & set(step.parts))
            places = sorted(rng.randint(first + 1, last) for _ in kinds)
            for n, (place, kind) in enumerate(zip(places, kinds, strict=True)):
                rows[rank].insert(place + n, Action(kind, stage, k))
    return Schedule(rows, schedule.placement, schedule.microbatches)


@dataclass(frozen=True)
class Mutation:
    what: str
    schedule: Schedule


def mutate(schedule: Schedule, rng: random.Random) -> Mutation:
    """One change: drop, duplicate, swap, move to another rank, or another id."""
    rows = [list(row) for row in schedule.ranks]
    rank = rng.choice([r for r, row in enumerate(rows) if row])
    row = rows[rank]
    i = rng.randrange(len(row))
    what = rng.choice(("drop", "duplicate", "swap", "shift", "move", "stage", "microbatch"))
    if what == "drop":
        del row[i]
    elif what == "duplicate":
        row.insert(rng.randint(0, len(row)), row[i])
    elif what == "swap":
        j = rng.randrange(len(row))
        row[i], row[j] = row[j], row[i]
    elif what == "shift":
        row.insert(rng.randrange(len(row)), row.pop(i))
    elif what == "move":
        other = rows[rng.randrange(len(rows))]
        other.insert(rng.randint(0, len(other)), row.pop(i))
    else:
        row[i] = _renumbered(row[i], what, rng, schedule)
    return Mutation(what, Schedule(rows, schedule.placement, schedule.microbatches))


def _renumbered(step: Step, what: str, rng: random.Random, schedule: Schedule) -> Step:
    parts = list(step.parts)
    n = rng.randrange(len(parts))
    part = parts[n]
    if what == "stage":
        parts[n] = Action(part.kind, rng.randint(0, schedule.num_stages), part.microbatch)
    elif part.microbatch is not None:
        parts[n] = Action(part.kind, part.stage, rng.randint(0, schedule.microbatches))
    return Overlap(*parts) if len(parts) == 2 else parts[0]
