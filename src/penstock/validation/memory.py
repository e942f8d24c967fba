"""Rules on RECOMPUTE, OFFLOAD and RELOAD; each applies to the stages and microbatches that have such actions.

That they come after F, in their order and before their use are rules of `order_on_rank`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.ir.kinds import MEMORY_KINDS, Kind
from penstock.ir.table import ActionTable, Ints
from penstock.validation.violation import Violation, part_at, violation_at

__all__ = ["held_when_offloaded", "needed_by_a_backward", "reloaded_once"]


def needed_by_a_backward(table: ActionTable) -> Iterator[Violation]:
    """Without a backward, nothing uses what is recomputed or reloaded."""
    if table.has(Kind.I, Kind.W, Kind.B) or not table.has(*MEMORY_KINDS):
        return
    for kind in MEMORY_KINDS:
        code = "needless-recompute" if kind is Kind.RECOMPUTE else "needless-offload"
        for part in np.flatnonzero(table.of_kind(kind) & table.well_placed).tolist():
            message = "no backward uses the activation: the schedule has forwards only"
            yield violation_at(table, part, code, message, "remove it, or add the backwards")


def reloaded_once(table: ActionTable) -> Iterator[Violation]:
    """What is offloaded is reloaded, and nothing else."""
    if not table.has(Kind.OFFLOAD, Kind.RELOAD):
        return
    offload, reload = table.at(Kind.OFFLOAD), table.at(Kind.RELOAD)
    for part in offload[(offload >= 0) & (reload < 0)].tolist():
        message = "it is never reloaded, but the backward needs it"
        suggestion = "add the RELOAD before the backward, or remove this"
        yield violation_at(table, part, "missing-reload", message, suggestion)
    for part in reload[(reload >= 0) & (offload < 0)].tolist():
        message = "it was never offloaded: nothing is on the host"
        suggestion = "add the OFFLOAD after the forward, or remove this"
        yield violation_at(table, part, "reload-without-offload", message, suggestion)


def held_when_offloaded(table: ActionTable) -> Iterator[Violation]:
    """OFFLOAD copies what F holds: not what a backward has freed, nor what RECOMPUTE has made again."""
    if not table.has(Kind.OFFLOAD):
        return
    offload = table.at(Kind.OFFLOAD)
    for part, used in _pairs_after(table, offload, table.input_gradient):
        _, step, action = part_at(table, used)
        message = f"it comes after {action} at step {step}, which frees what it would copy"
        yield violation_at(table, part, "offload-after-backward", message, f"move it before {action}")
    for part, made in _pairs_after(table, offload, table.at(Kind.RECOMPUTE)):
        _, step, action = part_at(table, made)
        message = f"it comes after {action} at step {step}: the same bytes are recomputed and offloaded"
        suggestion = f"move it, and its RELOAD, before {action}, or remove one of the two"
        yield violation_at(table, part, "offload-after-recompute", message, suggestion)


def _pairs_after(table: ActionTable, late: Ints, early: Ints) -> Iterator[tuple[int, int]]:
    """Parts of the same stage and microbatch of which the first comes after the second."""
    after = (early >= 0) & (table.slots_of(late) > table.slots_of(early))
    return zip(late[after].tolist(), early[after].tolist())
