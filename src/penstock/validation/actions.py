"""Rules on actions: ids in range, each on the rank of its stage, everything exactly once, order on a rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.arguments import number_ranges
from penstock.ir.kinds import Kind
from penstock.ir.table import ActionTable, Bools, Ints
from penstock.validation.violation import Violation, part_at, violation_at

__all__ = ["complete", "ids_in_range", "no_duplicates", "on_rank_of_stage", "order_on_rank"]


def ids_in_range(table: ActionTable) -> Iterator[Violation]:
    """Stages and microbatches exist."""
    stages, microbatches = table.placement.num_stages, table.microbatches
    for part in np.flatnonzero(table.stage >= stages).tolist():
        yield violation_at(
            table,
            part,
            "stage-out-of-range",
            f"there is no stage {table.stage[part]}: the placement has stages 0 to {stages - 1}",
            "correct the stage number, or give a placement that has this stage",
        )
    for part in np.flatnonzero(table.microbatch >= microbatches).tolist():
        yield violation_at(
            table,
            part,
            "microbatch-out-of-range",
            f"there is no microbatch {table.microbatch[part]}: they are 0 to {microbatches - 1}",
            "correct the microbatch number, or give the schedule more microbatches",
        )


def on_rank_of_stage(table: ActionTable) -> Iterator[Violation]:
    """A stage's actions are on its own rank."""
    for part in np.flatnonzero(table.in_range & ~table.well_placed).tolist():
        rank, _, action = part_at(table, part)
        own = table.placement.stage_to_rank[action.stage]
        yield violation_at(
            table,
            part,
            "wrong-rank",
            f"stage {action.stage} is on rank {own}, not on rank {rank}",
            f"move it to rank {own}, or change the placement",
        )


def no_duplicates(table: ActionTable) -> Iterator[Violation]:
    """No action is repeated, except for UNSHARD and RESHARD."""
    if all(kind.spec.repeatable or _each_is_first(table, kind) for kind in table.kinds):
        return
    once = table.well_placed & ~table.of_kind(*(kind for kind in Kind if kind.spec.repeatable))
    cells = table.placement.num_stages * table.microbatches
    key = (table.port * len(Kind) + table.kind) * cells + table.cell
    counts = np.bincount(key[once], minlength=1)
    seen: dict[int, int] = {}
    for part in np.flatnonzero(once & (counts[np.where(once, key, 0)] > 1)).tolist():
        first = seen.setdefault(int(key[part]), part)
        if first != part:
            _, step, action = part_at(table, first)
            yield violation_at(
                table,
                part,
                "duplicate-action",
                f"duplicate action: {action} is already at step {step}",
                "remove one of the two, or correct its number",
            )


def _each_is_first(table: ActionTable, kind: Kind) -> bool:
    """Whether every well-placed part of a kind is the first of its stage, or edge, and microbatch."""
    first = table.message_at(kind) if kind.is_communication else table.at(kind)
    return np.count_nonzero(first >= 0) == table.num_well_placed_parts(kind)


def complete(table: ActionTable) -> Iterator[Violation]:
    """Every stage runs every microbatch: forward, and in a training schedule backward."""
    present = _present(table, Kind.F)
    suggestion = "add it; every stage runs the forward of every microbatch once"
    if not present.any(axis=1).all():
        suggestion += "; stages are numbered from 0 without gaps"
    if not present[:, :1].any():
        suggestion += "; microbatches are numbered from 0"
    yield from _per_stage(table, ~present, "missing-forward", "has no forward (F) of", suggestion)
    if table.has(Kind.I, Kind.W, Kind.B):
        yield from _complete_backward(table)


def _complete_backward(table: ActionTable) -> Iterator[Violation]:
    """Every backward is one B, or I and W."""
    i, w, b = (_present(table, kind) for kind in (Kind.I, Kind.W, Kind.B))
    yield from _per_stage(
        table,
        ~(b | i | w),
        "missing-backward",
        "has no backward of",
        "add B, or I and W; or remove all backwards",
    )
    yield from _per_stage(
        table,
        i & ~w & ~b,
        "missing-weight-gradient",
        "has I but no W of",
        "add the W after its I, or make the I a B",
    )
    yield from _per_stage(
        table,
        w & ~i & ~b,
        "missing-input-gradient",
        "has W but no I of",
        "add the I before its W, or make the W a B",
    )
    yield from _per_stage(
        table,
        b & (i | w),
        "mixed-backward",
        "has both B and I or W of",
        "use B, or I and W, for one microbatch of a stage, not both",
    )


def _present(table: ActionTable, kind: Kind) -> Bools:
    """Per stage and microbatch: whether there is one, on whatever rank."""
    if table.all_well_placed:
        present: Bools = table.at(kind) >= 0
        return present
    found = np.zeros(table.placement.num_stages * table.microbatches, dtype=np.bool_)
    found[table.cell[table.of_kind(kind) & table.in_range]] = True
    return found.reshape(-1, table.microbatches)


def _per_stage(table: ActionTable, faulty: Bools, code: str, what: str, suggestion: str) -> Iterator[Violation]:
    for stage in np.flatnonzero(faulty.any(axis=1)).tolist():
        numbers = np.flatnonzero(faulty[stage]).tolist()
        noun = "microbatch" if len(numbers) == 1 else "microbatches"
        rank = table.placement.stage_to_rank[stage]
        yield Violation(code, f"stage {stage} {what} {noun} {number_ranges(numbers)}", suggestion, rank)


_ORDER = {
    "forward": ("backward-before-forward", "comes before the forward it needs"),
    "input gradient": ("weight-before-input", "comes before the input gradient (I) it needs"),
    "activation": ("used-before-computed", "comes before the activation it needs"),
    "gradient": ("used-before-computed", "comes before the gradient it needs"),
    "forward to recompute": ("recompute-before-forward", "comes before the forward it repeats"),
    "forward to offload": ("offload-before-forward", "comes before the forward whose activation it copies"),
    "offloaded activation": ("reload-before-offload", "comes before the OFFLOAD whose copy it needs"),
    "recomputed activation": ("used-before-recomputed", "comes before the RECOMPUTE of what it needs"),
    "reloaded activation": ("used-before-reloaded", "comes before the RELOAD of what it needs"),
    "reloaded checkpoint": ("used-before-reloaded", "comes before the RELOAD of what it needs"),
}


def order_on_rank(table: ActionTable) -> Iterator[Violation]:
    """What a rank computes itself, it computes before it uses it."""
    for what, producer, consumer in (*table.within_stage, *table.between_stages):
        late = _not_before(table, producer, consumer)
        for made_by, used_by in zip(producer[late].tolist(), consumer[late].tolist()):
            rank, step, action = part_at(table, made_by)
            code, text = _ORDER[what]
            if table.slot[made_by] == table.slot[used_by]:
                code, text = "overlap-dependent", "runs as one step with the action it needs"
            yield violation_at(
                table,
                used_by,
                code,
                f"it {text}, {action} at step {step} of rank {rank}",
                f"move it after {action}",
            )


def _not_before(table: ActionTable, producer: Ints, consumer: Ints) -> Bools:
    """Where both exist, on one rank, and the producer does not come first."""
    made, used = table.slots_of(producer), table.slots_of(consumer)
    late: Bools = (used >= 0) & (made >= used)
    late[late] = table.rank[made[late]] == table.rank[used[late]]
    return late
